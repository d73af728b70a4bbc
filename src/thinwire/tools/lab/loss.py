"""Packet loss in the switch: rules of nftables, encoded as netlink messages by pyroute2.

    chain forward { meta mark set numgen random mod 1000000; ether saddr vmap @hosts; ether daddr vmap @hosts }
    map hosts { 02:77:00:00:00:04 : jump host3 }
    chain host3 { meta mark < 50000 drop }

The random number of a packet stays in its mark. Both links of the packet compare it, so that a packet is dropped with
the larger loss of its two links: if all hosts have the same loss, it is the loss between any two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyroute2.netlink import NETLINK_NETFILTER, NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE
from pyroute2.netlink.nfnetlink import NFNL_SUBSYS_NFTABLES, nfgen_msg, nftsocket
from pyroute2.netlink.nfnetlink.nftsocket import Cmp, Meta, Regs

from thinwire.tools.lab.netlink import Attribute, KernelRequest, encode
from thinwire.tools.lab.shaping import hardware

# Loss is drawn in parts per million.
_DICE = 1_000_000
_ADDRESS_BYTES, _VERDICT_BYTES = 6, 16
_DESTINATION, _SOURCE = 0, _ADDRESS_BYTES  # places in the header of a frame
_REGISTER = Regs.NFT_REG_1
# Numbers of the kernel's headers that pyroute2 does not name.
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_HOOK_FORWARD = 2
_LINK_LAYER = 0
_DROP, _ACCEPT, _JUMP = 0, 1, -3
_RANDOM, _TO_NETWORK_ORDER = 1, 1
_VERDICTS = 0xFFFFFF00  # the type of a map whose values are verdicts


@dataclass(frozen=True)
class FilterMessage:
    """One message of a transaction; `kind` is pyroute2's type of message, such as nft_rule_msg."""

    kind: Any
    number: int
    attributes: list[Attribute]
    table: str = "thinwire"
    family: int = nftsocket.NFPROTO_BRIDGE

    def encode(self, flags: int) -> bytes:
        """Return the bytes of the message."""
        name = "NAME" if self.kind is nftsocket.nft_table_msg else "TABLE"
        table = (f"{self.kind.prefix}{name}", self.table)
        number = NFNL_SUBSYS_NFTABLES << 8 | self.number
        return encode(self.kind(), number, flags, {"nfgen_family": self.family}, [table, *self.attributes])


def transaction(messages: Sequence[FilterMessage]) -> KernelRequest:
    """Return one request that carries out all messages or, if the kernel refuses one of them, none."""
    begin, end = (encode(nfgen_msg(), kind, 0, {"res_id": NFNL_SUBSYS_NFTABLES}) for kind in (_BATCH_BEGIN, _BATCH_END))
    # The kernel answers once: it reports the first error, or it acknowledges the last message.
    *most, last = messages
    add = NLM_F_CREATE | NLM_F_APPEND
    encoded = [*(message.encode(add) for message in most), last.encode(add | NLM_F_ACK)]
    return KernelRequest("use nftables", NETLINK_NETFILTER, b"".join([begin, *encoded, end]))


def loss_rules(losses: Mapping[int, float]) -> KernelRequest:
    """Return the request that replaces the rules of the switch by those for these losses."""
    lossy = {host: round(loss * _DICE) for host, loss in sorted(losses.items()) if loss > 0}
    # The table is created before it is removed, because the kernel refuses to remove a table that does not exist.
    numbers = [nftsocket.NFT_MSG_NEWTABLE, nftsocket.NFT_MSG_DELTABLE, *([nftsocket.NFT_MSG_NEWTABLE] if lossy else [])]
    messages = [FilterMessage(nftsocket.nft_table_msg, number, []) for number in numbers]
    if lossy:
        for host, parts in lossy.items():
            messages += [_chain(f"host{host}"), _rule(f"host{host}", *_drop_below(parts))]
        hook = {"attrs": [("NFTA_HOOK_HOOKNUM", _HOOK_FORWARD), ("NFTA_HOOK_PRIORITY", 0)]}
        base = [("NFTA_CHAIN_HOOK", hook), ("NFTA_CHAIN_TYPE", "filter"), ("NFTA_CHAIN_POLICY", _ACCEPT)]
        messages += [*_host_map(list(lossy)), _chain("forward", *base), _rule("forward", *_draw())]
        messages += [_rule("forward", *_look_up(place)) for place in (_SOURCE, _DESTINATION)]
    return transaction(messages)


def expression(name: str, **attributes: Any) -> Any:
    """Return an expression of a rule; `expression("cmp", OP=0)` has the attribute NFTA_CMP_OP."""
    prefix = "NG" if name == "numgen" else name.upper()
    data = [(f"NFTA_{prefix}_{key}", value) for key, value in attributes.items()]
    return {"attrs": [("NFTA_EXPR_NAME", name), ("NFTA_EXPR_DATA", {"attrs": data})]}


def _chain(name: str, *more: Attribute) -> FilterMessage:
    return FilterMessage(nftsocket.nft_chain_msg, nftsocket.NFT_MSG_NEWCHAIN, [("NFTA_CHAIN_NAME", name), *more])


def _rule(chain: str, *expressions: Any) -> FilterMessage:
    attributes = [("NFTA_RULE_CHAIN", chain), ("NFTA_RULE_EXPRESSIONS", list(expressions))]
    return FilterMessage(nftsocket.nft_rule_msg, nftsocket.NFT_MSG_NEWRULE, attributes)


def _draw() -> list[Any]:
    """Draw a packet's random number and keep it in the packet's mark."""
    draw = expression("numgen", DREG=_REGISTER, MODULUS=_DICE, TYPE=_RANDOM, OFFSET=0)
    return [draw, expression("meta", KEY=Meta.NFT_META_MARK, SREG=_REGISTER)]


def _look_up(place: int) -> list[Any]:
    """Continue in the chain of the host whose Ethernet address is at this place of the frame, if its link is lossy."""
    address = expression("payload", BASE=_LINK_LAYER, OFFSET=place, LEN=_ADDRESS_BYTES, DREG=_REGISTER)
    return [address, expression("lookup", SET="hosts", SREG=_REGISTER, DREG=Regs.NFT_REG_VERDICT)]


def _drop_below(parts: int) -> list[Any]:
    """Drop a packet whose mark is smaller; comparing byte by byte needs the most significant byte first."""
    order = {"OP": _TO_NETWORK_ORDER, "LEN": 4, "SIZE": 4}
    limit = {"attrs": [("NFTA_DATA_VALUE", parts.to_bytes(4, "big"))]}
    return [
        expression("meta", KEY=Meta.NFT_META_MARK, DREG=_REGISTER),
        expression("byteorder", SREG=_REGISTER, DREG=_REGISTER, **order),
        expression("cmp", SREG=_REGISTER, OP=Cmp.NFT_CMP_LT, DATA=limit),
        expression("immediate", DREG=Regs.NFT_REG_VERDICT, DATA=_verdict(_DROP)),
    ]


def _host_map(hosts: list[int]) -> list[FilterMessage]:
    """Return the messages that map the addresses of lossy hosts to their chains."""
    key = [("NFTA_SET_KEY_TYPE", nftsocket.DATA_TYPE_ETHERADDR), ("NFTA_SET_KEY_LEN", _ADDRESS_BYTES)]
    data = [("NFTA_SET_DATA_TYPE", _VERDICTS), ("NFTA_SET_DATA_LEN", _VERDICT_BYTES)]
    names = [("NFTA_SET_NAME", "hosts"), ("NFTA_SET_ID", 1), ("NFTA_SET_FLAGS", ["NFT_SET_MAP"]), *key, *data]
    elements = []
    for host in hosts:
        address = {"attrs": [("NFTA_DATA_VALUE", bytes.fromhex(hardware(host).replace(":", "")))]}
        elements.append(
            {"attrs": [("NFTA_SET_ELEM_KEY", address), ("NFTA_SET_ELEM_DATA", _verdict(_JUMP, f"host{host}"))]}
        )
    content = [("NFTA_SET_ELEM_LIST_SET", "hosts"), ("NFTA_SET_ELEM_LIST_ELEMENTS", elements)]
    return [
        FilterMessage(nftsocket.nft_set_msg, nftsocket.NFT_MSG_NEWSET, names),
        FilterMessage(nftsocket.nft_set_elem_list_msg, nftsocket.NFT_MSG_NEWSETELEM, content),
    ]


def _verdict(code: int, chain: str | None = None) -> Any:
    attributes = [("NFTA_VERDICT_CODE", code), *([("NFTA_VERDICT_CHAIN", chain)] if chain else [])]
    return {"attrs": [("NFTA_DATA_VERDICT", {"attrs": attributes})]}
