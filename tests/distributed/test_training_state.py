"""Gradients, norm, updates, checkpoints and weights over real processes are those of the simulated world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isozyme.core.config import OptimConfig
from isozyme.core.topology import Layout
from isozyme.parallel.checkpoint import load_checkpoint, save_checkpoint
from isozyme.parallel.checkpoint_folder import find_latest
from isozyme.parallel.gather_overlap import gather_ahead
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.grad_norm import clip_, global_norm
from isozyme.parallel.process_groups import World
from isozyme.parallel.shard_spec import OwnedBox, ShardSpec, named_shards
from isozyme.parallel.sharded_optimizer import ShardedOptimizer, make_optimizer
from isozyme.parallel.simulated import simulate
from isozyme.parallel.weights import load_weights, save_weights
from tests.distributed.spawn import spawn
from tests.parallel.sharded_model import backward, build

LAYOUT = Layout(dp=2, ep=2)


def key(name: str, spec: ShardSpec) -> str:
    """A name for each tensor of a rank, several of which may be parts of one."""
    return f"{name} {spec.box}" if isinstance(spec, OwnedBox) else name


def program(world: World, folder: str, sharded: bool) -> dict[str, Any]:
    """Two clipped steps with buckets that overlap, saved, spoilt and loaded again."""
    groups, model = build(world, LAYOUT)
    buffer = GradientBuffer(model.parameters(), groups, bucket_bytes=500, sharded=sharded)
    optimizer = make_optimizer(buffer, OptimConfig(implementation="torch"))
    everything = [*named_shards(model), *optimizer.state()]
    if isinstance(optimizer, ShardedOptimizer):
        gather_ahead(optimizer, [], [model])  # no gradient here depends on what is under way
    norms = []
    for step in range(2):
        buffer.zero()
        backward(model, groups, step)
        for bucket in range(0, len(buffer.buckets), 2):
            buffer.ready(bucket)
        buffer.reduce()
        norms.append(global_norm(buffer))
        clip_(buffer, norms[-1], 1.0)
        optimizer.step(0.01)
    optimizer.finish()
    before = {key(name, spec): tensor.detach().clone() for name, tensor, spec in everything}
    save_checkpoint(folder, 2, everything, groups, state={"step": 2})
    save_weights(Path(folder) / "weights.safetensors", model, groups)
    with torch.no_grad():
        for _, tensor, _ in everything:
            tensor.fill_(-1.0)
    load_weights(Path(folder) / "weights.safetensors", model, groups)
    assert all(torch.equal(before[key(name, spec)], tensor) for name, tensor, spec in named_shards(model))
    found = find_latest(folder, groups.world, skip_damaged=True)
    assert found is not None
    assert load_checkpoint(found.path, everything, groups) == {"step": 2}
    assert all(torch.equal(before[key(name, spec)], tensor) for name, tensor, spec in everything)
    return {"norms": norms, **before}


@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_train_save_and_load_as_two_simulated_ranks_do(tmp_path, sharded):
    real = spawn(program, 2, str(tmp_path / "real"), sharded)
    simulated = simulate(2, lambda world: program(world, str(tmp_path / "simulated"), sharded))
    for one, other in zip(real, simulated, strict=True):
        assert one.pop("norms") == other.pop("norms")
        assert all(torch.equal(one[name], other[name]) for name in other)
    files = [(tmp_path / kind / "weights.safetensors").read_bytes() for kind in ("real", "simulated")]
    assert files[0] == files[1]
