"""Code written for torch.distributed, run unchanged on simulated ranks.

`simulate_torch(4, fn)` is `simulate(4, fn)` in whose ranks `torch.distributed` is initialised with the rank.
Every thread of a rank has a world of its own (torch keeps its groups in one object, made to be exchanged),
and the groups in it are `SimulatedProcessGroup`s. No function is replaced, so names that were imported before
work as well. Torch's private hooks are used in this file alone; all of it is undone when the run ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, TypeVar, overload

import torch._C._distributed_c10d
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from isozyme.core.errors import CommunicationError, UsageError
from isozyme.parallel.simulated import Delay, Fault, SimulatedWorld, simulate
from isozyme.parallel.simulated_baton import Schedule, simulating
from isozyme.parallel.simulated_torch_group import SimulatedProcessGroup
from isozyme.parallel.trace import Trace

Result = TypeVar("Result")
BACKEND = "simulated"
_Store: Any = torch._C._distributed_c10d.Store
_extension: Any = torch._C._distributed_c10d
"""The stubs lack some of its names."""


@overload
def simulate_torch(
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
def simulate_torch(
    world_size: int,
    fn: Callable[[SimulatedWorld], Result],
    *,
    schedule_seed: int = 0,
    schedule: Schedule | None = None,
    seed: int = 0,
    faults: Sequence[Fault | Delay] = (),
    trace: Literal[True],
) -> tuple[list[Result], Trace]: ...


def simulate_torch(
    world_size: int,
    fn: Callable[[SimulatedWorld], Result],
    *,
    schedule_seed: int = 0,
    schedule: Schedule | None = None,
    seed: int = 0,
    faults: Sequence[Fault | Delay] = (),
    trace: bool = False,
) -> list[Result] | tuple[list[Result], Trace]:
    """Run `fn(world)` on simulated ranks in which torch.distributed is initialised.

    The arguments, the results and the errors are those of `simulate`; a rank may use `world` and
    torch.distributed side by side. In a trace, the default group is called `world` and another one by its
    `group_desc` (`mesh_dp` for the axis dp of a device mesh) or `group <number>`.

    Raises:
        UsageError: if torch.distributed is already initialised in this process.
        CommunicationError: also if ranks do not build the same groups in the same order.

    >>> import torch
    >>> import torch.distributed as dist
    >>> def program(world):
    ...     x = torch.tensor([dist.get_rank()])
    ...     dist.all_reduce(x)
    ...     return x.item()
    >>> simulate_torch(3, program)
    [3, 3, 3]
    """
    if simulating():
        raise CommunicationError(
            "a simulated rank cannot simulate a world. Call simulate_torch from outside."
        )
    if dist.is_initialized():
        raise UsageError(
            "simulated ranks need a process without torch.distributed: it is initialised with "
            f"backend={dist.get_backend()}, world_size={dist.get_world_size()}. "
            "Call destroy_process_group() before, or simulate in another process."
        )
    with _worlds_by_thread() as worlds:

        def body(world: SimulatedWorld) -> Result:
            with worlds.entered(world):
                return fn(world)

        found = simulate(
            world_size,
            body,
            schedule_seed=schedule_seed,
            schedule=schedule,
            seed=seed,
            faults=faults,
            trace=True,
        )
        worlds.check_groups()
    return found if trace else found[0]


class _RankWorld:
    """What torch.distributed knows on one rank: its groups, by many names."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, Any] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []
        self.built = 0
        """Groups that were built on all ranks, the default group included."""
        self._group_count = 0

    @property
    def group_count(self) -> int:
        """The number that names the next group."""
        return self._group_count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self.built += max(0, value - self._group_count)
        self._group_count = value


def _of_thread(name: str) -> Any:
    """A property that is found in the world of the running thread."""
    return property(
        lambda self: getattr(self.current(), name), lambda self, value: setattr(self.current(), name, value)
    )


class _WorldsByThread(c10d._World):
    """Stands in for torch's world: simulated ranks find their own in it, other threads the original.

    Args:
        outside: the original.
    """

    default_pg = _of_thread("default_pg")
    pg_map = _of_thread("pg_map")
    pg_names = _of_thread("pg_names")
    pg_group_ranks = _of_thread("pg_group_ranks")
    pg_backend_config = _of_thread("pg_backend_config")
    group_count = _of_thread("group_count")
    tags_to_pg = _of_thread("tags_to_pg")
    pg_to_tag = _of_thread("pg_to_tag")
    pg_coalesce_state = _of_thread("pg_coalesce_state")
    comms = _of_thread("comms")

    def __init__(self, outside: Any) -> None:
        self._outside = outside
        self._local = threading.local()
        self._built: dict[int, int] = {}

    def current(self) -> Any:
        """The world of the running thread."""
        return getattr(self._local, "world", self._outside)

    @contextmanager
    def entered(self, world: SimulatedWorld) -> Iterator[None]:
        """Initialise torch.distributed in the thread of a rank; leave nothing at the end."""
        mine = self._local.world = _RankWorld()
        store = _NoStore(world)
        name = str(mine.group_count)
        mine.group_count += 1
        group = SimulatedProcessGroup(world, name, range(world.size))
        group._set_group_desc("default_pg")
        mine.default_pg = group
        mine.pg_map[group] = (BACKEND, store)
        mine.pg_names[group] = name
        mine.pg_group_ranks[group] = {rank: rank for rank in range(world.size)}
        mine.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(BACKEND)))
        mine.tags_to_pg = {"": [group], f"ptd:{name}": [group]}
        mine.pg_to_tag[group] = f"ptd:{name}"
        _extension._register_process_group(name, group)
        try:
            yield
        finally:
            self._built[world.rank] = mine.built
            _extension._unregister_all_process_groups()
            del self._local.world

    def create(self, options: Any, backend_options: Any) -> SimulatedProcessGroup:  # noqa: ARG002
        """A group that torch 2.11 asks the backend for, on one of its members."""
        default = self.current().default_pg
        return SimulatedProcessGroup(default.world, options.group_id, options.global_ranks_in_group)

    def check_groups(self) -> None:
        """All ranks must have built as many groups."""
        fewest, most = min(self._built, key=self._built.__getitem__), max(self._built.values())
        if self._built[fewest] != most:
            raise CommunicationError(
                f"every rank must build every group, also those that it is not in: rank {fewest} called "
                f"new_group {self._built[fewest] - 1} times, another rank {most - 1} times. "
                "Call new_group with the same ranks on all ranks."
            )


class _NoStore(_Store):  # type: ignore[misc]
    """The store of a simulated world: there is none, since ranks meet without one."""

    def __init__(self, world: SimulatedWorld) -> None:
        super().__init__()
        self._world = world

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise CommunicationError(
            f"simulated ranks have no store: rank={self._world.rank}. Make groups without backend=... "
            "(gloo and NCCL would use the store) and unset TORCH_DIST_INIT_BARRIER."
        )

    set = get = add = wait = check = compare_set = delete_key = num_keys = _refuse
    multi_get = multi_set = append = queue_push = queue_pop = queue_len = _refuse


@contextmanager
def _worlds_by_thread() -> Iterator[_WorldsByThread]:
    """Exchange torch's world and register the backend; undo both at the end."""
    outside = c10d._world
    worlds = _WorldsByThread(outside)
    backend = c10d.Backend
    backend.register_backend(BACKEND, worlds.create, extended_api=True, devices=["cpu", "cuda"])
    _extension._set_thread_isolation_mode(True)
    c10d._world = worlds
    try:
        yield worlds
    finally:
        c10d._world = outside
        _extension._set_thread_isolation_mode(False)
        backend._plugins.pop(BACKEND.upper(), None)
        backend.backend_capability.pop(BACKEND, None)
        backend.backend_type_map.pop(BACKEND, None)
        backend.backend_list.remove(BACKEND)
        delattr(backend, BACKEND.upper())
