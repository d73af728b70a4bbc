"""Files of single ranks: complete or not at all, checked, and for other numbers of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.cluster import Cluster
from tests.link import jobs
from thinwire.integrations import load_ranks, save_ranks


def trained(rank: int, folder: str) -> dict[str, Any]:
    """Save after five steps, load into a new link, and return what was there before and after."""
    model = jobs.make()
    link = tw.attach(model, 0.05)
    jobs.train(model, rank, range(5), torch.optim.SGD(model.parameters(), lr=0.1))
    save_ranks(link, folder)
    torch.distributed.barrier()
    again = tw.attach(jobs.make(), 0.05)
    assert load_ranks(again, folder) and again.step == 5
    before, after = (each.state_dict()["codec"]["residuals"] for each in (link, again))
    assert all(torch.equal(before[name]["residual"], after[name]["residual"]) for name in before)
    return {name: t.clone() for name, slots in link.state_dict(gather=True)["codec"]["residuals"].items()
            for t in slots.values()}  # fmt: skip


def more(rank: int, folder: str) -> dict[str, Any]:
    """Load the files of two ranks on three."""
    link = tw.attach(jobs.make(), 0.05)
    assert load_ranks(link, folder)
    state = link.state_dict(gather=True)["codec"]["residuals"]
    return {name: slots["residual"] for name, slots in state.items()}


def attempts(rank: int, folder: str) -> list[str]:
    """What loading says: where nothing was saved, to a damaged file, to a missing one, and to one of another step."""
    link, said = tw.attach(jobs.make(), 0.05), []
    own = Path(folder) / f"thinwire-{rank}-of-2.pt"
    assert not load_ranks(link, f"{folder}/nothing")

    def attempt() -> None:
        torch.distributed.barrier()
        with pytest.raises(ValueError) as caught:
            load_ranks(link, folder)
        said.append(str(caught.value))
        torch.distributed.barrier()

    good = own.read_bytes()
    if rank == 1:
        own.write_bytes(good[:1000] + b"x" + good[1001:])
    attempt()
    if rank == 1:
        own.unlink()
    attempt()
    if rank == 1:
        save_ranks(link, folder)  # of step 0
    attempt()
    with pytest.raises(ValueError) as caught:
        save_ranks(link, "s3://bucket/run")
    said.append(str(caught.value))
    if rank == 1:
        own.write_bytes(good)
    return said


def test_rank_files(cluster: Cluster, tmp_path: Path) -> None:
    saved = cluster.run(trained, 2, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["thinwire-0-of-2.pt", "thinwire-1-of-2.pt"]
    for loaded in cluster.run(more, 3, str(tmp_path)):
        for name, tensor in loaded.items():
            torch.testing.assert_close(tensor, saved[0][name], rtol=1e-5, atol=1e-7)
    for damaged, missing, step, remote in cluster.run(attempts, 2, str(tmp_path)):
        assert "thinwire-1-of-2.pt does not match its checksum" in damaged
        assert "no file of rank 1 of 2" in missing
        assert "different steps" in step
        assert "no path of a file system" in remote
