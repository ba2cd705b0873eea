"""Which windows each rank reads at each step, so that a step holds the same windows at every layout.

Only data-parallel coordinates matter here: all ranks of one model replica read the same windows.
"""

from __future__ import annotations

from isozyme.core.errors import ConfigError
from isozyme.core.genome.windows import BLANK


def step_indices(
    step: int, global_batch: int, dp_rank: int, dp_size: int, micro_batch: int
) -> list[list[int]]:
    """One data-parallel rank's micro-batches of global sample indices at a step.

    Over all ranks and micro-batches, a step holds exactly the global_batch samples from step * global_batch
    on. Nothing else is remembered: to resume at a step, at whatever layout, is to call this with that step.

    Raises:
        ConfigError: `global_batch` is not a multiple of dp_size * micro_batch.

    >>> step_indices(1, global_batch=8, dp_rank=1, dp_size=2, micro_batch=2)
    [[10, 11], [14, 15]]
    """
    unit = dp_size * micro_batch
    if global_batch % unit:
        raise ConfigError(
            f"global_batch must be a multiple of dp * micro_batch: train.global_batch={global_batch}, "
            f"dp={dp_size}, train.micro_batch={micro_batch}; {global_batch} % {unit} = "
            f"{global_batch % unit}. The nearest is {max(unit, global_batch // unit * unit)}."
        )
    starts = range(step * global_batch + dp_rank * micro_batch, (step + 1) * global_batch, unit)
    return [list(range(start, start + micro_batch)) for start in starts]


def evaluation_indices(num_windows: int, dp_rank: int, dp_size: int, micro_batch: int) -> list[list[int]]:
    """One data-parallel rank's micro-batches of the held-out windows 0 … num_windows - 1.

    Each window is read by one rank once. Every rank has the same number of micro-batches, all of the full
    size, so that ranks stay together in their collectives; `BLANK` windows fill the gaps.

    >>> evaluation_indices(3, dp_rank=1, dp_size=2, micro_batch=2)
    [[2, -1]]
    """
    unit = dp_size * micro_batch
    starts = range(dp_rank * micro_batch, -(-num_windows // unit) * unit, unit)
    return [[i if i < num_windows else BLANK for i in range(start, start + micro_batch)] for start in starts]
