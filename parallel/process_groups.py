"""The process-group manager: a topology and a world become the named communicators of this rank.

Groups are built once, eagerly, in an order that is the same on every rank (torch.distributed requires it),
and are passed as arguments: there is no global registry. A group of one rank is an ordinary communicator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from isozyme.core.errors import ConfigError, divisors
from isozyme.core.topology import Topology
from isozyme.parallel.communicator import Communicator, SingleCommunicator

GROUPS: tuple[tuple[str, ...], ...] = (
    ("tp",),
    ("cp",),
    ("dp",),
    ("pp",),
    ("etp",),
    ("ep",),
    ("edp",),
    ("tp", "cp"),
    ("cp", "dp"),
    ("tp", "cp", "dp"),
    ("etp", "ep"),
    ("tp", "cp", "dp", "pp"),
)
"""The axes, alone and together, that a manager builds groups for at every layout."""


def group_axes(topology: Topology) -> tuple[tuple[str, ...], ...]:
    """All axes, alone and together, that a manager builds groups for: `GROUPS` and the parts of TP.

    For each n that properly divides TP there is `tp%n`, the neighbours that hold the same shard of a weight
    with fewer parts than TP ranks (K/V heads), alone and with the other ranks that sum its gradient.
    """
    parts = [f"tp%{n}" for n in divisors(topology.size("tp"))[1:-1]]
    return (*GROUPS, *((part,) for part in parts), *((part, "cp", "dp") for part in parts))


@runtime_checkable
class World(Protocol):
    """All ranks, and a way to make groups of them: torch.distributed, simulated, or one rank alone."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def split(self, name: str, partition: Sequence[tuple[int, ...]]) -> Communicator:
        """The communicator of this rank's part. Every rank calls it with the same partition of all ranks."""
        ...


class SingleWorld:
    """A world of one rank."""

    rank = 0
    size = 1

    def split(self, name: str, partition: Sequence[tuple[int, ...]]) -> Communicator:
        """The size-one communicator; the only partition of one rank is itself."""
        assert list(partition) == [(0,)]
        return SingleCommunicator(name)


class ProcessGroups:
    """The communicators of one rank, by axis.

    Args:
        topology: the rank arithmetic.
        world: the transport; its size must equal the topology's.

    Raises:
        ConfigError: if the sizes differ.

    >>> from isozyme.core.topology import Layout
    >>> groups = ProcessGroups(Topology(Layout()), SingleWorld())
    >>> groups["ep"].size, groups["cp", "dp"].ranks
    (1, (0,))
    """

    def __init__(self, topology: Topology, world: World) -> None:
        if topology.world_size != world.size:
            raise ConfigError(
                f"the layout needs {topology.world_size} ranks ({topology.layout}), not {world.size}."
            )
        self.topology = topology
        self.rank = world.rank
        self.coordinates = topology.coordinates(world.rank)
        self._communicators = {axes: self._build(axes, world) for axes in group_axes(topology)}
        pairs = _partition(topology.embedding_group(rank) for rank in range(world.size))
        rest = set(range(world.size)) - {rank for pair in pairs for rank in pair}
        self.embedding = world.split("embedding", sorted([*pairs, *((rank,) for rank in rest)]))
        """The first and last pipeline stage, which share a tied embedding."""

    def _build(self, axes: tuple[str, ...], world: World) -> Communicator:
        groups = (self.topology.group(rank, axes) for rank in range(world.size))
        return world.split("+".join(axes), _partition(groups))

    def __getitem__(self, axes: str | tuple[str, ...]) -> Communicator:
        """The communicator over one axis or several, such as `groups["ep"]` or `groups["cp", "dp"]`."""
        names = (axes,) if isinstance(axes, str) else axes
        for known, communicator in self._communicators.items():
            if set(known) == set(names):
                return communicator
        raise KeyError(
            f"no group over {'+'.join(names)}; there are {', '.join(map('+'.join, self._communicators))}."
        )

    @property
    def world(self) -> Communicator:
        """All ranks."""
        return self._communicators["tp", "cp", "dp", "pp"]


def _partition(groups: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return sorted(set(groups))
