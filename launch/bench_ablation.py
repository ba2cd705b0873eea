"""`isozyme bench ablation`: what each part of a layer brings, added one by one and taken away one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from isozyme.core.errors import ConfigError, did_you_mean
from isozyme.core.precision import TRAITS
from isozyme.launch.bench_contenders import default_precision
from isozyme.launch.bench_layer import Effort, Row, Say, compare
from isozyme.launch.bench_overlap import OVERLAP
from isozyme.launch.bench_problem import Problem
from isozyme.launch.bench_rungs import chained, leave_one_out

CHAINED, LEFT_OUT = "added one by one", "left out one by one"

_COLOURS = MappingProxyType({CHAINED: "tab:blue", LEFT_OUT: "tab:gray", OVERLAP: "tab:green"})


def bench_ablation(
    problem: Problem, low_precision: str | None, effort: Effort, say: Say = print
) -> list[Row]:
    """Measure both series on one problem; rows carry the name of their `table`.

    Args:
        problem: the layer; its router is part of every rung.
        low_precision: precision of the last rung, None for none.
        effort: how long to measure.
        say: told what goes on.

    Raises:
        ConfigError: if there is no such precision.
    """
    if low_precision is not None and low_precision not in TRAITS:
        raise ConfigError(f"unknown precision: --low={low_precision}. {did_you_mean(low_precision, TRAITS)}")
    precision = default_precision(problem.device)
    series = {CHAINED: chained(precision, low_precision), LEFT_OUT: leave_one_out(precision)}
    tables = [table for table, rungs in series.items() for _ in rungs]
    every = [rung for rungs in series.values() for rung in rungs]
    rows = compare(problem, every, effort, say)
    return with_gains([row | {"table": table} for row, table in zip(rows, tables, strict=True)])


def with_gains(rows: Sequence[Row]) -> list[Row]:
    """The same rows with `gain`: how many times faster a rung is than the one before it.

    Where parts are left out it is compared with the rung that has all of them. Rungs without a time, and the
    first of each table, have none.
    """
    found: list[Row] = []
    known: dict[tuple[Any, ...], float] = {}
    for row in rows:
        table = tuple(row[key] for key in ("shape", "tokens", "routing", "table"))
        time = row.get("ms")
        found.append(row if time is None or table not in known else row | {"gain": known[table] / time})
        if time is not None and not (row["table"] == LEFT_OUT and table in known):
            known[table] = time
    return found


def draw_picture(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> str | None:
    """A bar for each rung, as a PNG.

    Returns:
        Why there is no picture; None if it was written.
    """
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        return f"no picture: matplotlib is not installed ({error})"
    timed = [row for row in rows if row.get("status") == "ok"]
    if not timed:
        return "no picture: no rung was timed"
    figure = Figure(figsize=(9, 0.45 * len(timed) + 1.4), layout="constrained")
    axes = figure.subplots()
    colours = [_COLOURS[row["table"]] for row in timed]
    bars = axes.barh([f"{row['name']}" for row in timed], [row["ms"] for row in timed], color=colours)
    labels = [f"{row['ms']:.2f} ms, {row['tflops']:.0f} TFLOP/s" for row in timed]
    axes.bar_label(bars, labels=labels, padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("ms, forward and backward of one layer with its router")
    present = {row["table"] for row in timed}
    words = [f"{_COLOURS[name].removeprefix('tab:')}: {name}" for name in _COLOURS if name in present]
    axes.set_title("\n".join([title, "; ".join(words)]))
    axes.set_xlim(0, 1.4 * max(row["ms"] for row in timed))  # room for the labels
    figure.savefig(path, dpi=150)
    return None
