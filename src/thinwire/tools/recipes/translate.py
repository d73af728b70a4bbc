"""The recipes translate, translate-layernorm and translate-transformer: Multi30k from German to English.

The models are GRUs and a small Transformer; the metric is BLEU. Both languages share one vocabulary of word pieces,
which is learned from the training files.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from thinwire.errors import RecipeError
from thinwire.tools.recipes.files import Asset, cache_dir, fetch, find_file, read_lines
from thinwire.tools.recipes.recipe import Batch, Defaults, Recipe, Split, Splits, adam

PAD, UNKNOWN, BEGIN, END = range(4)
LONGEST = 256  # pieces of a sentence
Cache = tuple[Tensor, Tensor]  # keys and values of an attention


def continued(target: Tensor) -> Tensor:
    """Return a mask of the positions that another piece follows; only these are scored."""
    return (target != PAD) & (target != END)


class PlainGRU(nn.Module):
    """The GRU of torch on padded sequences."""

    def __init__(self, inputs: int, hidden: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, hidden, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor, mask: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs at every position and the last state, which like `state` is (samples, units)."""
        if state is not None:
            outputs, last = self.gru(x, state.unsqueeze(0).contiguous())
            return outputs, last[-1]
        lengths = mask.sum(1).cpu()
        packed, last = self.gru(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        outputs, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        return outputs, last.transpose(0, 1).flatten(1)


class NormalisedGRU(nn.Module):
    """A GRU with layer normalisation of its gates, slower than torch's; all gradients have a similar scale."""

    def __init__(self, inputs: int, hidden: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.hidden, directions = hidden, 2 if bidirectional else 1
        self.of_input = nn.ModuleList(nn.Linear(inputs, 3 * hidden) for _ in range(directions))
        self.of_state = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(directions))
        self.input_norm = nn.ModuleList(nn.LayerNorm(3 * hidden) for _ in range(directions))
        self.state_norm = nn.ModuleList(nn.LayerNorm(3 * hidden) for _ in range(directions))

    def forward(self, x: Tensor, mask: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs at every position and the last state, which like `state` is (samples, units)."""
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
            # The state does not change after the end of a sentence, so padding has no effect.
            h = torch.where(mask[:, place, None], keep * h + (1 - keep) * new, h)
            outputs[place] = h
        return torch.stack(outputs, dim=1), h


class _Translator(nn.Module):
    """An embedding of word pieces that also scores the next piece; a subclass encodes and decodes."""

    bias: nn.Parameter
    _begin: Callable[[Tensor], tuple[Tensor, ...]]  # of sources: what `_next` needs for the first piece
    _next: Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, tuple[Tensor, ...]]]  # the last position's states

    def __init__(self, vocabulary: int, units: int, dropout: float) -> None:
        super().__init__()
        self.pieces = nn.Embedding(vocabulary, units, padding_idx=PAD)
        nn.init.normal_(self.pieces.weight, std=units**-0.5)
        self.dropout = nn.Dropout(dropout)

    def _embed(self, pieces: Tensor) -> Tensor:
        vectors: Tensor = self.pieces(pieces) * self.pieces.embedding_dim**0.5
        return vectors

    def _score(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.pieces.weight, self.bias)

    def greedy(self, source: Tensor, limit: int) -> Tensor:
        """Return greedy translations: the best piece at every position until all sentences have ended."""
        state, written = self._begin(source), torch.full_like(source[:, :1], BEGIN)
        ended = torch.zeros_like(written, dtype=torch.bool)
        for _ in range(min(limit, LONGEST - 1)):
            states, state = self._next(written, state)
            piece = self._score(states).argmax(2).masked_fill(ended, END)
            written = torch.cat([written, piece], dim=1)
            ended = ended | (piece == END)
            if bool(ended.all()):
                break
        return written[:, 1:]


class RecurrentTranslator(_Translator):
    """A bidirectional encoder and a decoder with dot-product attention that share one embedding table."""

    def __init__(self, vocabulary: int, *, units: int = 256, normalised: bool = False) -> None:
        super().__init__(vocabulary, units, dropout=0.2)
        cell = NormalisedGRU if normalised else PlainGRU
        self.encoder = cell(units, units // 2, bidirectional=True)
        self.decoder = cell(units, units, bidirectional=False)
        self.join = nn.Linear(2 * units, units)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the scores of the next piece at the positions of the target that `continued` returns."""
        joined, _ = self._decode(target, *self._encode(source))
        return self._score(joined[continued(target)])

    def _begin(self, source: Tensor) -> tuple[Tensor, ...]:
        return self._encode(source)

    def _encode(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the encoder's outputs, the mask without padding, and the first state of the decoder."""
        mask = source != PAD
        outputs, last = self.encoder(self.dropout(self._embed(source)), mask, None)
        return self.dropout(outputs), mask, last

    def _decode(self, target: Tensor, memory: Tensor, mask: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        states, last = self.decoder(self.dropout(self._embed(target)), target != PAD, state)
        fit = torch.bmm(states, memory.transpose(1, 2)) * memory.shape[2] ** -0.5
        weights = fit.masked_fill(~mask[:, None, :], -1e9).softmax(dim=2)
        joined = torch.tanh(self.join(torch.cat([states, torch.bmm(weights, memory)], dim=2)))
        return self.dropout(joined), last

    def _next(self, written: Tensor, encoded: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        memory, mask, state = encoded
        joined, state = self._decode(written[:, -1:], memory, mask, state)
        return joined, (memory, mask, state)


class Attention(nn.Module):
    """Multi-head attention whose dropout is a layer of its own, so that simulated workers can seed its masks."""

    def __init__(self, units: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.units = heads, units
        self.in_proj = nn.Linear(units, 3 * units)  # queries, keys, values
        self.out_proj = nn.Linear(units, units)
        self.dropout = nn.Dropout(dropout)
        nn.init.zeros_(self.in_proj.bias)
        nn.init.zeros_(self.out_proj.bias)

    def _project(self, x: Tensor, rows: slice) -> Tensor:
        """Return these rows of the input projection as (samples, heads, positions, units of a head)."""
        projected = nn.functional.linear(x, self.in_proj.weight[rows], self.in_proj.bias[rows])
        heads: Tensor = projected.unflatten(2, (-1, self.units // self.heads))
        return heads.transpose(1, 2)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the positions that are attended to."""
        keys, values = self._project(x, slice(self.units, None)).chunk(2, dim=1)
        return keys, values

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
        """Attend from x to the keys; `hidden` marks the keys that a position must not see."""
        queries = self._project(x, slice(self.units))
        fit = queries @ keys.transpose(2, 3) * queries.shape[3] ** -0.5
        weights = self.dropout(fit.masked_fill(hidden, -torch.inf).softmax(dim=3))
        attended: Tensor = self.out_proj((weights @ values).transpose(1, 2).flatten(2))
        return attended


class EncoderLayer(nn.Module):
    """A layer of the Transformer's encoder: attention, then an MLP, each normalised before and with a residual."""

    def __init__(self, units: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.self_attn = Attention(units, heads, dropout)
        self.linear1, self.linear2 = nn.Linear(units, 2 * units), nn.Linear(2 * units, units)
        self.norm1, self.norm2 = nn.LayerNorm(units), nn.LayerNorm(units)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Return the states after this layer; `hidden` marks the padding."""
        normal = self.norm1(x)
        x = x + self.dropout(self.self_attn(normal, *self.self_attn.keys_values(normal), hidden))
        return x + self._mlp(self.norm2(x))

    def _mlp(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.linear2(self.dropout(torch.relu(self.linear1(x)))))
        return result


class DecoderLayer(EncoderLayer):
    """A layer of the Transformer's decoder, which also attends to the source between the two."""

    def __init__(self, units: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(units, heads, dropout)
        self.multihead_attn = Attention(units, heads, dropout)
        self.norm3 = nn.LayerNorm(units)

    def attend(self, x: Tensor, own: Cache, hidden: Tensor, source: Cache, padding: Tensor) -> tuple[Tensor, Cache]:
        """Return the states after this layer, and the keys and values of all positions so far.

        own: keys and values of the positions before x. source: those of the source, whose padding is `padding`.
        """
        normal = self.norm1(x)
        new = self.self_attn.keys_values(normal)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(own, new, strict=True))
        x = x + self.dropout(self.self_attn(normal, keys, values, hidden))
        x = x + self.dropout(self.multihead_attn(self.norm2(x), *source, padding))
        return x + self._mlp(self.norm3(x)), (keys, values)


class LayerStack(nn.Module):
    """Layers and the normalisation after the last."""

    def __init__(self, layers: Iterable[nn.Module], units: int) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(units)


class TransformerTranslator(_Translator):
    """A Transformer encoder and decoder of a few layers with sinusoidal positions."""

    places: Tensor

    def __init__(self, vocabulary: int, *, units: int = 256, layers: int = 3, heads: int = 4) -> None:
        super().__init__(vocabulary, units, dropout=0.1)
        self.register_buffer("places", _sinusoids(LONGEST, units), persistent=False)
        self.encoder = LayerStack((EncoderLayer(units, heads) for _ in range(layers)), units)
        self.decoder = LayerStack((DecoderLayer(units, heads) for _ in range(layers)), units)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        for weights in (*self.encoder.parameters(), *self.decoder.parameters()):
            if weights.dim() > 1:
                nn.init.xavier_uniform_(weights)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the scores of the next piece at the positions of the target that `continued` returns."""
        states, _ = self._decode(target, self._begin(source))
        return self._score(states[continued(target)])

    def _begin(self, source: Tensor) -> tuple[Tensor, ...]:
        """Return the mask of the source's padding, and for each layer the keys and values of the source and the target.

        The target has no positions yet.
        """
        padding = (source == PAD)[:, None, None, :]
        memory = self._embed(source)
        for layer in self.encoder.layers:
            memory = layer(memory, padding)
        memory = self.encoder.norm(memory)
        caches = []
        for layer in self._decoder_layers():
            keys, values = layer.multihead_attn.keys_values(memory)
            caches += [keys, values, keys[:, :, :0], values[:, :, :0]]
        return padding, *caches

    def _decoder_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.decoder.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    def _embed(self, pieces: Tensor, first: int = 0) -> Tensor:
        """Return the vectors of pieces with those of their places, which count from `first`."""
        placed: Tensor = self.dropout(super()._embed(pieces) + self.places[first : first + pieces.shape[1]])
        return placed

    def _decode(self, target: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the states of the target's positions that are not in the cache, and the state with them."""
        padding, *caches = state
        total, known = target.shape[1], caches[2].shape[2]
        later = torch.ones(total, total, dtype=torch.bool, device=target.device).triu(1)[known:]
        hidden = later | (target == PAD)[:, None, None, :]
        x, updated = self._embed(target[:, known:], known), [padding]
        for number, layer in enumerate(self._decoder_layers()):
            source_keys, source_values, keys, values = caches[4 * number : 4 * number + 4]
            x, own = layer.attend(x, (keys, values), hidden, (source_keys, source_values), padding)
            updated += [source_keys, source_values, *own]
        return self.decoder.norm(x), tuple(updated)

    def _next(self, written: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._decode(written, state)


def _sinusoids(length: int, units: int) -> Tensor:
    place = torch.arange(length).unsqueeze(1)
    speed = torch.exp(torch.arange(0, units, 2) * (-torch.log(torch.tensor(10_000.0)) / units))
    return torch.stack([torch.sin(place * speed), torch.cos(place * speed)], dim=2).flatten(1)


VOCABULARY = 4000
LONGEST_ANSWER = 60  # pieces; the longest reference in the test set has 48
_BASE = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"
# SHA-256 of the unpacked contents of the original files.
_SUMS = {
    "train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
    "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
    "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
}


def _need(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        how = "install it with pip install 'PATH_OF_THE_CLONE[translate]'"
        raise RecipeError(f"the translate recipes need {module}: {how}.") from error


@dataclass(frozen=True)
class SentencePairs:
    """Pairs of sentences as word pieces, and the reference translations as text."""

    sources: list[Tensor]
    targets: list[Tensor]
    references: list[str]
    vocabulary: Any  # a sentencepiece.SentencePieceProcessor

    def __len__(self) -> int:
        return len(self.sources)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return padded sources, and padded targets with begin and end marks."""
        sides = (self.sources, self.targets)
        return tuple(pad_sequence([side[i] for i in indices], batch_first=True, padding_value=PAD) for side in sides)


def learn_vocabulary(lines: Sequence[str]) -> Any:
    """Learn byte-pair pieces of both languages; the same lines give the same pieces on every worker."""
    pieces = _need("sentencepiece")
    model = io.BytesIO()
    try:
        pieces.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=VOCABULARY,
            hard_vocab_limit=False,
            character_coverage=1.0,
            num_threads=1,
            minloglevel=2,
            pad_id=PAD,
            unk_id=UNKNOWN,
            bos_id=BEGIN,
            eos_id=END,
        )
    except RuntimeError as error:
        raise RecipeError(f"cannot learn word pieces from the training files ({error}).") from error
    return pieces.SentencePieceProcessor(model_proto=model.getvalue())


@cache
def load(data_dir: Path | None) -> Splits:
    """Read the training and test pairs from a folder, or download them to the cache."""

    def lines(name: str) -> list[str]:
        if data_dir is None:
            asset = Asset(f"{name}.gz", (f"{_BASE}{name}.gz",), f"sha256:{_SUMS[name]}")
            return read_lines(fetch(asset, cache_dir("multi30k")))
        return read_lines(find_file(data_dir, name, subfolders=("multi30k",)))

    def pairs(name: str) -> tuple[list[str], list[str]]:
        german, english = lines(f"{name}.de"), lines(f"{name}.en")
        if len(german) != len(english) or not german:
            raise RecipeError(
                f"{name}.de has {len(german):,} lines and {name}.en {len(english):,}: "
                "one of them is truncated, get both again."
            )
        return german, english

    train, test = pairs("train"), pairs("test_2016_flickr")
    vocabulary = learn_vocabulary(train[0] + train[1])
    return Splits(train=_encode(train, vocabulary), test=_encode(test, vocabulary))


def _encode(pairs: tuple[list[str], list[str]], vocabulary: Any) -> SentencePairs:
    sources, targets = (vocabulary.encode(side) for side in pairs)
    longest = LONGEST - 2
    return SentencePairs(
        sources=[torch.tensor([*pieces[:longest], END]) for pieces in sources],
        targets=[torch.tensor([BEGIN, *pieces[:longest], END]) for pieces in targets],
        references=pairs[1],
        vocabulary=vocabulary,
    )


def translation_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the next piece, without padding."""
    source, target = batch
    given = target[:, :-1]
    return nn.functional.cross_entropy(model(source, given), target[:, 1:][continued(given)])


def translations(model: nn.Module, split: SentencePairs, samples: int) -> list[str]:
    """Return the model's greedy translations of the first `samples` sentences as text."""
    assert isinstance(model, _Translator)
    device = next(model.parameters()).device
    # Sorting by length saves padding and steps.
    order = sorted(range(samples), key=lambda index: len(split.sources[index]))
    texts = [""] * samples
    for start in range(0, samples, 100):
        chosen = order[start : start + 100]
        answer = model.greedy(split.batch(chosen)[0].to(device), LONGEST_ANSWER).tolist()
        for index, pieces in zip(chosen, answer, strict=True):
            end = pieces.index(END) if END in pieces else len(pieces)
            texts[index] = split.vocabulary.decode([piece for piece in pieces[:end] if piece != PAD])
    return texts


def bleu(model: nn.Module, split: Split, samples: int) -> float:
    """Return BLEU from 0 to 100 by sacrebleu with its standard tokeniser."""
    assert isinstance(split, SentencePairs)
    answers = translations(model, split, samples)
    return float(_need("sacrebleu").corpus_bleu(answers, [split.references[:samples]]).score)


def _recipe(name: str, network: str, model: Any, *, lr: float) -> Recipe:
    return Recipe(
        name,
        description=f"German to English with a {network}.",
        data="Multi30k German-English, 29,000 + 1,000 sentences, 1.2 MB",
        model=lambda: model(VOCABULARY),
        load=load,
        loss=translation_loss,
        score=bleu,
        metric="bleu",
        make_optimizer=adam,
        defaults=Defaults(batch=32, lr=lr, momentum=0.9, epochs=10, target=30.0),
    )


_LAYERNORM = "layer-normalised GRU encoder-decoder and attention"
# Functions that return the recipes.
translate = partial(_recipe, "translate", "GRU encoder-decoder and attention", RecurrentTranslator, lr=2e-3)
translate_layernorm = partial(
    _recipe, "translate-layernorm", _LAYERNORM, partial(RecurrentTranslator, normalised=True), lr=2e-3
)
translate_transformer = partial(_recipe, "translate-transformer", "small Transformer", TransformerTranslator, lr=1e-3)
