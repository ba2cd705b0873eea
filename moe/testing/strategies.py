"""Hypothesis strategies for worlds. Everything is drawn before a rank starts, and shrinks to little.

Small is: few ranks, tokens, experts and choices; every token to the first expert; nothing dropped; fp64 and
contiguous; ranks that take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from isozyme.core.topology import Layout, Topology
from isozyme.moe.testing.schedule import ScheduleData
from isozyme.moe.testing.world import MOST_TOKENS, Memory, Slot, World

Draw = st.DrawFn
Ids = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Promises:
    """What the code under test promises, hence which worlds it is shown and what is asked of it."""

    ranks: int = 4
    """The most ranks of a world."""
    tokens: int = 5
    """The most tokens of a rank, but for a few large worlds with up to 33."""
    experts_per_rank: int = 3
    topk: int = 4
    """The most choices of a token; K = E is shown as well."""
    ragged: bool = True
    """Ranks may hold different numbers of tokens …"""
    empty_ranks: bool = True
    """… and also none."""
    drops: bool = False
    """Slots may be dropped (style torch: their expert id is -1)."""
    zero_weights: bool = True
    """A combine weight may be 0; the row is sent all the same."""
    etp: bool = False
    """Expert tensor parallelism: several ranks hold parts of one expert."""
    replicas: bool = True
    """Several groups of ranks hold all experts (EDP), also groups whose ranks are not neighbours."""
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")
    memory: tuple[Memory, ...] = ("contiguous", "transposed", "sliced", "expanded")
    weighted: bool = True
    """Combine weights are applied, by the experts or by `combine`."""
    ordered: bool = False
    """An expert's rows are in the order of source rank, then token."""
    filler: bool = False
    """Rows of zeros with weight 0 may stand between the real ones."""
    same_calls: bool = True
    """Every rank makes the same calls. Not so for code that sends messages to chosen ranks only."""


def layouts(promises: Promises) -> st.SearchStrategy[Layout]:
    """Dense and expert factorisations of up to `promises.ranks` ranks; one rank first."""
    found = []
    for ranks in range(1, promises.ranks + 1):
        for ep in range(1, ranks + 1):
            for etp in range(1, ranks // ep + 1) if promises.etp else (1,):
                if ranks % (ep * etp) or (ep * etp < ranks and not promises.replicas):
                    continue
                found.append(Layout(dp=ranks, ep=ep, etp=etp))
                found += _strided(ranks, ep, etp) if promises.replicas else []
    return st.sampled_from(found)


def _strided(ranks: int, ep: int, etp: int) -> list[Layout]:
    """The same factorisation with other neighbours: TP or CP between the ranks of an EP group."""
    found = []
    if ranks % 2 == 0 and ep > 1:
        found.append(Layout(tp=2, dp=ranks // 2, ep=ep, etp=etp))
        found.append(Layout(cp=2, dp=ranks // 2, ep=ep, etp=etp))
    if ranks > ep * etp > 1:
        found.append(Layout(dp=ranks, ep=ep, etp=etp, order="tp-cp-dp-ep-pp"))
    return [layout for layout in found if not layout.problems(ranks)]


def schedules() -> st.SearchStrategy[ScheduleData]:
    """Turns, a list of choices, or the seed of random choices."""
    choices = st.lists(st.integers(0, 3), max_size=16).map(tuple)
    return st.one_of(st.just(()), choices, st.integers(0, 999))


@st.composite
def routings(draw: Draw, tokens: Sequence[int], num_experts: int, topk: int, local: int) -> tuple[Ids, ...]:
    """Experts of every token of every rank: balanced, Zipf, one hot set, half the experts, one rank's, or any.

    Tokens beyond the sixth of a rank repeat the first six, so that large worlds are drawn quickly.
    """
    kind = draw(st.sampled_from(["any", "hot", "half", "one rank", "zipf", "balanced"]))
    first = draw(st.integers(0, num_experts - 1)) if kind not in ("any", "balanced") else 0
    order = [(first + step) % num_experts for step in range(num_experts)]
    width = {"hot": topk, "half": (num_experts + 1) // 2, "one rank": local}.get(kind, num_experts)
    popular = order[: max(width, topk)]
    found, number = [], 0
    for count in tokens:
        pattern: list[tuple[int, ...]] = []
        for _ in range(min(count, 6)):
            pattern.append(
                tuple((number * topk + choice) % num_experts for choice in range(topk))
                if kind == "balanced"
                else _chosen(draw, popular, topk, skewed=kind == "zipf")
            )
            number += 1
        found.append(tuple(pattern[token % len(pattern)] for token in range(count)))
    return tuple(found)


def _chosen(draw: Draw, popular: Sequence[int], topk: int, *, skewed: bool) -> tuple[int, ...]:
    """`topk` distinct experts; skewed, the first ones are by far the most likely."""
    rest, chosen = list(popular), []
    for _ in range(topk):
        last = len(rest) - 1
        place = draw(st.integers(0, last)) if last else 0
        if skewed and place:
            place = min(place, draw(st.integers(0, last)), draw(st.integers(0, last)))
        chosen.append(rest.pop(place))
    return tuple(chosen)


@st.composite
def token_counts(draw: Draw, ranks: int, promises: Promises) -> tuple[int, ...]:
    """Tokens of each rank: few, odd, none, or many."""
    least = 0 if promises.empty_ranks else 1
    few = st.integers(least, promises.tokens)
    if not promises.ragged:
        return (draw(few),) * ranks
    many = st.sampled_from([n for n in (17, 33) if n <= MOST_TOKENS])
    large = draw(st.integers(0, 15)) == 15
    return tuple(draw(st.one_of(few, many) if large else few) for _ in range(ranks))


@st.composite
def worlds(draw: Draw, promises: Promises | None = None) -> World:
    """Any world that the promises allow."""
    allowed = promises or Promises()
    layout = draw(layouts(allowed))
    topology = Topology(layout)
    ranks, ep = topology.world_size, topology.size("ep")
    local = draw(st.integers(1, allowed.experts_per_rank))
    experts = ep * local
    topk = draw(st.integers(1, min(experts, allowed.topk)))
    counts = draw(token_counts(ranks, allowed))
    ids = draw(routings(counts, experts, topk, local))
    slots = [(r, t, k) for r in range(ranks) for t in range(counts[r]) for k in range(topk)]
    dtype = draw(st.sampled_from(allowed.dtypes))
    memory = draw(st.sampled_from(allowed.memory))
    return World(
        layout=layout,
        num_experts=experts,
        topk=topk,
        ids=ids,
        dropped=draw(_some(slots, whole=True)) if allowed.drops else (),
        zero=draw(_some(slots)) if allowed.zero_weights and allowed.weighted else (),
        dtype=dtype,
        memory="contiguous" if memory == "expanded" and dtype not in ("float64", "float32") else memory,
        schedule=draw(schedules()),
        delay=draw(st.one_of(st.none(), st.tuples(st.integers(0, ranks - 1), st.integers(0, 9)))),
    )


def _some(slots: Sequence[Slot], *, whole: bool = False) -> st.SearchStrategy[tuple[Slot, ...]]:
    """No slot, a few, or (`whole`) all of them."""
    if not slots:
        return st.just(())
    few: Any = st.lists(st.sampled_from(slots), max_size=6, unique=True).map(lambda found: tuple(sorted(found)))
    return st.one_of(st.just(()), few, *([st.just(tuple(slots))] if whole else []))
