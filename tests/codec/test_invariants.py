"""Nothing is lost: for every selection, value format and feedback, what is sent and the residual make up the input."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import thinwire as tw
from tests.codec.codec_cases import DTYPES, FEEDBACKS, SELECTIONS, VALUES, gradients, positions_of, quick, sizes
from thinwire.codec.codec import Kernels, Scope
from thinwire.codec.feedback import Feedback
from thinwire.codec.selection import Selection
from thinwire.codec.values import Values

choices = {
    "selection": st.sampled_from(SELECTIONS),
    "values": st.sampled_from(VALUES),
    "kernels": st.sampled_from(["native", "torch"]),
    "scope": st.sampled_from(["tensor", "global"]),
    "shapes": sizes,
    "dtype": st.sampled_from(DTYPES),
    "kind": st.integers(0, 5),
    "seed": st.integers(0, 2**31),
}


class ReferenceFeedback:
    """The feedbacks as the papers define them, with torch operations, for one tensor."""

    def __init__(self, feedback: Feedback, n: int) -> None:
        self.feedback = feedback
        self.u, self.v = torch.zeros(n), torch.zeros(n)

    def accumulated(self, g: Tensor) -> Tensor:
        """Return the vector to select from, and advance the state as if nothing were sent."""
        feedback = self.feedback
        if isinstance(feedback, tw.MomentumCorrection):
            if feedback.nesterov:
                self.u = (self.u + g) * feedback.momentum
                self.v = self.v + (self.u + g)
            else:
                self.u = self.u * feedback.momentum + g
                self.v = self.v + self.u
        elif isinstance(feedback, tw.ErrorFeedback):
            self.v = self.v * feedback.decay + g
        else:
            self.v = g.clone()
        return self.v.clone()

    def sent(self, positions: Tensor, values: Tensor, *, late: bool) -> None:
        self.v[positions] -= values
        if late:  # small tensors are sent whole at every step: there is nothing to mask
            self.u[positions] = 0.0


def check(codec: tw.Codec, shapes: list[int], dtype: torch.dtype, kind: int, seed: int) -> None:
    plain = [ReferenceFeedback(codec.feedback, n) for n in shapes]
    for step in range(3):
        given_now = gradients(shapes, dtype, kind, seed + step)
        frame = codec.encode(given_now)
        decoded = tw.Codec.decode(frame, given_now)
        places = positions_of(frame, shapes)
        for i, (name, gradient) in enumerate(given_now.items()):
            x = plain[i].accumulated(gradient.float())
            sent, where = decoded[name], places.get(i, torch.empty(0, dtype=torch.int64))
            plain[i].sent(where, sent[where], late=gradient.numel() >= codec.min_numel)
            kept = codec.residuals(name)
            if isinstance(codec.feedback, tw.NoFeedback):
                assert not kept
                continue
            # The residual is the input minus what the receiver decodes, to the bit ...
            assert torch.equal(kept["residual"], plain[i].v)
            if "momentum" in kept:
                assert torch.equal(kept["momentum"], plain[i].u)
            # ... and both add up to the input, within the rounding of the subtraction.
            lost = sent.double() + kept["residual"].double() - x.double()
            assert (lost.abs() <= kept["residual"].double().abs() * 2.0**-24).all()
            if codec.values == tw.Float32():
                assert not lost.any()


@quick
@given(feedback=st.sampled_from(FEEDBACKS), min_numel=st.sampled_from([0, 64, 1024]), **choices)
def test_sent_and_kept_add_up_to_the_gradient(
    feedback: Feedback,
    min_numel: int,
    selection: Selection,
    values: Values,
    kernels: Kernels,
    scope: Scope,
    shapes: list[int],
    dtype: torch.dtype,
    kind: int,
    seed: int,
) -> None:
    codec = tw.Codec(selection, values, feedback, scope=scope, kernels=kernels, min_numel=min_numel)
    check(codec, shapes, dtype, kind, seed)


def test_every_combination_once() -> None:
    for selection in SELECTIONS:
        for values in VALUES:
            for feedback in FEEDBACKS:
                check(tw.Codec(selection, values, feedback, min_numel=100), [3000, 17], torch.float32, 0, 1)


def test_without_feedback_exactly_the_selected_values_are_sent() -> None:
    g = gradients([5000], torch.float32, 0, 3)
    sent = tw.Codec.decode(tw.Codec(tw.Threshold(1.0), tw.Float32(), tw.NoFeedback()).encode(g), g)["t0"]
    assert torch.equal(sent, torch.where(g["t0"].abs() > 1.0, g["t0"], 0.0))


def test_a_density_of_one_sends_everything() -> None:
    g = gradients([5000], torch.float32, 0, 4)
    codec = tw.Codec(tw.TopK(1.0), tw.Float32())
    assert torch.equal(tw.Codec.decode(codec.encode(g), g)["t0"], g["t0"])
    assert not codec.residuals("t0")["residual"].any()


def test_finite_sums_stay_finite() -> None:
    most = torch.finfo(torch.float32).max
    g = {"w": torch.full((2000,), most), "v": torch.full((2000,), -most)}
    for feedback in FEEDBACKS[1:]:
        for kernels in ("native", "torch"):
            for values in VALUES:
                codec = tw.Codec(tw.RandomK(0.01), values, feedback, kernels=kernels)
                for _ in range(3):
                    frame = codec.encode(g)
                    for out in tw.Codec.decode(frame, g).values():
                        assert out.isfinite().all()
                for name in g:
                    assert all(t.isfinite().all() for t in codec.residuals(name).values())


def test_one_huge_value_does_not_spoil_its_block() -> None:
    g = torch.ones(2000)
    g[7] = 2.0**125
    codec = tw.Codec(tw.TopK(1.0), tw.Bits(8))
    sent = tw.Codec.decode(codec.encode({"w": g}), {"w": g})["w"]
    assert sent[7] == 2.0**120 and (sent[:7] == 1.0).all()


@quick
@given(
    n=st.integers(1, 512),
    power=st.sampled_from([0, 1, 8, 40, 126]),
    seed=st.integers(0, 2**31),
    outliers=st.integers(0, 5),
)
def test_unary_values_take_at_most_three_bits_and_keep_most_of_the_energy(
    n: int, power: int, seed: int, outliers: int
) -> None:
    """Whatever the values are: the code has a bound, and what is left over is less than what there was."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, generator=generator).pow(power) + (1e-30 if power else 0.0)
    x = torch.where(torch.rand(n, generator=generator) < 0.5, -x, x)
    x[torch.randint(n, (outliers,), generator=generator)] *= 1e6
    codec = tw.Codec(tw.TopK(1.0), tw.Unary(), min_numel=0)
    frame = codec.encode({"w": x})
    scales, signs, levels = 4, -(-n // 8), -(-2 * n // 8)
    assert len(frame) <= 24 + 1 + 1 + 2 + 2 + 1 + scales + signs + levels
    left = codec.residuals("w")["residual"].double()
    assert left.square().sum() <= 0.5 * x.double().square().sum()


def test_an_outlier_does_not_spoil_the_unary_values_of_its_block() -> None:
    """The points have the least squared error: small values beside a large one are sent as their mean."""
    g = 1.0 + torch.rand(512, generator=torch.Generator().manual_seed(0))
    g[7] = -1e4
    sent = tw.Codec.decode(tw.Codec(tw.TopK(1.0), tw.Unary(), min_numel=0).encode({"w": g}), {"w": g})["w"]
    others = torch.arange(512) != 7
    assert abs(sent[7] / g[7] - 1.0) < 0.01
    assert (sent[others] - g[others].mean()).abs().max() < 0.01


def test_unary_values_are_as_precise_as_their_size_promises() -> None:
    """Bits per value and relative squared error of the largest 1 % of exponential and of heavy tails."""
    generator = torch.Generator().manual_seed(0)
    n = 1_000_000
    uniform = torch.rand(n, generator=generator).clamp_(1e-7)
    chi = torch.randn(3, n, generator=generator).square().sum(0)
    tails = {"Laplace": (uniform.log(), 0.003), "t3": (torch.randn(n, generator=generator) / (chi / 3).sqrt(), 0.008)}
    for name, (x, limit) in tails.items():
        codec = tw.Codec(tw.TopK(0.01, exact=True), tw.Unary(), tw.NoFeedback())
        frame = codec.encode({"w": x})
        sent = tw.Codec.decode(frame, {"w": x})["w"]
        kept = sent != 0
        error = (sent - x)[kept].double().square().sum() / x[kept].double().square().sum()
        assert error < limit, name
        assert 4 * n / len(frame) > 290, name
