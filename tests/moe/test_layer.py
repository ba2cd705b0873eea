"""The whole layer: every layout equals one rank, drops and padding, replay, and what it reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from isozyme.core.config import MoEConfig, RouterConfig
from isozyme.core.errors import BackendError, ConfigError
from isozyme.core.topology import Layout, Topology
from isozyme.moe.layer import MoELayer
from isozyme.moe.reference import reference_moe
from isozyme.moe.types import MoEOutput
from isozyme.parallel.collectives import reduce_from_group
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld, World
from isozyme.parallel.shard_spec import named_shards
from isozyme.parallel.simulated import SimulatedWorld, simulate

HIDDEN, FFN, EXPERTS, TOPK = 8, 8, 4, 2
WINDOWS, LENGTH = 4, 8
"""The global batch: windows over DP, and each window over CP x TP."""


def config(**changes: Any) -> MoEConfig:
    options: dict[str, Any] = {
        "router": RouterConfig(num_experts=EXPERTS, topk=TOPK, aux_loss=0.1, z_loss=0.01),
        "ffn": FFN,
        "experts": "loop",
    }
    return MoEConfig(**{**options, **changes})


def build(world: World, layout: Layout, moe: MoEConfig, **changes: Any) -> MoELayer:
    options: dict[str, Any] = {
        "name": "layers.0.moe",
        "hidden": HIDDEN,
        "groups": ProcessGroups(Topology(layout), world),
        "seed": 11,
        "init_std": 0.7,
        "output_std": 0.7,
        "dtype": torch.float64,
    }
    return MoELayer(moe, **{**options, **changes})


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the mask of real ones (a window of padding alone, another half full) and upstream gradients."""
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randn(WINDOWS, LENGTH, HIDDEN, generator=draw, dtype=torch.float64)
    valid = torch.ones(WINDOWS, LENGTH, dtype=torch.bool)
    valid[1], valid[3, 3:] = False, False
    upstream = torch.randn(WINDOWS, LENGTH, HIDDEN, generator=draw, dtype=torch.float64)
    return tokens, valid, upstream * valid[:, :, None]


def share(groups: ProcessGroups, whole: Tensor) -> Tensor:
    """This rank's windows, and of each its contiguous part."""
    at = groups.coordinates
    dp, parts = groups["dp"].size, groups["tp", "cp"].size
    windows = whole.chunk(dp)[at["dp"]]
    return windows.chunk(parts, dim=1)[at["cp"] * groups["tp"].size + at["tp"]].contiguous()


def loss(output: MoEOutput, upstream: Tensor) -> Tensor:
    return (output.tokens * upstream).sum() + output.stats.aux_loss + output.stats.z_loss


def global_run(layout: Layout, moe: MoEConfig) -> tuple[dict[str, Tensor], list[MoEOutput]]:
    """Every gradient of the global model and of the whole batch, summed as the specs say."""
    topology = Topology(layout)

    def program(world: SimulatedWorld) -> tuple[Any, ...]:
        layer = build(world, layout, moe)
        tokens, valid, upstream = (share(layer.groups, whole) for whole in batch())
        tokens.requires_grad_()
        output = layer(tokens, valid)
        loss(output, upstream).backward()
        grads = {}
        for name, parameter, spec in named_shards(layer):
            assert parameter.grad is not None, name
            total = parameter.grad
            for axis in spec.reduce_axes:
                total = reduce_from_group(total, layer.groups[axis], differentiable=False)
            grads[name] = (total, spec.slices(topology, world.rank), spec.global_shape)
        return grads, output, tokens.grad, layer.groups.coordinates

    results, trace = simulate(topology.world_size, program, trace=True)
    assert trace.difference() is None
    whole: dict[str, Tensor] = {}
    for grads, *_ in results:
        for name, (value, slices, shape) in grads.items():
            place = whole.setdefault(name, torch.full(shape, float("nan"), dtype=torch.float64))
            known = place[slices]
            if not known.isnan().any():
                torch.testing.assert_close(known, value, rtol=0, atol=1e-12, msg=f"replicas of {name} differ")
            place[slices] = value
    for name, index in (("tokens.out", 1), ("tokens.grad", 2)):
        place = torch.full((WINDOWS, LENGTH, HIDDEN), float("nan"), dtype=torch.float64)
        for result in results:
            value = result[1].tokens.detach() if index == 1 else result[2]
            at, length = result[3], value.shape[1]
            first = (at["cp"] * topology.size("tp") + at["tp"]) * length
            window = at["dp"] * value.shape[0]
            place[window : window + value.shape[0], first : first + length] = value
        whole[name] = place
    return whole, [result[1] for result in results]


LAYOUTS = [
    Layout(dp=2, ep=2),
    Layout(dp=4, ep=2),
    Layout(dp=4, ep=4),
    Layout(dp=2, etp=2),
    Layout(dp=4, ep=2, etp=2),
    Layout(cp=2, dp=1, ep=2),
    Layout(tp=2, dp=1, ep=2),
    Layout(tp=2, dp=2, ep=4),
    Layout(tp=2, dp=1, ep=1, etp=2),
]
KINDS = {
    "dropless": {},
    "all-gather": {"dispatcher": "allgather"},
    "shared expert": {"shared_ffn": 6},
    "capacity": {"capacity_factor": 0.75},
    "padded capacity": {"capacity_factor": 0.75, "pad_to_capacity": True, "drop_policy": "position"},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_values_and_every_gradient_are_those_of_one_rank(layout: Layout, kind: dict[str, Any]) -> None:
    one, (single,) = global_run(Layout(), config(**kind))
    many, outputs = global_run(layout, config(**kind))
    assert set(one) == set(many)
    for name in one:
        torch.testing.assert_close(
            many[name], one[name], rtol=0, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )
    for count in ("routed", "dropped"):
        total = sum(getattr(output.stats, count) for output in outputs)
        assert torch.equal(total, getattr(single.stats, count))  # type: ignore[arg-type]


def test_the_layer_equals_the_dense_loop_in_values_and_in_the_gradients_of_router_and_experts() -> None:
    layer = build(SingleWorld(), Layout(), config())
    tokens, valid, upstream = batch()
    tokens.requires_grad_()
    output = layer(tokens, valid)
    loss(output, upstream).backward()
    found = {name: p.grad.clone() for name, p, _ in named_shards(layer) if p.grad is not None}
    found["tokens"] = tokens.grad.clone()  # type: ignore[union-attr]
    layer.zero_grad()
    tokens.grad = None
    flat = tokens.flatten(0, 1)
    routing, stats = layer.router(flat, valid.flatten(), WINDOWS)
    weights = layer.experts.weights
    dense = reference_moe(flat, routing, torch.stack(list(weights.gate_up)), torch.stack(list(weights.down)))
    torch.testing.assert_close(output.tokens.flatten(0, 1), dense, rtol=0, atol=1e-12)
    ((dense * upstream.flatten(0, 1)).sum() + stats.aux_loss + stats.z_loss).backward()
    for name, parameter, _ in named_shards(layer):
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-11, msg=name)
    torch.testing.assert_close(found["tokens"], tokens.grad, rtol=0, atol=1e-11)


def test_padded_and_ragged_capacity_give_the_same() -> None:
    ragged, _ = global_run(Layout(dp=2, ep=2), config(capacity_factor=0.75))
    padded, _ = global_run(Layout(dp=2, ep=2), config(capacity_factor=0.75, pad_to_capacity=True))
    for name in ragged:
        torch.testing.assert_close(padded[name], ragged[name], rtol=0, atol=1e-11, msg=name)


def test_padding_gets_zeros_and_touches_nothing_whatever_it_holds() -> None:
    layer = build(SingleWorld(), Layout(), config(shared_ffn=6))
    tokens, valid, upstream = batch()
    clean = layer(tokens, valid)
    poisoned = tokens.masked_fill(~valid[:, :, None], float("nan"))
    output = layer(poisoned, valid)
    assert output.tokens.equal(clean.tokens)
    assert (output.tokens[~valid] == 0).all()
    loss(output, upstream).backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_replayed_routing_gives_the_same_tokens(kind: dict[str, Any]) -> None:
    layer = build(SingleWorld(), Layout(), config(**kind))
    tokens, valid, _ = batch()
    first = layer(tokens, valid)
    again = layer(tokens, valid, first.routing)
    assert again.tokens.equal(first.tokens)
    assert again.routing.kept.equal(first.routing.kept)
    assert again.stats.dropped.equal(first.stats.dropped)


def test_a_foreign_routing_is_obeyed() -> None:
    layer = build(SingleWorld(), Layout(), config())
    tokens, valid, _ = batch()
    first = layer(tokens, valid)
    other = layer(tokens, valid, layer(tokens.flip(0, 1), valid).routing)
    assert not other.tokens.equal(first.tokens)


def test_capacity_limits_what_each_expert_keeps_of_a_window_and_reports_the_rest() -> None:
    layer = build(SingleWorld(), Layout(), config(capacity_factor=0.5))
    tokens, valid, _ = batch()
    output = layer(tokens, valid)
    capacity = 2  # ceil(0.5 * 2 * 8 / 4)
    ids, kept = (x.view(WINDOWS, LENGTH, TOPK) for x in (output.routing.topk_ids, output.routing.kept))
    counts = torch.stack([((ids == e) & kept).sum((1, 2)) for e in range(EXPERTS)])
    assert int(counts.max()) == capacity
    assert int(output.stats.dropped.sum()) == int(valid.sum()) * TOPK - int(kept.sum()) > 0


def test_fixed_buffers_hold_no_more_than_a_rank_can_send() -> None:
    """The capacity is that of the window, of which each TP rank has a part."""
    moe = config(capacity_factor=3.0, pad_to_capacity=True)  # 12 slots a window and expert, of 4 tokens here

    def program(world: SimulatedWorld) -> None:
        layer = build(world, Layout(tp=2, dp=1, ep=2), moe)
        tokens, valid, _ = (share(layer.groups, whole) for whole in batch())
        layer(tokens, valid)

    _, trace = simulate(2, program, trace=True)
    rows = [
        record.shape for record in trace[0] if record.kind == "all_to_all" and len(record.shape or ()) == 2
    ]
    assert rows == [(EXPERTS * WINDOWS * LENGTH // 2, HIDDEN)] * 2


def test_fp32_with_grouped_mm_agrees_with_fp64() -> None:
    tokens, valid, _ = batch()
    exact = build(SingleWorld(), Layout(), config())
    first = exact(tokens, valid)
    fast = build(SingleWorld(), Layout(), config(experts="grouped_mm"), dtype=torch.float32)
    output = fast(tokens.float(), valid, first.routing)
    torch.testing.assert_close(output.tokens.double(), first.tokens, rtol=0, atol=1e-4)
    assert output.choices == {
        "dispatcher": "auto chose local (one rank holds all experts)",
        "experts": "grouped_mm, as asked",
    }


def test_a_layer_cast_to_bfloat16_runs_forward_and_backward() -> None:
    layer = build(SingleWorld(), Layout(), config(experts="auto", shared_ffn=8)).bfloat16()
    tokens, valid, upstream = batch()
    output = layer(tokens.bfloat16(), valid)
    loss(output, upstream).backward()
    assert output.tokens.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in layer.parameters())
    assert output.choices["experts"] == "auto chose grouped_mm"


def test_an_empty_batch_passes() -> None:
    layer = build(SingleWorld(), Layout(), config(shared_ffn=4))
    tokens = torch.zeros(0, LENGTH, HIDDEN, dtype=torch.float64, requires_grad=True)
    output = layer(tokens, torch.zeros(0, LENGTH, dtype=torch.bool))
    assert output.tokens.shape == (0, LENGTH, HIDDEN)
    loss(output, tokens.detach()).backward()
    assert all((p.grad == 0).all() for p in layer.experts.parameters())


@pytest.mark.parametrize(
    ("changes", "error", "part"),
    [
        ({"pad_to_capacity": True}, ConfigError, "pad_to_capacity needs a capacity"),
        (
            {"pad_to_capacity": True, "capacity_factor": 1.0, "dispatcher": "allgather"},
            ConfigError,
            "allgather",
        ),
        ({"experts": "grouped_mm"}, BackendError, "float64"),
        ({"router": RouterConfig(num_experts=4, topk=5)}, ConfigError, "topk=5"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part):
        build(SingleWorld(), Layout(), config(**changes))
