"""Real packets through the delay line: how long they take, their order, drops, figures, and the end of the program.

A packet is never early, so that lower bounds are exact. Upper bounds leave room for a busy machine.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.needs import needs
from tests.tools.lab import kills
from thinwire.errors import LabError
from thinwire.tools.lab import Lab
from thinwire.tools.lab.delay import DelayFigures, bytes_in_flight
from thinwire.tools.lab.measure import goodput, loss, round_trips
from thinwire.tools.lab.units import Rates

# Prints how many of the numbered datagrams arrived, and how many of them after one with a larger number.
_RECEIVE = """
import socket, struct
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
udp.bind(("0.0.0.0", 7001))
udp.settimeout(30)
print("ready", flush=True)
last, came, overtaken = -1, 0, 0
while last < {count} - 1:
    number, = struct.unpack("I", udp.recv(100))
    came, overtaken, last = came + 1, overtaken + (number < last), max(last, number)
print(came, overtaken)
"""
_SEND = """
import socket, struct, time
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.connect(("{address}", 7001))
for number in range({count}):
    udp.send(struct.pack("I", number))
    time.sleep(0.0005)
"""
_PIPED: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}


@pytest.fixture(autouse=True)
def _rights(lab_rights: None) -> None:
    needs("delay line")


def between(lab: Lab, sender: int, receiver: int) -> dict[str, float]:
    """Return a few round trips between two hosts."""
    return round_trips(lab, sender, receiver, count=8, gap=0.001)


def program() -> int | None:
    """Return the running program of the delay line that the environment of this test marks, or None."""
    for pid in kills.marked(os.environ[kills.MARK]):
        if Path(f"/proc/{pid}/comm").read_text() == "delay_line\n":
            return pid
    return None


def test_the_delay_between_two_hosts_is_the_larger_of_theirs() -> None:
    with Lab(4, rate="100mbit", delay="20ms", host_delays={2: "40ms", 3: 0}, delay_line=True) as lab:
        delays = {(0, 1): 0.02, (0, 2): 0.04, (2, 0): 0.04, (0, 3): 0.02, (2, 3): 0.04}
        with ThreadPoolExecutor(len(delays)) as pool:
            trips = list(pool.map(lambda pair: between(lab, *pair), delays))
    for (pair, seconds), found in zip(delays.items(), trips, strict=True):
        assert 2 * seconds <= found["least"] < 2 * seconds + 0.1, pair


def test_any_kernel_can_delay() -> None:
    with Lab(2, delay="40ms") as lab:
        trips = between(lab, 0, 1)
    assert 0.08 <= trips["least"] < 0.2


def test_delays_change_while_the_lab_runs() -> None:
    with Lab(3, rate="100mbit", delay_line=True) as lab:
        assert lab.delay_figures() is None
        assert between(lab, 0, 1)["least"] < 0.04
        lab.set_delay(1, "40ms")
        assert between(lab, 0, 1)["least"] >= 0.08
        assert between(lab, 0, 2)["least"] < 0.04
        lab.set_delay(1, None)
        assert between(lab, 0, 1)["least"] < 0.04
        with pytest.raises(ValueError, match="there is no host 3"):
            lab.set_delay(3, "1ms")


def test_nothing_is_lost_and_nothing_overtakes_while_delays_change() -> None:
    count = 2000
    with Lab(2, rate="100mbit", delay="60ms", delay_line=True) as lab:
        receiver = lab.popen(1, [sys.executable, "-c", _RECEIVE.format(count=count)], **_PIPED)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        sender = lab.popen(0, [sys.executable, "-c", _SEND.format(address=lab.address(1), count=count)])
        for delay in (1, 30, 0, 5, 60, 2):
            time.sleep(0.15)
            lab.set_delay(0, delay / 1000)
            lab.set_delay(1, delay / 1000)
        came = receiver.communicate(timeout=60)[0].split()
        assert sender.wait(timeout=60) == 0
        figures = lab.delay_figures()
    assert came == [str(count), "0"]
    assert figures is not None
    assert (figures.packets, figures.dropped) == (count, 0)


def test_no_packet_is_dropped_when_a_delay_becomes_shorter() -> None:
    """Packets that wait for the longer delay are more than a line with the shorter delay has room for."""
    with Lab(2, rate="100mbit", delay="400ms", delay_line=True) as lab, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(loss, lab, 0, 1, count=12_000, per_second=12_000)
        while not sending.done() and figures_now(lab).packets == 0:
            time.sleep(0.01)
        for host in range(2):
            lab.set_delay(host, "1ms")
        sending.result()
        assert figures_now(lab).dropped == 0


def figures_now(lab: Lab) -> DelayFigures:
    """Return the figures of a lab's delay line."""
    figures = lab.delay_figures()
    assert figures is not None
    return figures


def test_packets_beyond_the_room_are_dropped_and_counted() -> None:
    sent = 3000
    with Lab(2, delay="300ms", delay_line=True) as lab:
        assert lab._line is not None
        slow = Rates(8000, 8000)
        lab._line.set(lab.delays, [slow, slow])  # room for such links, which are faster
        lost = loss(lab, 0, 1, count=sent, per_second=sent / 0.2)
        figures = lab.delay_figures()
    assert figures is not None
    assert figures.dropped == round(lost * sent) > 0
    assert figures.packets == sent - figures.dropped
    assert figures.bytes < sent * 298  # bytes of a datagram's frame
    assert figures.bytes >= 0.95 * bytes_in_flight(8000, 0.3)


def test_rate_and_loss_hold_with_a_delay() -> None:
    needs("loss")
    with Lab(2, rate="20mbit", delay="5ms", delay_line=True) as lab:
        before = lab.delay_figures()
        (measured,) = goodput(lab, [(0, 1)], seconds=1.5)
        assert 10e6 < measured < 20e6
        between_both = lab.delay_figures(before)
        assert between_both is not None
        assert 0 < between_both.share < 1
        assert sum(count for _, count in between_both.late) == between_both.packets > 1000
        lab.set_loss(1, "20%")
        assert 0.14 < loss(lab, 0, 1, count=4000, per_second=4000) < 0.26


def test_links_that_a_delay_line_cannot_carry_are_refused() -> None:
    with pytest.raises(LabError, match=r"the links carry 800mbit together, and a delay line carries 400mbit: lower"):
        Lab(4, rate="200mbit", delay="5ms", delay_line=True).start()
    with Lab(2, rate="100mbit/1gbit", delay="5ms", delay_line=True) as lab:
        with pytest.raises(LabError, match="the links carry 1100mbit together"):
            lab.set_rate(0, "1gbit")
        assert str(lab.rates[0]) == "100mbit/1gbit"
        lab.set_rate(1, None)
    with Lab(4, rate="200mbit", delay_line=True) as lab:
        with pytest.raises(LabError, match="the links carry 800mbit together"):
            lab.set_delay(2, "5ms")
        assert lab.delays == [0.0] * 4


def test_the_delay_line_ends_with_its_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv(kills.MARK, mark)
    with Lab(2, delay="5ms", delay_line=True) as lab:
        assert program() is not None
    assert program() is None
    with Lab(2, delay="5ms", delay_line=True) as lab:
        os.kill(lab._spaces._process.pid, signal.SIGKILL)
        end = time.monotonic() + 20
        while program() is not None:
            assert time.monotonic() < end
            time.sleep(0.02)
    assert program() is None


def test_a_killed_delay_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kills.MARK, f"{os.getpid()}-{time.monotonic_ns()}")
    with Lab(2, delay="5ms", delay_line=True) as lab:
        pid = program()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LabError, match="the delay line has ended"):
            lab.delay_figures()
        assert lab.run(["true"]).exit_code == 0


def test_the_delay_line_sleeps_when_nothing_is_sent_and_answers_many_requests() -> None:
    with Lab(2, delay="5ms", delay_line=True) as lab:
        threads = [threading.Thread(target=lab.delay_figures) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        before = lab.delay_figures()
        time.sleep(0.5)
        idle = lab.delay_figures(before)
    assert idle is not None
    assert idle.packets == 0
    assert idle.cpu_seconds < 0.05


_LATE = st.dictionaries(st.integers(1, 50), st.integers(1, 100)).map(lambda bins: tuple(sorted(bins.items())))


def figures_of(late: tuple[tuple[int, int], ...]) -> DelayFigures:
    return DelayFigures(sum(count for _, count in late), 0, 0, 1.0, 2.0, late, "normal priority")


@given(_LATE, _LATE)
def test_figures_of_an_interval_are_a_difference(earlier: Any, meanwhile: Any) -> None:
    limits = {limit for limit, _ in earlier + meanwhile}
    both = tuple((limit, dict(earlier).get(limit, 0) + dict(meanwhile).get(limit, 0)) for limit in sorted(limits))
    found = figures_of(both) - figures_of(earlier)
    assert found.late == meanwhile
    assert found.packets == sum(count for _, count in meanwhile)
    every = sorted(limit for limit, count in meanwhile for _ in range(count))
    if every:
        assert found.max_late_ms == every[-1] / 1000
        assert found.p50_late_ms == every[(len(every) + 1) // 2 - 1] / 1000
