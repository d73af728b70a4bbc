"""mkdocs hooks: publish the pictures of `results/`, to which docs/results.md links from outside of the docs folder."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parent.parent / "results"


def on_files(files: Files, config: Any) -> Files:
    """Add every picture of a reproduced paper to the site."""
    for path in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to pictures in `results/` point into the site."""
    return markdown.replace("](../results/", "](results/")
