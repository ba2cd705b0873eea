"""Context-parallel attention that exchanges tokens for heads.

An all-to-all gives each rank the whole window of a part of the heads; after plain attention another one gives
the tokens back (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509).
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from isozyme.core.context import head_problems
from isozyme.core.errors import Rules
from isozyme.parallel.attention_kernels import attend, fitting
from isozyme.parallel.attention_packed import tiled_attention
from isozyme.parallel.collectives import all_to_all
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
    """Attention inside one rank, which has whole windows of some heads."""
    if plan.packed:
        return tiled_attention(q, k, v, tuple(plan.tiles_of_whole()))
    return attend(q, k, v, fitting(plan.kernel, plan.layout.window))
