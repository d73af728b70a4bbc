"""The ways that thinwire's encode replaces, written as their users write them.

Each makes a function of no arguments that compresses one gradient and returns how many bytes would travel.
"""

from collections.abc import Callable

import numpy as np
from torch import Tensor

Way = Callable[[], tuple[int, int]]  # bytes that travel and entries among them


def sparsify_gradients(gradient: Tensor, density: float) -> Way:
    """numpy's percentile and scipy's compressed rows, as in SparsifyGradients; nothing is held back."""
    from scipy.sparse import csr_matrix

    columns = 384  # of the model's largest layer; the last elements that fill no row are left out
    rows = gradient[: gradient.numel() // columns * columns].numpy().reshape(-1, columns)

    def encode() -> tuple[int, int]:
        magnitudes = np.abs(rows)
        kept = np.where(magnitudes > np.percentile(magnitudes, 100.0 * (1.0 - density)), rows, np.float32(0.0))
        matrix = csr_matrix(kept)
        return matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes, matrix.nnz

    return encode


def torch_topk(gradient: Tensor, residual: Tensor, density: float) -> Way:
    """torch.topk over all magnitudes, gather, and the residual's update."""
    k = max(1, int(density * gradient.numel()))

    def encode() -> tuple[int, int]:
        residual.add_(gradient)
        indices = residual.abs().topk(k, sorted=False).indices
        values = residual[indices]
        residual[indices] = 0.0
        return 12 * len(values), len(values)

    return encode


def torch_sampled(gradient: Tensor, residual: Tensor, density: float) -> Way:
    """A threshold from every 100th magnitude, compare, gather, and the residual's update."""

    def encode() -> tuple[int, int]:
        residual.add_(gradient)
        sample = residual[::100].abs()
        threshold = sample.topk(max(1, int(density * len(sample)))).values[-1]
        indices = (residual.abs() > threshold).nonzero().flatten()
        values = residual[indices]
        residual[indices] = 0.0
        return 12 * len(values), len(values)

    return encode
