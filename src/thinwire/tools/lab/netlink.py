"""Requests that configure devices, addresses and queues, encoded as netlink messages by pyroute2.

The holder sends them from inside a namespace. Names such as IFLA_IFNAME are those of the kernel's headers. Importing
pyroute2 takes a tenth of a second, so that only what builds a network imports this module.
"""

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pyroute2.netlink import NETLINK_ROUTE, NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, nla
from pyroute2.netlink.rtnl import RTM_NEWADDR, RTM_NEWLINK, RTM_NEWNEIGH, RTM_NEWQDISC, TC_H_ROOT
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import IFF_UP, ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import NTF_MASTER, NUD_NOARP, NUD_PERMANENT, ndmsg
from pyroute2.netlink.rtnl.tcmsg import sched_tbf, tcmsg
from pyroute2.netlink.rtnl.tcmsg.common import time2tick

from thinwire.tools.lab import shaping

_ADD, _REPLACE = NLM_F_CREATE | NLM_F_EXCL, NLM_F_CREATE | NLM_F_REPLACE
# Handles of the queues, by kind. A queue of another kind needs another handle, or the kernel refuses to replace it.
_TBF, _NOQUEUE, _NETEM, _DELAYED_TBF, _DELAYED_FIFO = (number << 16 for number in range(1, 6))
_ETHERNET = 1  # the link layer whose frames a token bucket counts
_MOST_32 = 2**32 - 1

Attribute = tuple[str, Any]


@dataclass(frozen=True)
class KernelRequest:
    """One encoded request to the kernel; `what` completes the sentence "the kernel refused to ..."."""

    what: str
    protocol: int
    data: bytes


class QueueMessage(tcmsg):  # type: ignore[misc]
    """pyroute2's message about a queue, with a token bucket in bytes and of any rate."""

    class bucket_options(nla):  # type: ignore[misc]  # noqa: N801
        """The options of tbf, with those that pyroute2 lacks and without its table of transmission times."""

        nla_map = (
            *(("TCA_TBF_UNSPEC", "none"), ("TCA_TBF_PARMS", "parameters"), ("TCA_TBF_RTAB", "hex")),
            *(("TCA_TBF_PTAB", "hex"), ("TCA_TBF_RATE64", "uint64"), ("TCA_TBF_PRATE64", "uint64")),
            ("TCA_TBF_BURST", "uint32"),
        )

        class parameters(nla):  # type: ignore[misc]  # noqa: N801
            """The fixed part of the options."""

            fields = sched_tbf.options.tbf_parms.fields

    @staticmethod
    def get_options(self: Any, *arguments: Any, **more: Any) -> Any:
        """Return the type of the options; pyroute2 calls this while it encodes a message."""
        if self.get_attr("TCA_KIND") == "tbf":
            return QueueMessage.bucket_options
        return tcmsg.get_options(self, *arguments, **more)


def encode(
    message: Any, kind: int, flags: int, fields: Mapping[str, Any], attributes: Iterable[Attribute] = ()
) -> bytes:
    """Fill a message of pyroute2 and return its bytes."""
    message.update(fields)
    message["attrs"] = list(attributes)
    message["header"].update(type=kind, flags=NLM_F_REQUEST | flags)
    message.encode()
    return bytes(message.data)


def _route(
    what: str, message: Any, kind: int, flags: int, fields: Mapping[str, Any], *names: Attribute
) -> KernelRequest:
    return KernelRequest(what, NETLINK_ROUTE, encode(message, kind, NLM_F_ACK | flags, fields, names))


def _info(kind: str, *data: Attribute, member: bool = False) -> Attribute:
    """Return the attribute with a device's kind and what belongs to it; `member` is the part of a bridge's port."""
    part = "IFLA_INFO_SLAVE" if member else "IFLA_INFO"
    return "IFLA_LINKINFO", {"attrs": [(f"{part}_KIND", kind), (f"{part}_DATA", {"attrs": list(data)})]}


def add_switch() -> KernelRequest:
    """Create the switch: a bridge that forwards at once, without the spanning tree protocol and multicast groups."""
    settings = (("IFLA_BR_STP_STATE", 0), ("IFLA_BR_FORWARD_DELAY", 0), ("IFLA_BR_MCAST_SNOOPING", 0))
    fields = {"index": shaping.SWITCH_INDEX, "flags": IFF_UP, "change": IFF_UP}
    names = ("IFLA_IFNAME", "switch"), _info("bridge", *settings)
    return _route("create a bridge", ifinfmsg(), RTM_NEWLINK, _ADD, fields, *names)


def add_cable(host: int, namespace: int) -> KernelRequest:
    """Create a veth pair: a port in the namespace of the switch, and an interface in that of the host.

    Args:
        host: number of the host.
        namespace: file descriptor of the host's network namespace in the process that sends the request.
    """
    # TCP builds packets of many segments even where a device has no offloads, unless their size is limited.
    peer: dict[str, Any] = {"index": shaping.INTERFACE_INDEX}
    peer["attrs"] = [
        ("IFLA_IFNAME", shaping.INTERFACE),
        ("IFLA_ADDRESS", shaping.hardware(host)),
        ("IFLA_GSO_MAX_SEGS", shaping.BUNDLE),
        ("IFLA_NET_NS_FD", namespace),
    ]
    names = ("IFLA_IFNAME", shaping.port(host)), ("IFLA_GSO_MAX_SEGS", 1), _info("veth", ("VETH_INFO_PEER", peer))
    return _route("create a veth pair", ifinfmsg(), RTM_NEWLINK, _ADD, {"index": shaping.port_index(host)}, *names)


def add_port(host: int) -> list[KernelRequest]:
    """Attach a host's port to the switch, which neither learns nor floods: it is told where the host is."""
    index = shaping.port_index(host)
    place = {"family": socket.AF_BRIDGE, "ifindex": index, "state": NUD_NOARP, "flags": NTF_MASTER}
    address = ("NDA_LLADDR", shaping.hardware(host))
    return [*attach(index), _route("add a forwarding entry", ndmsg(), RTM_NEWNEIGH, _ADD, place, address)]


def attach(index: int) -> list[KernelRequest]:
    """Make a device a port of the switch and turn it on."""
    up = {"index": index, "flags": IFF_UP, "change": IFF_UP}
    quiet = [(f"IFLA_BRPORT_{name}", 0) for name in ("LEARNING", "UNICAST_FLOOD", "MCAST_FLOOD")]
    return [
        _route("attach a port", ifinfmsg(), RTM_NEWLINK, 0, up, ("IFLA_MASTER", shaping.SWITCH_INDEX)),
        _set_port(index, *quiet),
    ]


def isolate(host: int) -> KernelRequest:
    """Let the switch forward between a host's port and the delay line's only, not to other hosts' ports."""
    return _set_port(shaping.port_index(host), ("IFLA_BRPORT_ISOLATED", 1))


def _set_port(index: int, *settings: Attribute) -> KernelRequest:
    data = _info("bridge_slave", *settings, member=True)
    return _route("set up a port", ifinfmsg(), RTM_NEWLINK, 0, {"index": index}, data)


def add_address(host: int) -> list[KernelRequest]:
    """Give a host its address and turn its interface and loopback on."""
    up = {"index": shaping.INTERFACE_INDEX, "flags": IFF_UP, "change": IFF_UP}
    fields = {"family": socket.AF_INET, "prefixlen": 24, "index": shaping.INTERFACE_INDEX}
    names = [(name, shaping.address(host)) for name in ("IFA_LOCAL", "IFA_ADDRESS")]
    return [
        _route("turn the loopback on", ifinfmsg(), RTM_NEWLINK, 0, {**up, "index": 1}),
        _route("add an address", ifaddrmsg(), RTM_NEWADDR, _ADD, fields, *names),
        _route("turn an interface on", ifinfmsg(), RTM_NEWLINK, 0, up),
    ]


def add_neighbour(host: int) -> KernelRequest:
    """Tell any other host the Ethernet address of this one, so that no ARP is needed."""
    fields = {"family": socket.AF_INET, "ifindex": shaping.INTERFACE_INDEX, "state": NUD_PERMANENT}
    names = ("NDA_DST", shaping.address(host)), ("NDA_LLADDR", shaping.hardware(host))
    return _route("add a neighbour", ndmsg(), RTM_NEWNEIGH, _REPLACE, fields, *names)


def turn(index: int, *, on: bool) -> KernelRequest:
    """Turn a device on or off."""
    fields = {"index": index, "flags": IFF_UP if on else 0, "change": IFF_UP}
    return _route(f"turn a device {'on' if on else 'off'}", ifinfmsg(), RTM_NEWLINK, 0, fields)


def queues(index: int, rate: int | None, *, delay: float = 0.0, loss: float = 0.0) -> list[KernelRequest]:
    """Shape what leaves a device by a token bucket; netem does the delay and the loss, if any."""
    if not delay and not loss:
        return [_bucket(index, rate, TC_H_ROOT, _TBF) if rate else _queue("noqueue", index, TC_H_ROOT, _NOQUEUE)]
    options = {
        "limit": shaping.delayed_packets(rate, delay),
        "delay": round(time2tick(round(delay * 1e6))),
        "loss": round(loss * _MOST_32),
        **dict.fromkeys(("gap", "duplicate", "jitter"), 0),
    }
    outer, inside = _queue("netem", index, TC_H_ROOT, _NETEM, options), _NETEM | 1
    if rate:
        return [outer, _bucket(index, rate, inside, _DELAYED_TBF)]
    return [outer, _queue("pfifo", index, inside, _DELAYED_FIFO, {"limit": 1000})]


def _bucket(index: int, rate: int, parent: int, handle: int) -> KernelRequest:
    burst, queue = shaping.bucket(rate)
    fixed = dict.fromkeys((name for name, _ in QueueMessage.bucket_options.parameters.fields), 0)
    # The 64-bit rate and the burst in bytes replace the older fields, whose units are coarser.
    fixed |= {"rate": min(rate // 8, _MOST_32), "limit": min(queue + burst, _MOST_32), "rate___reserved": _ETHERNET}
    names = [("TCA_TBF_PARMS", fixed), ("TCA_TBF_RATE64", rate // 8), ("TCA_TBF_BURST", burst)]
    return _queue("tbf", index, parent, handle, {"attrs": names})


def _queue(kind: str, index: int, parent: int, handle: int, options: Mapping[str, Any] | None = None) -> KernelRequest:
    fields = {"index": index, "parent": parent, "handle": handle}
    names = [("TCA_KIND", kind), *([("TCA_OPTIONS", dict(options))] if options else [])]
    return _route(f"use the queue {kind}", QueueMessage(), RTM_NEWQDISC, _REPLACE, fields, *names)
