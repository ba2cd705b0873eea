"""What this device can do at best, measured in the same run: a large GEMM, a copy, grouped GEMMs alone."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor
from torch.nn import functional as F

from isozyme.launch.bench_measure import time_call
from isozyme.launch.bench_problem import Problem
from isozyme.moe.experts.grouped_mm import grouped_mm_problems, row_offsets


def gemm_tflops(device: torch.device, *, size: int | None = None, repeats: int = 10) -> float:
    """TFLOP/s of `size`^3 products of random matrices: bf16 and 8192 on a GPU, fp32 and 512 on a CPU."""
    on_cuda = device.type == "cuda"
    side = size or (8192 if on_cuda else 512)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    time_call(lambda: a @ b, device, 3)
    return 2 * side**3 / _median_s(time_call(lambda: a @ b, device, repeats)) / 1e12


def copy_tbytes(device: torch.device, *, num_bytes: int | None = None, repeats: int = 10) -> float:
    """TB/s of a copy within the device, bytes read plus bytes written: 4 GiB on a GPU, 64 MiB on a CPU."""
    count = num_bytes or (2**32 if device.type == "cuda" else 2**26)
    source = torch.empty(count, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    time_call(lambda: target.copy_(source), device, 3)
    return 2 * count / _median_s(time_call(lambda: target.copy_(source), device, repeats)) / 1e12


def grouped_gemm_tflops(problem: Problem, repeats: int = 5) -> float | None:
    """TFLOP/s of torch's grouped GEMMs of the layer and nothing else: two forward, four backward.

    None where torch's kernel does not multiply this dtype.
    """
    shape, dtype = problem.shape, problem.dtype
    if grouped_mm_problems(problem.device, dtype, shape.hidden, shape.ffn):
        return None
    gate_up, down = (stack.detach() for stack in problem.weights.stacks())
    ends = row_offsets(problem.tokens_per_expert, shape.rows)

    def rows(width: int) -> Tensor:
        return torch.randn(shape.rows, width, device=problem.device, dtype=dtype)

    x, hidden, middle, result = (
        rows(width) for width in (shape.hidden, 2 * shape.ffn, shape.ffn, shape.hidden)
    )

    def products() -> None:
        F.grouped_mm(x, gate_up.mT, offs=ends)
        F.grouped_mm(middle, down.mT, offs=ends)
        F.grouped_mm(result, down, offs=ends)
        F.grouped_mm(result.mT, middle, offs=ends)
        F.grouped_mm(hidden, gate_up, offs=ends)
        F.grouped_mm(hidden.mT, x, offs=ends)

    time_call(products, problem.device, 2)
    return shape.flops / _median_s(time_call(products, problem.device, repeats)) / 1e12


def _median_s(milliseconds: list[float]) -> float:
    return statistics.median(milliseconds) / 1000
