"""Run a layer eagerly and compiled, and compare: a program of its own, without annotation checks."""

from __future__ import annotations

import torch
from torch import Tensor

from isozyme.core.config import ExpertBackend, MoEConfig, Precision, RouterConfig
from isozyme.core.topology import Layout, Topology
from isozyme.moe.layer import MoELayer
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld


def compare(experts: ExpertBackend, precision: Precision) -> None:
    """Values and gradients, bit for bit or nearly."""
    config = MoEConfig(router=RouterConfig(num_experts=4, topk=2), ffn=32, experts=experts)
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    layer = MoELayer(
        config,
        name="moe",
        hidden=16,
        groups=groups,
        seed=0,
        init_std=0.2,
        dtype=torch.bfloat16,
        precision=precision,
    )
    valid = torch.ones(2, 8, dtype=torch.bool)

    def run(tokens: Tensor) -> Tensor:
        return layer(tokens, valid).tokens

    results = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        tokens = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        out = function(tokens)
        grads = torch.autograd.grad(out.float().square().sum(), (tokens, *layer.parameters()))
        results.append([out.detach(), *grads])
    assert results[0][0].abs().sum() > 0
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def main() -> None:
    """bf16, the only type that torch's grouped GEMM compiles in."""
    compare("grouped_mm_fused", "bf16")
    torch.compiler.reset()
    compare("grouped_fp8", "fp8_rowwise")
    print("equal")


if __name__ == "__main__":
    main()
