"""BucketEncoder: one call of the kernels gives the same frames and residuals as the codec step by step."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import thinwire as tw
from tests.codec.codec_cases import DTYPES, gradients, quick
from thinwire.codec.encode import BucketEncoder, BucketViews, Part, Partition, encode_parts
from thinwire.codec.feedback import Feedback
from thinwire.codec.frame import Frame
from thinwire.codec.values import Values

# Small tensors are sent whole, medium ones have an exact threshold (from 16,385 elements on found among candidates),
# large ones a sampled threshold.
SIZES = {"bias": 7, "norm": 900, "little": 3000, "middle": 20_000, "large": 400_000}


def views_of(tensors: dict[str, Tensor]) -> BucketViews:
    return BucketViews({name: torch.empty_like(t) for name, t in tensors.items()})


def step_by_step(codec: tw.Codec, tensors: dict[str, Tensor], room: Tensor, step: int) -> tuple[Frame, list[int]]:
    numels = [t.numel() for t in tensors.values()]
    part = Part(room, numels, codec.reserves(numels))
    (frame,), counts = encode_parts(codec, tensors, [Partition(1, 0)] * len(numels), [part], step=step)
    return frame, counts


def in_one_call(
    encoder: BucketEncoder, views: BucketViews, tensors: dict[str, Tensor], room: Tensor, step: int
) -> tuple[Frame, list[int]]:
    for name, t in tensors.items():
        views[name].copy_(t)
    found = encoder.encode(views, room, step=step)
    assert found is not None
    return found


@quick
@given(
    density=st.sampled_from([0.003, 0.01, 0.2, 1.0, tw.Warmup([0.25, 0.02], 2)]),
    values=st.sampled_from([tw.Float32(), tw.Bits(8), tw.Bits(2), tw.Sign()]),
    feedback=st.sampled_from([tw.NoFeedback(), tw.ErrorFeedback(), tw.ErrorFeedback(0.75)]),
    dtype=st.sampled_from(DTYPES),
    kind=st.integers(0, 5),
    seed=st.integers(0, 2**31),
    share=st.sampled_from([1.0, 0.5, 0.05]),
)
def test_frames_and_residuals_are_the_same(
    density: float, values: Values, feedback: Feedback, dtype: torch.dtype, kind: int, seed: int, share: float
) -> None:
    shapes = list(SIZES.values())
    steps = [dict(zip(SIZES, gradients(shapes, dtype, kind, seed + i).values(), strict=True)) for i in range(4)]
    steps[2]["middle"][5] = torch.nan  # this step must change nothing
    one, other = (tw.Codec(tw.TopK(density), values, feedback) for _ in range(2))
    encoder = BucketEncoder(other, other.reserves(shapes))
    views = views_of(steps[0])
    size = max(int(share * one.frame_bound(shapes, one.expected_counts(shapes))), 64)
    for step, tensors in enumerate(steps):
        rooms = [torch.full((size,), 255, dtype=torch.uint8) for _ in range(2)]
        frame, counts = step_by_step(one, tensors, rooms[0], step)
        found, sent = in_one_call(encoder, views, tensors, rooms[1], step)
        assert torch.equal(*rooms) and len(found) == len(frame) and found.non_finite == frame.non_finite
        assert sent == counts and one.step == other.step
        for name in tensors:
            for slot, residual in one.residuals(name).items():
                assert torch.equal(residual, other.residuals(name)[slot])


def test_a_loaded_state_and_a_new_selection_take_effect() -> None:
    tensors = {name: torch.randn(n) for name, n in SIZES.items()}
    numels = list(SIZES.values())
    one, other = (tw.Codec(tw.TopK(0.01)) for _ in range(2))
    encoder, views = BucketEncoder(other, other.reserves(numels)), views_of(tensors)
    rooms = [torch.empty(one.frame_bound(numels), dtype=torch.uint8) for _ in range(2)]
    for step in range(4):
        step_by_step(one, tensors, rooms[0], step)
        in_one_call(encoder, views, tensors, rooms[1], step)
        assert torch.equal(*rooms)
        if step == 1:  # the residuals are other tensors from here on
            saved = one.state_dict()
            for codec in (one, other):
                codec.load_state_dict(saved)
        if step == 2:
            one.selection = other.selection = tw.TopK(0.05)


def test_tensors_at_other_addresses_take_effect() -> None:
    numels = list(SIZES.values())
    one, other = (tw.Codec(tw.TopK(0.01)) for _ in range(2))
    encoder = BucketEncoder(other, other.reserves(numels))
    rooms = [torch.empty(one.frame_bound(numels), dtype=torch.uint8) for _ in range(2)]
    for step in range(3):
        tensors = {name: torch.randn(n) for name, n in SIZES.items()}
        views = views_of(tensors)
        step_by_step(one, tensors, rooms[0], step)
        in_one_call(encoder, views, tensors, rooms[1], step)
        assert torch.equal(*rooms)
        del views
        gc.collect()


@pytest.mark.parametrize(
    "codec",
    [
        tw.Codec(tw.TopK(0.01, exact=True)),
        tw.Codec(tw.Percentile(90)),
        tw.Codec(tw.TopK(0.01), scope="global"),
        tw.Codec(tw.TopK(0.01), tw.Bits(4, seed=1)),
        tw.Codec(tw.TopK(0.01), feedback=tw.MomentumCorrection(0.9)),
        tw.Codec(tw.TopK(0.01), kernels="torch"),
    ],
)
def test_codecs_that_need_more_than_one_call_are_left_to_the_codec(codec: tw.Codec) -> None:
    views = BucketViews(x=torch.randn(5000))
    room = torch.empty(20_000, dtype=torch.uint8)
    assert BucketEncoder(codec, [0]).encode(views, room, step=0) is None
    assert codec.step == 0


def test_a_size_that_differs_from_the_residual_is_refused() -> None:
    codec = tw.Codec(tw.TopK(0.01))
    codec.encode({"x": torch.randn(5000)})
    with pytest.raises(ValueError, match="the residual has 5000 elements, the gradient has 6000"):
        BucketEncoder(codec, [0]).encode(BucketViews(x=torch.randn(6000)), torch.empty(9000, dtype=torch.uint8), step=1)
