"""Triton kernels of the row map: block histograms, one prefix sum, then each block places its own slots."""

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
def _place_kernel(ids, kept, base, slot_row, num_slots, blocks, BLOCK: tl.constexpr, E: tl.constexpr):
    block = tl.program_id(0)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    expert = _load_experts(ids, kept, slots, num_slots, E)
    hits = (expert[:, None] == tl.arange(0, E)[None, :]).to(tl.int32)
    earlier = tl.cumsum(hits, axis=0) - hits
    start = tl.load(base + tl.arange(0, E) * blocks + block)
    row = tl.sum(hits * (earlier + start[None, :]), axis=1)
    tl.store(slot_row + slots, tl.where(expert < E, row, -1), mask=slots < num_slots)


def launch_row_map(
    topk_ids: Tensor, kept: Tensor, num_experts: int, align: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`row_map` on the device of `topk_ids`."""
    padded = max(2, triton.next_power_of_2(num_experts))
    block = max(16, min(256, 16384 // padded))
    ids, keep = topk_ids.contiguous(), kept.contiguous().view(torch.uint8)
    slots = ids.numel()
    blocks = max(1, triton.cdiv(slots, block))
    histogram = torch.empty((padded, blocks), dtype=torch.int32, device=ids.device)
    slot_row = torch.empty(topk_ids.shape, dtype=torch.int32, device=ids.device)
    _histogram_kernel[(blocks,)](ids, keep, histogram, slots, blocks, BLOCK=block, E=padded)
    counts = histogram[:num_experts].sum(dim=1, dtype=torch.int32)
    aligned = counts if align == 1 else (counts + (align - 1)) // align * align
    ends = aligned.cumsum(0, dtype=torch.int32)
    base = histogram.cumsum(dim=1, dtype=torch.int32) - histogram
    base[:num_experts] += (ends - aligned)[:, None]
    _place_kernel[(blocks,)](ids, keep, base, slot_row, slots, blocks, BLOCK=block, E=padded)
    return slot_row, counts, ends
