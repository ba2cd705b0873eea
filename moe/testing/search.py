"""Searching for a world that refutes a claim, within a budget, and reporting the smallest one found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from isozyme.moe.testing.violation import CLAIMS, Violation


class Replayable(Protocol):
    """Something drawn that prints as a line from which it can be made again."""

    def line(self) -> str:
        """The line."""
        ...


Drawn = TypeVar("Drawn", bound=Replayable)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A search that found nothing wrong."""

    worlds: int
    """Worlds that were judged."""
    seconds: float
    out_of_time: bool
    """Whether the time was over before all examples were judged."""


def search(
    drawn: SearchStrategy[Drawn],
    judge: Callable[[Drawn], None],
    *,
    examples: int,
    seconds: float,
    seed: int,
) -> Report:
    """Judge worlds until one is refuted, then look for the smallest such world.

    There is no deadline for one world. When the time is over, worlds that are not yet known to fail count as
    right, so the search ends with the smallest one found so far. At least one world is judged.

    Args:
        drawn: the worlds.
        judge: raises `Violation` for a world in which a claim fails.
        examples: the most worlds to judge, smaller versions of a failing one not counted.
        seconds: the time for all of it.
        seed: what the draws depend on, besides the version of hypothesis.

    Raises:
        Violation: the first in the order of `CLAIMS`, with those of other claims as its `others`; or
            `a_world_repeats` if a world that failed once passed later.
    """
    began, failing, judged = time.monotonic(), {}, 0
    late = False

    def one(world: Drawn) -> None:
        nonlocal judged, late
        line = world.line()
        if judged and time.monotonic() - began > seconds and line not in failing:
            late = True
            return
        judged += 1
        try:
            judge(world)
        except Violation as violation:
            violation.replay = line
            failing[line] = violation.finding
            raise

    run = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        verbosity=Verbosity.quiet,
        print_blob=False,
        report_multiple_bugs=True,
        suppress_health_check=list(HealthCheck),
    )(hypothesis.seed(seed)(given(drawn)(one)))
    found = _violations(run, failing)
    if found:
        found[0].others = found[1:]
        raise found[0]
    return Report(worlds=judged, seconds=time.monotonic() - began, out_of_time=late)


def replay(world: Replayable, judge: Callable[[Replayable], None]) -> Report:
    """Judge this one world."""
    began = time.monotonic()
    try:
        judge(world)
    except Violation as violation:
        violation.replay = world.line()
        raise
    return Report(worlds=1, seconds=time.monotonic() - began, out_of_time=False)


def _violations(run: Callable[[], None], failing: dict[str, str]) -> list[Violation]:
    """What the run refutes, without hypothesis's frames and notes; one for each claim."""
    found: Sequence[BaseException] = ()
    try:
        run()
    except Violation as violation:
        found = [violation]
    except Flaky:
        line, finding = next(reversed(failing.items()))
        found = [
            Violation("a_world_repeats", f"failed once and passed when it was run again: {finding}", replay=line)
        ]
    except ExceptionGroup as group:
        found = group.exceptions
    kept: dict[str, Violation] = {}
    for error in found:
        if not isinstance(error, Violation):
            raise error
        error.__notes__ = []
        error.__context__ = None
        known = kept.get(error.invariant)
        if known is None or len(error.replay) < len(known.replay):
            kept[error.invariant] = error.with_traceback(None)
    order = list(CLAIMS)
    return sorted(kept.values(), key=lambda violation: order.index(violation.invariant))
