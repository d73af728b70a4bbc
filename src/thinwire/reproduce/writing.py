"""Writing: a study as its files: results JSON, page, picture; and docs/results.md from all of them."""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from thinwire.report.markup import replace_file
from thinwire.report.study import write_study_page
from thinwire.reproduce.study import Study, claim_rows

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
HEADLESS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def write_study(study: Study, out: Path) -> list[Path]:
    """Write all files of a study; returns those that could be written (the picture needs a Chromium)."""
    json_file, page, picture = (out / f"{study.stem}.{ending}" for ending in ("json", "html", "png"))
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
    return [json_file, page, *([picture] if photograph(page, picture) else [])]


def photograph(page: Path, picture: Path, *, width: int = 1200) -> bool:
    """A picture of a whole page by a browser without a window; False if there is none."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        return False
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:

        def run(height: int, *what: str) -> str:
            argv = [browser, *HEADLESS, f"--user-data-dir={profile}", f"--window-size={width},{height}", *what]
            done = subprocess.run([*argv, page.resolve().as_uri()], capture_output=True, text=True, timeout=120)
            return done.stdout

        height = re.search(r'data-height="(\d+)"', run(2000, "--dump-dom"))
        if height is None:
            return False
        run(int(height[1]), f"--screenshot={picture.resolve()}")
    return picture.exists()


def read_studies(folder: Path) -> list[Study]:
    """All studies of a folder of results, by name."""
    from thinwire.reproduce import STUDIES

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
