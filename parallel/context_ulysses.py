"""Context-parallel attention that exchanges tokens for heads.

An all-to-all gives each rank the whole window of a part of the heads; after plain attention another one gives
the tokens back (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from isozyme.core.context import head_problems
from isozyme.core.errors import Rules
from isozyme.parallel.collectives import all_to_all
from isozyme.parallel.context_partial import PartialAttention, PartialGradients
from isozyme.parallel.context_plan import ContextPlan


def ulysses_attention(
    q: Float[Tensor, "B L N D"], k: Float[Tensor, "B L M D"], v: Float[Tensor, "B L M D"], plan: ContextPlan
) -> Float[Tensor, "B L N D"]:
    """Causal attention of this rank's queries to the whole window. All ranks of the CP group call it.

    Bytes that a rank sends, for t = B L D elements of one head on a group of P ranks, e bytes each, where
    each rank receives m key/value heads (M / P, or 1 where P is larger and a head is sent to several ranks):

    - forward: t e (N + 2 m P) (P - 1) / P for queries, keys and values, t e N (P - 1) / P for the output;
    - backward: the same.

    Memory: the whole window of N / P query and m key/value heads, kept until backward.

    Args:
        q: this rank's queries of N heads; P divides N.
        k: this rank's keys of M heads; M divides N, and one of M and P divides the other.
        v: this rank's values.
        plan: group, layout and documents.

    Raises:
        ConfigError: if the heads cannot be dealt out over the group.
    """
    size, layout = plan.comm.size, plan.layout
    rules = Rules("ulysses attention")
    rules.extend(head_problems(q.shape[2], k.shape[2], size))
    rules.raise_if_broken()
    heads, key_heads = q.shape[2] // size, max(k.shape[2] // size, 1)
    k, v = (_for_ranks(x, size) for x in (k, v))
    for_rank = torch.cat(
        [rearrange(x, "b l (p n) d -> p b l n d", p=size) for x in (q, k, v)],
        dim=3,
    )
    received = layout.restore(rearrange(all_to_all(for_rank, plan.comm), "p b l n d -> b (p l) n d"))
    own_q, own_k, own_v = received.split([heads, key_heads, key_heads], dim=2)
    mixed = _whole_window(own_q, own_k, own_v, plan)
    back = rearrange(layout.deal(mixed), "b (p l) n d -> p b l n d", p=size)
    return rearrange(all_to_all(back.contiguous(), plan.comm), "p b l n d -> b l (p n) d")


def _for_ranks(x: Float[Tensor, "B L M D"], size: int) -> Float[Tensor, "B L R D"]:
    """The key heads that each rank needs, rank by rank: all of them once, or each for several ranks."""
    return x if x.shape[2] >= size else x.repeat_interleave(size // x.shape[2], dim=2)


def _whole_window(q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan) -> Tensor:
    """Attention inside one rank: torch's own kernels for one document, tiles for several."""
    if plan.packed:
        out: Tensor = _Tiled.apply(q, k, v, plan)  # type: ignore[no-untyped-call]
        return out
    q, k, v = (rearrange(x, "b s n d -> b n s d") for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return rearrange(mixed, "b n s d -> b s n d")


class _Tiled(Function):
    """Attention inside the documents of whole windows, without communication."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan) -> Tensor:
        partial = PartialAttention(q)
        partial.add(k, v, plan.tiles_of_whole())
        out = partial.out.to(q.dtype)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, partial.logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        grads = PartialGradients(grad, q, out, logsumexp)
        of_k, of_v = (torch.zeros(x.shape, dtype=logsumexp.dtype, device=x.device) for x in (k, v))
        grads.add(k, v, of_k, of_v, ctx.plan.tiles_of_whole())
        return grads.q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None
