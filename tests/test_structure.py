"""The shape of the code: class names exist once, files are not too small, and imports load no more than is needed."""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.test_imports import PROJECT, ROOT, dotted, modules, modules_imported


def test_a_class_name_exists_once() -> None:
    places = defaultdict(list)
    for path in modules():
        if "integrations" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(PROJECT)}:{node.lineno}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice


def library() -> list[Path]:
    """The files of the library without the rooms that are extras of their own."""
    apart = ("tools", "server", "transport", "integrations")
    return [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in apart]


def test_the_library_has_few_files_and_no_small_one_that_only_one_other_uses() -> None:
    files = library()
    assert len(files) <= 48
    importers = defaultdict(set)
    for path in [*modules(), ROOT / "__init__.py"]:
        for name in modules_imported(path):
            importers[name].add(path)
            importers[name.rpartition(".")[0]].add(path)
    for path in files:
        name = dotted(path)
        lines = len(path.read_text().splitlines())
        if path.name != "__init__.py" and len(importers[name] - {path}) < 2:
            assert lines >= 80, f"{name} has {lines} lines and a single importer: merge it"


LOADED = """
import json, sys
{before}
known = set(sys.modules)
{statement}
print(json.dumps(sorted({{name.split(".")[0] for name in set(sys.modules) - known}})))
"""


def loaded(statement: str, before: str = "") -> set[str]:
    """The packages outside the standard library that a statement loads in a new interpreter."""
    script = LOADED.format(statement=statement, before=before)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return set(json.loads(done.stdout)) - set(sys.stdlib_module_names)


def test_importing_thinwire_loads_the_standard_library_alone() -> None:
    assert loaded("import thinwire") == {"thinwire"}


def test_attach_loads_torch_and_numpy_alone() -> None:
    before = "import numpy, torch, torch.distributed.algorithms.join, torch.nn.parallel, torch.optim"
    assert loaded("import thinwire; thinwire.attach; thinwire.Link", before) <= {"thinwire", "torch", "numpy"}


def test_the_command_answers_without_torch() -> None:
    assert "torch" not in loaded("import thinwire.tools.cli")


def test_races_and_the_server_load_without_the_extra_server() -> None:
    extra = ("zmq", "cryptography", "prometheus_client", "mpi4py")
    hidden = f"import sys; sys.modules.update(dict.fromkeys({extra}))"
    used = "import thinwire, thinwire.tools.race.race; thinwire.Server; thinwire.Worker"
    assert not loaded(used, hidden).intersection(extra)


def test_old_names_say_what_to_use_now() -> None:
    import thinwire

    for old, new in {"Residual": "thinwire.ErrorFeedback", "Gather": "thinwire.exchange.Gather"}.items():
        try:
            getattr(thinwire, old)
        except AttributeError as error:
            assert str(error) == f"thinwire.{old} is now {new}"
        else:
            raise AssertionError(old)
    for name in thinwire.__all__:
        assert getattr(thinwire, name) is not None
    assert 20 <= len(thinwire.__all__) <= 30


def test_without_the_extra_tools_the_command_says_what_to_install() -> None:
    script = "import sys; sys.modules['typer'] = None; from thinwire.tools import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "[tools]" in done.stderr
