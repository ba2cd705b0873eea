"""A seeded permutation of 0..size-1 that is computed index by index, in constant memory.

A Feistel network permutes the smallest even number of bits that holds the size (M. Luby and C. Rackoff, "How
to construct pseudorandom permutations", 1988), and cycle walking restricts it to the range (J. Black and
P. Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

from __future__ import annotations

from typing import Final

from isozyme.core.initialisation import name_key

_ROUNDS: Final = 8
"""Four suffice for large domains; an epoch may have a handful of windows, where more mix better."""


def permuted(index: int, size: int, seed: int, name: str) -> int:
    """Where `index` goes under the permutation of range(size) that (seed, name) chooses.

    >>> [permuted(i, 6, seed=0, name="epoch 0") for i in range(6)]
    [3, 0, 2, 5, 4, 1]
    """
    assert 0 <= index < size, f"index {index} is not in range({size})"
    half = max((size - 1).bit_length() + 1, 2) // 2
    value = _feistel(index, half, seed, name)
    while value >= size:
        value = _feistel(value, half, seed, name)
    return value


def _feistel(value: int, half: int, seed: int, name: str) -> int:
    """One pass of the network over 2 * half bits."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for round_ in range(_ROUNDS):
        left, right = right, left ^ (name_key(seed, f"{name}/{round_}", right) & mask)
    return left << half | right
