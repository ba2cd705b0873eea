"""Worlds for a router: logits and a configuration, as a line and a picture, and what must come out.

The definition is written once more here, from plain floats and sorting, so that it shares nothing with a
router under test.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from isozyme.core.config import RouterConfig
from isozyme.core.errors import UsageError
from isozyme.moe.testing.strategies import Draw

UNIT = 0.25
"""Logits are multiples of it, so different ones give clearly different scores."""


@dataclass(frozen=True, kw_only=True)
class RouterPromises:
    """What a router promises, hence which logits and configurations it is shown."""

    scores: tuple[str, ...] = ("softmax", "sigmoid")
    """Score functions."""
    renormalize: tuple[bool, ...] = (True, False)
    """Whether the weights of a token sum to one."""
    groups: bool = False
    """Group-limited choice (`num_groups`, `topk_groups`)."""
    tokens: int = 5
    """The most tokens."""
    experts: int = 8
    """The most experts; K may be as many."""
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")
    """Types of the logits."""
    bad_logits: bool = True
    """A token with a NaN or infinite logit gets legal ids, weights that are not finite, and harms nobody."""
    gradients: bool = True
    """Gradients flow from the weights to the logits."""
    ties_to_the_lower_id: bool = True
    """Of experts with equal scores the first is chosen; else any of them may be."""


@dataclass(frozen=True, kw_only=True)
class RouterWorld:
    """Logits in units of 1/4, row by row, and the configuration."""

    logits: tuple[tuple[int, ...], ...]
    num_experts: int
    topk: int = 1
    score: str = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    topk_groups: int = 1
    dtype: str = "float64"
    bad: tuple[int, int, str] | None = None
    """(token, expert, `nan`, `inf` or `-inf`): a logit to spoil."""

    @property
    def config(self) -> RouterConfig:
        """The router's configuration."""
        return RouterConfig(
            num_experts=self.num_experts,
            topk=self.topk,
            score=self.score,  # type: ignore[arg-type]
            renormalize=self.renormalize,
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
            aux_loss=0.0,
        )

    def tensor(self) -> Tensor:
        """The logits, without the bad one."""
        values = torch.tensor(self.logits, dtype=torch.float64).view(-1, self.num_experts) * UNIT
        return values.to(getattr(torch, self.dtype))

    def line(self) -> str:
        """The world as text, from which `parse_router` makes it again."""
        rows = "|".join(",".join(map(str, row)) for row in self.logits)
        parts = [f"experts={self.num_experts}", f"topk={self.topk}", f"score={self.score}"]
        parts += [f"renormalize={int(self.renormalize)}", f"groups={self.num_groups}.{self.topk_groups}"]
        parts += [f"dtype={self.dtype}", f"logits={rows}"]
        if self.bad is not None:
            parts.append("bad=" + ",".join(map(str, self.bad)))
        return " ".join(parts)


def parse_router(line: str) -> RouterWorld:
    """The world that prints as `line`.

    Raises:
        UsageError: if it is not such a line.
    """
    try:
        words = dict(word.split("=", 1) for word in line.split())
        groups = [int(number) for number in words["groups"].split(".")]
        bad = words["bad"].split(",") if "bad" in words else None
        return RouterWorld(
            logits=tuple(tuple(map(int, row.split(","))) for row in words["logits"].split("|") if row),
            num_experts=int(words["experts"]),
            topk=int(words["topk"]),
            score=words["score"],
            renormalize=words["renormalize"] == "1",
            num_groups=groups[0],
            topk_groups=groups[1],
            dtype=words["dtype"],
            bad=None if bad is None else (int(bad[0]), int(bad[1]), bad[2]),
        )
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(f"a replay line must be one that a violation printed: {line!r}; {error}.") from error


@st.composite
def router_worlds(draw: Draw, promises: RouterPromises | None = None) -> RouterWorld:
    """Logits with many ties, also all equal, and extreme ones; K up to E; half of them limited to groups."""
    allowed = promises or RouterPromises()
    experts = draw(st.integers(1, allowed.experts))
    num_groups, topk_groups = 1, 1
    several = [
        (size * number, number)
        for size in range(allowed.experts // 2, 0, -1)
        for number in range(2, allowed.experts // size + 1)
    ]
    if allowed.groups and several and draw(st.booleans()):
        experts, num_groups = draw(st.sampled_from(several))
        topk_groups = draw(st.integers(1, num_groups))
    topk = draw(st.integers(1, experts // num_groups * topk_groups))
    near = st.integers(-12, 12)
    value = draw(st.sampled_from([near, st.integers(0, 1), st.one_of(near, st.sampled_from([-4000, 4000]))]))
    row = st.tuples(*[value] * experts)
    logits = draw(st.lists(row, max_size=allowed.tokens).map(tuple))
    bad = None
    if allowed.bad_logits and logits:
        spoilt = st.tuples(
            st.integers(0, len(logits) - 1),
            st.integers(0, experts - 1),
            st.sampled_from(["nan", "inf", "-inf"]),
        )
        bad = draw(st.one_of(st.none(), spoilt, spoilt))
    return RouterWorld(
        logits=logits,
        num_experts=experts,
        topk=topk,
        score=draw(st.sampled_from(allowed.scores)),
        renormalize=draw(st.sampled_from(allowed.renormalize)),
        num_groups=num_groups,
        topk_groups=topk_groups,
        dtype=draw(st.sampled_from(allowed.dtypes)),
        bad=bad,
    )


def scores_of(world: RouterWorld, logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1) if world.score == "softmax" else torch.sigmoid(logits)


def choice_of(world: RouterWorld) -> tuple[list[list[int]], Tensor]:
    """The experts of each token by sorting plain floats; and the scores."""
    scores = scores_of(world, world.tensor().double())
    size = world.num_experts // world.num_groups
    chosen = []
    for row in scores.tolist():
        strength = [
            sum(sorted(row[first : first + size], reverse=True)[:2])
            for first in range(0, world.num_experts, size)
        ]
        groups = sorted(range(world.num_groups), key=lambda group: (-strength[group], group))
        eligible = [group * size + at for group in sorted(groups[: world.topk_groups]) for at in range(size)]
        chosen.append(sorted(eligible, key=lambda expert: (-row[expert], expert))[: world.topk])
    return chosen, scores


def weights_of(world: RouterWorld, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of the given choice, and for which tokens they are defined (the sum is not zero)."""
    chosen = scores_of(world, logits).gather(-1, ids.long())
    total = chosen.sum(dim=-1, keepdim=True)
    defined = (total > 1e-12).flatten().detach()
    if not world.renormalize:
        return chosen, torch.ones_like(defined)
    return chosen / torch.where(total > 1e-12, total, 1.0), defined


def router_picture(world: RouterWorld, ids: Tensor | None) -> str:
    wanted, _ = choice_of(world)
    kind = f"{world.score}, {'renormalised' if world.renormalize else 'as they are'}, {world.dtype}"
    groups = f", the best {world.topk_groups} of {world.num_groups} groups" if world.num_groups > 1 else ""
    lines = [f"world: {world.num_experts} experts, top-{world.topk}{groups}, scores by {kind}"]
    for token, row in enumerate(world.logits[:36]):
        spoilt = world.bad is not None and world.bad[0] == token
        bad = f" (logit {world.bad[1]} becomes {world.bad[2]})" if spoilt and world.bad else ""
        line = f"  token {token}: logits {[value * UNIT for value in row]}{bad} → {wanted[token]}"
        legal = ids is not None and ids.shape == (len(world.logits), world.topk)
        if legal and ids is not None and ids[token].tolist() != wanted[token]:
            line += f"   <-- went to {ids[token].tolist()}"
        lines.append(line)
    return "\n".join(lines)
