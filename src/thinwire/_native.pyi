from collections.abc import Sequence

# (address of the gradient, dtype code, address of the memory or 0, decay, numel)
Described = tuple[int, int, int, float, int]
# (address, dtype code, numel)
Plain = tuple[int, int, int]
# (entries sent, entries selected, ties left, sum of selected magnitudes)
Written = tuple[int, int, int, float]

BLOCK: int
BINS: int
HEADER_BYTES: int
DEAL: int

def avx2(on: bool) -> None: ...
def avx2_in_use() -> bool: ...
def avx2_available() -> bool: ...
def crc32c(data: int, size: int) -> int: ...
def mix(x: int) -> int: ...
def strata_positions(seed: int, count: int, n: int, out: int) -> None: ...
def sampled_thresholds(
    vectors: Sequence[Described], densities: Sequence[float], wanted: int, seed: int
) -> list[tuple[float, float]]: ...
def histogram(vectors: Sequence[Described], wanted: int, seed: int, out: int) -> tuple[int, int]: ...
def moments(vector: Described, wanted: int, seed: int) -> tuple[int, float, float, float]: ...
def select(vectors: Sequence[Described], rank: int) -> tuple[float, int, int]: ...
def order_statistic(vectors: Sequence[Described], rank: int) -> tuple[float, int, int, bool]: ...
def all_zero(arrays: Sequence[Plain]) -> list[int]: ...
def first_not_finite(arrays: Sequence[Plain]) -> int: ...
def accumulate(vector: Described) -> None: ...
def accumulate_momentum(vector: Described, u: int, v: int, momentum: float, nesterov: bool) -> None: ...
def block_bytes(format: int, n: int) -> int: ...
def section_bytes(id: int, n: int, strata: bool) -> int: ...

# (vector, address of what is held or 0, whether it travels whole, format, reserve)
Encodable = tuple[Described, int, bool, int, int]

class Encoder:
    def __init__(self, tensors: Sequence[Encodable]) -> None: ...
    def encode(self, density: float, step: int, room: int, capacity: int) -> tuple[int, int, list[int]]: ...

class Writer:
    def __init__(self, buffer: int, capacity: int) -> None: ...
    def add_selected(
        self,
        id: int,
        vector: Described,
        held: int,
        mask: int,
        threshold: float,
        ties: int,
        format: int,
        stochastic: bool,
        seed: int,
        reserve: int,
    ) -> Written: ...
    def add_strata(
        self,
        id: int,
        vector: Described,
        held: int,
        mask: int,
        count: int,
        strata: int,
        format: int,
        stochastic: bool,
        seed: int,
        reserve: int,
    ) -> Written: ...
    def add_entries(
        self,
        id: int,
        positions: int,
        values: int,
        count: int,
        n: int,
        sent: int,
        is_strata: bool,
        strata: int,
        format: int,
        stochastic: bool,
        seed: int,
        reserve: int,
    ) -> Written: ...
    @staticmethod
    def add_dealt(
        owners: Sequence[Writer],
        reserves: Sequence[int],
        first: int,
        id: int,
        vector: Described,
        held: int,
        mask: int,
        threshold: float,
        ties: int,
        format: int,
        stochastic: bool,
        seed: int,
    ) -> Written: ...
    def finish(self, flags: int, pad: bool) -> int: ...

class Section:
    @property
    def id(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def format(self) -> int: ...
    @property
    def strata(self) -> bool: ...

class Reader:
    def __init__(self, frame: int, size: int, numels: Sequence[int], trailing: bool) -> None: ...
    @property
    def sections(self) -> list[Section]: ...
    @property
    def length(self) -> int: ...
    @property
    def non_finite(self) -> bool: ...
    def add(self, section: Section, out: int, weight: float) -> None: ...
    def entries(self, section: Section, positions: int, values: int) -> None: ...

class ShardWriter:
    def __init__(self, budget: int, exact: bool) -> None: ...
    def add_selected(
        self,
        tensor: int,
        vector: Described,
        held: int,
        mask: int,
        threshold: float,
        ties: int,
        format: int,
        stochastic: bool,
        seed: int,
    ) -> Written: ...
    def add_entries(
        self,
        tensor: int,
        positions: int,
        values: int,
        count: int,
        n: int,
        sent: int,
        format: int,
        stochastic: bool,
        seed: int,
    ) -> None: ...
    def finish(self) -> list[bytes]: ...

class ShardReader:
    def __init__(
        self, shards: Sequence[bytes | bytearray | memoryview], numels: Sequence[int], exact: bool
    ) -> None: ...
    @property
    def pieces(self) -> list[tuple[int, int]]: ...
    def add(self, outs: Sequence[int], weight: float) -> None: ...
    def entries(self, piece: int, positions: int, values: int) -> None: ...

class Frames:
    def __init__(self) -> None: ...
    def read(self, messages: Sequence[tuple[int, int]], numels: Sequence[Sequence[int]], trailing: bool) -> None: ...
    @property
    def lengths(self) -> list[int]: ...
    @property
    def non_finite(self) -> list[int]: ...
    def sum(self, sums: Sequence[tuple[int, int, int, int]], weight: float) -> None: ...

def share_of(n: int, world: int, first: int, owner: int) -> int: ...
def sum_frames(frames: Sequence[Reader], sums: Sequence[tuple[int, int, int, int]], weight: float) -> None: ...
def add_share(whole: int, n: int, world: int, first: int, owner: int, share: int) -> None: ...

# (session, counter, nonce, what is in the clear, what is sealed)
Split = tuple[int, int, bytes, bytes, bytes]

def receive_datagrams(
    socket: int, most: int, largest: int, prefix: bytes, least: int
) -> tuple[list[tuple[Split, bytes, float]], int, int]: ...
def address_of(origin: bytes) -> tuple[str, int] | tuple[str, int, int, int] | None: ...
def split_datagram(datagram: bytes, prefix: bytes, least: int) -> Split | None: ...

DATA: int
DATA_BYTES: int

# message, count, head, pieces by index, how many came twice, the least time of flight, the first and last arrival
Group = tuple[int, int, bytes, dict[int, bytes], int, float, float, float]

def pack_data(
    message: int, first: int, count: int, head: bytes, pieces: list[bytes], now: float, padding: int
) -> list[bytes]: ...
def read_data(plains: list[bytes], stamps: Sequence[float], span: float) -> tuple[list[Group], int]: ...
def label_datagrams(
    plains: list[bytes], prefix: bytes, session: int, counter: int
) -> list[tuple[bytes, bytes, bytes]]: ...
