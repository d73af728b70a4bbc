"""The command `thinwire reproduce`: runs a study from a clone's folder `papers` as its own process."""

import os
import subprocess
import sys
from pathlib import Path

import typer

import thinwire


def papers_folder() -> Path:
    """The clone that holds the studies: the one thinwire is installed from, or the current folder."""
    installed = Path(thinwire.__file__).resolve().parents[2]
    for clone in (installed, Path.cwd()):
        if (clone / "papers" / "__main__.py").is_file():
            return clone
    raise ValueError(
        "thinwire reproduce needs the folder 'papers' of a clone, which the installed package does not contain: "
        "run it in a clone of the project"
    )


def reproduce_command(context: typer.Context) -> int:
    """Run a paper's experiments again and put its figures next to ours."""
    clone = papers_folder()
    path = os.pathsep.join(filter(None, (str(clone), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "papers", *context.args]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue  # the study has the same terminal: it ends by itself, and keeps what is finished
