"""The kernel's configuration of a lab, as the kernel reports it, and messages that this kernel may not understand."""

import subprocess
import sys
from typing import Any

import pytest
from pyroute2.netlink.rtnl import RTM_GETADDR, RTM_GETLINK, RTM_GETNEIGH, RTM_GETQDISC
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from tests.tools.lab.kernel_state import routed
from thinwire.errors import LabError
from thinwire.tools.lab import Lab, netlink, shaping
from thinwire.tools.lab.namespaces import SWITCH


def _devices(lab: Lab, where: int) -> dict[str, Any]:
    return {device.get_attr("IFLA_IFNAME"): device for device in routed(lab, where, RTM_GETLINK, ifinfmsg)}


def _bucket(lab: Lab, where: int, index: int) -> Any:
    """Return the queue of a device and, if it is a token bucket, its rate in bits and its limit in bytes."""
    (queue,) = [each for each in routed(lab, where, RTM_GETQDISC, netlink.QueueMessage) if each["index"] == index]
    if queue.get_attr("TCA_KIND") != "tbf":
        return queue.get_attr("TCA_KIND")
    options = queue.get_attr("TCA_OPTIONS")
    rate = options.get_attr("TCA_TBF_RATE64") or options.get_attr("TCA_TBF_PARMS")["rate"]
    return 8 * rate, options.get_attr("TCA_TBF_PARMS")["limit"]


@pytest.mark.usefixtures("lab_rights")
def test_the_kernel_has_what_was_asked_for() -> None:
    with Lab(3, rate="10mbit/40mbit", host_rates={1: "50gbit", 2: None}) as lab:
        ports, host = _devices(lab, SWITCH), _devices(lab, 1)
        assert set(ports) == {"lo", "switch", "h0", "h1", "h2"}
        bridge = ports["switch"].get_attr("IFLA_LINKINFO").get_attr("IFLA_INFO_DATA")
        assert [bridge.get_attr(f"IFLA_BR_{name}") for name in ("STP_STATE", "FORWARD_DELAY", "MCAST_SNOOPING")] == [
            0
        ] * 3
        for number in range(3):
            port = ports[shaping.port(number)]
            assert (port["index"], port.get_attr("IFLA_GSO_MAX_SEGS")) == (shaping.port_index(number), 1)
            member = port.get_attr("IFLA_LINKINFO").get_attr("IFLA_INFO_SLAVE_DATA")
            quiet = [member.get_attr(f"IFLA_BRPORT_{name}") for name in ("LEARNING", "UNICAST_FLOOD", "MCAST_FLOOD")]
            assert quiet == [0, 0, 0]
        assert host["eth0"].get_attr("IFLA_GSO_MAX_SEGS") == shaping.BUNDLE
        assert host["eth0"].get_attr("IFLA_ADDRESS") == shaping.hardware(1)
        addresses = [each.get_attr("IFA_LOCAL") for each in routed(lab, 1, RTM_GETADDR, ifaddrmsg)]
        assert addresses == ["127.0.0.1", shaping.address(1)]
        known = {each.get_attr("NDA_DST"): each for each in routed(lab, 1, RTM_GETNEIGH, ndmsg, family=2)}
        assert {at: each.get_attr("NDA_LLADDR") for at, each in known.items()} == {
            shaping.address(other): shaping.hardware(other) for other in (0, 2)
        }
        assert {each["state"] for each in known.values()} == {0x80}  # permanent
        burst, queue = shaping.bucket(10**7)
        assert _bucket(lab, 0, shaping.INTERFACE_INDEX) == (10**7, burst + queue)
        assert _bucket(lab, SWITCH, shaping.port_index(0))[0] == 4 * 10**7
        assert _bucket(lab, 1, shaping.INTERFACE_INDEX)[0] == 5 * 10**10  # more than 32 bits of bytes per second
        assert _bucket(lab, 2, shaping.INTERFACE_INDEX) == "noqueue"
        lab.set_rate(2, "1mbit")
        assert _bucket(lab, 2, shaping.INTERFACE_INDEX)[0] == 10**6


@pytest.mark.usefixtures("lab_rights")
def test_a_refused_request_is_named_with_the_kernels_reason() -> None:
    with Lab(1) as lab:
        with pytest.raises(LabError, match="refused to create a bridge: File exists"):
            lab._spaces.send(SWITCH, [netlink.add_switch()])
        with pytest.raises(LabError, match="refused to turn a device on: No such device"):
            lab._spaces.send(SWITCH, [netlink.turn(99, on=True)])


def _decoded(request: netlink.KernelRequest) -> Any:
    message = tcmsg(request.data)
    message.decode()
    return message


def test_netem_delays_with_the_token_bucket_inside() -> None:
    outer, inner = netlink.queues(7, 10**7, delay=0.005, loss=0.01)
    netem = _decoded(outer)
    assert (netem["index"], netem["parent"], netem["handle"]) == (7, 0xFFFFFFFF, 3 << 16)
    options = netem.get_attr("TCA_OPTIONS")
    assert netem.get_attr("TCA_KIND") == "netem"
    assert options["limit"] == shaping.delayed_packets(10**7, 0.005) > 1000
    assert options["loss"] == pytest.approx(0.01 * 2**32)
    assert options["delay"] == pytest.approx(5000 * 15.625)  # the kernel's ticks of 64 ns
    message = netlink.QueueMessage(inner.data)
    message.decode()
    assert (message["parent"], message["handle"], message.get_attr("TCA_KIND")) == (3 << 16 | 1, 4 << 16, "tbf")
    assert message.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_RATE64") == 10**7 // 8
    _, fifo = map(_decoded, netlink.queues(7, None, delay=0.005))
    assert (fifo.get_attr("TCA_KIND"), fifo.get_attr("TCA_OPTIONS")["limit"]) == ("pfifo", 1000)


@pytest.mark.usefixtures("lab_rights")
def test_a_missing_package_is_one_sentence() -> None:
    script = (
        "import sys; sys.modules['pyroute2'] = None; from thinwire.tools.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    for words in (["--check"], ["--", "true"]):
        argv = [sys.executable, "-c", script, "lab", *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("thinwire: the lab needs pyroute2, which the extra 'tools' brings")
        assert done.stderr.count("\n") == 1
