"""The layer on a GPU: torch's grouped GEMM, sizes beyond int32, waits for the host, agreement with a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from isozyme.core.config import MoEConfig, RouterConfig
from isozyme.core.topology import Layout, Topology
from isozyme.moe.dispatch_padded import PaddedAllToAllDispatcher
from isozyme.moe.experts.grouped_mm import grouped_mm_experts
from isozyme.moe.experts.loop import loop_experts
from isozyme.moe.layer import MoELayer
from isozyme.moe.permute import permute, sort_slots, unpermute
from isozyme.moe.placement import ExpertPlacement
from isozyme.moe.types import Dispatched, Routing
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld

HIDDEN, FFN = 64, 48
pytestmark = pytest.mark.gpu


def run(function: Any, counts: list[int], dtype: torch.dtype, spare: int) -> list[Tensor]:
    """Result of the real rows and gradients of rows, weights, gate-up and down; NaN behind the real rows."""
    draw = torch.Generator("cuda").manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cuda")

    total = sum(counts)
    rows, probs = random(total + spare, HIDDEN).to(dtype), random(total + spare)
    rows[total:], probs[total:] = float("nan"), float("nan")
    gate_up, down = (
        (random(len(counts), 2 * FFN, HIDDEN) / 8).to(dtype),
        (random(len(counts), HIDDEN, FFN) / 8).to(dtype),
    )
    leaves = [x.requires_grad_() for x in (rows, probs, gate_up, down)]
    dispatched = Dispatched(
        rows=rows,
        probs=probs,
        tokens_per_expert=torch.tensor(counts, device="cuda"),
        num_rows=total,
        host_counts=tuple(counts),
    )
    out = function(rows, probs, gate_up, down, dispatched)
    upstream = random(total + spare, HIDDEN).to(dtype)
    upstream[total:] = float("nan")
    return [out[:total].detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "counts", [[300, 0, 17, 0], [0, 0, 0, 0], [0, 1, 0, 0], [128, 128, 128, 128], [0, 5, 600, 31]]
)
@pytest.mark.parametrize("spare", [0, 200])
def test_grouped_mm_equals_the_loop_and_empty_experts_get_exact_zeros(
    counts: list[int], dtype: torch.dtype, spare: int
) -> None:
    # Memory that was used before holds anything: an output that a kernel leaves unwritten would show.
    torch.full((64, 1024, 1024), float("nan"), device="cuda")
    found, want = (run(function, counts, dtype, spare) for function in (grouped_mm_experts, loop_experts))
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for got, expected in zip(found, want, strict=True):
        assert torch.isfinite(got).all()
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * max(scale, 1e-6))
    for grad in found[3:]:
        assert all((of_expert == 0).all() for of_expert, count in zip(grad, counts, strict=True) if not count)


def test_rows_beyond_two_to_the_31_elements_are_moved_rightly() -> None:
    tokens, topk, hidden = 2**18 + 1, 8, 1280  # 2.7e9 elements of rows
    ids = (torch.arange(tokens, device="cuda")[:, None] * 7 + torch.arange(topk, device="cuda")) % 16
    routing = Routing(
        topk_ids=ids,
        topk_probs=torch.ones(tokens, topk, device="cuda"),
        kept=torch.ones_like(ids, dtype=torch.bool),
        num_experts=16,
    )
    slots = sort_slots(routing)
    x = torch.arange(tokens, device="cuda").remainder(251).to(torch.bfloat16)[:, None].expand(-1, hidden)
    rows = permute(x, slots)
    assert rows.numel() > 2**31
    assert rows[-1].equal(x[int(slots.row_token[-1])])
    assert rows[:, 5].equal(x[slots.row_token, 5])
    back = unpermute(rows, slots)
    assert back[:, 7].equal(x[:, 7] * topk)
    assert back[-1].equal(x[-1] * topk)


def layer(device: str, dtype: torch.dtype, **changes: Any) -> MoELayer:
    options: dict[str, Any] = {"router": RouterConfig(num_experts=8, topk=2), "ffn": FFN, "shared_ffn": 32}
    return MoELayer(
        MoEConfig(**{**options, **changes}),
        name="m",
        hidden=HIDDEN,
        groups=ProcessGroups(Topology(Layout()), SingleWorld()),
        seed=0,
        init_std=0.3,
        output_std=0.3,
        device=device,
        dtype=dtype,
    )


@pytest.mark.parametrize(
    "changes", [{}, {"capacity_factor": 0.75}, {"capacity_factor": 0.75, "pad_to_capacity": True}], ids=str
)
def test_a_layer_on_the_gpu_equals_the_one_on_the_cpu_in_fp64(changes: dict[str, Any]) -> None:
    tokens = torch.randn(3, 16, HIDDEN, dtype=torch.float64)
    valid = torch.ones(3, 16, dtype=torch.bool)
    valid[1, 5:] = False
    grads = []
    for device in ("cpu", "cuda"):
        module = layer(device, torch.float64, **changes)
        output = module(tokens.to(device), valid.to(device))
        (output.tokens.square().sum() + output.stats.aux_loss).backward()
        grads.append([output.tokens.detach(), *(p.grad for p in module.parameters())])
    for on_cpu, on_gpu in zip(*grads, strict=True):
        assert on_cpu is not None
        assert on_gpu is not None
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=0, atol=1e-9 * float(on_cpu.abs().max()))


def test_weights_moved_to_the_gpu_still_view_their_stack() -> None:
    module = layer("cpu", torch.float32).cuda().bfloat16()
    first = module.experts.weights.gate_up[1]
    with torch.no_grad():
        first.fill_(3.0)
    gate_up, _ = module.experts.weights.stacks()
    assert (gate_up[1] == 3.0).all()
    assert first.is_cuda
    output = module(
        torch.randn(2, 8, HIDDEN, device="cuda").bfloat16(), torch.ones(2, 8, device="cuda").bool()
    )
    output.tokens.float().sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_the_layer_gives_the_same_bits_in_every_run() -> None:
    module = layer("cuda", torch.bfloat16)
    tokens = torch.randn(4, 256, HIDDEN, device="cuda").bfloat16()
    valid = torch.ones(4, 256, device="cuda").bool()
    runs = []
    for _ in range(3):
        module.zero_grad()
        x = tokens.clone().requires_grad_()
        output = module(x, valid)
        (output.tokens.float().square().sum() + output.stats.aux_loss).backward()
        runs.append(
            [output.tokens, x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
        )
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


def test_dispatch_with_fixed_sizes_never_waits_for_the_device() -> None:
    placement = ExpertPlacement.of(ProcessGroups(Topology(Layout()), SingleWorld()), 4)
    dispatcher = PaddedAllToAllDispatcher(placement, 8)
    x = torch.randn(6, HIDDEN, device="cuda", requires_grad=True)
    ids = torch.arange(6, device="cuda")[:, None] % 4
    routing = Routing(topk_ids=ids, topk_probs=torch.rand(6, 1, device="cuda"), kept=ids >= 0, num_experts=4)
    dispatcher.combine(dispatcher.dispatch(x, routing).rows, dispatcher.dispatch(x, routing)).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        dispatched = dispatcher.dispatch(x, routing)
        out = dispatcher.combine(dispatched.rows, dispatched)
        out.backward(out.detach())
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert out.equal(x)
