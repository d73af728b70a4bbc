"""Channel: the collectives that a link uses, on process groups of its own, with their bytes and time counted.

Collectives on a separate process group cannot interleave with those of DDP or of the user's script.
"""

import contextlib
import datetime
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _native
from thinwire.errors import LinkError
from thinwire.exchange.doubling import DoublingRound
from thinwire.exchange.rounds import (
    Arrived,
    Collective,
    DirectMessages,
    DirectRound,
    Lane,
    MessageRound,
    Round,
)

# PyTorch renames this function; the old name warns where the new one exists.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Buffers up to this size are kept from step to step. Larger messages are rare: a probe of a fast network.
_LARGEST_KEPT = 1 << 24


class Channel:
    """One process group of a link, and counters of what it moved.

    `gather`, `scatter`, `gather_uneven` and `spread` start a round and return it. Lanes tell the rounds that are under
    way at the same time apart; all ranks use the same lane for the same messages. With Gloo rounds of different lanes
    may be started in different orders on different ranks. With other backends a round is done when it is returned, and
    all ranks start their rounds in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        self._group: dist.ProcessGroup | None = group
        self.name = group.group_name
        self.rank = group.rank()
        self.world = group.size()
        # Gloo's all-gather is a ring of world - 1 rounds, and its collectives wait for notices of their receivers.
        self._direct = DirectMessages.of(group) if dist.get_backend(group) == "gloo" else None
        # NCCL moves GPU memory only; frames are written and read on the CPU.
        self.device = device if device is not None and self._direct is None else torch.device("cpu")
        self.doubling = False  # whether all-gathers go by recursive doubling; the same on all ranks
        self._rooms: dict[str, Tensor] = {}
        self.sent = 0
        self.received = 0
        self.messages = 0  # that this rank sent itself; those of the process group's collectives are not counted
        self.seconds = 0.0  # during which messages were under way
        self.cpu = 0.0  # seconds of this thread's CPU time inside collectives
        self._counted_to = 0.0  # when the last counted round ended

    @property
    def can_double(self) -> bool:
        """Whether all-gathers can go by recursive doubling, and need fewer messages then."""
        return self._direct is not None and self.world > 3

    @property
    def group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise LinkError("the link is detached, or an exchange failed before: attach again")
        return self._group

    def gather(self, message: Tensor, lane: int) -> Round:
        """All ranks' messages; all have the same size."""
        size = message.numel()
        if self._direct is not None:
            return self._all_gather(message, [size] * self.world, lane)
        if not size:
            return Arrived([message] * self.world)
        began, out = _now(), self._room("out", size * self.world)
        _all_gather(out, message.to(self.device), group=self.group)
        self._count(size * (self.world - 1), size * (self.world - 1), began)
        return Arrived(list(out.cpu().view(self.world, size).unbind()), 0.5 * (self.world - 1))

    def scatter(self, messages: Tensor, sizes: Sequence[int], size: int, lane: int) -> Round:
        """Send each rank its part of `messages`, `sizes` bytes each, and receive `size` bytes from every other rank."""
        expected = [size] * self.world
        expected[self.rank] = 0
        return self._exchange(messages, sizes, expected, lane)

    def gather_uneven(self, message: Tensor, sizes: Sequence[int], lane: int, *, doubling: bool = True) -> Round:
        """All ranks' messages; `sizes` are the sizes of all ranks' messages, this rank's included.

        doubling: whether it may go by recursive doubling; see `thinwire.exchange.doubling` for when it must not.
        """
        if self._direct is not None:
            return self._all_gather(message, sizes, lane, doubling=doubling)
        others = [0 if r == self.rank else message.numel() for r in range(self.world)]
        expected = [0 if r == self.rank else size for r, size in enumerate(sizes)]
        copies = self._room("in", message.numel() * (self.world - 1))
        copies.view(self.world - 1, message.numel()).copy_(message)
        found = self._exchange(copies, others, expected, lane).wait()
        found[self.rank] = message
        return Arrived(found, 0.5)

    def spread(self, message: Tensor, root: int, lane: int) -> Round:
        """One rank's message, for all ranks; the others give a tensor of the same size."""
        size, here = message.numel() * message.element_size(), self.rank == root
        if self._direct is not None:
            outgoing = message.view(torch.uint8) if here else message.view(torch.uint8)[:0]
            expected = [size if r == root and not here else 0 for r in range(self.world)]
            return self._start(lane, [outgoing] * self.world, [size if here else 0] * self.world, expected)
        began = _now()
        dist.broadcast(message, dist.get_global_rank(self.group, root), group=self.group)
        self._count(size * (self.world - 1) if here else 0, 0 if here else size, began)
        found = message.view(torch.uint8).cpu()
        return Arrived([found if r == root else found[:0] for r in range(self.world)], 0.5)

    def _exchange(self, messages: Tensor, sent: Sequence[int], expected: Sequence[int], lane: int) -> Round:
        if self._direct is not None:
            return self._start(lane, messages.split_with_sizes(list(sent)), sent, expected)
        began, out = _now(), self._room("out", sum(expected))
        # The group's own method, because the checks of the public function take as long as a small exchange itself.
        group: Any = self.group
        together = getattr(group, "all_to_all_single", None) or group.alltoall_base
        work = together(out, messages.to(self.device), list(expected), list(sent))
        if work is not None:
            work.wait()
        self._count(sum(sent), sum(expected), began)
        return Arrived(list(torch.split(out.cpu(), list(expected))), 0.5)

    def _all_gather(self, message: Tensor, sizes: Sequence[int], lane: int, *, doubling: bool = True) -> Round:
        if not (self.doubling and doubling):
            return self._start(lane, [message] * self.world, [sizes[self.rank]] * self.world, sizes)
        began = time.thread_time()
        return self._counted(DoublingRound(self._lane(lane), message, sizes, self._ended), began)

    def _start(self, lane: int, outgoing: Sequence[Tensor], sizes: Sequence[int], expected: Sequence[int]) -> Round:
        """Send messages of these sizes directly; what this rank has for itself is its own message in the result."""
        began = time.thread_time()
        return self._counted(DirectRound(self._lane(lane), outgoing, sizes, expected, self._ended), began)

    def _lane(self, number: int) -> Lane:
        assert self._direct is not None and self.group is not None
        return self._direct.lane(number)

    def _counted(self, found: MessageRound, began: float) -> MessageRound:
        """Count a round of messages that this rank sends and receives itself, whose start began then."""
        self.sent += found.sent
        self.received += found.received
        self.cpu += time.thread_time() - began
        return found

    def _ended(self, began: float, arrived: float, messages: int) -> None:
        """Count a round; the time of rounds which were under way at the same time counts once."""
        self.seconds += max(arrived - max(began, self._counted_to), 0.0)
        self._counted_to = max(arrived, self._counted_to)
        self.messages += messages

    def all_gather(self, message: Tensor) -> list[Tensor]:
        """All ranks' messages in rank order, for agreements between exchanges; all have the same size."""
        found = self.gather(message, 0)
        messages = [m.clone() for m in found.wait()]
        found.release()
        return messages

    def _room(self, name: str, size: int) -> Tensor:
        """A buffer that is used again in every step: page faults make newly allocated memory slow."""
        if size > _LARGEST_KEPT:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        room = self._rooms.get(name)
        if room is None or room.numel() < size:
            room = self._rooms[name] = torch.empty(size + size // 4, dtype=torch.uint8, device=self.device)
        return room[:size]

    # Collectives of the process group: all ranks start them in the same order.

    def sum(self, tensor: Tensor) -> Round:
        """Start to sum in place on all ranks; a ring of 2 (world - 1) messages."""
        volume = 2 * tensor.numel() * tensor.element_size() * (self.world - 1) // self.world
        return self._collective(lambda w: dist.all_reduce(tensor, group=self.group, async_op=w), tensor, volume, volume)

    def sum_to(self, tensor: Tensor, root: int) -> Round:
        """Start to sum in place on one rank of this group."""
        volume, here = tensor.numel() * tensor.element_size(), self.rank == root
        to = dist.get_global_rank(self.group, root)
        sent, received = 0 if here else volume, volume * (self.world - 1) if here else 0
        return self._collective(lambda w: dist.reduce(tensor, to, group=self.group, async_op=w), tensor, sent, received)

    def _collective(self, start: Callable[[bool], Any], tensor: Tensor, sent: int, received: int) -> Round:
        began, trips = _now(), float(self.world - 1)
        if self._direct is None:  # rounds are done when they are returned
            start(False)
            self._count(sent, received, began)
            return Arrived([tensor], trips)
        self.sent += sent
        self.received += received
        return Collective(start(True), [tensor], trips, self._ended)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum in place."""
        self.sum(tensor).finish()

    def reduce(self, tensor: Tensor, root: int) -> None:
        """Sum in place on one rank of this group."""
        self.sum_to(tensor, root).finish()

    def release(self) -> dist.ProcessGroup | None:
        """Give the process group up for another channel to use; None if it was given up or aborted before."""
        group, self._group = self._group, None
        return group

    def reuse(self, group: dist.ProcessGroup) -> None:
        """Use a process group between the same ranks, after `release`."""
        self._group, self.name = group, group.group_name

    def abort(self) -> None:
        """Close the connections, so that ranks waiting for this one get an error; the channel is unusable then."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._direct is not None:
            self._direct.abort()
        with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
            group.abort()
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group(group)

    def _count(self, sent: int, received: int, began: tuple[float, float]) -> None:
        self.sent += sent
        self.received += received
        now = _now()
        self.seconds += now[0] - began[0]
        self.cpu += now[1] - began[1]


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


class LocalChannel(Channel):
    """The channel of a single process: collectives return their own input."""

    def __init__(self) -> None:
        self.rank, self.world = 0, 1
        self.device = torch.device("cpu")
        self.doubling, self._direct = False, None
        self.sent = self.received = self.messages = 0
        self.seconds = self.cpu = 0.0
        self._group = None

    def gather(self, message: Tensor, lane: int) -> Round:
        return Arrived([message])

    def sum(self, tensor: Tensor) -> Round:
        return Arrived([tensor])


def share(channel: Channel, mine: Sequence[float]) -> list[list[float]]:
    """All ranks' numbers, in rank order."""
    message = torch.tensor(list(mine), dtype=torch.float64).view(torch.uint8)
    return [m.view(torch.float64).tolist() for m in channel.all_gather(message)]


T = TypeVar("T")


def gather_json(channel: Channel, value: Any) -> list[Any]:
    """All ranks' values, in rank order; a value is anything that JSON can represent."""
    data = json.dumps(value).encode()
    length = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
    lengths = [int(t.view(torch.int64)[0]) for t in channel.all_gather(length)]
    message = torch.zeros(max(lengths), dtype=torch.uint8)
    message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    gathered = channel.all_gather(message)
    return [json.loads(m[:n].numpy().tobytes()) for m, n in zip(gathered, lengths, strict=True)]


def agreed(channel: Channel, prepare: Callable[[], T], describe: Callable[[T], dict[str, Any]]) -> T:
    """The result of `prepare`, if it succeeds and is described alike on all ranks; otherwise all ranks raise."""
    try:
        made = prepare()
        description = describe(made)
    except Exception as error:
        gather_json(channel, {"error": f"{error}"})  # the other ranks wait for this message, and raise too
        raise
    rows = gather_json(channel, description)
    for rank, other in enumerate(rows):
        if "error" in other:
            raise LinkError(f"rank {rank} cannot attach: {other['error']}")
    for rank, other in enumerate(rows):
        for key, value in rows[0].items():
            if other.get(key) != value:
                raise LinkError(f"rank {rank} differs from rank 0 in {_difference(key, value, other.get(key))}")
    return made


def _difference(key: str, ours: Any, theirs: Any) -> str:
    if key != "parameters":
        return f"{key}: {theirs} against {ours}; give every rank the same"
    if len(ours) != len(theirs):
        missing = sorted({name for name, *_ in ours} ^ {name for name, *_ in theirs})
        return f"the number of parameters: {len(theirs)} against {len(ours)} ({', '.join(missing[:3])} not on both)"
    first = next((a, b) for a, b in zip(ours, theirs, strict=True) if a != b)
    return f"a parameter: {' '.join(map(str, first[1]))} against {' '.join(map(str, first[0]))}"


def checksum(tensor: Tensor) -> int:
    """CRC-32C of a tensor's bytes."""
    data = tensor.detach().cpu().contiguous()
    return _native.crc32c(data.data_ptr(), data.numel() * data.element_size())


def check_replicas(channel: Channel, parameters: Mapping[str, Tensor], step: int) -> None:
    """Raise on all ranks if any parameter differs between them, naming the rank and the parameter."""
    mine = torch.tensor([checksum(p) for p in parameters.values()], dtype=torch.int64)
    rows = torch.stack([m.view(torch.int64) for m in channel.all_gather(mine.view(torch.uint8))])
    usual, _ = rows.mode(dim=0)
    differing = (rows != usual).nonzero().tolist()
    if differing:
        rank, place = differing[0]
        name, count = list(parameters)[place], sum(1 for r, _ in differing if r == rank)
        what = f"{name} and {count - 1} more" if count > 1 else name
        # Two ranks cannot tell which of them is wrong.
        who = f"rank {rank} holds another {what} than the others" if channel.world > 2 else f"ranks differ in {what}"
        raise LinkError(f"step {step}: {who}; the replicas have diverged")


# What a rank answers that is alive and had not come to the exchange that failed on others.
_ABSENT = "\0absent"
# Seconds in which living ranks answer after a failure: idle ones look every second. And seconds for which a rank waits
# until the others have read the answers, because the rank that hosts the store ends it.
_ANSWER, _READ = 4.0, 2.0


class FailureBoard:
    """Where the ranks of a link tell one another that an exchange failed: the rendezvous store.

    The process group is broken by then. A link fails once, so that the name of its channel is enough.
    """

    def __init__(self, channel: Channel) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._rank, self._prefix = channel.rank, f"thinwire/failed/{channel.name}"
        self._answers = [f"{self._prefix}/{rank}" for rank in range(channel.world)]

    def announced(self) -> bool:
        """Return whether any rank has told of a failure."""
        return bool(self._store.check([self._prefix]))

    def gather(self, reason: str) -> dict[int, str | None]:
        """Return every rank's reason for the failure: "" if another rank caused it, None for ranks that do not answer.

        The rank that hosts the store must not end it before the others have read it, so all wait for one another.
        """
        self._store.set(self._answers[self._rank], f"-{reason}")
        self._store.set(self._prefix, "failed")
        self._wait(self._answers, _ANSWER)
        there = [rank for rank, key in enumerate(self._answers) if self._store.check([key])]
        found = {rank: self._store.get(self._answers[rank]).decode()[1:] for rank in there}
        self._store.set(f"{self._answers[self._rank]}/read", "read")
        with contextlib.suppress(RuntimeError):  # its host may leave first now
            self._wait([f"{self._answers[rank]}/read" for rank in there], _READ)
        return {rank: found.get(rank) for rank in range(len(self._answers))}

    def _wait(self, keys: list[str], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._store.check(keys) and time.monotonic() < until:
            time.sleep(0.05)


def gather_reasons(channel: Channel, reason: str) -> dict[int, str | None]:
    """Return every rank's reason for a failure, as `FailureBoard.gather` does; {} if no store can be asked.

    A store that is gone without torchrun, which hosts one itself, means that rank 0 is gone.
    """
    try:
        return FailureBoard(channel).gather(reason)
    except (RuntimeError, ValueError):
        hosted_by_rank = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return {0: None} if hosted_by_rank and channel.rank != 0 and dist.is_initialized() else {}


def describe_failure(error: Exception | None, channel: Channel, channels: Iterable[Channel], step: int) -> LinkError:
    """An error that says in one sentence which rank failed, at which step, and why, as far as it can be known.

    error: what this rank saw; None if it learned of the failure before it came to the exchange.
    """
    text = re.sub(r"^\[[^\]]*\] *", "", " ".join(str(error).split()))  # remove the backend's source line
    text = text if error is not None else "this rank had not come to it"
    own = "" if error is None or isinstance(error, RuntimeError) else text  # collectives raise RuntimeErrors
    where = f"rank {channel.rank}, step {step}"
    for each in {channel, *channels}:
        each.abort()
    reasons = gather_reasons(channel, _ABSENT if error is None else own)
    if own:
        return LinkError(f"{where}: {own}")
    for rank, reason in reasons.items():
        if reason and reason != _ABSENT:
            return LinkError(f"{where}: rank {rank} failed: {reason}")
    # A rank that is alive is to blame only if all others are too: they have waited for it in vain.
    silent = [rank for rank, reason in reasons.items() if reason is None]
    missing = silent or [rank for rank, reason in reasons.items() if reason == _ABSENT]
    who = f"; no sign of rank {', '.join(map(str, missing))}" if missing else ""
    return LinkError(f"{where}: the exchange failed{who}: {text}")


# Process groups of detached links, by parent group, ranks and timeout. They are used again, not destroyed: PyTorch
# derives a group's name from the number of groups, and the store still holds the old addresses under that name.
_unused: dict[tuple[str, tuple[int, ...], float], list[dist.ProcessGroup]] = {}


class OwnGroups:
    """Makes channels on process groups of some of a parent group's ranks, and takes the groups back."""

    def __init__(self, parent: dist.ProcessGroup, device: torch.device, timeout: float | None) -> None:
        self._parent, self._device = parent, device
        self._timeout = datetime.timedelta(seconds=timeout) if timeout is not None else _timeout(parent)
        self._made: list[tuple[Channel, tuple[int, ...]]] = []  # channels whose groups are in use
        self._others: list[tuple[dist.ProcessGroup, tuple[int, ...]]] = []  # groups that this rank is not in
        self._members = dist.get_process_group_ranks(parent)
        self.all = Channel(self._group_of(self._members), device)
        self._made.append((self.all, tuple(self._members)))

    def __call__(self, members: list[list[int]]) -> list[Channel]:
        """A channel for each list of ranks; lists without this rank get the channel of all ranks as a placeholder."""
        channels = []
        for ranks in members:
            chosen = [self._members[rank] for rank in ranks]
            group = self._group_of(chosen)
            if self.all.rank in ranks:
                channels.append(Channel(group, self._device))
                self._made.append((channels[-1], tuple(chosen)))
            else:
                channels.append(self.all)
                self._others.append((group, tuple(chosen)))
        return channels

    def close(self) -> None:
        """Keep the groups for the next link between the same ranks. Call it when no collective is under way."""
        found = [(group, ranks) for channel, ranks in self._made if (group := channel.release()) is not None]
        for group, ranks in [*found, *self._others]:
            _unused.setdefault(self._key(ranks), []).append(group)
        self._made.clear()
        self._others.clear()

    @contextlib.contextmanager
    def reopened(self) -> Iterator[None]:
        """Let the channel of all ranks work for a while after `close`. All ranks must enter it."""
        if not self._made:
            self.all.reuse(self._group_of(self._members))
            self._made.append((self.all, tuple(self._members)))
            try:
                yield
            finally:
                self.close()
        else:
            yield

    def _key(self, ranks: tuple[int, ...]) -> tuple[str, tuple[int, ...], float]:
        return self._parent.group_name, ranks, self._timeout.total_seconds()

    def _group_of(self, ranks: list[int]) -> dist.ProcessGroup:
        """A process group of these global ranks; all ranks of the parent must call it."""
        unused = _unused.get(self._key(tuple(ranks)), [])
        while unused:
            group = unused.pop()
            if _is_alive(group):
                return group
        backend = dist.get_backend(self._parent)
        made: dist.ProcessGroup = dist.new_group(
            ranks, timeout=self._timeout, backend=backend, use_local_synchronization=backend != "mpi"
        )
        return made


def _is_alive(group: object) -> bool:
    """Whether a group, or the mark of a group that this rank is not in, belongs to the present default group."""
    if not isinstance(group, dist.ProcessGroup):
        return True
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True


def _timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    options = getattr(group._get_backend(torch.device("cpu")), "options", None) if _is_gloo(group) else None
    found = getattr(options, "_timeout", None)
    return found if isinstance(found, datetime.timedelta) else dist.default_pg_timeout


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return "gloo" in str(dist.get_backend(group))
