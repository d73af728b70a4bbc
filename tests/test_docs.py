"""The documents hold together: links, pages, commands, and a reference of every public name."""

import ast
import importlib
import inspect
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from thinwire.tools.cli import app

PROJECT = Path(__file__).parent.parent
DOCS = PROJECT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *PAGES]
PACKAGES = ["thinwire", "thinwire.codec", "thinwire.exchange", "thinwire.tune", "thinwire.server", "thinwire.errors"]
PACKAGES += ["thinwire.integrations"]
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")


def name_of(path: Path) -> str:
    return str(path.relative_to(PROJECT))


# Public names


def public_names() -> list[tuple[str, Any]]:
    """Return every public name with its object."""
    found = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        names = getattr(module, "__all__", None)
        if names is None:
            names = [name for name, value in vars(module).items() if inspect.isclass(value)]
        found += [(f"{package}.{name}", getattr(module, name)) for name in names]
    return found


def has_docstring(thing: Any) -> bool:
    """Return whether somebody wrote a docstring; the one that a dataclass makes of its signature does not count."""
    doc = inspect.getdoc(thing)
    return bool(doc) and not (inspect.isclass(thing) and (doc or "").startswith(f"{thing.__name__}("))


def members(thing: Any) -> Iterator[tuple[str, Any]]:
    """Return the public methods and properties that a class defines itself."""
    if inspect.isclass(thing):
        for name, value in vars(thing).items():
            if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                yield name, getattr(thing, name)


def test_public_names_have_docstrings() -> None:
    missing = [name for name, thing in public_names() if not has_docstring(thing)]
    for name, thing in public_names():
        missing += [f"{name}.{member}" for member, value in members(thing) if not inspect.getdoc(value)]
    assert not missing, f"these public names have no docstring: {', '.join(sorted(set(missing)))}"


def test_the_reference_has_every_public_name() -> None:
    documented = []
    for page in (DOCS / "api").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            package, _, last = name.rpartition(".")
            if package.startswith("thinwire.integrations."):  # these import their frameworks, which takes seconds
                assert re.search(rf"^(def|class) {last}\(", source_of(package), re.MULTILINE), name
                continue
            thing = getattr(importlib.import_module(package), last)
            documented += list(vars(thing).values()) if inspect.ismodule(thing) else [thing]
    missing = [name for name, thing in public_names() if not any(thing is known for known in documented)]
    assert not missing, f"docs/api does not show {', '.join(missing)}"


def source_of(module: str) -> str:
    return (PROJECT / "src" / f"{module.replace('.', '/')}.py").read_text()


def test_names_of_earlier_versions_say_what_to_use() -> None:
    import thinwire

    for old, new in {
        "Residual": "ErrorFeedback",
        "Drop": "NoFeedback",
        "MomentumResidual": "MomentumCorrection",
    }.items():
        with pytest.raises(AttributeError, match=f"thinwire.{old} is now thinwire.{new}"):
            getattr(thinwire, old)


# Pages and links


def anchors(page: Path) -> set[str]:
    """Return the anchors that mkdocs gives the headings of a page."""
    found = set()
    for heading in re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", plain))
    return found | set(re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    for target in LINK.findall(FENCE.sub("", document.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        page = (document.parent / place).resolve() if place else document
        assert page.is_file(), f"{name_of(document)} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(page), f"{name_of(document)} links to {target}, which has no such heading"


def test_the_navigation_has_every_page_and_no_other() -> None:
    text = (PROJECT / "mkdocs.yml").read_text()
    listed = re.findall(r": (\S+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == {str(page.relative_to(DOCS)) for page in PAGES}


def test_source_files_name_existing_pages() -> None:
    roots = [PROJECT / name for name in ("src", "papers", "tests", "native", "examples")]
    files = [p for root in roots for p in root.rglob("*") if p.suffix in {".py", ".html", ".hpp", ".cpp"}]
    for path in files:
        for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text()):
            assert (PROJECT / page).is_file(), f"{name_of(path)} names {page}, which does not exist"


def test_the_readme_fits_two_screens_and_a_package_index() -> None:
    text = (PROJECT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    relative = [target for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", text) if "://" not in target]
    assert not relative, f"links of the README do not work on a package index: {relative}"
    assert "pip install thinwire" not in text and "pip install 'thinwire" not in text
    for name in re.findall(r"`((?:docs|results|examples)/[^`\s]*)`", text):
        assert (PROJECT / name).exists(), f"the README names {name}, which does not exist"


# Examples and commands


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_python_examples_are_valid(document: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
        ast.parse(block)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_scripts_and_manifests_are_valid(document: Path) -> None:
    for block in re.findall(r"^```bash\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
        done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
    for block in re.findall(r"^```yaml\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
        assert all(part["kind"] for part in yaml.safe_load_all(block))


def commands_in(text: str) -> Iterator[str]:
    """Return every `thinwire ...` command of a document, in blocks of code and between backticks."""
    joined = re.sub(r"\\\n\s*", " ", text)
    indented = re.findall(r"^ {4}(.*)$", FENCE.sub("", joined), re.MULTILINE)
    fenced = [line for fence in FENCE.finditer(joined) for line in fence[0].splitlines()]
    for line in indented + fenced:
        if found := re.search(r"^(?:[^#]*\s)?(thinwire [a-z-].*)", line):
            yield found[1]
    yield from re.findall(r"`(thinwire [^`\n]+)`", FENCE.sub("", text))


def problem_of(line: str) -> str | None:
    """Return what is wrong with a command: a subcommand or an option that does not exist."""
    command: Any = typer.main.get_command(app)
    words = shlex.split(line.split(" -- ")[0].split(" | ")[0].split(" > ")[0], comments=True)[1:]
    path = ["thinwire"]
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]
        path.append(words.pop(0))
    if getattr(command, "commands", None) and words and re.fullmatch(r"[a-z]+", words[0]):
        return f"{' '.join(path)} has no command {words[0]}"
    if command.context_settings.get("ignore_unknown_options"):
        return None
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }
    unknown = [word for word in words if re.match(r"--\w|-\w$", word) and word.split("=")[0] not in known]
    return f"{' '.join(path)} has no option {', '.join(unknown)}" if unknown else None


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_exist(document: Path) -> None:
    if document.name in ("results.md", "lab-notebook.md"):  # they quote commands as they were at the time
        return
    problems = [f"{line}: {problem}" for line in commands_in(document.read_text()) if (problem := problem_of(line))]
    assert not problems, f"{name_of(document)}:\n" + "\n".join(problems)


def test_the_reference_of_the_command_line_is_current() -> None:
    document = runpy.run_path(str(DOCS / "reference.py"))["document"]
    assert (DOCS / "cli.md").read_text() == document(), "docs/cli.md is out of date: run python docs/reference.py"
