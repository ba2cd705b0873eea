"""Errors are relative with a floor; every replica, hole and stranger is seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

from isozyme.launch.verify_compare import Comparison, Kind, Piece, RankValues, compare
from isozyme.launch.verify_hints import hints, symptoms

WHOLE = (slice(0, 4), slice(0, 2))
UPPER, LOWER = (slice(0, 2), slice(0, 2)), (slice(2, 4), slice(0, 2))


def _piece(
    tensor: Tensor,
    slices: tuple[slice, ...] = WHOLE,
    *,
    kind: Kind = "gradient",
    name: str = "w",
    grid: Literal["dense", "expert"] = "dense",
) -> Piece:
    return Piece(kind=kind, step=0, name=name, grid=grid, slices=slices, global_shape=(4, 2), tensor=tensor)


def _values(rank: int, *pieces: Piece, loss: float = 1.0, norm: float = 10.0) -> RankValues:
    return RankValues(where=f"rank {rank}", rank=rank, losses=[(loss, 0.0, 0.0)], norms=[norm], pieces=pieces)


def _compare(ranks: Sequence[RankValues], reference: RankValues) -> Comparison:
    return compare(ranks, reference, lr=0.1)


def test_equal_shards_of_a_tensor_differ_by_nothing() -> None:
    whole = torch.randn(4, 2)
    ranks = [_values(0, _piece(whole[:2], UPPER)), _values(1, _piece(whole[2:], LOWER))]
    found = _compare(ranks, _values(0, _piece(whole)))
    assert [each.error for each in found.differences] == [0.0, 0.0]
    assert found.missing == []
    assert found.first_step(0.0) is None


def test_an_error_is_relative_to_the_whole_tensor() -> None:
    whole = torch.ones(4, 2)
    moved = whole[2:] + torch.tensor([[1e-3, 0.0], [0.0, 0.0]])
    ranks = [_values(0, _piece(whole[:2], UPPER)), _values(1, _piece(moved, LOWER))]
    worst = _compare(ranks, _values(0, _piece(whole))).differences[0]
    assert worst.rank == 1
    assert worst.error == pytest.approx(1e-3 / math.sqrt(8), rel=1e-3)


def test_a_gradient_that_is_almost_nothing_is_held_to_the_global_norm() -> None:
    reference = _values(0, _piece(torch.zeros(4, 2)), norm=10.0)
    found = _compare([_values(0, _piece(torch.full((4, 2), 1e-12)))], reference)
    assert found.differences[0].error == pytest.approx(1e-12 * math.sqrt(8) / 1e-5)


def test_a_weight_is_held_to_the_length_of_a_step() -> None:
    reference = _values(0, _piece(torch.zeros(4, 2), kind="weight"))
    found = _compare([_values(0, _piece(torch.full((4, 2), 1e-6), kind="weight"))], reference)
    assert found.differences[0].error == pytest.approx(1e-6 / 0.1)


def test_a_part_that_is_on_no_rank_is_missed() -> None:
    whole = torch.randn(4, 2)
    found = _compare([_values(0, _piece(whole[:2], UPPER))], _values(0, _piece(whole)))
    assert found.missing == ["gradient of w, step 0: 4 of 8 elements are on no rank"]


def test_a_tensor_that_the_reference_lacks_is_reported() -> None:
    whole = torch.randn(4, 2)
    ranks = [_values(0, _piece(whole), _piece(whole, name="extra"))]
    assert _compare(ranks, _values(0, _piece(whole))).missing == [
        "gradient of extra on rank 0 is not in the reference"
    ]


def test_a_shard_of_another_shape_is_reported() -> None:
    whole = torch.randn(4, 2)
    found = _compare([_values(0, _piece(whole[:1], UPPER))], _values(0, _piece(whole)))
    assert "has shape (1, 2)" in found.missing[0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_a_number_is_past_every_tolerance(value: float) -> None:
    found = _compare([_values(0, _piece(torch.full((4, 2), value)))], _values(0, _piece(torch.ones(4, 2))))
    assert len(found.beyond(1e9)) == 1
    assert symptoms(found, 1e9)


def test_the_worst_rank_counts_for_loss_and_norm() -> None:
    ranks = [_values(0, loss=1.0, norm=10.0), _values(1, loss=1.5, norm=9.0)]
    found = _compare(ranks, _values(0, loss=1.0, norm=10.0))
    assert found.loss == pytest.approx(0.5)
    assert found.norm == pytest.approx(0.1)


def test_a_step_without_labels_agrees_with_itself_alone() -> None:
    none = _values(0, loss=math.nan)
    assert _compare([none], none).loss == 0.0
    assert _compare([none], _values(0)).loss == math.inf


def test_one_replica_that_drifted_is_named_although_the_others_agree() -> None:
    whole = torch.ones(4, 2, dtype=torch.float64)
    ranks = [_values(rank, _piece(whole * (1 + (rank == 2) * 1e-5), kind="weight")) for rank in range(4)]
    found = _compare(ranks, _values(0, _piece(whole, kind="weight")))
    assert found.drifted == {"w": [2]}
    told = hints(found, 1e-9, {"dp": 4}, num_ranks=4)
    assert "only rank 2 of 4 differ" in told
    assert "replicas differ from each other: w on rank 2" in told


@pytest.mark.parametrize(
    ("factor", "words"), [(4.0, "ep (4) times too large"), (0.5, "dp (2) times too small")]
)
def test_a_gradient_off_by_the_size_of_an_axis_is_recognised(factor: float, words: str) -> None:
    whole = torch.randn(4, 2)
    found = _compare([_values(0, _piece(whole * factor))], _values(0, _piece(whole)))
    assert any(words in hint for hint in hints(found, 1e-9, {"ep": 4, "dp": 2}, num_ranks=1))


def test_a_gradient_that_never_arrived_is_recognised() -> None:
    found = _compare([_values(0, _piece(torch.zeros(4, 2)))], _values(0, _piece(torch.ones(4, 2))))
    assert any("the gradient is zero: w" in hint for hint in hints(found, 1e-9, {}, num_ranks=1))


def test_a_difference_that_is_no_factor_is_not_called_one() -> None:
    found = _compare([_values(0, _piece(torch.randn(4, 2)))], _values(0, _piece(torch.randn(4, 2))))
    assert not found.differences[0].proportional
