"""States: saved links, their mean over ranks, and what a rank may load.

The mean residual is what matters to training: it survives any change of the number of workers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.exchange.channel import Channel

LinkState = dict[str, Any]


def merge_states(states: Sequence[LinkState]) -> LinkState:
    """The mean of all ranks' states, for any number of workers; needs no process group.

    A parameter that a rank has no memory of counts as zeros there. Thresholds that selections learned and sizes
    that ranks agreed on are not averaged: they are found again within a few steps.
    """
    if not states:
        raise ValueError("there are no states to merge")
    steps = {state["step"] for state in states}
    if len(steps) > 1:
        raise ValueError(f"the states are of different steps ({sorted(steps)}): they are not of one checkpoint")
    memory: dict[str, dict[str, Tensor]] = {}
    for state in states:
        for name, slots in state["codec"]["memory"].items():
            for slot, tensor in slots.items():
                into = memory.setdefault(name, {})
                into[slot] = into[slot] + tensor.cpu() if slot in into else tensor.cpu().clone()
    for slots in memory.values():
        for tensor in slots.values():
            tensor /= len(states)
    codec = {**states[0]["codec"], "memory": memory, "selection": {}}
    return {**states[0], "world_size": None, "rank": None, "codec": codec, "exchange": {}}


def mean_link_state(channel: Channel, state: LinkState) -> LinkState:
    """The same over a process group: one reduction per tensor, so that no rank holds all memories."""
    merged = merge_states([state])
    memory: dict[str, dict[str, Tensor]] = merged["codec"]["memory"]
    for slots in memory.values():
        for slot, tensor in slots.items():
            on_device = tensor.to(channel.device) / channel.world
            channel.all_reduce(on_device)
            slots[slot] = on_device.cpu()
    return merged


def load_link_state(
    state: LinkState | Sequence[LinkState], rank: int, world: int, parameters: Mapping[str, Tensor]
) -> LinkState:
    """What this rank takes over; ValueError says what does not fit and what to give instead."""
    if not isinstance(state, dict):
        states = sorted(state, key=lambda s: int(s["rank"]))
        if len(states) != states[0]["world_size"]:
            raise ValueError(f"{len(states)} states were given, but {states[0]['world_size']} ranks saved them")
        state = states[rank] if len(states) == world else merge_states(states)
    if state.get("version") != 1:
        raise ValueError(f"the link's state has version {state.get('version')!r}, this thinwire reads 1")
    if state["world_size"] not in (None, world):
        raise ValueError(
            f"the state was saved by one of {state['world_size']} ranks and there are {world} now: "
            "load the list of all ranks' states, or one made with state_dict(gather=True)"
        )
    for name, slots in state["codec"]["memory"].items():
        if name not in parameters:
            raise ValueError(f"the state holds a memory for {name!r}, which this model does not have")
        for tensor in slots.values():
            if tensor.numel() != parameters[name].numel() or not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name}: the saved memory has another size, or is not finite")
    return state
