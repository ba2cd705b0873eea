"""What a pipeline schedule comes to: when each action runs, what stands idle, what is kept and what is sent.

A schedule is played through without ranks: each stage makes its actions in order, each as soon as what it
needs has been made elsewhere. A schedule that cannot be played to its end would deadlock, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isozyme.core.errors import ConfigError
from isozyme.parallel.pipeline_schedule import Action, Schedule


@dataclass(frozen=True)
class Slot:
    """One action and the time that it takes, from `start` to `stop`."""

    action: Action
    start: int
    stop: int


@dataclass(frozen=True)
class Timeline:
    """The slots of each stage, in order. Printing it draws the stages as rows and time as columns."""

    slots: Sequence[Sequence[Slot]]

    @property
    def length(self) -> int:
        """When the last action of all stages ends."""
        return max(slot.stop for stage in self.slots for slot in stage)

    @property
    def bubble_share(self) -> float:
        """The idle share of all stages' time, between 0 and 1."""
        busy = sum(slot.stop - slot.start for stage in self.slots for slot in stage)
        return 1 - busy / (self.length * len(self.slots))

    def peak_in_flight(self, stage: int) -> int:
        """The most (chunk, micro-batch) pairs of a stage whose forward is done and whose backward is not."""
        now = peak = 0
        for slot in self.slots[stage]:
            now += 1 if slot.action.kind == "F" else -1
            peak = max(peak, now)
        return peak

    def __str__(self) -> str:
        width = max(len(str(slot.action)) for stage in self.slots for slot in stage) + 1
        rows = []
        for number, stage in enumerate(self.slots):
            cells = ["."] * self.length
            for slot in stage:
                cells[slot.start : slot.stop] = [str(slot.action), *"-" * (slot.stop - slot.start - 1)]
            rows.append(f"stage {number}: " + "".join(f"{cell:<{width}}" for cell in cells).rstrip())
        return "\n".join(rows)


def play(schedule: Schedule, *, forward: int = 1, backward: int = 1) -> Timeline:
    """When each action runs if every forward and every backward takes as long as given.

    The forward of virtual stage v (chunk c of stage s is v = c * stages + s) needs that of v - 1; the
    backward needs that of v + 1, and the forward of v itself.

    Raises:
        ConfigError: if some action can never run, or an action is there twice or not at all.

    >>> from isozyme.parallel.pipeline_schedule import schedule
    >>> print(play(schedule("1f1b", stages=2, micro_batches=3)))
    stage 0: F0 F1 .  B0 F2 B1 .  B2
    stage 1: .  F0 B0 F1 B1 F2 B2 .
    """
    last = _last_virtual_stage(schedule)
    stages = len(schedule)
    done: dict[tuple[str, int, int], int] = {}
    slots: list[list[Slot]] = [[] for _ in schedule]
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedule):
            while len(slots[stage]) < len(actions):
                action = actions[len(slots[stage])]
                needed = [done.get(key) for key in _needs(action, stage, stages, last)]
                if None in needed:
                    break
                free = slots[stage][-1].stop if slots[stage] else 0
                start = max([free, *(time for time in needed if time is not None)])
                stop = start + (forward if action.kind == "F" else backward)
                slots[stage].append(Slot(action, start, stop))
                done[action.kind, virtual_stage(action, stage, stages), action.micro_batch] = stop
                moved = True
    stuck = [
        f"stage {stage} waits at {actions[len(made)]}"
        for stage, (actions, made) in enumerate(zip(schedule, slots, strict=True))
        if len(made) < len(actions)
    ]
    if stuck:
        raise ConfigError(
            f"a schedule must not deadlock: {'; '.join(stuck)}. Change the order of the actions."
        )
    return Timeline(slots)


def virtual_stage(action: Action, stage: int, stages: int) -> int:
    """The number of a stage's chunk among those of all stages, from the embedding to the head."""
    return action.chunk * stages + stage


def _needs(action: Action, stage: int, stages: int, last: int) -> list[tuple[str, int, int]]:
    here, m = virtual_stage(action, stage, stages), action.micro_batch
    if action.kind == "F":
        return [("F", here - 1, m)] if here else []
    return [("F", here, m)] + ([("B", here + 1, m)] if here < last else [])


def _last_virtual_stage(schedule: Schedule) -> int:
    """The virtual stage with the head; refuses a schedule in which an action is missing or there twice."""
    kinds = sorted({action.kind for stage in schedule for action in stage}, reverse=True)
    chunks = 1 + max((action.chunk for stage in schedule for action in stage), default=0)
    count = 1 + max((action.micro_batch for stage in schedule for action in stage), default=-1)
    wanted = sorted(Action(kind, c, m) for kind in kinds for c in range(chunks) for m in range(count))
    for number, stage in enumerate(schedule):
        if sorted(stage) != wanted or "F" not in kinds:
            raise ConfigError(
                f"each stage makes every forward (and backward) of {count} micro-batches and {chunks} chunks "
                f"once: stage {number} has {len(stage)} actions, {len(set(stage))} of them different, "
                f"instead of {len(wanted)}. Add what is missing, and remove what is there twice."
            )
    return chunks * len(schedule) - 1


@dataclass(frozen=True, order=True)
class Transfer:
    """One tensor that goes from one stage to another: hidden states (F) or their gradient (B)."""

    source: int
    destination: int
    action: Action
    """What needs it, at the destination."""


@dataclass(frozen=True)
class Step:
    """What one stage does in one tick: at most one action, then transfers to and from it, all at once."""

    action: Action | None
    transfers: tuple[Transfer, ...]


def plan(schedule: Schedule) -> list[list[Step]]:
    """For each stage its actions and the transfers between them, in an order that cannot deadlock.

    Every action is given one tick, as `play` finds it. A tensor is sent and received in the tick in which it
    is made, after the action: so both ends exchange the same tensors in the same ticks and, within a tick, in
    the same order. Whoever waits in tick t waits for something that others do in tick t or before.
    """
    timeline, stages = play(schedule), len(schedule)
    last = _last_virtual_stage(schedule)
    steps: list[dict[int, tuple[Action | None, list[Transfer]]]] = [{} for _ in schedule]
    for stage, slots in enumerate(timeline.slots):
        for slot in slots:
            steps[stage].setdefault(slot.stop, (None, []))
            steps[stage][slot.stop] = (slot.action, steps[stage][slot.stop][1])
            transfer = _transfer(slot.action, stage, stages, last)
            if transfer is not None:
                for end in (transfer.source, transfer.destination):
                    steps[end].setdefault(slot.stop, (None, []))[1].append(transfer)
    return [
        [Step(action, tuple(sorted(transfers))) for _, (action, transfers) in sorted(of_stage.items())]
        for of_stage in steps
    ]


def _transfer(action: Action, stage: int, stages: int, last: int) -> Transfer | None:
    """Where the result of an action goes."""
    there = virtual_stage(action, stage, stages) + (1 if action.kind == "F" else -1)
    if not 0 <= there <= last:
        return None
    chunk, destination = divmod(there, stages)
    return Transfer(stage, destination, Action(action.kind, chunk, action.micro_batch))
