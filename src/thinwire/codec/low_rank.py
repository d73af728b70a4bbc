"""LowRank: sends every matrix as its projection on a small basis that all ranks know.

All ranks project their residual on the same orthonormal basis of a few vectors and send the coordinates; every rank
multiplies the mean of the coordinates by the basis. The next basis is the orthonormalised mean itself, on the other
side of the matrix: projections on rows and on columns alternate, and no step sends more than the coordinates. This is
the subspace iteration of PowerSGD (Vogels et al. 2019), spread over the steps, with error feedback around it.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire import _native
from thinwire.codec.selection import Cutoff, Group, Selection

# The density that `LowRank.for_ranks` does not exceed.
_MOST = 0.4


@dataclass(frozen=True)
class LowRank(Selection):
    """Send the coordinates of every matrix in a basis that all ranks know, about `density` numbers per element.

    A matrix of m x n elements has a basis of `density * 2 m n / (m + n)` vectors, at least one and at most `max_rank`.
    A convolution's weights count as a matrix with a row per output channel. Vectors, and matrices that would not
    become smaller, are sent whole, and so is everything with a density of 1. The basis
    follows the data by one step of subspace iteration per exchange.

    With `ranks`, density and `max_rank` are those for up to so many ranks. With more, both grow in proportion, up to a
    density of 0.4: the more ranks there are, the more of each one's updates is noise that averaging removes, and that
    low rank does not express.
    """

    density: float = 0.15
    max_rank: int = 64
    ranks: int | None = None
    by_threshold: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise ValueError(f"a density must lie in (0, 1], not {self.density}")
        if self.max_rank < 1:
            raise ValueError(f"a rank is at least 1, not {self.max_rank}")
        if self.ranks is not None and self.ranks < 1:
            raise ValueError(f"a number of ranks is at least 1, not {self.ranks}")

    def select(self, group: Group, *, step: int, key: int, state: dict[str, float]) -> Cutoff:
        raise ValueError(
            "LowRank needs a basis that all ranks share: use it with attach(), not with Codec.encode or a server"
        )

    def expected(self, n: int, step: int) -> int:
        return max(1, math.ceil(self.density * n))

    def for_ranks(self, world: int) -> "LowRank":
        growth = 1.0 if self.ranks is None else max(1.0, min(world / self.ranks, _MOST / self.density))
        return replace(self, density=self.density * growth, max_rank=round(self.max_rank * growth), ranks=None)

    def rank(self, rows: int, columns: int) -> int:
        """Return the number of basis columns for a matrix; 0 if it is sent whole."""
        if min(rows, columns) < 2 or self.density == 1.0:
            return 0
        most = min(rows, columns, self.max_rank)
        rank = min(max(1, int(self.density * 2 * rows * columns / (rows + columns))), most)
        return rank if rank * (rows + columns) < 2 * rows * columns else 0


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a tensor: a row per element of its first dimension."""
    rows = shape[0] if len(shape) else 1
    return rows, math.prod(shape[1:])


@dataclass(frozen=True)
class Basis:
    """Orthonormal vectors in the row space or the column space of one matrix. It does not change: see `expand`."""

    seed: int  # of random vectors
    rows: int
    columns: int
    of_rows: bool  # whether the vectors are as long as a row, else as a column
    vectors: Tensor  # one per row

    @staticmethod
    def first(name: str, shape: Sequence[int], rank: int) -> "Basis":
        """Return random vectors, which the name determines."""
        rows, columns = matrix_shape(shape)
        seed = zlib.crc32(name.encode())
        return Basis(seed, rows, columns, True, _orthonormal(torch.zeros(rank, columns), seed))

    @property
    def rank(self) -> int:
        return self.vectors.shape[0]

    @property
    def size(self) -> int:
        """The number of coordinates of a matrix."""
        return self.rank * (self.rows if self.of_rows else self.columns)

    @cached_property
    def args(self) -> tuple[int, int, int, bool, int]:
        """The basis as the kernels take it."""
        return self.rows, self.columns, self.rank, self.of_rows, self.vectors.data_ptr()

    def project(self, matrix: Tensor, out: Tensor) -> None:
        """Write the flat coordinates of a flat matrix to the CPU: those for one vector after the other."""
        flat, vectors = matrix.view(self.rows, self.columns), self.vectors
        if matrix.is_cpu and matrix.dtype == torch.float32:
            torch.mm(vectors, flat.T if self.of_rows else flat, out=out.view(self.rank, -1))
            return
        flat = flat.float()
        out.copy_((vectors.to(flat.device) @ (flat.T if self.of_rows else flat)).view(-1))

    def subtract(self, matrix: Tensor, coordinates: Tensor) -> None:
        """Subtract what these coordinates stand for from a flat matrix on any device."""
        if matrix.is_cpu and matrix.dtype == torch.float32:
            _native.subtract_low_rank([(*self.args, coordinates.data_ptr(), matrix.data_ptr())])
            return
        flat, vectors = matrix.view(self.rows, self.columns), self.vectors.to(matrix.device)
        there = coordinates.view(self.rank, -1).to(matrix.device)
        flat.addmm_(there.T if self.of_rows else vectors.T, vectors if self.of_rows else there, alpha=-1.0)

    def expand(self, coordinates: Tensor, out: Tensor) -> "Basis":
        """Write what these coordinates stand for to a flat matrix on the CPU, to the same bits on all machines.

        Returns the next basis: the coordinates, orthonormalised. If all of them are zero, that is this basis.
        """
        following = self.following()
        places = coordinates.data_ptr(), out.data_ptr(), self.seed, following.vectors.data_ptr()
        (advanced,) = _native.expand_low_rank([(*self.args, *places)])
        return following if advanced else self

    def following(self) -> "Basis":
        """Return a basis on the other side of the matrix, whose vectors are still to be written."""
        vectors = torch.empty(self.rank, self.rows if self.of_rows else self.columns)
        return Basis(self.seed, self.rows, self.columns, not self.of_rows, vectors)

    def state_dict(self) -> dict[str, Tensor | bool]:
        """Return the vectors, and whether they are as long as a row."""
        return {"vectors": self.vectors.clone(), "of_rows": self.of_rows}

    def loaded(self, state: Any) -> "Basis":
        """Return the basis of a saved state; ValueError if it does not fit the matrix."""
        found = state if isinstance(state, dict) else {}
        vectors, of_rows = found.get("vectors"), found.get("of_rows") is True
        shape = (self.rank, self.columns if of_rows else self.rows)
        if not isinstance(vectors, Tensor) or vectors.shape != shape or not bool(vectors.isfinite().all()):
            raise ValueError("a basis in the exchange's state does not fit its matrix")
        return replace(self, of_rows=of_rows, vectors=vectors.detach().float().cpu().clone())


def _orthonormal(vectors: Tensor, seed: int) -> Tensor:
    rank, length = vectors.shape
    _native.orthonormalise(vectors.data_ptr(), rank, length, seed)
    return vectors
