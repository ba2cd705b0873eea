"""A model for benchmarks, with random weights that are drawn on the device.

Training draws on the CPU, so that a weight's initial value depends on its global name alone; for billions of
weights that takes a minute, and speed does not depend on the values. Here the model is built without values,
and each shard is filled on its device.
"""

from __future__ import annotations

import torch
from torch import nn

from isozyme.core.config import RunConfig
from isozyme.core.initialisation import name_key
from isozyme.models.decoder import Decoder, build_model
from isozyme.models.types import Chunk
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import named_shards


def device_filled_model(
    config: RunConfig, groups: ProcessGroups, chunk: Chunk, device: torch.device, dtype: torch.dtype
) -> Decoder:
    """As `isozyme.models.decoder.build_model`, with other initial values of the same distributions.

    All replicas of a shard hold the same values; another layout has others.
    """
    model = build_model(config, groups, chunk, device, dtype, draw=False)
    fill(model, groups, config.seed)
    return model


@torch.no_grad()
def fill(model: nn.Module, groups: ProcessGroups, seed: int) -> None:
    """Draw every shard as its spec says, by a generator of its device that the shard's place seeds."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, tensor, spec in named_shards(model):
        if spec.init.kind == "constant":
            tensor.fill_(spec.init.value)
            continue
        place = [(part.start, part.stop) for part in spec.slices(groups.topology, groups.rank)]
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device)
        generator = generators[tensor.device]
        generator.manual_seed(name_key(seed, f"{name}{place}", 0) % 2**63)
        tensor.normal_(0, spec.init.value, generator=generator)
