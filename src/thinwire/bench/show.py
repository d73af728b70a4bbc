"""Runs the codec's benchmark and shows it: progress on stderr, tables on stdout, rows and bars as JSON."""

from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from thinwire.bench.bars import BARS_FOR, Bar, density_bars, from_rows, memory_bars
from thinwire.bench.codec import Row, rows_of, steps_of
from thinwire.bench.verdict import verdict
from thinwire.race.options import write_json


def run(sizes: list[int], file: Path | None, seconds: float) -> int:
    """Measure all rows and bars; `seconds` is spent on each row. Returns 1 if a bar was missed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows, bars = _measure(sizes, seconds)
    finally:
        torch.set_num_threads(threads)
    console = Console() if Console().is_terminal else Console(width=120)
    for n in sizes:
        console.print(_table([row for row in rows if row.n == n], n))
    console.print(_bar_table(bars, max(sizes)))
    # The bars are set for one size; at another the figures stand without a verdict.
    judged = max(sizes) == BARS_FOR
    figures = [{**asdict(bar), "passed": bar.passed if judged else None} for bar in bars]
    write_json(file, {"rows": [asdict(row) for row in rows], "bars": figures})
    return verdict(bar.passed for bar in bars if judged)


def _measure(sizes: list[int], seconds: float) -> tuple[list[Row], list[Bar]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("about"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    rows: list[Row] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("bench codec", total=sum(steps_of(n) for n in sizes) + 2)
        for n in sizes:

            def advance(density: float, n: int = n) -> None:
                progress.update(task, advance=1, description=f"n = {n:,} at {density:.1%}")

            rows += rows_of(n, seconds, advance)
        largest = max(sizes)
        progress.update(task, description="densities")
        bars = from_rows(rows, largest) + density_bars(min(largest, 4_000_000))
        progress.update(task, advance=1, description="memory")
        bars += memory_bars(largest)
        progress.update(task, advance=1)
    return rows, bars


def _number(x: float | None, digits: int = 2) -> str:
    return "" if x is None else f"{x:,.{digits}f}"


def _table(rows: list[Row], n: int) -> Table:
    table = Table(title=f"n = {n:,}: one thread, ratios to copying the tensor, Residual + Bits(8)")
    table.add_column("")
    for column in ("density", "kept", "x the copy", "ms", "bits/element", "bits/index", "entropy"):
        table.add_column(column, justify="right")
    last = None
    for row in rows:
        if last is not None and row.density != last:
            table.add_section()
        last = row.density
        table.add_row(
            row.name,
            f"{row.density:.1%}",
            f"{row.kept:.3%}",
            _number(row.ratio_to_copy),
            _number(row.milliseconds),
            _number(row.bits_per_element, 4),
            _number(row.bits_per_index, 3),
            _number(row.entropy_bits, 3),
        )
    return table


def _bar_table(bars: list[Bar], n: int) -> Table:
    judged = n == BARS_FOR
    table = Table(
        title=f"Bars for n = {BARS_FOR:,}, at 1 % unless said otherwise" + ("" if judged else f"; here {n:,}")
    )
    for column, justify in (("what", "left"), ("bar", "right"), ("measured", "right"), ("", "left"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for bar in bars:
        words = {True: "[green]pass[/]", False: "[red]missed[/]", None: "not measured"}
        sign = "≤" if bar.most else "≥"
        digits = 3 if bar.limit < 2 else 2
        word = words[bar.passed] if judged or bar.passed is None else ""
        table.add_row(bar.what, f"{sign} {bar.limit:g}", _number(bar.measured, digits), bar.unit, word)
    return table
