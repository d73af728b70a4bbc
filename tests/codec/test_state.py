"""A codec's state: training continues to the bit after loading; a state that does not fit is refused."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.codec.codec_cases import FEEDBACKS, VALUES, gradients
from thinwire.codec.feedback import Feedback
from thinwire.codec.selection import Selection

SHAPES = [5000, 100, 0]


def run(codec: tw.Codec, steps: range) -> list[bytes]:
    return [codec.encode(gradients(SHAPES, torch.float32, 0, step)).tobytes() for step in steps]


@pytest.mark.parametrize("feedback", FEEDBACKS, ids=str)
@pytest.mark.parametrize("selection", [tw.TopK(0.01), tw.Dynamic(), tw.RandomK(0.01)], ids=str)
def test_a_loaded_codec_continues_to_the_bit(feedback: Feedback, selection: Selection, tmp_path: Path) -> None:
    def make() -> tw.Codec:
        return tw.Codec(selection, tw.Bits(4, seed=1), feedback)

    codec, other = make(), make()
    run(codec, range(4))
    torch.save(codec.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.step == 4
    assert run(codec, range(4, 8)) == run(other, range(4, 8))


def test_a_saved_state_is_a_copy() -> None:
    codec = tw.Codec(0.01)
    run(codec, range(1))
    state = codec.state_dict()
    before = state["residuals"]["t0"]["residual"].clone()
    other = tw.Codec(0.01)
    other.load_state_dict(state)
    run(codec, range(1, 2))
    run(other, range(1, 2))
    assert torch.equal(state["residuals"]["t0"]["residual"], before)


@pytest.mark.parametrize("feedback", FEEDBACKS[1:], ids=str)
def test_rescale(feedback: Feedback) -> None:
    codec = tw.Codec(tw.Dynamic(), tw.Float32(), feedback)
    run(codec, range(2))
    before = codec.state_dict()
    codec.rescale(0.25)
    after = codec.state_dict()
    for slot, tensor in before["residuals"]["t0"].items():
        assert torch.equal(tensor * 0.25, after["residuals"]["t0"][slot])
    assert after["selection"]["t0"]["threshold"] == before["selection"]["t0"]["threshold"] * 0.25
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive finite"):
            codec.rescale(bad)


def test_a_rescaled_codec_equals_one_that_always_had_the_new_unit() -> None:
    one, two = tw.Codec(0.01, tw.Bits(8)), tw.Codec(0.01, tw.Bits(8))
    for step in range(2):
        g = gradients([5000], torch.float32, 0, step)
        one.encode(g)
        two.encode({name: 4.0 * t for name, t in g.items()})
    one.rescale(4.0)
    g = {"t0": torch.randn(5000)}
    assert one.encode(g).tobytes() == two.encode(g).tobytes()


class Opaque:
    """An object that no field of a state may be."""


def wrong_states() -> dict[str, tuple[Any, str]]:
    good: dict[str, Any] = {"version": 2, "step": 3, "residuals": {}, "selection": {}}

    def slots(momentum: Any, residual: Any = None) -> dict[str, Any]:
        tensors = {"residual": torch.zeros(5) if residual is None else residual, "momentum": momentum}
        return {**good, "residuals": {"w": tensors}}

    wrong: dict[str, tuple[Any, str]] = {
        "empty": ({}, "version None"),
        "first version": ({"version": 1}, "saved by thinwire 0.1: train on without it, or load it with thinwire 0.1"),
        "later version": ({**good, "version": 3}, "version 3, this thinwire reads version 2"),
        "version as text": ({**good, "version": "2"}, "version '2'"),
        "version as a tensor": ({**good, "version": torch.tensor([2, 2])}, "version tensor"),
        "nothing inside": ({"version": 2}, "lacks residuals, selection, step"),
        "another feedback": (
            {**good, "residuals": {"w": {"residual": torch.zeros(5)}}},
            r"the state has \['residual'\]",
        ),
        "uneven": (slots(torch.zeros(6)), "differ in size"),
        "not finite": (slots(torch.full((5,), float("inf"))), "not finite"),
        "not finite in float32": (slots(torch.full((5,), 1e300, dtype=torch.float64)), "not finite"),
        "integers": (slots(torch.zeros(5, dtype=torch.int64)), "w: the state's momentum is not a dense tensor"),
        "sparse": (slots(torch.zeros(5).to_sparse()), "w: the state's momentum is not a dense tensor"),
        "meta": (slots(torch.zeros(5, device="meta")), "w: the state's momentum is not a dense tensor"),
        "negative step": ({**good, "step": -1}, "step of the codec's state"),
        "keys that are no names": ({**good, "residuals": {3: {}}}, "the residuals of the codec's state"),
        "learned values that are not finite": (
            {**good, "selection": {"w": {"threshold": float("nan")}}},
            "finite numbers",
        ),
        "learned values that are tensors": (
            {**good, "selection": {"w": {"threshold": torch.ones(2)}}},
            "finite numbers",
        ),
    }
    for garbage in (None, 7, "text", [1], Opaque(), True, torch.zeros(3)):
        kind = type(garbage).__name__
        wrong[f"state is {kind}"] = garbage, "a codec's state is a dict"
        for field in ("residuals", "selection"):
            wrong[f"{field} is {kind}"] = {**good, field: garbage}, f"the {field} of the codec's state"
            wrong[f"{field} of w is {kind}"] = {**good, field: {"w": garbage}}, "w: "
        wrong[f"residual is {kind}"] = slots(torch.zeros(3), garbage), "w: "
        if kind != "int":
            wrong[f"step is {kind}"] = {**good, "step": garbage}, "step of the codec's state"
    del wrong["residual is NoneType"]  # stands for the default here
    wrong["residual is Tensor"] = slots(torch.zeros(4), torch.zeros(3)), "differ in size"
    return wrong


@pytest.mark.parametrize("name", wrong_states())
def test_a_wrong_state_is_refused_and_changes_nothing(name: str) -> None:
    state, message = wrong_states()[name]
    codec = tw.Codec(tw.Dynamic(), feedback=tw.MomentumCorrection())
    run(codec, range(2))
    before, generation = codec.state_dict(), codec.generation
    with pytest.raises(ValueError, match=message):
        codec.load_state_dict(state)
    after = codec.state_dict()
    assert codec.step == 2 and codec.generation == generation and before["selection"] == after["selection"]
    for parameter, slots in before["residuals"].items():
        assert all(torch.equal(tensor, after["residuals"][parameter][slot]) for slot, tensor in slots.items())


def test_a_copy_has_the_same_settings_and_no_state() -> None:
    codec = tw.Codec(tw.TopK(0.1), tw.Bits(4), tw.ErrorFeedback(0.9), scope="global", min_numel=7, kernels="torch")
    run(codec, range(2))
    copy = codec.copy()
    assert repr(copy) == repr(codec) and copy.kernels == "torch"
    assert copy.step == 0 and not copy.residuals("t0") and not copy.learned


def test_a_copy_may_change_settings() -> None:
    codec = tw.Codec(tw.TopK(0.1), tw.Bits(4), tw.ErrorFeedback(0.9), scope="global", min_numel=7)
    changed = codec.copy(feedback=tw.NoFeedback(), selection=tw.Threshold(1.0), values=tw.Sign(), scope="tensor")
    assert repr(changed) == repr(tw.Codec(tw.Threshold(1.0), tw.Sign(), tw.NoFeedback(), min_numel=7))
    with pytest.raises(TypeError, match="memory"):
        codec.copy(memory=None)


def test_a_tensor_that_changed_its_size_is_refused() -> None:
    codec = tw.Codec(0.01)
    codec.encode({"w": torch.ones(2000)})
    with pytest.raises(ValueError, match="w: the residual has 2000 elements, the gradient has 2001"):
        codec.encode({"w": torch.ones(2001)})


def test_layouts_do_not_matter() -> None:
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    plain, turned = tw.Codec(0.1), tw.Codec(0.1)
    assert plain.encode({"w": x}).tobytes() == turned.encode({"w": x.t().contiguous().t()}).tobytes()
    assert turned.residuals("w")["residual"].shape == (2000,)


def test_two_threads_encode_as_one_does() -> None:
    """The kernels release the GIL: two codecs that encode at the same time must not disturb each other."""
    codecs = [tw.Codec(tw.TopK(0.01), values) for values in VALUES[3:5] for _ in range(2)]
    steps = [gradients([400_000, 100], torch.float32, 0, step) for step in range(6)]
    frames: list[list[bytes]] = [[] for _ in codecs]

    def work(i: int) -> None:
        for g in steps:
            frame = codecs[i].encode(g)
            tw.Codec.decode(frame, g)
            frames[i].append(frame.tobytes())

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work(1)
    work(3)
    assert frames[0] == frames[1] and frames[2] == frames[3]
