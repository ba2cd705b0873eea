"""Auxiliary losses of a router: load balance and logit size, as sums already times their coefficients.

The trainer adds sums over micro-batches and ranks and divides once: the balance loss by the step's windows,
the z-loss by its real tokens. Padding is never counted, and a window without real tokens gives exactly zero.
"""

from __future__ import annotations

from typing import Literal

import torch
from einops import reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from isozyme.moe.capacity import window_length
from isozyme.moe.kernels.router_topk import count_choices
from isozyme.parallel.communicator import Communicator

AuxScope = Literal["sequence", "microbatch", "global_lagged"]


def expert_counts(
    topk_ids: Int[Tensor, "T K"], counted: Bool[Tensor, "T K"], num_experts: int
) -> Int[Tensor, "E"]:
    """How many counted slots chose each expert, int64."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=topk_ids.device)
    return counts.scatter_add_(0, topk_ids.flatten(), counted.flatten().long())


@torch.no_grad()
def window_counts(
    topk_ids: Int[Tensor, "T K"],
    token_valid: Bool[Tensor, "T"],
    windows: int,
    num_experts: int,
    group: Communicator | None = None,
    own: Int[Tensor, "W E1"] | None = None,
) -> tuple[Int[Tensor, "W E"], Int[Tensor, "W"]]:
    """Slots of each expert and real tokens in each window, summed over `group` (one all-reduce).

    `own` is what `count_choices` would give for these tokens, where somebody has counted already.

    Raises:
        ConfigError: if the tokens are not whole windows.
    """
    window_length(topk_ids.shape[0], windows)
    totals = count_choices(topk_ids, token_valid, windows, num_experts) if own is None else own
    if group is not None and group.size > 1:
        totals = group.all_reduce(totals.clone())
    return totals[:, :-1], totals[:, -1]


def balance_loss(
    shares: Float[Tensor, "T E"],
    topk_ids: Int[Tensor, "T K"],
    token_valid: Bool[Tensor, "T"],
    windows: int,
    *,
    coefficient: float,
    scope: AuxScope = "sequence",
    group: Communicator | None = None,
    lagged_counts: Int[Tensor, "E"] | None = None,
    own_counts: Int[Tensor, "W E1"] | None = None,
    masked: bool = False,
) -> Float[Tensor, ""]:
    """Sum over windows of `coefficient * E * Σ_e f_e P_e`, which is `coefficient` for each balanced window.

    f_e is the share of the slots that chose expert e before capacity (no gradient), P_e the mean over real
    tokens of the token's score for e, normalised over the experts. Sources: Switch Transformers (arXiv
    2101.03961, eq. 4-6) for the form, DeepSeek-V3 (arXiv 2412.19437, eq. 17-20) for the sequence-wise scope.

    Scopes, and what the gradient depends on besides the step's windows:

    - `sequence`: f and P of one window. Depends on nothing else: any layout, any split into micro-batches.
    - `microbatch`: f and P over all real tokens of the micro-batch, times its windows with real tokens.
      Depends on which windows share a micro-batch (hence on DP and the number of micro-batches).
    - `global_lagged`: P of one window, f from `lagged_counts`, the previous step's slots of the whole model
      replica set, which the caller keeps. Uniform if there are none yet. Depends on the previous step only.

    Args:
        shares: scores of this rank's tokens, summing to one over the experts, with gradient.
        topk_ids: chosen experts of this rank's tokens.
        token_valid: which tokens are real; nothing else of a padding token is read.
        windows: sequence windows of which this rank holds equal shares, the same on all ranks of `group`.
        coefficient: multiplies the loss.
        scope: see above.
        group: the CP x TP ranks that hold the other shares of the same windows. Counts are summed over it;
            the result is this rank's part, and the parts add up to the loss.
        lagged_counts: `[E]`, for `global_lagged`.
        own_counts: this rank's counts by `count_choices`, where they are known already.
        masked: whether the shares of padding are zero already.

    Raises:
        ConfigError: if the tokens are not whole windows.
    """
    experts, topk = shares.shape[-1], topk_ids.shape[-1]
    counts, tokens = window_counts(topk_ids, token_valid, windows, experts, group, own_counts)
    real_shares = shares if masked else torch.where(token_valid[:, None], shares, 0.0)
    length = window_length(shares.shape[0], windows)
    share_sums = real_shares.view(windows, length, experts).sum(dim=1)
    real = tokens.to(shares.dtype).clamp_min(1.0)
    if scope == "microbatch":
        filled = (tokens > 0).sum().to(shares.dtype)
        total = tokens.sum().to(shares.dtype).clamp_min(1.0)
        fractions = counts.sum(dim=0).to(shares.dtype) / (topk * total)
        return coefficient * experts * filled * (fractions * share_sums.sum(dim=0) / total).sum()
    if scope == "global_lagged":
        factors = _lagged_fractions(lagged_counts, share_sums) * (coefficient * experts) / real[:, None]
    else:
        factors = counts * (coefficient * experts / topk * real.pow(-2))[:, None]
    return (factors.to(shares.dtype) * share_sums).sum()


def _lagged_fractions(counts: Int[Tensor, "E"] | None, like: Float[Tensor, "W E"]) -> Float[Tensor, "1 E"]:
    """The previous step's share of each expert; uniform without a previous step, or without tokens in it."""
    experts = like.shape[-1]
    if counts is None:
        return like.new_full((1, experts), 1.0 / experts)
    known = counts.detach().to(like.dtype)
    total = known.sum()
    uniform = torch.full_like(known, 1.0 / experts)
    return torch.where(total > 0, known / total.clamp_min(1.0), uniform)[None]


def z_loss(
    log_sum: Float[Tensor, "T"], token_valid: Bool[Tensor, "T"], *, coefficient: float
) -> Float[Tensor, ""]:
    """Sum over this rank's real tokens of `coefficient * logsumexp(logits)^2`.

    Source: ST-MoE (arXiv 2202.08906), eq. 5. `log_sum` is the log-sum-exp of each token's logits, finite also
    for padding.
    """
    squares = log_sum.square()
    return coefficient * reduce(torch.where(token_valid, squares, 0.0), "t ->", "sum")
