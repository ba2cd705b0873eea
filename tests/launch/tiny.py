"""A run that takes seconds, and the pieces of a step over a genome of any letters."""

from __future__ import annotations

import random

import torch

from isozyme.core.config import RunConfig
from isozyme.core.genome.dataset import GenomeData
from isozyme.core.genome.store import Genome
from isozyme.core.topology import Topology
from isozyme.launch.compose import compose
from isozyme.models.decoder import build_model
from isozyme.models.types import Chunk
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld, World

TINY = (
    "device=cpu",
    "model.hidden=32",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.moe.ffn=48",
    "data.window=64",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.log_every=1",
    "train.eval_every=0",
    "train.checkpoint_every=0",
    "optim.warmup_steps=2",
)
"""Overrides that shrink L0_sanity."""


def tiny(*overrides: str) -> RunConfig:
    """The tiny run on one rank, unless overrides say otherwise."""
    return compose("L0_sanity", [*TINY, "layout.dp=1", "layout.ep=1", *overrides])


def letters(count: int, seed: int = 0) -> str:
    """A sequence of unequal letters, with an N here and there that makes windows differ in valid labels."""
    return "".join(random.Random(seed).choices("ACGTN", weights=(8, 4, 2, 6, 1), k=count))


def genome_data(config: RunConfig, text: str | None = None) -> GenomeData:
    """The data of a run over letters, none of it on disk."""
    genome = Genome.from_sequences({"one": letters(4000) if text is None else text})
    return GenomeData.of(genome, config.data, seed=config.seed)


def model_on(config: RunConfig, world: World | None = None, dtype: torch.dtype = torch.float64):
    """A model and the groups it was built on."""
    groups = ProcessGroups(Topology(config.layout), SingleWorld() if world is None else world)
    chunk = Chunk.whole(config.model.num_layers)
    return build_model(config, groups, chunk, torch.device("cpu"), dtype), groups
