"""Choices and drops are compared token by token, padding aside, and shares of a window are put together."""

from __future__ import annotations

import math

import torch

from isozyme.launch.verify_flips import changed_choices, changed_drops, first_differences
from isozyme.launch.verify_routing import Flip, WindowRouting


def _routing(
    ids: list[list[int]],
    probs: list[list[float]] | None = None,
    kept: list[list[bool]] | None = None,
    first: int = 0,
) -> WindowRouting:
    ones = [[1.0] * len(row) for row in ids]
    return WindowRouting(
        places=torch.arange(first, first + len(ids)),
        topk_ids=torch.tensor(ids),
        topk_probs=torch.tensor(probs if probs is not None else ones, dtype=torch.float64),
        kept=torch.tensor(kept) if kept is not None else torch.ones(len(ids), len(ids[0]), dtype=torch.bool),
        num_experts=4,
    )


def test_the_order_of_a_tokens_experts_does_not_matter() -> None:
    assert changed_choices({(0, 0): _routing([[1, 2]])}, {(0, 0): _routing([[2, 1]])}, lambda _: 1) == []


def test_a_token_with_other_experts_is_a_flip_and_padding_is_none() -> None:
    own = {(7, 1): _routing([[0, 1], [0, 1], [0, 1]])}
    reference = {(7, 1): _routing([[0, 1], [0, 2], [3, 2]])}
    (flip,) = changed_choices(own, reference, lambda _: 2)
    assert (flip.window, flip.position, flip.layer) == (7, 1, 1)


def test_a_share_of_a_window_is_compared_with_its_own_rows() -> None:
    reference = {(0, 0): _routing([[0], [1], [2], [3]])}
    assert changed_choices({(0, 0): _routing([[2], [3]], first=2)}, reference, lambda _: 4) == []
    (flip,) = changed_choices({(0, 0): _routing([[2], [0]], first=2)}, reference, lambda _: 4)
    assert flip.position == 3


def test_drops_of_a_window_are_put_together_from_its_shares() -> None:
    kept = [[True], [False], [False], [True]]
    reference = {(0, 0): _routing([[0], [0], [1], [1]], kept=kept)}
    shares = [
        {(0, 0): _routing([[0], [0]], kept=kept[:2])},
        {(0, 0): _routing([[1], [1]], kept=kept[2:], first=2)},
    ]
    assert changed_drops(shares, reference) == []


def test_the_gap_of_a_drop_is_that_of_the_weights() -> None:
    own = _routing([[0], [0]], probs=[[0.5], [0.0]], kept=[[True], [False]])
    reference = _routing([[0], [0]], probs=[[0.0], [0.75]], kept=[[False], [True]])
    (flip,) = changed_drops([{(0, 0): own}], {(0, 0): reference})
    assert flip.dropped
    assert flip.gap == 0.25


def test_another_number_of_drops_is_excused_by_no_gap() -> None:
    own = _routing([[0], [0]], kept=[[True], [True]])
    reference = _routing([[0], [0]], kept=[[True], [False]])
    (flip,) = changed_drops([{(0, 0): own}], {(0, 0): reference})
    assert math.isinf(flip.gap)


def _flip(window: int, layer: int, *, dropped: bool = False) -> Flip:
    return Flip(window=window, position=-1 if dropped else 3, layer=layer, gap=0.0, dropped=dropped)


def test_what_follows_from_a_flip_is_not_judged() -> None:
    first, drop, elsewhere = _flip(1, 0), _flip(1, 0, dropped=True), _flip(2, 1, dropped=True)
    later_layer, later_step = _flip(1, 1), _flip(9, 0)
    found = first_differences([later_step, later_layer, first], [drop, elsewhere], global_batch=8)
    assert found == [first, elsewhere]


def test_a_drop_counts_where_all_choices_are_the_same() -> None:
    drop = _flip(4, 0, dropped=True)
    assert first_differences([_flip(4, 1)], [drop], global_batch=8) == [drop]
    assert first_differences([], [], global_batch=8) == []
