"""The codec's main promise: what is sent and what is kept in the residual add up to the gradient."""

import pytest
import torch

import thinwire as tw
import thinwire.codec
from thinwire.codec.codec import Kernels, Scope
from thinwire.codec.feedback import Feedback
from thinwire.codec.frame import FrameReader
from thinwire.codec.selection import Selection

SELECTIONS: list[Selection] = [
    tw.TopK(0.05),
    tw.TopK(0.05, exact=True),
    tw.Percentile(90),
    tw.Percentile(90, exact=True),
    tw.Threshold(1.5),
    tw.StdDev(2.0),
    tw.Dynamic(),
    tw.RandomK(0.05, seed=3),
]


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_nothing_is_lost(selection: Selection, kernels: Kernels, scope: Scope) -> None:
    torch.manual_seed(0)
    codec = tw.Codec(selection, tw.Float32(), kernels=kernels, scope=scope)
    shapes = {"w": (300, 40), "b": (40,), "v": (5000,), "none": (0,)}
    kept = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for _ in range(4):
        gradients = {name: torch.randn(shape) for name, shape in shapes.items()}
        frame = codec.encode(gradients)
        sent = tw.Codec.decode(frame, gradients)
        for name, gradient in gradients.items():
            now = codec.residuals(name)["residual"].view(gradient.shape)
            assert torch.equal(sent[name] + now, kept[name] + gradient)
            kept[name] = now.clone()
        assert torch.equal(sent["b"], sent["b"]) and not codec.residuals("b")["residual"].any()


@pytest.mark.parametrize("feedback", [tw.NoFeedback(), tw.ErrorFeedback(0.9), tw.MomentumCorrection(0.9)], ids=str)
def test_non_finite_input_is_reported_and_changes_no_residual(feedback: Feedback) -> None:
    codec = tw.Codec(0.1, feedback=feedback)
    codec.encode({"a": torch.randn(3000), "b": torch.randn(10)})
    before = codec.state_dict()
    bad = torch.randn(3000)
    bad[2999] = float("inf")
    frame = codec.encode({"a": bad, "b": torch.randn(10)})
    assert frame.non_finite == "a"
    assert tw.codec.FrameReader(frame, [3000, 10]).non_finite
    after = codec.state_dict()
    assert after["step"] == before["step"]
    for name, slots in before["residuals"].items():
        for slot, tensor in slots.items():
            assert torch.equal(tensor, after["residuals"][name][slot])


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_tensors_that_are_sent_whole_keep_their_momentum(kernels: Kernels) -> None:
    """Masking is for entries that are sent late; a bias that is sent at every step has ordinary momentum."""
    codec = tw.Codec(tw.TopK(0.01), tw.Float32(), tw.MomentumCorrection(0.9), kernels=kernels)
    gradients = {"bias": torch.ones(4), "weight": torch.ones(4000)}
    sent = [tw.Codec.decode(codec.encode(gradients), gradients)["bias"] for _ in range(3)]
    for found, expected in zip(sent, (1.0, 1.9, 2.71), strict=True):
        assert torch.allclose(found, torch.full((4,), expected))


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_small_tensors_are_unary_only_where_error_feedback_corrects_them(kernels: Kernels) -> None:
    gradients = {"w": torch.randn(3000), "bias": torch.randn(64)}
    for feedback, expected in ((tw.ErrorFeedback(), 7), (tw.NoFeedback(), 3)):
        codec = tw.Codec(tw.TopK(0.01), tw.Unary(), feedback, kernels=kernels)
        reader = FrameReader(codec.encode(gradients), [3000, 64])
        assert [section.format for section in reader.sections] == [7, expected], feedback
