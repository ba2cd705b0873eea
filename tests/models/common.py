"""Small models and batches that the tests of this folder share."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from isozyme.core.batch import Batch
from isozyme.core.config import ModelConfig, MoEConfig, RouterConfig, RunConfig
from isozyme.core.topology import Layout, Topology
from isozyme.models.builder import Builder
from isozyme.models.decoder import Decoder, build_model
from isozyme.models.types import Chunk
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld

CPU = torch.device("cpu")


def single_groups() -> ProcessGroups:
    """The process groups of one rank alone."""
    return ProcessGroups(Topology(Layout()), SingleWorld())


def builder(dtype: torch.dtype = torch.float64, seed: int = 0) -> Builder:
    """What a lone module needs to make its parameters."""
    return Builder(groups=single_groups(), seed=seed, device=CPU, dtype=dtype)


def tiny(**changes: Any) -> RunConfig:
    """Two query heads a key/value head, unequal layers, weights large enough that all parts matter."""
    model = ModelConfig(
        vocab_size=37,
        hidden=32,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        ffn=48,
        pattern="DMM",
        init_std=0.3,
        moe=MoEConfig(ffn=24, experts="loop", router=RouterConfig(num_experts=4, topk=2)),
    )
    return RunConfig(seed=3, model=dataclasses.replace(model, **changes))


def whole(config: RunConfig, dtype: torch.dtype = torch.float64) -> Decoder:
    """The whole model on one CPU rank."""
    return build_model(config, single_groups(), Chunk.whole(config.model.num_layers), CPU, dtype)


def random_batch(windows: int = 2, length: int = 16, vocab: int = 37, seed: int = 0, **changes: Any) -> Batch:
    """Random tokens, one document a window, no padding, every label valid, unless `changes` say otherwise."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (windows, length + 1), generator=generator)
    yes = torch.ones(windows, length, dtype=torch.bool)
    values: dict[str, Any] = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "label_valid": yes,
        "token_valid": yes,
        "positions": torch.arange(length).expand(windows, length),
        "documents": torch.zeros(windows, length, dtype=torch.long),
        "packed": False,
    }
    return Batch(**(values | changes))
