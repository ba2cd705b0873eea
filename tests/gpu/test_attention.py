"""Attention kernels and norms on a GPU against fp64: values, every gradient, repeatability, compilation."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from isozyme.core.config import NormImplementation
from isozyme.core.context import KernelName
from isozyme.core.errors import BackendError
from isozyme.models.norm import choose_norm
from isozyme.parallel.attention_kernels import AttentionFacts, attend, choose_attention, kernel_problems
from isozyme.parallel.attention_packed import Tiled, VariableLength
from isozyme.parallel.context import whole_window_attention
from isozyme.parallel.context_kernels import choose_kernel, dense, dense_backward
from tests.repo.source_tree import ROOT

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
KERNELS: tuple[KernelName, ...] = ("torch", "cudnn", "flash")
PACKED = ((1, 1, 700, 2, 320), (1024,), (1,) * 1024)
"""Documents of one token, a whole window, and as many documents as tokens."""


def _inputs(
    windows: int, length: int, heads: int, key_heads: int, width: int, dtype: torch.dtype
) -> list[Tensor]:
    generator = torch.Generator(CUDA).manual_seed(length + width)
    return [
        torch.randn(windows, length, n, width, generator=generator, device=CUDA).to(dtype).requires_grad_()
        for n in (heads, key_heads, key_heads)
    ]


def _near(ours: Tensor, inputs: list[Tensor], documents: Tensor | None, tolerance: float) -> None:
    """Hold an output, and the gradients of its inputs, to those of the slow twin in fp64."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    slow = whole_window_attention(exact[0], exact[1], exact[2], documents)
    upstream = torch.randn_like(ours)
    found = torch.autograd.grad(ours, inputs, upstream)
    expected = torch.autograd.grad(slow, exact, upstream.double())
    for one, other in zip((ours, *found), (slow, *expected), strict=True):
        assert float((one.double() - other).norm() / other.norm()) < tolerance


def _require(kernel: KernelName, dtype: torch.dtype, width: int) -> AttentionFacts:
    facts = AttentionFacts.here(CUDA, dtype, head_width=width, num_heads=8, num_kv_heads=2)
    broken = kernel_problems(kernel, facts)
    if broken:
        pytest.skip("; ".join(broken))
    return facts


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("length", "key_heads", "width"), [(1024, 2, 64), (384, 8, 128), (512, 1, 32)])
def test_every_kernel_is_near_fp64(
    kernel: KernelName, dtype: torch.dtype, length: int, key_heads: int, width: int
) -> None:
    _require(kernel, dtype, width)
    inputs = _inputs(2, length, 8, key_heads, width, dtype)
    _near(attend(*inputs, kernel), inputs, None, 2e-2)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_takes_slices_of_one_projection_and_an_expanded_gradient(kernel: KernelName) -> None:
    """As keys and values are cut from one product, and as `out.sum().backward()` gives."""
    _require(kernel, torch.bfloat16, 64)
    product = torch.randn(2, 256, (8 + 2 + 2) * 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (x.unflatten(-1, (-1, 64)) for x in product.split([512, 128, 128], dim=-1))
    attend(q, k, v, kernel).sum().backward()
    exact = product.detach().double().requires_grad_()
    parts = (x.unflatten(-1, (-1, 64)) for x in exact.split([512, 128, 128], dim=-1))
    whole_window_attention(*parts).sum().backward()
    assert product.grad is not None
    assert exact.grad is not None
    assert float((product.grad.double() - exact.grad).norm() / exact.grad.norm()) < 2e-2


def _very_negative(length: int, heads: int) -> list[Tensor]:
    """Queries and keys whose logits are all near -120, so that exp(-logsumexp) overflows in fp32."""
    q, k, v = (0.1 * x.detach() for x in _inputs(1, length, heads, heads, 64, torch.bfloat16))
    q[..., 0], k[..., 0] = 1.0, -120 * 8.0
    return [x.requires_grad_() for x in (q, k, 10 * v)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_very_negative_logits_leave_every_gradient_finite(kernel: KernelName) -> None:
    _require(kernel, torch.bfloat16, 64)
    inputs = _very_negative(640, 2)
    out = attend(*inputs, kernel)
    assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(out.square().sum(), inputs))


@pytest.mark.parametrize("name", ["cudnn", "flash"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_tile_is_near_the_dense_one(name: KernelName, causal: bool) -> None:
    """A rectangle is attended to with the log-sum-exp of whole rows, which may be very negative."""
    _require(name, torch.bfloat16, 64)
    q, k, v = (x.detach() for x in _very_negative(512, 2))
    q, grad = q[:, -256:], torch.randn(1, 256, 2, 64, device=CUDA, dtype=torch.bfloat16)
    keys, values = (x[:, :256] if causal else x for x in (k, v))
    kernel = choose_kernel(q, name)
    assert kernel.name == name
    wide = [x.double() for x in (q, keys, values)]
    out, logsumexp = dense(*wide, causal)
    found, found_sum = kernel.forward(q, keys, values, causal)
    assert float((found.double() - out).norm() / out.norm()) < 2e-2
    assert float((found_sum.double() - logsumexp).abs().max()) < 0.5
    expected = dense_backward(grad.double(), *wide, out, logsumexp, causal)
    grads = kernel.backward(grad, q, keys, values, out.bfloat16(), logsumexp.float(), causal)
    assert all(bool(x.isfinite().all()) for x in grads)
    assert float((grads[2].double() - expected[2]).norm() / expected[2].norm()) < 5e-2


@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize(
    ("way", "dtype", "tolerance"),
    [
        ("variable length", torch.bfloat16, 2e-2),
        ("variable length", torch.float16, 2e-2),
        ("tiles", torch.bfloat16, 2e-2),
        ("tiles", torch.float32, 1e-4),
        ("tiles", torch.float64, 1e-11),
    ],
)
def test_packed_documents_are_near_fp64(
    way: str, dtype: torch.dtype, tolerance: float, key_heads: int
) -> None:
    lengths = PACKED if way == "variable length" else PACKED[:2]
    inputs = _inputs(len(lengths), 1024, 8, key_heads, 64, dtype)
    packed = Tiled.of(lengths, 1024) if way == "tiles" else VariableLength.of(lengths, CUDA)
    numbers = [torch.repeat_interleave(torch.arange(len(each)), torch.tensor(each)) for each in lengths]
    _near(packed(*inputs), inputs, torch.stack(numbers).to(CUDA), tolerance)


def test_packed_attention_of_65536_tokens_holds_no_mask() -> None:
    """The mask alone would take 4 GiB."""
    length = 65_536
    inputs = _inputs(1, length, 8, 2, 64, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    VariableLength.of(((length - 1000, 1000),), CUDA)(*inputs).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**30


def test_deterministic_algorithms_choose_a_kernel_that_repeats_its_gradients() -> None:
    inputs = _inputs(2, 1024, 8, 2, 64, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        facts = AttentionFacts.here(CUDA, torch.bfloat16, head_width=64, num_heads=8, num_kv_heads=2)
        kernel, _ = choose_attention("auto", facts)
        assert kernel != "cudnn"
        first, second = (
            torch.autograd.grad(attend(*inputs, kernel).square().sum(), inputs) for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_every_kernel_compiles_without_a_graph_break() -> None:
    """In a program of its own: the annotation checks of the tests cannot be traced."""
    program = [sys.executable, "-m", "tests.gpu.compiled_attention"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "torch" in done.stdout


@pytest.mark.parametrize("implementation", ["te", "apex", "torch"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)]
)
@pytest.mark.parametrize(("rows", "width"), [(4096, 1024), (77, 384)])
def test_every_norm_is_near_fp64_in_value_and_gradient(
    implementation: NormImplementation, dtype: torch.dtype, tolerance: float, rows: int, width: int
) -> None:
    try:
        norm, choice = choose_norm(implementation, CUDA, dtype)
    except BackendError as error:
        pytest.skip(str(error))
    assert choice.name == implementation
    x = torch.randn(2, rows, width, device=CUDA).to(dtype).requires_grad_()
    weight = (torch.rand(width, device=CUDA) + 0.5).to(dtype).requires_grad_()
    upstream = torch.randn(rows, 2, width, device=CUDA).to(dtype).transpose(0, 1)
    ours = norm(x, weight, 1e-5)
    exact, gain = (each.detach().double().requires_grad_() for each in (x, weight))
    slow = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain
    found = torch.autograd.grad(ours, (x, weight), upstream)
    expected = torch.autograd.grad(slow, (exact, gain), upstream.double())
    for one, other in zip((ours, *found), (slow, *expected), strict=True):
        assert one.dtype == dtype
        assert float((one.double() - other).norm() / other.norm()) < tolerance
