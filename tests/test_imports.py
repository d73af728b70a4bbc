"""Imports point one way only: from the command line down to the kernels, as in docs/architecture.md."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "thinwire"

# Each floor may import the floors below it; rooms of one floor may not import each other, except as said next.
FLOORS = [
    {"cli"},
    {"bench", "reproduce"},
    {"race"},
    {"report"},
    {"ddp", "server"},
    {"exchange", "transport", "tune"},
    {"codec"},
    {"_native"},
]
# Everybody may import the leaves; these rooms import leaves and nothing else.
LEAVES = {"errors", "events", "observe", "records", "tensorboard"}
ALONE = {"lab", "recipes"}


def floor_of(room: str) -> int:
    return next(i for i, floor in enumerate(FLOORS) if room in floor)


def allowed(room: str, imported: str) -> bool:
    """Whether a module of one room may import from another."""
    if room == imported or imported in LEAVES:
        return True
    if room in LEAVES or room in ALONE or room == "_native":
        return False
    if imported in ALONE:
        return floor_of(room) <= 3  # the command line and what races, measures and reports
    return floor_of(imported) > floor_of(room)


def rooms_imported(path: Path) -> set[str]:
    """Rooms of thinwire that a module imports anywhere, inside functions too."""
    package = ("thinwire", *path.relative_to(ROOT).parts[:-1])
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "thinwire" else {module}
    parts = [name.split(".") for name in names]
    found = {p[1] for p in parts if p[0] == "thinwire" and len(p) > 1}
    return {name for name in found if (ROOT / name).exists() or (ROOT / f"{name}.py").exists() or name == "_native"}


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    wrong = sorted(name for name in rooms_imported(path) if not allowed(room, name))
    assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(wrong)}, which is not below {room}"


def test_every_room_has_its_place() -> None:
    rooms = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in modules()}
    assert rooms <= set().union(*FLOORS) | LEAVES | ALONE


def test_the_rule_itself() -> None:
    assert allowed("ddp", "codec") and allowed("bench", "lab") and allowed("lab", "errors") and allowed("race", "ddp")
    assert not allowed("codec", "exchange") and not allowed("lab", "codec") and not allowed("ddp", "server")
    assert not allowed("errors", "codec") and not allowed("recipes", "ddp") and not allowed("exchange", "recipes")
