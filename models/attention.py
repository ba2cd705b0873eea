"""Causal self-attention with grouped key/value heads, inside the documents of a window.

What all layers share (rotation and mask) is made once a micro-batch, as a `Context`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from isozyme.core.batch import Batch
from isozyme.core.config import ModelConfig
from isozyme.core.context import ContextMethod
from isozyme.models.builder import Builder
from isozyme.models.linear import ColumnLinear, RowLinear, together
from isozyme.models.rotary import Rotation, rotate, rotation_at
from isozyme.parallel.context import METHODS
from isozyme.parallel.context_plan import ContextPlan
from isozyme.parallel.recompute import recompute
from isozyme.parallel.tensor import from_sequence, to_sequence


@dataclass(frozen=True, kw_only=True)
class Context:
    """What attention needs to know about a micro-batch, the same for every layer."""

    rotation: Rotation
    mask: Bool[Tensor, "B S S"] | None
    """True where a query (dim 1) sees a key (dim 2); None for plain causal attention, and with a plan."""
    plan: ContextPlan | None = None
    """Where context-parallel ranks share the windows: how their queries meet each other's keys."""
    method: ContextMethod = "allgather"
    """How it is carried out."""

    @staticmethod
    def of(batch: Batch, config: ModelConfig, dtype: torch.dtype, plan: ContextPlan | None = None) -> Context:
        """The context of one micro-batch. Reads no value from the device.

        Args:
            batch: the tokens of this context-parallel rank.
            config: head width, base of the rotation, and the method of context parallelism.
            dtype: the model's dtype.
            plan: the share of this rank; None if it has whole windows.
        """
        return Context(
            rotation=rotation_at(batch.positions, config.head_width, config.rope_theta, dtype),
            mask=document_mask(batch.documents) if batch.packed and plan is None else None,
            plan=plan,
            method=config.attention.context,
        )

    def mix(
        self, q: Float[Tensor, "B S N D"], k: Float[Tensor, "B S M D"], v: Float[Tensor, "B S M D"]
    ) -> Float[Tensor, "B S N D"]:
        """Attention of the queries of this rank's S tokens to all earlier tokens of their documents."""
        if self.plan is None:
            return attend(q, k, v, self.mask)
        return METHODS[self.method](q, k, v, self.plan)


def document_mask(documents: Int[Tensor, "B S"]) -> Bool[Tensor, "B S S"]:
    """True where query s may see key t: t <= s and both in the same document of the window."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return causal & (documents[:, :, None] == documents[:, None, :])


def attend(
    q: Float[Tensor, "B S N D"],
    k: Float[Tensor, "B S M D"],
    v: Float[Tensor, "B S M D"],
    mask: Bool[Tensor, "B S S"] | None,
) -> Float[Tensor, "B S N D"]:
    """Softmax attention with scale 1/sqrt(D); query head n reads key/value head n // (N / M).

    Padding stands at the end of a window, so that causality alone keeps it from real tokens.

    Args:
        q: queries of N heads.
        k: keys of M heads, M divides N (Ainslie et al. 2023, arXiv:2305.13245).
        v: values of M heads.
        mask: which keys a query sees; None for causal, which has the faster kernels.
    """
    q, k, v = (rearrange(x, "b s n d -> b n s d") for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if mask is None else mask[:, None],
        is_causal=mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return rearrange(out, "b n s d -> b s n d")


class Attention(nn.Module):
    """Projections, rotation, attention and output projection of one layer.

    Heads are cut over the tensor-parallel ranks. With fewer key/value heads than ranks, neighbouring ranks
    hold the same one, which is the one that their query heads read.

    Args:
        builder: makes the parameters.
        name: global name of the module, such as `layers.3.attention`.
        config: sizes and standard deviations.
        output_std: standard deviation of the output projection.
    """

    def __init__(self, builder: Builder, name: str, config: ModelConfig, *, output_std: float) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.recompute = config.recompute == "selective"
        hidden, std = config.hidden, config.init_std
        query, key = config.num_heads * self.head_width, config.num_kv_heads * self.head_width
        self.tp, kv_heads = builder.tp, config.num_kv_heads
        self.q = ColumnLinear(builder, f"{name}.q", hidden, query, std=std)
        self.k = ColumnLinear(builder, f"{name}.k", hidden, key, std=std, units=kv_heads)
        self.v = ColumnLinear(builder, f"{name}.v", hidden, key, std=std, units=kv_heads)
        self.output = RowLinear(builder, f"{name}.output", query, hidden, std=output_std)

    def forward(self, x: Float[Tensor, "B P H"], context: Context) -> Float[Tensor, "B P H"]:
        """Mix each token with the earlier tokens of its document.

        Args:
            x: this rank's part of each sequence; attention sees the parts of all tensor-parallel ranks.
            context: rotation and mask of all of these.
        """
        q, k, v = (
            rearrange(to_sequence(rows, self.tp), "b s (n d) -> b s n d", d=self.head_width)
            for rows in together(x, self.q, self.k, self.v)
        )

        def core(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
            return (context.mix(rotate(q, context.rotation), rotate(k, context.rotation), v),)

        (mixed,) = recompute(core, (q, k, v)) if self.recompute else core(q, k, v)
        return self.output(from_sequence(rearrange(mixed, "b s n d -> b s (n d)"), self.tp))
