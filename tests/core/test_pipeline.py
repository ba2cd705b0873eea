"""How layers are cut into virtual stages, and which settings of a pipeline are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isozyme.core.config import ModelConfig, RunConfig, TrainConfig
from isozyme.core.pipeline import PipelineConfig, even_split
from isozyme.core.topology import Layout
from isozyme.launch.compose import compose


@given(st.integers(1, 100), st.integers(1, 16))
def test_an_even_split_differs_by_one_at_most_and_grows_towards_the_head(layers: int, parts: int) -> None:
    sizes = list(even_split(layers, parts))
    assert len(sizes) == parts
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 20))
def test_virtual_stages_hold_each_layer_once_in_order(stages: int, chunks: int, extra: int) -> None:
    pipeline = PipelineConfig(schedule="interleaved", chunks=chunks)
    num_layers = stages * chunks + extra
    parts = pipeline.layers(num_layers, stages)
    assert len(parts) == (stages * chunks if stages > 1 else 1)
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    assert not pipeline.problems(stages=stages, num_layers=num_layers)


def test_a_custom_split_is_taken_as_it_is() -> None:
    pipeline = PipelineConfig(split=(0, 3, 2, 0))
    assert [list(part) for part in pipeline.layers(5, 4)] == [[], [0, 1, 2], [3, 4], []]
    assert not pipeline.problems(stages=4, num_layers=5)


@pytest.mark.parametrize(
    ("pipeline", "pp", "message"),
    [
        ({"chunks": 0}, 2, "pipeline.chunks must be at least 1: pipeline.chunks=0"),
        ({"chunks": 2}, 2, "pipeline.schedule=1f1b, pipeline.chunks=2. Use pipeline.schedule=interleaved"),
        ({}, 8, "make 8 virtual stages of model.num_layers=6 layers. Lower layout.pp to 6."),
        ({"schedule": "interleaved", "chunks": 4}, 2, "Lower pipeline.chunks to 3."),
        ({"split": (1, 2, 3)}, 2, "has 3, layout.pp=2 * pipeline.chunks=1 = 2. For instance [3, 3]"),
        ({"split": (3, 4)}, 2, "pipeline.split=[3, 4] adds up to 7, model.num_layers=6. For instance [3, 3]"),
        ({"split": (3, 0, 3)}, 3, "the first (embedding) and the last (head) may have none"),
        ({"split": (7, -1)}, 2, "pipeline.split=[7, -1]. For instance [3, 3], or null."),
        ({"schedule": "interleaved"}, 4, "=6, layout.pp=4; 6 % 4 = 2. The nearest is 8."),
    ],
)  # fmt: skip
def test_an_impossible_pipeline_is_refused_with_legal_values(
    pipeline: dict[str, Any], pp: int, message: str
) -> None:
    config = RunConfig(
        layout=Layout(pp=pp),
        pipeline=PipelineConfig(**pipeline),
        model=ModelConfig(num_layers=6),
        train=TrainConfig(global_batch=12, micro_batch=2),
    )
    assert re.search(re.escape(message), "\n".join(config.problems()))


def test_one_rank_takes_any_pipeline_that_makes_sense_elsewhere() -> None:
    pipeline = PipelineConfig(schedule="interleaved", chunks=3, split=(9, 9, 9))
    assert not RunConfig(pipeline=pipeline).problems()


def test_a_split_is_written_as_a_list() -> None:
    overrides = ["layout={pp: 2, dp: 1, ep: 1}", "pipeline.split=[2,0]", "model.num_layers=2"]
    assert compose("L0_sanity", overrides).pipeline.split == (2, 0)
