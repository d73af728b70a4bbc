"""Worker: a handle on the parameter server that works like an optimizer.

Gradients leave as the backward pass produces them, and the next forward pass waits for just the layer that it needs.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from thinwire.codec.codec import Codec
from thinwire.server.client import Courier, Pace, ServerError, StepTimes, Stopwatch
from thinwire.server.layout import trained
from thinwire.server.protocol import Session
from thinwire.transport.addresses import connect
from thinwire.transport.base import Connection
from thinwire.tune.presets import resolve_codec


class Worker:
    """One worker of a server: `backward()` as ever, then `step()` in place of an optimizer's.

    codec: how gradients are sent: a codec, preset or density; None: as the server says. recipe: must be the server's.
    overlap: push during the backward pass and pull during the next forward pass; p.grad is then taken away as soon
    as it is there. Without it `step` does all of that, so that gradients can be clipped before. There is no need to
    call `zero_grad`.
    slot: the number that this worker would like to have among all. patience: seconds without a sign of the server.
    """

    def __init__(
        self,
        address: str | Connection,
        model: nn.Module,
        codec: Codec | float | str | None = None,
        *,
        recipe: str = "",
        overlap: bool = True,
        slot: int | None = None,
        name: str | None = None,
        keys: Path | None = None,
        patience: float = 300.0,
    ) -> None:
        self.model, self.overlap = model, overlap
        self._patience = patience
        self._parameters = trained(model)
        self._names = {id(p): name for name, p in self._parameters.items()}
        chosen = None if codec is None else resolve_codec(codec)
        connection = connect(address, keys=keys) if isinstance(address, str) else address
        try:
            self._courier = Courier(connection, model, chosen, recipe=recipe, slot=slot, name=name)
        except BaseException:
            connection.close()
            raise
        self.clock = 0  # the step that is computed now
        self._session: Session | None = None
        self._handles: list[Any] = []
        self._pushed: set[int] = set()  # layers of this step
        self._fired: set[int] = set()  # layers of which a module was called in this step
        self._called: set[str] = set()  # those modules
        self._watch = Stopwatch(self._courier.pace)
        self._accumulating = False
        self._courier.start()
        try:
            self._synchronise()
            self._watch.begin()
            if self._session is not None:
                self._install()
        except BaseException:
            self.close()
            raise

    # For training loops

    def step(self) -> None:
        """End a step: what has not been pushed yet is, and the clock goes on. Does nothing after training ended."""
        if self.stopped is not None or self._session is None:
            return
        self._watch.computed()
        session, layers = self._session, range(len(self._session.layout.layers))
        # A layer that this step did without was asked for all the same: its push must not overtake the step before.
        unused = [i for i in layers if i not in self._pushed and i not in self._fired]
        if self.overlap and unused:
            self._await(unused)
        for layer in layers:
            if layer not in self._pushed:
                self._push(session, layer)
        self._watch.end_step(self.clock)
        self.clock += 1
        self._pushed.clear()
        for waiting in self._pending:
            waiting.clear()
        # A module that is not called shows nobody when its parameters are used.
        called = [self._called.issuperset(layer.modules) for layer in session.layout.layers]
        self._fired.clear()
        self._called.clear()
        if self._courier.standing.lost or self._courier.standing.session is None:
            self._synchronise()
            return
        early = [i for i in layers if not self.overlap or not called[i]]
        if early:
            self._await(early)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As an optimizer's."""
        self.model.zero_grad(set_to_none)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in here only add to p.grad; the next one outside pushes the sum."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def wait(self) -> None:
        """Return when all parameters are there that the next step will use."""
        if self.stopped is not None or self._session is None:
            return
        there = self._await(list(range(len(self._session.layout.layers))))
        if not there and not self._pushed and self.stopped is None:
            self._synchronise()

    @property
    def stopped(self) -> str | None:
        """Why the server has ended training, or None while it goes on."""
        return self._courier.standing.stopped

    @property
    def slot(self) -> int:
        """This worker's number among all that are there."""
        return self._session.slot if self._session is not None else 0

    @property
    def pace(self) -> Pace:
        """Where the time goes, for those who want to know more than `last` tells."""
        return self._courier.pace

    @property
    def last(self) -> StepTimes:
        """Where the time of the last step went."""
        return self._watch.last

    @property
    def codec(self) -> Codec:
        """How gradients are sent; its memory holds what has not been."""
        return self._courier.pushes.codec

    @property
    def tell(self) -> dict[str, Any]:
        """What the server tells all workers about the training."""
        return self._session.tell if self._session is not None else {}

    @property
    def layers(self) -> list[str]:
        """The layers' names, in their order."""
        return [layer.name for layer in self._session.layout.layers] if self._session is not None else []

    @property
    def modules(self) -> list[tuple[str, ...]]:
        """The names of the modules of each layer."""
        return [layer.modules for layer in self._session.layout.layers] if self._session is not None else []

    def values(self, name: str) -> Tensor:
        """A parameter's exact values, as the server knows them."""
        return self._courier.copies.row(name)

    def report(self, **figures: Any) -> None:
        """Tell the server figures of a step, for its table and its log."""
        self._courier.report(figures)

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        return self._courier.traffic()

    def losses(self) -> dict[str, float]:
        """Over udp: datagrams of gradients sent and lost so far, and the sum of magnitudes put back for them."""
        return self._courier.losses()

    def close(self) -> None:
        """Leave the server; the model stays as it is."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._courier.leave()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Sessions

    def _synchronise(self) -> None:
        """Begin a session: all parameters in full, at the clock that the server gives."""
        while True:
            session = self._courier.standing.wait_for_session(self._patience)
            if session is None:
                return
            self._take_terms(session)
            self._courier.fetch(session, self.clock)
            if self._await(list(range(len(session.layout.layers)))) or self.stopped is not None:
                return

    def _take_terms(self, session: Session) -> None:
        self._session, self.clock = session, session.first
        self._pushed.clear()
        self._fired.clear()
        self._called.clear()
        self._pending: list[set[str]] = [set() for _ in session.layout.layers]
        self._layer_of = {name: i for i, layer in enumerate(session.layout.layers) for name in layer.parameters}

    def _await(self, layers: list[int]) -> bool:
        began = time.monotonic()
        there = self._courier.standing.wait(layers, self.clock, self._patience)
        self._watch.waited(layers, self.clock, began)
        return there

    # Hooks

    def _install(self) -> None:
        if not self.overlap:
            return
        for parameter in self._parameters.values():
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))
        for name, module in self.model.named_modules():
            # A tied parameter is a layer's, and others' as well: whichever comes first must wait for it.
            own = {self._names[id(p)] for p in module.parameters(recurse=False) if id(p) in self._names}
            layers = sorted({self._layer_of[parameter] for parameter in own})
            if layers:
                self._handles.append(
                    module.register_forward_pre_hook(lambda *_, name=name, at=layers: self._on_forward(name, at))
                )

    def _on_forward(self, module: str, layers: list[int]) -> None:
        self._called.add(module)
        new = [layer for layer in layers if layer not in self._fired]
        if new and self.stopped is None:
            self._fired.update(new)
            self._await(new)

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._accumulating or self.stopped is not None or self._session is None:
            return
        name = self._names[id(parameter)]
        layer = self._layer_of[name]
        if layer in self._pushed:
            raise ServerError(
                f"a second backward pass reached {name} in one step: put all but the last in `with "
                "worker.accumulate():`, or use overlap=False"
            )
        self._pending[layer].add(name)
        if len(self._pending[layer]) == len(self._session.layout.layers[layer].parameters):
            self._push(self._session, layer)

    def _push(self, session: Session, layer: int) -> None:
        self._pushed.add(layer)
        gradients: dict[str, Tensor] = {}
        for name in session.layout.layers[layer].parameters:
            parameter = self._parameters[name]
            if parameter.grad is not None:
                gradients[name] = parameter.grad
                parameter.grad = None  # the courier reads it: nobody else may change it
        self.pace.note(self.pace.ready, layer, self.clock)
        self._courier.push(session, layer, self.clock, gradients)
