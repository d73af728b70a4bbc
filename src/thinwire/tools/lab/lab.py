"""The Lab: emulated hosts on one Linux machine, each with its own address and shaped link, joined by a switch.

A lab is a context manager. While it runs, links can be cut, slowed down, made longer and made lossy, and hosts can be
killed.
"""

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.errors import LabError
from thinwire.tools.lab import shaping
from thinwire.tools.lab.delay import DelayFigures, DelayLine, check_carried
from thinwire.tools.lab.launching import PIPED, HostTraffic, Launch, RunResult, parse_counters
from thinwire.tools.lab.namespaces import SWITCH, Namespaces
from thinwire.tools.lab.registry import RunFile
from thinwire.tools.lab.units import Rates, parse_delay, parse_loss, parse_rates

if TYPE_CHECKING:
    from thinwire.tools.lab.network import LabNetwork

MOST_HOSTS = 250
_NOT_RUNNING = "the lab is not running: use it inside its 'with' block"


def network_in(spaces: Namespaces, hosts: int) -> "LabNetwork":
    """Return what configures the network of so many hosts in a lab's namespaces."""
    try:  # only a lab that starts needs pyroute2, whose import takes a tenth of a second
        from thinwire.tools.lab.network import LabNetwork
    except ModuleNotFoundError as error:
        package, advice = str(error.name).partition(".")[0], "pip install 'PATH_OF_THE_CLONE[tools]'"
        raise LabError(f"the lab needs {package}, which the extra 'tools' brings: {advice}") from None
    return LabNetwork(spaces, hosts)


class Lab:
    """Emulated hosts on this machine: `with Lab(4, rate="100mbit") as lab: lab.run(["python", "train.py"])`.

    Args:
        hosts: number of hosts, 1 to 250.
        rate: rate of every host's link: `100mbit`, or `20mbit/100mbit` for up and down; None is unlimited.
        loss: share of packets lost between any two hosts: `"1%"` or 0.01; needs a kernel with nf_tables or netem.
        delay: one-way delay between any two hosts: `"5ms"` or seconds.
        host_rates: rates of single hosts that differ from `rate`.
        host_delays: delays of single hosts that differ from `delay`. The one-way delay between two hosts is the larger
            of their two delays, in both directions.
        delay_line: delay packets by the delay line even where the kernel has netem.
    """

    def __init__(
        self,
        hosts: int,
        *,
        rate: str | int | Rates | None = None,
        loss: str | float | None = None,
        delay: str | float | None = None,
        host_rates: Mapping[int, str | int | Rates | None] | None = None,
        host_delays: Mapping[int, str | float | None] | None = None,
        delay_line: bool = False,
    ) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"a lab has 1 to {MOST_HOSTS} hosts, not {hosts}")
        self.hosts = hosts
        self.rate = parse_rates(rate)
        self.rates = [self.rate] * hosts
        for host, other in (host_rates or {}).items():
            self.rates[self._checked(host)] = parse_rates(other)
        self.loss = parse_loss(loss)
        self._losses = [self.loss] * hosts
        self._netem_loss = False
        self.delay = parse_delay(delay)
        self.delays = [self.delay] * hosts
        for host, longer in (host_delays or {}).items():
            self.delays[self._checked(host)] = parse_delay(longer, f"the delay of host {host}")
        self._netem_delay = 0.0
        self._may_use_netem = not delay_line
        self._line: DelayLine | None = None
        self._runs = 0
        self._started: list[subprocess.Popen[Any]] = []
        self._namespaces: Namespaces | None = None
        self._network: LabNetwork | None = None
        self._run_file: RunFile | None = None
        self._owner = os.getpid()

    def __enter__(self) -> "Lab":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Build the network and start the hosts; the context manager calls this."""
        if self._namespaces is not None:
            raise LabError("the lab is already running")
        self._run_file = RunFile({f"h{host}": self.address(host) for host in range(self.hosts)})
        try:
            self._namespaces = Namespaces(self._run_file)
            self._namespaces.boot(self.hosts)
            self._network = network_in(self._namespaces, self.hosts)
            self._network.build()
            if any(self._losses):
                self._apply_losses()
            self._shape()
            if any(self.delays):
                self._apply_delays()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill every process of every host and remove the network; a second call does nothing."""
        if os.getpid() != self._owner:
            return  # a forked child must not end its parent's lab
        if self._namespaces is not None:
            self._namespaces.close()
            self._namespaces = self._network = self._line = None
        if self._run_file is not None:
            self._run_file.remove()
        for process in self._started:  # all have ended by now, so this only reaps them
            process.wait()
        self._started.clear()

    def _shape(self, *hosts: int) -> None:
        for host in hosts or range(self.hosts):
            lost = self._losses[host] if self._netem_loss else 0.0
            self._wires.shape(host, self.rates[host], delay=self._netem_delay, lost=lost)

    def _apply_delays(self) -> None:
        """Delay packets by netem if the kernel has it and all hosts have the same delay, else by the delay line."""
        if self._line is None and self._may_use_netem and len(set(self.delays)) == 1:
            before, self._netem_delay = self._netem_delay, self.delays[0]
            try:
                self._shape()
                return
            except LabError as error:
                self._netem_delay = before
                if "netem" not in str(error):
                    raise
                self._may_use_netem = False
        check_carried(self.rates)
        line = self._line or DelayLine(self._spaces, self.hosts)
        line.set(self.delays, self.rates)
        if self._line is None:  # packets in between arrive twice, which is gentler than not at all
            self._wires.insert_delay_line()
            self._line, self._netem_delay = line, 0.0
            self._shape()

    def _apply_losses(self) -> None:
        try:
            self._wires.lose(dict(enumerate(self._losses)))
        except LabError as no_rules:
            self._netem_loss = True
            try:
                self._shape()
            except LabError:
                self._netem_loss = False
                advice = f"packet loss needs a kernel with nf_tables or netem, and this one has neither ({no_rules})"
                raise LabError(advice) from None

    @property
    def _spaces(self) -> Namespaces:
        if self._namespaces is None:
            raise LabError(_NOT_RUNNING)
        return self._namespaces

    @property
    def _wires(self) -> "LabNetwork":
        if self._network is None:
            raise LabError(_NOT_RUNNING)
        return self._network

    @property
    def name(self) -> str:
        """The lab's name, unique on this machine while it runs."""
        if self._run_file is None:
            raise LabError("the lab has no name before it runs")
        return self._run_file.name

    @property
    def mode(self) -> str:
        """How the namespaces were made: `root` or `user namespace`."""
        return self._spaces.mode

    def _checked(self, host: int) -> int:
        if not 0 <= host < self.hosts:
            raise ValueError(f"there is no host {host}; the lab's hosts are 0 to {self.hosts - 1}")
        return host

    def address(self, host: int) -> str:
        """Return a host's IPv4 address, which exists only inside the lab."""
        return shaping.address(self._checked(host))

    def cores(self, host: int) -> list[int]:
        """Return the cores that a host may use: as many as every other host, and not shared where possible."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= self.hosts:
            share = len(cores) // self.hosts
            return cores[host * share : (host + 1) * share]
        # Pinning is fair only if every core gets the same number of hosts; otherwise the scheduler shares the cores.
        return [cores[host % len(cores)]] if self.hosts % len(cores) == 0 else cores

    def counters(self) -> list[HostTraffic]:
        """Return the traffic of each host since the lab started, as the kernel counted it."""
        return parse_counters(self._spaces.ask("read", where=SWITCH, path="/proc/net/dev")["text"], self.hosts)

    def environment(self, host: int) -> dict[str, str]:
        """Return the environment variables that every process of a host gets in addition to the caller's."""
        lab: dict[str, Any] = {"name": self.name, "host": host, "hosts": self.hosts, "rate": str(self.rates[host])}
        lab |= {"loss": self._losses[host], "delay": self.delays[host]}
        interface = {f"{user}_SOCKET_IFNAME": shaping.INTERFACE for user in ("GLOO", "TP", "NCCL")}
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "THINWIRE_LAB": json.dumps(lab), **interface}

    def popen(
        self, host: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[Any]":
        """Start a command on a host and return its process.

        Signals to the process reach the command's process group; `kill(host)` ends every process of the host.

        Args:
            host: number of the host.
            argv: the command.
            env: variables added to the present environment.
            options: further arguments of subprocess.Popen.
        """
        argv = self._spaces.command(self._checked(host), self.cores(host), [str(word) for word in argv])
        options.setdefault("start_new_session", True)  # the caller decides what Ctrl-C does
        variables = {**os.environ, **self.environment(host), **(env or {})}
        process = subprocess.Popen(argv, env=variables, **options)
        self._started = [one for one in self._started if one.returncode is None] + [process]
        return process

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        per_host: int = 1,
        timeout: float | None = None,
        output: Callable[[int, str], None] | None = None,
        grace: float = 5.0,
    ) -> RunResult:
        """Run a command on all hosts at the same time, with the variables that torchrun sets, and wait for its end.

        Args:
            argv: the command.
            env: variables added to the present environment.
            per_host: processes (ranks) on each host.
            timeout: seconds after which everything is stopped and the exit code is 124.
            output: called with the host and each line of output; the result has the last 2000 lines in any case.
            grace: seconds that the other processes get to end by themselves after the first failure.
        """
        if per_host < 1:
            raise ValueError(f"per_host is at least 1, not {per_host}")
        self._runs += 1
        # Every run has its own port, because connections of the previous run may still be closing.
        shared = {"MASTER_ADDR": self.address(0), "MASTER_PORT": str(29500 + self._runs % 1000)}
        launch = Launch(timeout=timeout, output=output, grace=grace)
        before = self.counters()
        try:
            for rank in range(self.hosts * per_host):
                host, local = divmod(rank, per_host)
                ranks = {"RANK": rank, "WORLD_SIZE": self.hosts * per_host, "LOCAL_RANK": local}
                ranks |= {"LOCAL_WORLD_SIZE": per_host, "GROUP_RANK": host}
                variables = {**{key: str(value) for key, value in ranks.items()}, **shared, **(env or {})}
                launch.add(host, self.popen(host, argv, env=variables, **PIPED))
            launch.wait()
        finally:
            launch.stop()
        traffic = [after - earlier for after, earlier in zip(self.counters(), before, strict=True)]
        return launch.result(traffic)

    def kill(self, host: int) -> None:
        """Kill every process of a host at once, as a power failure does; new ones can be started afterwards."""
        self._spaces.reboot(self._checked(host))

    def cut(self, host: int) -> None:
        """Disconnect a host from the switch: its packets are lost, its connections stay open."""
        self._wires.turn(self._checked(host), on=False)

    def heal(self, host: int) -> None:
        """Connect a host to the switch again."""
        self._wires.turn(self._checked(host), on=True)

    def set_rate(self, host: int, rate: str | int | Rates | None) -> None:
        """Change the rate of a host's link: both directions, or `UP/DOWN`; None removes the limit."""
        rates = [*self.rates]
        rates[self._checked(host)] = parse_rates(rate)
        if self._line is not None:
            check_carried(rates)
            self._line.set(self.delays, rates)
        self.rates = rates
        self._shape(host)

    def set_loss(self, host: int, loss: str | float | None) -> None:
        """Change the loss of a host's link; a packet is dropped with the larger loss of its two links."""
        before = [*self._losses]
        self._losses[self._checked(host)] = parse_loss(loss)
        try:
            self._apply_losses()
        except LabError:
            self._losses = before
            raise

    def set_delay(self, host: int, delay: str | float | None) -> None:
        """Change the delay of a host; the one-way delay between two hosts is the larger of their two delays."""
        before = [*self.delays]
        self.delays[self._checked(host)] = parse_delay(delay)
        try:
            self._apply_delays()
        except LabError:
            self.delays = before
            raise

    def delay_figures(self, since: DelayFigures | None = None) -> DelayFigures | None:
        """Return what the delay line did since it started, or since earlier figures; None where none runs."""
        if self._line is None:
            return None
        figures = self._line.figures()
        return figures if since is None else figures - since
