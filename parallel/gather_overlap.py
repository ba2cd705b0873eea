"""Gathering updated parameters while the next forward pass runs: each layer waits for its own alone.

A sharded optimiser's update leaves every rank with its slices; the others' are gathered. Here the gathers are
only started by the update, in the order of the layers, the same on all ranks. Each is finished right before
the first forward of the layer that needs it, so that it is under way while earlier layers compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from isozyme.parallel.overlap import Unit
from isozyme.parallel.sharded_optimizer import ShardedOptimizer


def gather_ahead(
    optimizer: ShardedOptimizer, units: Sequence[Unit], roots: Iterable[nn.Module]
) -> list[RemovableHandle]:
    """Let `optimizer.step` leave its gathers under way, and finish each when a forward pass needs it.

    Parameters of a unit are finished before the forward of its entry; those of no unit before the forward of
    a root, and of every module that owns one. Other readers (evaluation that calls no forward, checkpoints,
    exports) call `optimizer.finish()` first.

    Args:
        optimizer: of a buffer with these units.
        units: as given to the gradient buffer, in the order in which backward leaves them.
        roots: modules that together hold all parameters of the buffer and are called first, such as the
            chunks of a model.

    Returns:
        Handles of the forward hooks. Who removes them sets `optimizer.gather_ahead = False` too.
    """
    optimizer.gather_ahead = True
    rest = {
        id(segment.parameter)
        for bucket in optimizer.buffer.buckets
        if bucket.unit is None
        for segment in bucket.segments
    }
    roots = list(roots)
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    early = dict.fromkeys(roots)
    for module in modules:
        if any(id(parameter) in rest for parameter in module.parameters(recurse=False)):
            early[module] = None
    handles = [module.register_forward_pre_hook(partial(_finish, optimizer, None)) for module in early]
    return handles + [
        unit.entry.register_forward_pre_hook(partial(_finish, optimizer, number))
        for number, unit in enumerate(units)
    ]


def _finish(optimizer: ShardedOptimizer, unit: int | None, module: nn.Module, arguments: Any) -> None:
    del module, arguments
    optimizer.about_to_use(unit)
