"""One process of a served training: rank 0 is the server, the others are workers.

Started as `python -m thinwire.tools.race.served_process JSON` with the variables of torch.distributed set, in the lab,
or as local processes; or called by every rank under mpirun.
"""

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import ThinwireError
from thinwire.tools.race.served import Emit, Serving, Terms, work
from thinwire.tools.race.training import Plan
from thinwire.tools.race.worker import printing
from thinwire.tools.recipes import get_recipe
from thinwire.transport.addresses import connect, listen


@dataclass(frozen=True)
class Served:
    """What all processes of a served training are told."""

    recipe: str
    data: Path | None
    terms: Terms

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "Served":
        raw: dict[str, Any] = json.loads(text)
        plan = raw["terms"].pop("plan")
        plan["checkpoint"] = Path(plan["checkpoint"]) if plan["checkpoint"] else None
        return cls(raw["recipe"], Path(raw["data"]) if raw["data"] else None, Terms(Plan(**plan), **raw["terms"]))


def run_server(served: Served, address: str, emit: Emit) -> str:
    """Rank 0. Without keys: the lab's networks are its own, and local processes use loopback."""
    serving = Serving(get_recipe(served.recipe), served.data, served.terms, emit)
    return serving.run(listen(address, insecure=True, mtu=served.terms.mtu))


def run_worker(served: Served, address: str, rank: int) -> None:
    """Any other rank."""
    recipe = get_recipe(served.recipe)
    work(recipe, served.data, connect(address), slot=rank - 1, name=f"h{rank}", overlap=served.terms.overlap)


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    served, rank = Served.from_json(sys.argv[1]), int(os.environ["RANK"])
    address = f"{served.terms.transport}://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        if rank == 0:
            emit = printing(0)
            emit(0, run_server(served, address, lambda event: emit(0, event)))
        else:
            run_worker(served, address, rank)
    except (ThinwireError, ValueError) as error:
        print(f"FAILED {error}", flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
