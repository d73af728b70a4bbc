"""Tries everything that a lab needs on this machine and reports what works, and how to get the rest."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors import LabError
from thinwire.tools.lab import shaping
from thinwire.tools.lab.delay import DelayLine
from thinwire.tools.lab.lab import network_in
from thinwire.tools.lab.namespaces import SWITCH, Namespaces
from thinwire.tools.lab.registry import RunFile
from thinwire.tools.lab.units import Rates

if TYPE_CHECKING:
    from thinwire.tools.lab.network import LabNetwork


@dataclass(frozen=True)
class Ability:
    """One feature that a lab needs (`required`) or can use, whether it works, and what to do if it does not."""

    name: str
    works: bool
    detail: str
    required: bool = True


def check() -> list[Ability]:
    """Try every feature in a lab of one host and return the results."""
    if not sys.platform.startswith("linux"):  # the advice of _why_not would not help
        return [Ability("namespaces", False, f"a lab needs Linux; this is {sys.platform}")]
    run_file = RunFile({"h0": shaping.address(0)})
    try:
        spaces = Namespaces(run_file)
    except LabError as error:
        return [Ability("namespaces", False, _why_not(str(error)))]
    finally:
        run_file.remove()
    try:
        return [Ability("namespaces", True, f"as {spaces.mode}"), *_abilities(spaces, network_in(spaces, 1))]
    finally:
        spaces.close()


def ready(abilities: list[Ability]) -> bool:
    """Return whether a lab with a rate can be built."""
    return all(ability.works for ability in abilities if ability.required)


def _why_not(complaint: str) -> str:
    if os.geteuid() == 0:
        return f"{complaint}; root lacks CAP_SYS_ADMIN: give the container that capability"
    for name, bad in (
        ("user/max_user_namespaces", "0"),
        ("kernel/unprivileged_userns_clone", "0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1"),
    ):
        path = Path("/proc/sys") / name
        if path.exists() and path.read_text().strip() == bad:
            return f"{complaint}; {name.replace('/', '.')} is {bad}: change it with sysctl, or run as root"
    return f"{complaint}; run as root"


def _abilities(spaces: Namespaces, network: "LabNetwork") -> list[Ability]:
    def attempt(
        name: str, remedy: str, works: str, action: Callable[..., object], *arguments: object, required: bool = True
    ) -> Ability:
        try:
            return Ability(name, True, str(action(*arguments) or works), required)
        except LabError as error:
            return Ability(name, False, f"{error}; {remedy}", required)

    def settings() -> str:
        refused = spaces.ask("configure", where=SWITCH, devices=[], settings=shaping.SETTINGS)["refused"]
        if refused:
            raise LabError(f"refused: {', '.join(refused)}")
        control = spaces.ask("read", where=SWITCH, path="/proc/sys/net/ipv4/tcp_congestion_control")["text"]
        return f"IPv6 off; TCP congestion control of this machine: {control.strip()}"

    def netem() -> None:
        network.shape(0, rate, delay=0.001)

    def delay_line() -> str:
        line = DelayLine(spaces, 1)
        line.set([0.001], [rate])
        network.insert_delay_line()
        return f"used without netem, and if delays differ between hosts; {line.figures().scheduling}"

    rate = Rates(10**7, 10**7)
    isolated, needed = "separate processes, mounts and host name", "process, mount and host name namespaces"
    return [
        attempt("hosts", f"the kernel must have {needed}", isolated, spaces.boot, 1),
        attempt("cables", "the kernel must have veth and bridge", "veth and bridge", network.connect),
        attempt(
            "offloads", "the kernel must let a veth turn its offloads off", "segmentation off", network.offloads_off
        ),
        attempt("rate (tbf)", "the kernel must have tbf", "token buckets", network.shape, 0, rate),
        attempt("loss (nftables)", "the kernel must have nf_tables", "rules", network.lose, {0: 0.01}, required=False),
        attempt("delay (netem)", "the delay line is used instead", "netem", netem, required=False),
        attempt(
            "delay (delay line)",
            "load the kernel module tun, or let this container use /dev/net/tun",
            "",
            delay_line,
            required=False,
        ),
        attempt("settings", "results may differ slightly between machines", "", settings, required=False),
    ]
