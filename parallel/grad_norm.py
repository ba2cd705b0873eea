"""The global gradient norm, the check that it is finite, and clipping: the same numbers on every rank.

Every unique shard of the model counts once, wherever it is kept: a shard with n replicas has weight 1/n on
each. Averages of per-rank norms, or separate norms for dense and expert weights, would depend on the layout.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from isozyme.core.errors import NonFiniteError, UsageError
from isozyme.parallel.grad_buffer import GradientBuffer


def global_norm(buffer: GradientBuffer) -> float:
    """The Euclidean norm of the gradient of the whole model: `sqrt(Σ ‖g‖²)` over all unique shards.

    All ranks of the world call it together, after `buffer.reduce()`, and get the same number. One all-reduce
    of 8 bytes; waits for the device. Where slices were dealt out, each owner adds its own.

    Raises:
        UsageError: before `buffer.reduce()`.
        NonFiniteError: on all ranks alike if the norm is NaN or infinite; it names ranks and tensors.
    """
    return norm_of(buffer, float(buffer.groups.world.all_reduce(squared_norm(buffer))))


def squared_norm(buffer: GradientBuffer) -> Float[Tensor, "1"]:
    """This rank's share of `Σ ‖g‖²`, in fp64, on the device, which is not waited for.

    Per-shard norms are computed in at least fp32, their squares added in fp64.

    Raises:
        UsageError: before `buffer.reduce()`.
    """
    if not buffer.reduced:
        raise UsageError(
            "the gradient norm was asked for before buffer.reduce(): it would be that of a part."
        )
    filled = [(tensor, holders) for tensor, holders in buffer.counted() if tensor.numel()]
    total = torch.zeros(1, dtype=torch.float64, device=filled[0][0].device if filled else "cpu")
    for holders in sorted({holders for _, holders in filled}):  # a few operations for hundreds of tensors
        norms = torch.stack([norm.double() for norm in _norms([t for t, n in filled if n == holders])])
        total += norms.square().sum() / holders
    return total


def norm_of(buffer: GradientBuffer, squared: float) -> float:
    """The norm, from the sum of all ranks' `squared_norm`. All ranks of the world call it together.

    Raises:
        NonFiniteError: on all ranks alike if it is NaN or infinite; it names ranks and tensors.
    """
    value = math.sqrt(squared)
    if not math.isfinite(value):
        raise NonFiniteError(_blame(buffer, value))
    return value


def clip_(buffer: GradientBuffer, norm: float, max_norm: float) -> float:
    """Scale all gradients, in place, so that the global norm is at most `max_norm`.

    Args:
        buffer: the reduced gradients.
        norm: what `global_norm` returned.
        max_norm: the limit; 0 turns clipping off.

    Returns:
        The one coefficient that every gradient on every rank was multiplied by; 1.0 if none was.

    Raises:
        UsageError: if there is something to scale, and gradients of less than fp32 would be rounded.
    """
    coefficient = clip_coefficient(norm, max_norm)
    if coefficient != 1.0:
        narrow = [group.name for group in buffer.flat if group.narrow]
        if narrow:
            raise UsageError(
                f"gradients kept as computed would be rounded: {', '.join(narrow)}, times {coefficient}. "
                "Give the optimiser the coefficient (`Optimizer.step`), or set optim.main_grad=fp32."
            )
        torch._foreach_mul_([tensor for tensor, _ in buffer.counted()], coefficient)
    return coefficient


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients of that norm are multiplied by; 1.0 if the limit is 0 or not reached."""
    return 1.0 if max_norm == 0 or norm <= max_norm else max_norm / norm


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    norms: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:  # one call takes tensors of one type, or is slow
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        wide = torch.promote_types(dtype, torch.float32)
        found = torch._foreach_norm([tensors[place] for place in places], dtype=wide)
        norms.update(zip(places, found, strict=True))
    return [norms[place] for place in range(len(tensors))]


def _blame(buffer: GradientBuffer, value: float) -> str:
    found = buffer.groups.world.all_gather_object(buffer.non_finite())
    lines = [
        f"rank {rank}: {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        for rank, names in enumerate(found)
        if names
    ]
    if not lines:
        lines = ["no single element is: the sum of squares overflowed"]
    return "\n  - ".join(
        [f"the gradient must be finite: norm={value}. No weight was changed. Not finite on", *lines]
    )
