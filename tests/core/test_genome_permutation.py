"""The permutation is one, at every size, and different keys give orders that look independent."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isozyme.core.genome.permutation import permuted


@given(size=st.integers(1, 300), seed=st.integers(0, 2**63), name=st.text(max_size=5))
def test_every_index_is_hit_once(size: int, seed: int, name: str) -> None:
    assert sorted(permuted(i, size, seed, name) for i in range(size)) == list(range(size))


def test_a_large_range_costs_nothing_to_hold() -> None:
    size = 10**12 + 39
    images = {permuted(i, size, 0, "x") for i in range(1000)}
    assert len(images) == 1000
    assert max(images) < size


@pytest.mark.parametrize("size", [5, 16])
def test_each_place_is_equally_likely_over_the_keys(size: int) -> None:
    draws = 2000
    for index in (0, size - 1):
        counts = Counter(permuted(index, size, seed, "order") for seed in range(draws))
        expected = draws / size
        chi_square = sum((counts[place] - expected) ** 2 / expected for place in range(size))
        assert chi_square < size - 1 + 5 * (2 * (size - 1)) ** 0.5


def test_neighbours_do_not_stay_together() -> None:
    order = [permuted(i, 1000, 1, "order") for i in range(1000)]
    assert sum(abs(b - a) == 1 for a, b in pairwise(order)) < 12
