"""A small Transformer for translation, normalised before each block, so that it trains without warm-up.

One table of word pieces serves both languages and the output.
"""

import torch
from torch import Tensor, nn

from thinwire.recipes.recurrent import BEGIN, END, PAD, continued

LONGEST = 256


class TransformerTranslator(nn.Module):
    """Encoder and decoder of a few layers with sinusoidal places."""

    places: Tensor

    def __init__(self, vocabulary: int, *, units: int = 256, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.pieces = nn.Embedding(vocabulary, units, padding_idx=PAD)
        nn.init.normal_(self.pieces.weight, std=units**-0.5)
        self.register_buffer("places", _sinusoids(LONGEST, units), persistent=False)
        encoder = nn.TransformerEncoderLayer(units, heads, 2 * units, batch_first=True, norm_first=True)
        decoder = nn.TransformerDecoderLayer(units, heads, 2 * units, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(encoder, layers, nn.LayerNorm(units), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, layers, nn.LayerNorm(units))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.dropout = nn.Dropout(0.1)
        for weights in (*self.encoder.parameters(), *self.decoder.parameters()):
            if weights.dim() > 1:  # the layers of a stack are copies of one another until they are drawn anew
                nn.init.xavier_uniform_(weights)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Scores of the next piece, for the places of the target that have one, as `continued` finds them."""
        return self._score(self._decode(target, self._encode(source), source == PAD)[continued(target)])

    def _embed(self, pieces: Tensor) -> Tensor:
        vectors: Tensor = self.pieces(pieces) * self.pieces.embedding_dim**0.5
        placed: Tensor = self.dropout(vectors + self.places[: pieces.shape[1]])
        return placed

    def _encode(self, source: Tensor) -> Tensor:
        memory: Tensor = self.encoder(self._embed(source), src_key_padding_mask=source == PAD)
        return memory

    def _decode(self, target: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        states: Tensor = self.decoder(
            self._embed(target),
            memory,
            tgt_mask=later,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=padding,
        )
        return states

    def _score(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.pieces.weight, self.bias)

    def greedy(self, source: Tensor, limit: int) -> Tensor:
        """The best piece at every place, one after the other, until all sentences have ended."""
        memory, padding = self._encode(source), source == PAD
        written = torch.full_like(source[:, :1], BEGIN)
        ended = torch.zeros_like(written, dtype=torch.bool)
        for _ in range(min(limit, LONGEST - 1)):
            states = self._decode(written, memory, padding)
            piece = self._score(states[:, -1:]).argmax(2).masked_fill(ended, END)
            written = torch.cat([written, piece], dim=1)
            ended = ended | (piece == END)
            if bool(ended.all()):
                break
        return written[:, 1:]


def _sinusoids(length: int, units: int) -> Tensor:
    place = torch.arange(length).unsqueeze(1)
    speed = torch.exp(torch.arange(0, units, 2) * (-torch.log(torch.tensor(10_000.0)) / units))
    return torch.stack([torch.sin(place * speed), torch.cos(place * speed)], dim=2).flatten(1)
