"""Triton kernel of `chunk_experts`: each row counts the chunks that end before it."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
@no_type_check
def _kernel(chunks, experts, num_rows, num_chunks, num_experts, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.arange(0, CHUNKS)
    ends = tl.cumsum(tl.load(chunks + chunk, mask=chunk < num_chunks, other=0), axis=0)
    before = (ends[None, :] <= rows[:, None]) & (chunk < num_chunks)[None, :]
    mine = tl.sum(before.to(tl.int64), axis=1)
    tl.store(experts + rows, mine % num_experts, mask=rows < num_rows)


def launch_chunk_experts(chunks: Tensor, num_rows: int) -> Tensor:
    """`chunk_experts` on the device of `chunks`."""
    chunks = chunks.contiguous()
    padded = max(2, triton.next_power_of_2(chunks.numel()))
    block = max(16, min(256, 16384 // padded))
    experts = torch.empty(num_rows, dtype=torch.int64, device=chunks.device)
    if num_rows:
        _kernel[(triton.cdiv(num_rows, block),)](
            chunks, experts, num_rows, chunks.numel(), chunks.shape[1], BLOCK=block, CHUNKS=padded
        )
    return experts
