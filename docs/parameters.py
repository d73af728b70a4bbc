"""A griffe extension: show the lines `name: meaning` of a docstring as a list of parameters."""

import re
from typing import Any

import griffe

LINE = re.compile(r"(\w+): +(\S.*)")


def as_list(text: str, names: set[str]) -> str:
    """Turn runs of `name: meaning` lines, with their indented continuations, into Markdown lists."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        found = LINE.match(line)
        if found and found[1] in names:
            if not inside and lines and lines[-1]:
                lines.append("")
            lines.append(f"- `{found[1]}`: {found[2]}")
            inside = True
        elif inside and line.startswith(" ") and line.strip():
            lines.append(f"    {line.strip()}")
        else:
            if inside and line.strip():
                lines.append("")
            inside = False
            lines.append(line)
    return "\n".join(lines)


class ParameterLists(griffe.Extension):
    """Rewrite the docstrings of functions and classes whose lines name their parameters."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring is not None:
            func.docstring.value = as_list(func.docstring.value, {p.name for p in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring is not None:
            names = set(cls.members)
            if isinstance(init := cls.members.get("__init__"), griffe.Function):
                names |= {p.name for p in init.parameters}
            cls.docstring.value = as_list(cls.docstring.value, names)
