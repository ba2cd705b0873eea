"""From router logits to expert choices and combine weights, as functions of tensors.

Score functions, group-limited top-k with a documented tie-break, and the comparison of a choice with one made
elsewhere. Everything is computed from log scores, so that no renormalisation divides by an underflown sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from isozyme.core.config import RouterConfig

Score = Literal["softmax", "sigmoid"]


def log_scores(logits: Float[Tensor, "T E"], score: Score) -> Float[Tensor, "T E"]:
    """The logarithm of each expert's score: log-softmax over the experts, or log-sigmoid of each.

    A row with a NaN or infinite logit becomes NaN throughout, so that its weights show up in the loss; other
    rows are untouched. Equal logits of a row get equal scores on every backend: `torch.sigmoid` on the CPU
    does not promise that (the last elements take another code path, an ulp apart), log-sigmoid does.
    """
    finite = logits.isfinite().all(dim=-1, keepdim=True)
    clean = torch.where(finite, logits, torch.full_like(logits, torch.nan))
    return F.log_softmax(clean, dim=-1) if score == "softmax" else F.logsigmoid(clean)


def normalized_scores(log_score: Float[Tensor, "T E"], score: Score) -> Float[Tensor, "T E"]:
    """Scores that sum to one over the experts: softmax scores as they are, sigmoid scores over their sum."""
    return log_score.exp() if score == "softmax" else log_score.softmax(dim=-1)


def combine_weights(
    log_score: Float[Tensor, "T E"], topk_ids: Int[Tensor, "T K"], config: RouterConfig
) -> Float[Tensor, "T K"]:
    """The weights of the given choices: scores, renormalised if so configured, times the scaling factor.

    The only path of the gradient from the experts' output to the router. The expert bias has no part in it.
    """
    chosen = log_score.gather(-1, topk_ids)
    weights = chosen.softmax(dim=-1) if config.renormalize else chosen.exp()
    return weights * config.scaling_factor if config.scaling_factor != 1.0 else weights


@torch.no_grad()
def selection_scores(
    log_score: Float[Tensor, "T E"], expert_bias: Float[Tensor, "E"] | None = None
) -> Float[Tensor, "T E"]:
    """What the experts are chosen by: scores plus the balance bias, without gradient."""
    scores = log_score.detach().exp()
    return scores if expert_bias is None else scores + expert_bias.to(scores.dtype)


@torch.no_grad()
def top_indices(scores: Float[Tensor, "*batch E"], count: int) -> Int[Tensor, "*batch K"]:
    """The places of the `count` largest scores of each row, best first, ties to the lower place.

    The same on every backend, which `torch.topk` does not promise: `count` rounds of `argmax`, documented to
    return the first of equal maxima. (A stable sort gives the same and is slower for the few choices of a
    router.) NaN counts as the largest score, so a row of NaN gives 0, 1, … Places are in range and distinct
    whatever the scores.
    """
    big = torch.finfo(scores.dtype).max
    rest = scores.nan_to_num(nan=big, posinf=big, neginf=-big)
    places = []
    for _ in range(count):
        best = rest.argmax(dim=-1, keepdim=True)
        rest.scatter_(-1, best, -torch.inf)
        places.append(best)
    return torch.cat(places, dim=-1)


@torch.no_grad()
def group_scores(selection: Float[Tensor, "T E"], num_groups: int) -> Float[Tensor, "T G"]:
    """The score of each group of consecutive experts: the sum of its two best, or its only one.

    Source: DeepSeek-V3 technical report (arXiv 2412.19437), node-limited routing.
    """
    grouped = rearrange(selection, "t (g e) -> t g e", g=num_groups)
    return grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)


@torch.no_grad()
def select_experts(
    selection: Float[Tensor, "T E"],
    config: RouterConfig,
    *,
    prefer_groups: Bool[Tensor, "T G"] | None = None,
) -> Int[Tensor, "T K"]:
    """The `topk` best experts of each token, best first, ties to the lower id (of groups, too).

    With groups, only experts of the token's `topk_groups` best groups are eligible.

    Args:
        selection: scores to choose by, see `selection_scores`.
        config: `topk`, `num_groups`, `topk_groups`.
        prefer_groups: groups to take before all others, whatever their scores.
    """
    if config.num_groups == 1:
        return top_indices(selection, config.topk)
    by_group = group_scores(selection, config.num_groups)
    if prefer_groups is not None:
        by_group = by_group.masked_fill(prefer_groups, torch.inf)
    chosen = _membership(top_indices(by_group, config.topk_groups), config.num_groups)
    eligible = repeat(chosen, "t g -> t (g e)", e=config.num_experts // config.num_groups)
    return top_indices(selection.masked_fill(~eligible, -torch.inf), config.topk)


@dataclass(frozen=True, kw_only=True)
class RoutingFlips:
    """The tokens whose own set of experts differs from the one that was replayed, and by how much."""

    tokens: Int[Tensor, "N"]
    """Local index of each such token, ascending."""
    gaps: Float[Tensor, "N"]
    """How far apart the selection scores are that would have to be tied; infinite if the scores are NaN or
    the replayed experts could not be chosen at any tie."""


@torch.no_grad()
def routing_flips(
    selection: Float[Tensor, "T E"],
    topk_ids: Int[Tensor, "T K"],
    token_valid: Bool[Tensor, "T"],
    config: RouterConfig,
) -> RoutingFlips:
    """Compare the present choice with a given one, as sets of experts; padding tokens are not compared.

    The gap of a token is the largest difference between an expert (or a group) that the present scores
    choose and one that was chosen instead. Rounding explains a flip whose gap is about an ulp, and no other.
    """
    own = _membership(select_experts(selection, config), config.num_experts)
    given = _membership(topk_ids, config.num_experts)
    gaps = selection.new_zeros(selection.shape[0])
    prefer = None
    if config.num_groups > 1:
        prefer = rearrange(given, "t (g e) -> t g e", g=config.num_groups).any(dim=-1)
        by_group = group_scores(selection, config.num_groups)
        own_groups = _membership(top_indices(by_group, config.topk_groups), config.num_groups)
        worst_own = by_group.masked_fill(~own_groups, torch.inf).amin(dim=-1)
        worst_given = by_group.masked_fill(~prefer | own_groups, torch.inf).amin(dim=-1)
        gaps = (worst_own - worst_given).clamp_min(0.0)
        gaps = gaps.masked_fill(prefer.sum(dim=-1) > config.topk_groups, torch.inf)
    there = _membership(select_experts(selection, config, prefer_groups=prefer), config.num_experts)
    best_missed = selection.masked_fill(~there | given, -torch.inf).amax(dim=-1)
    worst_taken = selection.masked_fill(~given | there, torch.inf).amin(dim=-1)
    gaps = torch.maximum(gaps, best_missed - worst_taken)
    tokens = torch.nonzero((own != given).any(dim=-1) & token_valid).flatten()
    return RoutingFlips(tokens=tokens, gaps=gaps[tokens].nan_to_num(nan=torch.inf, posinf=torch.inf))


def _membership(places: Int[Tensor, "T K"], size: int) -> Bool[Tensor, "T E"]:
    """The one-hot map of each row's places."""
    empty = torch.zeros(places.shape[0], size, dtype=torch.bool, device=places.device)
    return empty.scatter_(1, places, True)
