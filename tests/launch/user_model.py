"""A model as a user would bring it to `isozyme verify --model tests.launch.user_model:right`, and wrong ones.

It has an embedding, one mixture-of-experts layer and a head of its own, and no attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isozyme.core.batch import Batch
from isozyme.core.config import RunConfig
from isozyme.core.initialisation import Init
from isozyme.models.types import Chunk, ModelOutput
from isozyme.moe.layer import MoELayer
from isozyme.moe.types import Routing
from isozyme.parallel.parameters import create_parameter
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import ShardSpec, dense_spec


class TinyModel(nn.Module):
    """Embedding, experts, head."""

    mean_loss = False

    def __init__(
        self,
        config: RunConfig,
        groups: ProcessGroups,
        device: torch.device,
        dtype: torch.dtype,
        head_spec: ShardSpec,
    ) -> None:
        super().__init__()
        model = config.model
        shape = (model.vocab_size, model.hidden)
        spec = dense_spec("in.weight", shape, Init.normal(1.0))
        self.embedding = create_parameter(spec, groups, seed=config.seed, device=device, dtype=dtype)
        self.head = create_parameter(head_spec, groups, seed=config.seed, device=device, dtype=dtype)
        self.moe = MoELayer(
            model.moe,
            name="experts",
            hidden=model.hidden,
            groups=groups,
            seed=config.seed,
            init_std=0.3,
            device=device,
            dtype=dtype,
        )

    def forward(
        self,
        batch: Batch,
        hidden: Tensor | None = None,
        routing_override: Sequence[Routing] | None = None,
    ) -> ModelOutput:
        """The loss of one micro-batch."""
        x = F.embedding(batch.tokens, self.embedding)
        output = self.moe(x, batch.token_valid, None if routing_override is None else routing_override[0])
        logits = F.linear(x + output.tokens, self.head)[batch.label_valid]
        loss = F.cross_entropy(logits, batch.labels[batch.label_valid], reduction="sum")
        if self.mean_loss:
            loss = loss / batch.label_valid.sum().clamp(min=1)
        return ModelOutput(hidden=None, loss_sum=loss, stats=(output.stats,), routings=(output.routing,))


def _head(config: RunConfig) -> ShardSpec:
    return dense_spec("out.weight", (config.model.vocab_size, config.model.hidden), Init.normal(0.3))


def right(
    config: RunConfig, groups: ProcessGroups, chunk: Chunk, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """The model in order."""
    return TinyModel(config, groups, device, dtype, _head(config))


def mean_loss(
    config: RunConfig, groups: ProcessGroups, chunk: Chunk, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """On several ranks each micro-batch divides its loss by its own labels, before the step divides it."""
    model = right(config, groups, chunk, device, dtype)
    model.mean_loss = groups.topology.size("dp") > 1  # type: ignore[assignment]
    return model


def forgotten_reduction(
    config: RunConfig, groups: ProcessGroups, chunk: Chunk, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """The head claims that its gradient is the same on all replicas."""
    spec = replace(_head(config), replicas={"tp": "identical", "cp": "identical", "dp": "identical"})
    return TinyModel(config, groups, device, dtype, spec)


def crashing(
    config: RunConfig, groups: ProcessGroups, chunk: Chunk, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """Raises on the last of several ranks."""
    if groups.world.size > 1 and groups.rank == groups.world.size - 1:
        raise RuntimeError("out of luck")
    return right(config, groups, chunk, device, dtype)


not_callable = "a model"
