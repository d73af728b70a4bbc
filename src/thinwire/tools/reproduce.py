"""The command `thinwire reproduce`: run a study of the folder `papers`, in a clone, as a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import typer

import thinwire


def papers_folder() -> Path:
    """Return the clone that holds the studies: the one that thinwire is installed from, or the current folder."""
    installed = Path(thinwire.__file__).resolve().parents[2]
    for clone in (installed, Path.cwd()):
        if (clone / "papers" / "__main__.py").is_file():
            return clone
    raise ValueError(
        "thinwire reproduce needs the folder 'papers' of a clone, which the installed package does not contain: "
        "run it in a clone of the project"
    )


def reproduce_command(context: typer.Context) -> int:
    """Repeat a paper's experiments and compare the figures (runs python -m papers)."""
    clone = papers_folder()
    path = os.pathsep.join(filter(None, (str(clone), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "papers", *context.args]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue  # the study gets the same signal: it keeps the finished parts and ends by itself
