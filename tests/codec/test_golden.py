"""The kernels and the reference decode the golden frames to the values that are stored with them."""

import json
from pathlib import Path

import pytest
import torch

import thinwire as tw
import thinwire.codec
from tests.codec import reference

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.frame"))


def test_every_format_is_there() -> None:
    assert len(GOLDEN) >= 14


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_frame(path: Path) -> None:
    data = path.read_bytes()
    expected = json.loads(path.with_suffix(".json").read_text())
    reader = tw.codec.FrameReader(tw.codec.Frame.from_bytes(data), expected["numels"])
    assert reader.non_finite == expected["non_finite"]
    by_hand = reference.read_frame(data)
    assert len(reader.sections) == len(expected["sections"]) == len(by_hand)
    for section, stored, part in zip(reader.sections, expected["sections"], by_hand, strict=True):
        values = torch.tensor([float.fromhex(v) for v in stored["values"]])
        positions, found = reader.entries(section)
        coding = stored["coding"] if "coding" in stored else int(stored["strata"])  # older files tell strata alone
        assert (section.id, section.format, section.coding) == (stored["id"], stored["format"], coding)
        assert positions.tolist() == stored["positions"] == part.positions
        assert torch.equal(found, values) and torch.equal(part.values, values)
        out = torch.zeros(section.numel)
        outs = [out if i == section.id else torch.zeros(n) for i, n in enumerate(expected["numels"])]
        reader.add_to(outs, weight=2.0)
        assert torch.equal(out[positions], 2.0 * values) and out.count_nonzero() <= len(values)
