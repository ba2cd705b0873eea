"""What ranks send is what docstrings say, for the axes of replicas and of experts.

The same for TP is in tests/parallel/test_tensor.py and tests/models/test_tensor_parallel.py, for CP in
tests/parallel/test_context.py, and for PP in tests/models/test_pipeline_parallel.py.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from isozyme.core.config import MoEConfig, OptimConfig, RouterConfig
from isozyme.core.topology import Layout, Topology
from isozyme.launch.training_state import training_state
from isozyme.models.decoder import build_model
from isozyme.models.stage import Stage
from isozyme.moe.layer import MoELayer
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.simulated import SimulatedWorld, simulate
from isozyme.parallel.trace import Trace
from tests.models.common import CPU, tiny

FP64 = 8
HIDDEN, EXPERTS, TOPK = 8, 4, 2


def _floating_bytes(trace: Trace, rank: int, group: str) -> int:
    """Bytes of rows and weights, without those of counts."""
    return sum(
        record.bytes_sent
        for record in trace[rank]
        if record.group == group and record.dtype is not None and record.dtype.is_floating_point
    )


def _reduced(layout: Layout, *, sharded: bool) -> tuple[list[dict[str, int]], Trace]:
    """One reduction and one update of a small decoder; the bytes that each group sums."""

    def rank(world: SimulatedWorld) -> dict[str, int]:
        groups = ProcessGroups(Topology(layout), world)
        stage = Stage.build(build_model, tiny(), groups, CPU, torch.float64)
        buffer, optimizer = training_state(stage, groups, OptimConfig(sharded=sharded))
        buffer.zero()
        buffer.reduce()
        optimizer.step(0.1)
        found: Counter[str] = Counter()
        for bucket in buffer.buckets:
            found.update({each.name: bucket.data.nbytes for each in bucket.group.communicators})
        return found

    return simulate(Topology(layout).world_size, rank, trace=True)


@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(dp=4, ep=2)], ids=str)
@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_cost_two_passes_over_their_replicas_and_so_do_sharded_ones(
    layout: Layout, sharded: bool
) -> None:
    """An all-reduce is 2 n (R-1)/R; a reduce-scatter is half of it, the gather of the weights the rest."""
    found, trace = _reduced(layout, sharded=sharded)
    for rank, sizes in enumerate(found):
        for name, n in sizes.items():
            replicas = 2 if name == "edp" and layout.ep == 2 else 4
            assert _floating_bytes(trace, rank, name) == 2 * n * (replicas - 1) // replicas
            kinds = {r.kind for r in trace[rank] if r.group == name and r.shape is not None}
            assert kinds == ({"reduce_scatter", "all_gather"} if sharded else {"all_reduce"})
    assert set(found[0]) == {"cp+dp", "tp+cp+dp", "edp"}  # weights of one TP rank, of all of them, experts


def _layer(layout: Layout, dispatcher: str) -> tuple[list[tuple[int, int, list[int]]], Trace]:
    """Forward and backward of an expert layer; each rank's place on EP, its tokens and chosen experts."""

    def rank(world: SimulatedWorld) -> tuple[int, int, list[int]]:
        groups = ProcessGroups(Topology(layout), world)
        router = RouterConfig(num_experts=EXPERTS, topk=TOPK, aux_loss=0.0)
        config = MoEConfig(router=router, ffn=8, dispatcher=dispatcher, experts="loop")  # type: ignore[arg-type]
        layer = MoELayer(config, name="moe", hidden=HIDDEN, groups=groups, seed=0, dtype=torch.float64)
        torch.manual_seed(world.rank)
        tokens = torch.randn(1, 5 + world.rank, HIDDEN, dtype=torch.float64, requires_grad=True)
        output = layer(tokens, torch.ones(tokens.shape[:2], dtype=torch.bool))
        output.tokens.square().sum().backward()
        chosen: Tensor = output.routing.topk_ids
        return groups.coordinates["ep"], tokens.shape[1], chosen.flatten().tolist()

    return simulate(Topology(layout).world_size, rank, trace=True)


@pytest.mark.parametrize(
    ("layout", "group"),
    [
        (Layout(dp=4, ep=4), "ep"),
        (Layout(dp=4, ep=2), "ep"),
        (Layout(dp=2, etp=2), "etp+ep"),
        (Layout(dp=4, ep=2, etp=2), "etp+ep"),
    ],
    ids=str,
)
def test_an_all_to_all_costs_the_rows_of_other_ranks_there_and_back_forward_and_backward(
    layout: Layout, group: str
) -> None:
    """A slot goes to each ETP rank of its expert but this rank itself, and so do weights and gradients."""
    found, trace = _layer(layout, "alltoall")
    topology = Topology(layout)
    sent = [[0] * len(found) for _ in found]  # rows from a rank to a rank
    for source, (_, _, chosen) in enumerate(found):
        for member in topology.group(source, ("etp", "ep")):
            owner = found[member][0]
            sent[source][member] = sum(expert // (EXPERTS // layout.ep) == owner for expert in chosen)
    for rank in range(len(found)):
        out = sum(sent[rank]) - sent[rank][rank]
        into = sum(row[rank] for row in sent) - sent[rank][rank]
        # Forward: rows and weights out, results of what came in back; backward: the reverse.
        assert out > 0
        assert _floating_bytes(trace, rank, group) == 2 * (out + into) * HIDDEN * FP64 + (out + into) * FP64


def test_gathering_costs_all_tokens_instead() -> None:
    """Forward: tokens and weights to all, their results back as partial sums; backward the reverse."""
    found, trace = _layer(Layout(dp=4, ep=4), "allgather")
    everyone = sum(tokens for _, tokens, _ in found)
    for rank, (_, tokens, _) in enumerate(found):
        gathered, scattered = tokens * (len(found) - 1), everyone - tokens
        elements = 2 * (gathered + scattered) * HIDDEN + (gathered + scattered) * TOPK
        assert _floating_bytes(trace, rank, "ep") == elements * FP64
