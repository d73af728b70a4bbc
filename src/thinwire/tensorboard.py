"""Mirror an event log to TensorBoard: the same figures as scalars, for those who watch runs there.

TensorBoard is an extra; without it one sentence says how to get it.
"""

from collections.abc import Callable
from pathlib import Path

from thinwire.errors import LogError
from thinwire.events import PHASES, Diagnosis, Eval, Event, Step


def mirrors(folder: Path | None) -> list[Callable[[Event], None]]:
    """What a log is given to mirror itself to a folder; nothing if there is none."""
    return [TensorBoardMirror(folder)] if folder is not None else []


class TensorBoardMirror:
    """Give it to an EventLog in `mirrors`, which closes it at the end."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise LogError(
                "--tensorboard needs tensorboard: install it with pip install 'thinwire[tensorboard]'."
            ) from error
        self._writer = SummaryWriter(log_dir=str(folder))

    def __call__(self, event: Event) -> None:
        """Write the scalars of one event."""
        scalars: dict[str, float] = {}
        step = 0
        if isinstance(event, Step):
            step = event.step
            scalars = {f"seconds/{name}": getattr(event, name) for name in PHASES}
            scalars |= {f"bytes/{way}": float(getattr(event, f"bytes_{way}")) for way in ("sent", "received")}
            scalars |= {"loss": event.loss, "density": event.density, "residual_norm": event.residual_norm}
        elif isinstance(event, Eval):
            step, scalars = event.step, {f"{event.metric}/{event.split}": event.value}
        elif isinstance(event, Diagnosis):
            step = event.step
            scalars = {f"diagnosis/{name}": float(value) for name, value in vars(event).items() if name != "step"}
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is still held back."""
        self._writer.close()
