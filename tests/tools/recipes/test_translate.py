"""Translation: masks of padding and later pieces, equal vocabularies, and training to a high BLEU."""

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from thinwire.errors import RecipeError
from thinwire.tools.recipes import get_recipe
from thinwire.tools.recipes.translate import (
    BEGIN,
    END,
    PAD,
    VOCABULARY,
    RecurrentTranslator,
    SentencePairs,
    TransformerTranslator,
    load,
    translations,
)

PAIRS = [
    ("Ein Mann läuft.", "A man runs."),
    ("Eine Frau läuft.", "A woman runs."),
    ("Ein Hund schläft im Haus.", "A dog sleeps in the house."),
    ("Eine Frau schläft im Haus.", "A woman sleeps in the house."),
    ("Der Hund läuft schnell.", "The dog runs fast."),
    ("Der Mann schläft.", "The man sleeps."),
]
NAMES = ["translate", "translate-layernorm", "translate-transformer"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train", "test_2016_flickr"):
        for side, language in enumerate(("de", "en")):
            text = "".join(pair[side] + "\n" for pair in PAIRS)
            (tmp_path / f"{name}.{language}.gz").write_bytes(gzip.compress(text.encode()))
    return tmp_path


def test_the_same_files_give_the_same_pieces(folder: Path) -> None:
    first = load(folder).train
    load.cache_clear()
    second = load(folder).train
    assert isinstance(first, SentencePairs)
    assert isinstance(second, SentencePairs)
    assert all(torch.equal(a, b) for a, b in zip(first.sources, second.sources, strict=True))
    assert first.vocabulary.get_piece_size() <= VOCABULARY
    source, target = first.batch([0, 2])
    assert source.shape[0] == target.shape[0] == 2
    assert target[:, 0].tolist() == [BEGIN, BEGIN]
    assert int(source.max()) < VOCABULARY


@pytest.mark.parametrize("kind", ["gru", "layernorm", "transformer"])
def test_padding_and_later_pieces_have_no_effect(kind: str) -> None:
    torch.manual_seed(0)
    model: RecurrentTranslator | TransformerTranslator
    if kind == "transformer":
        model = TransformerTranslator(50, units=16, layers=2).eval()
    else:
        model = RecurrentTranslator(50, units=16, normalised=kind == "layernorm").eval()
    source, target = torch.tensor([[5, 6, 7, END]]), torch.tensor([[BEGIN, 8, 9, 10]])
    alone = model(source, target)
    assert alone.shape == (4, 50)
    wider = torch.tensor([[5, 6, 7, END, PAD, PAD], [9, 9, 9, 9, 9, END]])
    longer = torch.tensor([[BEGIN, 8, 9, 10, PAD], [BEGIN, 9, 9, 9, 9]])
    torch.testing.assert_close(model(wider, longer)[:4], alone, rtol=1e-4, atol=1e-5)
    changed = torch.tensor([[BEGIN, 8, 9, 33]])
    torch.testing.assert_close(model(source, changed)[:3], alone[:3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_six_sentences_are_memorised(folder: Path, name: str) -> None:
    recipe = get_recipe(name)
    splits, model = recipe.load(folder), recipe.build(0)
    optimizer = recipe.optimizer(model, lr=3e-3)
    torch.manual_seed(0)
    for _ in range(50):
        optimizer.zero_grad()
        recipe.loss(model, splits.train.batch(range(6))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert recipe.evaluate(model, splits.test) > 80
    assert isinstance(splits.test, SentencePairs)
    assert len(translations(model.eval(), splits.test, 2)) == 2


def test_sides_of_different_length_are_refused(folder: Path) -> None:
    (folder / "train.de.gz").unlink()
    (folder / "train.de").write_text("Ein Satz.\n")
    load.cache_clear()
    with pytest.raises(RecipeError, match=r"train.de has 1 lines and train.en 6"):
        load(folder)


def test_a_file_that_is_not_utf8_is_refused(folder: Path) -> None:
    (folder / "train.de.gz").write_bytes(gzip.compress(b"\xff\xfe\n" * 6))
    load.cache_clear()
    with pytest.raises(RecipeError, match=r"train.de.gz is not UTF-8 text"):
        load(folder)


def test_decoding_with_a_cache_gives_the_same_translations(folder: Path) -> None:
    """Greedy decoding computes one position at a time; the whole target at once gives the same choices."""
    recipe = get_recipe("translate-transformer")
    splits, model = recipe.load(folder), recipe.build(0).eval()
    assert isinstance(model, TransformerTranslator)
    with torch.no_grad():  # scores that depend on the text more than those of a new model
        for weights in model.decoder.parameters():
            weights.mul_(3.0)
        source, _ = splits.test.batch(range(6))
        written = model.greedy(source, 12)
        target = torch.cat([torch.full_like(source[:, :1], BEGIN), written], dim=1)
        states, _ = model._decode(target[:, :-1], model._begin(source))
        chosen = model._score(states).argmax(2)
    assert len(set(written.flatten().tolist())) > 6
    unended = (written == END).cumsum(1) - (written == END).long() == 0
    assert torch.equal(chosen[unended], written[unended])


def test_the_transformer_equals_torchs_layers() -> None:
    torch.manual_seed(0)
    model = TransformerTranslator(50, units=16, layers=2, heads=2).eval()
    options: dict[str, Any] = {"batch_first": True, "norm_first": True}
    encoder_layer = nn.TransformerEncoderLayer(16, 2, 32, **options)
    encoder = nn.TransformerEncoder(encoder_layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, **options), 2, nn.LayerNorm(16))
    for ours, theirs in ((model.encoder, encoder), (model.decoder, decoder)):
        theirs.load_state_dict({name.replace("in_proj.", "in_proj_"): w for name, w in ours.state_dict().items()})
        theirs.eval()
    source, target = torch.tensor([[5, 6, 7, END], [8, END, PAD, PAD]]), torch.tensor([[BEGIN, 8, 9], [BEGIN, 9, PAD]])
    memory = encoder(model._embed(source), src_key_padding_mask=source == PAD)
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)
    masks = {"tgt_mask": later, "tgt_key_padding_mask": target == PAD, "memory_key_padding_mask": source == PAD}
    expected = decoder(model._embed(target), memory, **masks)
    states, _ = model._decode(target, model._begin(source))
    torch.testing.assert_close(states[target != PAD], expected[target != PAD], rtol=1e-4, atol=1e-5)
