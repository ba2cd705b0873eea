"""A layer in CUDA graphs: replays with other tokens and routings give the bits of eager execution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from isozyme.core.config import MoEConfig, RouterConfig
from isozyme.core.topology import Layout, Topology
from isozyme.moe.cuda_graph import graphed
from isozyme.moe.layer import MoELayer
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld

HIDDEN, FFN, EXPERTS = 64, 96, 8
pytestmark = pytest.mark.gpu

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax": ({}, {}),
    "softmax with losses": ({"aux_loss": 0.01, "z_loss": 0.001}, {}),
    "sigmoid with bias": ({"score": "sigmoid", "expert_bias_rate": 0.001}, {}),
    "capacity and a shared expert": ({}, {"capacity_factor": 0.75, "shared_ffn": 64}),
    "delayed weight gradients": ({}, {"delay_wgrad": True}),
    "row-wise FP8": ({}, {"experts": "grouped_fp8"}),
    "row-wise FP8, delayed": ({"aux_loss": 0.01}, {"experts": "grouped_fp8", "delay_wgrad": True}),
}
"""Settings of the router and of the layer."""


def layer(router: dict[str, Any] | None = None, **moe: Any) -> MoELayer:
    config = MoEConfig(
        router=RouterConfig(num_experts=EXPERTS, topk=2, **(router or {})),
        ffn=FFN,
        **{"experts": "grouped_mm_fused", **moe},
    )
    in_8_bits = config.experts == "grouped_fp8"
    if in_8_bits and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("torch's scaled grouped product is built for Hopper")
    return MoELayer(
        config,
        name="m",
        hidden=HIDDEN,
        groups=ProcessGroups(Topology(Layout()), SingleWorld()),
        seed=0,
        init_std=0.3,
        output_std=0.3,
        device="cuda",
        dtype=torch.bfloat16,
        precision="fp8_rowwise" if in_8_bits else None,
    )


def batches() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Tokens that lead to different loads, and which of them are real."""
    draw = torch.Generator("cuda").manual_seed(1)

    def random() -> Tensor:
        return torch.randn(2, 128, HIDDEN, generator=draw, device="cuda").bfloat16()

    everywhere = torch.ones(2, 128, dtype=torch.bool, device="cuda")
    yield "spread", random(), everywhere
    yield "all alike, so that six experts are empty", random()[:1, :1].expand(2, 128, -1).clone(), everywhere
    half = everywhere.clone()
    half[:, 64:] = False
    yield "half of it padding", random(), half
    yield "nothing but padding", random(), torch.zeros_like(everywhere)
    yield "other tokens", 3 * random(), everywhere


def step(
    function: Callable[[Tensor, Tensor], tuple[Tensor, ...]], module: MoELayer, tokens: Tensor, valid: Tensor
) -> list[Tensor]:
    """Results, counts, and all gradients, copied."""
    x = tokens.clone().requires_grad_()
    out, aux, z, routed = function(x, valid)
    parameters = list(module.parameters())
    upstream = torch.sin(torch.arange(out.numel(), device="cuda")).view_as(out).to(out.dtype)
    loss = (out * upstream).sum() + aux + z
    grads = torch.autograd.grad(loss, [x, *parameters])
    return [each.detach().clone() for each in (out, aux, z, routed, *grads)]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def eager(module: MoELayer) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    def run(tokens: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        output = module(tokens, valid)
        return output.tokens, output.stats.aux_loss, output.stats.z_loss, output.stats.routed

    return run


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_replays_with_other_routings_give_the_bits_of_eager_execution(
    case: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    router, moe = case
    module = layer(router, **moe)
    given = list(batches())
    wanted = {name: step(eager(module), module, tokens, valid) for name, tokens, valid in given}
    replay = graphed(module, given[0][1].clone().requires_grad_(), given[0][2])
    loads = []
    for name, tokens, valid in reversed(given):
        found = step(replay, module, tokens, valid)
        loads.append(found[3].tolist())
        for place, (got, want) in enumerate(zip(found, wanted[name], strict=True)):
            assert torch.equal(got, want), f"{name}: result {place}"
    assert len({tuple(load) for load in loads}) == len(given)
    assert any(load.count(0) == EXPERTS - 2 and sum(load) > 0 for load in loads)


@pytest.mark.parametrize("experts", ["grouped_mm_fused", "grouped_fp8"])
def test_the_layer_never_waits_for_the_host(experts: str) -> None:
    module = layer(experts=experts)
    _, tokens, valid = next(batches())
    step(eager(module), module, tokens, valid)  # compiles
    with waiting_is_an_error():
        step(eager(module), module, tokens, valid)


def test_weights_that_change_in_place_are_seen_by_the_graph() -> None:
    module = layer()
    _, tokens, valid = next(batches())
    replay = graphed(module, tokens.clone().requires_grad_(), valid)
    before = step(replay, module, tokens, valid)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    after = step(replay, module, tokens, valid)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(after[0], step(eager(module), module, tokens, valid)[0])


def test_forward_and_backward_can_be_captured_in_one_graph() -> None:
    module = layer({"aux_loss": 0.01})
    given = list(batches())
    static_tokens, static_valid = given[0][1].clone().requires_grad_(), given[0][2].clone()

    def whole() -> list[Tensor]:
        output = module(static_tokens, static_valid)
        loss = output.tokens.float().square().sum() + output.stats.aux_loss
        return [output.tokens, *torch.autograd.grad(loss, [static_tokens, *module.parameters()])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            whole()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = whole()
    for name, tokens, valid in given[1:]:
        with torch.no_grad():
            static_tokens.copy_(tokens)
            static_valid.copy_(valid)
        graph.replay()
        found = [each.detach().clone() for each in captured]
        for got, want in zip(found, whole(), strict=True):
            assert torch.equal(got, want), name
