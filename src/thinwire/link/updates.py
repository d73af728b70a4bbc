"""Updates: the parameters that all ranks share, and what this rank's optimizer changed since they were last equal.

In the update domain every rank runs the user's optimizer on its own gradient. `shared` holds the parameters that all
ranks agree on, bit for bit. A rank's residual is the sum of its own changes that were not sent yet. A round begins at
shared - look-ahead * residual, so that a rank's own changes are never late for itself, and takes one step of the
optimizer or several (local steps). Then the change of the round is added to the residual, which is exchanged. During a
round the model holds this rank's local view, at all other times `shared`.

If the exchange overlaps the next round, that round begins at once, where this rank's own changes have led. The mean is
applied to `shared` when it is needed: at the end of that round, or earlier for an evaluation or a checkpoint. Since the
local view does not depend on it before that end, training takes the same course in both cases.

In rounds by time a rank's change is weighted when it is added to the residual. The round that overlaps its exchange
begins at shared - (the residual before it) - (the unweighted change): a weight says how much the change counts for all
ranks, and neither takes back nor extends the steps that this rank has just taken.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from thinwire import _native
from thinwire.codec.codec import Codec
from thinwire.codec.feedback import FLOAT_MAX, Accumulated, ErrorFeedback, Feedback, NoFeedback, array_args
from thinwire.link.rounds import SGD, Pace, Rounds, change_of, check_pace, check_state
from thinwire.link.shards import local_part, shared_like
from thinwire.link.thread import Job, Pending

# Elements that are exchanged together. One exchange costs a round trip; much larger ones would keep the network idle
# while the first of them is compressed.
BUCKET_ELEMENTS = 1 << 23
# How far a training step looks ahead, in residuals. The residuals of other ranks resemble a rank's own and are late as
# well: a small GPT reached a lower loss with 1.2 and 1.5 than with 1.0 and 2.0 (docs/lab-notebook.md).
LOOK_AHEAD = 1.4
# The same for rounds of several steps and for rounds that begin while an exchange is under way. The residual then holds
# whole rounds of this rank's own steps, and a factor above 1 would take steps that no gradient has asked for.
LOCAL_LOOK_AHEAD = 1.0


class _Places:
    """Where kernels find parameters, their shared values and residuals, until one of the tensors moves."""

    def __init__(self, parameters: list[Tensor], shared: list[Tensor], residuals: list[Tensor]) -> None:
        self.flat = [p.detach().view(-1) for p in parameters]
        self.residuals = residuals
        self.at = [p.data_ptr() for p in parameters]
        rows = [(p, s.data_ptr(), r.data_ptr()) for p, s, r in zip(self.flat, shared, residuals, strict=True)]
        self.shown = [(p.data_ptr(), s, r, p.numel()) for p, s, r in rows]
        self.changed = [(s, r, array_args(p)) for p, s, r in rows]


class Updates:
    """The shared parameters and the residuals of one attached model, which several optimizers may update."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        codec: Codec,
        rounds: Rounds | None = None,
        owned: Mapping[str, Tensor] | None = None,
        before_writing: Callable[[], None] = lambda: None,
    ) -> None:
        self.parameters = parameters
        # The parameters as the optimizers hold them: of a sharded model DTensors, of which `parameters` are parts.
        self.owned = dict(parameters if owned is None else owned)
        # Called before parameters are written for a forward pass: FSDP may hold gathered copies of them.
        self.before_writing = before_writing
        self.optimizers = list(optimizers)
        self.rounds = rounds if rounds is not None else Rounds()
        self.shared = {name: _flat(p).to(torch.float32, copy=True) for name, p in parameters.items()}
        self.ahead: set[str] = set()  # parameters that hold the local view instead of the shared values
        self.clocks = [0] * len(self.optimizers)  # exchanges of each optimizer
        self.taken = [0] * len(self.optimizers)  # steps of each optimizer in its present round
        self._stepped = [False] * len(self.optimizers)  # whether one of them had a finite gradient
        self._starts: dict[str, Tensor] = {}  # where the round began, if shared and residual do not tell any more
        self._means: dict[str, Tensor] = {}  # memory for means of exchanges that overlap a round
        self._outer: dict[str, dict[str, Tensor]] = {name: {} for name in self.shared}
        self._aside: dict[str, Tensor] = {}  # local views during an evaluation
        # While the model loads a state: the round's local views, where they began, and the residuals without it.
        self._round: dict[str, tuple[Tensor, Tensor | None, Tensor]] = {}
        self._under_way: dict[int, tuple[list[Job], Pending]] = {}  # exchanges by optimizer
        self.setting = ""  # the preset that "auto" has chosen, if it chooses
        self.use: Callable[[str], None] = lambda name: None  # under "auto": continues with a preset, or chooses anew
        self.pace: Pace | None = None  # ends rounds by time
        self._places: dict[tuple[str, ...], _Places] = {}
        self._codec = codec
        self._decay = _decay_of(codec.feedback)
        self._keeps = not isinstance(codec.feedback, NoFeedback)
        codec.feedback = Accumulated()
        names = {id(p): name for name, p in self.owned.items()}
        self.buckets = [_buckets(_names_of(o, names), self.parameters) for o in self.optimizers]

    @property
    def _look_ahead(self) -> float:
        return LOOK_AHEAD if self.rounds.single else LOCAL_LOOK_AHEAD

    @property
    def exchanges(self) -> int:
        """The number of exchanges that this rank has begun."""
        return sum(self.clocks)

    @property
    def weight(self) -> float:
        """The weight of this rank's changes in the mean of all ranks."""
        return 1.0 if self.pace is None else self.pace.weight

    def residual(self, name: str) -> Tensor:
        """This rank's residual of a parameter, a flat float32 tensor."""
        return self._codec.ensure_residuals(name, self.shared[name])["residual"]

    # What the model holds

    @torch.no_grad()
    def look_ahead(self, names: Iterable[str] | None = None) -> None:
        """Begin a round for those parameters, by default all, that show the shared values.

        What was written to them since they showed these, for example by clamping, is adopted first.
        """
        shown = [name for name in (self.parameters if names is None else names) if name not in self.ahead]
        if not shown:
            return
        together = [name for name in shown if self._in_kernels(name)] if not self.rounds.overlap else []
        _native.look_ahead(self._located(together).shown, self._look_ahead)
        self._written(together)
        self.ahead.update(together)
        for name in shown:
            if name not in self.ahead:
                self._adopt(name)
                self._begin(name)

    def _in_kernels(self, name: str) -> bool:
        """Whether kernels can write to a parameter."""
        p = self.parameters[name]
        return p.is_cpu and p.dtype is torch.float32 and p.is_contiguous() and self._codec.kernels != "torch"

    def _located(self, names: Sequence[str]) -> _Places:
        """Where kernels find parameters that they can write to. It is found anew if a tensor has moved."""
        key = tuple(names)
        found, residuals = self._places.get(key), [self.residual(name) for name in names]
        at = [self.parameters[name].data_ptr() for name in names]
        if found is None or found.at != at or any(a is not b for a, b in zip(found.residuals, residuals, strict=True)):
            if len(self._places) > 64:  # parts of a model may be stepped in many combinations
                self._places.clear()
            parameters, shared = [self.parameters[name] for name in names], [self.shared[name] for name in names]
            found = self._places[key] = _Places(parameters, shared, residuals)
        return found

    def _written(self, names: Iterable[str]) -> None:
        """Tell autograd that kernels wrote to parameters, so that it refuses graphs of what they were before."""
        increment_version([self.parameters[name] for name in names])

    def _adopt(self, name: str) -> None:
        if not self._shows(name):
            self.shared[name].copy_(_flat(self.parameters[name]))

    def _shows(self, name: str) -> bool:
        p, shared = self.parameters[name], self.shared[name]
        return torch.equal(p, shared.view_as(p).to(p.dtype))

    def _begin(self, name: str, unweighted: Tensor | None = None) -> None:
        """Write the look-ahead to a parameter, and keep it if the exchange is going to change what it is made of.

        unweighted: the part of the change under way that the residual lacks, because the change has a weight.
        """
        p, start = self.parameters[name], self._start(name)
        if unweighted is not None:
            start -= unweighted
        p.copy_(start.view_as(p))
        self.ahead.add(name)
        if self.rounds.overlap:
            self._starts[name] = start

    def _start(self, name: str) -> Tensor:
        """Where the round of a parameter begins or has begun: float32, and rounded exactly as the kernels round it."""
        return self.shared[name] - self.residual(name) * self._look_ahead

    @torch.no_grad()
    def show(self, names: Iterable[str] | None = None) -> None:
        """Write the shared values to parameters, by default to those that hold the local view, which is dropped."""
        for name in list(self.ahead) if names is None else names:
            p = self.parameters[name]
            p.copy_(self.shared[name].view_as(p))
            self.ahead.discard(name)
            self._starts.pop(name, None)

    def swap(self, *, ahead: bool) -> None:
        """Write shared parameters for an evaluation, or the local view again after it, unnoticed by autograd.

        A graph may be waiting for its backward pass meanwhile. It finds the same values as before.
        """
        self.before_writing()
        if ahead:
            for name, view in self._aside.items():
                self.parameters[name].data.copy_(view)
            self._aside.clear()
            return
        for name in self.ahead:
            p = self.parameters[name]
            self._aside[name] = p.detach().clone()
            p.data.copy_(self.shared[name].view_as(p))

    @torch.no_grad()
    def before_loading(self) -> None:
        """Show the shared values: what is not loaded must not stay at the local view. `adopt` goes on from there."""
        self.finish()
        views = {name: self.parameters[name].detach().clone() for name in self.ahead}
        self._round = {n: (view, self._starts.get(n), self.residual(n).clone()) for n, view in views.items()}
        self.absorb()

    @torch.no_grad()
    def adopt(self) -> None:
        """Take the model's parameters as the shared ones, after they were loaded.

        If these are the shared ones already, for example of a checkpoint that the link has loaded, the round goes on.
        """
        before, self._round = self._round, {}
        if before and all(map(self._shows, self.parameters)):
            for name, (view, start, residual) in before.items():
                self.parameters[name].copy_(view)
                self.residual(name).copy_(residual)
                self._starts.update({} if start is None else {name: start})
            self.ahead.update(before)
            return
        for name in self.parameters:
            self._adopt(name)
        self.ahead.clear()
        self._starts.clear()

    @torch.no_grad()
    def absorb(self) -> None:
        """Finish what is under way, add what this round changed so far to the residuals, and show the shared values."""
        self.finish()
        self.before_writing()
        self._accumulate(list(self.ahead), decay=1.0)
        self.show()

    # A round

    def count(self, index: int, *, finite: bool = True) -> bool:
        """Count a step of an optimizer; returns whether its round ends, so that its change is to be exchanged."""
        self.taken[index] += 1
        self._stepped[index] |= finite
        return self.rounds.ends(self.taken[index])

    @torch.no_grad()
    def jobs(self, index: int) -> list[Job]:
        """End an optimizer's round: add what it changed to the residuals; returns the exchanges of its parameters.

        The model's own memory receives the mean where it can. If a change is not finite, or no step of the round had a
        finite gradient, the exchange tells all ranks.
        """
        jobs, buckets = [], self.buckets[index]
        for at, names in enumerate(buckets):
            tensors = {}
            overlap, weight = self.rounds.overlap, self.weight
            unweighted = {n: self._changed(n) * (1.0 - weight) for n in names if overlap and weight != 1.0}
            for name, finite in self._accumulate(names, self._decay).items():
                residual = self.residual(name)
                good = finite and self._stepped[index]
                tensors[name] = residual if good else torch.full_like(residual, torch.nan)
                if overlap:
                    self._begin(name, unweighted.get(name))  # before the exchange changes the residual
            outs = self._outputs(names)
            jobs.append(
                Job(torch.empty(0), tensors, at == 0, at == len(buckets) - 1, outs=outs, step=self.clocks[index])
            )
        self.clocks[index] += 1
        self.taken[index], self._stepped[index] = 0, False
        return jobs

    def _changed(self, name: str) -> Tensor:
        """What the round has changed in a parameter so far, where that is finite."""
        start = self._starts[name] if name in self._starts else self._start(name)
        change = change_of(start, self.parameters[name].detach())
        return torch.where(change.isfinite(), change, 0.0)

    def _accumulate(self, names: Iterable[str], decay: float) -> dict[str, bool]:
        """Add what changed in parameters to their residuals; returns by name whether it was finite."""
        names = list(names)
        if self.weight == 1.0 and not self._starts and all(map(self._in_kernels, names)):
            ahead = self._look_ahead
            calls = [(*changed, ahead) for changed in self._located(names).changed]
            return dict(zip(names, _native.accumulate_updates(calls, decay), strict=True))
        finite, together = {}, {}
        for name in names:
            p, residual = self.parameters[name].detach().contiguous(), self.residual(name)
            start = self._starts.pop(name, None)
            base, ahead = (self.shared[name], self._look_ahead) if start is None else (start, 0.0)
            if p.device.type == "cpu" and self._codec.kernels != "torch" and self.weight == 1.0:
                together[name] = (base, residual, p, ahead)
            else:
                finite[name] = accumulate_update(base, residual, p, ahead, decay, self.weight)
        calls = [(b.data_ptr(), r.data_ptr(), array_args(p), ahead) for b, r, p, ahead in together.values()]
        finite |= zip(together, _native.accumulate_updates(calls, decay), strict=True)
        return finite

    def _outputs(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Memory for means: the parameters' own if kernels can write to it. It is written anew after the exchange."""
        if self.rounds.overlap:
            return {n: self._means.setdefault(n, torch.empty(self.parameters[n].numel())) for n in names}
        if all(map(self._in_kernels, names)):
            return dict(zip(names, self._located(names).flat, strict=True))
        parameters = {name: self.parameters[name] for name in names}
        return {
            name: p.detach().view(-1) if self._in_kernels(name) else torch.empty(p.numel())
            for name, p in parameters.items()
        }

    @torch.no_grad()
    def apply(self, jobs: Sequence[Job], *, skipped: bool) -> None:
        """Let the outer optimizer move the shared parameters by the means of finished exchanges.

        Without overlap the model shows them from then on.
        """
        means = {name: mean for job in jobs for name, mean in (job.outs or {}).items()}
        if not self._keeps:
            for name in means:
                self.residual(name).zero_()
        if self.rounds.outer == SGD(1.0) and not self.rounds.overlap and not skipped:
            together = [name for name in means if self._in_kernels(name)]
            self._show_means({name: means.pop(name) for name in together})
        for name, mean in means.items():
            if not skipped:
                shared = self.shared[name]
                self.rounds.outer.step(shared, mean.to(shared.device), self._outer[name])
        if not self.rounds.overlap:
            self.show(means)

    def _show_means(self, means: Mapping[str, Tensor]) -> None:
        """Subtract means from the shared parameters and show these: a step of SGD(1.0) in one pass."""
        places = zip(self._located(list(means)).shown, means.values(), strict=True)
        _native.apply_means([(p, shared, mean.data_ptr(), n) for (p, shared, _, n), mean in places])
        self._written(means)
        self.ahead.difference_update(means)

    def begin(self, index: int, jobs: list[Job], pending: Pending) -> None:
        """Note that an optimizer's exchange is under way."""
        self._under_way[index] = jobs, pending

    @property
    def waits(self) -> bool:
        """Whether `finish` would have to wait."""
        return not all(pending.done() for _, pending in self._under_way.values())

    def finish(self, index: int | None = None) -> None:
        """Wait for all exchanges under way and apply them; with an index only if that optimizer's is one of them.

        It waits for all of them, because nothing may change shared parameters while an exchange compares them.
        """
        if index is not None and index not in self._under_way:
            return
        under_way, self._under_way = self._under_way, {}
        skipped = {each: pending.wait() for each, (_, pending) in under_way.items()}
        for each, (jobs, _) in under_way.items():
            self.apply(jobs, skipped=skipped[each])

    @torch.no_grad()
    def flush(self, mean: Callable[[Tensor], None]) -> None:
        """Apply the mean of all ranks' residuals, which `mean` computes in place, and clear them.

        This includes what an unfinished round has changed. The outer optimizer takes no part in it.
        """
        self.absorb()
        for name, shared in self.shared.items():
            residual = self.residual(name)
            total = residual.cpu().clone()
            mean(total)
            shared -= total.to(shared.device)
            residual.zero_()
        self.show(self.parameters)

    # State

    def state_dict(self) -> dict[str, Any]:
        """The shared parameters, the clocks, the present round, and the states of all optimizers, by parameter name."""
        self.finish()
        optimizers = [
            {name: _copied(o.state[p]) for name, p in self.owned.items() if p in o.state} for o in self.optimizers
        ]
        rounds = {
            "taken": list(self.taken),
            "stepped": list(self._stepped),
            "local": {name: _flat(self.parameters[name]).clone() for name in self.shared if name in self.ahead},
            "starts": {n: self._starts.get(n, self._start(n)).clone() for n in self.shared if n in self.ahead},
        }
        return {
            **({"setting": self.setting} if self.setting else {}),
            **({"pace": self.pace.state_dict()} if self.pace is not None else {}),
            "shared": {name: t.clone() for name, t in self.shared.items()},
            "clocks": list(self.clocks),
            "round": rounds,
            "outer": _copied(self._outer),
            "optimizers": optimizers,
        }

    def check(self, state: Any, strict: bool) -> None:
        """ValueError unless a state fits these parameters and optimizers; if `strict` is false, it may lack some."""
        fields = {"shared", "clocks", "round", "outer", "optimizers"}
        if not isinstance(state, Mapping) or set(state) - {"setting", "pace"} != fields:
            raise ValueError("the state of the updates lacks its shared parameters, clocks, round or optimizers")
        shared, clocks, optimizers = state["shared"], state["clocks"], state["optimizers"]
        if not isinstance(shared, Mapping) or (
            set(shared) != set(self.shared) if strict else set(shared) - {*self.shared}
        ):
            raise ValueError("the state's shared parameters are not those of this model")
        for name, tensor in shared.items():
            _check_tensor(f"{name}: the state's shared parameter", tensor, self.shared[name].numel())
        if not _are_counts(clocks) or not isinstance(optimizers, list) or not all(map(_is_mapping, optimizers)):
            raise ValueError("the clocks or optimizers of the state are not lists of numbers and of optimizer states")
        if not len(clocks) == len(optimizers) == len(self.optimizers):
            raise ValueError(f"the state is of {len(clocks)} optimizers, here are {len(self.optimizers)}")
        self._check_round(state["round"])
        check_pace(state.get("pace"))
        check_state(state["outer"], self.shared)
        for name, values in (entry for optimizer in optimizers for entry in optimizer.items()):
            if not isinstance(values, Mapping):
                raise ValueError(f"{name}: the optimizer's state is not a dict")
            numel = self.parameters[name].numel() if name in self.parameters else None
            for key, value in values.items():
                if isinstance(value, Tensor) and value.dim():
                    _check_tensor(f"{name}: the optimizer's {key}", value, numel)

    def adopt_setting(self, state: Mapping[str, Any]) -> None:
        """Under "auto": continue with the preset that a state was saved with, before the rest of it is loaded."""
        self.use(str(state.get("setting", "")))

    def _check_round(self, state: Any) -> None:
        fields = {"taken", "stepped", "local", "starts"}
        if not isinstance(state, Mapping) or set(state) != fields or not _are_counts(state["taken"]):
            raise ValueError("the state's round lacks its counts of steps or its local view")
        local, starts = state["local"], state["starts"]
        if len(state["taken"]) != len(self.optimizers) or not isinstance(state["stepped"], list):
            raise ValueError("the state's round is not one of this number of optimizers")
        if not _is_mapping(local) or not _is_mapping(starts) or set(local) != set(starts):
            raise ValueError("the state's local view has no start, or the reverse")
        for what, tensors in (("local view", local), ("start of the round", starts)):
            for name, tensor in tensors.items():
                numel = self.shared[name].numel() if name in self.shared else None
                _check_tensor(f"{name}: the state's {what}", tensor, numel)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `check` accepted."""
        self.before_writing()
        self._under_way.clear()  # the link has waited for it, and what it would be applied to is replaced
        for name, tensor in state["shared"].items():
            self.shared[name].copy_(tensor.reshape(-1))
        self.clocks = [int(clock) for clock in state["clocks"]]
        if self.pace is not None:
            self.pace.load_state_dict(state.get("pace") or {})
        for name, slots in self._outer.items():
            saved = state["outer"].get(name, {})
            slots.clear()
            slots.update({key: t.reshape(-1).to(self.shared[name], copy=True) for key, t in saved.items()})
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            for name in values:
                if name in self.parameters:
                    part, whole = self.parameters[name], self.owned[name]
                    copies = _copied(values[name], part.device)
                    optimizer.state[whole] = {key: _owned_like(value, part, whole) for key, value in copies.items()}
        self.show(self.parameters)
        self._load_round(state["round"])

    def _load_round(self, state: Mapping[str, Any]) -> None:
        self.taken = [int(count) for count in state["taken"]]
        self._stepped = [bool(stepped) for stepped in state["stepped"]]
        for name, start in state["starts"].items():
            if name in self.parameters:
                p = self.parameters[name]
                p.copy_(state["local"][name].view_as(p))
                self._starts[name] = start.reshape(-1).to(self.shared[name], copy=True)
                self.ahead.add(name)


class LocalUpdates:
    """The updates of a single process, which exchanges none: its parameters are the shared ones, without a residual.

    It lets a training continue on one process, and on several again. Copies of the parameters are made only for that.
    """

    exchanges = 0

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        codec: Codec,
        rounds: Rounds,
        owned: Mapping[str, Tensor] | None = None,
        before_writing: Callable[[], None] = lambda: None,
    ) -> None:
        _decay_of(codec.feedback)  # refuses what several processes would refuse
        self._make = partial(Updates, parameters, optimizers, codec, rounds, owned, before_writing)

    @cached_property
    def _updates(self) -> Updates:
        return self._make()

    @property
    def shared(self) -> dict[str, Tensor]:
        """The parameters."""
        self._updates.adopt()
        return self._updates.shared

    def flush(self, mean: Callable[[Tensor], None]) -> None:
        """Do nothing: there is no residual."""

    def state_dict(self) -> dict[str, Any]:
        """The state of updates between two rounds, for any number of ranks."""
        self._updates.adopt()
        return self._updates.state_dict()

    def check(self, state: Any, strict: bool) -> None:
        """ValueError unless a state fits these parameters and optimizers; if `strict` is false, it may lack some."""
        self._updates.check(state, strict)

    def adopt_setting(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no network to choose a setting for."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `check` accepted, and apply what several ranks had not sent yet."""
        self._updates.load_state_dict(state)
        self._updates.flush(lambda residual: None)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(count) is int and count >= 0 for count in value)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _check_tensor(what: str, value: Any, numel: int | None) -> None:
    """ValueError unless this is a dense tensor of finite numbers, with so many elements if that is given."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        raise ValueError(f"{what} is not a dense tensor")
    if numel is not None and value.numel() != numel:
        raise ValueError(f"{what} has {value.numel()} elements, not {numel}")
    if not bool(value.isfinite().all()):
        raise ValueError(f"{what} is not finite")


def accumulate_update(
    shared: Tensor, residual: Tensor, local: Tensor, ahead: float, decay: float, weight: float = 1.0
) -> bool:
    """The kernel `accumulate_update` in torch operations, for any device and for changes that are weighted."""
    change = change_of(shared - residual * ahead, local) * weight
    finite = change.isfinite()
    total = (residual * decay + change).clamp_(-FLOAT_MAX, FLOAT_MAX)
    residual.copy_(torch.where(finite, total, residual))
    return bool(finite.all())


def _decay_of(feedback: Feedback) -> float:
    if isinstance(feedback, ErrorFeedback):
        return feedback.decay
    if isinstance(feedback, NoFeedback):
        return 1.0
    raise ValueError(
        f"{feedback} accumulates gradients, but the optimizer's updates are exchanged: use ErrorFeedback(), or "
        'domain="gradient"'
    )


def _names_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[str]:
    """The names of an optimizer's parameters, in the order of the model, which is the same on all ranks."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [name for ident, name in names.items() if ident in owned]


def _buckets(names: Sequence[str], parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Names in groups of at most BUCKET_ELEMENTS elements, or of a single larger parameter."""
    groups: list[list[str]] = []
    room = 0
    for name in names:
        n = parameters[name].numel()
        if n > room or not groups:
            groups.append([])
            room = BUCKET_ELEMENTS
        groups[-1].append(name)
        room -= n
    return groups


def _flat(p: Tensor) -> Tensor:
    return p.detach().reshape(-1)


def _owned_like(value: Any, part: Tensor, whole: Tensor) -> Any:
    """A loaded value of an optimizer's state: sharded as its parameter is, if it has the shape of this rank's part."""
    shaped = isinstance(value, Tensor) and value.dim() > 0 and value.shape == part.shape
    return shared_like(value, whole) if shaped else value


def _copied(value: Any, device: torch.device | None = None) -> Any:
    """A deep copy of an optimizer's state: tensors, numbers, lists and dicts."""
    if isinstance(value, Tensor):
        value = local_part(value)
        # Adam's `step` lives on the CPU wherever the parameter is.
        return value.detach().clone() if device is None or value.dim() == 0 else value.detach().clone().to(device)
    if isinstance(value, Mapping):
        return {key: _copied(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item, device) for item in value]
    return value
