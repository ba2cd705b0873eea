"""Worlds for a whole layer: windows of tokens over data-parallel ranks, as a line, a batch and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from isozyme.core.errors import UsageError
from isozyme.core.topology import Layout, Topology
from isozyme.moe.testing.schedule import ScheduleData, read_numbers, read_schedule, schedule_words
from isozyme.moe.testing.setting import RememberingTopology
from isozyme.moe.testing.strategies import Draw, Promises, layouts, schedules
from isozyme.moe.testing.world import layout_words, read_layout

HIDDEN = 4


@dataclass(frozen=True, kw_only=True)
class LayerPromises:
    """What a layer promises, hence which worlds it is shown."""

    ranks: int = 4
    """The most ranks."""
    windows: int = 3
    """The most windows of a rank."""
    uneven: bool = True
    """Data-parallel ranks may hold different numbers of windows, also none."""
    experts_per_rank: int = 2
    """The most experts of a rank."""
    topk: int = 2
    """The most choices of a token."""
    replicas: bool = True
    """More data-parallel ranks than EP (EDP > 1)."""
    split_windows: bool = False
    """TP or CP ranks hold contiguous parts of the same windows."""
    padding: bool = True
    """Some tokens are padding."""
    same_calls: bool = True
    """Every rank makes the same calls."""


@dataclass(frozen=True, kw_only=True)
class LayerWorld:
    """Windows of all data-parallel ranks, as prototypes; tokens of one prototype choose the same experts.

    `kinds[d][w][s]` is the prototype of a token, or -1 for padding.
    """

    layout: Layout = field(default_factory=Layout)
    num_experts: int = 1
    topk: int = 1
    kinds: tuple[tuple[tuple[int, ...], ...], ...] = ((),)
    schedule: ScheduleData = ()
    delay: tuple[int, int] | None = None
    hidden: int = HIDDEN

    @cached_property
    def topology(self) -> Topology:
        """The rank arithmetic."""
        return RememberingTopology(self.layout)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.topology.world_size

    @property
    def length(self) -> int:
        """S, tokens of a whole window: a multiple of every TP x CP up to 4."""
        return 4

    def groups(self) -> list[tuple[int, ...]]:
        """The global ranks of each group that holds all experts together."""
        return sorted({self.topology.group(rank, ("etp", "ep")) for rank in range(self.ranks)})

    def fullest(self) -> int:
        """The most slots that one rank could send to one expert."""
        return max((len(part) for part in self.kinds), default=0) * self.length

    def windows(self) -> list[tuple[int, ...]]:
        """All windows, in global order."""
        return [window for part in self.kinds for window in part]

    def on_one_rank(self) -> LayerWorld:
        """The same windows on one rank."""
        return replace(self, layout=Layout(), kinds=(tuple(self.windows()),), schedule=(), delay=None)

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the whole batch: tokens `[B, S, H]` in fp64, which are real `[B, S]`, and incoming gradients."""
        draw = torch.Generator().manual_seed(3)
        prototypes = torch.randn(4, self.hidden, generator=draw, dtype=torch.float64)
        kinds = torch.tensor(self.windows(), dtype=torch.int64).view(-1, self.length)
        number = torch.arange(kinds.numel(), dtype=torch.float64).view(kinds.shape)[..., None]
        column = torch.arange(self.hidden, dtype=torch.float64)
        valid = kinds >= 0
        tokens = prototypes[kinds.clamp(min=0)] + torch.cos(number * 7 + column * 2) * 0.01
        upstream = torch.cos(number * 5 + column * 1.7 + 1) * valid[..., None]
        return torch.where(valid[..., None], tokens, 9.0), valid, upstream

    def share(self, whole: Tensor, rank: int) -> Tensor:
        """A view of a rank's windows of the batch, and of each its contiguous part."""
        at = self.topology.coordinates(rank)
        sizes = [len(part) for part in self.kinds]
        parts = self.topology.size("tp") * self.topology.size("cp")
        mine = whole.split(sizes)[at["dp"]]
        piece = at["cp"] * self.topology.size("tp") + at["tp"]
        return mine[:, piece * (self.length // parts) : (piece + 1) * (self.length // parts)]

    def line(self) -> str:
        """The world as text, from which `parse_layer` makes it again."""
        rows = "|".join(",".join(".".join(map(str, row)) for row in part) for part in self.kinds)
        parts = [f"experts={self.num_experts}", f"topk={self.topk}", f"kinds={rows}"]
        parts = [*layout_words(self.layout), *parts, *schedule_words(self.schedule, self.delay)]
        return " ".join(parts)


def parse_layer(line: str) -> LayerWorld:
    """The world that prints as `line`.

    Raises:
        UsageError: if it is not such a line.
    """
    try:
        words = dict(word.split("=", 1) for word in line.split())
        schedule, delay = read_schedule(words)
        return LayerWorld(
            layout=read_layout(words),
            num_experts=int(words["experts"]),
            topk=int(words["topk"]),
            kinds=tuple(
                tuple(read_numbers(row) for row in part.split(",") if row)
                for part in words["kinds"].split("|")
            ),
            schedule=schedule,
            delay=delay,
        )
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(f"a replay line must be one that a violation printed: {line!r}; {error}.") from error


@st.composite
def layer_worlds(draw: Draw, promises: LayerPromises | None = None) -> LayerWorld:
    """Windows of few prototypes (so that experts are crowded or empty), some tokens or windows padding."""
    allowed = promises or LayerPromises()
    shapes = layouts(Promises(ranks=allowed.ranks, replicas=allowed.replicas))
    whole = shapes.filter(lambda layout: layout.tp * layout.cp == 1)
    cut = shapes.filter(lambda layout: layout.tp * layout.cp > 1)
    layout = draw(st.one_of(whole, cut) if allowed.split_windows and allowed.ranks > 1 else whole)
    assert layout.dp is not None
    experts = layout.ep * draw(st.integers(1, allowed.experts_per_rank))
    least = 0 if allowed.uneven else 1
    token = st.integers(0, 4 if allowed.padding else 3).map(lambda kind: kind if kind < 4 else -1)
    window: Any = st.tuples(*[token] * 4)
    if allowed.padding:
        window = st.one_of(window, window, window, st.just((-1,) * 4))
    even = None if allowed.uneven else draw(st.integers(least, allowed.windows))
    parts = st.lists(
        window, min_size=least if even is None else even, max_size=allowed.windows if even is None else even
    )
    return LayerWorld(
        layout=layout,
        num_experts=experts,
        topk=draw(st.integers(1, min(experts, allowed.topk))),
        kinds=tuple(tuple(draw(parts)) for _ in range(layout.dp)),
        schedule=draw(schedules()),
        delay=draw(
            st.one_of(
                st.none(), st.tuples(st.integers(0, Topology(layout).world_size - 1), st.integers(0, 9))
            )
        ),
    )


def layer_picture(world: LayerWorld) -> str:
    """Which windows are where, as plain text."""
    lines = [
        f"world: {world.ranks} ranks ({world.layout}), {world.num_experts} experts, top-{world.topk}, "
        f"windows of {world.length} tokens; letters are kinds of tokens, - is padding"
    ]
    number = 0
    for replica, part in enumerate(world.kinds):
        ranks = [r for r in range(world.ranks) if world.topology.coordinates(r)["dp"] == replica]
        texts = []
        for window in part:
            texts.append(f"window {number} {''.join('-abcd'[kind + 1] for kind in window)}")
            number += 1
        lines.append(f"  rank {', '.join(map(str, ranks))}: {'  '.join(texts) or 'no window'}")
    return "\n".join(lines)
