"""The kernels of updates and their twins in torch operations give the same bits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from thinwire import _native
from thinwire.codec.codec import Codec
from thinwire.codec.feedback import DTYPES, ErrorFeedback, array_args
from thinwire.codec.selection import TopK
from thinwire.codec.values import Float32
from thinwire.exchange.channel import LocalChannel
from thinwire.link import updates as module
from thinwire.link.rounds import Pace, Rounds
from thinwire.link.thread import Pending
from thinwire.link.updates import Updates, accumulate_update


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 300),
    dtype=st.sampled_from(list(DTYPES)),
    decay=st.sampled_from([1.0, 0.75]),
    ahead=st.sampled_from([0.0, 1.0, 1.25]),
    bad=st.sampled_from([None, torch.inf, -torch.inf, torch.nan]),
    seed=st.integers(0, 2**31),
)
def test_kernel_and_torch_agree(
    n: int, dtype: torch.dtype, decay: float, ahead: float, bad: float | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shared, residual = torch.randn(n, generator=generator), 0.1 * torch.randn(n, generator=generator)
    local = (shared - residual + 0.01 * torch.randn(n, generator=generator)).to(dtype)
    if bad is not None and n:
        local[n // 2] = bad
    one, other = residual.clone(), residual.clone()
    (finite,) = _native.accumulate_updates([(shared.data_ptr(), one.data_ptr(), array_args(local), ahead)], decay)
    assert accumulate_update(shared, other, local, ahead, decay) == finite == (bad is None or n == 0)
    assert torch.equal(one, other) and bool(one.isfinite().all())
    if bad is not None and n:
        assert one[n // 2] == residual[n // 2]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    ahead=st.sampled_from([0.0, 1.0, 1.4]),
    written=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_looking_ahead_and_applying_means_agree_with_torch(
    sizes: list[int], ahead: float, written: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shared, residuals = ([torch.randn(n, generator=generator) for n in sizes] for _ in range(2))
    parameters = [s.clone() for s in shared]
    if written:  # between two steps, for example by clamping
        for p in parameters:
            p.clamp_(-0.5, 0.5)
    adopted = [p.clone() for p in parameters]
    arrays = zip(parameters, shared, residuals, strict=True)
    _native.look_ahead([(p.data_ptr(), s.data_ptr(), r.data_ptr(), p.numel()) for p, s, r in arrays], ahead)
    for p, s, r, a in zip(parameters, shared, residuals, adopted, strict=True):
        assert torch.equal(s, a) and torch.equal(p, a - r * ahead)
    # The mean lies where the parameters do, as an exchange writes it there.
    means = [p.clone() for p in parameters]
    arrays = zip(parameters, shared, parameters, strict=True)
    _native.apply_means([(p.data_ptr(), s.data_ptr(), m.data_ptr(), p.numel()) for p, s, m in arrays])
    for p, s, m, a in zip(parameters, shared, means, adopted, strict=True):
        assert torch.equal(s, a - m) and torch.equal(p, s)


def test_without_rounding_the_residual_is_the_distance_to_the_shared_parameters() -> None:
    shared = torch.arange(8.0)
    residual = torch.full((8,), 0.5)
    local = shared - 0.75  # the step began at shared - 0.5
    _native.accumulate_updates([(shared.data_ptr(), residual.data_ptr(), array_args(local), 1.0)], 1.0)
    assert torch.equal(residual, torch.full((8,), 0.75))


# Rounds of local steps. All numbers are multiples of 1/64, so that float32 adds them without rounding.


class Ranks:
    """Two ranks whose optimizers are replaced by given changes, and whose exchange sends the largest entries."""

    def __init__(self, n: int, count: int, rounds: Rounds, decay: float = 1.0) -> None:
        self.n, self.rounds = n, rounds
        parameters = [nn.Parameter(torch.zeros(n)) for _ in range(2)]
        codecs = [Codec(TopK(0.5), Float32(), ErrorFeedback(decay)) for _ in range(2)]
        self.updates = [
            Updates({"w": p}, [torch.optim.SGD([p], lr=1.0)], codec, rounds)
            for p, codec in zip(parameters, codecs, strict=True)
        ]
        self.count, self.decay = count, decay
        self.sent = [torch.zeros(n), torch.zeros(n)]
        # What is due after the next exchange, and what the present round has changed.
        self.kept, self.changed = ([torch.zeros(n), torch.zeros(n)] for _ in range(2))

    def weigh(self, weights: list[float]) -> None:
        """Give the ranks' changes weights, as in rounds by time."""
        for updates, weight in zip(self.updates, weights, strict=True):
            updates.pace = Pace(1.0, LocalChannel())
            updates.pace.weight = weight

    def step(self, changes: list[Tensor]) -> None:
        ended = False
        for rank, (updates, change) in enumerate(zip(self.updates, changes, strict=True)):
            updates.look_ahead()
            with torch.no_grad():
                updates.parameters["w"].sub_(change)
            self.changed[rank] += change
            ended = updates.count(0)
        if ended:
            self._exchange()

    def _exchange(self) -> None:
        jobs, frames = [], []
        for rank, updates in enumerate(self.updates):
            updates.finish(0)
            jobs.append(updates.jobs(0))
            if self.rounds.overlap:  # the round begins with all steps that the rank has just taken
                begun = updates.shared["w"] - self.kept[rank] * self.decay - self.changed[rank]
                assert torch.equal(updates.parameters["w"], begun)
        for rank, updates in enumerate(self.updates):
            residual = updates.residual("w")
            assert torch.equal(residual, self.kept[rank] * self.decay + updates.weight * self.changed[rank])
            self.changed[rank].zero_()
            sent = torch.zeros(self.n)
            chosen = residual.abs().topk(min(self.count, self.n)).indices
            sent[chosen] = residual[chosen]
            residual -= sent
            self.sent[rank] += sent
            self.kept[rank] = residual.clone()
            frames.append(sent)
        for updates, mine in zip(self.updates, jobs, strict=True):
            assert mine[0].outs is not None
            mine[0].outs["w"].copy_((frames[0] + frames[1]) / 2)
            if self.rounds.overlap:
                updates.begin(0, mine, Pending(mine, []))
            else:
                updates.apply(mine, skipped=False)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    every=st.integers(1, 4),
    overlap=st.booleans(),
    steps=st.integers(1, 14),
    seed=st.integers(0, 2**31),
    read=st.integers(0, 14),
    weights=st.lists(st.sampled_from([1.0, 0.25, 1.5]), min_size=2, max_size=2),
)
def test_nothing_is_lost_in_rounds(
    n: int, every: int, overlap: bool, steps: int, seed: int, read: int, weights: list[float]
) -> None:
    """Sent + residual + unfinished round = all changes; a flush applies their mean; reading changes no course."""
    generator = torch.Generator().manual_seed(seed)
    with look_ahead(1.0):
        ranks, undisturbed = (Ranks(n, 1 + n // 3, Rounds(every, overlap=overlap)) for _ in range(2))
        ranks.weigh(weights)
        undisturbed.weigh(weights)
        totals = [torch.zeros(n), torch.zeros(n)]
        for step in range(steps):
            changes = [torch.randint(-64, 65, (n,), generator=generator) / 64.0 for _ in range(2)]
            ranks.step(changes)
            undisturbed.step(changes)
            totals = [a + w * b for a, b, w in zip(totals, changes, weights, strict=True)]
            if step == read:
                ranks.updates[0].finish()  # as an evaluation on one rank does
        for rank, updates in enumerate(ranks.updates):
            updates.finish()
            undisturbed.updates[rank].finish()
            assert torch.equal(updates.shared["w"], ranks.updates[0].shared["w"])
            assert torch.equal(updates.shared["w"], undisturbed.updates[rank].shared["w"])
            updates.absorb()
            assert torch.equal(ranks.sent[rank] + updates.residual("w"), totals[rank])
        left = (ranks.updates[0].residual("w") + ranks.updates[1].residual("w")) / 2

        def mean(total: Tensor) -> None:
            total.copy_(left)

        for updates in ranks.updates:
            updates.flush(mean)
            assert torch.equal(updates.parameters["w"].detach(), -(totals[0] + totals[1]) / 2)


@contextmanager
def look_ahead(factor: float) -> Iterator[None]:
    before, module.LOOK_AHEAD = module.LOOK_AHEAD, factor
    try:
        yield
    finally:
        module.LOOK_AHEAD = before


@settings(max_examples=20, deadline=None)
@given(weight=st.sampled_from([0.25, 0.5, 1.5]), seed=st.integers(0, 2**31))
def test_changes_are_weighted(weight: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    change = torch.randint(-64, 65, (9,), generator=generator) / 64.0
    ranks = Ranks(9, 3, Rounds(2))
    ranks.weigh([weight, 1.0])
    for _ in range(2):
        ranks.step([change, change])
    assert torch.equal(ranks.sent[0] + ranks.updates[0].residual("w"), 2 * weight * change)
    assert torch.equal(ranks.sent[1] + ranks.updates[1].residual("w"), 2 * change)


def test_a_weighted_round_begins_where_own_steps_have_led() -> None:
    """Rank 1 takes three times the steps of rank 0, and has three times its weight."""
    ranks = Ranks(1, 1, Rounds(1, overlap=True))
    ranks.weigh([0.5, 1.5])
    changes = [torch.tensor([1.0]), torch.tensor([3.0])]
    begun = []
    for _ in range(3):
        ranks.step(changes)
        begun.append([float(updates.parameters["w"].detach()) for updates in ranks.updates])
    # Everything is sent, so that a round moves the shared parameters by (0.5 * 1 + 1.5 * 3) / 2 = 2.5.
    assert begun == [[-1.0, -3.0], [-2.5 - 1.0, -2.5 - 3.0], [-5.0 - 1.0, -5.0 - 3.0]]


@settings(max_examples=40, deadline=None)
@given(every=st.integers(1, 2), overlap=st.booleans(), steps=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_residuals_decay_once_a_round(every: int, overlap: bool, steps: int, seed: int) -> None:
    """`Ranks` compares each residual with decay * what stayed after the exchange before + the change of the round."""
    generator = torch.Generator().manual_seed(seed)
    with look_ahead(1.0):
        ranks = Ranks(9, 2, Rounds(every, overlap=overlap), decay=0.5)
        for _ in range(steps):
            ranks.step([torch.randint(-64, 65, (9,), generator=generator) / 64.0 for _ in range(2)])
    for rank, updates in enumerate(ranks.updates):
        updates.absorb()  # what an unfinished round has changed is added without a decay
        assert torch.equal(updates.residual("w"), ranks.kept[rank] + ranks.changed[rank])


def test_a_decaying_residual_by_hand() -> None:
    """The largest of two entries is sent; the other one halves, and is sent with what the next round adds."""
    for overlap in (False, True):
        ranks = Ranks(2, 1, Rounds(2, overlap=overlap), decay=0.5)
        for change in ([1.0, 0.5], [1.0, 0.5], [0.5, 1.0], [0.0, 1.0]):
            ranks.step([torch.tensor(change)] * 2)
        for updates in ranks.updates:
            assert updates.residual("w").tolist() == [0.5, 0.0]
            updates.finish()
            assert updates.shared["w"].tolist() == [-2.0, -(0.5 * 1.0 + 2.0)]
