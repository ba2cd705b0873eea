"""`isozyme bench layouts`: the same training steps at several layouts, and whether their losses agree.

It is `isozyme verify` for the machine at hand: real devices, real links, the precision of the run. Each
layout runs in fresh processes, from the same weights and on the same windows; the first is what the others
are compared with.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from isozyme.core.config import RunConfig
from isozyme.core.errors import ConfigError
from isozyme.core.topology import Layout, Topology
from isozyme.launch.bench_workload import refuse_given
from isozyme.launch.compose import compose
from isozyme.launch.local import STOPPED, run_ranks

Say = Callable[[str], None]

_AXES = frozenset(each.name for each in fields(Layout))
WARM_UP = 3
"""Steps whose time is not counted."""

_WITHOUT_PAUSES = ("train.log_every=1", "train.eval_every=0", "train.checkpoint_every=0")
_SET: Mapping[str, str] = MappingProxyType(
    {
        "train.steps": "--steps",
        "out": "--out, for the results",
        **{each.partition("=")[0]: f"isozyme train for other than {each}" for each in _WITHOUT_PAUSES},
    }
)


@dataclass(frozen=True, kw_only=True)
class LayoutRun:
    """One layout, with settings of its own."""

    text: str
    """Such as `cp=2 model.attention.context=ring`."""
    overrides: tuple[str, ...]
    config: RunConfig


def layout_runs(recipe: str, layouts: Sequence[str], overrides: Sequence[str], steps: int) -> list[LayoutRun]:
    """Compose every run, before the first one starts.

    Args:
        recipe: what is trained.
        layouts: sizes by axis, such as `tp=2 dp=2`, those of the others being 1 (of dp: the least that fits);
            other words are settings of that run alone. Without an axis the layout is that of the recipe.
        overrides: settings of all runs.
        steps: optimiser steps of each.

    Raises:
        ConfigError: if fewer than two steps are asked for after the warm-up, a run breaks a rule, or a
            setting would have no effect.
    """
    if steps < WARM_UP + 2:
        raise ConfigError(f"--steps must be at least {WARM_UP + 2}, of which {WARM_UP} warm up: {steps}.")
    found = []
    for text in layouts:
        own = _overrides(text)
        refuse_given([*overrides, *own], _SET)
        every = (
            *("train.eval_windows=8", *overrides, *own),
            *(f"train.steps={steps}", *_WITHOUT_PAUSES),
        )
        config = compose(recipe, every)
        config.validate()
        found.append(LayoutRun(text=text, overrides=every, config=config))
    return found


def _overrides(text: str) -> list[str]:
    """The settings that a text says. If it names an axis it says the whole layout: the others are 1."""
    words = [f"layout.{word}" if word.partition("=")[0] in _AXES else word for word in text.split()]
    named = {word.partition("=")[0] for word in words}
    sizes = {f"layout.{axis}": 1 for axis in _AXES - {"order", "dp"}} | {"layout.dp": "null"}
    if named.isdisjoint(sizes):
        return words
    return [*(f"{axis}={size}" for axis, size in sorted(sizes.items()) if axis not in named), *words]


def bench_layouts(
    recipe: str, runs: Sequence[LayoutRun], *, tolerance: float, say: Say = print
) -> Iterator[dict[str, Any]]:
    """Train at each layout; yields one row each, up to where somebody stops it (Ctrl-C, SIGTERM).

    A row's `difference` is the largest relative difference of a step's loss from that of the first layout
    that ran; past `tolerance` the row is `FAILED`. Speed is the median of the steps after the warm-up, memory
    the peak of rank 0.

    Args:
        recipe: what `runs` were composed from.
        runs: by `layout_runs`.
        tolerance: largest relative difference of a loss.
        say: told what goes on.
    """
    reference: list[float] | None = None
    for run in runs:
        say(f"  running {run.text}")
        topology = Topology(run.config.layout)
        row: dict[str, Any] = {
            "name": run.text,
            "kind": "isozyme",
            "precision": run.config.precision,
            "ranks": topology.world_size,
            "layout": str(run.config.layout),
        }
        with tempfile.TemporaryDirectory(prefix="isozyme-bench-") as folder:
            command = [
                sys.executable,
                "-m",
                "isozyme.launch",
                "train",
                recipe,
                *run.overrides,
                f"out={folder}",
            ]
            code = run_ranks(command, topology)
            if code in STOPPED:
                say("  stopped")
                return
            row |= _found(Path(folder) / "metrics.jsonl", code, topology.world_size)
        if row["status"] == "ok":
            reference = reference or row["losses"]
            row |= _compared(row["losses"], reference, tolerance)
        if row["status"] != "ok":
            say(f"    {row['status']}: {row['reason']}")
        yield row


def _found(path: Path, code: int, ranks: int) -> dict[str, Any]:
    """What a run wrote."""
    if code != 0 or not path.exists():
        return {"status": "FAILED", "reason": f"the run ended with code {code}; its error stands above"}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "train"]
    timed = [record["step_s"] for record in steps[WARM_UP:]]
    seconds = statistics.median(timed)
    tokens = steps[-1]["tokens_per_s"] * steps[-1]["step_s"]
    return {
        "status": "ok",
        "losses": [record["loss"] for record in steps],
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_per_gpu": tokens / seconds / ranks,
        "step_ms": 1000 * seconds,
        "step_ms_low": 1000 * min(timed),
        "step_ms_high": 1000 * max(timed),
        "peak_bytes": steps[-1]["memory_bytes"],
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "steps": len(timed),
    }


def _compared(
    losses: Sequence[float | None], reference: Sequence[float | None], tolerance: float
) -> dict[str, Any]:
    """How far two loss curves are apart; a loss that is no number is infinitely far."""
    apart = [
        math.inf if ours is None or theirs is None else abs(ours - theirs) / abs(theirs)
        for ours, theirs in zip(losses, reference, strict=True)
    ]
    worst = max(apart)
    found: dict[str, Any] = {"difference": worst, "mean_difference": statistics.fmean(apart)}
    if worst > tolerance:
        step = apart.index(worst)
        found |= {
            "status": "FAILED",
            "reason": f"its loss differs by {worst:.2%} at step {step} ({losses[step]} against "
            f"{reference[step]}); the tolerance is {tolerance:.2%}",
        }
    return found
