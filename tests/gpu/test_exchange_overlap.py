"""Work that runs while rows are exchanged over NCCL: that it changes no bit, and that it does run then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from isozyme.core.config import MoEConfig, RouterConfig
from isozyme.core.topology import Layout, Topology
from isozyme.moe.layer import MoELayer
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.process_groups import ProcessGroups, World
from tests.distributed.spawn import spawn

HIDDEN, FFN, TOKENS = 1024, 2048, 8192
LONG = 65_536
"""Tokens whose exchange takes longer than the host needs to launch the next product."""
KINDS: dict[str, dict[str, Any]] = {
    "alltoall": {"dispatcher": "alltoall"},
    "allgather": {"dispatcher": "allgather"},
    "allgather, told": {"dispatcher": "allgather", "equal_tokens": True},
    "fixed sizes": {"dispatcher": "alltoall", "capacity_factor": 1.25, "pad_to_capacity": True},
}


def build(world: World, **changes: Any) -> MoELayer:
    options = {
        "router": RouterConfig(num_experts=8, topk=2),
        "ffn": FFN,
        "shared_ffn": 512,
        "experts": "grouped_mm_fused",
    }
    return MoELayer(
        MoEConfig(**{**options, **changes}),
        name="m",
        hidden=HIDDEN,
        groups=ProcessGroups(Topology(Layout(dp=2, ep=2)), world),
        seed=0,
        device=torch.device("cuda", world.rank),
        dtype=torch.bfloat16,
    )


def forward(layer: MoELayer, rank: int, count: int = TOKENS) -> tuple[Tensor, Tensor]:
    draw = torch.Generator(f"cuda:{rank}").manual_seed(rank)
    tokens = torch.randn(2, count // 2, HIDDEN, generator=draw, device=f"cuda:{rank}").bfloat16()
    valid = torch.ones(2, count // 2, dtype=torch.bool, device=tokens.device)
    valid[1, -100 * rank :] = rank == 0
    tokens.requires_grad_()
    output = layer(tokens, valid)
    return tokens, (output.tokens.float().square().sum() + output.stats.aux_loss)


def _same_bits(world: World, kind: dict[str, Any]) -> list[bool]:
    """For each way to overlap, whether all gradients are those of the plain way, over two micro-batches."""
    found: list[list[Tensor]] = []
    for overlap, delay in ((False, False), (True, False), (True, True)):
        layer = build(world, **kind, overlap_shared=overlap, delay_wgrad=delay)
        buffer = GradientBuffer(layer.parameters(), layer.groups)
        buffer.zero()
        grads: list[Tensor] = []
        for _ in range(2):
            tokens, loss = forward(layer, world.rank)
            loss.backward()
            assert tokens.grad is not None
            grads += [loss.detach(), tokens.grad]
        buffer.reduce()
        found.append([*grads, *(p.main_grad for p in layer.parameters())])
    return [all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)) for other in found[1:]]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_overlapping_changes_no_bit_over_nccl(kind: dict[str, Any]) -> None:
    assert spawn(_same_bits, 2, kind, device="cuda", timeout=110) == [[True, True]] * 2


def _overlapped(world: World) -> list[float]:
    """Microseconds of backward in which an exchange and a GEMM run at once: plain, and with a delay."""
    found = []
    for delay in (False, True):
        layer = build(world, dispatcher="alltoall", shared_ffn=0, delay_wgrad=delay)
        for _ in range(3):
            forward(layer, world.rank, LONG)[1].backward()
        _, loss = forward(layer, world.rank, LONG)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            loss.backward()
            torch.cuda.synchronize()
        exchanges, products = [], []
        for event in recorded.events() or []:
            if event.device_type != DeviceType.CUDA:
                continue
            name, span = event.name.lower(), (event.time_range.start, event.time_range.end)
            if "nccl" in name:
                exchanges.append(span)
            elif any(part in name for part in ("gemm", "cutlass", "nvjet")):
                products.append(span)
        assert exchanges
        assert products
        found.append(sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in exchanges for b in products))
    return found


@pytest.mark.gpu(2)
def test_weight_gradients_run_while_the_gradients_of_rows_are_exchanged() -> None:
    for plain, delayed in spawn(_overlapped, 2, device="cuda", timeout=110):
        assert delayed > plain + 20, f"{plain:.0f} us at once before, {delayed:.0f} us after"
