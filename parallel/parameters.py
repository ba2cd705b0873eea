"""Making parameters and buffers from their `ShardSpec`: shape, initial value and ownership in one call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isozyme.core.initialisation import initial_shard
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import ShardSpec, attach


def local_initial_value(
    spec: ShardSpec,
    groups: ProcessGroups,
    *,
    seed: int | None,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Tensor:
    """This rank's part of the tensor's initial value, the same slice of the same whole at every layout.

    Without a seed nothing is drawn: random values are left to someone who fills the memory. So it is on the
    meta device, where there is nothing to fill.
    """
    kept = dtype if spec.min_dtype is None else torch.promote_types(dtype, spec.min_dtype)
    shape = spec.local_shape(groups.topology)
    if spec.init.kind == "constant":
        return torch.full(shape, spec.init.value, device=device, dtype=torch.float32).to(kept)
    if seed is None or torch.device(device).type == "meta":
        return torch.empty(shape, device=device, dtype=kept)
    value = initial_shard(
        name=spec.name,
        global_shape=spec.global_shape,
        slices=spec.slices(groups.topology, groups.rank),
        init=spec.init,
        seed=seed,
        init_dim=spec.init_dim,
    )
    return value.to(device=device, dtype=kept)


def create_parameter(
    spec: ShardSpec,
    groups: ProcessGroups,
    *,
    seed: int | None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> nn.Parameter:
    """A parameter that holds this rank's shard, initialised by its global name, with its spec attached."""
    parameter = nn.Parameter(local_initial_value(spec, groups, seed=seed, device=device, dtype=dtype))
    attach(parameter, spec)
    return parameter
