"""What the collectives with gradients do with their arguments: sizes that were left out, and the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from isozyme.parallel.communicator import Communicator

Sizes = Sequence[int] | None


def apply(function: type[Function], *args: Any) -> Tensor:
    """`function.apply(*args)`, typed."""
    result: Tensor = function.apply(*args)
    return result


def marked(x: Tensor, differentiable: bool) -> Tensor:
    """`x` such that the function is on the graph on every rank alike, or on none."""
    if not differentiable:
        return x.detach()
    if torch.is_grad_enabled() and x.is_floating_point() and not x.requires_grad:
        return x.detach().requires_grad_()
    return x


def sizes_or_equal(sizes: Sizes, rows: int, comm: Communicator) -> tuple[int, ...]:
    """`sizes`; by default every rank has as many rows as this one."""
    return tuple(sizes) if sizes is not None else (rows,) * comm.size


def shares_of(sizes: Sizes, x: Tensor, comm: Communicator, name: str) -> tuple[int, ...]:
    """`sizes`, which divide the rows of `x` among the ranks; by default equally.

    Raises:
        ValueError: if they do not.
    """
    if sizes is None:
        if x.shape[0] % comm.size:
            raise ValueError(
                f"{name} over {comm.name}: {x.shape[0]} rows are not divisible by {comm.size} ranks. "
                "Give sizes."
            )
        return (x.shape[0] // comm.size,) * comm.size
    if len(sizes) != comm.size or sum(sizes) != x.shape[0]:
        raise ValueError(
            f"{name} over {comm.name}: sizes must give each of the {comm.size} ranks its part of the "
            f"{x.shape[0]} rows: sizes={list(sizes)}."
        )
    return tuple(sizes)


def splits_of(
    x: Tensor, comm: Communicator, output_splits: Sizes, input_splits: Sizes
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(output splits, input splits) of an all-to-all; by default equal shares.

    Raises:
        ValueError: if one of them was left out, or the rows cannot be shared equally.
    """
    if (output_splits is None) != (input_splits is None):
        raise ValueError(
            f"all_to_all over {comm.name}: give both output_splits and input_splits, or neither."
        )
    if output_splits is None or input_splits is None:
        equal = shares_of(None, x, comm, "all_to_all")
        return equal, equal
    return tuple(output_splits), tuple(input_splits)
