"""Weight gradients that are computed while rows are exchanged: their place, and that no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isozyme.core.config import MoEConfig, RouterConfig
from isozyme.core.errors import BackendError
from isozyme.core.topology import Layout, Topology
from isozyme.moe.experts.delayed import DelayedGradients
from isozyme.moe.layer import MoELayer
from isozyme.moe.types import Routing
from isozyme.parallel.communicator import Communicator, Pending
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld, World
from isozyme.parallel.shard_spec import named_shards
from isozyme.parallel.simulated import SimulatedWorld, simulate

HIDDEN, TOKENS, EXPERTS = 8, 6, 4


def build(world: World, layout: Layout, backend: str, **changes: Any) -> MoELayer:
    dtype = torch.float64 if backend == "loop" else torch.float32
    config = MoEConfig(
        router=RouterConfig(num_experts=EXPERTS, topk=2, aux_loss=0.1),
        ffn=8,
        experts=backend,  # type: ignore[arg-type]
    )
    options = {"recompute_activation": changes.pop("recompute", False)}
    return MoELayer(
        replace(config, **changes),
        name="m",
        hidden=HIDDEN,
        groups=ProcessGroups(Topology(layout), world),
        seed=3,
        init_std=0.7,
        output_std=0.7,
        dtype=dtype,
        **options,
    )


def forward(layer: MoELayer, rank: int, *, to: int | None = None) -> tuple[Tensor, Tensor]:
    """Tokens of this rank and their sum's loss; with `to`, every token goes to experts `to` and `to + 1`."""
    draw = torch.Generator().manual_seed(rank)
    dtype = layer.experts.weights.down[0].dtype
    tokens = torch.randn(2, TOKENS // 2, HIDDEN, generator=draw, dtype=torch.float64).to(dtype)
    tokens.requires_grad_()
    valid = torch.ones(2, TOKENS // 2, dtype=torch.bool)
    valid[1, 1:] = rank != 1
    routing = None
    if to is not None:
        ids = torch.tensor([[to, to + 1]]).expand(TOKENS, -1).contiguous()
        kept = torch.ones_like(ids, dtype=torch.bool)
        probs = torch.ones(TOKENS, 2, dtype=dtype)
        routing = Routing(topk_ids=ids, topk_probs=probs, kept=kept, num_experts=EXPERTS)
    output = layer(tokens, valid, routing)
    upstream = torch.cos(torch.arange(output.tokens.numel(), dtype=dtype)).view_as(output.tokens)
    return tokens, (output.tokens * upstream).sum() + output.stats.aux_loss


def gradients(
    world: World, layout: Layout, backend: str, to: int | None, **changes: Any
) -> dict[str, Tensor]:
    layer = build(world, layout, backend, **changes)
    tokens, loss = forward(layer, world.rank, to=to)
    loss.backward()
    found = {name: p.grad for name, p, _ in named_shards(layer)} | {"tokens": tokens.grad}
    assert all(grad is not None for grad in found.values())
    return {name: grad for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "grouped_mm_fused"])
@pytest.mark.parametrize(
    ("layout", "to", "more"),
    [
        (Layout(), None, {}),
        (Layout(dp=4, ep=2), None, {"shared_ffn": 4, "recompute": True}),
        (Layout(dp=2, ep=2), 0, {}),  # the second rank gets no row
        (Layout(dp=4, ep=2, etp=2), None, {"capacity_factor": 0.75, "pad_to_capacity": True}),
        (Layout(dp=2, ep=2), None, {"dispatcher": "allgather", "overlap_shared": False, "shared_ffn": 4}),
    ],
    ids=["one rank", "ep 2, shared expert", "a rank without rows", "etp 2, fixed sizes", "all-gather"],
)
def test_delayed_gradients_are_bitwise_those_computed_at_once(
    layout: Layout, to: int | None, more: dict[str, Any], backend: str
) -> None:
    def both(world: SimulatedWorld) -> list[dict[str, Tensor]]:
        return [gradients(world, layout, backend, to, delay_wgrad=delay, **more) for delay in (False, True)]

    for at_once, delayed in simulate(Topology(layout).world_size, both):
        assert at_once.keys() == delayed.keys()
        assert all(torch.equal(at_once[name], delayed[name]) for name in at_once)
        assert any((grad != 0).any() for name, grad in delayed.items() if "experts" in name) or to == 0


class Logged(Pending):
    def __init__(self, inner: Pending, log: list[str]) -> None:
        self.inner, self.log = inner, log

    def wait(self) -> Any:
        self.log.append("wait")
        return self.inner.wait()


def record(comm: Communicator, log: list[str]) -> None:
    """Note when an exchange of this communicator starts and is waited for."""
    start: Callable[..., Pending] = comm.all_to_all_async

    def all_to_all_async(*args: Any, **options: Any) -> Pending:
        log.append("start")
        return Logged(start(*args, **options), log)

    comm.all_to_all_async = all_to_all_async  # type: ignore[method-assign]


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "grouped_mm_fused"])
def test_weight_gradients_and_the_shared_expert_run_between_start_and_wait(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: dict[DelayedGradients, list[str]] = {}
    settle = DelayedGradients.settle

    def logged(self: DelayedGradients, stack: int) -> Tensor | None:
        found = settle(self, stack)
        logs[self].append(f"weights {stack}")
        assert found is not None
        return found

    def program(world: SimulatedWorld) -> tuple[list[str], list[str]]:
        layer = build(world, Layout(dp=2, ep=2), backend, delay_wgrad=True, shared_ffn=4)
        log: list[str] = []
        stacks = layer.experts.stacks

        def known() -> Any:
            found = stacks()
            assert found.delayed is not None
            logs[found.delayed] = log
            log.append("stacks")
            return found

        layer.experts.stacks = known  # type: ignore[method-assign]
        record(layer.placement.communicator, log)
        shared = layer.shared_expert
        assert shared is not None
        for name in ("first_half", "second_half"):
            half = getattr(shared, name)

            def noted(*args: Any, name: str = name, half: Any = half) -> Tensor:
                log.append(name)
                result: Tensor = half(*args)
                result.register_hook(lambda _: log.append(f"{name} backward"))
                return result

            setattr(shared, name, noted)
        _, loss = forward(layer, world.rank)
        forth = list(log)
        log.clear()
        loss.backward()
        return forth, log

    monkeypatch.setattr(DelayedGradients, "settle", logged)
    for forth, back in simulate(2, program):
        assert forth == [
            *("start", "wait"),  # the counts
            *("start", "start", "stacks", "first_half", "wait", "wait"),
            *("start", "second_half", "wait"),
        ]
        assert back == [
            *("start", "second_half backward", "wait"),
            *("start", "start", "first_half backward", "weights 1", "weights 0", "wait", "wait"),
        ]


def test_nothing_is_delayed_without_gradients() -> None:
    layer = build(SingleWorld(), Layout(), "loop", delay_wgrad=True)
    with torch.no_grad():
        assert layer.experts.stacks().delayed is None
        forward(layer, 0)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"experts": "mxfp8_emulated", "delay_wgrad": True},
            "both gradients at once: set model.moe.delay_wgrad",
        ),
        ({"experts": "te_ops", "delay_wgrad": True}, "rows and weights in one call"),
        ({"experts": "grouped_mm", "cache_quantized_weights": True}, "in fp32 it keeps no quantised weights"),
    ],
)
def test_a_backend_that_cannot_says_why(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(BackendError, match=part):
        build(SingleWorld(), Layout(), changes.pop("experts"), **changes)
