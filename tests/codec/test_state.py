"""State: saved and loaded without pickle, it continues to the bit; what does not fit is refused and changes nothing."""

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


def test_a_rescaled_codec_goes_on_as_if_the_unit_had_always_been_another() -> None:
    one, two = tw.Codec(0.01, tw.Bits(8)), tw.Codec(0.01, tw.Bits(8))
    for step in range(2):
        g = gradients([5000], torch.float32, 0, step)
        one.encode(g)
        two.encode({name: 4.0 * t for name, t in g.items()})
    one.rescale(4.0)
    g = {"t0": torch.randn(5000)}
    assert one.encode(g).tobytes() == two.encode(g).tobytes()


def wrong_states() -> dict[str, tuple[Any, str]]:
    good: dict[str, Any] = {"version": 1, "step": 3, "residuals": {}, "selection": {}}
    half = {"w": {"residual": torch.zeros(5)}}
    uneven = {"w": {"residual": torch.zeros(5), "momentum": torch.zeros(6)}}
    poisoned = {"w": {"residual": torch.zeros(5), "momentum": torch.full((5,), float("inf"))}}
    return {
        "empty": ({}, "version None"),
        "later version": ({**good, "version": 2}, "version 2"),
        "nothing inside": ({"version": 1}, "lacks residuals, selection, step"),
        "another memory": ({**good, "residuals": half}, r"the state holds \['residual'\]"),
        "uneven": ({**good, "residuals": uneven}, "differ in size"),
        "not finite": ({**good, "residuals": poisoned}, "not finite"),
    }


@pytest.mark.parametrize("name", wrong_states())
def test_a_wrong_state_is_refused_and_changes_nothing(name: str) -> None:
    state, words = wrong_states()[name]
    codec = tw.Codec(0.01, feedback=tw.MomentumCorrection())
    run(codec, range(2))
    before = codec.state_dict()
    with pytest.raises(ValueError, match=words):
        codec.load_state_dict(state)
    assert codec.step == 2
    assert torch.equal(before["residuals"]["t0"]["residual"], codec.residuals("t0")["residual"])


def test_a_tensor_that_changed_its_size_is_refused() -> None:
    codec = tw.Codec(0.01)
    codec.encode({"w": torch.ones(2000)})
    with pytest.raises(ValueError, match="w: the memory holds another number of elements than the 2001"):
        codec.encode({"w": torch.ones(2001)})


def test_layouts_do_not_matter() -> None:
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    plain, turned = tw.Codec(0.1), tw.Codec(0.1)
    assert plain.encode({"w": x}).tobytes() == turned.encode({"w": x.t().contiguous().t()}).tobytes()
    assert turned.residuals("w")["residual"].shape == (2000,)


def test_two_threads_encode_as_one_does() -> None:
    """The kernels release the GIL: two codecs at work at once must not meet."""
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
