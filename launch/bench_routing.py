"""Routings to measure with: the same expert ids and weights are given to every implementation.

    balanced     every expert gets the same number of slots (to one, if they do not divide)
    random       each token draws its experts evenly
    zipf:S       each token draws its experts, the r-th most wanted with odds r^-S
    hot:Q        a share Q of the tokens send a slot to one and the same expert; the rest is drawn evenly
    half-empty   half of the experts get nothing, the others are balanced

A token's experts are always distinct, so an expert can have at most 1/K of all slots.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.core.errors import ConfigError

FORMS = "balanced, random, zipf:1.2, hot:0.5 or half-empty"


def choose_ids(text: str, *, tokens: int, num_experts: int, topk: int, seed: int) -> Int[Tensor, "T K"]:
    """The expert ids of a routing, on the CPU; distinct within a token, in no particular order of experts.

    Args:
        text: one of the forms above.
        tokens: T.
        num_experts: E.
        topk: K.
        seed: of the draw.

    Raises:
        ConfigError: if the form is unknown or its number is out of range.

    >>> ids = choose_ids("balanced", tokens=6, num_experts=4, topk=2, seed=0)
    >>> torch.bincount(ids.flatten()).tolist()
    [3, 3, 3, 3]
    """
    generator = torch.Generator().manual_seed(seed)
    kind, _, number = text.partition(":")
    if kind in ("balanced", "half-empty", "random") and not number:
        if kind == "random":
            return _draw(torch.ones(num_experts), tokens, topk, generator)
        used = num_experts if kind == "balanced" else max(topk, num_experts // 2)
        return _balanced(used, num_experts, tokens, topk, generator)
    value = _number(text, number)
    if kind == "zipf":
        odds = torch.arange(1, num_experts + 1, dtype=torch.float64) ** -value
        return _draw(odds[torch.randperm(num_experts, generator=generator)], tokens, topk, generator)
    if kind == "hot":
        if not 0 <= value <= 1:
            raise ConfigError(f"the share of a hot expert lies between 0 and 1: --routing={text}.")
        return _hot(value, num_experts, tokens, topk, generator)
    raise ConfigError(f"unknown routing: --routing={text}. Choose {FORMS}.")


def choose_probs(tokens: int, topk: int, seed: int) -> Float[Tensor, "T K"]:
    """Combine weights in fp32 on the CPU: a softmax over the token's own slots, largest first."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, topk, generator=generator).sort(dim=1, descending=True).values
    return logits.softmax(dim=1)


def _number(text: str, number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise ConfigError(f"a routing is one of {FORMS}: --routing={text}.") from None


def _balanced(used: int, experts: int, tokens: int, topk: int, generator: torch.Generator) -> Tensor:
    """Consecutive experts, round and round, for tokens in random order, over `used` experts at random."""
    chosen = torch.randperm(experts, generator=generator)[:used]
    slots = torch.arange(tokens * topk).view(tokens, topk) % used
    return chosen[slots[torch.randperm(tokens, generator=generator)]]


def _draw(odds: Tensor, tokens: int, topk: int, generator: torch.Generator) -> Tensor:
    """Experts drawn one after the other without replacement: those whose exponential clocks ring first."""
    clocks = torch.empty(tokens, len(odds)).exponential_(generator=generator)
    return (clocks / odds.float()).topk(topk, dim=1, largest=False).indices


def _hot(share: float, experts: int, tokens: int, topk: int, generator: torch.Generator) -> Tensor:
    """Exactly round(share * T) tokens have expert 0 among their own; the others do not have it."""
    if experts == topk:
        return _draw(torch.ones(experts), tokens, topk, generator)
    others = 1 + _draw(torch.ones(experts - 1), tokens, topk, generator)
    hot = torch.randperm(tokens, generator=generator)[: round(share * tokens)]
    others[hot, torch.randint(topk, hot.shape, generator=generator)] = 0
    return others
