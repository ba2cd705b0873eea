"""A step holds the same samples at every data-parallel size and micro-batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isozyme.core.errors import ConfigError
from isozyme.core.genome.schedule import evaluation_indices, step_indices
from isozyme.core.genome.windows import BLANK

sizes = st.integers(1, 6)


@given(step=st.integers(0, 1000), dp=sizes, micro_batch=sizes, accumulation=sizes)
def test_a_step_is_exactly_its_own_samples(step: int, dp: int, micro_batch: int, accumulation: int) -> None:
    global_batch = dp * micro_batch * accumulation
    ranks = [step_indices(step, global_batch, rank, dp, micro_batch) for rank in range(dp)]
    assert all(len(batches) == accumulation for batches in ranks)
    assert all(len(batch) == micro_batch for batches in ranks for batch in batches)
    flat = sorted(index for batches in ranks for batch in batches for index in batch)
    assert flat == list(range(step * global_batch, (step + 1) * global_batch))


def test_a_global_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.global_batch=10, dp=2, .*10 % 8 = 2\. The nearest is 8"):
        step_indices(0, 10, 0, 2, 4)


@given(windows=st.integers(1, 60), dp=sizes, micro_batch=sizes)
def test_an_evaluation_reads_each_window_once_and_keeps_ranks_together(
    windows: int, dp: int, micro_batch: int
) -> None:
    ranks = [evaluation_indices(windows, rank, dp, micro_batch) for rank in range(dp)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len(batch) == micro_batch for batches in ranks for batch in batches)
    flat = [index for batches in ranks for batch in batches for index in batch]
    assert sorted(index for index in flat if index != BLANK) == list(range(windows))
    assert flat.count(BLANK) < dp * micro_batch
