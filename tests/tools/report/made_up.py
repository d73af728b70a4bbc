"""Makes logs with round numbers, so that a summary can be checked by hand."""

from typing import Any

from thinwire.tools.events import Eval, Run, RunLog, Step


def made_up(method: str, *, hit: int | None, ms: float, sent: int, **of_run: Any) -> RunLog:
    """A log with round numbers: 10 steps, the target reached at step `hit`; `of_run` are fields of its run record."""
    facts = {"recipe": "digits", "workers": 2, "batch": 8, "target": 0.9, **of_run}
    log = RunLog(Run(command="c", method=method, parameters=9, **facts))
    for number in range(1, 11):
        slow = 10.0 if number == 1 else 1.0  # the first step warms up
        for rank in (0, 1):
            seconds = slow * ms / 1000 * (1 + rank)
            wall = number * 2 * ms / 1000
            log.add(
                Step(
                    step=number, epoch=number / 5, wall=wall, compute=seconds, compress=0, exchange=0, apply=0,
                    bytes_sent=sent, bytes_received=sent, loss=1.0, rank=rank,
                )
            )  # fmt: skip
        for split in ("train", "test"):
            value = 0.95 if hit is not None and number >= hit else 0.5
            log.add(Eval(step=number, epoch=1, wall=wall, split=split, metric="accuracy", value=value))
    return log
