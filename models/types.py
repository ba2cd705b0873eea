"""What a model is to the training step, to verification and to a pipeline: its chunk and its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from isozyme.core.batch import Batch
from isozyme.core.config import RunConfig
from isozyme.moe.types import RouterStats, Routing
from isozyme.parallel.process_groups import ProcessGroups


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The part of the model that one pipeline (virtual) stage holds."""

    layers: range
    """Global indices of its layers."""
    has_embedding: bool = True
    has_head: bool = True

    @staticmethod
    def whole(num_layers: int) -> Chunk:
        """The chunk that is the whole model."""
        return Chunk(layers=range(num_layers))


@dataclass(frozen=True, kw_only=True)
class ModelOutput:
    """The result of one micro-batch on one chunk, in the view of one rank. Losses are sums, never means."""

    hidden: Float[Tensor, "B S H"] | None
    """What the next stage receives; None from a chunk with the head."""
    loss_sum: Float[Tensor, ""] | None
    """Sum over valid labels of the cross-entropy in nats, at least fp32; None without the head.

    Tensor-parallel ranks have the same sum, that of all their tokens, and it counts once; what `stats` and
    `routings` say is of each rank's own tokens.
    """
    stats: Sequence[RouterStats] = ()
    """One for each mixture-of-experts layer of the chunk, in order."""
    routings: Sequence[Routing] = ()
    """The routing that each of these layers used."""


@runtime_checkable
class Model(Protocol):
    """What the training step calls. Any `nn.Module` of this shape can be trained and verified.

    Every parameter carries a `ShardSpec` (`isozyme.parallel.parameters.create_parameter` makes such).
    """

    def __call__(
        self,
        batch: Batch,
        hidden: Float[Tensor, "B S H"] | None = None,
        routing_override: Sequence[Routing] | None = None,
    ) -> ModelOutput:
        """Run one micro-batch; with `routing_override` each MoE layer uses the given expert choices."""
        ...


@runtime_checkable
class ModelFactory(Protocol):
    """Builds one chunk of a model on one rank: what `isozyme verify --model package.module:factory` names."""

    def __call__(
        self,
        config: RunConfig,
        groups: ProcessGroups,
        chunk: Chunk,
        device: torch.device,
        dtype: torch.dtype,
    ) -> nn.Module:
        """The chunk as a module that follows `Model`."""
        ...
