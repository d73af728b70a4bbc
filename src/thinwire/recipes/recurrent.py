"""A GRU encoder-decoder with attention, with or without layer normalisation inside the cells.

The decoder's states do not depend on its attention, so training needs no loop over the words.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

PAD, UNKNOWN, BEGIN, END = range(4)


def continued(target: Tensor) -> Tensor:
    """The places that another piece follows: half of a padded batch need not be scored."""
    return (target != PAD) & (target != END)


class PlainGRU(nn.Module):
    """torch's GRU on padded sequences."""

    def __init__(self, inputs: int, hidden: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, hidden, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor, mask: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Outputs at every place and the last state; `state` and the last state are (samples, units)."""
        if state is not None:
            outputs, last = self.gru(x, state.unsqueeze(0).contiguous())
            return outputs, last[-1]
        lengths = mask.sum(1).cpu()
        packed, last = self.gru(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        outputs, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        return outputs, last.transpose(0, 1).flatten(1)


class NormalisedGRU(nn.Module):
    """A GRU whose gates are layer-normalised: all gradients come to one scale, slower than torch's."""

    def __init__(self, inputs: int, hidden: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.hidden, directions = hidden, 2 if bidirectional else 1
        self.of_input = nn.ModuleList(nn.Linear(inputs, 3 * hidden) for _ in range(directions))
        self.of_state = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(directions))
        self.input_norm = nn.ModuleList(nn.LayerNorm(3 * hidden) for _ in range(directions))
        self.state_norm = nn.ModuleList(nn.LayerNorm(3 * hidden) for _ in range(directions))

    def forward(self, x: Tensor, mask: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Outputs at every place and the last state; `state` and the last state are (samples, units)."""
        results = [self._run(way, x, mask, state) for way in range(len(self.of_input))]
        outputs = torch.cat([outputs for outputs, _ in results], dim=2)
        return outputs, torch.cat([last for _, last in results], dim=1)

    def _run(self, way: int, x: Tensor, mask: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        gates = self.input_norm[way](self.of_input[way](x))
        h = x.new_zeros(x.shape[0], self.hidden) if state is None else state
        steps = range(x.shape[1])
        outputs: list[Tensor] = [h] * len(steps)
        for place in reversed(steps) if way == 1 else steps:
            a, b = gates[:, place], self.state_norm[way](self.of_state[way](h))
            a_reset, a_keep, a_new = a.chunk(3, dim=1)
            b_reset, b_keep, b_new = b.chunk(3, dim=1)
            keep = torch.sigmoid(a_keep + b_keep)
            new = torch.tanh(a_new + torch.sigmoid(a_reset + b_reset) * b_new)
            # Behind the end of a sentence nothing changes, so padding cannot be seen.
            h = torch.where(mask[:, place, None], keep * h + (1 - keep) * new, h)
            outputs[place] = h
        return torch.stack(outputs, dim=1), h


class RecurrentTranslator(nn.Module):
    """Bidirectional encoder, decoder with dot-product attention, one table of word pieces for everything."""

    def __init__(self, vocabulary: int, *, units: int = 256, normalised: bool = False) -> None:
        super().__init__()
        cell = NormalisedGRU if normalised else PlainGRU
        self.pieces = nn.Embedding(vocabulary, units, padding_idx=PAD)
        nn.init.normal_(self.pieces.weight, std=units**-0.5)
        self.encoder = cell(units, units // 2, bidirectional=True)
        self.decoder = cell(units, units, bidirectional=False)
        self.join = nn.Linear(2 * units, units)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.dropout = nn.Dropout(0.2)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Scores of the next piece, for the places of the target that have one, as `continued` finds them."""
        memory, mask, state = self.encode(source)
        joined, _ = self._decode(target, memory, mask, state)
        return self._score(joined[continued(target)])

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The encoder's outputs, the mask of real pieces, and the state that starts the decoder."""
        mask = source != PAD
        outputs, last = self.encoder(self.dropout(self._embed(source)), mask, None)
        return self.dropout(outputs), mask, last

    def _embed(self, pieces: Tensor) -> Tensor:
        vectors: Tensor = self.pieces(pieces) * self.pieces.embedding_dim**0.5
        return vectors

    def _decode(self, target: Tensor, memory: Tensor, mask: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        states, last = self.decoder(self.dropout(self._embed(target)), target != PAD, state)
        fit = torch.bmm(states, memory.transpose(1, 2)) * memory.shape[2] ** -0.5
        weights = fit.masked_fill(~mask[:, None, :], -1e9).softmax(dim=2)
        joined = torch.tanh(self.join(torch.cat([states, torch.bmm(weights, memory)], dim=2)))
        return self.dropout(joined), last

    def _score(self, joined: Tensor) -> Tensor:
        return nn.functional.linear(joined, self.pieces.weight, self.bias)

    def greedy(self, source: Tensor, limit: int) -> Tensor:
        """The best piece at every place, one after the other, until all sentences have ended."""
        memory, mask, state = self.encode(source)
        piece = torch.full_like(source[:, :1], BEGIN)
        written, ended = [], torch.zeros_like(piece, dtype=torch.bool)
        for _ in range(limit):
            joined, state = self._decode(piece, memory, mask, state)
            piece = self._score(joined).argmax(2).masked_fill(ended, END)
            written.append(piece)
            ended = ended | (piece == END)
            if bool(ended.all()):
                break
        return torch.cat(written, dim=1)
