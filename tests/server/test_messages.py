"""Messages: valid ones are read as they were sent, and anything else raises MessageError."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from thinwire.errors import MessageError
from thinwire.server.protocol import (
    COUNTS,
    Counter,
    HelloCheck,
    Message,
    MessageKind,
    Session,
    field,
    hello_of,
    parse,
    with_json,
)

with_bytes = st.sampled_from(
    [MessageKind.PUSH, MessageKind.DELTA, MessageKind.FULL, MessageKind.ACK, MessageKind.BUFFERS]
)
u32 = st.integers(0, 2**32 - 1)


@given(with_bytes, u32, u32, u32, st.integers(0, 2**48), st.integers(0, 2**64 - 1), st.binary(), st.integers(0, 65535))
def test_messages_round_trip(
    kind: MessageKind, session: int, layer: int, part: int, clock: int, number: int, body: bytes, n: int
) -> None:
    message = Message(kind, session, layer, part, clock, number, body, n)
    assert parse([memoryview(part) for part in message.parts(n)]) == message


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=64), max_size=4), st.binary(min_size=30, max_size=30), st.integers(0, 40))
def test_random_bytes_raise_nothing_but_message_errors(parts: list[bytes], tail: bytes, cut: int) -> None:
    head = bytes(with_json(MessageKind.HELLO, a=1).parts()[0])
    for candidate in (parts, [head[:6] + tail, *parts], [head[:cut], *parts], [head, *parts]):
        try:
            message = parse(candidate)
            if message.kind in (MessageKind.HELLO, MessageKind.HEARTBEAT):
                assert isinstance(message.json, dict)
        except MessageError:
            pass


@pytest.mark.parametrize(
    "body", [b"[1]", b"{", b"[" * 100_000, b"\xff\xfe", b'{"a": NaN}', b'{"a": ' + b"9" * 5000 + b"}", b"1" * (1 << 23)]
)
def test_invalid_json_is_refused(body: bytes) -> None:
    with pytest.raises(MessageError, match="HELLO"):
        _ = Message(MessageKind.HELLO, body=body).json


def test_lost_messages_are_noticed() -> None:
    sender, receiver = Counter(), Counter()
    for _ in range(COUNTS + 3):  # beyond the point where the count wraps around
        assert receiver.follows(Message(MessageKind.PUSH, count=sender.next(MessageKind.PUSH)))
    sender.next(MessageKind.PUSH)  # lost
    assert sender.next(MessageKind.LEAVE) == 0
    assert not receiver.follows(Message(MessageKind.HEARTBEAT, count=sender.next(MessageKind.HEARTBEAT)))
    assert receiver.follows(Message(MessageKind.HEARTBEAT, count=sender.next(MessageKind.HEARTBEAT)))


def test_fields_of_wrong_type_or_range_are_refused() -> None:
    with pytest.raises(MessageError, match="type int"):
        field({"a": True}, "a", int)
    with pytest.raises(MessageError, match="between 0"):
        field({"a": -1}, "a", int, 0)


TERMS: dict[str, Any] = {
    "slot": 0,
    "first": 3,
    "bound": 0,
    "policy": "forward",
    "window": 1000,
    "cut": 4,
    "timeout": 1.0,
    "accepted": None,
    "tell": {"push": "topk1"},
}


@pytest.mark.parametrize(
    "change",
    [
        {"slot": -1},
        {"first": 2**70},
        {"first": "x"},
        {"bound": -3},
        {"bound": 1.5},
        {"policy": "chaos"},
        {"window": 0},
        {"cut": -1},
        {"timeout": 0},
        {"timeout": 1e-9},
        {"timeout": 1e8},
        {"timeout": 10**400},
        {"timeout": "x"},
        {"accepted": {"session": 1, "steps": [1, "x"], "shards": []}},
        {"accepted": {"session": 1, "steps": [1], "shards": [[0, 1, [[0, None]]]]}},
        {"accepted": {"session": 1, "steps": [1], "shards": [[0, 1]]}},
        {"accepted": {"session": 1, "steps": [1]}},
        {"accepted": 5},
        {"tell": []},
        {"tell": {"push": ["topk1"]}},
        {"tell": {"push": "no such codec"}},
    ],
)
def test_invalid_terms_are_refused(change: dict[str, Any]) -> None:
    Session(1, TERMS, nn.Linear(4, 4))
    with pytest.raises(MessageError):
        Session(1, {**TERMS, **change}, nn.Linear(4, 4))


def test_a_cut_in_too_many_parts_is_refused_before_memory_is_used() -> None:
    with pytest.raises(MessageError, match="too many"):
        Session(1, {**TERMS, "cut": 1}, nn.Linear(1000, 1000))


def greet(model: nn.Module, check: HelloCheck, recipe: str = "r", **changes: Any) -> None:
    hello = {**hello_of(model, recipe, None, "me"), **changes}
    check.applicant(Message(MessageKind.HELLO, body=json.dumps(hello).encode()))


def test_a_refused_hello_names_what_differs() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    net[0].bias.requires_grad_(False)
    check = HelloCheck("r", net)
    greet(net, check)
    other = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    cases: list[tuple[nn.Module, dict[str, Any], str]] = [
        (net, {"recipe": "digits"}, "the worker trains the recipe 'digits', the server 'r'"),
        (net, {"version": "0.0"}, "runs thinwire 0.0"),
        (net, {"token": "x"}, "token"),
        (net, {"slot": 10**9}, "slot"),
        (net, {"parameters": [["0.weight", [4]]]}, "0.weight has the shape"),
        (net, {"parameters": "x"}, "parameters"),
        (net, {"buffers": []}, "a buffer 1.running_mean that the worker's lacks"),
        (net, {"frozen": {}}, "0.bias is frozen on one side only"),
        (nn.Sequential(nn.Linear(4, 3)), {}, "1.weight that the worker's lacks"),
        (other, {}, "a parameter 0.bias that the server's lacks"),
    ]
    for model, changes, reason in cases:
        with pytest.raises(MessageError, match=reason):
            greet(model, check, **changes)
    other[0].bias.requires_grad_(False)
    with pytest.raises(MessageError, match=r"the frozen parameter 0\.bias has other values"):
        greet(other, check)
    other.load_state_dict(net.state_dict())
    greet(other, check)
