"""Pipeline schedules as plain lists: which forward and backward each stage makes, in which order.

Nothing here computes or communicates. A schedule is data: `isozyme.parallel.pipeline_timeline` tells how long
it takes, how many activations it keeps and what is sent when, and `isozyme.parallel.pipeline_runner` runs it.
A schedule of your own is another list of the same form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from isozyme.core.errors import Rules, did_you_mean
from isozyme.core.pipeline import ScheduleKind


@dataclass(frozen=True, order=True)
class Action:
    """One forward (F) or backward (B) of one micro-batch through one chunk of a stage."""

    kind: Literal["F", "B"]
    chunk: int
    """Number of the chunk on its stage, from the embedding to the head."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f"'{self.chunk}" if self.chunk else "")


Schedule = Sequence[Sequence[Action]]
"""For each stage its actions in order."""


def schedule(kind: ScheduleKind, stages: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """The actions of one optimiser step.

    - `gpipe` (Huang et al. 2019, arXiv:1811.06965): all forwards, then all backwards. Simple; a stage keeps
      the activations of all m micro-batches.
    - `1f1b` (Narayanan et al. 2021, PipeDream-2BW, arXiv:2006.09503): after a warm-up, one forward and one
      backward in turn. As fast, but stage s of p keeps at most p - s micro-batches.
    - `interleaved` (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): 1F1B over v chunks a stage. The
      bubble is v times smaller, and v times as much is sent.

    Idle share of the time, with micro-batches that all take as long: (p-1) / (v*m + p-1), v = 1 for the first
    two.

    Args:
        kind: one of the above.
        stages: p.
        micro_batches: m, of one step.
        chunks: v; more than one for `interleaved` with more than one stage only.

    Raises:
        ConfigError: if a number is out of range, or m is not a multiple of p for `interleaved`.

    >>> [" ".join(map(str, stage)) for stage in schedule("1f1b", stages=2, micro_batches=3)]
    ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
    """
    _check(kind, stages, micro_batches, chunks)
    if kind == "gpipe":
        every = range(micro_batches)
        return [[Action(what, 0, m) for what in ("F", "B") for m in every] for _ in range(stages)]
    return [_one_forward_one_backward(kind, stage, stages, micro_batches, chunks) for stage in range(stages)]


def forward_schedule(stages: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """Forwards alone, for evaluation; any number of micro-batches is legal.

    >>> [" ".join(map(str, stage)) for stage in forward_schedule(stages=2, micro_batches=3, chunks=2)]
    ["F0 F1 F0'1 F1'1 F2 F2'1", "F0 F1 F0'1 F1'1 F2 F2'1"]
    """
    _check("1f1b", stages, micro_batches, 1)
    _check("interleaved", stages, stages, chunks)
    return [_in_rounds("F", stages, micro_batches, chunks) for _ in range(stages)]


def _one_forward_one_backward(
    kind: ScheduleKind, stage: int, stages: int, micro_batches: int, chunks: int
) -> list[Action]:
    forwards = _in_rounds("F", stages, micro_batches, chunks)
    backwards = _in_rounds("B", stages, micro_batches, chunks)
    ahead = stages - stage - 1
    if kind == "interleaved":
        # The first backward comes when the first micro-batch has been through all chunks and come back to
        # this stage; each later stage is one forward and one backward nearer to that.
        ahead = 2 * ahead + (chunks - 1) * stages
    warm_up = min(ahead, len(forwards))
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - warm_up :]


def _in_rounds(what: Literal["F", "B"], stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """Rounds of p micro-batches: each round through the first chunk, then through the second, and so on."""
    order = range(chunks) if what == "F" else reversed(range(chunks))
    through = list(order)
    return [
        Action(what, chunk, m)
        for first in range(0, micro_batches, stages)
        for chunk in through
        for m in range(first, min(first + stages, micro_batches))
    ]


def _check(kind: ScheduleKind, stages: int, micro_batches: int, chunks: int) -> None:
    rules = Rules("pipeline schedule")
    kinds = get_args(ScheduleKind)
    rules.check(kind in kinds, f"unknown schedule: kind={kind}. {did_you_mean(str(kind), kinds)}")
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        rules.check(value >= 1, f"{name} must be at least 1: {name}={value}.")
    rules.raise_if_broken()
    rules.check(
        chunks == 1 or (kind == "interleaved" and stages > 1),
        f"several chunks need the interleaved schedule and several stages: kind={kind}, stages={stages}, "
        f"chunks={chunks}. Use chunks=1.",
    )
    near = max(1, round(micro_batches / stages)) * stages
    rules.check(
        kind != "interleaved" or micro_batches % stages == 0,
        f"micro_batches must be a multiple of stages in the interleaved schedule: "
        f"micro_batches={micro_batches}, stages={stages}; {micro_batches} % {stages} = "
        f"{micro_batches % stages}. The nearest is {near}.",
    )
    rules.raise_if_broken()
