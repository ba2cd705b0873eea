"""A slice of a tensor's initial value is that slice of the whole, and values are normal and distinct."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isozyme.core.initialisation import Init, initial_shard, name_key


def full(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    starts = [draw(st.integers(0, size)) for size in shape]
    box = tuple(slice(a, draw(st.integers(a, size))) for a, size in zip(starts, shape, strict=True))
    return shape, box, draw(st.integers(0, len(shape) - 1))


@given(boxes())
def test_a_slice_equals_that_of_the_whole(case):
    shape, box, init_dim = case
    draw = {"name": "w", "global_shape": shape, "init": Init.normal(0.3), "seed": 5, "init_dim": init_dim}
    assert torch.equal(initial_shard(slices=box, **draw), initial_shard(slices=full(shape), **draw)[box])


@given(boxes())
def test_the_result_is_contiguous_float32_of_the_slice_s_shape(case):
    shape, box, init_dim = case
    for init in (Init.normal(1.0), Init.constant(2.0)):
        value = initial_shard(name="w", global_shape=shape, slices=box, init=init, seed=0, init_dim=init_dim)
        assert value.is_contiguous()
        assert value.dtype == torch.float32
        assert value.shape == torch.Size([part.stop - part.start for part in box])


@pytest.mark.parametrize(("name", "seed"), [("w", 1), ("v", 0), ("layers.1.w", 0)])
def test_another_name_or_seed_draws_other_values(name, seed):
    one, other = (
        initial_shard(name=n, global_shape=(4, 4), slices=full((4, 4)), init=Init.normal(1.0), seed=s)
        for n, s in (("w", 0), (name, seed))
    )
    assert not (one == other).any()


def test_rows_are_pairwise_different():
    value = initial_shard(
        name="w", global_shape=(2000, 3), slices=full((2000, 3)), init=Init.normal(1.0), seed=0
    )
    assert len(value.unique(dim=0)) == 2000


def test_values_are_normal_with_the_given_deviation():
    std, count = 0.02, 400 * 500
    value = initial_shard(
        name="w", global_shape=(400, 500), slices=full((400, 500)), init=Init.normal(std), seed=0
    ).double()
    assert abs(float(value.mean())) < 5 * std / math.sqrt(count)
    assert float(value.std()) == pytest.approx(std, rel=5 / math.sqrt(2 * count))
    inside = float((value.abs() < std).double().mean())
    assert inside == pytest.approx(0.6827, abs=0.006)
    # Rows and columns are not correlated.
    assert abs(float((value[:-1] * value[1:]).mean())) < 5 * std**2 / math.sqrt(count)


def test_constants_are_constant():
    value = initial_shard(name="w", global_shape=(3, 2), slices=full((3, 2)), init=Init.constant(1.5), seed=0)
    assert value.tolist() == [[1.5, 1.5]] * 3


def test_the_caller_s_random_state_is_neither_read_nor_changed():
    draw = {"name": "w", "global_shape": (3,), "slices": full((3,)), "init": Init.normal(1.0), "seed": 0}
    torch.manual_seed(1)
    first, state = initial_shard(**draw), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(first, initial_shard(**draw))
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())


@given(st.integers(0, 2**40), st.text(), st.integers(0, 10**7))
def test_keys_have_128_bits_and_separate_name_from_index(seed, name, index):
    assert 0 <= name_key(seed, name, index) < 2**128
    assert name_key(seed, f"{name}1", index) != name_key(seed, name, int(f"1{index}"))


def test_threads_change_nothing() -> None:
    draw = {"name": "w", "global_shape": (2, 3000, 700), "init": Init.normal(1.0), "seed": 3, "init_dim": 1}
    whole = (slice(0, 2), slice(0, 3000), slice(0, 700))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = initial_shard(slices=whole, **draw)
        torch.set_num_threads(4)
        together = initial_shard(slices=whole, **draw)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, together)
