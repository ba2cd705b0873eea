"""The decoder on several simulated ranks against the same decoder on one rank."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from isozyme.core.batch import Batch
from isozyme.core.topology import Layout, Topology
from isozyme.models.decoder import build_model
from isozyme.models.types import Chunk
from isozyme.parallel.grad_layout import reduce_communicators
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import named_shards
from isozyme.parallel.simulated import SimulatedWorld, simulate
from tests.models.common import CPU, random_batch, tiny, whole

WINDOWS = 4


def _global_batch() -> Batch:
    """Four unlike windows: two documents in one, padding in another, and one that is all padding."""
    real = torch.arange(16) < torch.tensor([16, 11, 16, 0])[:, None]
    documents = torch.zeros(WINDOWS, 16, dtype=torch.long)
    documents[2, 6:] = 1
    return random_batch(
        WINDOWS,
        label_valid=real & (torch.rand(WINDOWS, 16) < 0.8),
        token_valid=real,
        documents=documents,
        packed=True,
    )


def _part(batch: Batch, windows: slice) -> Batch:
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    tensors = {name: value[windows] for name, value in values.items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(batch, **tensors)


# Annotations of the same calls are checked in tests/models/test_decoder.py and tests/moe.
@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_loss_and_every_gradient_equal_those_of_one_rank(ep: int, etp: int, dispatcher: str) -> None:
    config = tiny()
    config = tiny(moe=dataclasses.replace(config.model.moe, dispatcher=dispatcher))
    batch = _global_batch()
    reference = whole(config)
    expected = reference(batch)
    balance = sum(stats.aux_loss for stats in expected.stats)
    (expected.loss_sum + balance).backward()
    gradients = {name: tensor.grad for name, tensor, _ in named_shards(reference)}

    def rank(world: SimulatedWorld) -> None:
        groups = ProcessGroups(Topology(Layout(dp=4, ep=ep, etp=etp)), world)
        model = build_model(config, groups, Chunk.whole(3), CPU, torch.float64)
        output = model(_part(batch, slice(world.rank, world.rank + 1)))
        (output.loss_sum + sum(stats.aux_loss for stats in output.stats)).backward()
        total = output.loss_sum.detach().clone()
        groups.world.all_reduce(total)
        torch.testing.assert_close(total, expected.loss_sum.detach(), rtol=1e-12, atol=0)
        for name, tensor, spec in named_shards(model):
            found = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for communicator in reduce_communicators(spec, groups):
                communicator.all_reduce(found)
            part = gradients[name][spec.slices(groups.topology, world.rank)]
            torch.testing.assert_close(found, part, rtol=1e-9, atol=1e-10, msg=name)

    simulate(4, rank)
