"""Makes the golden frames: small files that every later thinwire must decode to the same values.

    python tests/codec/golden/make.py

Files that exist are never overwritten; a change of the wire format raises its version and adds new ones.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

import thinwire as tw
import thinwire.codec

HERE = Path(__file__).parent


def gradient(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def frames() -> dict[str, tuple[tw.codec.Frame, list[int]]]:
    """Every value format over two tensors, and each of the other parts of the format once."""
    made = {}
    tensors = {"w": gradient(3000, 1), "b": gradient(21, 2)}
    formats = [tw.Float32(), tw.Float16(), tw.BFloat16(), tw.Bits(8), tw.Bits(4), tw.Bits(2), tw.Sign(), tw.Unary()]
    names = ["float32", "float16", "bfloat16", "bits8", "bits4", "bits2", "sign", "unary"]
    for name, values in zip(names, formats, strict=True):
        frame = tw.Codec(tw.TopK(0.02, exact=True), values, min_numel=100).encode(tensors)
        made[f"v1-{name}"] = (frame, [3000, 21])
    stochastic = tw.Codec(tw.TopK(0.02, exact=True), tw.Bits(4, seed=9)).encode({"w": tensors["w"]})
    made["v1-stochastic"] = (stochastic, [3000])
    made["v1-strata"] = (tw.Codec(tw.RandomK(0.02, seed=7), tw.Bits(8)).encode({"w": tensors["w"]}), [3000])
    # At step 3 both tensors send a window: the second of the large one, which has two blocks, and all of the small one.
    window = tw.Codec(tw.Rotate(0.3, min_window=64), tw.Bits(2)).encode(tensors, step=3)
    made["v1-window"] = (window, [3000, 21])
    # 700 of 700 entries are two runs; 650 of 1300 are bitmaps; 3 of a million are far apart; the rest is empty.
    far = torch.zeros(1_000_000)
    far[[0, 123_456, 999_999]] = torch.tensor([1.0, -2.0, 3.0])
    shapes = {"run": gradient(700, 3), "half": gradient(1300, 4), "far": far, "none": torch.empty(0)}
    codec = tw.Codec(tw.TopK(0.5, exact=True), tw.Sign(), min_numel=1000)
    made["v1-shapes"] = (codec.encode(shapes), [700, 1300, 1_000_000, 0])
    # Blocks of equal magnitudes, of one outlier, of zeros, and of the largest values; the last block is a single entry.
    extremes = torch.cat([gradient(512, 5).sign(), gradient(512, 6), torch.zeros(512), gradient(513, 7) * 3e37])
    extremes[700] = 1e6
    made["v1-unary-extremes"] = (tw.Codec(tw.TopK(1.0), tw.Unary()).encode({"w": extremes}), [2049])
    made["v1-non-finite"] = (tw.Codec(0.1).encode({"w": torch.tensor([1.0, torch.inf])}), [2])
    return made


def expected(frame: tw.codec.Frame, numels: list[int]) -> dict[str, object]:
    """What a frame says, with floats in hexadecimal so that no digit is lost."""
    reader = tw.codec.FrameReader(frame, numels)
    sections = []
    for section in reader.sections:
        positions, values = reader.entries(section)
        sections.append(
            {
                "id": section.id,
                "format": section.format,
                "coding": section.coding,
                "positions": positions.tolist(),
                "values": [value.hex() for value in values.tolist()],
            }
        )
    return {"numels": numels, "non_finite": reader.non_finite, "sections": sections}


def main() -> None:
    for name, (frame, numels) in frames().items():
        path = HERE / f"{name}.frame"
        if path.exists():
            print(f"{path.name} exists and stays")
            continue
        path.write_bytes(frame.tobytes())
        path.with_suffix(".json").write_text(json.dumps(expected(frame, numels)) + "\n")
        print(f"{path.name}: {len(frame)} bytes")


if __name__ == "__main__":
    main()
