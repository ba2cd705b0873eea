"""Softmax, top-k, log-sum-exp and the counts of router logits in one pass, and their gradient in one pass.

Ties go to the lower expert id. The combine weights are the chosen scores, renormalised over the choice if
asked (Mixtral) or not (Qwen, DeepSeek), times a scaling factor. Scores and weights of padding are zero, so
that nobody has to mask them.
"""

from functools import partial
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from isozyme.moe.kernels import direct, eager

MAX_EXPERTS = 1024
"""The kernel holds a token's scores for all experts in registers."""


def router_topk_twin(
    logits: Float[Tensor, "T E"],
    valid: Bool[Tensor, "T"],
    windows: int,
    topk: int,
    renormalize: bool,
    scaling: float,
) -> tuple[
    Float[Tensor, "T E"], Int[Tensor, "T K"], Float[Tensor, "T K"], Float[Tensor, "T"], Int[Tensor, "W E1"]
]:
    """`router_topk` by a softmax, a stable descending sort and a scatter of ones."""
    finite = logits.isfinite().all(dim=-1, keepdim=True)
    logits = torch.where(finite, logits, torch.full_like(logits, torch.nan))
    scores = logits.softmax(dim=-1)
    ids = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :topk].contiguous()
    chosen = scores.gather(1, ids)
    total = chosen.sum(dim=-1, keepdim=True) if renormalize else 1.0
    counts = count_choices(ids, valid, windows, logits.shape[1]).int()
    real = valid[:, None]
    scores, probs = torch.where(real, scores, 0.0), torch.where(real, chosen / total * scaling, 0.0)
    return scores, ids, probs, logits.logsumexp(dim=-1), counts


def count_choices(
    ids: Int[Tensor, "T K"], valid: Bool[Tensor, "T"], windows: int, num_experts: int
) -> Int[Tensor, "W E1"]:
    """Slots of the real tokens of each window by expert, and in a last column these tokens; int64."""
    length, columns = ids.shape[0] // max(windows, 1), num_experts + 1
    window = torch.arange(windows, device=ids.device).repeat_interleave(length, output_size=ids.shape[0])
    places = torch.cat([ids, torch.full_like(ids[:, :1], num_experts)], dim=1) + window[:, None] * columns
    real = valid[:, None].expand_as(places).flatten().long()
    counts = torch.zeros(windows * columns, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, places.flatten(), real).view(windows, columns)


def router_topk_backward_twin(
    d_scores: Float[Tensor, "T E"],
    d_probs: Float[Tensor, "T K"],
    d_lse: Float[Tensor, "T"],
    scores: Float[Tensor, "T E"],
    ids: Int[Tensor, "T K"],
    renormalize: bool,
    scaling: float,
) -> Float[Tensor, "T E"]:
    """`router_topk_backward` in plain PyTorch."""
    upstream = d_probs * scaling
    if renormalize:
        chosen = scores.gather(1, ids)
        total = chosen.sum(dim=-1, keepdim=True)
        total = torch.where(total == 0, 1.0, total)  # a token that is not valid: all its scores are zero
        upstream = (upstream - (upstream * chosen).sum(dim=-1, keepdim=True) / total) / total
    on_scores = d_scores.scatter_add(1, ids, upstream)
    inner = (on_scores * scores).sum(dim=-1, keepdim=True)
    return scores * (on_scores - inner + d_lse.unsqueeze(-1))


def run_router_topk(
    logits: Tensor, valid: Tensor, windows: int, topk: int, renormalize: bool, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`router_topk` without a graph."""
    if logits.is_cuda:
        from isozyme.moe.kernels.triton_router_topk import launch_router_topk

        return launch_router_topk(logits, valid, windows, topk, renormalize, scaling)
    return router_topk_twin(logits, valid, windows, topk, renormalize, scaling)


router_topk_op = torch.library.custom_op("isozyme::router_topk", run_router_topk, mutates_args=())


@router_topk_op.register_fake
@no_type_check
def _(
    logits: Tensor, valid: Tensor, windows: int, topk: int, renormalize: bool, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    del valid, renormalize, scaling
    count, experts = logits.shape
    ids = logits.new_empty((count, topk), dtype=torch.int64)
    counts = logits.new_empty((windows, experts + 1), dtype=torch.int32)
    return torch.empty_like(logits), ids, logits.new_empty((count, topk)), logits.new_empty(count), counts


def run_router_topk_backward(
    d_scores: Tensor,
    d_probs: Tensor,
    d_lse: Tensor,
    scores: Tensor,
    ids: Tensor,
    renormalize: bool,
    scaling: float,
) -> Tensor:
    """The gradient `[T, E]` of the logits from the gradients of scores, probs and lse."""
    if scores.is_cuda:
        from isozyme.moe.kernels.triton_router_topk import launch_router_topk_backward

        return launch_router_topk_backward(d_scores, d_probs, d_lse, scores, ids, renormalize, scaling)
    return router_topk_backward_twin(d_scores, d_probs, d_lse, scores, ids, renormalize, scaling)


router_topk_backward_op = torch.library.custom_op(
    "isozyme::router_topk_backward", run_router_topk_backward, mutates_args=()
)


@router_topk_backward_op.register_fake
@no_type_check
def _(
    d_scores: Tensor,
    d_probs: Tensor,
    d_lse: Tensor,
    scores: Tensor,
    ids: Tensor,
    renormalize: bool,
    scaling: float,
) -> Tensor:
    del d_scores, d_probs, d_lse, ids, renormalize, scaling
    return torch.empty_like(scores)


@no_type_check
def _setup(ctx, inputs, output):
    scores, ids, _, _, counts = output
    ctx.save_for_backward(scores, ids)
    ctx.mark_non_differentiable(ids, counts)
    ctx.renormalize, ctx.scaling = inputs[4], inputs[5]


@no_type_check
def _backward(backward, ctx, d_scores, d_ids, d_probs, d_lse, d_counts):
    del d_ids, d_counts
    scores, ids = ctx.saved_tensors
    grads = (d_scores.contiguous(), d_probs.contiguous(), d_lse.contiguous())
    return backward(*grads, scores, ids, ctx.renormalize, ctx.scaling), None, None, None, None, None


router_topk_op.register_autograd(partial(_backward, router_topk_backward_op), setup_context=_setup)
_eager_router_topk = eager(run_router_topk, _setup, partial(_backward, run_router_topk_backward))


def router_topk(
    logits: Float[Tensor, "T E"],
    valid: Bool[Tensor, "T"],
    windows: int,
    topk: int,
    renormalize: bool,
    scaling: float,
) -> tuple[
    Float[Tensor, "T E"], Int[Tensor, "T K"], Float[Tensor, "T K"], Float[Tensor, "T"], Int[Tensor, "W E1"]
]:
    """Scores, choices and weights of every token, and the choices counted.

    Args:
        logits: at least fp32.
        valid: which tokens are counted and have scores and weights; all get ids.
        windows: W; the tokens are equal shares of them, window by window.
        topk: K, the choices of a token.
        renormalize: whether the chosen scores are divided by their sum.
        scaling: multiplies the weights.

    Returns:
        `scores` (softmax), `ids` int64 (best first, ties to the lower id), `probs`, `lse` (log-sum-exp of
        the logits), and `counts` int32, as `count_choices` says. Gradients flow through scores, probs and
        lse. A row with a NaN or infinite logit gets NaN everywhere but in `ids`, which are 0, 1, … A token
        that is not valid has scores and weights of zero, and its logits get no gradient.
    """
    found: Any = direct(router_topk_op, _eager_router_topk)(
        logits, valid, windows, topk, renormalize, scaling
    )
    return found
