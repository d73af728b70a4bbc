"""Copies: the worker's parameters as flat float32 rows that messages are written to.

A parameter of another type or on another device has a float32 copy on the CPU, which is the one that is in step with
the server, bit for bit; the parameter itself is that copy, rounded.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from thinwire.server.layers import Layout, Piece, flat, trained
from thinwire.server.lossy import Arrived
from thinwire.server.views import take_delta, take_whole
from thinwire.transport.base import Buffer


class Copies:
    """Rows by parameter name."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = trained(model)
        self._rows: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            plain = parameter.dtype == torch.float32 and parameter.device.type == "cpu" and parameter.is_contiguous()
            self._rows[name] = flat(parameter) if plain else parameter.detach().float().cpu().reshape(-1).clone()
        self.last_layout: Layout | None = None

    def row(self, name: str) -> Tensor:
        """The exact values of a parameter."""
        return self._rows[name]

    def gradients(self, pieces: Sequence[Piece], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views of the gradients of a part; a parameter without one is represented by its values, to be held."""
        views = {}
        for piece in pieces:
            whole = gradients.get(piece.parameter)
            row = self._rows[piece.parameter] if whole is None else whole.reshape(-1)
            if row.dtype == torch.float64:
                row = row.float()
            views[piece.name] = row[piece.begin : piece.end]
        return views

    def take(self, layout: Layout, layer: int, part: int, body: Buffer, *, whole: bool, lossy: bool = False) -> int:
        """Bring a part up to date with what the server sent, of which pieces may be missing.

        Returns the bytes for which a receipt is due: none where the transport has reported.
        """
        self.last_layout = layout
        pieces = layout.layers[layer].parts[part]
        rows = [self._rows[piece.parameter][piece.begin : piece.end] for piece in pieces]
        size = len(body)
        if lossy and not whole:
            arrived = Arrived(body, [row.numel() for row in rows], exact=True)
            arrived.add_to(rows)
            size = 0 if arrived.reported else arrived.size
        else:
            (take_whole if whole else take_delta)(body, rows)
        for piece, row in zip(pieces, rows, strict=True):
            parameter = self._parameters[piece.parameter].detach()
            if self._rows[piece.parameter].data_ptr() == parameter.data_ptr():
                continue
            if parameter.is_contiguous():
                parameter.view(-1)[piece.begin : piece.end].copy_(row)
            else:  # no row of elements to write a part of
                parameter.copy_(self._rows[piece.parameter].view(parameter.shape))
        return size
