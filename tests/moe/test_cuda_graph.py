"""What cannot be captured in a CUDA graph is refused with every reason; capturing is tested on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isozyme.core.config import MoEConfig, RouterConfig
from isozyme.core.errors import UsageError
from isozyme.core.topology import Layout, Topology
from isozyme.moe.cuda_graph import graph_problems, graphed
from isozyme.moe.layer import MoELayer
from isozyme.parallel.communicator import Communicator
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.simulated import simulate


def problems(layout: Layout, *, buffer: bool = False, **changes: Any) -> list[str]:
    """Those of rank 0's layer."""

    def program(world: Communicator) -> list[str]:
        groups = ProcessGroups(Topology(layout), world)
        config = MoEConfig(router=RouterConfig(num_experts=4, topk=2), ffn=16, **changes)
        layer = MoELayer(config, name="m", hidden=8, groups=groups, seed=0)
        if buffer:
            GradientBuffer(layer.parameters(), groups)
        return graph_problems(layer)

    return next(iter(simulate(Topology(layout).world_size, program, schedule_seed=0)))


def test_every_reason_is_listed() -> None:
    found = problems(Layout(tp=2, dp=1, ep=2), capacity_factor=1.0, pad_to_capacity=True, buffer=True)
    for part in ("not on cpu", "ep=2", "tp=2 x cp=1", "experts=grouped_mm.", "pad_to_capacity", "buffer"):
        assert sum(part in each for each in found) == 1, part


def test_one_rank_with_the_fused_backend_lacks_nothing_but_the_device() -> None:
    (only,) = problems(Layout(), experts="grouped_mm_fused")
    assert "not on cpu" in only


def test_capturing_what_cannot_be_captured_raises() -> None:
    def program(world: Communicator) -> None:
        config = MoEConfig(router=RouterConfig(num_experts=4, topk=2), ffn=16, experts="loop")
        layer = MoELayer(config, name="m", hidden=8, groups=ProcessGroups(Topology(Layout()), world), seed=0)
        with pytest.raises(UsageError, match="experts=loop"):
            graphed(layer, torch.zeros(1, 2, 8), torch.ones(1, 2, dtype=torch.bool))

    simulate(1, program, schedule_seed=0)
