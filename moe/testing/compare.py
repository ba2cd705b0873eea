"""Comparing what was found with what was expected, and saying what it might be instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest error, relative to the largest expected value."""


def short(values: Tensor) -> str:
    """The first four values."""
    return "[" + ", ".join(f"{value:.4g}" for value in values.flatten().tolist()[:4]) + "]"


def first_wrong(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> int | None:
    """The first row that differs by more than the rounding of `dtype`; NaN always does."""
    if found.numel() == 0:
        return None
    bound = TOLERANCE[dtype] * max(float(wanted.abs().max()), 1.0)
    wrong = ~((found.double() - wanted).abs() <= bound).flatten(1).all(dim=1)
    return int(wrong.nonzero()[0]) if wrong.any() else None


def difference(
    what: str, rank: int, found: Tensor | None, expected: Sequence[Tensor], dtype: torch.dtype
) -> str | None:
    """How the gradients of one rank differ from those expected, in words; None if they do not."""
    wanted = expected[rank]
    if found is None:
        return f"rank {rank} got no gradient at all" if bool((wanted != 0).any()) else None
    place = first_wrong(found, wanted, dtype)
    if place is None:
        return None
    got, right = found[place].double(), wanted[place]
    hint = _ratio(got, right) or _owner(got, expected, (rank, place), what, dtype)
    return f"{what} {place} of rank {rank} got {short(got)}, not {short(right)}{hint}"


def _ratio(got: Tensor, right: Tensor) -> str:
    """Says so if one is a multiple of the other."""
    safe = right.abs() > 1e-6
    if not safe.any():
        return ""
    ratio = float((got[safe] / right[safe]).flatten()[0])
    same = torch.allclose(got, right * ratio, rtol=1e-3, atol=1e-3)
    return f": {ratio:.4g} times as much" if same and abs(ratio) > 1e-3 else ""


def _owner(
    got: Tensor, expected: Sequence[Tensor], here: tuple[int, int], what: str, dtype: torch.dtype
) -> str:
    """Says so if this is what belongs to another place."""
    for rank, values in enumerate(expected):
        for place, value in enumerate(values):
            right = (rank, place) != here and bool((value != 0).any())
            if right and value.shape == got.shape and first_wrong(got[None], value[None], dtype) is None:
                return f": that belongs to {what} {place} of rank {rank}"
    return ""


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, NaN to NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
