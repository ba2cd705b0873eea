"""From token ids to vectors, and from vectors to logits: two weights, or one that both share."""

from __future__ import annotations

from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from isozyme.core.config import ModelConfig
from isozyme.models.builder import Builder
from isozyme.parallel.collectives import gather_replicated_from_group
from isozyme.parallel.tensor import from_sequence, gather_tokens, to_sequence, vocabulary_parallel_embedding


def embedding_weight(builder: Builder, config: ModelConfig) -> nn.Parameter:
    """`embedding.weight`, `[V, H]`, cut over the vocabulary, without weight decay.

    Large embeddings keep the gradient through the first norm small, which avoids spikes of the loss (Takase
    et al. 2023, arXiv:2312.16903); decay would shrink them again, so OLMo 2 (arXiv:2501.00656) leaves it out.
    """
    shape = (config.vocab_size, config.hidden)
    return builder.split_weight(
        "embedding.weight", shape, config.embedding_scale, dim=0, decay=False, on_both_ends=config.tied
    )


class Embedding(nn.Module):
    """One learned vector a token id.

    Args:
        builder: makes the parameter.
        config: vocabulary, width and standard deviation.
    """

    def __init__(self, builder: Builder, config: ModelConfig) -> None:
        super().__init__()
        self.tp = builder.tp
        self.weight = embedding_weight(builder, config)

    def forward(self, tokens: Int[Tensor, "B S"]) -> Float[Tensor, "B P H"]:
        """The vectors of this rank's part of each sequence; tensor-parallel ranks give the same tokens."""
        return vocabulary_parallel_embedding(from_sequence(tokens, self.tp), self.weight, self.tp)


class Head(nn.Module):
    """The weight `[V, H]` that turns the last hidden state into one logit a token id.

    Args:
        builder: makes the parameter.
        config: vocabulary, width, tying.
        shared: the embedding of the same chunk, used if the model is tied. On a pipeline stage without it, a
            tied head holds a second copy of `embedding.weight` under that same global name.
    """

    def __init__(self, builder: Builder, config: ModelConfig, shared: Embedding | None) -> None:
        super().__init__()
        self.tp = builder.tp
        if config.tied:
            self.weight = shared.weight if shared is not None else embedding_weight(builder, config)
        else:
            shape = (config.vocab_size, config.hidden)
            self.weight = builder.split_weight("head.weight", shape, config.init_std, dim=0)

    def forward(self, hidden: Float[Tensor, "B P H"]) -> Float[Tensor, "B S V"]:
        """All logits at once, the same on all tensor-parallel ranks, from each rank's part of the sequence.

        For the loss see `isozyme.models.loss`, which does without.
        """
        logits = to_sequence(F.linear(gather_tokens(hidden, self.tp), self.weight), self.tp)
        if self.tp.size == 1:
            return logits
        by_id = gather_replicated_from_group(rearrange(logits, "b s v -> v b s"), self.tp)
        return rearrange(by_id, "v b s -> b s v")
