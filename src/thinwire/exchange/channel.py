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

# PyTorch renames this function; the old name warns where the new one exists.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Buffers up to this size are kept from step to step. Larger messages are rare: a probe of a fast network.
_LARGEST_KEPT = 1 << 24


class Channel:
    """One process group of a link, and counters of what it moved."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        self._group: dist.ProcessGroup | None = group
        self.name = group.group_name
        self.rank = group.rank()
        self.world = group.size()
        # Gloo's all-gather is a ring of world - 1 rounds. Its all-to-all sends to all ranks at once, in one round.
        self._direct = dist.get_backend(group) == "gloo"
        # NCCL moves GPU memory only; frames are written and read on the CPU.
        self.device = device if device is not None and not self._direct else torch.device("cpu")
        self._rooms: dict[str, Tensor] = {}
        self.sent = 0
        self.received = 0
        self.seconds = 0.0
        self.cpu = 0.0  # seconds of this thread's CPU time inside collectives

    @property
    def group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise LinkError("the link is detached, or an exchange failed before: attach again")
        return self._group

    # The next call of any of these three overwrites the returned tensors: read or copy them before.

    def all_gather(self, message: Tensor) -> list[Tensor]:
        """All ranks' messages in rank order; all have the same size."""
        size, began = message.numel(), _now()
        out = self._room("out", size * self.world)
        if self._direct:
            copies = self._room("in", size * self.world)
            copies.view(self.world, size).copy_(message)
            self._all_to_all(out, copies, [], [])
        else:
            _all_gather(out, message.to(self.device), group=self.group)
        self._count(size * (self.world - 1), size * (self.world - 1), began)
        return list(out.cpu().view(self.world, size).unbind()) if size else [message] * self.world

    def all_to_all(self, messages: Tensor, sizes: Sequence[int], size: int) -> list[Tensor]:
        """Send each rank its part of `messages`, `sizes` bytes each, and receive `size` bytes from every other rank."""
        return self._exchange(messages, sizes, [0 if r == self.rank else size for r in range(self.world)])

    def all_gather_uneven(self, message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """All ranks' messages in rank order; `sizes` are the sizes of all ranks' messages, this rank's included."""
        others = [0 if r == self.rank else message.numel() for r in range(self.world)]
        expected = [0 if r == self.rank else size for r, size in enumerate(sizes)]
        copies = self._room("in", message.numel() * (self.world - 1))
        copies.view(self.world - 1, message.numel()).copy_(message)
        received = self._exchange(copies, others, expected)
        received[self.rank] = message
        return received

    def _exchange(self, messages: Tensor, sent: Sequence[int], expected: Sequence[int]) -> list[Tensor]:
        began = _now()
        out = self._room("out", sum(expected))
        self._all_to_all(out, messages.to(self.device), list(expected), list(sent))
        self._count(sum(sent), sum(expected), began)
        return list(torch.split(out.cpu(), list(expected)))

    def _all_to_all(self, out: Tensor, messages: Tensor, expected: list[int], sent: list[int]) -> None:
        # The group's own method, because the checks of the public function take as long as a small exchange itself.
        group: Any = self.group
        work = (getattr(group, "all_to_all_single", None) or group.alltoall_base)(out, messages, expected, sent)
        if work is not None:
            work.wait()

    def _room(self, name: str, size: int) -> Tensor:
        """A buffer that is used again in every step: page faults make newly allocated memory slow."""
        if size > _LARGEST_KEPT:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        room = self._rooms.get(name)
        if room is None or room.numel() < size:
            room = self._rooms[name] = torch.empty(size + size // 4, dtype=torch.uint8, device=self.device)
        return room[:size]

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum in place."""
        began = _now()
        dist.all_reduce(tensor, group=self.group)
        volume = 2 * tensor.numel() * tensor.element_size() * (self.world - 1) // self.world
        self._count(volume, volume, began)

    def reduce(self, tensor: Tensor, root: int) -> None:
        """Sum in place on one rank of this group."""
        began = _now()
        dist.reduce(tensor, dist.get_global_rank(self.group, root), group=self.group)
        volume = tensor.numel() * tensor.element_size()
        here = self.rank == root
        self._count(0 if here else volume, volume * (self.world - 1) if here else 0, began)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy one rank's tensor to all ranks, in place."""
        began = _now()
        dist.broadcast(tensor, dist.get_global_rank(self.group, root), group=self.group)
        volume = tensor.numel() * tensor.element_size()
        here = self.rank == root
        self._count(volume * (self.world - 1) if here else 0, 0 if here else volume, began)

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
        with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
            group.abort()
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group(group)  # Gloo closes its sockets with the last reference, which is this one

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
        self.sent = self.received = 0
        self.seconds = self.cpu = 0.0
        self._group = None

    def all_gather(self, message: Tensor) -> list[Tensor]:
        return [message]

    def all_reduce(self, tensor: Tensor) -> None:
        pass


def share(channel: Channel, mine: Sequence[float]) -> list[list[float]]:
    """All ranks' numbers, in rank order."""
    message = torch.tensor(list(mine), dtype=torch.float64).view(torch.uint8)
    return [m.clone().view(torch.float64).tolist() for m in channel.all_gather(message)]


T = TypeVar("T")


def gather_json(channel: Channel, value: Any) -> list[Any]:
    """All ranks' values, in rank order; a value is anything that JSON can represent."""
    data = json.dumps(value).encode()
    length = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
    lengths = [int(t.clone().view(torch.int64)[0]) for t in channel.all_gather(length)]
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
    rows = torch.stack([m.clone().view(torch.int64) for m in channel.all_gather(mine.view(torch.uint8))])
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
