"""Hypothesis strategies for worlds. Everything is drawn before a rank starts, and shrinks to little.

Small is: few ranks, tokens, experts and choices; every token to the first expert; nothing dropped; fp64 and
contiguous; ranks that take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from isozyme.core.topology import Layout
from isozyme.moe.testing.schedule import ScheduleData
from isozyme.moe.testing.world import Memory, Slot, World

if TYPE_CHECKING:
    Draw = st.DrawFn
else:
    Draw = Any  # checkers of annotations at run time cannot check that protocol
Ids = tuple[tuple[int, ...], ...]
Wish = tuple[int, ...]
"""A number for each of the most choices that a token may have: a place among the experts that are left."""


@dataclass(frozen=True, kw_only=True)
class Promises:
    """What the code under test promises, hence which worlds it is shown and what is asked of it."""

    ranks: int = 4
    """The most ranks of a world."""
    tokens: int = 5
    """The most tokens of a rank, but for a few large worlds with up to 33."""
    experts_per_rank: int = 3
    """The most experts of a rank, but where K needs more."""
    topk: int = 3
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
    """Types of the tokens; float16 is possible as well."""
    memory: tuple[Memory, ...] = ("contiguous", "transposed", "sliced", "expanded")
    """How tokens and incoming gradients lie in memory; expanded ones have strides of zero."""
    weighted: bool = True
    """Combine weights are applied, by the experts or by `combine`."""
    ordered: bool = False
    """An expert's rows are in the order of source rank, then token."""
    wide_sums: bool = False
    """A token's results are added up in at least fp32. Results of one rank may be added up there before."""
    filler: bool = False
    """Rows of zeros with weight 0 may stand between the real ones."""
    same_calls: bool = True
    """Every rank makes the same calls. Not so for code that sends messages to chosen ranks only."""


def layouts(promises: Promises, ranks: int | None = None) -> st.SearchStrategy[Layout]:
    """Dense and expert factorisations of `ranks` ranks, or of up to `promises.ranks`; EP over all first.

    Those with both EP and ETP are few, and drawn as often as all others.
    """
    found = []
    for number in range(1, promises.ranks + 1) if ranks is None else (ranks,):
        for ep in range(number, 0, -1):
            for etp in range(1, number // ep + 1) if promises.etp else (1,):
                if number % (ep * etp) or (ep * etp < number and not promises.replicas):
                    continue
                found.append(Layout(dp=number, ep=ep, etp=etp))
                found += _strided(number, ep, etp) if promises.replicas else []
    crossed = [layout for layout in found if layout.ep > 1 and layout.etp > 1]
    if not crossed:
        return st.sampled_from(found)
    others = [layout for layout in found if layout not in crossed]
    return st.one_of(st.sampled_from(others), st.sampled_from(crossed))


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
def wishes(draw: Draw, promises: Promises, crowded: bool = False) -> list[list[Wish]]:
    """What the tokens of each rank wish for, before it is known which experts there are.

    Ranks are ragged; in some worlds one rank alone has tokens, in others (all that are `crowded`) one has
    many (repetitions of a few, so that they are drawn quickly).
    """
    least = 0 if promises.empty_ranks else 1
    wish = st.tuples(*[st.integers(0, 23)] * promises.topk)
    part = st.lists(wish, min_size=least, max_size=promises.tokens)
    parts = draw(st.lists(part, min_size=1, max_size=promises.ranks))
    if not promises.ragged:
        return [of_rank[: min(map(len, parts))] for of_rank in parts]
    kinds = ["many"] if crowded else ["few", "one rank", "few", "one rank", "many"]
    kind = draw(st.sampled_from(kinds))
    chosen = draw(st.integers(0, promises.ranks - 1)) % len(parts) if kind != "few" else -1
    if kind == "one rank" and promises.empty_ranks:
        return [of_rank if rank == chosen else [] for rank, of_rank in enumerate(parts)]
    if kind == "many":
        few = parts[chosen] or [(0,) * promises.topk] * crowded
        parts[chosen] = (few * 33)[: draw(st.sampled_from([17, 33]))]
    return parts


@st.composite
def routings(
    draw: Draw, parts: Sequence[Sequence[Wish]], num_experts: int, topk: int, local: int
) -> tuple[Ids, ...]:
    """The experts of every token: any, one hot set, half of them, one rank's, Zipf, or balanced."""
    kind = draw(st.sampled_from(["any", "hot", "half", "one rank", "zipf", "balanced"]))
    first = draw(st.integers(0, 23)) % num_experts if kind not in ("any", "balanced") else 0
    width = {"hot": topk, "half": (num_experts + 1) // 2, "one rank": local}.get(kind, num_experts)
    popular = [(first + step) % num_experts for step in range(max(width, topk))]
    found, number = [], 0
    for part in parts:
        rows = []
        for wish in part:
            if kind == "balanced":
                rows.append(tuple((number + choice) % num_experts for choice in range(topk)))
            else:
                places = [w * w // 24 if kind == "zipf" else w for w in wish[:topk]]
                rows.append(_granted(places, popular))
            number += topk
        found.append(tuple(rows))
    return tuple(found)


def _granted(wish: Sequence[int], popular: Sequence[int]) -> tuple[int, ...]:
    """Distinct experts, in the order of the wishes."""
    rest = list(popular)
    return tuple(rest.pop(place % len(rest)) for place in wish)


@st.composite
def worlds(draw: Draw, promises: Promises | None = None, crowded: bool = False) -> World:
    """Any world that the promises allow; if `crowded`, one rank has 17 or 33 tokens."""
    allowed = promises or Promises()
    parts = draw(wishes(allowed, crowded))
    topk, ranks = draw(st.integers(1, allowed.topk)), len(parts)
    layout = draw(layouts(allowed, ranks))
    local = max(draw(st.integers(1, allowed.experts_per_rank)), -(-topk // layout.ep))
    ids = draw(routings(parts, layout.ep * local, topk, local))
    slots = [(r, t, k) for r in range(ranks) for t in range(len(parts[r])) for k in range(topk)]
    dtype = draw(st.sampled_from(allowed.dtypes))
    memory = draw(st.sampled_from(allowed.memory))
    return World(
        layout=layout,
        num_experts=layout.ep * local,
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
    few: Any = st.lists(st.sampled_from(slots), max_size=6, unique=True)
    some = few.map(lambda found: tuple(sorted(found)))
    return st.one_of(st.just(()), some, *([st.just(tuple(slots))] if whole else []))
