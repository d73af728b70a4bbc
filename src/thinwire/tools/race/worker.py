"""Worker: one rank of a training or a race; runs every (method, seed) in turn and tells its parent what happens.

Started as `python -m thinwire.tools.race.worker JSON` with the variables of torch.distributed set. Events of all ranks
go to stdout, one line each, with the number of the run they belong to.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import ThinwireError
from thinwire.tools.events import Event, Step, from_line, to_line
from thinwire.tools.race.training import Plan, Training
from thinwire.tools.recipes import get_recipe

MARK = "EVENT"


@dataclass(frozen=True)
class Work:
    """What all workers do: runs are (method, seed)."""

    recipe: str
    data: Path | None
    runs: tuple[tuple[str, int], ...]
    plan: Plan
    infinite_steps: int = 8  # the infinite network is for timing only

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    def command(self) -> list[str]:
        """What runs this work as one rank."""
        return [sys.executable, "-m", "thinwire.tools.race.worker", self.to_json()]

    @classmethod
    def from_json(cls, text: str) -> "Work":
        raw: dict[str, Any] = json.loads(text)
        plan = raw["plan"]
        plan["checkpoint"] = Path(plan["checkpoint"]) if plan["checkpoint"] else None
        return cls(
            raw["recipe"],
            Path(raw["data"]) if raw["data"] else None,
            tuple((method, seed) for method, seed in raw["runs"]),
            Plan(**plan),
            raw["infinite_steps"],
        )


def with_infinite(runs: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The runs with a few steps on an infinite network before each: the machine's moods must not favour a method."""
    return [each for number, run in enumerate(runs) for each in (("infinite", number), run)]


def run_all(work: Work, emit: Any) -> None:
    """Every run in turn; emit(run, event) for events, and (run, reason) when one has ended."""
    recipe = get_recipe(work.recipe)
    splits = recipe.load(work.data)
    for number, (method, seed) in enumerate(work.runs):
        plan = work.plan
        if method == "infinite":
            steps = min(work.infinite_steps, plan.max_steps)
            plan = replace(plan, max_steps=steps, target=None, evaluate_every=plan.max_steps + 1, checkpoint=None)
        training = Training(recipe, splits, plan, method, seed)

        def tell(event: Event, number: int = number) -> None:
            emit(number, event)

        reason = training.run(tell)
        training.close()
        dist.barrier()
        emit(number, reason)


def printing(rank: int) -> Any:
    """Rank 0 tells everything; the others only their steps, which are timed everywhere."""

    def emit(run: int, event: Event | str) -> None:
        if isinstance(event, str):
            if rank == 0:
                print(f"{MARK} {run} end {event}", flush=True)
        elif rank == 0 or isinstance(event, Step):
            print(f"{MARK} {run} {to_line(event)}", flush=True)

    return emit


def parse(line: str) -> tuple[int, Event | str] | None:
    """What a worker's line says, or None if it is something else."""
    mark, _, rest = line.partition(" ")
    if mark != MARK:
        return None
    run, _, what = rest.partition(" ")
    return int(run), what[4:] if what.startswith("end ") else from_line(what)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        run_all(Work.from_json(sys.argv[1]), printing(dist.get_rank()))
    except (ThinwireError, ValueError) as error:
        print(f"FAILED {error}", flush=True)
        sys.exit(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
