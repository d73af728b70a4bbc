"""The commands `thinwire bench ...`.

The benchmarks are imported inside the functions, because they import torch and `--help` must answer at once.
"""

from pathlib import Path
from typing import Annotated

import typer

from thinwire.tools.lab.presets import find_preset
from thinwire.tools.options import Delays, HostDelay, JsonFile, Loss, Preset, link_settings, network_figures, typed

app = typer.Typer(help="Measure thinwire on this machine.", no_args_is_help=True)

_SERVER_PARTS = ("phases", "stragglers", "policies", "trips")
_FIDELITY_PARTS = ("rates", "seeds", "long", "many", "local", "translate", "values")
_LOCAL_PARTS = ("steps", "stragglers")
_GPTS = ("gpt", "gpt-10m")
_UDP_PARTS = ("loss", "fair", "incast", "fuzz", "sender")

Rate = Annotated[str, typer.Option(help="Rate of every link: 500mbit; none leaves it unlimited.")]
Batch = Annotated[int, typer.Option(min=1, help="Samples per worker and step.")]


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")]


def _parts(only: str, known: tuple[str, ...]) -> list[str]:
    parts = _listed(only)
    if not set(parts) <= set(known):
        raise ValueError(f"--only takes {', '.join(known)}, not {only!r}")
    return parts


def _network(context: typer.Context, preset: str | None, rates: str, delay: str) -> tuple[str, str, str]:
    """Return rates, delays and loss: what was typed, else the preset's figures, else the options' defaults."""
    if preset is None:
        return rates, delay, "0%"
    figures, fixed = find_preset(preset), typed(context, ["rates", "delay"])
    return rates if "rates" in fixed else figures.rate, delay if "delay" in fixed else figures.delay, figures.loss


def _method_names(methods: str) -> list[str]:
    from thinwire.tools.race.methods import check_method

    names = _listed(methods)
    for name in names:
        check_method(name)
    return names


@app.command("codec")
def codec_command(
    json_file: JsonFile = None,
    n: Annotated[list[int] | None, typer.Option(min=100_000, help="Elements of the tensor; may be repeated.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use a small tensor and few repetitions, for a rough look.")
    ] = False,
) -> int:
    """Measure encoding and decoding against copying the same tensor, on one thread."""
    from thinwire.tools.bench.codec import run

    return run(n or ([1_756_426] if quick else [1_756_426, 25_000_000]), json_file, seconds=0.25 if quick else 1.2)


@app.command("ddp")
def ddp_command(
    context: typer.Context,
    workers: Annotated[int, typer.Option(min=2, help="Workers, each on an emulated host.")] = 14,
    preset: Preset = None,
    rate: Rate = "500mbit",
    delay: Delays = "0",
    host_delay: HostDelay = None,
    loss: Loss = "0%",
    methods: Annotated[str, typer.Option(help="Methods, comma-separated.")] = "infinite,dense,fp16,powersgd,topk1",
    buckets: Annotated[
        int | None, typer.Option(min=1, help="Train so many layers with a bucket each, not the cuda-convnet.")
    ] = None,
    batch: Batch = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each method in a round.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which every method is measured once.")] = 5,
    warmup: Annotated[int, typer.Option(min=3, help="Steps of each method before the first round.")] = 4,
    json_file: JsonFile = None,
) -> int:
    """Measure step time, traffic, processor time and communication overhead of DDP methods on emulated hosts."""
    from thinwire.tools.bench.ddp import run

    names = list(dict.fromkeys(["infinite", *_method_names(methods)]))
    options = {"methods": names, "batch": batch, "steps": steps, "rounds": rounds, "warmup": warmup, "buckets": buckets}
    return run(workers, link_settings(context, workers), options, json_file)


@app.command("fsdp")
def fsdp_command(
    context: typer.Context,
    machines: Annotated[int, typer.Option(min=2, help="Machines, each an emulated host with a replica.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each machine, which share its replica.")] = 2,
    preset: Preset = None,
    rate: Annotated[str, typer.Option(help="Rate of every machine's link: 100mbit; none leaves it unlimited.")] = (
        "100mbit"
    ),
    delay: Delays = "0",
    host_delay: HostDelay = None,
    loss: Loss = "0%",
    methods: Annotated[
        str, typer.Option(help="Methods, comma-separated: hsdp, update, auto, a preset or a density.")
    ] = "infinite,hsdp,0.01,update",
    recipe: Annotated[str, typer.Option(help="The model: gpt or gpt-10m.")] = "gpt-10m",
    batch: Annotated[int, typer.Option(min=1, help="Samples per rank and step.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each method in a round.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which every method is measured once.")] = 3,
    warmup: Annotated[int, typer.Option(min=2, help="Steps of each method before the first round.")] = 2,
    json_file: JsonFile = None,
) -> int:
    """Measure step time and traffic between machines of a model that FSDP2 shards within each machine."""
    from thinwire.tools.bench.fsdp import run

    names = list(dict.fromkeys(["infinite", *_listed(methods)]))
    if recipe not in _GPTS:
        raise ValueError(f"--recipe takes gpt or gpt-10m, not {recipe!r}")
    options = {"recipe": recipe, "methods": names, "batch": batch, "steps": steps, "rounds": rounds, "warmup": warmup}
    return run(machines, ranks, link_settings(context, machines), options, json_file)


@app.command("local")
def local_command(
    context: typer.Context,
    workers: Annotated[int, typer.Option(min=2, help="Workers, each on an emulated host.")] = 4,
    preset: Preset = None,
    rates: Annotated[str, typer.Option(help="Rates of every link, comma-separated.")] = "50mbit,20mbit",
    delay: Annotated[str, typer.Option(help="One-way delay between two hosts: 25ms.")] = "25ms",
    only: Annotated[str, typer.Option(help=f"Parts to run: {', '.join(_LOCAL_PARTS)}.")] = ",".join(_LOCAL_PARTS),
    methods: Annotated[str, typer.Option(help="Presets with local steps, comma-separated.")] = "local16",
    recipe: Annotated[str, typer.Option(help="The model: gpt or gpt-10m.")] = "gpt-10m",
    batch: Annotated[int, typer.Option(min=1, help="Samples that a step computes on.")] = 1,
    base: Annotated[
        float, typer.Option(min=0.0, help="Seconds that a step takes at least; it sleeps for the rest.")
    ] = (1.0),
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of a round by time.")] = 10.0,
    slower: Annotated[float, typer.Option(min=1.0, help="How many times slower the last host is.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are measured in each turn, after two others.")] = 2,
    turns: Annotated[int, typer.Option(min=1, help="Turns in which every method is measured once.")] = 3,
    json_file: JsonFile = None,
) -> int:
    """Measure steps with and without local steps' exchange, and rounds by time with a slow host, on emulated hosts."""
    from thinwire.tools.bench.local import LocalSettings, run
    from thinwire.tools.lab.links import LinkSettings
    from thinwire.tune.presets import LOCAL

    names = _listed(methods)
    if not set(names) <= set(LOCAL):
        raise ValueError(f"--methods takes presets with local steps, {', '.join(LOCAL)}, not {methods!r}")
    if recipe not in _GPTS:
        raise ValueError(f"--recipe takes gpt or gpt-10m, not {recipe!r}")
    rates, delay, loss = _network(context, preset, rates, delay)
    links = [LinkSettings(None if rate == "none" else rate, delay, loss) for rate in _listed(rates)]
    for each in links:
        each.check(workers)
    settings = LocalSettings(recipe, tuple(names), batch, max(base, 1e-3), turns, rounds, seconds, slower)
    return run(_parts(only, _LOCAL_PARTS), workers, links, settings, json_file)


@app.command("advice")
def advice_command(
    context: typer.Context,
    workers: Annotated[str, typer.Option(help="Numbers of workers, comma-separated.")] = "4,14",
    preset: Preset = None,
    rates: Annotated[str, typer.Option(help="Rates of every link, comma-separated.")] = "100mbit,500mbit",
    delay: Delays = "0",
    methods: Annotated[str, typer.Option(help="Methods, comma-separated.")] = "dense,fp16,percentile90,topk1",
    batch: Batch = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each method in a round.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of a prediction and a measurement.")] = 3,
    json_file: JsonFile = None,
) -> int:
    """Compare the step times that `thinwire advise --probe` predicts with measured ones, on emulated hosts."""
    from thinwire.tools.bench.advice import check_places, run

    options = {"methods": _method_names(methods), "batch": batch, "steps": steps, "rounds": rounds, "warmup": 3}
    rates, delay, loss = _network(context, preset, rates, delay)
    return run(check_places(_listed(workers), _listed(rates), _listed(delay), loss), options, json_file)


@app.command("server")
def server_command(
    context: typer.Context,
    workers: Annotated[int, typer.Option(min=2, help="Workers; the server has one more emulated host.")] = 13,
    preset: Preset = None,
    rate: Annotated[
        str, typer.Option(help="Rate of the links; policies and trips have 100mbit, stragglers 1gbit without delay.")
    ] = "500mbit",
    delay: Delays = "0",
    host_delay: HostDelay = None,
    loss: Loss = "0%",
    only: Annotated[str, typer.Option(help=f"Parts to run: {', '.join(_SERVER_PARTS)}.")] = ",".join(_SERVER_PARTS),
    steps: Annotated[int, typer.Option(min=3, help="Steps of the dense runs.")] = 8,
    seconds: Annotated[float, typer.Option(min=2.0, help="Length of each run with stragglers.")] = 15.0,
    json_file: JsonFile = None,
) -> int:
    """Measure phases, stragglers, scheduling policies and round trips of the parameter server on emulated hosts."""
    from thinwire.tools.bench.server import run

    return run(_parts(only, _SERVER_PARTS), workers, link_settings(context), steps, seconds, json_file)


@app.command("udp")
def udp_command(
    context: typer.Context,
    only: Annotated[str, typer.Option(help=f"Parts to run: {', '.join(_UDP_PARTS)}.")] = ",".join(_UDP_PARTS),
    workers: Annotated[int, typer.Option(min=2, help="Workers of the training; the server has one more host.")] = 4,
    preset: Preset = None,
    rate: Rate = "100mbit",
    delay: Delays = "0",
    host_delay: HostDelay = None,
    loss: Annotated[str, typer.Option(help="Shares of packets lost, comma-separated.")] = "0%,1%,5%,20%",
    steps: Annotated[int, typer.Option(min=10, help="Steps of each training run.")] = 200,
    seconds: Annotated[float, typer.Option(min=1.0, help="Length of the measured flows.")] = 8.0,
    fuzzed: Annotated[int, typer.Option(min=1000, help="Number of forged datagrams.")] = 1_000_000,
    json_file: JsonFile = None,
) -> int:
    """Measure the udp transport: training with packet loss, sharing with TCP, incast, forged datagrams, sending."""
    from thinwire.tools.bench.udp import run

    losses = network_figures(context)["loss"]
    # The shares of --loss are for its part; a preset's loss is the network's.
    settings = link_settings(context, loss="0%" if preset is None or typed(context, ["loss"]) else losses)
    return run(_parts(only, _UDP_PARTS), workers, settings, _listed(losses), steps, seconds, fuzzed, json_file)


@app.command("fidelity")
def fidelity_command(
    folder: Annotated[Path, typer.Option(help="Folder of finished runs, which are not repeated.")] = Path(
        "results/fidelity"
    ),
    only: Annotated[
        str, typer.Option(help=f"Parts to run: {', '.join(_FIDELITY_PARTS)}; none only prints the tables.")
    ] = ",".join(_FIDELITY_PARTS[:-3]),
    methods: Annotated[str, typer.Option(help="Methods, comma-separated; all by default.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Simulations at a time, one thread each.")] = 2,
    data: Annotated[Path | None, typer.Option(help="Folder of the data for translate and values.")] = None,
    json_file: JsonFile = None,
) -> int:
    """Compare the loss of a small GPT with AdamW between methods, by exact simulation of all ranks."""
    from thinwire.tools.bench.fidelity import METHODS, run

    parts = [] if only == "none" else _parts(only, _FIDELITY_PARTS)
    return run(folder, parts, _listed(methods) if methods else METHODS, jobs, data, json_file)
