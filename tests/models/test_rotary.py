"""Rotary embeddings: the relative property, lengths, and precision at genomic positions."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from isozyme.models.rotary import rotate, rotation_at

WIDTH = 16


def _turn(x: torch.Tensor, position: int, theta: float = 10_000.0) -> torch.Tensor:
    positions = torch.full((1, 1), position)
    return rotate(x.view(1, 1, 1, -1), rotation_at(positions, x.numel(), theta, x.dtype)).flatten()


@given(
    start=st.integers(0, 10_000_000),
    distance=st.integers(0, 100_000),
    shift=st.integers(0, 10_000_000),
    seed=st.integers(0, 2**32),
)
def test_scores_depend_on_the_distance_alone(start: int, distance: int, shift: int, seed: int) -> None:
    q, k = torch.randn(2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    here = _turn(q, start + distance) @ _turn(k, start)
    there = _turn(q, start + shift + distance) @ _turn(k, start + shift)
    assert math.isclose(here, there, rel_tol=0, abs_tol=1e-6)


def test_scores_do_depend_on_the_distance() -> None:
    q, k = torch.randn(2, WIDTH, dtype=torch.float64)
    assert abs(_turn(q, 5) @ _turn(k, 0) - _turn(q, 6) @ _turn(k, 0)) > 1e-3


def test_rotation_equals_complex_multiplication_of_paired_halves() -> None:
    x = torch.randn(WIDTH, dtype=torch.float64)
    angle = 7 * 500.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    turned = torch.complex(x[: WIDTH // 2], x[WIDTH // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(_turn(x, 7, theta=500.0), torch.cat((turned.real, turned.imag)))


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(WIDTH, dtype=torch.bfloat16)
    assert torch.equal(_turn(x, 0), x)


def test_each_token_turns_by_its_own_position() -> None:
    x = torch.randn(2, 3, 4, WIDTH, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2], [9, 0, 1]])
    turned = rotate(x, rotation_at(positions, WIDTH, 10_000.0, x.dtype))
    for window in range(2):
        for place in range(3):
            for head in range(4):
                alone = _turn(x[window, place, head], int(positions[window, place]))
                torch.testing.assert_close(turned[window, place, head], alone)


def test_fp32_angles_are_right_at_genomic_positions() -> None:
    positions = torch.tensor([[248_956_421]])  # the length of human chromosome 1
    cos = rotation_at(positions, WIDTH, 10_000.0, torch.bfloat16).cos
    assert cos.dtype == torch.float32
    assert abs(cos[0, 0, 0].item() - math.cos(248_956_421)) < 1e-6
