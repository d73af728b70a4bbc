"""Pushes: a worker's gradients on their way to the server, until it has taken them.

What has been encoded has left the codec's memory. What is then lost, or not counted by a server that starts again,
returns to it.
"""

import time
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from thinwire.codec.codec import Codec
from thinwire.codec.frame import Frame, FrameReader
from thinwire.server.copies import Copies
from thinwire.server.line import Line
from thinwire.server.lossy import Pushed, check_on_loss
from thinwire.server.messages import Kind, Message
from thinwire.server.pace import Pace
from thinwire.server.schedule import Request
from thinwire.server.session import Session
from thinwire.transport.pieces import pack_all

Gradients = Mapping[str, Tensor]
# A pull takes a header; an estimate of a push is corrected when it is encoded.
_PULL_BYTES = 64


class Pushes:
    """All pushes of one worker."""

    def __init__(self, codec: Codec, copies: Copies, pace: Pace, line: Line) -> None:
        self.codec = codec
        self._copies, self._pace, self._line = copies, pace, line
        self._gradients: dict[tuple[int, int], Gradients] = {}  # by layer and clock
        self.unacknowledged: dict[tuple[int, int, int], Frame | Pushed] = {}  # by layer, part and clock
        self._tickets: dict[int, Pushed] = {}  # pushes in pieces that are not reported yet
        self.restored = 0.0  # sum of the magnitudes that were lost on the way and returned to the memory

    @property
    def under_way(self) -> bool:
        """Whether any gradient waits to be sent, or to be acknowledged."""
        return bool(self._gradients or self.unacknowledged)

    def enqueue(self, session: Session, layer: int, clock: int, gradients: Gradients) -> None:
        """Let a layer's gradients wait for their turn, and after them the pulls for the next step."""
        self._gradients[layer, clock] = gradients
        for part, pieces in enumerate(session.layout.layers[layer].parts):
            sizes = [len(piece) for piece in pieces]
            size = self.codec.frame_bound(sizes, self.codec.expected_counts(sizes, clock))
            session.pool.put(Request("push", layer, part, clock, size))
            session.pool.put(Request("pull", layer, part, clock + 1, _PULL_BYTES))

    def send(self, session: Session, request: Request) -> None:
        """Encode a part, whose turn it is, and send it."""
        layer, part, clock = request.layer, request.part, request.clock
        gradients = self._gradients[layer, clock]
        pieces = session.layout.layers[layer].parts[part]
        views = self._copies.gradients(pieces, gradients)
        hold = [piece.name for piece in pieces if piece.parameter not in gradients]
        message = Message(Kind.PUSH, session.number, layer, part, clock)
        began, budget = time.perf_counter(), self._line.connection.piece_bytes
        if budget is None:
            frame = self.codec.encode(views, step=clock, hold=hold)
            self._pace.encoded(clock, time.perf_counter() - began, sum(frame.counts))
            body = frame.data.numpy().data
            session.pool.sent(request, len(body))
            self.unacknowledged[layer, part, clock] = frame
            self._line.send(replace(message, body=body), session)
        else:
            pushed, entries = Pushed.encode(self.codec, views, budget, step=clock, hold=hold)
            self._pace.encoded(clock, time.perf_counter() - began, entries)
            session.pool.sent(request, pushed.size)
            self.unacknowledged[layer, part, clock] = pushed
            self._send_in_pieces(session, message, pushed)
        if part == len(session.layout.layers[layer].parts) - 1:
            self._gradients.pop((layer, clock), None)
        self._pace.note(self._pace.pushes, layer, clock)

    def _send_in_pieces(self, session: Session, message: Message, pushed: Pushed) -> None:
        shards = list(pushed.shards.values())
        if not pushed.finite:  # what it says must arrive
            self._line.send(replace(message, body=pack_all(shards)), session)
            return
        ticket = self._line.send_pieces(message, session, shards)
        if ticket is not None:
            self._tickets[ticket] = pushed

    def report(self, ticket: int, lost: frozenset[int], on_loss: str) -> None:
        """Lost pieces of a push return to the memory, or are given up."""
        pushed = self._tickets.pop(ticket, None)
        if pushed is not None and lost:
            self.restored += pushed.give_back(self.codec, lost, restore=check_on_loss(on_loss) == "restore")

    def taken(self, layer: int, part: int, clock: int) -> bool:
        """The server has taken a push; False if that was known."""
        if self.unacknowledged.pop((layer, part, clock), None) is None:
            return False
        self._pace.note(self._pace.acks, layer, clock)
        return True

    def give_back(self, counted: list[int] | None) -> None:
        """What was pushed and has not been counted, by part, returns to the memory."""
        layout = self._copies.last_layout
        if layout is None:
            return
        if counted is not None and len(counted) != len(layout.numbers):  # a server that cuts its parts otherwise
            counted = None
        for (layer, part, clock), frame in self.unacknowledged.items():
            if counted is not None and clock < counted[layout.numbers[layer, part]]:
                continue
            if isinstance(frame, Pushed):
                frame.give_back(self.codec)
                continue
            pieces = layout.layers[layer].parts[part]
            reader = FrameReader(frame, layout.numels(layer, part))
            for section in reader.sections:
                self.codec.give_back(pieces[section.id].name, *reader.entries(section))
        self.unacknowledged.clear()
        self._tickets.clear()

    def clear(self) -> None:
        """Gradients that wait are of a session that is over: they do not count in the next."""
        self._gradients.clear()
