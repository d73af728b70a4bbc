"""State: saved links, their mean over ranks, and what a rank may load.

What matters to training is the mean residual: it is preserved under any change of the number of workers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.exchange.channel import Channel, gather_json
from thinwire.link.rounds import change_of, check_pace
from thinwire.link.shards import Shards, is_shard, join_states

LinkState = dict[str, Any]

STATE_VERSION = 2

# The fields of a state and their types; None stands for "any rank" in a merged state.
_FIELDS: dict[str, tuple[type, ...]] = {
    "world_size": (int, type(None)),
    "rank": (int, type(None)),
    "weight": (int, type(None)),
    "step": (int,),
    "codec": (dict,),
    "exchange": (dict,),
    "units": (dict,),
    "buckets": (list,),
}


def check_state(state: Any) -> None:
    """ValueError unless this is a link's state of this version, complete and of the right types."""
    version = state.get("version") if isinstance(state, dict) else None
    if version == 1:
        raise ValueError(
            "the link's state was saved by thinwire 0.1, whose states this version does not read: "
            "continue without it (the residual starts at zero), or finish the run with thinwire 0.1"
        )
    if version != STATE_VERSION:
        raise ValueError(
            f"this is no state of a link that this thinwire reads: its version is {version!r}, not {STATE_VERSION}"
        )
    missing = [key for key in _FIELDS if key not in state]
    if isinstance(state.get("codec"), dict) and "residuals" not in state["codec"]:
        missing.append("the codec's residuals")
    if missing:
        raise ValueError(f"the link's state lacks {', '.join(missing)}: load it as state_dict() returned it")
    wrong = [key for key, types in _FIELDS.items() if not isinstance(state[key], types)]
    residuals = state["codec"]["residuals"] if "codec" not in wrong else {}
    wrong += [] if "codec" in wrong or _are_residuals(residuals) else ["the codec's residuals"]
    wrong += [] if "exchange" in wrong or _is_table(state["exchange"], dict) else ["exchange"]
    wrong += [] if "buckets" in wrong or all(_is_names(names) for names in state["buckets"]) else ["buckets"]
    wrong += [] if "step" in wrong or state["step"] >= 0 else ["step"]
    wrong += [] if is_shard(state.get("shard")) else ["shard"]
    if wrong:
        raise ValueError(f"the link's state has an invalid {wrong[0]}: load it as state_dict() returned it")


def _is_table(value: object, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, kind) for k, v in value.items())


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _are_residuals(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(n, str) and _is_table(s, Tensor) for n, s in value.items())


def merge_states(states: Sequence[LinkState]) -> LinkState:
    """The mean of all ranks' states, for any number of workers; needs no process group.

    States of sharded models are joined to those of the full parameters. A parameter for which a rank has no residual
    counts as zeros there. Thresholds that selections learned and message sizes that ranks agreed on are not averaged: a
    run finds them again within a few steps.
    """
    if not states:
        raise ValueError("there are no states to merge")
    for state in states:
        check_state(state)
    parts = sorted({state["shard"]["index"] for state in states if state.get("shard") is not None})
    if parts:
        return join_states([_merge_replicas([s for s in states if _part(s) == part]) for part in parts])
    return _merge_replicas(states)


def _part(state: LinkState) -> int | None:
    shard = state.get("shard")
    return None if shard is None else int(shard["index"])


def _merge_replicas(states: Sequence[LinkState]) -> LinkState:
    """The mean of the states of all replicas of the same parameters, or of the same parts of them."""
    steps = {state["step"] for state in states}
    if len(steps) > 1:
        raise ValueError(f"the states are of different steps ({sorted(steps)}): they are not of one checkpoint")
    ranks = sorted(-1 if state["rank"] is None else state["rank"] for state in states)
    if ranks != list(range(states[0]["world_size"] or 0)):
        raise ValueError(
            f"these are the states of ranks {ranks}, of {states[0]['world_size']} that saved theirs: "
            "give each rank's state once"
        )
    mean: dict[str, dict[str, Tensor]] = {}
    for state in sorted(states, key=lambda s: int(s["rank"])):
        weight = state["weight"] / len(states)
        for name, slots in whole_residuals(state).items():
            into = mean.setdefault(name, {})
            for slot, tensor in slots.items():
                into[slot] = into[slot] + weight * tensor.cpu() if slot in into else weight * tensor.cpu()
    merged = _for_any_rank(states[0], mean)
    if states[0].get("updates") is not None:
        merged["updates"] = _merged_updates([state["updates"] for state in states])
    return merged


def _merged_updates(updates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The shared parameters, which are equal, and the mean of the optimizers' states."""
    first = updates[0]
    for other in updates[1:]:
        if any(not torch.equal(first["shared"][name], t) for name, t in other["shared"].items()):
            raise ValueError("the states differ in their shared parameters: they are not of one checkpoint")
    return {**_between_rounds(first), "optimizers": _mean_of([each["optimizers"] for each in updates])}


def whole_residuals(state: LinkState) -> dict[str, dict[str, Tensor]]:
    """The residuals of a state, with what an unfinished round of local steps has changed."""
    found = {name: dict(slots) for name, slots in state["codec"]["residuals"].items()}
    updates = state.get("updates") or {}
    check_pace(updates.get("pace"))
    weight = (updates.get("pace") or {}).get("weight", 1.0)
    for name, start in (updates.get("round") or {}).get("starts", {}).items():
        change = change_of(start.cpu(), updates["round"]["local"][name].cpu()) * weight
        slots = found.setdefault(name, {})
        slots["residual"] = slots["residual"].cpu() + change if "residual" in slots else change
    return found


def _between_rounds(updates: dict[str, Any]) -> dict[str, Any]:
    """The state of updates at the beginning of a round, once the residuals hold what the last one changed.

    A rank's weight in a round by time is its own: every rank begins with 1.
    """
    updates = {key: value for key, value in updates.items() if key != "pace"}
    if not isinstance(taken := (updates.get("round") or {}).get("taken"), list):
        return updates
    begun = {"taken": [0] * len(taken), "stepped": [False] * len(taken), "local": {}, "starts": {}}
    return {**updates, "round": begun}


def _mean_of(values: Sequence[Any]) -> Any:
    """The element-wise mean of equally shaped trees; what is not a floating-point tensor is the first one's."""
    first = values[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _mean_of([v[key] for v in values if key in v]) for key in keys}
    if isinstance(first, list | tuple):
        return [_mean_of(list(each)) for each in zip(*values, strict=True)]
    if isinstance(first, Tensor) and first.is_floating_point():
        return torch.stack([v.cpu() for v in values]).mean(0)
    return first


def _for_any_rank(state: LinkState, residuals: dict[str, dict[str, Tensor]]) -> LinkState:
    """A state that every rank may start from."""
    codec = {**state["codec"], "residuals": residuals, "selection": {}}
    return {**state, "world_size": None, "rank": None, "weight": None, "codec": codec, "exchange": {}, "buckets": []}


def mean_link_state(
    channel: Channel, state: LinkState, parameters: Mapping[str, Tensor], slots: Sequence[str]
) -> LinkState:
    """The mean of all ranks' states over a process group: one reduction per tensor, so that no rank holds all."""
    mine = whole_residuals(state)
    mean: dict[str, dict[str, Tensor]] = {}
    # Ranks may have created residuals in different orders, or not at all: the order of the parameters is common.
    for name, parameter in parameters.items():
        for slot in slots:
            kept = mine.get(name, {}).get(slot)
            part = torch.zeros(parameter.numel()) if kept is None else kept.cpu() * (state["weight"] / channel.world)
            part = part.to(channel.device)
            channel.all_reduce(part)
            mean.setdefault(name, {})[slot] = part.cpu()
    found = _for_any_rank(state, mean)
    if state.get("updates") is not None:
        optimizers = [_mean_over_ranks(channel, each, parameters) for each in state["updates"]["optimizers"]]
        found["updates"] = {**_between_rounds(state["updates"]), "optimizers": optimizers}
    return found


def _mean_over_ranks(channel: Channel, mine: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """The mean of all ranks' optimizer states, one reduction per tensor.

    A rank on which a parameter never had a gradient has no state for it: the mean is over those that have one.
    """
    found: dict[str, Any] = {name: dict(mine.get(name, {})) for name in parameters}
    shapes = {n: {k: list(t.shape) for k, t in s.items() if _is_float(t)} for n, s in found.items()}
    rows = gather_json(channel, shapes)
    for name in parameters:
        for key in dict.fromkeys(key for row in rows for key in row[name]):
            shape = next(row[name][key] for row in rows if key in row[name])
            owners = sum(key in row[name] for row in rows)
            own = found[name].get(key)
            part = (torch.zeros(shape) if own is None else own.float().cpu() / owners).to(channel.device)
            channel.all_reduce(part)
            found[name][key] = part.cpu()
    return {name: state for name, state in found.items() if state}


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def load_link_state(
    state: LinkState | Sequence[LinkState], rank: int, world: int, weight: int, parameters: Mapping[str, Tensor]
) -> LinkState:
    """The state that this rank loads; ValueError says what does not fit and what to give instead."""
    if isinstance(state, (list, tuple)):
        if not state:
            raise ValueError("there are no states to merge")
        for each in state:
            check_state(each)
        own = next((s for s in state if s["rank"] == rank), None)
        # With another number of workers, or an exchange that keeps residuals on other ranks, only the mean fits.
        fits = len(state) == world and own is not None and own["weight"] == weight
        # All are of the same part of the parameters, if the model is sharded.
        state = own if fits and own is not None else _merge_replicas(state)
    check_state(state)
    assert isinstance(state, dict)
    if state["rank"] is not None and (state["world_size"], state["rank"], state["weight"]) != (world, rank, weight):
        raise ValueError(
            f"the state is that of rank {state['rank']} of {state['world_size']} and this is rank {rank} of {world}, "
            "or its exchange kept residuals on other ranks: load the list of all ranks' states, or one made with "
            "state_dict(gather=True)"
        )
    for name, slots in state["codec"]["residuals"].items():
        if name not in parameters:
            raise ValueError(
                f"the state holds a residual for {name!r}, which is not a parameter in training here; "
                "strict=False leaves it out"
            )
        for tensor in slots.values():
            if tensor.numel() != parameters[name].numel() or not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name}: the saved residual has another size, or is not finite")
    return state


def fit_shards(state: LinkState | Sequence[LinkState], shards: Shards | None) -> LinkState | Sequence[LinkState]:
    """A state, or states, of the part of the parameters that this rank holds; ValueError says what to load instead."""
    if isinstance(state, (list, tuple)):
        for each in state:
            check_state(each)
        described = [each.get("shard") for each in state]
        if shards is None and not any(described):
            return state
        if shards is not None and all(d is not None and d["count"] == shards.count for d in described):
            return [each for each in state if _part(each) == shards.index]
        return fit_shards(merge_states(state), shards)
    check_state(state)
    assert isinstance(state, dict)
    shard = state.get("shard")
    if shard is None:
        return state if shards is None else shards.part_of(state)
    if shards is None or (shard["index"], shard["count"]) != (shards.index, shards.count):
        here = "whole parameters" if shards is None else f"part {shards.index} of {shards.count}"
        raise ValueError(
            f"the state holds part {shard['index']} of {shard['count']} of every parameter and this rank {here}: load "
            "the list of all ranks' states, or one made with state_dict(gather=True)"
        )
    return state


def without_unknown(
    state: LinkState | Sequence[LinkState], parameters: Mapping[str, Tensor]
) -> LinkState | list[LinkState]:
    """The state, or states, without residuals of parameters that are not in training here."""
    if isinstance(state, (list, tuple)):
        return [_known(s, parameters) for s in state]
    check_state(state)
    assert isinstance(state, dict)
    return _known(state, parameters)


def _known(state: LinkState, parameters: Mapping[str, Tensor]) -> LinkState:
    check_state(state)
    known = {name: slots for name, slots in state["codec"]["residuals"].items() if name in parameters}
    found = {**state, "codec": {**state["codec"], "residuals": known}}
    if isinstance(updates := state.get("updates"), dict) and isinstance(updates.get("shared"), dict):
        shared = {name: t for name, t in updates["shared"].items() if name in parameters}
        found["updates"] = {**updates, "shared": shared}
        found["exchange"] = {}  # the bases of a model with other parameters; new ones are found within a few steps
    return found
