"""The commands `thinwire simulate ...`: predictions of models, without running anything."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from thinwire.tools import options

if TYPE_CHECKING:
    from thinwire.tools.race.profile import LayerTimes
    from thinwire.tools.simulate.scale import Scaling
    from thinwire.tools.simulate.schedule import Case, ScheduleOutcome

EXCHANGES = "star,ring,gather,scatter-reduce,hierarchical"
UPDATES = "update,local4,local16,local64"  # presets that exchange updates, which can be asked for as well
WORKERS = "2,4,8,16,32,64,128,256,512,1024,2048,4096"
# Seconds to encode an element and to decode an entry (docs/performance.md).
_ENCODE, _DECODE = 0.75e-9, 14e-9
# The model of `thinwire bench ddp`.
_CONVNET = 1_756_426

app = typer.Typer(help="Predict step times without running a training.", no_args_is_help=True)
# Simulating more slices than this, times workers and steps, takes minutes.
MOST_TRANSFERS = 1_000_000


@app.command("schedule")
def schedule(
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers; default: 8, or as many as there are times.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 4,
    iterations: Annotated[int, typer.Option(min=1, help="Steps of each worker.")] = 10,
    staleness: Annotated[int, typer.Option(min=0, help="Staleness bound; 0 is bulk synchronous.")] = 0,
    forward: Annotated[str | None, typer.Option(help="Ms of each layer's forward pass: 1, or 1,2,...")] = None,
    backward: Annotated[str | None, typer.Option(help="Ms of each layer's backward pass.")] = None,
    transfer: Annotated[str | None, typer.Option(help="Ms of each layer's transfer on one worker's link.")] = None,
    profile: Annotated[
        Path | None, typer.Option("--from", help="Take layers and times from a worker's profile.")
    ] = None,
    slices: Annotated[str, typer.Option(help="Slices of the largest layer, or of each layer: 8,4,2.")] = "8",
    policies: Annotated[str, typer.Option(help="Policies, comma-separated.")] = "fifo,filo,stalest,forward",
    window: Annotated[float | None, typer.Option(help="Ms of transfer in flight; default: two slices.")] = None,
    server_rate: Annotated[float, typer.Option(help="Rate of the server's link over a worker's.")] = 1.0,
    delay: Annotated[float, typer.Option(help="One-way delay between worker and server, in ms.")] = 0.0,
    slow: Annotated[str | None, typer.Option(help="Factors by which workers compute slower: 1,1,1,3.")] = None,
    versions: Annotated[str, typer.Option(help="Unit that the server counts and answers: slice, layer.")] = "slice",
    waits_for: Annotated[
        str, typer.Option(help="A forward pass waits for this step's answer, or any copy within the bound.")
    ] = "answer",
    json_file: options.JsonFile = None,
    report: options.Page = None,
) -> None:
    """Predict makespan and staleness of the server's request scheduling policies."""
    from thinwire.tools.progress import WorkProgress
    from thinwire.tools.simulate.schedule import Case, compare

    times = _times(profile, layers, {"forward": forward, "backward": backward, "transfer": transfer})
    case = Case(
        times,
        workers,
        iterations,
        staleness,
        slices=_slices(slices, times),
        versions=cast(Any, versions),
        waits_for=cast(Any, waits_for),
        window=None if window is None else window / 1e3,
        server_rate=server_rate,
        latency=delay / 1e3,
        slowness=() if slow is None else tuple(_numbers(slow, "--slow", workers, "workers")),
    )
    transfers = workers * iterations * sum(case.slices)
    if transfers > MOST_TRANSFERS:
        raise ValueError(f"that is {transfers:,} slices to push; at most {MOST_TRANSFERS:,} can be simulated")
    names = options.listed(policies, "--policies")
    what = f"simulating {transfers:,} slices with {len(names)} policies"
    with WorkProgress(what, transfers * len(names), announce=False) as progress:
        outcomes = compare(case, names, on_push=progress.advance)
    _tell(case, outcomes, json_file, report)


def _tell(case: "Case", outcomes: "list[ScheduleOutcome]", json_file: Path | None, report: Path | None) -> None:
    from rich.console import Console

    from thinwire.tools.simulate.gantt import comparison, verdict, write_gantt
    from thinwire.tools.simulate.schedule import winner

    best = winner(outcomes)
    fastest = {number: o.policy for number, o in enumerate(outcomes) if o.makespan == best.makespan}
    if json_file is not None:
        figures = [{k: v for k, v in asdict(o).items() if k != "intervals"} for o in outcomes]
        names = {"winner": best.policy, "fastest": list(fastest.values())}
        options.write_json(json_file, {"unit": "seconds", "case": asdict(case), "outcomes": figures, **names})
    if report is not None:
        write_gantt(case, outcomes, report, options.invocation())
    title = f"{case.workers} workers, {len(case.layers)} layers, {case.iterations} steps, B = {case.staleness}"
    caption = "waiting: of a step's forward pass; staleness: of the copies it used, in steps"
    Console().print(options.table_of(comparison(outcomes), title=title, caption=caption, bold=fastest))
    _conclude(verdict(outcomes), report)


def _conclude(verdict: str, report: Path | None) -> None:
    from rich.console import Console

    Console().print(verdict, *([] if report is None else [f"The page is {report}."]), sep="\n", highlight=False)


def _times(profile: Path | None, layers: int | None, given: dict[str, str | None]) -> "tuple[LayerTimes, ...]":
    from thinwire.tools.race.profile import LayerTimes, read_profile

    typed = {what: text for what, text in given.items() if text is not None}
    if profile is not None:
        if typed:
            raise ValueError("--from brings the times: leave out --forward, --backward and --transfer")
        times = read_profile(profile)
        if layers not in (None, len(times)):
            raise ValueError(f"the profile {profile} has {len(times)} layers, not {layers}: leave out --layers")
        return times
    texts = {"forward": "1", "backward": "2", "transfer": "1", **typed}
    lengths = [text.count(",") + 1 for text in texts.values() if "," in text]
    count = layers or max(lengths, default=8)
    columns = [_numbers(text, f"--{what}", count, "layers") for what, text in texts.items()]
    return tuple(LayerTimes(f"{n}", *(ms / 1e3 for ms in row)) for n, row in enumerate(zip(*columns, strict=True)))


def _numbers(text: str, option: str, count: int, what: str) -> list[float]:
    try:
        values = [float(item) for item in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is a number, or numbers with commas between them, not '{text}'") from None
    if len(values) not in (1, count):
        raise ValueError(f"{option} has {len(values)} numbers, but there are {count} {what}: give 1 or {count}")
    return values * count if len(values) == 1 else values


def _slices(text: str, times: "tuple[LayerTimes, ...]") -> tuple[int, ...]:
    from thinwire.tools.simulate.schedule import even_slices

    numbers = _numbers(text, "--slices", len(times), "layers")
    if not all(number.is_integer() and number >= 1 for number in numbers):
        raise ValueError(f"--slices are whole numbers from 1, not '{text}'")
    whole = tuple(int(number) for number in numbers)
    return whole if "," in text else even_slices(times, whole[0])


@app.command("scale")
def scale_command(
    context: typer.Context,
    parameters: Annotated[
        int | None, typer.Option(min=1, help="Parameters of the model; default: bench ddp's.")
    ] = None,
    compute: Annotated[str | None, typer.Option(help="Step time without communication: 80ms.")] = None,
    density: Annotated[float, typer.Option(help="Share of the entries that are sent.")] = 0.01,
    bits: Annotated[float, typer.Option(min=1, max=32, help="Bits of a value.")] = 2.6,
    rate: options.Rate = "500mbit",
    delay: options.Delay = "200us",
    stragglers: Annotated[float, typer.Option(help="Spread of computing times, as a share of the mean.")] = 0.0,
    rate_spread: Annotated[float, typer.Option(help="Spread of the links' rates, as a share.")] = 0.0,
    per_machine: Annotated[int, typer.Option(min=1, help="Workers on a machine, for hierarchical.")] = 8,
    bus: Annotated[str, typer.Option(help="Rate within a machine.")] = "100gbit",
    exchanges: Annotated[str, typer.Option(help=f"Exchanges, comma-separated; also {UPDATES}.")] = EXCHANGES,
    workers: options.WorkerCounts = WORKERS,
    measured: Annotated[
        list[Path] | None, typer.Option(help="File of bench ddp --json: calibrates; delays are checked.")
    ] = None,
    calibrate_up_to: Annotated[
        int | None, typer.Option(help="Calibrate with measurements of so many workers at most.")
    ] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Cores that the measured hosts shared.")] = None,
    json_file: options.JsonFile = None,
    report: options.Page = None,
) -> None:
    """Predict step time, traffic and efficiency of each exchange for 2 to 4,096 workers."""
    from dataclasses import replace

    from thinwire.tools.lab.units import parse_delay
    from thinwire.tools.race.advise import GOODPUT
    from thinwire.tools.simulate.scale import Scaling, SimulatedCluster, Task, calibrated, read_points
    from thinwire.tune.forecast import Setting, frame_bytes

    if not measured:
        options.refuse(context, ("calibrate_up_to", "cores"), "describe measurements: give --measured too")
    names = options.listed(exchanges, "--exchanges")
    known = [*EXCHANGES.split(","), *UPDATES.split(",")]
    if strange := [name for name in names if name not in known]:
        raise ValueError(f"no exchange is called {strange[0]!r}; there are {', '.join(known)}")
    counts = options.parse_counts(workers)
    speed, inside = options.needed_rate(rate), options.needed_rate(bus, "--bus")
    if not 0.0 < density <= 1.0:
        raise ValueError(f"--density lies in (0, 1], not {density}")
    elements = parameters if parameters is not None else _CONVNET
    frame = 4.0 * elements if density == 1.0 else frame_bytes(Setting("", density=density, bits=bits), elements)
    task = Task(elements, frame, 0.0, _ENCODE * elements, _DECODE * density * elements, buckets=2)  # as DDP has them
    one_way = parse_delay(delay, "--delay")
    cluster = SimulatedCluster(GOODPUT * speed, one_way, stragglers, rate_spread, per_machine, float(inside))
    lab = SimulatedCluster(cluster.rate, cores=cores)
    points = [point for path in measured or [] for point in read_points(path)]
    if points:
        used = [point for point in points if calibrate_up_to is None or point.workers <= calibrate_up_to]
        task, lab = calibrated(used, task, lab)
        if cores is None:  # the waiting of messages was measured on such machines
            cluster = replace(cluster, switching=lab.switching)
    elif compute is None:
        raise ValueError("give --compute, the step time without communication, or --measured files to find it")
    if compute is not None:
        task = replace(task, compute=parse_delay(compute, "--compute"))
    found = Scaling(task, cluster, tuple(names), tuple(counts), tuple(points), lab, options.invocation())
    options.write_json(json_file, found.to_json())
    if report is not None:
        found.page(report)
    _show(found, report)


def _show(found: "Scaling", page: Path | None) -> None:
    from rich.console import Console

    heads = {"Sent at most": "sent", "Half efficient up to": "half"}
    short = [
        {heads.get(head, head.removesuffix(" workers")): text.removesuffix(" ms") for head, text in row.items()}
        for row in found.rows()
    ]
    note = options.caption(
        "sent: by a worker in a step, at most", "half: workers up to which a step computes for half of its time"
    )
    Console().print(options.table_of(short, title="Step time in ms by the number of workers", caption=note))
    rows = [
        {
            "workers": str(check["workers"]),
            "rate": check["rate"],
            "delay": f"{check['delay_ms']:g} ms" if check["delay_ms"] else "",
            "exchange": check["exchange"],
            "predicted": f"{check['predicted_ms']:,.1f} ms",
            "measured": f"{check['measured_ms']:,.1f} ms",
            "off": f"{check['off']:+.0%}",
        }
        for check in found.checks()
    ]
    if rows:
        Console().print(options.table_of(rows, title="Predicted and measured steps"))
    _conclude(found.verdict(), page)
