"""Triton kernels of the row map: block histograms, a scan over blocks; then each block places its slots."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
@no_type_check
def _load_experts(ids, kept, slots, num_slots, E: tl.constexpr):
    inside = slots < num_slots
    keep = tl.load(kept + slots, mask=inside, other=0) != 0
    expert = tl.load(ids + slots, mask=inside, other=0).to(tl.int32)
    return tl.where(keep, expert, E)


@triton.jit
@no_type_check
def _histogram_kernel(ids, kept, histogram, num_slots, blocks, BLOCK: tl.constexpr, E: tl.constexpr):
    block = tl.program_id(0)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    expert = _load_experts(ids, kept, slots, num_slots, E)
    hits = (expert[:, None] == tl.arange(0, E)[None, :]).to(tl.int32)
    tl.store(histogram + tl.arange(0, E) * blocks + block, tl.sum(hits, axis=0))


@triton.jit
@no_type_check
def _scan_kernel(histogram, counts, blocks, BLOCK: tl.constexpr):
    """One expert a program: in place its slots before each block, and all of them."""
    expert = tl.program_id(0)
    total, start = expert * 0, expert * 0  # as int32, not as constants of the compiler
    while start < blocks:
        block = start + tl.arange(0, BLOCK)
        here = histogram + expert * blocks + block
        hits = tl.load(here, mask=block < blocks, other=0)
        tl.store(here, total + tl.cumsum(hits, axis=0) - hits, mask=block < blocks)
        total += tl.sum(hits, axis=0)
        start += BLOCK
    tl.store(counts + expert, total)


@triton.jit
@no_type_check
def _place_kernel(
    ids,
    kept,
    before,
    counts,
    ends,
    slot_row,
    num_slots,
    blocks,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    E: tl.constexpr,
):
    block = tl.program_id(0)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    expert = _load_experts(ids, kept, slots, num_slots, E)
    hits = (expert[:, None] == tl.arange(0, E)[None, :]).to(tl.int32)
    earlier = tl.cumsum(hits, axis=0) - hits
    aligned = (tl.load(counts + tl.arange(0, E)) + (ALIGN - 1)) // ALIGN * ALIGN
    end = tl.cumsum(aligned, axis=0)
    start = end - aligned + tl.load(before + tl.arange(0, E) * blocks + block)
    row = tl.sum(hits * (earlier + start[None, :]), axis=1)
    tl.store(slot_row + slots, tl.where(expert < E, row, -1), mask=slots < num_slots)
    if block == 0:
        tl.store(ends + tl.arange(0, E), end)


def launch_row_map(
    topk_ids: Tensor, kept: Tensor, num_experts: int, align: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`row_map` on the device of `topk_ids`, in three kernels."""
    padded = max(2, triton.next_power_of_2(num_experts))
    block = max(16, min(256, 16384 // padded))
    ids, keep = topk_ids.contiguous(), kept.contiguous().view(torch.uint8)
    slots = ids.numel()
    blocks = max(1, triton.cdiv(slots, block))
    histogram = torch.empty((padded, blocks), dtype=torch.int32, device=ids.device)
    counts, ends = (torch.empty(padded, dtype=torch.int32, device=ids.device) for _ in range(2))
    slot_row = torch.empty(topk_ids.shape, dtype=torch.int32, device=ids.device)
    sizes = {"BLOCK": block, "E": padded}
    _histogram_kernel[(blocks,)](ids, keep, histogram, slots, blocks, **sizes)
    _scan_kernel[(padded,)](
        histogram, counts, blocks, BLOCK=max(2, min(1024, triton.next_power_of_2(blocks)))
    )
    _place_kernel[(blocks,)](
        ids, keep, histogram, counts, ends, slot_row, slots, blocks, ALIGN=align, **sizes
    )
    return slot_row, counts[:num_experts], ends[:num_experts]
