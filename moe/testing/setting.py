"""What every world of several ranks says, whatever is tested in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from isozyme.core.topology import Layout, Topology
from isozyme.moe.testing.schedule import ScheduleData


@runtime_checkable
class Setting(Protocol):
    """Ranks, experts and the order of events."""

    @property
    def topology(self) -> Topology:
        """The rank arithmetic."""
        ...

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        ...

    @property
    def num_experts(self) -> int:
        """E, over all ranks."""
        ...

    @property
    def topk(self) -> int:
        """K."""
        ...

    @property
    def hidden(self) -> int:
        """H."""
        ...

    @property
    def schedule(self) -> ScheduleData:
        """Which rank runs next."""
        ...

    @property
    def delay(self) -> tuple[int, int] | None:
        """(rank, call): the rank makes this communicator call only when no other rank can go on."""
        ...

    def fullest(self) -> int:
        """The most slots that any rank sends to any expert."""
        ...

    def groups(self) -> Sequence[tuple[int, ...]]:
        """The global ranks of each group that holds all experts together."""
        ...


class RememberingTopology(Topology):
    """A topology that works out everything once: all ranks of all runs ask for the same."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._groups: dict[tuple[int, str | tuple[str, ...]], tuple[int, ...]] = {}
        self._coordinates: dict[int, dict[str, int]] = {}
        self._sizes: dict[str | tuple[str, ...], int] = {}

    def group(self, rank: int, axes: str | Iterable[str]) -> tuple[int, ...]:
        """The ranks, ascending, that differ from `rank` on the named axes only."""
        names = axes if isinstance(axes, str) else tuple(axes)
        if (rank, names) not in self._groups:
            self._groups[rank, names] = super().group(rank, names)
        return self._groups[rank, names]

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of `rank` on every axis of both grids."""
        if rank not in self._coordinates:
            self._coordinates[rank] = super().coordinates(rank)
        return dict(self._coordinates[rank])

    def index(self, rank: int, axis: str) -> int:
        """The index of `rank` on one axis, or on a part of one."""
        found = self.coordinates(rank).get(axis)
        return super().index(rank, axis) if found is None else found

    def size(self, axes: str | Iterable[str]) -> int:
        """The number of ranks in one group over the named axes."""
        names = axes if isinstance(axes, str) else tuple(axes)
        if names not in self._sizes:
            self._sizes[names] = super().size(names)
        return self._sizes[names]
