"""`isozyme bench layer`: one mixture-of-experts layer, forward and backward, ours and other people's.

Every implementation gets the same tokens, expert ids, combine weights and expert weights; it is timed only if
its result and all gradients agree with the reference. One that fails is a row with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from isozyme.core.errors import BackendError
from isozyme.launch.bench_agreement import BOUNDS, disagreement, reference_outcome, relative_errors
from isozyme.launch.bench_ceilings import grouped_gemm_tflops
from isozyme.launch.bench_contenders import storage_dtype
from isozyme.launch.bench_measure import (
    Footprint,
    Timing,
    count_calls,
    footprint,
    free,
    poison,
    reason_of,
    time_interleaved,
)
from isozyme.launch.bench_problem import Built, Contender, Outcome, Problem, RandomExpertWeights
from isozyme.launch.bench_shapes import Shape

Row = dict[str, Any]
Say = Callable[[str], None]
_POISONED = 2**32


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure."""

    rounds: int = 3
    """Turns of each contender."""
    repeats: int = 5
    """Timed steps in a turn."""
    warm_up: int = 3
    """Steps before a contender is checked (compiling, tuning, and histories of delayed scaling)."""
    count_calls: bool = True
    """Whether kernels and waits of one step are counted, by the profiler."""


def bench_cases(
    shapes: Sequence[Shape],
    routings: Sequence[str],
    contenders: Sequence[Contender],
    device: torch.device,
    effort: Effort,
    say: Say = print,
) -> Iterable[tuple[Row, list[Row]]]:
    """Measure every shape with every routing.

    Yields:
        Of each case what is common (sizes, ceiling) and one row a contender, as soon as it is done.
    """
    for shape in shapes:
        dtypes = list(dict.fromkeys(storage_dtype(each.precision, device) for each in contenders))
        for dtype in dtypes:
            free(device)
            weights = RandomExpertWeights(shape, device=device, dtype=dtype, seed=0)
            for routing in routings:
                problem = Problem.draw(shape, routing, device=device, dtype=dtype, weights=weights)
                taking_part = [c for c in contenders if storage_dtype(c.precision, device) == dtype]
                yield case_of(problem, say), compare(problem, taking_part, effort, say)
                del problem
            del weights


def case_of(problem: Problem, say: Say = print) -> Row:
    """What is common to all rows of one problem: sizes, load, and the rate of the grouped GEMMs alone."""
    shape, counts = problem.shape, problem.tokens_per_expert.tolist()
    try:
        ceiling = grouped_gemm_tflops(problem)
    except RuntimeError as error:
        ceiling = None
        say(f"  the grouped GEMMs alone could not be measured: {reason_of(error)}")
    free(problem.device)
    return {
        "shape": asdict(shape),
        "routing": problem.routing,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "grouped_gemm_tflops": ceiling,
        "flops": shape.flops,
        "saved_bound_bytes_per_token": shape.saved_bound(problem.dtype.itemsize),
        "largest_expert_share": max(counts) / sum(counts),
        "empty_experts": counts.count(0),
    }


def compare(problem: Problem, contenders: Sequence[Contender], effort: Effort, say: Say = print) -> list[Row]:
    """Check, inspect and time the contenders on one problem.

    Returns:
        One row each, in order. `status` is `ok`, `FAILED` (it raised, or disagrees: no time is given) or
        `unavailable` (it says itself that it cannot run here).
    """
    rows: list[Row] = []
    alive: dict[int, Built] = {}
    references: dict[bool, Outcome] = {}
    for contender in contenders:
        say(f"  checking {contender.name} {contender.precision}")
        found, built = _examine(contender, problem, references, effort)
        rows.append(
            {
                "name": contender.name,
                "kind": contender.kind,
                "precision": contender.precision,
                "shape": problem.shape.name,
                "tokens": problem.shape.tokens,
                "routing": problem.routing,
                "error_bound": BOUNDS[contender.precision],
                **found,
            }
        )
        if built is not None:
            alive[len(rows) - 1] = built
        else:
            say(f"    {found['status']}: {found['reason']}")
        _release(problem.device, say)
    references.clear()
    _release(problem.device, say)
    say(f"  timing {len(alive)} contenders in turns")
    _time(rows, alive, problem, effort)
    alive.clear()
    _release(problem.device, say)
    return rows


def _examine(
    contender: Contender, problem: Problem, references: dict[bool, Outcome], effort: Effort
) -> tuple[Row, Built | None]:
    """Build a contender, hold it to the reference and take its footprint; None if it may not be timed."""
    with_router = contender.includes_router
    try:
        if with_router not in references:
            references[with_router] = reference_outcome(problem, with_router=with_router)
        built = contender.build(problem)
        row = _check(built, problem, contender, references[with_router], effort)
        if row["status"] != "ok":
            return row, None
        found = footprint(built, problem.upstream, _constants(problem), problem.device)
        return row | _footprint_columns(found, problem), built
    except BackendError as error:
        return {"status": "unavailable", "reason": reason_of(error)}, None
    except Exception as error:
        return {"status": "FAILED", "reason": reason_of(error)}, None


def _release(device: torch.device, say: Say) -> None:
    """As `free`; a device that an earlier error has broken is reported by the next contender instead."""
    try:
        free(device)
    except RuntimeError as error:
        say(f"    memory could not be freed: {reason_of(error)}")


def _check(built: Built, problem: Problem, contender: Contender, reference: Outcome, effort: Effort) -> Row:
    for _ in range(effort.warm_up):
        built.step(problem.upstream)
    poison(problem.device, problem.dtype, _POISONED)
    out, grads = built.step(problem.upstream)
    errors = relative_errors(built.outcome(out, grads), reference)
    wrong = disagreement(errors, contender.precision)
    status: Row = {"status": "ok"} if wrong is None else {"status": "FAILED", "reason": wrong}
    return status | {"errors": errors, "worst_error": max(errors.values())}


def _constants(problem: Problem) -> list[torch.Tensor]:
    return [*problem.weights.gate_up, *problem.weights.down, problem.logit_offset]


def _footprint_columns(found: Footprint, problem: Problem) -> Row:
    if found.saved_bytes is None:
        return asdict(found)
    per_token = found.saved_bytes / problem.shape.tokens
    bound = problem.shape.saved_bound(problem.dtype.itemsize)
    return asdict(found) | {"saved_bytes_per_token": per_token, "saved_over_bound": per_token / bound}


def _time(rows: list[Row], alive: dict[int, Built], problem: Problem, effort: Effort) -> None:
    steps = {number: partial(built.step, problem.upstream) for number, built in alive.items()}
    timed = time_interleaved(steps, problem.device, rounds=effort.rounds, repeats=effort.repeats)
    for number, timing in timed.items():
        if isinstance(timing, Timing):
            seconds = timing.median / 1000
            rows[number] |= {
                "ms": timing.median,
                "ms_low": timing.low,
                "ms_high": timing.high,
                "samples": timing.samples,
                "tflops": problem.shape.flops / seconds / 1e12,
                "tokens_per_s": problem.shape.tokens / seconds,
                **(asdict(count_calls(steps[number], problem.device)) if effort.count_calls else {}),
            }
        else:
            rows[number] |= {"status": "FAILED", "reason": f"while it was timed: {timing}"}
