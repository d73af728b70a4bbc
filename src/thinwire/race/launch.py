"""Launch: workers on emulated hosts, or as local processes where no rate is asked for.

Both ways the same environment, the same lines back, and nothing left behind.
"""

import os
import socket
import subprocess
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from thinwire.errors import ThinwireError
from thinwire.lab import Lab
from thinwire.lab.check import check, ready
from thinwire.lab.launching import PIPED, Launch


class WorkFailed(ThinwireError):
    """A worker failed; the message says which and why."""


def require_lab_for(rate: str) -> None:
    """One sentence, with the remedy, where the machine does not allow a lab."""
    abilities = check()
    if not ready(abilities):
        why = "; ".join(f"{a.name}: {a.detail}" for a in abilities if a.required and not a.works)
        raise ThinwireError(
            f"this machine cannot emulate hosts at {rate} ({why}): run as root, or use --rate none for plain loopback"
        )


def launch(
    argv: list[str], workers: int, rate: str | None, output: Callable[[int, str], None], *, loss: str | None = None
) -> None:
    """Run a command to its end as so many workers, each one's lines going to `output`; loss is the lab's."""
    told: list[str] = []

    def read(host: int, line: str) -> None:
        if line.startswith("FAILED "):
            told.append(line[7:])
        output(host, line)

    if rate is not None:
        require_lab_for(rate)
        with Lab(workers, rate=rate, loss=loss) as lab:
            result = lab.run(argv, output=read)
        spoke = list(result.hosts[result.failed].lines) if result.failed is not None else []
        failure, last = result.failure, _last_words(spoke)
    else:
        failure, last = _local(argv, workers, read)
    if failure is not None:
        raise WorkFailed(told[0] if told else f"{failure}{last}")


def _local(argv: list[str], workers: int, read: Callable[[int, str], None]) -> tuple[str | None, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=200))

    def keep(host: int, line: str) -> None:
        lines[host].append(line)
        read(host, line)

    run = Launch(timeout=None, output=keep, grace=5.0)
    try:
        for rank in range(workers):
            variables = {
                "RANK": rank,
                "WORLD_SIZE": workers,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": workers,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            }
            env = {**os.environ, **{key: str(value) for key, value in variables.items()}}
            run.add(rank, subprocess.Popen(argv, env=env, start_new_session=True, **PIPED))  # type: ignore[call-overload]
        run.wait()
    finally:
        run.stop()
    failure = run.failure()
    spoke = lines[run.failed] if run.failed is not None else ()
    return (failure.replace("host h", "worker ") if failure else None), _last_words(spoke)


def _last_words(lines: Sequence[str]) -> str:
    """The last line that is not an event, as the end of a sentence: what the worker that failed said, if anything."""
    last = next((line for line in reversed(lines) if line.strip() and not line.startswith("EVENT ")), None)
    return f": {last}" if last else ""
