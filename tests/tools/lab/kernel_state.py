"""What the kernel says about a running lab, read by netlink: queues, devices, neighbours and counters of packets."""

from collections.abc import Iterator
from typing import Any

from pyroute2.netlink import NETLINK_NETFILTER, NETLINK_ROUTE, NLM_F_DUMP
from pyroute2.netlink.nfnetlink import NFNL_SUBSYS_NFTABLES, nftsocket
from pyroute2.netlink.nfnetlink.nftsocket import Cmp, Meta, Regs

from thinwire.tools.lab import Lab
from thinwire.tools.lab.loss import FilterMessage, expression, transaction
from thinwire.tools.lab.namespaces import SWITCH
from thinwire.tools.lab.netlink import KernelRequest, encode

_FAMILIES = {"bridge": nftsocket.NFPROTO_BRIDGE, "ip": nftsocket.NFPROTO_IPV4}
_HOOK = {"attrs": [("NFTA_HOOK_HOOKNUM", 2), ("NFTA_HOOK_PRIORITY", 1)]}


def dump(lab: Lab, where: int, protocol: int, number: int, kind: Any, **fields: Any) -> list[Any]:
    """Return all objects of one kind in a host or the SWITCH, decoded into messages of this kind of pyroute2."""
    request = KernelRequest("list", protocol, encode(kind(), number, NLM_F_DUMP, fields))
    return list(_decoded(lab._spaces.send(where, [request]), kind))


def _decoded(answer: bytes, kind: Any) -> Iterator[Any]:
    at = 0
    while at < len(answer):
        length = int.from_bytes(answer[at : at + 4], "little")
        message = kind(answer[at : at + length])
        message.decode()
        yield message
        at += (length + 3) & ~3


def routed(lab: Lab, where: int, number: int, kind: Any, **fields: Any) -> list[Any]:
    """Return all devices, addresses, neighbours or queues, as `dump` does."""
    return dump(lab, where, NETLINK_ROUTE, number, kind, **fields)


def count_forwarded(lab: Lab, family: str, *, longer_than: int | None = None) -> None:
    """Let nftables count the packets that the switch forwards, or those of them that are longer."""
    number, place = _FAMILIES[family], f"t{longer_than}"
    steps = [expression("counter")]
    if longer_than is not None:
        limit = {"attrs": [("NFTA_DATA_VALUE", longer_than.to_bytes(4, "big"))]}
        register = Regs.NFT_REG_1
        steps = [
            expression("meta", KEY=Meta.NFT_META_LEN, DREG=register),
            expression("byteorder", SREG=register, DREG=register, OP=1, LEN=4, SIZE=4),
            expression("cmp", SREG=register, OP=Cmp.NFT_CMP_GT, DATA=limit),
            *steps,
        ]
    chain = [("NFTA_CHAIN_NAME", "c"), ("NFTA_CHAIN_HOOK", _HOOK), ("NFTA_CHAIN_TYPE", "filter")]
    rule = [("NFTA_RULE_CHAIN", "c"), ("NFTA_RULE_EXPRESSIONS", steps)]
    messages = [
        FilterMessage(nftsocket.nft_table_msg, nftsocket.NFT_MSG_NEWTABLE, [], place, number),
        FilterMessage(nftsocket.nft_chain_msg, nftsocket.NFT_MSG_NEWCHAIN, chain, place, number),
        FilterMessage(nftsocket.nft_rule_msg, nftsocket.NFT_MSG_NEWRULE, rule, place, number),
    ]
    lab._spaces.send(SWITCH, [transaction(messages)])


def counted(lab: Lab) -> list[int]:
    """Return the packets counted by every rule with a counter, in the order in which the rules were added."""
    number = NFNL_SUBSYS_NFTABLES << 8 | nftsocket.NFT_MSG_GETRULE
    found = []
    for rule in dump(lab, SWITCH, NETLINK_NETFILTER, number, nftsocket.nft_rule_msg):
        for each in rule.get_attr("NFTA_RULE_EXPRESSIONS"):
            if each.get_attr("NFTA_EXPR_NAME") == "counter":
                found.append(each.get_attr("NFTA_EXPR_DATA").get_attr("NFTA_COUNTER_PACKETS"))
    return found
