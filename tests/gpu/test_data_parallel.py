"""Sharded state, overlapped communication and recomputation over NCCL make the steps of simulated ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isozyme.core.config import RunConfig
from isozyme.core.topology import Layout
from isozyme.parallel.simulated import simulate
from tests.distributed.spawn import spawn
from tests.models.pipeline_case import Seen, run_config, train


def _program(world, config: RunConfig) -> Seen:
    return train(config, world, device=torch.device("cuda", world.rank))


def _settings(
    sharded: bool, overlap_reduce: bool, recompute: str, gather: bool
) -> tuple[RunConfig, RunConfig]:
    """The run with these settings, and without them."""
    plain = run_config(layout=Layout(dp=2, ep=2), tied=False)
    optim = replace(plain.optim, sharded=sharded, overlap_reduce=overlap_reduce, overlap_gather=gather)
    return replace(plain, optim=optim, model=replace(plain.model, recompute=recompute)), plain


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("sharded", "overlap_reduce", "recompute", "gather"),
    [
        (True, False, "none", False),
        (False, True, "selective", False),
        (True, True, "full", True),
        (True, False, "none", True),
    ],
)
def test_two_gpus_make_the_steps_of_two_simulated_ranks(sharded, overlap_reduce, recompute, gather):
    config, plain = _settings(sharded, overlap_reduce, recompute, gather)
    found = spawn(_program, 2, config, device="cuda", timeout=110)
    for one, other in zip(found, simulate(2, lambda world: train(plain, world)), strict=True):
        assert [r.loss for r in one.results] == pytest.approx([r.loss for r in other.results], rel=1e-9)
        assert [r.grad_norm for r in one.results] == pytest.approx(
            [r.grad_norm for r in other.results], rel=1e-9
        )
        for name, weight in other.weights.items():
            torch.testing.assert_close(one.weights[name], weight, rtol=1e-7, atol=1e-8, msg=name)
