"""Context parallelism: attention over windows of which each rank of the CP group holds a part of the tokens.

Three methods with one meaning, exact in values and gradients; docs/parallelism/context.md says which to take.
Their slow twin is `whole_window_attention`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Protocol

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.core.context import ContextMethod, KernelName
from isozyme.parallel.communicator import Communicator
from isozyme.parallel.context_allgather import allgather_attention
from isozyme.parallel.context_layout import ContextLayout
from isozyme.parallel.context_plan import ContextPlan
from isozyme.parallel.context_ring import ring_attention
from isozyme.parallel.context_tiles import Documents
from isozyme.parallel.context_ulysses import ulysses_attention


class ContextAttention(Protocol):
    """What a method looks like."""

    def __call__(
        self,
        q: Float[Tensor, "B L N D"],
        k: Float[Tensor, "B L M D"],
        v: Float[Tensor, "B L M D"],
        plan: ContextPlan,
    ) -> Float[Tensor, "B L N D"]:
        """Causal attention, inside documents, of this rank's queries to the whole window."""
        ...


METHODS: MappingProxyType[ContextMethod, ContextAttention] = MappingProxyType(
    {"allgather": allgather_attention, "ring": ring_attention, "ulysses": ulysses_attention}
)


def plan_context(
    comm: Communicator,
    layout: ContextLayout,
    documents: Int[Tensor, "B S"] | None = None,
    kernel: KernelName = "torch",
) -> ContextPlan:
    """What attention needs to know about a micro-batch, the same for every layer.

    Args:
        comm: the CP group.
        layout: which tokens each of its ranks holds.
        documents: numbers of the packed documents of the *whole* windows, the same on all ranks, in runs of
            equal numbers; None if each window is one document. Reads the device once, if given.
        kernel: what computes whole windows, and what tiles prefer; of `choose_attention`.
    """
    found = Documents.one(layout.window) if documents is None else Documents.of(documents)
    return ContextPlan(comm=comm, layout=layout, documents=found, packed=documents is not None, kernel=kernel)


def whole_window_attention(
    q: Float[Tensor, "B S N D"],
    k: Float[Tensor, "B S M D"],
    v: Float[Tensor, "B S M D"],
    documents: Int[Tensor, "B S"] | None = None,
) -> Float[Tensor, "B S N D"]:
    """The slow twin: softmax over a whole window, in the open, with every logit and the mask written out.

    Args:
        q: queries of N heads.
        k: keys of M heads; query head n reads key head n // (N / M).
        v: values.
        documents: a query sees the keys of its own document at its own place and before; None for one each.
    """
    length, share = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(share, dim=2) for x in (k, v))
    logits = torch.einsum("b s n d, b t n d -> b n s t", q, k) / q.shape[-1] ** 0.5
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()[None]
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None, :])
    probs = logits.masked_fill(~rearrange(seen, "b s t -> b 1 s t"), -torch.inf).softmax(dim=-1)
    return torch.einsum("b n s t, b t n d -> b s n d", probs, v)
