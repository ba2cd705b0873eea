"""Warm-up, cosine decay, floor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isozyme.core.config import OptimConfig
from isozyme.parallel.lr_schedule import learning_rate

CONFIGS = st.builds(
    OptimConfig,
    lr=st.floats(1e-6, 1.0),
    warmup_steps=st.integers(0, 30),
    decay_steps=st.none() | st.integers(1, 60),
    min_lr_ratio=st.floats(0.0, 1.0),
)


@given(CONFIGS, st.integers(1, 60), st.integers(0, 100))
def test_the_rate_is_positive_at_first_and_never_above_the_peak(config, total, step):
    rate = learning_rate(step, config, total)
    assert 0 <= rate <= config.lr * (1 + 1e-12)
    assert learning_rate(0, config, total) > 0 or config.min_lr_ratio == 0


@given(CONFIGS, st.integers(1, 60), st.integers(0, 100))
def test_the_rate_rises_in_the_warm_up_and_never_after_it(config, total, step):
    here, there = learning_rate(step, config, total), learning_rate(step + 1, config, total)
    if step + 1 < config.warmup_steps:
        assert there > here
    elif step >= config.warmup_steps:
        assert there <= here * (1 + 1e-12)


@pytest.mark.parametrize("step", [99, 100, 5000])
def test_the_rate_ends_at_the_floor(step):
    config = OptimConfig(lr=2.0, warmup_steps=10, min_lr_ratio=0.25)
    assert learning_rate(step, config, total_steps=100) == pytest.approx(0.5)


def test_the_peak_is_reached_at_the_last_step_of_the_warm_up():
    config = OptimConfig(lr=2.0, warmup_steps=10)
    assert learning_rate(9, config, total_steps=100) == 2.0
    assert learning_rate(4, config, total_steps=100) == 1.0


def test_halfway_between_peak_and_end_the_rate_is_the_mean_of_peak_and_floor():
    config = OptimConfig(lr=2.0, warmup_steps=1, min_lr_ratio=0.5, decay_steps=101)
    assert learning_rate(50, config, total_steps=7) == pytest.approx(1.5)


def test_without_warm_up_the_first_step_has_the_peak():
    assert learning_rate(0, OptimConfig(lr=2.0, warmup_steps=0), total_steps=10) == 2.0
