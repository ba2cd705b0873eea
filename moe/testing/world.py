"""A world: who routes which token where, on which ranks, in which order of events. Pure data.

A world is drawn as a whole before any rank starts, prints as one line, and is made again from that line. The
tensors that belong to it are in `isozyme.moe.testing.inputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

import torch

from isozyme.core.errors import UsageError
from isozyme.core.topology import DEFAULT_ORDER, Layout, Topology
from isozyme.moe.testing.schedule import ScheduleData

Slot = tuple[int, int, int]
"""(rank, token, choice)"""
Memory = Literal["contiguous", "transposed", "sliced", "expanded"]
MOST_TOKENS = 64
MOST_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class World:
    """Tokens of all ranks, their experts, and how the run goes.

    `ids[r][t]` are the K global experts of token t of rank r, distinct.
    """

    layout: Layout = field(default_factory=Layout)
    num_experts: int = 1
    topk: int = 1
    ids: tuple[tuple[tuple[int, ...], ...], ...] = ((),)
    dropped: tuple[Slot, ...] = ()
    """Slots that are not kept."""
    zero: tuple[Slot, ...] = ()
    """Slots with the combine weight 0, which are sent all the same."""
    hidden: int = 3
    dtype: str = "float64"
    memory: Memory = "contiguous"
    """How the tokens and the incoming gradients lie in memory; `expanded` has strides of zero."""
    schedule: ScheduleData = ()
    delay: tuple[int, int] | None = None
    """(rank, call): from this communicator call on, the rank runs only when no other can."""

    @cached_property
    def topology(self) -> Topology:
        """The rank arithmetic; all runs of a world share it."""
        return _Remembering(self.layout)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.ids)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the tokens."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def groups(self) -> list[tuple[int, ...]]:
        """The global ranks, ascending, of each group that holds all experts together."""
        topology = self.topology
        return sorted({topology.group(rank, ("etp", "ep")) for rank in range(self.ranks)})

    def is_kept(self, slot: Slot) -> bool:
        """Whether the slot is sent at all."""
        return slot not in self.dropped

    def slots(self, rank: int) -> list[Slot]:
        """The kept slots of one rank's tokens, in order."""
        every = ((rank, t, k) for t in range(len(self.ids[rank])) for k in range(self.topk))
        return [slot for slot in every if self.is_kept(slot)]

    def fullest(self) -> int:
        """The most kept slots that one rank sends to one expert: rows that a fixed-size buffer needs."""
        most = 0
        for rank in range(self.ranks):
            counts = [0] * self.num_experts
            for _, token, choice in self.slots(rank):
                counts[self.ids[rank][token][choice]] += 1
            most = max(most, *counts)
        return most

    # --- One line

    def line(self) -> str:
        """The world as text, from which `parse` makes it again.

        >>> World(layout=Layout(ep=2), num_experts=2, ids=(((0,),), ((1,), (0,)))).line()
        'dp=2 ep=2 experts=2 topk=1 ids=0|1,0'
        """
        whole = self.layout.resolved()
        sizes = {axis: getattr(whole, axis) for axis in ("tp", "cp", "dp", "ep", "etp")}
        parts = [f"{axis}={size}" for axis, size in sizes.items() if size != 1]
        if whole.order != DEFAULT_ORDER:
            parts.append(f"order={whole.order}")
        rows = "|".join(",".join(".".join(map(str, row)) for row in of_rank) for of_rank in self.ids)
        parts += [f"experts={self.num_experts}", f"topk={self.topk}", f"ids={rows}"]
        parts += [f"{name}={_slots_text(slots)}" for name, slots in self._marked().items() if slots]
        parts += [
            f"{name}={getattr(self, name)}" for name in ("hidden", "dtype", "memory") if self._is_set(name)
        ]
        if self.schedule != ():
            seeded = isinstance(self.schedule, int)
            parts.append(f"seed={self.schedule}" if seeded else f"schedule={_numbers_text(self.schedule)}")
        if self.delay is not None:
            parts.append(f"delay={_numbers_text(self.delay)}")
        return " ".join(parts)

    def _marked(self) -> dict[str, tuple[Slot, ...]]:
        return {"dropped": self.dropped, "zero": self.zero}

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != World.__dataclass_fields__[name].default)


class _Remembering(Topology):
    """A topology that works out each group once: all ranks of all runs ask for the same ones."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._known: dict[tuple[int, tuple[str, ...]], tuple[int, ...]] = {}

    def group(self, rank: int, axes: str | Iterable[str]) -> tuple[int, ...]:
        """The ranks, ascending, that differ from `rank` on the named axes only."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        if (rank, names) not in self._known:
            self._known[rank, names] = super().group(rank, names)
        return self._known[rank, names]


def parse(line: str) -> World:
    """The world that prints as `line`.

    Raises:
        UsageError: if it is not such a line.
    """
    try:
        words = dict(word.split("=", 1) for word in line.split())
        sizes = {axis: int(words.pop(axis)) for axis in ("tp", "cp", "dp", "ep", "etp") if axis in words}
        layout = Layout(**{"dp": 1, **sizes}, order=words.pop("order", DEFAULT_ORDER))
        found = World(
            layout=layout, **{name: value for word in words.items() for name, value in [_field(*word)]}
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"a replay line must be one that a violation printed: {line!r}; {error}.") from error
    return checked(found)


def _field(name: str, text: str) -> tuple[str, object]:
    """Name and value of a field of `World` from one word of a line."""
    readers: dict[str, Callable[[str], object]] = {
        "experts": int,
        "topk": int,
        "hidden": int,
        "seed": int,
        "ids": lambda t: tuple(
            tuple(_numbers(row) for row in part.split(",") if row) for part in t.split("|")
        ),
        "dropped": lambda t: tuple(_numbers(slot) for slot in t.split(",")),
        "zero": lambda t: tuple(_numbers(slot) for slot in t.split(",")),
        "schedule": _numbers,
        "delay": _numbers,
        "dtype": str,
        "memory": str,
    }
    return {"experts": "num_experts", "seed": "schedule"}.get(name, name), readers[name](text)


def checked(world: World) -> World:
    """The world itself, if it makes sense.

    Raises:
        UsageError: with everything that does not.
    """
    problems = world.layout.problems(world.ranks)
    if not problems and world.num_experts % world.topology.size("ep"):
        problems.append(f"ep must divide experts: experts={world.num_experts}, {world.layout}.")
    rows = [row for of_rank in world.ids for row in of_rank]
    if any(len(set(row)) != world.topk or not set(row) <= set(range(world.num_experts)) for row in rows):
        problems.append(f"a token needs topk={world.topk} distinct experts below {world.num_experts}.")
    if world.memory not in get_args(Memory):
        problems.append(f"memory={world.memory} is none of {', '.join(get_args(Memory))}.")
    if max(map(len, world.ids)) > MOST_TOKENS or world.ranks > MOST_RANKS:
        problems.append(f"payloads encode up to {MOST_TOKENS} tokens on each of {MOST_RANKS} ranks.")
    if problems:
        raise UsageError("a world must make sense: " + " ".join(problems))
    return world


def on_one_rank(world: World, ids: Sequence[Sequence[int]], dropped: Sequence[Sequence[int]]) -> World:
    """The same world on one rank, for tokens that go to `ids` without the slots (token, choice) `dropped`."""
    return replace(
        world,
        layout=Layout(),
        ids=(tuple(tuple(row) for row in ids),),
        dropped=tuple((0, token, choice) for token, choice in dropped),
        zero=(),
        schedule=(),
        delay=None,
    )


def _slots_text(slots: Sequence[Slot]) -> str:
    return ",".join(".".join(map(str, slot)) for slot in slots)


def _numbers_text(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split("."))
