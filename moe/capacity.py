"""Expert capacity: how many slots of one sequence window an expert keeps, and which it drops.

The capacity group is one sequence window, so what is dropped depends neither on the layout nor on how the
windows are split into micro-batches. Where CP and TP ranks hold parts of a window, its slots are gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from isozyme.core.errors import ConfigError
from isozyme.moe.types import Routing
from isozyme.parallel.process_groups import ProcessGroups

DropPolicy = Literal["probability", "position"]


def window_length(num_tokens: int, windows: int) -> int:
    """Tokens of one window on this rank, padding included.

    Raises:
        ConfigError: if the tokens are not whole windows.

    >>> window_length(12, 3), window_length(0, 0)
    (4, 0)
    """
    if windows < 0 or (num_tokens % windows if windows else num_tokens):
        raise ConfigError(
            f"tokens must be whole windows of one length: num_tokens={num_tokens}, windows={windows}. "
            "Give the number of sequence windows that the tokens came from."
        )
    return num_tokens // windows if windows else 0


def expert_capacity(factor: float, *, topk: int, window: int, num_experts: int) -> int:
    """C = ceil(factor * topk * window / num_experts), the slots of one window that one expert keeps.

    Args:
        factor: capacity factor; read as the decimal number that it prints as, so that 1.1 is eleven tenths
            and no rounding error is carried up to the next integer.
        topk: choices of a token.
        window: tokens of one whole window (over all CP and TP ranks), padding included.
        num_experts: global number of experts.

    Source: Switch Transformers (arXiv 2101.03961), section 2.2, with top-k choices.

    >>> expert_capacity(1.1, topk=2, window=100, num_experts=10)
    22
    """
    return math.ceil(Fraction(repr(float(factor))) * topk * window / num_experts)


@dataclass(frozen=True, kw_only=True)
class CapacityResult:
    """A routing after capacity, and what capacity took from it."""

    routing: Routing
    dropped: Int[Tensor, "E"]
    """Slots of this rank's tokens that were dropped, by global expert id, int64."""


@torch.no_grad()
def slots_within_capacity(
    group: Int[Tensor, "N"], priority: Float[Tensor, "N"] | None, num_groups: int, capacity: int
) -> Bool[Tensor, "N"]:
    """Which slots are among the first `capacity` of their group.

    Args:
        group: the group of each slot; `num_groups` marks a slot that takes no place and is never kept.
        priority: higher is kept first, NaN first of all, ties in the given order; None for the given order.
        num_groups: the number of groups.
        capacity: the places of each group.
    """
    order = torch.arange(group.numel(), device=group.device)
    if priority is not None:
        clean = priority.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        order = torch.sort(clean, stable=True, descending=True).indices
    order = order[torch.sort(group[order], stable=True).indices]
    sizes = torch.zeros(num_groups + 1, dtype=torch.int64, device=group.device)
    sizes.scatter_add_(0, group, torch.ones_like(group))
    starts = sizes.cumsum(0) - sizes
    place = torch.empty_like(group)
    place[order] = torch.arange(group.numel(), device=group.device) - starts[group[order]]
    return (place < capacity) & (group < num_groups)


def apply_capacity(
    routing: Routing,
    windows: int,
    capacity: int,
    policy: DropPolicy,
    *,
    groups: ProcessGroups | None = None,
    positions: Int[Tensor, "T"] | None = None,
) -> CapacityResult:
    """Keep at most `capacity` slots of each expert in each window; the others lose `kept` and their weight.

    `probability` keeps the largest combine weights, ties to the earlier position, then to the lower slot.
    `position` keeps the first slots in order of position, then slot. The weights of kept slots are not
    renormalised. Slots that are already not kept take no place. NaN weights are kept first, so that they
    stay visible.

    Args:
        routing: this rank's routing; its tokens are `windows` equal shares of windows, window by window.
        windows: the number of windows, the same on all CP and TP ranks.
        capacity: see `expert_capacity`.
        policy: which slots to keep.
        groups: this rank's groups; needed where CP or TP cuts the windows. All CP x TP ranks call together;
            every rank then receives the ids and weights of the whole windows.
        positions: place of each token in its whole window; by default each rank holds one contiguous share of
            every window, CP rank by CP rank, and within one TP rank by TP rank.
    """
    length = window_length(routing.num_tokens, windows)
    experts = routing.num_experts
    window = repeat(torch.arange(windows, device=routing.topk_ids.device), "w -> (w s)", s=length)
    slots = window[:, None] * experts + routing.topk_ids
    slots = torch.where(routing.kept, slots, windows * experts)
    probs = routing.topk_probs.detach()
    first, order = 0, None
    if groups is not None and groups["tp", "cp"].size > 1:
        place = _contiguous_positions(groups, windows, length, slots) if positions is None else positions
        first = groups["tp", "cp"].rank * routing.num_tokens
        gathered = groups["tp", "cp"].all_gather(torch.cat([slots, place[:, None]], dim=1))
        slots, place = gathered[:, :-1], gathered[:, -1]
        probs = groups["tp", "cp"].all_gather(probs)
        order = torch.sort(place, stable=True).indices
    elif positions is not None:
        order = torch.sort(positions, stable=True).indices
    keep = _keep(slots, probs if policy == "probability" else None, order, windows * experts, capacity)
    kept = keep[first : first + routing.num_tokens]
    lost = torch.zeros(experts, dtype=torch.int64, device=slots.device)
    lost.scatter_add_(0, routing.topk_ids.flatten(), (routing.kept & ~kept).flatten().long())
    weights = torch.where(kept, routing.topk_probs, torch.zeros_like(routing.topk_probs))
    return CapacityResult(routing=replace(routing, kept=kept, topk_probs=weights), dropped=lost)


def _keep(
    slots: Int[Tensor, "T K"],
    probs: Float[Tensor, "T K"] | None,
    order: Int[Tensor, "T"] | None,
    num_groups: int,
    capacity: int,
) -> Bool[Tensor, "T K"]:
    """`slots_within_capacity` for tokens whose positions ascend in `order`; the result in their own order."""
    topk = slots.shape[1]
    if order is not None:
        slots = slots[order]
        probs = None if probs is None else probs[order]
    priority = None if probs is None else probs.flatten()
    flat = slots_within_capacity(slots.flatten(), priority, num_groups, capacity)
    keep = rearrange(flat, "(t k) -> t k", k=topk)
    return keep if order is None else torch.empty_like(keep).index_copy_(0, order, keep)


def _contiguous_positions(groups: ProcessGroups, windows: int, length: int, like: Tensor) -> Int[Tensor, "T"]:
    """Positions in the whole window where the shares are contiguous, CP rank first, then TP rank."""
    share = groups.coordinates["cp"] * groups["tp"].size + groups.coordinates["tp"]
    within = torch.arange(length, device=like.device) + share * length
    return repeat(within, "s -> (w s)", w=windows)
