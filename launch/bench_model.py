"""A model for benchmarks, with random weights that are drawn on the device.

Training draws on the CPU, so that a weight's initial value depends on its global name alone; for billions of
weights that takes a minute, and speed does not depend on the values. Here the model is built without values,
gets memory on the device, and each shard is filled there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isozyme.core.config import RunConfig
from isozyme.core.initialisation import name_key
from isozyme.models.decoder import Decoder, build_model
from isozyme.models.types import Chunk
from isozyme.moe.experts.experts import Experts
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import attach, named_shards, spec_of


def device_filled_model(
    config: RunConfig, groups: ProcessGroups, chunk: Chunk, device: torch.device, dtype: torch.dtype
) -> Decoder:
    """As `isozyme.models.decoder.build_model`, with other initial values of the same distributions.

    All replicas of a shard hold the same values; another layout has others.
    """
    model = build_model(config, groups, chunk, torch.device("meta"), dtype)
    materialise(model, device)
    fill(model, groups, config.seed)
    return model


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give every tensor of a module on the meta device memory on `device`, not initialised.

    Unlike `to_empty`, it keeps what is shared between modules shared, and the specs; expert backends are
    chosen now.
    """
    _materialise(module, device, {})


def _materialise(module: nn.Module, device: torch.device, made: dict[int, Tensor]) -> None:
    if isinstance(module, Experts):  # knows how to keep its stacks together
        module.to_empty(device=device)
        return
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(
                torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
            )
            attach(made[id(parameter)], spec_of(parameter))
        setattr(module, name, made[id(parameter)])
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        new = torch.empty_like(buffer, device=device)
        attach(new, spec_of(buffer))
        setattr(module, name, new)
    for child in module.children():
        _materialise(child, device, made)


@torch.no_grad()
def fill(model: nn.Module, groups: ProcessGroups, seed: int) -> None:
    """Fill every shard as its spec says, by a generator of its device that the shard's place seeds."""
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
