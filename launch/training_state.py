"""What a run trains with beside its model: the gradient buffer and the optimiser of its settings."""

from __future__ import annotations

from torch import nn

from isozyme.core.config import OptimConfig
from isozyme.core.errors import ConfigError
from isozyme.models.stage import Stage
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.optimizer import Optimizer
from isozyme.parallel.overlap import Unit, mark
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.sharded_optimizer import make_optimizer


def training_state(
    model: nn.Module, groups: ProcessGroups, config: OptimConfig
) -> tuple[GradientBuffer, Optimizer]:
    """The gradient buffer and the optimiser of one rank's model. All ranks call it together.

    With `optim.sharded` or `optim.overlap_reduce` gradients are reduced layer by layer, as far as the model
    says what its layers are.

    Raises:
        ConfigError: if reductions shall start at layers, and the model does not say what its layers are.
        BackendError: if the implementation that was named cannot run here.
    """
    buffer = gradient_buffer(model, groups, config)
    return buffer, make_optimizer(buffer, config)


def gradient_buffer(model: nn.Module, groups: ProcessGroups, config: OptimConfig) -> GradientBuffer:
    """The gradient buffer alone; see `training_state`."""
    units: tuple[Unit, ...] = ()
    if config.sharded or config.overlap_reduce:
        units = _units(model, must=config.overlap_reduce)
    buffer = GradientBuffer(
        model.parameters(), groups, sharded=config.sharded, units=[unit.parameters for unit in units]
    )
    if config.overlap_reduce:
        mark(units, buffer.passed)
    return buffer


def _units(model: nn.Module, *, must: bool) -> tuple[Unit, ...]:
    """The units of all chunks, in the order in which backward leaves them: the last chunk first."""
    chunks = list(model.chunks) if isinstance(model, Stage) else [model]
    found: list[Unit] = []
    for chunk in reversed(chunks):
        units = getattr(chunk, "backward_units", None)
        if units is None and must:
            raise ConfigError(
                "to overlap reductions with backward, a model says what its layers are: "
                f"optim.overlap_reduce=true, and {type(chunk).__name__} has no backward_units. Give it the "
                "property (see isozyme.parallel.overlap.Unit), or set optim.overlap_reduce=false."
            )
        found += units or ()
    return tuple(found)
