"""A model for benchmarks, with random weights that are drawn on the device.

Training draws on the CPU, so that a weight's initial value depends on its global name alone; for billions of
weights that takes a minute, and speed does not depend on the values. Here the model is built without values,
and each shard is filled on its device. Routers may be made to choose a given routing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from isozyme.core.config import RunConfig
from isozyme.core.initialisation import name_key
from isozyme.launch.bench_routing import choose_ids
from isozyme.models.decoder import Decoder, build_model
from isozyme.models.types import Chunk
from isozyme.moe.router import Router
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import named_shards

OFFSET = 32.0
"""Added to the logits of the experts that a router shall choose."""


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


def force_routing(
    model: nn.Module, routing: str, config: RunConfig, groups: ProcessGroups, device: torch.device
) -> None:
    """Make every router choose given experts for its tokens, by a constant that is added to its logits.

    Routers that were never trained send some experts much more than others, and a rank waits for the one
    whose experts have more. What else they compute, gradients included, is as before.

    Args:
        model: this rank's.
        routing: a form of `isozyme.launch.bench_routing`.
        config: of the run; one micro-batch's share of this rank are the tokens.
        groups: this rank's groups.
        device: of the model.

    Raises:
        ConfigError: if the form is unknown.
    """
    router = config.model.moe.router
    tokens = config.train.micro_batch * config.data.window // groups.topology.size(("tp", "cp"))
    ids = choose_ids(
        routing, tokens=tokens, num_experts=router.num_experts, topk=router.topk, seed=groups.rank
    )
    offset = torch.zeros(tokens, router.num_experts).scatter_(1, ids, OFFSET).to(device)
    for module in model.modules():
        if isinstance(module, Router):
            module.logits = _Offset(module.logits, offset)  # type: ignore[method-assign]


class _Offset:
    """A router's logits plus a constant."""

    def __init__(self, logits: Callable[[Tensor, Tensor], Tensor], offset: Float[Tensor, "T E"]) -> None:
        self._logits, self._offset = logits, offset

    def __call__(self, tokens: Tensor, token_valid: Tensor) -> Tensor:
        found = self._logits(tokens, token_valid)
        return found + self._offset.to(found.dtype)
