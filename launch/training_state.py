"""What a run trains with beside its model: the gradient buffer and the optimiser of its settings."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from isozyme.core.config import OptimConfig
from isozyme.core.errors import ConfigError, UsageError
from isozyme.models.stage import Stage
from isozyme.parallel.gather_overlap import gather_ahead
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.optimizer import Optimizer
from isozyme.parallel.overlap import Unit, mark
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.sharded_optimizer import ShardedOptimizer, make_optimizer


def training_state(
    model: nn.Module, groups: ProcessGroups, config: OptimConfig
) -> tuple[GradientBuffer, Optimizer]:
    """The gradient buffer and the optimiser of one rank's model. All ranks call it together.

    With `optim.sharded`, `optim.overlap_reduce` or `optim.overlap_gather` gradients are reduced, and
    parameters gathered, layer by layer, as far as the model says what its layers are.

    Raises:
        ConfigError: if communication shall be overlapped, and the model does not say what its layers are.
        BackendError: if the implementation that was named cannot run here.
    """
    buffer = gradient_buffer(model, groups, config)
    return buffer, optimizer_of(model, buffer, config)


def gradient_buffer(model: nn.Module, groups: ProcessGroups, config: OptimConfig) -> GradientBuffer:
    """The gradient buffer alone; see `training_state`. All ranks call it together.

    Raises:
        ConfigError: if communication shall be overlapped, and the model does not say what its layers are.
    """
    units: tuple[Unit, ...] = ()
    overlapped = [name for name in ("overlap_reduce", "overlap_gather") if getattr(config, name)]
    if config.sharded or overlapped:
        units = _units(model, overlapped)
    buffer = GradientBuffer(
        model.parameters(),
        groups,
        sharded=config.sharded,
        units=[unit.parameters for unit in units],
        as_computed=config.main_grad == "as_computed",
    )
    if config.overlap_reduce:
        mark(units, buffer.passed)
    return buffer


def gradient_choice(buffer: GradientBuffer, config: OptimConfig) -> dict[str, str]:
    """For the table of choices: what `optim.main_grad` has come to on this rank, unless it is the default."""
    if config.main_grad == "fp32":
        return {}
    narrow, rest = (
        sum(
            segment.parameter.numel()
            for group in buffer.flat
            if group.narrow == kind
            for segment in group.segments
        )
        for kind in (True, False)
    )
    return {"gradients": f"as computed: {narrow:,} of {narrow + rest:,} elements; the others at least fp32"}


def optimizer_of(model: nn.Module, buffer: GradientBuffer, config: OptimConfig) -> Optimizer:
    """The optimiser for a buffer that `gradient_buffer` made; see `training_state`.

    Raises:
        ConfigError: if gathers shall be overlapped, and the optimiser is not sharded.
        BackendError: if the implementation that was named cannot run here.
    """
    optimizer = make_optimizer(buffer, config)
    if config.overlap_gather:
        if not isinstance(optimizer, ShardedOptimizer):
            raise ConfigError("; ".join(config.problems()))
        gather_ahead(optimizer, _units(model, ["overlap_gather"]), _chunks(model))
    return optimizer


def refuse_replaced(model: nn.Module, buffer: GradientBuffer) -> None:
    """Refuse parameters that took the place of others since the buffer was made: nobody would update them.

    Raises:
        UsageError: if there are any, with the name of one.
    """
    known = {id(segment.parameter) for segment in buffer.segments}
    strange = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    if strange:
        raise UsageError(
            "a gradient buffer serves the parameters that it was made with: "
            f"{len(strange)} of the model's are others, such as {strange[0]} (load_state_dict(assign=True) "
            "replaces parameters), or were frozen then. Load with assign=False, and replace and unfreeze "
            "before the training state is made."
        )


def _chunks(model: nn.Module) -> list[nn.Module]:
    return list(model.chunks) if isinstance(model, Stage) else [model]


def _units(model: nn.Module, overlapped: Sequence[str]) -> tuple[Unit, ...]:
    """The units of all chunks, in the order in which backward leaves them: the last chunk first.

    Args:
        model: this rank's.
        overlapped: the settings, by name, that need units.
    """
    found: list[Unit] = []
    for chunk in reversed(_chunks(model)):
        units = getattr(chunk, "backward_units", None)
        if units is None and overlapped:
            on, off = (", ".join(f"optim.{name}={to}" for name in overlapped) for to in ("true", "false"))
            raise ConfigError(
                "to overlap communication with computation, a model says what its layers are: "
                f"{on}, and {type(chunk).__name__} has no backward_units. Give it the "
                f"property (see isozyme.parallel.overlap.Unit), or set {off}."
            )
        found += units or ()
    return tuple(found)
