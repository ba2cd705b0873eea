"""Run every attention kernel that can run here eagerly and compiled, and compare: a program of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from isozyme.core.context import KernelName
from isozyme.parallel.attention_kernels import AttentionFacts, attend, kernel_problems

KERNELS: tuple[KernelName, ...] = ("torch", "cudnn", "flash")


def main() -> None:
    """Compare outputs and gradients; a graph break is an error."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = AttentionFacts.here(device, torch.bfloat16, head_width=64, num_heads=8, num_kv_heads=2)
    for kernel in KERNELS:
        if kernel_problems(kernel, facts):
            continue

        def layer(q: Tensor, k: Tensor, v: Tensor, kernel: KernelName = kernel) -> Tensor:
            return attend(q * 2, k, v, kernel) + 1

        inputs = [
            torch.randn(2, 256, n, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
            for n in (8, 2, 2)
        ]
        results = []
        for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
            out = function(*inputs)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
        for eager, compiled in zip(*results, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2)
        print(kernel)


if __name__ == "__main__":
    main()
