"""translate: Multi30k from German to English, with a GRU or a small Transformer; the metric is BLEU.

Both languages share one vocabulary of word pieces, learned from the training files.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from thinwire.errors import RecipeError
from thinwire.recipes.attention import LONGEST, TransformerTranslator
from thinwire.recipes.fetch import Asset, cache_dir, fetch
from thinwire.recipes.formats import find_file, read_lines
from thinwire.recipes.recipe import Batch, Defaults, Recipe, Split, Splits, adam
from thinwire.recipes.recurrent import BEGIN, END, PAD, UNKNOWN, RecurrentTranslator, continued

VOCABULARY = 4000
LONGEST_ANSWER = 60  # pieces; the longest reference of the test set has 48
_BASE = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"
# The sums are those of the unpacked contents of the original files.
_SUMS = {
    "train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
    "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
    "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
}


def _need(module: str) -> Any:
    """Import one of the two packages that only this recipe needs."""
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"the translate recipes need {module}: install it with pip install 'thinwire[translate]'."
        ) from error


@dataclass(frozen=True)
class SentencePairs:
    """Pairs of sentences as pieces, and the references as text."""

    sources: list[Tensor]
    targets: list[Tensor]
    references: list[str]
    vocabulary: Any  # a sentencepiece.SentencePieceProcessor

    def __len__(self) -> int:
        return len(self.sources)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Padded sources, and padded targets with their begin and end marks."""
        return (
            pad_sequence([self.sources[i] for i in indices], batch_first=True, padding_value=PAD),
            pad_sequence([self.targets[i] for i in indices], batch_first=True, padding_value=PAD),
        )


def learn_vocabulary(lines: Sequence[str]) -> Any:
    """Byte-pair pieces of both languages; the same lines give the same pieces on every worker."""
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
    """Mean cross-entropy of the next piece, padding left out."""
    source, target = batch
    given = target[:, :-1]
    return nn.functional.cross_entropy(model(source, given), target[:, 1:][continued(given)])


def translations(model: nn.Module, split: SentencePairs, samples: int) -> list[str]:
    """The model's greedy translations of the first `samples` sentences, as text."""
    assert isinstance(model, RecurrentTranslator | TransformerTranslator)
    device = next(model.parameters()).device
    # Sentences of one length together: little padding, few steps.
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
    """BLEU of sacrebleu with its standard tokeniser, 0 to 100."""
    assert isinstance(split, SentencePairs)
    answers = translations(model, split, samples)
    return float(_need("sacrebleu").corpus_bleu(answers, [split.references[:samples]]).score)


def _recipe(name: str, description: str, model: Any, *, lr: float) -> Recipe:
    return Recipe(
        name,
        description=description,
        data="Multi30k German-English, 29,000 + 1,000 sentences, 1.2 MB",
        model=model,
        load=load,
        loss=translation_loss,
        score=bleu,
        metric="bleu",
        make_optimizer=adam,
        defaults=Defaults(batch=32, lr=lr, momentum=0.9, epochs=10, target=30.0),
    )


def translate() -> Recipe:
    """The GRU."""
    description = "German to English with a GRU encoder-decoder and attention."
    return _recipe("translate", description, lambda: RecurrentTranslator(VOCABULARY), lr=2e-3)


def translate_layernorm() -> Recipe:
    """The GRU with normalised gates."""
    description = "German to English with a layer-normalised GRU encoder-decoder and attention."
    return _recipe(
        "translate-layernorm",
        description,
        lambda: RecurrentTranslator(VOCABULARY, normalised=True),
        lr=2e-3,
    )


def translate_transformer() -> Recipe:
    """The Transformer."""
    description = "German to English with a small Transformer."
    return _recipe("translate-transformer", description, lambda: TransformerTranslator(VOCABULARY), lr=1e-3)
