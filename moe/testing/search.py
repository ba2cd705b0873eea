"""Searching for a world that refutes a claim, within a budget, and reporting the smallest one found."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from isozyme.moe.testing.violation import CLAIMS, Violation


@runtime_checkable
class Replayable(Protocol):
    """Something drawn that prints as a line from which it can be made again."""

    def line(self) -> str:
        """The line."""
        ...


Drawn = TypeVar("Drawn", bound=Replayable)
LEAST_WORLDS = 12
"""Worlds that a search judges before it says that it found nothing, however little time it has."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A search that found nothing wrong."""

    worlds: int
    """Worlds that were judged."""
    seconds: float
    out_of_time: bool
    """Whether the time was over before all examples were judged."""


class _OutOfTime(BaseException):
    """Ends a search; hypothesis lets it pass."""


def search(
    drawn: SearchStrategy[Drawn],
    judge: Callable[[Drawn], None],
    *,
    examples: int,
    seconds: float,
    seed: int,
) -> Report:
    """Judge worlds until one is refuted, then look for the smallest such world.

    There is no deadline for one world. When the time is over, the search ends with the smallest world that it
    has found; if it has found none, it goes on until it has judged a few worlds at least.

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
    began, judged = time.monotonic(), 0
    failing: list[Violation] = []
    refuted: dict[str, Drawn] = {}

    def one(world: Drawn) -> None:
        nonlocal judged
        if time.monotonic() - began > seconds and (failing or judged >= LEAST_WORLDS):
            raise _OutOfTime
        judged += 1
        try:
            judge(world)
        except Violation as violation:
            violation.replay = world.line()
            failing.append(violation)
            refuted[violation.replay] = world
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
    found, late = _run(run, failing)
    if found:
        first = found[0] if _fails(judge, refuted[found[0].replay]) else _unrepeatable(found[0])
        first.others = found[1:]
        raise first
    return Report(worlds=judged, seconds=time.monotonic() - began, out_of_time=late)


def replay(world: Drawn, judge: Callable[[Drawn], None]) -> Report:
    """Judge this one world."""
    began = time.monotonic()
    try:
        judge(world)
    except Violation as violation:
        violation.replay = world.line()
        raise
    return Report(worlds=1, seconds=time.monotonic() - began, out_of_time=False)


def _run(run: Callable[[], None], failing: Sequence[Violation]) -> tuple[list[Violation], bool]:
    """What the run refutes, one violation for each claim, and whether it ran out of time.

    Hypothesis's frames and notes are taken off.
    """
    found: Sequence[BaseException] = ()
    late = False
    try:
        with warnings.catch_warnings():
            # A checker of annotations that draws samples is no randomness of a world.
            warnings.filterwarnings("ignore", message="Do not use the `random` module inside strategies")
            run()
    except _OutOfTime:
        found, late = failing, True
    except Violation as violation:
        found = [violation]
    except Flaky:
        found = [_unrepeatable(failing[-1])]
    except ExceptionGroup as group:
        found = [_unrepeatable(failing[-1]) if isinstance(e, Flaky) else e for e in group.exceptions]
    smallest: dict[str, Violation] = {}
    for error in found:
        if not isinstance(error, Violation):
            raise error
        error.__notes__ = []
        error.__context__ = None
        known = smallest.get(error.invariant)
        if known is None or (len(error.replay), error.replay) < (len(known.replay), known.replay):
            smallest[error.invariant] = error.with_traceback(None)
    order = list(CLAIMS)
    return sorted(smallest.values(), key=lambda violation: order.index(violation.invariant)), late


def _fails(judge: Callable[[Drawn], None], world: Drawn) -> bool:
    try:
        judge(world)
    except Violation:
        return True
    return False


def _unrepeatable(violation: Violation) -> Violation:
    found = Violation("a_world_repeats", f"failed once and passed when it was run again: {violation.finding}")
    found.replay, found.draw = violation.replay, violation.draw
    return found
