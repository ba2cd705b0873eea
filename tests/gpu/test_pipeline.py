"""A pipeline over NCCL makes the steps of one rank on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isozyme.core.config import RunConfig
from isozyme.core.topology import Layout
from isozyme.parallel.process_groups import World
from tests.distributed.spawn import spawn
from tests.models.pipeline_case import Seen, assert_equals_one_rank, one_rank, run_config, train


def _program(world: World, config: RunConfig) -> Seen:
    return train(config, world, device=torch.device("cuda", world.rank))


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "pipeline",
    [{}, {"schedule": "gpipe"}, {"schedule": "interleaved", "chunks": 2}],
    ids=["1f1b", "gpipe", "interleaved"],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_two_stages_on_gpus_make_the_steps_of_one_rank(pipeline: dict[str, Any], tied: bool) -> None:
    config = run_config(tied=tied, layout=Layout(pp=2, dp=1), **pipeline)
    assert_equals_one_rank(spawn(_program, 2, config, device="cuda", timeout=110), one_rank(tied))


@pytest.mark.gpu(4)
def test_stages_whose_experts_exchange_tokens_make_the_steps_of_one_rank() -> None:
    config = run_config(layout=Layout(pp=2, dp=2, ep=2), schedule="interleaved", chunks=2)
    assert_equals_one_rank(spawn(_program, 4, config, device="cuda", timeout=110), one_rank(tied=False))
