"""A model whose weights are drawn on the device: replicas are equal, shards and layers are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isozyme.core.config import RunConfig
from isozyme.core.topology import Topology
from isozyme.launch.bench_model import device_filled_model, force_routing
from isozyme.launch.bench_steps import our_steps, random_batch, time_steps
from isozyme.launch.compose import compose
from isozyme.models.types import Chunk
from isozyme.parallel import parameters
from isozyme.parallel.communicator import Communicator
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import named_shards
from isozyme.parallel.simulated import simulate

CPU = torch.device("cpu")
SIZES = ("model.hidden=32", "model.num_heads=2", "model.num_kv_heads=2", "model.moe.ffn=48", "data.window=16")


def config(*more: str) -> RunConfig:
    return compose("L0_sanity", [*SIZES, "model.num_layers=2", "layout.dp=1", "layout.ep=1", *more])


def shards_on(layout: str, *more: str) -> list[dict[str, tuple[tuple[slice, ...], Tensor]]]:
    """Of each rank the place and the value of every tensor, by name."""
    run = config(*(f"layout.{part}" for part in layout.split()), *more)
    topology = Topology(run.layout)

    def program(world: Communicator) -> dict[str, tuple[tuple[slice, ...], Tensor]]:
        groups = ProcessGroups(topology, world)
        model = device_filled_model(run, groups, Chunk.whole(2), CPU, torch.float32)
        return {
            name: (spec.slices(topology, groups.rank), tensor.detach().clone())
            for name, tensor, spec in named_shards(model)
        }

    return list(simulate(topology.world_size, program, schedule_seed=0))


def test_replicas_are_equal_and_different_shards_differ() -> None:
    first, second = shards_on("dp=2 ep=2")
    dense = [name for name in first if ".experts." not in name]
    assert dense
    assert all(torch.equal(first[name][1], second[name][1]) for name in dense)
    experts = [each for rank in (first, second) for name, (_, each) in rank.items() if "gate_up" in name]
    assert len({float(each.sum()) for each in experts}) == len(experts)


def test_shards_of_one_weight_differ_and_norms_are_one() -> None:
    first, second = shards_on("tp=2 dp=1 ep=2")
    cut = [name for name in first if first[name][0] != second.get(name, first[name])[0]]
    assert cut
    assert not any(torch.equal(first[name][1], second[name][1]) for name in cut)
    assert float(first["final_norm.weight"][1].min()) == float(first["final_norm.weight"][1].max()) == 1.0


def test_values_follow_the_specs_and_what_is_shared_stays_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> Tensor:
        raise AssertionError("drawn on the CPU")

    monkeypatch.setattr(parameters, "initial_shard", refuse)
    run = config("model.tied=true", "model.moe.router.expert_bias_rate=0.001")
    groups = ProcessGroups(Topology(run.layout), SingleWorld())
    model = device_filled_model(run, groups, Chunk.whole(2), CPU, torch.bfloat16)
    assert model.embedding is not None
    assert model.head is not None
    assert model.head.weight is model.embedding.weight
    found = {name: (tensor, spec) for name, tensor, spec in named_shards(model)}
    for tensor, spec in found.values():
        if spec.init.kind == "normal" and tensor.numel() > 500:
            assert float(tensor.detach().float().std()) == pytest.approx(spec.init.value, rel=0.2)
    biases = [tensor for name, (tensor, _) in found.items() if "expert_bias" in name]
    assert [(bias.dtype, int(bias.count_nonzero())) for bias in biases] == [(torch.float32, 0)] * 2


def test_routers_can_be_made_to_choose_evenly() -> None:
    run = config("train.micro_batch=2")
    groups = ProcessGroups(Topology(run.layout), SingleWorld())
    model = device_filled_model(run, groups, Chunk.whole(2), CPU, torch.float32)
    tokens = torch.randint(256, (2, run.data.window + 1), generator=torch.Generator().manual_seed(0))

    def loads() -> list[list[int]]:
        return [stats.routed.tolist() for stats in model(random_batch(tokens)).stats]

    assert any(len(set(load)) > 1 for load in loads())
    force_routing(model, "balanced", run, groups, CPU)
    moe = run.model.moe.router
    even = 2 * run.data.window * moe.topk // moe.num_experts
    assert loads() == [[even] * moe.num_experts] * 2
    model(random_batch(tokens)).loss_sum.backward()
    assert all(float(p.grad.abs().sum()) > 0 for n, p in model.named_parameters() if "router" in n)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "te", "te_ops"])
def test_on_a_gpu_backends_are_built_for_the_device_and_train(backend: str) -> None:
    device = torch.device("cuda", 0)
    run = config("precision=bf16", "model.hidden=128", "model.moe.ffn=256", f"model.moe.experts={backend}")
    groups = ProcessGroups(Topology(run.layout), SingleWorld())
    steps = our_steps(run, groups, device, torch.bfloat16)
    timed = time_steps(steps, run, device, warm_up=1, repeats=2)
    assert 4.5 < timed.first_loss < 6.5  # ln 256 = 5.5
