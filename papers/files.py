"""The files of a study: finished work that is reused, and the result as JSON, page, picture and docs/results.md."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

import thinwire
from papers import SCALES, STUDIES
from papers.study import MADE, Study, StudyError, claim_rows
from thinwire import files
from thinwire.tools.observe import describe_machine, now
from thinwire.tools.recipes.recipe import Splits
from thinwire.tools.report.markup import replace_file, write_study_page

FINGERPRINT_SAMPLES = 16  # of each split
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER_TIMEOUT = 120.0  # seconds for a page
HEADLESS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def fingerprint(splits: Splits) -> str:
    """Return a short hash of the data: the lengths of both splits and evenly spaced samples of each."""
    digest = hashlib.sha256()
    for split in (splits.train, splits.test):
        digest.update(f"{len(split)};".encode())
        places = sorted({i * (len(split) - 1) // (FINGERPRINT_SAMPLES - 1) for i in range(FINGERPRINT_SAMPLES)})
        for tensor in split.batch(places) if len(split) else ():
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def provenance() -> dict[str, str]:
    """Return the versions, the machine and the time that a file of finished work records."""
    version = f"thinwire {thinwire.__version__}, torch {torch.__version__}"
    return {"version": version, "machine": describe_machine(), "date": now()}


def merge_provenance(files: Iterable[dict[str, Any]]) -> dict[str, str]:
    """List the versions, machines and days of several files, each once; files without provenance are ignored."""
    made = [content["made"] for content in files if isinstance(content.get("made"), dict)]
    merged = {}
    for key in ("version", "machine", "date"):
        values = [str(each[key])[: 10 if key == "date" else None] for each in made if key in each]
        merged[key] = "; ".join(sorted(set(values)) if key == "date" else dict.fromkeys(values)) or "not noted"
    return merged


def save(path: Path, write: Callable[[IO[bytes]], object], *, checksum: bool = False) -> None:
    """Write a file atomically: it is complete and on the disk before it takes its name."""
    try:
        files.replace_file(path, write, checksum=checksum)
    except (OSError, RuntimeError) as error:
        why = files.explain(path, error)
        raise StudyError(f"cannot write {path} ({why}): make room, or choose another folder by --work") from error


def save_json(value: Any, path: Path) -> None:
    """Write plain data as a JSON file, atomically."""
    data = json.dumps(value).encode() + b"\n"
    save(path, lambda out: out.write(data))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return {} if the file is missing, damaged or not an object, so that its work is repeated."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    except OSError as error:
        raise StudyError(f"cannot read {path} ({error.strerror}): make it readable, or delete it") from error
    return content if isinstance(content, dict) else {}


def write_study(study: Study, out: Path) -> tuple[Path, Path]:
    """Write a study's JSON and page and return their paths.

    If the existing result has parts that this one lacks, it stays, and this one is written as NAME.partial.
    """
    stem = f"{study.stem}.partial" if _lacks_existing_parts(study, out / f"{study.stem}.json") else study.stem
    json_file, page = out / f"{stem}.json", out / f"{stem}.html"
    replace_file(json_file, study.to_json())
    write_study_page(
        page,
        title=study.title,
        verdict=study.verdict,
        facts={"paper": study.paper, "scale": study.scale, **study.facts},
        claims=claim_rows(study.claims),
        notes=[*study.differs, *(f"Not run: {part}" for part in study.missing)],
        tables=[(table.title, table.note, table.rows) for table in study.tables],
        figures=[asdict(figure) for figure in study.figures],
        made=study.made,
    )
    return json_file, page


def _lacks_existing_parts(study: Study, path: Path) -> bool:
    if not study.missing or not path.exists():
        return False
    try:
        existing = Study.read(path)
    except StudyError:  # damaged or of another version: it may have more parts
        return True
    ours, theirs = ({part.partition(":")[0] for part in each.missing} for each in (study, existing))
    return not ours <= theirs


def take_screenshot(page: Path, picture: Path, *, width: int = 1200) -> str | None:
    """Save a picture of a whole page with a headless browser; return None, or the reason why there is no picture.

    The picture of an earlier page is deleted first, so that it is not mistaken for this page's.
    """
    try:
        picture.unlink(missing_ok=True)
        browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
        if browser is None:
            return f"none of {', '.join(BROWSERS)} is installed"
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True, dir=picture.parent) as folder:
            return _run_browser([browser, *HEADLESS], page, picture, Path(folder), width)
    except subprocess.TimeoutExpired:
        return f"the browser did not end within {BROWSER_TIMEOUT:g} seconds"
    except OSError as error:
        return f"{error.filename or picture}: {error.strerror}"


def _run_browser(browser: Sequence[str], page: Path, picture: Path, folder: Path, width: int) -> str | None:
    """Run the browser twice, to measure the page's height and to take the picture, with `folder` as its profile."""
    screenshot = folder / "screenshot.png"

    def run(height: int, *options: str) -> str | None:
        argv = [*browser, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}", *options]
        # The output goes to a file: after a timeout, the browser's children would keep a pipe open.
        with (folder / "output").open("w+", encoding="utf-8", errors="replace") as output:
            argv.append(page.resolve().as_uri())
            done = subprocess.run(argv, stdout=output, stderr=subprocess.DEVNULL, timeout=BROWSER_TIMEOUT)
            output.seek(0)
            return output.read() if done.returncode == 0 else None

    height = re.search(r'data-height="(\d+)"', run(2000, "--dump-dom") or "")
    if height is None:
        return "the browser could not draw the page"
    output = run(int(height[1]), f"--screenshot={screenshot.resolve()}")
    if output is None or not screenshot.exists() or screenshot.read_bytes()[:4] != b"\x89PNG":
        return "the browser took no picture"
    os.replace(screenshot, picture)
    return None


def read_studies(folder: Path) -> list[Study]:
    """Read all results in a folder, in the order of STUDIES."""
    paths = [folder / f"{name}-{scale}.json" for name in STUDIES for scale in SCALES]
    return [Study.read(path) for path in paths if path.exists()]


def results_page(studies: Sequence[Study]) -> str:
    """Return the text of docs/results.md: every claim with the paper's figure, ours and the ratio."""
    intro = (
        "This page is generated by `thinwire reproduce --docs` from the files in `results/`; do not edit it by hand. "
        'In the tables, "Ratio" is our figure divided by the paper\'s.'
    )
    chapters = (block for study in studies for block in _chapter(study))
    return "\n\n".join(filter(None, ["# Results: the papers, run again", intro, *chapters])) + "\n"


def _chapter(study: Study) -> Iterable[str]:
    yield from (f"## {study.title} ({study.scale})", f"{study.paper}. {study.verdict}")
    yield _markdown(claim_rows(study.claims))
    for title, notes in (("Differences from the paper:", study.differs), ("Not run:", study.missing)):
        yield from (title, "\n".join(f"- {note}" for note in notes)) if notes else ()
    for table in study.tables:
        yield from (f"### {table.title}", table.note, _markdown(table.rows))
    yield f"![{study.title}](../results/{study.stem}.png)"
    command, *others = (study.made[key] for key in MADE)
    yield f"`{command}`, {', '.join(others)}."


def _markdown(rows: Sequence[dict[str, str]]) -> str:
    headings = list(rows[0]) if rows else []
    marks = ["---" if i == 0 or h == "Note" else "---:" for i, h in enumerate(headings)]
    cells = [[row.get(h, "").replace("|", "\\|") for h in headings] for row in rows]
    lines = [f"| {' | '.join(headings)} |", f"|{'|'.join(marks)}|", *(f"| {' | '.join(row)} |" for row in cells)]
    return "\n".join(lines) if rows else ""
