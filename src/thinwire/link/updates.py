"""Updates: the parameters that all ranks share, and what this rank's optimizer changed since they were last equal.

In the update domain every rank runs the user's optimizer on its own gradient. `shared` holds the parameters that all
ranks agree on, bit for bit. A rank's residual is the sum of its own changes that were not sent yet. The forward pass of
a training step runs at shared - LOOK_AHEAD * residual, so that a rank's own changes are never late for itself. At all
other times the model shows `shared`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import _native
from thinwire.codec.codec import Codec
from thinwire.codec.feedback import FLOAT_MAX, Accumulated, ErrorFeedback, Feedback, NoFeedback, array_args
from thinwire.link.link import Job

# Elements that are exchanged together. One exchange costs a round trip; much larger ones would keep the network idle
# while the first of them is compressed.
BUCKET_ELEMENTS = 1 << 23
# How far a training step looks ahead, in residuals. The residuals of other ranks resemble a rank's own and are late as
# well: a small GPT reached a lower loss with 1.2 and 1.5 than with 1.0 and 2.0 (docs/lab-notebook.md).
LOOK_AHEAD = 1.4


class Updates:
    """The shared parameters and the residuals of one attached model, which several optimizers may update."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer], codec: Codec
    ) -> None:
        self.parameters = dict(parameters)
        self.optimizers = list(optimizers)
        self.shared = {name: _flat(p).to(torch.float32, copy=True) for name, p in parameters.items()}
        self.ahead: set[str] = set()  # parameters that hold the look-ahead instead of the shared values
        self.clocks = [0] * len(self.optimizers)  # steps of each optimizer
        self._codec = codec
        self._decay = _decay_of(codec.feedback)
        self._keeps = not isinstance(codec.feedback, NoFeedback)
        codec.feedback = Accumulated()
        names = {id(p): name for name, p in parameters.items()}
        self.buckets = [_buckets(_names_of(o, names), self.parameters) for o in self.optimizers]

    def residual(self, name: str) -> Tensor:
        """This rank's residual of a parameter, a flat float32 tensor."""
        return self._codec.ensure_residuals(name, self.shared[name])["residual"]

    # What the model holds

    @torch.no_grad()
    def look_ahead(self, names: Iterable[str] | None = None) -> None:
        """Write the look-ahead to parameters, by default to all, from which the next step begins.

        What was written to them since they showed the shared values, for example by clamping, is adopted first.
        """
        for name in self.parameters if names is None else names:
            if name not in self.ahead:
                p = self.parameters[name]
                self._adopt(name)
                p.copy_(self._start(name).view_as(p))
                self.ahead.add(name)

    def _adopt(self, name: str) -> None:
        p, shared = self.parameters[name], self.shared[name]
        if not torch.equal(p, shared.view_as(p).to(p.dtype)):
            shared.copy_(_flat(p))

    def _start(self, name: str) -> Tensor:
        """The look-ahead of a parameter: float32, and rounded exactly as the kernels round it."""
        return self.shared[name] - self.residual(name) * LOOK_AHEAD

    @torch.no_grad()
    def show(self, names: Iterable[str] | None = None) -> None:
        """Write the shared values to parameters, by default to those that hold the look-ahead."""
        for name in list(self.ahead) if names is None else names:
            p = self.parameters[name]
            p.copy_(self.shared[name].view_as(p))
            self.ahead.discard(name)

    def swap(self, *, ahead: bool) -> None:
        """Write shared parameters for an evaluation, or the look-ahead again after it, unnoticed by autograd.

        A graph may be waiting for its backward pass meanwhile. It finds the same values as before.
        """
        for name in self.ahead:
            p = self.parameters[name]
            p.data.copy_((self._start(name) if ahead else self.shared[name]).view_as(p))

    @torch.no_grad()
    def adopt(self) -> None:
        """Take the model's parameters as the shared ones, after they were loaded."""
        for name in self.parameters:
            self._adopt(name)
        self.ahead.clear()

    # A step

    @torch.no_grad()
    def jobs(self, index: int, *, finite: bool = True) -> list[Job]:
        """Add what an optimizer changed to the residuals; returns the exchanges of its parameters.

        The model's own memory receives the mean where it can. If a change is not finite, its exchange tells all ranks.
        """
        jobs, buckets = [], self.buckets[index]
        for at, names in enumerate(buckets):
            tensors = {}
            for name in names:
                good = self._accumulate(name) and finite
                residual = self.residual(name)
                tensors[name] = residual if good else torch.full_like(residual, torch.nan)
            outs = {name: _output(self.parameters[name]) for name in names}
            jobs.append(
                Job(torch.empty(0), tensors, at == 0, at == len(buckets) - 1, outs=outs, step=self.clocks[index])
            )
        self.clocks[index] += 1
        return jobs

    def _accumulate(self, name: str) -> bool:
        """Add one parameter's change to its residual; returns whether it was finite."""
        p, shared, residual = self.parameters[name].detach().contiguous(), self.shared[name], self.residual(name)
        if p.device.type == "cpu" and self._codec.kernels != "torch":
            return _native.accumulate_update(
                shared.data_ptr(), residual.data_ptr(), array_args(p), LOOK_AHEAD, self._decay
            )
        return accumulate_update(shared, residual, p, LOOK_AHEAD, self._decay)

    @torch.no_grad()
    def apply(self, jobs: Sequence[Job], *, skipped: bool) -> None:
        """Subtract the means of finished exchanges from the shared parameters, and show them."""
        for job in jobs:
            assert job.outs is not None
            for name, mean in job.outs.items():
                if not skipped:
                    self.shared[name] -= mean.to(self.shared[name].device)
                if not self._keeps:
                    self.residual(name).zero_()
        self.show([name for job in jobs for name in job.tensors])

    @torch.no_grad()
    def flush(self, mean: Callable[[Tensor], None]) -> None:
        """Apply the mean of all ranks' residuals, which `mean` computes in place, and clear them."""
        for name, shared in self.shared.items():
            residual = self.residual(name)
            total = residual.cpu().clone()
            mean(total)
            shared -= total.to(shared.device)
            residual.zero_()
        self.show(self.parameters)

    # State

    def state_dict(self) -> dict[str, Any]:
        """The shared parameters, the clocks, and the states of this rank's optimizers, by parameter name."""
        optimizers = [
            {name: _copied(o.state[p]) for name, p in self.parameters.items() if p in o.state} for o in self.optimizers
        ]
        shared = {name: t.clone() for name, t in self.shared.items()}
        return {"shared": shared, "clocks": list(self.clocks), "optimizers": optimizers}

    def check(self, state: Any, strict: bool) -> None:
        """ValueError unless a state fits these parameters and optimizers; if `strict` is false, it may lack some."""
        if not isinstance(state, Mapping) or set(state) != {"shared", "clocks", "optimizers"}:
            raise ValueError("the state of the updates lacks its shared parameters, clocks or optimizers")
        shared, clocks, optimizers = state["shared"], state["clocks"], state["optimizers"]
        if not isinstance(shared, Mapping) or (
            set(shared) != set(self.shared) if strict else set(shared) - {*self.shared}
        ):
            raise ValueError("the state's shared parameters are not those of this model")
        for name, tensor in shared.items():
            _check_tensor(f"{name}: the state's shared parameter", tensor, self.shared[name].numel())
        counts = isinstance(clocks, list) and all(type(clock) is int and clock >= 0 for clock in clocks)
        if not counts or not isinstance(optimizers, list) or not all(isinstance(o, Mapping) for o in optimizers):
            raise ValueError("the clocks or optimizers of the state are not lists of numbers and of optimizer states")
        if not len(clocks) == len(optimizers) == len(self.optimizers):
            raise ValueError(f"the state is of {len(clocks)} optimizers, here are {len(self.optimizers)}")
        for name, values in (entry for optimizer in optimizers for entry in optimizer.items()):
            if not isinstance(values, Mapping):
                raise ValueError(f"{name}: the optimizer's state is not a dict")
            numel = self.parameters[name].numel() if name in self.parameters else None
            for key, value in values.items():
                if isinstance(value, Tensor) and value.dim():
                    _check_tensor(f"{name}: the optimizer's {key}", value, numel)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `check` accepted."""
        for name, tensor in state["shared"].items():
            self.shared[name].copy_(tensor.reshape(-1))
        self.clocks = [int(clock) for clock in state["clocks"]]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            for name, values in saved.items():
                if name in self.parameters:
                    optimizer.state[self.parameters[name]] = _copied(values, self.parameters[name].device)
        self.show(self.parameters)


def _check_tensor(what: str, value: Any, numel: int | None) -> None:
    """ValueError unless this is a dense tensor of finite numbers, with so many elements if that is given."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        raise ValueError(f"{what} is not a dense tensor")
    if numel is not None and value.numel() != numel:
        raise ValueError(f"{what} has {value.numel()} elements, not {numel}")
    if not bool(value.isfinite().all()):
        raise ValueError(f"{what} is not finite")


def accumulate_update(shared: Tensor, residual: Tensor, local: Tensor, ahead: float, decay: float) -> bool:
    """The kernel `accumulate_update` in torch operations, for any device."""
    start = (shared - residual * ahead).to(local.dtype).float()
    change = start - local.reshape(-1).float()
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


def _output(p: Tensor) -> Tensor:
    """Memory for the mean: the parameter's own if kernels can write to it. It is written anew after the exchange."""
    fits = p.device.type == "cpu" and p.dtype == torch.float32 and p.is_contiguous()
    return p.detach().view(-1) if fits else torch.empty(p.numel())


def _copied(value: Any, device: torch.device | None = None) -> Any:
    """A deep copy of an optimizer's state: tensors, numbers, lists and dicts."""
    if isinstance(value, Tensor):
        # Adam's `step` lives on the CPU wherever the parameter is.
        return value.detach().clone() if device is None or value.dim() == 0 else value.detach().clone().to(device)
    if isinstance(value, Mapping):
        return {key: _copied(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item, device) for item in value]
    return value
