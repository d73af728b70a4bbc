"""Imports point one way only: from the papers down to the kernels, as in docs/architecture.md."""

import ast
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent
ROOT = PROJECT / "src" / "thinwire"

# Each floor may import the floors below it; rooms of one floor may not import each other, except as said next.
FLOORS = [
    {"papers"},
    {"tools"},
    {"integrations"},
    {"hooks", "server"},
    {"link"},
    {"exchange", "transport", "tune"},
    {"codec"},
    {"_native"},
]
# Within the tools likewise.
TOOL_FLOORS = [
    {"cli"},
    {"bench", "reproduce"},
    {"simulate"},
    {"race"},
    {"report"},
    {"progress"},
    {"observe", "options", "keys"},
    {"events"},
]
LEAVES = {"_lazy", "errors", "files", "limits"}  # everybody may import these
ALONE = {"lab", "recipes"}  # rooms of the tools that import nothing but the leaves


def floor_of(room: str, floors: list[set[str]]) -> int:
    return next(i for i, floor in enumerate(floors) if room in floor)


def allowed(room: str, imported: str, floors: list[set[str]] = FLOORS) -> bool:
    """Whether a module of one room may import from another."""
    if room == imported or imported in LEAVES:
        return True
    if room in LEAVES or room in ALONE or room == "_native":
        return False
    if imported in ALONE:
        return True
    return floor_of(imported, floors) > floor_of(room, floors)


def modules_imported(path: Path) -> set[str]:
    """Modules of thinwire and papers that a module imports anywhere, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in ("thinwire", "papers")}


def room_of(name: str) -> str | None:
    """The room of the library that a module belongs to; None for the package itself, whose names load on first use."""
    first, *rest = name.split(".")
    if first == "papers":
        return "papers"
    known = rest and ((ROOT / rest[0]).exists() or (ROOT / f"{rest[0]}.py").exists() or rest[0] == "_native")
    return rest[0] if known else None


def tool_of(name: str) -> str | None:
    """The room of the tools that a module belongs to."""
    parts = name.split(".")
    return parts[2] if parts[:2] == ["thinwire", "tools"] and len(parts) > 2 else None


def modules() -> list[Path]:
    found = [*ROOT.rglob("*.py"), *(PROJECT / "papers").rglob("*.py")]
    return sorted(path for path in found if path not in (ROOT / "__init__.py", ROOT / "tools" / "__init__.py"))


def dotted(path: Path) -> str:
    base = ROOT.parent if ROOT in path.parents else PROJECT
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_imports_point_down(path: Path) -> None:
    name = dotted(path)
    room, tool = room_of(name), tool_of(name)
    assert room is not None
    for imported in sorted(modules_imported(path)):
        below, tool_below = room_of(imported), tool_of(imported)
        assert below is None or allowed(room, below), f"{name} imports {imported}, which is not below {room}"
        if tool is not None and tool_below is not None:
            assert allowed(tool, tool_below, TOOL_FLOORS), f"{name} imports {imported}, which is not below {tool}"
        if tool in ALONE:
            assert below in (None, "tools", *LEAVES), f"{name} imports {imported}, but {tool} stands alone"


def test_every_room_has_its_place() -> None:
    rooms = {room_of(dotted(path)) for path in modules()}
    assert rooms <= set().union(*FLOORS) | LEAVES
    tools = {tool_of(dotted(path)) for path in modules()} - {None}
    assert tools <= set().union(*TOOL_FLOORS) | ALONE


def test_the_rule_itself() -> None:
    assert allowed("link", "codec") and allowed("tools", "hooks") and allowed("papers", "tools")
    assert allowed("bench", "lab", TOOL_FLOORS) and allowed("lab", "errors")
    assert not allowed("codec", "exchange") and not allowed("link", "hooks") and not allowed("hooks", "server")
    assert not allowed("lab", "report", TOOL_FLOORS) and not allowed("errors", "codec")
