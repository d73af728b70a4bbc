"""Keeping: files of finished work: written whole or not at all, and read only if they are what they should be.

A file says what it is the outcome of, the data included, and where and when it was made.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import torch

import thinwire
from thinwire.observe import describe_machine, now
from thinwire.recipes.recipe import Split, Splits
from thinwire.reproduce.study import StudyError

LOOKS = 16  # samples of a split that stand for all of it


def fingerprint(splits: Splits) -> str:
    """The data in a few hexadecimal digits: lengths, and samples of both splits from the first to the last."""
    digest = hashlib.sha256()
    for split in (splits.train, splits.test):
        digest.update(f"{len(split)};".encode())
        for tensor in split.batch(_spread(split)) if len(split) else ():
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _spread(split: Split) -> list[int]:
    last = len(split) - 1
    return sorted({place * last // (LOOKS - 1) for place in range(LOOKS)})


def provenance() -> dict[str, str]:
    """What made a file, where and when."""
    version = f"thinwire {thinwire.__version__}, torch {torch.__version__}"
    return {"version": version, "machine": describe_machine(), "date": now()}


def origins(held: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The versions, machines and days of many files, each named once; files of before they were noted do not count."""
    made = [found["made"] for found in held if isinstance(found.get("made"), dict)]
    listed = {}
    for key in ("version", "machine", "date"):
        values = [str(each[key])[: 10 if key == "date" else None] for each in made if key in each]
        listed[key] = "; ".join(sorted(set(values)) if key == "date" else dict.fromkeys(values)) or "not noted"
    return listed


def save(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Write a file whole or not at all, on the disk before it takes its name; StudyError if that cannot be."""
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # torch's writer raises the latter when the disk is full
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise StudyError(f"cannot write {path} ({why}): make room, or choose another folder by --work") from error


def save_json(value: Any, path: Path) -> None:
    """Plain data as a file."""
    text = json.dumps(value) + "\n"

    def write(out: IO[bytes]) -> None:
        out.write(text.encode())

    save(path, write)


def read_json(path: Path) -> dict[str, Any]:
    """What a file holds; nothing if it is missing, damaged or somebody else's, so that its work is done again."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StudyError(f"cannot read {path} ({error.strerror}): make it readable, or delete it") from error
    except ValueError:
        return {}
    return held if isinstance(held, dict) else {}
