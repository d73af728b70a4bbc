"""States: saved links, their mean over ranks, and what a rank may load.

The mean residual is what matters to training: it survives any change of the number of workers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.exchange.channel import Channel

LinkState = dict[str, Any]

_KEYS = ("world_size", "rank", "weight", "step", "codec", "exchange", "units", "buckets")


def _check_whole(state: Any) -> None:
    """ValueError unless this is a link's state of this version, with all that belongs to it."""
    if not isinstance(state, dict) or state.get("version") != 1:
        version = state.get("version") if isinstance(state, dict) else state
        raise ValueError(f"the link's state has version {version!r}, this thinwire reads 1")
    missing = [key for key in _KEYS if key not in state]
    if not missing and not (isinstance(state["codec"], dict) and "residuals" in state["codec"]):
        missing = ["the codec's memory"]
    if missing:
        raise ValueError(f"the link's state lacks {', '.join(missing)}: load it as state_dict() returned it")


def merge_states(states: Sequence[LinkState]) -> LinkState:
    """The mean of all ranks' states, for any number of workers; needs no process group.

    A parameter that a rank has no memory of counts as zeros there. Thresholds that selections learned and sizes
    that ranks agreed on are not averaged: they are found again within a few steps.
    """
    if not states:
        raise ValueError("there are no states to merge")
    for state in states:
        _check_whole(state)
    steps = {state["step"] for state in states}
    if len(steps) > 1:
        raise ValueError(f"the states are of different steps ({sorted(steps)}): they are not of one checkpoint")
    ranks = sorted(-1 if state["rank"] is None else int(state["rank"]) for state in states)
    if ranks != list(range(states[0]["world_size"] or 0)):
        raise ValueError(
            f"these are the states of ranks {ranks}, of {states[0]['world_size']} that saved theirs: "
            "give each rank's state once"
        )
    memory: dict[str, dict[str, Tensor]] = {}
    for state in sorted(states, key=lambda s: int(s["rank"])):
        share = state["weight"] / len(states)
        for name, slots in state["codec"]["residuals"].items():
            for slot, tensor in slots.items():
                into = memory.setdefault(name, {})
                into[slot] = into[slot] + share * tensor.cpu() if slot in into else share * tensor.cpu()
    return _shared(states[0], memory)


def _shared(state: LinkState, memory: dict[str, dict[str, Tensor]]) -> LinkState:
    """The state that every rank may start from."""
    codec = {**state["codec"], "residuals": memory, "selection": {}}
    return {**state, "world_size": None, "rank": None, "weight": None, "codec": codec, "exchange": {}, "buckets": []}


def mean_link_state(
    channel: Channel, state: LinkState, parameters: Mapping[str, Tensor], slots: Sequence[str]
) -> LinkState:
    """The same over a process group: one reduction per tensor, so that no rank holds all memories."""
    mine = state["codec"]["residuals"]
    memory: dict[str, dict[str, Tensor]] = {}
    # Ranks may have opened memories in different orders, or not at all: the parameters' order is everybody's.
    for name, parameter in parameters.items():
        for slot in slots:
            held = mine.get(name, {}).get(slot)
            share = torch.zeros(parameter.numel()) if held is None else held.cpu() * (state["weight"] / channel.world)
            share = share.to(channel.device)
            channel.all_reduce(share)
            memory.setdefault(name, {})[slot] = share.cpu()
    return _shared(state, memory)


def load_link_state(
    state: LinkState | Sequence[LinkState], rank: int, world: int, weight: int, parameters: Mapping[str, Tensor]
) -> LinkState:
    """What this rank takes over; ValueError says what does not fit and what to give instead."""
    if isinstance(state, dict):
        _check_whole(state)
    else:
        merged = merge_states(state)
        own = next((s for s in state if s["rank"] == rank), None)
        # Another number of workers, or an exchange that keeps memories elsewhere: only the mean can be taken over.
        fits = len(state) == world and own is not None and own["weight"] == weight
        state = own if fits and own is not None else merged
    if state["rank"] is not None and (state["world_size"], state["rank"], state["weight"]) != (world, rank, weight):
        raise ValueError(
            f"the state is that of rank {state['rank']} of {state['world_size']} and this is rank {rank} of {world}, "
            "or its exchange kept memories elsewhere: load the list of all ranks' states, or one made with "
            "state_dict(gather=True)"
        )
    for name, slots in state["codec"]["residuals"].items():
        if name not in parameters:
            raise ValueError(
                f"the state holds a memory for {name!r}, which is not a parameter in training here; "
                "strict=False leaves it out"
            )
        for tensor in slots.values():
            if tensor.numel() != parameters[name].numel() or not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name}: the saved memory has another size, or is not finite")
    return state


def without_strangers(
    state: LinkState | Sequence[LinkState], parameters: Mapping[str, Tensor]
) -> LinkState | list[LinkState]:
    """The state, or states, without memories of parameters that are not in training here."""
    if not isinstance(state, dict):
        return [_known(s, parameters) for s in state]
    return _known(state, parameters)


def _known(state: LinkState, parameters: Mapping[str, Tensor]) -> LinkState:
    _check_whole(state)
    memory = {name: slots for name, slots in state["codec"]["residuals"].items() if name in parameters}
    return {**state, "codec": {**state["codec"], "residuals": memory}}
