"""The small model and the awkward data on which layouts are compared.

The model keeps what decides how tokens and gradients travel (experts, choices, head ratio, tying, layer
pattern, auxiliary losses, capacity) and shrinks the rest. The data differ in every window and route unevenly;
one expert stays empty, some windows are padding, one has no label, and once a whole rank holds padding alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from isozyme.core.batch import Batch
from isozyme.core.config import DataConfig, ModelConfig, RunConfig
from isozyme.core.genome.schedule import step_indices
from isozyme.core.initialisation import name_key
from isozyme.core.topology import Layout
from isozyme.models.embedding import Embedding, Head
from isozyme.moe.router import Router

WINDOW = 16
MICRO_BATCH = 2
ACCUMULATION = 2
"""Micro-batches of a step on every rank of the layout with the most dense replicas; more on the others."""
LONGEST_PATTERN = 4
PADDED_STEP = 1
"""The step in which the last dense replica of the widest layout reads padding alone."""


def reduced(config: RunConfig, layouts: Sequence[Layout]) -> RunConfig:
    """The run with a model that takes milliseconds, and sizes that every layout divides.

    K/V heads that the widest TP divides stay as many as it needs, and fewer than that stay fewer.

    Weights are drawn with a standard deviation of 0.3 rather than the recipe's, so that at this width every
    part of the model has a say in every gradient.

    Args:
        config: the run to be verified.
        layouts: all that will be compared.
    """
    dense = math.lcm(*(layout.resolved().dp or 1 for layout in layouts))
    stages = math.lcm(*(layout.pp for layout in layouts))
    interleaved = config.pipeline.schedule == "interleaved"
    micro_batches = math.lcm(ACCUMULATION, stages if interleaved else 1)
    virtual_stages = stages * config.pipeline.num_chunks(stages)
    model = config.model
    tp, etp = (math.lcm(*(getattr(layout, axis) for layout in layouts)) for axis in ("tp", "etp"))
    parts = math.lcm(*(layout.tp * layout.cp for layout in layouts))
    kv_heads = min(model.num_kv_heads, max(tp, 2))
    kinds = _short_pattern(model.layer_kinds(), model.pattern)
    return replace(
        config,
        precision="fp64",
        device="cpu",
        layout=Layout(),
        data=DataConfig(window=_multiple(WINDOW, parts)),
        optim=replace(config.optim, implementation="torch", main_grad="fp32"),
        pipeline=replace(config.pipeline, split=None),
        train=replace(
            config.train,
            global_batch=dense * MICRO_BATCH * micro_batches,
            micro_batch=MICRO_BATCH,
            cuda_graph=False,
        ),
        model=replace(
            model,
            vocab_size=_multiple(32, tp),
            hidden=32,
            num_layers=_multiple(max(len(kinds), 2), virtual_stages),
            num_heads=kv_heads * (model.num_heads // model.num_kv_heads),
            num_kv_heads=kv_heads,
            head_dim=8,
            ffn=_multiple(48, tp),
            pattern=kinds,
            init_std=0.3,
            embedding_std=1.0,
            attention=replace(model.attention, kernel="auto"),
            norm="auto",
            moe=replace(
                model.moe,
                ffn=_multiple(24, etp),
                shared_ffn=_multiple(24, tp) if model.moe.shared_ffn else 0,
                dispatcher="allgather" if model.moe.equal_tokens else "auto",  # settings name theirs
                experts="auto",
                cache_quantized_weights=False,  # nothing is quantised in fp64 and fp32
            ),
        ),
    )


def _multiple(size: int, of: int) -> int:
    """The smallest multiple of `of` that is at least `size`."""
    return math.ceil(size / of) * of


def _short_pattern(kinds: str, pattern: str) -> str:
    """The layer pattern itself if it is short, else one layer for each of its runs of equal kinds."""
    if len(pattern) <= LONGEST_PATTERN:
        return pattern
    return "".join(kind for kind, _ in groupby(kinds))[:LONGEST_PATTERN]


class Windows:
    """Every window of every step: a pure function of the seed and the window's index.

    Args:
        config: a reduced run.
        layouts: all that will be compared; the widest decides which windows are padding in `PADDED_STEP`.
    """

    def __init__(self, config: RunConfig, layouts: Sequence[Layout]) -> None:
        self.seed, self.length = config.seed, config.data.window
        self.vocab_size = config.model.vocab_size
        self.global_batch, self.micro_batch = config.train.global_batch, config.train.micro_batch
        widest = max(layout.resolved().dp or 1 for layout in layouts)
        blank = self.of_rank(PADDED_STEP, widest - 1, widest) if widest > 1 else []
        self._blank = {index for batch in blank for index in batch}

    def of_rank(self, step: int, dp_rank: int, dp_size: int) -> list[list[int]]:
        """The windows of each micro-batch of one dense replica, as the trainer would deal them out."""
        return step_indices(step, self.global_batch, dp_rank, dp_size, self.micro_batch)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The windows of some indices."""
        rows = [self._window(index) for index in indices]
        values: dict[str, Any] = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return Batch(**values)

    def num_real(self, index: int) -> int:
        """How many tokens of a window are not padding; they come first."""
        within = index % self.global_batch
        if index in self._blank or within == 2:
            return 0
        return self.length - (3 * within % 7 if within % 2 else 0)

    def _window(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(name_key(self.seed, "verify/window", index) % 2**31)
        length, real, within = self.length, self.num_real(index), index % self.global_batch
        # Padding holds tokens like any other: nothing may look at them.
        tokens = torch.randint(self.vocab_size, (length + 1,), generator=generator)
        places = torch.arange(length)
        boundary = 5 if within % 3 == 0 else length
        documents = (places >= boundary).long() + (places >= real).long()
        known = torch.rand(length, generator=generator) > 0.1
        same_document = torch.cat([documents[1:] == documents[:-1], torch.tensor([real == length])])
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "label_valid": known & same_document & (places < real) & torch.tensor(within != 1),
            "token_valid": places < real,
            "positions": torch.where(places >= boundary, places - boundary, places),
            "documents": documents,
        }


def starved_expert(config: ModelConfig) -> int | None:
    """The expert that `skew_` leaves without tokens; None if a token chooses all experts."""
    router = config.moe.router
    return 1 if router.topk < router.num_experts // router.num_groups * router.topk_groups else None


@torch.no_grad()
def skew_(model: nn.Module, config: ModelConfig) -> None:
    """Make the routing uneven and leave one expert empty, in place, alike at every layout.

    All embeddings get a common component, to which each row of a router answers differently, and one row very
    unfavourably. Modules that are neither the package's `Embedding` nor its `Router` are left as they are.
    """
    starved = starved_expert(config)
    # On a pipeline's last stage a tied head has a copy of its own.
    shared = any(isinstance(module, Embedding) for module in model.modules())
    for module in model.modules():
        if isinstance(module, Embedding) or (isinstance(module, Head) and config.tied and not shared):
            module.weight.add_(1.0)
        if isinstance(module, Router) and starved is not None:
            module.weight[starved] = -1.0
