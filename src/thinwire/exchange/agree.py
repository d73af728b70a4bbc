"""Agreement: what all ranks must have in common is compared before anything is exchanged.

Descriptions travel as JSON, never as pickles; all ranks see all descriptions, so all raise, with the same words.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from thinwire.errors import LinkError
from thinwire.exchange.channel import Channel

T = TypeVar("T")


def gather_json(channel: Channel, value: Any) -> list[Any]:
    """Everybody's value, in rank order."""
    data = json.dumps(value).encode()
    length = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
    lengths = [int(t.clone().view(torch.int64)[0]) for t in channel.all_gather(length)]
    message = torch.zeros(max(lengths), dtype=torch.uint8)
    message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    gathered = channel.all_gather(message)
    return [json.loads(m[:n].numpy().tobytes()) for m, n in zip(gathered, lengths, strict=True)]


def agreed(channel: Channel, prepare: Callable[[], T], describe: Callable[[T], dict[str, Any]]) -> T:
    """What `prepare` makes, if all ranks can make it and describe it alike; otherwise all ranks raise."""
    try:
        made = prepare()
        description = describe(made)
    except Exception as error:
        gather_json(channel, {"error": f"{error}"})  # the others wait for this rank: let them raise too
        raise
    everybody = gather_json(channel, description)
    for rank, other in enumerate(everybody):
        if "error" in other:
            raise LinkError(f"rank {rank} cannot attach: {other['error']}")
    for rank, other in enumerate(everybody):
        for key, value in everybody[0].items():
            if other.get(key) != value:
                raise LinkError(f"rank {rank} differs from rank 0 in {_difference(key, value, other.get(key))}")
    return made


def _difference(key: str, ours: Any, theirs: Any) -> str:
    if key != "parameters":
        return f"{key}: {theirs} against {ours}; give every rank the same"
    if len(ours) != len(theirs):
        missing = sorted({name for name, *_ in ours} ^ {name for name, *_ in theirs})
        return f"the number of parameters: {len(theirs)} against {len(ours)} ({', '.join(missing[:3])} not on both)"
    first = next((a, b) for a, b in zip(ours, theirs, strict=True) if a != b)
    return f"a parameter: {' '.join(map(str, first[1]))} against {' '.join(map(str, first[0]))}"
