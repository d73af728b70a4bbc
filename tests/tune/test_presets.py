"""resolve_codec: names of presets, densities, selections and codecs become codecs; anything else is refused."""

import pytest
import torch

import thinwire as tw
from thinwire.tune.presets import LOCAL, PRESETS, resolve_codec


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_encodes_and_says_what_it_does_in_one_sentence(name: str) -> None:
    codec = resolve_codec(name)
    x = {"w": torch.randn(5000)}
    if name == "update" or name in LOCAL:  # its basis belongs to a link
        with pytest.raises(ValueError, match=r"use it with attach\(\)"):
            codec.encode(x)
    else:
        sent = tw.Codec.decode(codec.encode(x), x)["w"]
        assert 0 < sent.count_nonzero() <= 5000
    sentence = PRESETS[name][0]
    assert sentence[0].isupper() and sentence.endswith(".") and sentence.count(". ") == 0


@pytest.mark.parametrize("what", [0.01, "0.01", "1%", "1 %", " 0.01 ", "1e-2"])
def test_densities(what: float | str) -> None:
    assert repr(resolve_codec(what)) == repr(tw.Codec(tw.TopK(0.01)))


def test_every_call_makes_a_new_codec() -> None:
    assert resolve_codec("topk1") is not resolve_codec("topk1")
    codec = tw.Codec(tw.TopK(0.2), tw.Bits(4), tw.NoFeedback(), min_numel=5)
    codec.encode({"w": torch.randn(2000)})
    copy = resolve_codec(codec)
    assert copy is not codec and repr(copy) == repr(codec) and copy.step == 0


def test_a_selection_becomes_a_codec() -> None:
    assert repr(resolve_codec(tw.Threshold(0.5))) == repr(tw.Codec(tw.Threshold(0.5)))


@pytest.mark.parametrize("what", [1, 1.0, "1", "1.0", "100%"])
def test_a_density_of_one_asks_whether_one_per_cent_was_meant(what: float | str) -> None:
    with pytest.raises(ValueError, match=r"did you mean 0.01 \(1 %\)\?"):
        resolve_codec(what)
    assert resolve_codec(tw.TopK(1.0)).selection == tw.TopK(1.0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("topkk", "no preset is called 'topkk'; there are percentile90, "),
        ("%", "no preset is called '%'"),
        ("1%1", "no preset is called '1%1'"),
        ("", "no preset is called ''"),
        (0.0, "a density must lie in"),
        (-0.1, "a density must lie in"),
        (5, "a density must lie in"),
        ("nan", "a density must lie in"),
        (None, "a codec is a Codec, a selection, a density or a preset's name, not None"),
        (True, "a codec is a Codec, a selection, a density or a preset's name, not True"),
        ([0.01], "a codec is a Codec"),
    ],
)
def test_anything_else_is_refused(what: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_codec(what)  # type: ignore[arg-type]
