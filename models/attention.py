"""Causal self-attention with grouped key/value heads, inside the documents of a window.

What all layers share (rotation, kernel, documents) is made once a micro-batch, as a `Context`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from isozyme.core.batch import Batch, document_lengths
from isozyme.core.config import ModelConfig
from isozyme.core.context import ContextMethod, KernelName
from isozyme.core.errors import UsageError
from isozyme.models.builder import Builder
from isozyme.models.linear import ColumnLinear, RowLinear, together
from isozyme.models.rotary import Rotation, rotate, rotation_at
from isozyme.parallel.attention_kernels import AttentionFacts, attend, fitting
from isozyme.parallel.attention_packed import Lengths, Packed, packed_attention
from isozyme.parallel.context import METHODS
from isozyme.parallel.context_plan import ContextPlan
from isozyme.parallel.recompute import recompute
from isozyme.parallel.tensor import from_sequence, to_sequence


@dataclass(frozen=True, kw_only=True)
class Context:
    """What attention needs to know about a micro-batch, the same for every layer."""

    rotation: Rotation
    kernel: KernelName = "torch"
    """What computes whole windows of one document each."""
    packed: Packed | None = None
    """What computes windows of several documents; None if there are none, and with a plan."""
    plan: ContextPlan | None = None
    """Where context-parallel ranks share the windows: how their queries meet each other's keys."""
    method: ContextMethod = "allgather"
    """How it is carried out."""

    @staticmethod
    def of(
        batch: Batch,
        config: ModelConfig,
        dtype: torch.dtype,
        plan: ContextPlan | None = None,
        kernel: KernelName = "torch",
    ) -> Context:
        """The context of one micro-batch.

        Reads no value from the device, unless windows are packed and the batch does not say their `lengths`:
        then once.

        Args:
            batch: the tokens of this context-parallel rank.
            config: head width, base of the rotation, and the method of context parallelism.
            dtype: the model's dtype.
            plan: the share of this rank; None if it has whole windows.
            kernel: what is to compute whole windows of one document each, by `choose_attention`.

        Raises:
            UsageError: if the batch's `lengths` are not those of its windows.
        """
        packed = None
        if batch.packed and plan is None:
            device = batch.tokens.device
            packed = packed_attention(
                _lengths(batch), batch.window_length, attention_facts(config, device, dtype), device
            )
        return Context(
            rotation=rotation_at(batch.positions, config.head_width, config.rope_theta, dtype),
            kernel=fitting(kernel, batch.window_length),
            packed=packed,
            plan=plan,
            method=config.attention.context,
        )

    def mix(
        self, q: Float[Tensor, "B S N D"], k: Float[Tensor, "B S M D"], v: Float[Tensor, "B S M D"]
    ) -> Float[Tensor, "B S N D"]:
        """Attention of the queries of this rank's S tokens to all earlier tokens of their documents."""
        if self.plan is not None:
            return METHODS[self.method](q, k, v, self.plan)
        if self.packed is not None:
            return self.packed(q, k, v)
        return attend(q, k, v, self.kernel)


def _lengths(batch: Batch) -> Lengths:
    """Of the documents of each window; those that the batch says must cover its windows."""
    if batch.lengths is None:
        return document_lengths(batch.documents)
    sums = [sum(window) for window in batch.lengths]
    if sums != [batch.window_length] * batch.num_windows:
        raise UsageError(
            f"the lengths of a batch's documents must cover its windows: {batch.num_windows} windows of "
            f"{batch.window_length} tokens, and Batch.lengths sum to {sums}. Set lengths=None where you cut "
            "or join batches."
        )
    return batch.lengths


def attention_facts(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> AttentionFacts:
    """What decides which kernel computes the attention of this model here."""
    return AttentionFacts.here(
        device,
        dtype,
        head_width=config.head_width,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
    )


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
            context: rotation and documents of all of these.
        """
        q, k, v = (
            rearrange(to_sequence(rows, self.tp), "b s (n d) -> b s n d", d=self.head_width)
            for rows in together(x, self.q, self.k, self.v)
        )
        core = partial(_core, context)
        (mixed,) = recompute(core, (q, k, v)) if self.recompute else core(q, k, v)
        return self.output(from_sequence(rearrange(mixed, "b s n d -> b s (n d)"), self.tp))


def _core(context: Context, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
    """What `recompute` makes again: the rotation and the mixing."""
    return (context.mix(rotate(q, context.rotation), rotate(k, context.rotation), v),)
