"""Rank files: each rank's link in a file of its own, beside what a framework saves for all of them.

Frameworks save one model and rank 0's optimizer. Each rank has a residual of its own, and in the update domain an
optimizer state of its own, which is part of the link's state. A file appears completely or not at all, and ends with a
checksum. It is read with `weights_only=True`.
"""

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import DamagedFileError
from thinwire.exchange.channel import gather_json
from thinwire.files import open_checked, replace_file
from thinwire.link.link import Link

_log = logging.getLogger("thinwire")
_NAME = re.compile(r"thinwire-(?P<rank>\d+)-of-(?P<world>\d+)\.pt")


def _place() -> tuple[int, int]:
    """This process's rank, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _file(folder: Path, rank: int, world: int) -> Path:
    return folder / f"thinwire-{rank}-of-{world}.pt"


def local_folder(path: Any) -> Path:
    """A path of this machine's file system; ValueError for addresses such as s3://."""
    if "://" in str(path):
        raise ValueError(f"every rank writes its link beside the checkpoint, but {path} is no path of a file system")
    return Path(path)


def save_ranks(link: Link, folder: str | os.PathLike[str]) -> None:
    """Save each rank's link in a folder, which may be the one of a checkpoint. Call it on all ranks.

    The folder may be a different one on each machine, if ranks stay where they are.
    """
    rank, world = _place()
    path = local_folder(folder)
    path.mkdir(parents=True, exist_ok=True)
    save_state(_file(path, rank, world), link.state_dict())


def load_ranks(link: Link, folder: str | os.PathLike[str]) -> bool:
    """Load what `save_ranks` has saved, after the model and the optimizer were loaded. Call it on all ranks.

    With another number of ranks every rank loads the mean of all files, which preserves the mean residual.

    Returns:
        Whether there were files. Without any, training goes on with an empty residual, and the log says so.

    Raises:
        ValueError: some ranks' files are missing, damaged or of another step, on any rank.
    """
    path = local_folder(folder)
    rank, world = _place()
    states, error = _read(path, rank, world)
    mine = {"error": error, "step": states[0]["step"] if states else None}
    rows = link.collective(lambda channel: gather_json(channel, mine))
    failed = next((row["error"] for row in rows if row["error"]), "")
    found = {row["step"] for row in rows}
    if not failed and len(found) > 1:
        failed = f"{path} holds links of different steps, or not for all ranks: it is not one checkpoint"
    if link.any_shard(bool(failed)):
        raise ValueError(failed or f"{path} lacks what other ranks need to resume")
    if not states:
        if rank == 0:
            _log.warning("%s has no files of thinwire: training goes on with an empty residual", path)
        return False
    link.load_state_dict(states[0] if len(states) == 1 else states)
    return True


def _read(folder: Path, rank: int, world: int) -> tuple[list[dict[str, Any]], str]:
    """This rank's state, or with another number of ranks all states; and what is wrong."""
    names = os.listdir(folder) if folder.is_dir() else []
    present = {(int(m["rank"]), int(m["world"])) for name in names if (m := _NAME.fullmatch(name))}
    saved = sorted({count for _, count in present})
    if not saved:
        return [], ""
    count = world if world in saved else saved[-1]
    wanted = [rank] if count == world else list(range(count))
    if missing := [r for r in wanted if (r, count) not in present]:
        return [], f"{folder} has no file of rank {', '.join(map(str, missing))} of {count}, which saved there"
    try:
        return [load_state(_file(folder, r, count)) for r in wanted], ""
    except (OSError, RuntimeError, DamagedFileError) as error:
        return [], f"{folder}: {' '.join(str(error).split())}"


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state to a file, which ends with a checksum."""
    replace_file(path, lambda file: torch.save(state, file), checksum=True)


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote; DamagedFileError if it has changed since."""
    with open_checked(path) as (file, _):
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state


class AttachedLinks:
    """The links whose models one framework object saves together: usually one, in a GAN two.

    The first link's files are in the folder of a checkpoint, those of the others in its folders 1, 2, and so on.
    """

    def __init__(self) -> None:
        self._links: list[Link] = []

    def add(self, link: Link) -> None:
        """Add a link, which takes the place of the first one that was detached."""
        gone = next((i for i, other in enumerate(self._links) if not other.attached), len(self._links))
        self._links[gone : gone + 1] = [link]

    def save(self, folder: Path) -> None:
        """Save all links, also those that were detached since."""
        for index, link in enumerate(self._links):
            save_ranks(link, folder / str(index) if index else folder)

    def load(self, folder: Path) -> None:
        """Load those links that are attached."""
        for index, link in enumerate(self._links):
            if link.attached:
                load_ranks(link, folder / str(index) if index else folder)


def remove_ranks(folder: str | os.PathLike[str]) -> None:
    """Remove what all ranks have saved in a folder, and the folder if nothing else is in it; any rank may do so."""
    path = local_folder(folder)
    for file in path.glob("thinwire-*-of-*.pt"):
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other files are in it, or another rank has removed it
        path.rmdir()
