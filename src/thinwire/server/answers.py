"""Answers: pulls that wait until their part is fresh enough, and what is then sent, in the order of the policy."""

import logging

from thinwire.server.clock import Clock
from thinwire.server.layers import Layout
from thinwire.server.lossy_views import LossyViews
from thinwire.server.members import Member
from thinwire.server.messages import Kind, Message, MessageError
from thinwire.server.post import Post
from thinwire.server.schedule import Request
from thinwire.server.views import Views

log = logging.getLogger("thinwire.server")

# What an answer is taken to be before the first of its part is known.
GUESS = 1 << 18


class Answers:
    """Answers the pulls of all members."""

    def __init__(
        self,
        layout: Layout,
        clock: Clock,
        views: Views,
        post: Post,
    ) -> None:
        self._layout, self._clock, self._views, self._post = layout, clock, views, post
        self._places = list(layout.places())
        self._sizes: dict[tuple[int, int], int] = {}

    def ask(self, member: Member, number: int, clock: int, *, whole: bool) -> None:
        """Note a pull, and let it go if it need not wait. One of a part at a time, each after its push."""
        if number in member.asked:
            raise MessageError(f"a pull of part {number} waits already")
        due = self._clock.members[member.session].due[number]
        if clock != due:
            raise MessageError(f"part {number} was pulled for step {clock}, and step {due} is due")
        member.asked.add(number)
        member.parked[number] = clock, whole
        self.release(member, number)

    def release(self, member: Member, number: int) -> None:
        """Let the pull of a part go if it need not wait any more."""
        waiting = member.parked.get(number)
        if waiting is not None and self._clock.may_use(number, waiting[0]):
            clock, whole = member.parked.pop(number)
            layer, part = self._places[number]
            size = self._sizes.get((layer, part), GUESS)
            # The sign of the part tells how it was asked for.
            member.pool.put(Request("pull", layer, ~part if whole else part, clock, size))
            self.flush(member)

    def got(self, member: Member, size: int) -> None:
        """An answer of so many bytes has arrived."""
        if size > member.pool.under_way:
            raise MessageError(f"{size} bytes have arrived, of which {member.pool.under_way} were sent")
        member.pool.done(size)
        self.flush(member)

    def flush(self, member: Member) -> None:
        """Send what fits in the window."""
        while (request := member.pool.next()) is not None:
            whole = request.part < 0
            layer, part = request.layer, ~request.part if whole else request.part
            number = self._layout.numbers[layer, part]
            try:
                answer = self._views.answer(member.session, layer, part, whole=whole)
            except MessageError as error:  # found while somebody else's message is handled: it is not that one's fault
                log.warning("%s cannot be answered: %s", member.label, error)
                self._post.lost.append(member)
                return
            if answer.whole == (not self._views.deltas):
                self._sizes[layer, part] = answer.size
            member.pool.sent(request, answer.size)
            member.answered[layer, part] = request.clock
            parts = range(len(self._layout.layers[layer].parts))
            member.pool.known.here[layer] = min(member.answered.get((layer, p), -1) for p in parts)
            member.asked.discard(number)
            # With a bound, what a worker wants to know is the steps inside; without one, how many changes there were.
            edition = answer.edition if self._clock.bound is None else self._clock.lowest[number]
            kind = Kind.WHOLE if answer.whole else Kind.DELTA
            message = Message(kind, member.session, layer, part, request.clock, edition, answer.body)
            if isinstance(self._views, LossyViews) and not answer.whole:
                ticket = self._post.send_pieces(member, message, answer.shards)
                self._views.under_way(member.session, layer, part, member.peer, ticket)
            else:
                self._post.send(member, message)
