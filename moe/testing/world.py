"""A world: who routes which token where, on which ranks, in which order of events. Pure data.

A world is drawn as a whole before any rank starts, prints as one line, and is made again from that line. The
tensors that belong to it are in `isozyme.moe.testing.inputs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, cast, get_args

import torch

from isozyme.core.errors import UsageError
from isozyme.core.topology import DEFAULT_ORDER, Layout, Topology
from isozyme.moe.testing.schedule import (
    ScheduleData,
    numbers_text,
    read_numbers,
    read_schedule,
    schedule_words,
)
from isozyme.moe.testing.setting import RememberingTopology

Slot = tuple[int, int, int]
"""(rank, token, choice)"""
Memory = Literal["contiguous", "transposed", "sliced", "expanded"]
DTYPES = ("float64", "float32", "float16", "bfloat16")
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
        return RememberingTopology(self.layout)

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
        parts = layout_words(self.layout)
        rows = "|".join(",".join(".".join(map(str, row)) for row in of_rank) for of_rank in self.ids)
        parts += [f"experts={self.num_experts}", f"topk={self.topk}", f"ids={rows}"]
        parts += [f"{name}={_slots_text(slots)}" for name, slots in self._marked().items() if slots]
        parts += [
            f"{name}={getattr(self, name)}" for name in ("hidden", "dtype", "memory") if self._is_set(name)
        ]
        parts += schedule_words(self.schedule, self.delay)
        return " ".join(parts)

    def _marked(self) -> dict[str, tuple[Slot, ...]]:
        return {"dropped": self.dropped, "zero": self.zero}

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != World.__dataclass_fields__[name].default)


def parse(line: str) -> World:
    """The world that prints as `line`.

    Raises:
        UsageError: if it is not such a line.
    """
    try:
        words = dict(word.split("=", 1) for word in line.split())
        schedule, delay = read_schedule(words)
        found = World(
            layout=read_layout(words),
            num_experts=int(words["experts"]),
            topk=int(words["topk"]),
            ids=tuple(
                tuple(read_numbers(row) for row in part.split(",") if row) for part in words["ids"].split("|")
            ),
            dropped=_read_slots(words.get("dropped", "")),
            zero=_read_slots(words.get("zero", "")),
            hidden=int(words.get("hidden", 3)),
            dtype=words.get("dtype", "float64"),
            memory=cast(Memory, words.get("memory", "contiguous")),
            schedule=schedule,
            delay=delay,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"a replay line must be one that a violation printed: {line!r}; {error}.") from error
    return checked(found)


def layout_words(layout: Layout) -> list[str]:
    """The words of a line that say the layout."""
    whole = layout.resolved()
    sizes = {axis: getattr(whole, axis) for axis in ("tp", "cp", "dp", "ep", "etp")}
    words = [f"{axis}={size}" for axis, size in sizes.items() if size != 1]
    return words if whole.order == DEFAULT_ORDER else [*words, f"order={whole.order}"]


def read_layout(words: Mapping[str, str]) -> Layout:
    """The layout that the words of a line say."""
    sizes = {axis: int(words[axis]) for axis in ("tp", "cp", "dp", "ep", "etp") if axis in words}
    return Layout(**{"dp": 1, **sizes}, order=words.get("order", DEFAULT_ORDER))


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
    if world.dtype not in DTYPES:
        problems.append(f"dtype={world.dtype} is none of {', '.join(DTYPES)}.")
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
    return ",".join(numbers_text(slot) for slot in slots)


def _read_slots(text: str) -> tuple[Slot, ...]:
    slots = [read_numbers(part) for part in text.split(",") if part]
    return tuple((rank, token, choice) for rank, token, choice in slots)
