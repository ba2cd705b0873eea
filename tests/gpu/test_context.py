"""Context-parallel attention on a GPU: tiles against the slow twin, and the memory of a long window."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isozyme.core.context import ContextMethod, KernelName
from isozyme.parallel.context import METHODS, plan_context, whole_window_attention
from isozyme.parallel.context_kernels import choose_kernel
from isozyme.parallel.context_layout import ContextLayout
from isozyme.parallel.simulated import SimulatedWorld, simulate

pytestmark = pytest.mark.gpu
METHOD_NAMES: tuple[ContextMethod, ...] = ("allgather", "ring", "ulysses")


def _inputs(window: int, heads: int, key_heads: int, width: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(heads)
    return [
        torch.randn(2, window, n, width, generator=generator, device="cuda", dtype=torch.float64)
        for n in (heads, key_heads, key_heads, heads)
    ]


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        (torch.bfloat16, "cudnn"),
        (torch.bfloat16, "flash"),
        (torch.float32, "torch"),
        (torch.float64, "torch"),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_output_and_gradients_equal_the_slow_twin(
    method: ContextMethod, packed: bool, dtype: torch.dtype, kernel: KernelName
) -> None:
    window, size = 1024, 4
    *whole, weight = (x.to(dtype) for x in _inputs(window, 8, 4, 64))
    assert choose_kernel(whole[0]).name == ("flash" if dtype == torch.bfloat16 else "dense")
    documents = None
    if packed:
        places = torch.arange(window, device="cuda")
        documents = torch.stack([(places >= 100).long() + (places >= 333).long(), (places >= 256).long()])
    leaves = [x.double().clone().requires_grad_() for x in whole]
    expected = whole_window_attention(leaves[0], leaves[1], leaves[2], documents)
    (expected * weight.double()).sum().backward()
    layout = ContextLayout(window=window, size=size)

    def program(world: SimulatedWorld) -> list[Tensor]:
        q, k, v = (layout.part(x, world.rank).clone().requires_grad_() for x in whole)
        out = METHODS[method](q, k, v, plan_context(world.whole("cp"), layout, documents, kernel))
        (out * layout.part(weight, world.rank)).sum().backward()
        return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]

    parts = simulate(size, program)
    found = [layout.restore(torch.cat(each, dim=1)) for each in zip(*parts, strict=True)]
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-11}[dtype]
    references = [expected.detach(), *(x.grad for x in leaves)]
    for ours, reference in zip(found, references, strict=True):
        assert reference is not None
        assert float((ours.double() - reference).norm() / reference.norm()) < tolerance


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_a_window_of_131072_tokens_fits_at_two_ranks(
    method: ContextMethod, packed: bool, kernel: KernelName
) -> None:
    """Both ranks share this GPU. The logits of one head alone would take 16 GiB a rank in bf16."""
    window = 131_072
    layout = ContextLayout(window=window, size=2)
    documents = None
    if packed:
        documents = (torch.arange(window, device="cuda") >= 50_001).long()[None]

    def program(world: SimulatedWorld) -> bool:
        q, k, v = (
            torch.randn(1, layout.local_length, n, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for n in (8, 2, 2)
        )
        out = METHODS[method](q, k, v, plan_context(world.whole("cp"), layout, documents, kernel))
        out.sum().backward()
        assert q.grad is not None
        return bool(out.isfinite().all() and q.grad.isfinite().all())

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert all(simulate(2, program))
    assert torch.cuda.max_memory_allocated() - before < 8 * 2**30
