"""Worker: trains a model with a parameter server, and is used like an optimizer.

Gradients are pushed as the backward pass computes them. The next forward pass waits only for the layer that it needs.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thinwire.codec.codec import Codec
from thinwire.codec.feedback import first_not_finite
from thinwire.errors import ServerError, ThinwireError
from thinwire.server.client import HELLO_EVERY, Client, StepTimes, WorkerTimings
from thinwire.server.layout import trained
from thinwire.server.protocol import Session, Waiting, hello_of, server_codec
from thinwire.transport.addresses import connect
from thinwire.transport.base import Connection

T = TypeVar("T")
OnWait = Callable[[Waiting], None]
# Seconds in which the last gradients may be acknowledged when a worker leaves.
_LEAVE_TIMEOUT = 2.0


class ClientThread(threading.Thread):
    """Drives a client: all its input and output, in a thread of its own. The worker's thread waits here.

    patience: raise ServerError after so many seconds without a message from the server.
    """

    def __init__(
        self, client: Client, connection: Connection, address: str, patience: float, on_wait: OnWait | None
    ) -> None:
        super().__init__(name="thinwire-worker", daemon=True)
        self.client, self.connection = client, connection
        self._address, self._patience, self._on_wait = address, patience, on_wait
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()  # held while a message changes the client's state
        self._blocked: tuple[str, float] | None = None  # what the worker's thread waits for, and since when
        self._error: Exception | None = None
        self._ending = False
        connection.on_report = client.on_report

    # For the worker's thread

    def submit(self, job: Callable[[], None]) -> None:
        """Let the client's thread call something."""
        self._jobs.append(job)
        self.connection.wake()

    def leave(self) -> None:
        """Leave the training and end the thread."""
        self._ending = True
        self.connection.wake()
        if self.ident is not None:
            self.join(10.0)

    def wait(self, layers: Sequence[int], clock: int) -> bool:
        """Wait until these layers are fresh enough for a step; return False if the session or the training ended."""
        return self._wait_for(lambda: self.client.arrived(layers, clock), f"the parameters of step {clock}")

    def wait_for_session(self) -> Session | None:
        """Wait until the server has admitted this worker; return None if training has ended."""
        client = self.client

        def admitted() -> tuple[Session | None] | None:
            return None if client.session is None and client.stopped is None else (client.accept_session(),)

        client.request_session(time.monotonic())
        self.connection.wake()
        return self._wait_for(admitted, "other workers to join, before training begins")[0]

    def waiting(self) -> Waiting | None:
        """Return what the worker's thread waits for and how long it has, or None if it does not wait."""
        blocked, session, now = self._blocked, self.client.session, time.monotonic()
        if blocked is None or self.client.stopped is not None:
            return None
        silent = now - self.client.heard
        # A live server answers each HELLO message and each heartbeat.
        if not self.client.received or silent > (2 * HELLO_EVERY if session is None else session.timeout / 2):
            return Waiting(f"an answer from {self._address}", silent)
        return Waiting(blocked[0], now - blocked[1])

    def _wait_for(self, outcome: Callable[[], T | None], what: str) -> T:
        """Wait until there is an outcome, and return it. Raise an error of the client's thread."""
        try:
            while True:
                with self._changed:
                    if self._error is not None and self.client.stopped is None:  # after the end the server may be gone
                        raise self._error
                    if (found := outcome()) is not None:
                        return found
                    self._blocked = self._blocked or (what, time.monotonic())
                    self._changed.wait(1.0)
                self._check_server()
        finally:
            self._blocked = None

    def _check_server(self) -> None:
        """Raise ServerError if the server has been silent for too long; tell the owner what the worker waits for."""
        # As long as any message arrives the server is alive, and other workers are slow.
        if time.monotonic() - self.client.heard > self._patience:
            raise ServerError(f"no message from the server has arrived for {self._patience:g} s: is it still running?")
        waiting = self.waiting()
        if self._on_wait is not None and waiting is not None and waiting.seconds >= 1.0:
            self._on_wait(waiting)

    # The client's thread

    def run(self) -> None:
        client = self.client
        try:
            while not self._ending:
                self._turn()
            until = time.monotonic() + _LEAVE_TIMEOUT
            # The server acknowledges the gradients of the last step when they arrive.
            while (self._jobs or client.pushes.busy) and client.goes_on and time.monotonic() < until:
                self._turn()
            client.leave(time.monotonic())
            self._transmit()
        except Exception as error:
            self._error = error if isinstance(error, ThinwireError) else ServerError(f"the worker failed: {error}")
            self._error.__cause__ = error.__cause__ if self._error is error else error
        finally:
            self.connection.close()
            with self._changed:
                self._changed.notify_all()

    def _turn(self) -> None:
        self.client.on_timer(time.monotonic())
        while self._jobs:
            self._jobs.popleft()()
        self._transmit()
        for parts in self.connection.poll(0.0 if self._jobs else self.client.pause):
            with self._changed:
                if self.client.receive(parts, time.monotonic()):
                    self._changed.notify_all()
        self._transmit()

    def _transmit(self) -> None:
        client = self.client
        client.piece_bytes = self.connection.piece_bytes  # the server may have told it another mtu
        while (out := client.next_outgoing(time.monotonic())) is not None:
            if out.shards is None:
                self.connection.send(out.parts)
            else:
                client.pushes.on_ticket(out, self.connection.send_pieces(bytes(out.parts[0]), out.shards))


class LocalSteps:
    """Steps of a worker's own optimizer between two pushes."""

    def __init__(self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, every: int) -> None:
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if missing := next((name for name, p in parameters.items() if id(p) not in owned), None):
            raise ValueError(f"the worker's optimizer does not hold {missing}: give it all parameters of the model")
        if type(every) is not int or every < 1:
            raise ValueError(f"every is a number of steps from 1, not {every!r}")
        self._parameters, self._optimizer, self._every = parameters, optimizer, every
        self._taken = 0
        self._starts: dict[str, Tensor] = {}  # the parameters at the beginning of the round

    @torch.no_grad()
    def step(self) -> bool:
        """Step the optimizer, unless a gradient is not finite; return whether the round ends.

        At its end the gradients are what the round has changed, start - end, and the model is as the server knows it.
        """
        if not self._taken:
            self._starts = {name: p.detach().clone() for name, p in self._parameters.items()}
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None and not p.grad.is_sparse]
        if first_not_finite([gradient.contiguous() for gradient in gradients]) < 0:
            self._optimizer.step()
        self._taken += 1
        for p in self._parameters.values():
            p.grad = None
        if self._taken < self._every:
            return False
        for name, p in self._parameters.items():
            start = self._starts.pop(name)
            p.grad = start - p
            p.copy_(start)
        self._taken = 0
        return True

    def begin(self) -> None:
        """Give up the present round: the parameters were received anew."""
        self._taken = 0


class Worker:
    """One worker of a parameter server: call `backward()` as usual, then `step()` in place of an optimizer's.

    There is no need to call `zero_grad`. Creating a worker waits until the server admits it.

    codec: how gradients are sent: a codec, preset or density; None lets the server choose.
    recipe: must be the server's.
    optimizer: trains this worker's model, and what it has changed in `every` steps is pushed in place of gradients; the
        server was made without an optimizer. Everything is then pushed and pulled in every `every`-th `step`.
    overlap: push during the backward pass and pull during the next forward pass; p.grad is then removed as soon as it
        is computed. Without overlap `step` does all of that, so that gradients can be clipped before.
    slot: the number that this worker asks for among all workers. name: shown by the server; default: the host's name.
    keys: folder with this worker's key and the server's.
    patience: raise ServerError after so many seconds without a message from the server.
    on_wait: called in the worker's thread about every second while it waits for the server, with what it waits for.
    """

    def __init__(
        self,
        address: str | Connection,
        model: nn.Module,
        codec: Codec | float | str | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        every: int = 1,
        recipe: str = "",
        overlap: bool = True,
        slot: int | None = None,
        name: str | None = None,
        keys: Path | None = None,
        patience: float = 300.0,
        on_wait: OnWait | None = None,
    ) -> None:
        self.model, self.overlap = model, overlap and optimizer is None
        self._parameters = trained(model)
        self._local = LocalSteps(self._parameters, optimizer, every) if optimizer is not None else None
        if optimizer is None and every != 1:
            raise ValueError("every counts local steps of the worker's own optimizer: give it as optimizer=")
        self._names = {id(p): name for name, p in self._parameters.items()}
        chosen = None if codec is None else server_codec(codec)
        connection = connect(address, keys=keys) if isinstance(address, str) else address
        try:
            domain = "gradient" if self._local is None else "update"
            hello, now = hello_of(model, recipe, slot, name, domain), time.monotonic()
            self._client = Client(model, chosen, hello, now, piece_bytes=connection.piece_bytes)
        except BaseException:
            connection.close()
            raise
        self.clock = 0  # the step that is being computed
        self._session: Session | None = None
        self._handles: list[Any] = []
        # In the present step: layers that were pushed, modules that were called, and the layers of those.
        self._pushed: set[int] = set()
        self._called: set[str] = set()
        self._called_layers: set[int] = set()
        self._accumulating = False
        where = address if isinstance(address, str) else "the server"
        self._thread = ClientThread(self._client, connection, where, patience, on_wait)
        self._thread.start()
        try:
            self._synchronise()
            self.timings.begin(time.monotonic())
            if self._session is not None and self.overlap:
                self._install()
        except BaseException:
            self.close()
            raise

    # For training loops

    def step(self) -> None:
        """Push the gradients that are not pushed yet, and go on to the next step. After the end it does nothing.

        With an optimizer it steps that one, and pushes at the end of a round what the optimizer has changed.
        """
        if self.stopped is not None or self._session is None:
            return
        if self._local is not None and not self._local.step():
            return
        computed = time.monotonic()
        session, layers = self._session, range(len(self._session.layout.layers))
        # A layer that this step does not use was pulled all the same. Its push must not overtake that pull.
        unused = [i for i in layers if i not in self._pushed and i not in self._called_layers]
        if self.overlap and unused:
            self._await(unused)
        for layer in layers:
            if layer not in self._pushed:
                self._push(session, layer)
        self.timings.end_step(self.clock, computed)
        self.clock += 1
        # No hook tells when the parameters of a module that is not called are used, so they are waited for now.
        called = [self._called.issuperset(layer.modules) for layer in session.layout.layers]
        self._begin_step()
        if self._client.lost or self._client.session is None:
            self._synchronise()
            return
        early = [i for i in layers if not self.overlap or not called[i]]
        if early:
            self._await(early)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as an optimizer does."""
        self.model.zero_grad(set_to_none)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within this context backward passes only add to p.grad. The next one outside pushes the sum."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def wait(self) -> None:
        """Wait until all parameters that the next step uses have arrived."""
        if self.stopped is not None or self._session is None:
            return
        arrived = self._await(list(range(len(self._session.layout.layers))))
        if not arrived and not self._pushed and self.stopped is None:
            self._synchronise()

    def waiting(self) -> Waiting | None:
        """Return what the worker waits for and how long it has, or None if it does not wait. Any thread may ask."""
        return self._thread.waiting()

    @property
    def stopped(self) -> str | None:
        """Why the server has ended training, or None while it goes on."""
        return self._client.stopped

    @property
    def slot(self) -> int:
        """This worker's number among all workers."""
        return self._session.slot if self._session is not None else 0

    @property
    def timings(self) -> WorkerTimings:
        """The times of single events, for profiles; `last` sums them up."""
        return self._client.timings

    @property
    def last(self) -> StepTimes:
        """The times of the last step."""
        return self.timings.last

    @property
    def codec(self) -> Codec:
        """The codec of the gradients; its residual holds what has not been sent."""
        return self._client.pushes.codec

    @property
    def tell(self) -> dict[str, Any]:
        """What `Server(tell=...)` sends to all workers."""
        return self._session.tell if self._session is not None else {}

    @property
    def layers(self) -> list[str]:
        """The layers' names, in their order."""
        return [modules[0] for modules in self.modules]

    @property
    def modules(self) -> list[tuple[str, ...]]:
        """The names of the modules of each layer."""
        return [layer.modules for layer in self._session.layout.layers] if self._session is not None else []

    def values(self, name: str) -> Tensor:
        """Return a parameter's exact float32 values, as the server knows them."""
        return self._client.parameters.rows[name]

    def report(self, **figures: Any) -> None:
        """Send figures of a step to the server, for its table and its log.

        Figures are numbers, None, short texts, and lists with a number for each layer. ValueError for anything else.
        Those of the last step are lost if the server has ended the training before they arrive.
        """
        message = self._client.figures(figures)
        self._thread.submit(lambda: self._client.report(message, time.monotonic()))

    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received so far."""
        return self._client.sent, self._client.received

    def losses(self) -> dict[str, float]:
        """Return the datagrams sent and lost so far, and the magnitudes that were added to the residual for them.

        All are 0 with transports that lose nothing.
        """
        figures = self._thread.connection.figures()
        sent, lost = (int(figures.get(name, 0)) for name in ("datagrams_sent", "datagrams_lost"))
        return {"datagrams": sent, "datagrams_lost": lost, "restored": self._client.pushes.restored}

    def close(self) -> None:
        """Leave the training; the model stays as it is."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._thread.leave()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Sessions

    def _synchronise(self) -> None:
        """Wait for a session and for all parameters in full, at the step that the server gives."""
        while True:
            session = self._thread.wait_for_session()
            if session is None:
                return
            self._session, self.clock = session, session.first
            if self._local is not None:
                self._local.begin()
            self._begin_step()
            self._layer_of = {name: i for i, layer in enumerate(session.layout.layers) for name in layer.parameters}
            self._thread.submit(partial(self._client.fetch, session, self.clock, time.monotonic()))
            if self._await(list(range(len(session.layout.layers)))) or self.stopped is not None:
                return

    def _begin_step(self) -> None:
        self._pushed.clear()
        self._called.clear()
        self._called_layers.clear()
        layers = self._session.layout.layers if self._session is not None else ()
        self._computed: list[set[str]] = [set() for _ in layers]  # by layer: parameters whose gradients are computed

    def _await(self, layers: list[int]) -> bool:
        began = time.monotonic()
        arrived = self._thread.wait(layers, self.clock)
        self.timings.waited(layers, self.clock, began, time.monotonic())
        return arrived

    # Hooks

    def _install(self) -> None:
        for parameter in self._parameters.values():
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))
        for name, module in self.model.named_modules():
            # A tied parameter belongs to one layer and is used by several modules: each must wait for it.
            own = {self._names[id(p)] for p in module.parameters(recurse=False) if id(p) in self._names}
            layers = sorted({self._layer_of[parameter] for parameter in own})
            if layers:
                hook = partial(self._on_forward, name, layers)
                self._handles.append(module.register_forward_pre_hook(hook))

    def _on_forward(self, module: str, layers: list[int], *_: Any) -> None:
        self._called.add(module)
        new = [layer for layer in layers if layer not in self._called_layers]
        if new and self.stopped is None:
            self._called_layers.update(new)
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
        self._computed[layer].add(name)
        if len(self._computed[layer]) == len(self._session.layout.layers[layer].parameters):
            self._push(self._session, layer)

    def _push(self, session: Session, layer: int) -> None:
        self._pushed.add(layer)
        parameters = {name: self._parameters[name] for name in session.layout.layers[layer].parameters}
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        for parameter in parameters.values():
            parameter.grad = None  # the client's thread reads it from now on
        self.timings.note(self.timings.ready, layer, self.clock, time.monotonic())
        self._thread.submit(partial(self._client.push, session, layer, self.clock, gradients))
