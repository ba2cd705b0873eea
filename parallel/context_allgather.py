"""Context-parallel attention that gathers the keys and values of the whole window.

Every rank attends from its own queries to all keys (Llama 3, arXiv:2407.21783, section 3.3.2). The gathered
keys are dropped after the forward and gathered again in backward, so that no rank keeps a whole window.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isozyme.parallel.context_partial import PartialAttention, PartialGradients
from isozyme.parallel.context_plan import ContextPlan


def allgather_attention(
    q: Float[Tensor, "B L N D"], k: Float[Tensor, "B L M D"], v: Float[Tensor, "B L M D"], plan: ContextPlan
) -> Float[Tensor, "B L N D"]:
    """Causal attention of this rank's queries to the whole window. All ranks of the CP group call it.

    Bytes that a rank sends, for n = B L M D elements of one of k and v on a group of P ranks, e bytes each in
    the inputs' dtype and w in the accumulators' (at least fp32):

    - forward: one all-gather, 2 n e (P - 1);
    - backward: the same all-gather, and a reduce-scatter of the gradients, 2 n w (P - 1).

    Memory: the gathered keys and values, 2 P n e, while one layer computes; saved: q, k, v, output and one
    number a query and head.

    Args:
        q: this rank's queries of N heads.
        k: this rank's keys of M heads; M divides N.
        v: this rank's values.
        plan: group, layout and documents.
    """
    out: Tensor = _AllGather.apply(q, k, v, plan)  # type: ignore[no-untyped-call]
    return out


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan) -> Tensor:
        partial = PartialAttention(q, plan.tile_kernel)
        partial.add(*_gather(k, v, plan), plan.tiles_with_whole())
        out = partial.out.to(q.dtype)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, partial.logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        plan: ContextPlan = ctx.plan
        grads = PartialGradients(grad, q, out, logsumexp, plan.tile_kernel)
        whole_k, whole_v = _gather(k, v, plan)
        of_k, of_v = (torch.zeros_like(x, dtype=logsumexp.dtype) for x in (whole_k, whole_v))
        grads.add(whole_k, whole_v, of_k, of_v, plan.tiles_with_whole())
        by_rank = plan.layout.deal(rearrange([of_k, of_v], "two b s m d -> s two b m d"), dim=0)
        grad_k, grad_v = rearrange(plan.comm.reduce_scatter(by_rank), "s two b m d -> two b s m d")
        return grads.q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


def _gather(k: Tensor, v: Tensor, plan: ContextPlan) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole window, in its own order."""
    parts = plan.comm.all_gather(rearrange([k, v], "two b s m d -> s two b m d"))
    whole_k, whole_v = rearrange(plan.layout.restore(parts, dim=0), "s two b m d -> two b s m d")
    return whole_k, whole_v
