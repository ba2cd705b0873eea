"""What a shape costs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from isozyme.core.errors import ConfigError
from isozyme.launch.bench_agreement import reference_outcome
from isozyme.launch.bench_problem import Problem
from isozyme.launch.bench_shapes import SHAPES, shape


def test_the_operations_are_those_that_torch_counts_in_the_reference() -> None:
    size = shape("h=16,f=24,E=4,k=2", tokens=12)
    problem = Problem.draw(size, "random", device=torch.device("cpu"), dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        reference_outcome(problem)
    assert counter.get_total_flops() == size.flops


def test_the_bound_of_saved_bytes_is_that_of_the_row_the_pre_activation_and_the_routing() -> None:
    assert SHAPES["mixtral-8x7b"].saved_bound() == 122_904
    assert SHAPES["qwen3-30b-a3b"].saved_bound() == 28_768
    assert shape("h=10,f=3,E=2,k=1").saved_bound(itemsize=4) == 4 * (10 + 6) + 12


def test_tokens_replace_those_of_a_named_shape() -> None:
    assert shape("genomic-1b", tokens=7).rows == 14


@pytest.mark.parametrize(
    "text", ["mixtrall", "h=64,f=96,E=4", "h=64,f=96,E=4,k=x", "h=64,f=96,E=4,k=5", "h=0,f=96,E=4,k=2", "q=1"]
)
def test_a_shape_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        shape(text)
