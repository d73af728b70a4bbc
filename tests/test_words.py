"""The project speaks the words of its field: these private words must not come back.

docs/glossary.md defines the words to use. CHANGELOG.md is exempt, because its table of renames lists old names.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from thinwire.tools.cli import app

PROJECT = Path(__file__).parent.parent
INSTEAD = {
    "pilot": "autotuner",
    "courier": "client",
    "reception": "membership or admission",
    "attendance": "membership",
    "examiner": "diagnostics",
    "desk": "dispatch",
    "standing": "session state",
    "weather": "network conditions",
    "held back": "kept in the residual",
}
SUFFIXES = {".py", ".pyi", ".md", ".html", ".js", ".css", ".toml"}
# One word of a text, of a snake_case name or of a CamelCase name.
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
HELD_BACK = re.compile(r"held[\s_-]+back", re.IGNORECASE)


def words_of(text: str) -> Iterator[tuple[int, str]]:
    """Return each forbidden word of a text with its position."""
    for found in WORD.finditer(text):
        word = found[0].lower()
        if word in INSTEAD or word.removesuffix("s") in INSTEAD:
            yield found.start(), word
    for found in HELD_BACK.finditer(text):
        yield found.start(), "held back"


def sources() -> list[Path]:
    roots = [PROJECT / name for name in ("src", "papers", "docs")]
    found = [path for root in roots for path in root.rglob("*") if path.suffix in SUFFIXES]
    return [PROJECT / "README.md", PROJECT / "mkdocs.yml", *sorted(found)]


def test_sources_and_documents_use_the_words_of_the_field() -> None:
    hits = []
    for path in sources():
        name, text = str(path.relative_to(PROJECT)), path.read_text(encoding="utf-8")
        hits += [f"{name}: the file's name has the word {word!r}" for _, word in words_of(name)]
        for at, word in words_of(text):
            line = text.count("\n", 0, at) + 1
            hits.append(f"{name}:{line}: {word!r}; write {INSTEAD.get(word, INSTEAD.get(word.removesuffix('s')))}")
    assert not hits, f"{len(hits)} forbidden words:\n" + "\n".join(hits)


def helps(command: Any, path: str) -> Iterator[tuple[str, str]]:
    """Return every text that the help of a command shows, with its place."""
    yield path, " ".join([command.name or "", command.help or "", command.epilog or ""])
    for parameter in command.params:
        yield f"{path} {parameter.opts[0]}", " ".join([*parameter.opts, str(getattr(parameter, "help", "") or "")])
    for name, inner in getattr(command, "commands", {}).items():
        yield from helps(inner, f"{path} {name}")


def test_the_command_line_uses_the_words_of_the_field() -> None:
    found = [
        (place, word) for place, text in helps(typer.main.get_command(app), "thinwire") for _, word in words_of(text)
    ]
    assert not found


def test_the_rule_itself() -> None:
    assert [word for _, word in words_of("class DeskPost: pilot_width = 1  # What was held\n  back")] == [
        "desk",
        "pilot",
        "held back",
    ]
    assert not list(words_of("An understanding of the outstanding desktop, held together"))
