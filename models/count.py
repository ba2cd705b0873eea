"""Parameters and floating-point operations of a model, from its configuration alone: nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from isozyme.core.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of the whole model, all ranks together, by what they do. Buffers are not counted."""

    embedding: int
    head: int
    """0 if the head is tied to the embedding."""
    norms: int
    attention: int
    dense_mlp: int
    router: int
    shared_experts: int
    routed_experts: int
    routed_experts_of_a_token: int
    """The share of `routed_experts` that one token passes: topk of num_experts."""

    @property
    def total(self) -> int:
        """All parameters, each once."""
        return (
            self.embedding
            + self.head
            + self.norms
            + self.attention
            + self.dense_mlp
            + self.router
            + self.shared_experts
            + self.routed_experts
        )

    @property
    def active(self) -> int:
        """Parameters that one token uses, the embedding and the head counted whole as is the custom."""
        return self.total - self.routed_experts + self.routed_experts_of_a_token


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Count the parameters of a decoder.

    >>> from isozyme.models.presets import preset
    >>> count = count_parameters(preset("mixtral_8x7b").model)
    >>> count.total, count.active
    (46702792704, 12879925248)
    """
    hidden, kinds = model.hidden, model.layer_kinds()
    sparse, dense = kinds.count("M"), kinds.count("D")
    router = model.moe.router
    projections = hidden * model.head_width * 2 * (model.num_heads + model.num_kv_heads)
    vocabulary = model.vocab_size * hidden
    expert = 3 * hidden * model.moe.ffn
    return ParameterCount(
        embedding=vocabulary,
        head=0 if model.tied else vocabulary,
        norms=hidden * (2 * model.num_layers + 1),
        attention=model.num_layers * projections,
        dense_mlp=dense * 3 * hidden * model.ffn,
        router=sparse * router.num_experts * hidden,
        shared_experts=sparse * 3 * hidden * model.moe.shared_ffn,
        routed_experts=sparse * router.num_experts * expert,
        routed_experts_of_a_token=sparse * router.topk * expert,
    )


def training_flops_per_token(model: ModelConfig, window: int) -> int:
    """Floating-point operations of forward and backward for one token, averaged over a full window.

    `6 * W + 6 * L * N * D * (S + 1)`, where W counts the weights that multiply a token: attention, dense
    MLPs, router, shared experts, the token's own topk experts and the head (the tied one too; not the
    embedding, which is a look-up). A multiply-add counts as 2; backward costs twice the forward: 6 a weight.
    A causal query sees (S + 1) / 2 keys on average; for each of these, scores and values cost 2 * D each in
    each of N heads and L layers: 2 * N * D * (S + 1) forward, three times that with backward. The accounting
    follows Chowdhery et al. 2022 (PaLM, appendix B, arXiv:2204.02311), except that they count all S keys.

    Left out, as is the custom for model FLOPs utilisation: norms, activations, softmax, rotary, recomputed
    activations, padding rows, and what packed documents save in attention.

    Args:
        model: the model.
        window: S, tokens of a window.
    """
    count = count_parameters(model)
    weights = count.active - count.norms - count.embedding - count.head + model.vocab_size * model.hidden
    attention = model.num_layers * model.num_heads * model.head_width * (window + 1)
    return 6 * weights + 6 * attention
