"""Theory: what the proofs of Alistarh et al. speak of, taken from all workers' gradients and memories on the way."""

import torch
from torch import Tensor

from thinwire.codec.codec import Codec
from thinwire.reproduce.cluster import Cluster, Gradients, Probe
from thinwire.reproduce.runs import Curve


def note(curve: Curve, cluster: Cluster, density: float) -> Probe:
    """Note xi, delta and the largest memory, over the whole gradient as one vector."""

    def look(gradients: list[Gradients], codecs: list[Codec]) -> None:
        fresh = [torch.cat([g.flatten() for g in own.values()]) for own in gradients]
        summed = [g + _held(codec, cluster.names, g) for g, codec in zip(fresh, codecs, strict=True)]
        k = max(1, round(density * summed[0].numel()))
        tops = [_top(vector, k) for vector in summed]
        mean = torch.stack(summed).mean(0)
        gap = float((_top(mean, k) - torch.stack(tops).mean(0)).norm())
        norm = float(torch.stack(fresh).mean(0).norm())
        shares = [float(t.square().sum() / v.square().sum()) for t, v in zip(tops, summed, strict=True)]
        notes = curve.notes
        for key, value in (
            ("step", cluster.done),
            ("xi", gap / norm),
            ("delta", sum(shares) / len(shares)),
            ("held", max(float((v - t).norm()) for v, t in zip(summed, tops, strict=True))),
            ("gradient", max(float(g.norm()) for g in fresh)),
        ):
            notes.setdefault(key, []).append(value)

    return look


def _held(codec: Codec, names: list[str], like: Tensor) -> Tensor:
    parts = [codec.held(name).get("residual") for name in names]
    return torch.cat([p for p in parts if p is not None]) if all(p is not None for p in parts) else like * 0.0


def _top(vector: Tensor, k: int) -> Tensor:
    out = torch.zeros_like(vector)
    places = vector.abs().topk(k).indices
    out[places] = vector[places]
    return out
