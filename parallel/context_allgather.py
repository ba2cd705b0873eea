"""Context-parallel attention that gathers the keys and values of the whole window.

Every rank attends from its own queries to all keys (Llama 3, arXiv:2407.21783, section 3.3.2). The gathered
keys are dropped after the forward and gathered again in backward, so that no rank keeps a whole window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from isozyme.parallel.context_partial import PartialAttention, PartialGradients, attention_in_parts
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
    return attention_in_parts(q, k, v, _Gathered(plan), plan.tile_kernel)


@dataclass(frozen=True, eq=False)
class _Gathered:
    """The whole window at once."""

    plan: ContextPlan

    def attend(self, partial: PartialAttention, k: Tensor, v: Tensor) -> None:
        partial.add(*_gather(k, v, self.plan), self.plan.tiles_with_whole())

    def gradients(self, grads: PartialGradients, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        plan = self.plan
        whole_k, whole_v = _gather(k, v, plan)
        of_k, of_v = (torch.zeros_like(x, dtype=grads.q.dtype) for x in (whole_k, whole_v))
        grads.add(whole_k, whole_v, of_k, of_v, plan.tiles_with_whole())
        by_rank = plan.layout.deal(rearrange([of_k, of_v], "two b s m d -> s two b m d"), dim=0)
        grad_k, grad_v = rearrange(plan.comm.reduce_scatter(by_rank), "s two b m d -> two b s m d")
        return grad_k, grad_v


def _gather(k: Tensor, v: Tensor, plan: ContextPlan) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole window, in its own order."""
    parts = plan.comm.all_gather(rearrange([k, v], "two b s m d -> s two b m d"))
    whole_k, whole_v = rearrange(plan.layout.restore(parts, dim=0), "s two b m d -> two b s m d")
    return whole_k, whole_v
