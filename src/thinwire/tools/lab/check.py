"""Tries everything that a lab needs on this machine and reports what works, and how to get the rest."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import LabError
from thinwire.tools.lab import shaping
from thinwire.tools.lab.namespaces import SWITCH, Namespaces
from thinwire.tools.lab.registry import RunFile


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
        return [Ability("namespaces", True, f"as {spaces.mode}"), *_abilities(spaces)]
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


def _abilities(spaces: Namespaces) -> list[Ability]:
    def attempt(
        name: str, remedy: str, works: str, action: Callable[..., object], *arguments: object, required: bool = True
    ) -> Ability:
        try:
            return Ability(name, True, str(action(*arguments) or works), required)
        except LabError as error:
            return Ability(name, False, f"{error}; {remedy}", required)

    def offloads() -> None:
        spaces.ask("configure", where=SWITCH, devices=["h0"], settings={})

    def settings() -> str:
        refused = spaces.ask("configure", where=SWITCH, devices=[], settings=shaping.SETTINGS)["refused"]
        if refused:
            raise LabError(f"refused: {', '.join(refused)}")
        control = spaces.ask("read", where=SWITCH, path="/proc/sys/net/ipv4/tcp_congestion_control")["text"]
        return f"IPv6 off; TCP congestion control of this machine: {control.strip()}"

    tc, nft = (SWITCH, ["tc", "-batch", "-"]), (SWITCH, ["nft", "-f", "-"])
    rate = shaping.queue_lines("h0", 10**7)
    delayed = shaping.queue_lines("h0", 10**7, delay=0.001)
    rules = shaping.loss_rules({0: 0.01}).splitlines()
    isolated, needed = "separate processes, mounts and host name", "process, mount and host name namespaces"
    return [
        attempt("hosts", f"the kernel must have {needed}", isolated, spaces.boot, 1),
        attempt("cables", "install iproute2", "veth and bridge (iproute2)", spaces.wire, 1),
        attempt("offloads", "the kernel must let a veth turn its offloads off", "segmentation off", offloads),
        attempt("rate (tbf)", "install iproute2; the kernel must have tbf", "tc", spaces.batch, *tc, rate),
        attempt("loss (nftables)", "install nftables", "nft", spaces.batch, *nft, rules, required=False),
        attempt("delay (netem)", "the kernel must have netem", "tc", spaces.batch, *tc, delayed, required=False),
        attempt("settings", "results may differ slightly between machines", "", settings, required=False),
    ]
