"""Writing: a study as its files: results JSON, page, picture; and docs/results.md from all of them."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from papers.study import Study, StudyError, claim_rows
from thinwire.tools.report.markup import replace_file, write_study_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 120.0  # seconds for a page
HEADLESS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def write_study(study: Study, out: Path) -> tuple[Path, Path]:
    """Write a study's JSON and page; under another name if those in place have parts that this one lacks."""
    stem = f"{study.stem}.partial" if _would_lose(study, out / f"{study.stem}.json") else study.stem
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


def _would_lose(study: Study, place: Path) -> bool:
    """Whether a result in place has parts that this one lacks."""
    if not study.missing or not place.exists():
        return False
    try:
        lacked = {_part(words) for words in Study.read(place).missing}
    except StudyError:  # of another version, or damaged: nobody knows
        return True
    return not {_part(words) for words in study.missing} <= lacked


def _part(words: str) -> str:
    """The name of a part that was not run: what stands before why."""
    return words.partition(":")[0]


def photograph(page: Path, picture: Path, *, width: int = 1200) -> str | None:
    """A picture of a whole page by a browser without a window; if there can be none, why.

    An earlier page's picture is taken away first: it must not pass for this one's.
    """
    try:
        picture.unlink(missing_ok=True)
        browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
        if browser is None:
            return f"none of {', '.join(BROWSERS)} is installed"
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True, dir=picture.parent) as folder:
            return _photograph([browser, *HEADLESS], page, picture, Path(folder), width)
    except subprocess.TimeoutExpired:
        return f"the browser did not end within {PATIENCE:g} seconds"
    except OSError as error:
        return f"{error.filename or picture}: {error.strerror}"


def _photograph(browser: Sequence[str], page: Path, picture: Path, folder: Path, width: int) -> str | None:
    """Look how high the page is, then take it; the browser works in a folder of its own."""
    shot = folder / "shot.png"

    def run(height: int, *what: str) -> str | None:
        argv = [*browser, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}", *what]
        # Output goes to a file: after a timeout nobody waits for a pipe that the browser's children hold.
        with (folder / "said").open("w+", encoding="utf-8", errors="replace") as said:
            argv.append(page.resolve().as_uri())
            done = subprocess.run(argv, stdout=said, stderr=subprocess.DEVNULL, timeout=PATIENCE)
            said.seek(0)
            return said.read() if done.returncode == 0 else None

    height = re.search(r'data-height="(\d+)"', run(2000, "--dump-dom") or "")
    if height is None:
        return "the browser could not draw the page"
    taken = run(int(height[1]), f"--screenshot={shot.resolve()}")
    if taken is None or not shot.exists() or shot.read_bytes()[:4] != b"\x89PNG":
        return "the browser took no picture"
    os.replace(shot, picture)
    return None


def read_studies(folder: Path) -> list[Study]:
    """All studies of a folder of results, by name."""
    from papers import STUDIES

    paths = [folder / f"{name}-{scale}.json" for name in STUDIES for scale in ("small", "full")]
    return [Study.read(path) for path in paths if path.exists()]


def document(studies: Sequence[Study]) -> str:
    """docs/results.md: every claim with the paper's figure, ours and the ratio."""
    lines = [
        "# Results: the papers, run again",
        "",
        "Made by `thinwire reproduce --docs` from the files in `results/`; do not edit by hand. "
        "A ratio is ours over the paper's.",
        "",
    ]
    for study in studies:
        lines += _chapter(study)
    return "\n".join(lines).rstrip() + "\n"


def _chapter(study: Study) -> Iterable[str]:
    yield from (f"## {study.title} ({study.scale})", "", f"{study.paper}. {study.verdict}", "")
    yield from _markdown(claim_rows(study.claims))
    if study.differs:
        yield from ("What differs:", "", *(f"- {note}" for note in study.differs), "")
    if study.missing:
        yield from ("Not run:", "", *(f"- {part}" for part in study.missing), "")
    for table in study.tables:
        yield from (f"### {table.title}", "", *([table.note, ""] if table.note else []))
        yield from _markdown(table.rows)
    made = study.made
    yield from (f"![{study.title}](../results/{study.stem}.png)", "")
    yield from (f"`{made['command']}`, {made['version']}, {made['machine']}, {made['date']}, {made['took']}.", "")


def _markdown(rows: Sequence[dict[str, str]]) -> Iterable[str]:
    if not rows:
        return
    headings = list(rows[0])
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "|".join("---" if i == 0 or h == "Note" else "---:" for i, h in enumerate(headings)) + "|"
    for row in rows:
        yield "| " + " | ".join(row.get(h, "").replace("|", "\\|") for h in headings) + " |"
    yield ""
