"""Softmax, top-k and log-sum-exp of router logits in one pass, and their gradient in one pass.

Ties go to the lower expert id. The combine weights are the chosen scores, renormalised over the choice if
asked (Mixtral) or not (Qwen, DeepSeek), times a scaling factor.
"""

from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

MAX_EXPERTS = 1024
"""The kernel holds a token's scores for all experts in registers."""


def router_topk_twin(
    logits: Float[Tensor, "T E"], topk: int, renormalize: bool, scaling: float
) -> tuple[Float[Tensor, "T E"], Int[Tensor, "T K"], Float[Tensor, "T K"], Float[Tensor, "T"]]:
    """`router_topk` by a softmax and a stable descending sort."""
    finite = logits.isfinite().all(dim=-1, keepdim=True)
    logits = torch.where(finite, logits, torch.full_like(logits, torch.nan))
    scores = logits.softmax(dim=-1)
    ids = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :topk].contiguous()
    chosen = scores.gather(1, ids)
    total = chosen.sum(dim=-1, keepdim=True) if renormalize else 1.0
    return scores, ids, chosen / total * scaling, logits.logsumexp(dim=-1)


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
        upstream = (upstream - (upstream * chosen).sum(dim=-1, keepdim=True) / total) / total
    on_scores = d_scores.scatter_add(1, ids, upstream)
    inner = (on_scores * scores).sum(dim=-1, keepdim=True)
    return scores * (on_scores - inner + d_lse.unsqueeze(-1))


@torch.library.custom_op("isozyme::router_topk", mutates_args=())
def router_topk(
    logits: Tensor, topk: int, renormalize: bool, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, choices and weights of every token.

    Args:
        logits: `[T, E]`, at least fp32.
        topk: K, the choices of a token.
        renormalize: whether the chosen scores are divided by their sum.
        scaling: multiplies the weights.

    Returns:
        `scores` `[T, E]` (softmax), `ids` int64 `[T, K]` (best first, ties to the lower id), `probs`
        `[T, K]`, `lse` `[T]` (log-sum-exp of the logits). Gradients flow through scores, probs and lse. A row
        with a NaN or infinite logit gets NaN everywhere but in `ids`, which are 0, 1, …
    """
    if logits.is_cuda:
        from isozyme.moe.kernels.triton_router_topk import launch_router_topk

        return launch_router_topk(logits, topk, renormalize, scaling)
    return router_topk_twin(logits, topk, renormalize, scaling)


@router_topk.register_fake
@no_type_check
def _(logits: Tensor, topk: int, renormalize: bool, scaling: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del renormalize, scaling
    count = logits.shape[0]
    ids = logits.new_empty((count, topk), dtype=torch.int64)
    return torch.empty_like(logits), ids, logits.new_empty((count, topk)), logits.new_empty(count)


@torch.library.custom_op("isozyme::router_topk_backward", mutates_args=())
def router_topk_backward(
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


@router_topk_backward.register_fake
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


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    scores, ids, _, _ = output
    ctx.save_for_backward(scores, ids)
    ctx.mark_non_differentiable(ids)
    ctx.renormalize, ctx.scaling = inputs[2], inputs[3]


def _backward(ctx, d_scores, d_ids, d_probs, d_lse):  # type: ignore[no-untyped-def]
    del d_ids
    scores, ids = ctx.saved_tensors
    grads = (d_scores.contiguous(), d_probs.contiguous(), d_lse.contiguous())
    return router_topk_backward(*grads, scores, ids, ctx.renormalize, ctx.scaling), None, None, None


router_topk.register_autograd(_backward, setup_context=_setup)
