"""Simulated worlds: N ranks as threads of one process, in which a run replays exactly and faults show.

`simulate(4, fn)` calls `fn(world)` on four ranks. One rank runs at a time; the baton changes hands only
inside communicator calls, to a rank chosen by a seeded generator. So a run depends on its arguments alone, a
deadlock is seen at once without a time-out, and ranks that disagree about a call get an error naming both.

Simulated: the meaning of every communicator call, sends that wait for their receive, per-rank random streams
and default dtype, the caller's grad mode, autocast and default device. Not simulated: time and bandwidth;
the stream order of CUDA and of NCCL (a call takes part as soon as it is started); errors of a network; state
that is process-wide elsewhere (environment, deterministic-algorithm flags, torch modes of the caller). A
rank that holds a lock of its own across a communicator call can hang the run. Sums run in rank order; other
backends may round differently.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar, overload

from isozyme.core.errors import CommunicationError
from isozyme.parallel.communicator import Call, Communicator, SingleCommunicator
from isozyme.parallel.simulated_baton import Schedule, simulating
from isozyme.parallel.simulated_shared import Delay as Delay
from isozyme.parallel.simulated_shared import Fault as Fault
from isozyme.parallel.simulated_shared import Group, Shared
from isozyme.parallel.simulated_shared import SimulatedPending as SimulatedPending
from isozyme.parallel.trace import Trace

Result = TypeVar("Result")


@overload
def simulate(
    world_size: int,
    fn: Callable[[SimulatedWorld], Result],
    *,
    schedule_seed: int = 0,
    schedule: Schedule | None = None,
    seed: int = 0,
    faults: Sequence[Fault | Delay] = (),
    trace: Literal[False] = False,
) -> list[Result]: ...


@overload
def simulate(
    world_size: int,
    fn: Callable[[SimulatedWorld], Result],
    *,
    schedule_seed: int = 0,
    schedule: Schedule | None = None,
    seed: int = 0,
    faults: Sequence[Fault | Delay] = (),
    trace: Literal[True],
) -> tuple[list[Result], Trace]: ...


def simulate(
    world_size: int,
    fn: Callable[[SimulatedWorld], Result],
    *,
    schedule_seed: int = 0,
    schedule: Schedule | None = None,
    seed: int = 0,
    faults: Sequence[Fault | Delay] = (),
    trace: bool = False,
) -> list[Result] | tuple[list[Result], Trace]:
    """Run `fn(world)` on every rank of a simulated world.

    Args:
        world_size: the number of ranks.
        fn: one rank's program.
        schedule_seed: seeds the choice of who runs next.
        schedule: makes that choice itself, from the ascending list of the ranks that may run.
        seed: the random streams of rank r (Python, NumPy, torch) start from (seed, r); the caller's are
            as before afterwards.
        faults: errors to raise, and calls to delay, on given ranks.
        trace: return the trace as well.

    Returns:
        The ranks' results in rank order; with `trace`, a pair of them and the `Trace`.

    Raises:
        CommunicationError: if ranks disagree about a call, all wait for each other, a rank returns while
            others wait for it or before it has waited for a call that it started, or a buffer is changed
            while a call is under way; also if a simulated rank calls it.
        ValueError: if there is no rank.
        Exception: whatever a rank raises, as it is; the others are stopped.

    >>> import torch
    >>> def rank_program(world):
    ...     everyone = world.whole()
    ...     return everyone.all_reduce(torch.tensor([world.rank])).item()
    >>> simulate(3, rank_program)
    [3, 3, 3]
    """
    if simulating():
        raise CommunicationError("a simulated rank cannot simulate a world. Call simulate from outside.")
    if world_size < 1:
        raise ValueError(f"a world needs at least one rank: world_size={world_size}.")
    shared = Shared(world_size, schedule or random.Random(schedule_seed).choice, seed, faults)
    results: dict[int, Result] = {}

    def body(rank: int) -> None:
        results[rank] = fn(SimulatedWorld(shared, rank))
        shared.check_finished(rank)

    shared.baton.run(body)
    shared.check_splits_complete()
    ordered = [results[rank] for rank in range(world_size)]
    return (ordered, Trace(shared.records)) if trace else ordered


class SimulatedWorld:
    """One simulated rank's view of all ranks (the `World` of a `ProcessGroups`)."""

    def __init__(self, shared: Shared, rank: int) -> None:
        self._shared = shared
        self.rank = rank
        self.size = len(shared.records)
        self._splits = 0

    def split(self, name: str, partition: Sequence[tuple[int, ...]]) -> Communicator:
        """The communicator of this rank's part. Every rank calls it with the same partition of all ranks."""
        number, self._splits = self._splits, self._splits + 1
        groups = self._shared.split(self.rank, number, name, [tuple(part) for part in partition])
        group = next(group for group in groups if self.rank in group.ranks)
        if len(group.ranks) == 1:
            return SingleCommunicator(name, self.rank)
        return SimulatedCommunicator(self._shared, group, self.rank)

    def whole(self, name: str = "world") -> Communicator:
        """A communicator over all ranks."""
        return self.split(name, [tuple(range(self.size))])

    def join(self, key: str, name: str, ranks: Sequence[int]) -> SimulatedCommunicator:
        """The communicator of a group that its members alone build, each with the same key and ranks."""
        return SimulatedCommunicator(
            self._shared, self._shared.join(self.rank, key, name, tuple(ranks)), self.rank
        )


class SimulatedCommunicator(Communicator):
    """One simulated rank's view of a group."""

    def __init__(self, shared: Shared, group: Group, rank: int) -> None:
        super().__init__(group.name, group.ranks, group.ranks.index(rank))
        self._shared, self._group = shared, group

    def _start(self, call: Call) -> SimulatedPending:
        return self._shared.post(self._group, self.rank, call)
