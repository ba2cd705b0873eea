"""Permute and unpermute kernels against indexing, and as each other's gradient."""

import pytest
import torch
from torch import Tensor

from isozyme.moe.kernels.row_map import row_map
from isozyme.moe.kernels.rows import (
    gather_probs_twin,
    gather_rows,
    gather_rows_and_probs_op,
    gather_rows_op,
    gather_rows_twin,
    scatter_probs_twin,
    scatter_rows,
    scatter_rows_and_probs,
    scatter_rows_and_probs_op,
    scatter_rows_op,
    scatter_rows_twin,
)
from isozyme.moe.kernels.triton_rows import launch_gather_rows, launch_scatter_rows

CASES = [(50, 2, 4, 40), (33, 3, 5, 2500), (0, 2, 4, 8), (60, 8, 16, 64), (7, 1, 1, 1)]


def draw(tokens: int, topk: int, experts: int, align: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    skew = torch.rand(tokens, experts) * torch.linspace(1.0, 0.3, experts)
    ids, kept = skew.topk(topk, dim=1).indices.to(device), (torch.rand(tokens, topk) < 0.8).to(device)
    return row_map(ids, kept, experts, align)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_twins(case: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    tokens, topk, experts, hidden = case
    slot_row, counts, ends = draw(tokens, topk, experts, 16, device)
    num_rows = int(ends[-1]) if experts else 0
    source = torch.randn(tokens, hidden, dtype=dtype, device=device)
    rows, nothing = launch_scatter_rows(source, None, slot_row, num_rows, counts, ends)
    assert torch.equal(rows, scatter_rows_twin(source, slot_row, num_rows))
    tokens_again, _ = launch_gather_rows(rows, None, slot_row)
    torch.testing.assert_close(tokens_again, gather_rows_twin(rows, slot_row))
    assert nothing.numel() == 0
    probs = torch.rand(tokens, topk, device=device)
    both, by_row = launch_scatter_rows(source, probs, slot_row, num_rows, counts, ends)
    assert torch.equal(both, rows)
    assert torch.equal(by_row, scatter_probs_twin(probs, slot_row, num_rows))
    again, by_slot = launch_gather_rows(rows, by_row, slot_row)
    assert torch.equal(again, tokens_again)
    assert torch.equal(by_slot, gather_probs_twin(by_row, slot_row))
    assert torch.equal(by_slot, torch.where(slot_row >= 0, probs, 0))


def test_padding_rows_are_zero_whatever_the_memory_held(device: str) -> None:
    slot_row, counts, ends = draw(20, 2, 4, 32, device)
    poison = torch.full((int(ends[-1]), 24), torch.nan, device=device)
    del poison  # the allocator hands the same memory out again on CUDA
    ones, probs = torch.ones(20, 24, device=device), torch.ones(20, 2, device=device)
    rows, by_row = launch_scatter_rows(ones, probs, slot_row, int(ends[-1]), counts, ends)
    filled = torch.zeros(int(ends[-1]), dtype=torch.bool, device=device)
    filled[slot_row[slot_row >= 0].long()] = True
    assert torch.equal(rows[~filled], torch.zeros_like(rows[~filled]))
    assert torch.equal(rows[filled], torch.ones_like(rows[filled]))
    assert torch.equal(by_row, filled.float())


def test_rows_beyond_the_map_never_reach_a_token(device: str) -> None:
    slot_row, counts, _ = draw(20, 2, 4, 1, device)
    rows = torch.full((60, 8), torch.nan, device=device)
    rows[: int(counts.sum())] = torch.randn(int(counts.sum()), 8, device=device)
    assert torch.isfinite(launch_gather_rows(rows, None, slot_row)[0]).all()


def test_each_is_the_gradient_of_the_other(device: str) -> None:
    slot_row, counts, _ = draw(17, 3, 5, 1, device)
    num_rows = int(counts.sum())
    source = torch.randn(17, 6, dtype=torch.float64, device=device, requires_grad=True)
    rows = torch.randn(num_rows, 6, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: scatter_rows(x, slot_row, num_rows), (source,))
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, slot_row), (rows,))
    probs = torch.rand(17, 3, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, p: scatter_rows_and_probs(x, p, slot_row, num_rows), (source, probs)
    )


def test_operators_pass_the_library_checks(device: str) -> None:
    slot_row, counts, _ = draw(11, 2, 4, 1, device)
    source = torch.randn(11, 8, device=device, requires_grad=True)
    torch.library.opcheck(scatter_rows_op, (source, slot_row, int(counts.sum())))
    rows = torch.randn(int(counts.sum()), 8, device=device, requires_grad=True)
    torch.library.opcheck(gather_rows_op, (rows, slot_row))
    probs = torch.rand(11, 2, device=device, requires_grad=True)
    torch.library.opcheck(scatter_rows_and_probs_op, (source, probs, slot_row, int(counts.sum())))
    by_row = torch.rand(rows.shape[0], device=device)
    torch.library.opcheck(gather_rows_and_probs_op, (rows.detach(), by_row, slot_row))


@pytest.mark.gpu
def test_addresses_pass_two_to_the_31() -> None:
    hidden, topk = 8192, 2
    tokens = 2**31 // hidden // topk + 1000
    slot_row = torch.arange(tokens * topk, dtype=torch.int32, device="cuda").view(tokens, topk)
    source = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    rows, _ = launch_scatter_rows(source, None, slot_row, tokens * topk, None, None)
    assert torch.equal(rows[-1], source[-1])
    assert torch.equal(rows[-topk - 1], source[-2])
    back, _ = launch_gather_rows(rows, None, slot_row)
    assert torch.equal(back[-1], source[-1] * 2)
