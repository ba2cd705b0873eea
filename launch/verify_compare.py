"""Holding the shards of a layout to the whole tensors of the reference.

Per tensor `err = ‖a − b‖ / max(‖b‖, floor)`: relative, but not for a tensor that is almost nothing. The floor
is 1e-6 of the global norm for a gradient and `lr · √numel` for a weight, the length of one step of Adam.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["gradient", "weight"]
LOSSES = ("loss", "balance loss", "z-loss")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one rank holds of one global tensor at one moment."""

    kind: Kind
    step: int
    name: str
    grid: Literal["dense", "expert"]
    slices: tuple[slice, ...]
    global_shape: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True, kw_only=True)
class RankValues:
    """All that one rank has to show. The scalars are the same on all ranks, or should be."""

    where: str
    """The rank and its coordinates, in words."""
    rank: int
    losses: Sequence[tuple[float, ...]]
    """The `LOSSES` of each step."""
    norms: Sequence[float]
    """The gradient norm of each step."""
    pieces: Sequence[Piece]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one rank's part of one tensor is from the reference."""

    kind: Kind
    step: int
    name: str
    grid: Literal["dense", "expert"]
    where: str
    rank: int
    error: float
    ratio: float
    """The factor c that brings c · reference nearest to what was found."""
    proportional: bool
    """Whether the difference is this factor and nothing else."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All differences of one layout from the reference."""

    losses: Sequence[tuple[float, ...]]
    """Of each of the `LOSSES` of each step, over all ranks."""
    norms: Sequence[float]
    differences: Sequence[Difference]
    """Of every piece of every rank, the worst first."""
    missing: Sequence[str]
    """What is not there at all, in words."""
    drifted: Mapping[str, Sequence[int]]
    """Weights of which some rank's copy is not the first rank's copy, and the ranks."""

    @property
    def loss(self) -> float:
        """The largest difference of a loss."""
        return max((error for step in self.losses for error in step), default=0.0)

    @property
    def norm(self) -> float:
        """The largest difference of a norm."""
        return max(self.norms, default=0.0)

    def worst(self, kind: Kind) -> Difference | None:
        """The largest difference of one kind."""
        return next((each for each in self.differences if each.kind == kind), None)

    def beyond(self, tolerance: float) -> list[Difference]:
        """The differences past a tolerance, the worst first; one that is not a number is."""
        return [each for each in self.differences if not each.error <= tolerance]

    def first_step(self, tolerance: float) -> int | None:
        """The first step at which anything is past the tolerance; what comes later may follow from it."""
        steps = [each.step for each in self.beyond(tolerance)]
        steps += [step for step, errors in enumerate(self.losses) if not max(errors) <= tolerance]
        steps += [step for step, error in enumerate(self.norms) if not error <= tolerance]
        return min(steps, default=None)


def compare(ranks: Sequence[RankValues], reference: RankValues, lr: float) -> Comparison:
    """Compare every replica on every rank with the corresponding slice of the reference.

    Args:
        ranks: all ranks of a layout.
        reference: one rank that holds whole tensors.
        lr: the learning rate, which sets the floor for weights.
    """
    whole = {(piece.kind, piece.step, piece.name): piece for piece in reference.pieces}
    missing: list[str] = []
    differences: list[Difference] = []
    for values in ranks:
        for piece in values.pieces:
            key = (piece.kind, piece.step, piece.name)
            if key not in whole:
                missing.append(f"{piece.kind} of {piece.name} on {values.where} is not in the reference")
            elif piece.tensor.shape != whole[key].tensor[piece.slices].shape:
                missing.append(
                    f"{piece.kind} of {piece.name} on {values.where} has shape {tuple(piece.tensor.shape)}, "
                    f"but its slice of the reference has {tuple(whole[key].tensor[piece.slices].shape)}"
                )
            else:
                differences.append(_difference(piece, whole[key], values, reference.norms[piece.step], lr))
    missing += _holes(whole, (piece for values in ranks for piece in values.pieces))
    return Comparison(
        losses=[
            tuple(
                max(_scalar(values.losses[step][part], expected) for values in ranks)
                for part, expected in enumerate(of_step)
            )
            for step, of_step in enumerate(reference.losses)
        ],
        norms=[
            max(_scalar(values.norms[step], expected) for values in ranks)
            for step, expected in enumerate(reference.norms)
        ],
        differences=sorted(
            differences, key=lambda d: math.inf if math.isnan(d.error) else d.error, reverse=True
        ),
        missing=missing,
        drifted=_drifted(ranks),
    )


def _difference(piece: Piece, reference: Piece, values: RankValues, norm: float, lr: float) -> Difference:
    whole = reference.tensor.double()
    here, there = piece.tensor.double(), whole[piece.slices]
    floor = 1e-6 * norm if piece.kind == "gradient" else lr * math.sqrt(whole.numel())
    error = _relative(float((here - there).norm()), max(float(whole.norm()), floor))
    own, given = float(here.norm()), float(there.norm())
    ratio = float((here * there).sum()) / given**2 if given else math.nan
    rest = float((here - ratio * there).norm()) if given else math.inf
    return Difference(
        kind=piece.kind,
        step=piece.step,
        name=piece.name,
        grid=piece.grid,
        where=values.where,
        rank=values.rank,
        error=error,
        ratio=ratio,
        proportional=rest <= 1e-4 * min(error, 1.0) * max(given, own) and error > 0,
    )


def _relative(difference: float, size: float) -> float:
    """difference / size; zero if there is no difference, infinite if it is not a number."""
    if math.isnan(difference):
        return math.inf
    return difference / size if difference else 0.0


def _scalar(found: float, expected: float) -> float:
    """The relative difference of two numbers; a NaN equals a NaN (the loss of a step without labels)."""
    if math.isnan(found) and math.isnan(expected):
        return 0.0
    return _relative(abs(found - expected), max(abs(expected), 1e-300))


def _drifted(ranks: Sequence[RankValues]) -> dict[str, list[int]]:
    """Weights whose replicas differ from the lowest rank's by more than the last bits."""
    first: dict[tuple[str, tuple[tuple[int, int], ...]], Tensor] = {}
    found: dict[str, list[int]] = {}
    for values in ranks:
        for piece in values.pieces:
            if piece.kind != "weight":
                continue
            place = tuple((part.start, part.stop) for part in piece.slices)
            other = first.setdefault((piece.name, place), piece.tensor)
            eps = 8 * torch.finfo(piece.tensor.dtype).eps
            same = other.shape == piece.tensor.shape and torch.allclose(other, piece.tensor, eps, eps)
            if not same:
                found.setdefault(piece.name, []).append(values.rank)
    return found


def _holes(whole: Mapping[tuple[Kind, int, str], Piece], pieces: Iterable[Piece]) -> list[str]:
    """The tensors of which some part is on no rank."""
    covered = {key: torch.zeros(piece.tensor.shape, dtype=torch.bool) for key, piece in whole.items()}
    for piece in pieces:
        mask = covered.get((piece.kind, piece.step, piece.name))
        if mask is not None:
            mask[piece.slices] = True
    return [
        f"{kind} of {name}, step {step}: {int((~mask).sum())} of {mask.numel()} elements are on no rank"
        for (kind, step, name), mask in covered.items()
        if not mask.all()
    ]
