"""Shards: each one fits its budget and can be read alone, and together they hold what left the residual."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codec.codec import Codec, Kernels
from thinwire.codec.encode import NonFinite, encode_shards
from thinwire.codec.frame import ShardReader
from thinwire.codec.selection import RandomK, Rotate, Selection, TopK
from thinwire.codec.values import Bits, Float32, Values
from thinwire.errors import FrameError


@given(
    sizes=st.lists(st.integers(1, 6000), min_size=1, max_size=5),
    budget=st.integers(200, 1400),
    selection=st.sampled_from([TopK(0.05), TopK(1.0), RandomK(0.1), Rotate(0.3)]),
    exact=st.booleans(),
    kernels=st.sampled_from(["native", "torch"]),
    hold=st.integers(0, 4),
)
@settings(max_examples=30)
def test_nothing_is_lost(
    sizes: list[int], budget: int, selection: Selection, exact: bool, kernels: Kernels, hold: int
) -> None:
    codec = Codec(selection, Float32() if exact else Bits(8), kernels=kernels)
    generator = torch.Generator().manual_seed(sum(sizes))
    skipped = [f"t{hold}"] if len(sizes) > 1 else []
    for step in range(2):
        tensors = {f"t{i}": torch.randn(n, generator=generator) for i, n in enumerate(sizes)}
        before = {
            name: codec.residuals(name).get("residual", torch.zeros(n)).clone()
            for name, n in zip(tensors, sizes, strict=True)
        }
        made = encode_shards(codec, tensors, budget, step=step, hold=skipped)
        assert not isinstance(made, NonFinite)
        outs = [torch.zeros(n) for n in sizes]
        listed = 0
        for shard in made[0]:
            assert len(shard) <= budget
            reader = ShardReader([shard], sizes)
            reader.add_to(outs)
            listed += sum(len(values) for _, _, values in reader.entries())
        assert listed == made[1]
        together = [torch.zeros(n) for n in sizes]
        ShardReader(made[0], sizes).add_to(together)
        assert all(torch.equal(a, b) for a, b in zip(together, outs, strict=True))
        for (name, gradient), out in zip(tensors.items(), outs, strict=True):
            if name in skipped:
                assert not out.any()
                continue
            left = codec.residuals(name)["residual"]
            torch.testing.assert_close(out + left, before[name] + gradient, rtol=1e-5, atol=1e-5)
            if exact:
                assert torch.equal(torch.where(out != 0, out, left), before[name] + gradient)


def test_entries_equal_what_is_added() -> None:
    codec = Codec(0.2)
    made = encode_shards(codec, {"a": torch.randn(5000), "b": torch.randn(30)}, 300, step=0)
    assert not isinstance(made, NonFinite) and len(made[0]) > 3
    for shard in made[0]:
        added, listed = [torch.zeros(5000), torch.zeros(30)], [torch.zeros(5000), torch.zeros(30)]
        reader = ShardReader([shard], [5000, 30])
        reader.add_to(added)
        for tensor, positions, values in reader.entries():
            listed[tensor].index_add_(0, positions, values)
        assert all(torch.equal(a, b) for a, b in zip(added, listed, strict=True))


@pytest.mark.parametrize("values", [Bits(8), Bits(4, seed=1)], ids=str)
def test_kernels_and_torch_write_the_same_shards(values: Values) -> None:
    tensors = {"a": torch.randn(9000), "b": torch.randn(40), "c": torch.randn(3000)}
    made = [
        encode_shards(Codec(TopK(0.3, exact=True), values, kernels=kernels), tensors, 500, step=0)
        for kernels in ("native", "torch")
    ]
    assert made[0] == made[1]


def test_a_budget_without_room_for_an_entry_is_refused() -> None:
    for budget in (10, 32, 40):
        with pytest.raises(ValueError, match="shard"):
            encode_shards(Codec(0.2), {"a": torch.randn(2000)}, budget, step=0)


def test_non_finite_tensors_are_named_and_broken_shards_refused() -> None:
    codec = Codec(0.2)
    assert encode_shards(codec, {"a": torch.tensor([1.0, float("nan")])}, 300, step=0) == NonFinite("a")
    made = encode_shards(codec, {"a": torch.randn(2000)}, 300, step=0)
    assert not isinstance(made, NonFinite)
    shard = made[0][1]
    for wrong in (shard[:-1], shard[:6], b"\xff" * 8 + shard[8:], shard[:20] + b"\x55" + shard[21:]):
        with pytest.raises(FrameError):
            ShardReader([shard, wrong], [2000])
