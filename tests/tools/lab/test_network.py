"""Real traffic over emulated links: rates, losses, disconnected hosts and counters.

Upper bounds are exact, because a link must never be faster than its rate. Lower bounds leave room for a busy machine.
"""

import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from tests.needs import needs
from tests.tools.lab.kernel_state import count_forwarded, counted
from thinwire.errors import LabError
from thinwire.tools.lab import Lab
from thinwire.tools.lab.measure import goodput, loss, mean_packet
from thinwire.tools.lab.namespaces import Namespaces
from thinwire.tools.lab.netlink import KernelRequest
from thinwire.tools.lab.shaping import FRAME

pytestmark = pytest.mark.usefixtures("lab_rights")

_ECHO = """
import socket, sys
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while data := connection.recv(100):
        connection.sendall(data)
"""
_ASK = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7000))
for line in sys.stdin:
    connection.sendall(b"x")
    connection.recv(1)
    print("echoed", flush=True)
"""
# Rank 1 sends batches of eight datagrams in one call; rank 0 prints how many batches arrived in part.
_BATCHES = """
import os, socket, struct, time
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if os.environ["RANK"] == "0":
    udp.bind(("0.0.0.0", 7001))
    with socket.create_server(("0.0.0.0", 7000)) as server:
        server.accept()[0].recv(1)
    udp.setblocking(False)
    came = {}
    try:
        while True:
            batch, index = struct.unpack("II", udp.recv(2000)[:8])
            came.setdefault(batch, set()).add(index)
    except BlockingIOError:
        print("parts", sum(0 < len(found) < 8 for found in came.values()), flush=True)
else:
    for _ in range(300):
        try:
            told = socket.create_connection((os.environ["MASTER_ADDR"], 7000))
            break
        except OSError:
            time.sleep(0.1)
    udp.connect((os.environ["MASTER_ADDR"], 7001))
    for batch in range(24):
        rows = [struct.pack("II", batch, index) + bytes(100) for index in range(8)]
        udp.sendmsg(rows, [(socket.IPPROTO_UDP, 103, struct.pack("@H", len(rows[0])))])
        time.sleep(0.005)
    told.close()
"""


@pytest.mark.parametrize(
    ("rate", "pairs", "least"),
    [
        ("10mbit", [(0, 1), (1, 0)], 0.7),
        ("100mbit", [(0, 1), (1, 0)], 0.6),
        ("500mbit", [(0, 1), (1, 0)], 0.25),
        ("1gbit", [(0, 1)], 0.15),
    ],
)
def test_goodput_is_the_rate_less_headers(rate: str, pairs: list[tuple[int, int]], least: float) -> None:
    with Lab(2, rate=rate) as lab:
        measured = goodput(lab, pairs, seconds=1)
        packet = mean_packet(lab)
    bits = lab.rate.up
    assert bits is not None
    for figure in measured:
        assert least * bits < figure < bits
    assert 100 < packet <= FRAME  # packets of the wire, not bundles of segments


@pytest.mark.parametrize(("percent", "count"), [(1, 40_000), (5, 8_000), (20, 4_000)])
def test_loss_is_the_loss_asked_for(percent: int, count: int) -> None:
    needs("loss")
    with Lab(2, rate="1gbit", loss=f"{percent}%") as lab:
        # 400 lost datagrams have a standard deviation of 20: 30 % are six of them.
        measured = loss(lab, 0, 1, count=count, per_second=25_000)
    assert 0.7 * percent < 100 * measured < 1.3 * percent


def test_each_direction_and_each_host_has_its_own_rate() -> None:
    with Lab(3, rate="10mbit/40mbit", host_rates={2: "80mbit"}) as lab:
        (upload,) = goodput(lab, [(0, 1)], seconds=1)
        (fast,) = goodput(lab, [(2, 0)], seconds=1)
    assert 5e6 < upload < 10e6
    assert 10e6 < fast < 40e6  # out of host 2 at 80, into host 0 at 40


def test_datagrams_that_were_sent_together_are_lost_alone() -> None:
    needs("nftables")
    said: list[str] = []
    with Lab(2, rate="100mbit", loss="30%") as lab:
        ended = lab.run([sys.executable, "-c", _BATCHES], output=lambda host, line: said.append(line))
    assert ended.failure is None
    (parts,) = [int(line.split()[1]) for line in said if line.startswith("parts")]
    assert parts > 12  # 22 of 24 are expected, and none if batches were lost as a whole


def test_rate_and_loss_change_while_running() -> None:
    needs("loss")
    with Lab(2, rate="100mbit") as lab:
        lab.set_rate(0, "5mbit")
        assert goodput(lab, [(0, 1)], seconds=1)[0] < 5e6
        lab.set_rate(0, None)
        assert goodput(lab, [(0, 1)], seconds=1)[0] > 30e6
        lab.set_loss(1, "50%")
        assert 0.4 < loss(lab, 0, 1, count=2000) < 0.6
        lab.set_loss(1, 0)
        assert loss(lab, 0, 1, count=2000) == 0


def test_a_stream_goes_on_when_its_link_becomes_slow() -> None:
    """A bundle of packets that waits for the fast link must fit the token bucket of the slow one."""
    with Lab(2, rate="500mbit") as lab:
        flow = threading.Thread(target=goodput, args=(lab, [(0, 1)]), kwargs={"seconds": 6})
        flow.start()
        time.sleep(1.5)
        for _ in range(4):
            lab.set_rate(0, "500mbit")
            time.sleep(0.4)
            lab.set_rate(0, "5mbit")
            time.sleep(0.3)
            before = lab.counters()[0].sent_bytes
            time.sleep(0.3)
            assert lab.counters()[0].sent_bytes > before
        flow.join()


def test_a_cut_cable_holds_a_connection_until_it_heals() -> None:
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Lab(2) as lab:
        server = lab.popen(1, [sys.executable, "-c", _ECHO], **options)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        client = lab.popen(0, [sys.executable, "-c", _ASK, lab.address(1)], **options)
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write("1\n")
        client.stdin.flush()
        assert client.stdout.readline() == "echoed\n"
        lab.cut(1)
        before = lab.counters()[1].received_packets
        client.stdin.write("2\n")
        client.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            client.wait(timeout=0.5)
        assert lab.counters()[1].received_packets == before
        lab.heal(1)
        assert client.stdout.readline() == "echoed\n"


def test_counters_count_what_is_sent() -> None:
    with Lab(3) as lab:
        assert all(traffic.sent_packets == 0 for traffic in lab.counters())
        loss(lab, 0, 1, count=1000)
        first, second, third = lab.counters()
    assert first.sent_packets == second.received_packets == 1000
    assert first.sent_bytes == 1000 * (256 + 42)
    assert third.received_packets == 0  # the switch floods no packets


def test_loss_acts_on_single_packets_not_on_bundles() -> None:
    needs("nftables")
    with Lab(2, rate="500mbit", loss="1%") as lab:
        count_forwarded(lab, "bridge", longer_than=1500)
        count_forwarded(lab, "bridge", longer_than=1000)
        goodput(lab, [(0, 1)], seconds=1)
        bundles, packets = counted(lab)
        assert lab.counters()[0].sent_packets > 1000
    assert bundles == 0
    assert packets > 1000  # the rule does count


def test_the_switch_is_no_router() -> None:
    """Packets between hosts pass no IP firewall, although the kernel can send bridged packets through it."""
    needs("nftables")
    with Lab(2, rate="100mbit") as lab:
        count_forwarded(lab, "ip")
        goodput(lab, [(0, 1)], seconds=0.5)
        assert lab.counters()[0].sent_packets > 100
        assert counted(lab) == [0]


def test_loss_on_a_kernel_without_nftables_and_netem_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Namespaces.send

    def send(spaces: Namespaces, where: int, requests: list[KernelRequest]) -> bytes:
        for request in requests:
            if "nftables" in request.what or "netem" in request.what:
                raise LabError(f"the kernel refused to {request.what}: Operation not supported")
        return real(spaces, where, requests)

    monkeypatch.setattr(Namespaces, "send", send)
    with pytest.raises(LabError) as caught, Lab(2, rate="100mbit", loss="1%"):
        pass
    said = str(caught.value)
    assert said.startswith("packet loss needs a kernel with nf_tables or netem, and this one has neither")
    assert "refused to use nftables: Operation not supported" in said and "\n" not in said


def test_hosts_have_names_and_loopback() -> None:
    script = (
        "import socket; print(socket.gethostname(), socket.gethostbyname('h1'));"
        "s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname());"
        "print('loopback')"
    )
    with Lab(2) as lab:
        result = lab.run([sys.executable, "-c", script])
        assert [host.lines for host in result.hosts] == [(f"h{host} {lab.address(1)}", "loopback") for host in range(2)]
