"""Which expert each row is for, where rows come in chunks: rank by rank, and each rank's by expert."""

import torch
from jaxtyping import Int
from torch import Tensor

MAX_CHUNKS = 1024
"""The kernel holds the ends of all chunks in registers."""


def chunk_experts_twin(chunks: Int[Tensor, "ranks E"], num_rows: int) -> Int[Tensor, "N"]:
    """`chunk_experts` by repeating each chunk's number."""
    return torch.repeat_interleave(chunks.flatten(), output_size=num_rows) % chunks.shape[1]


def chunk_experts(chunks: Int[Tensor, "ranks E"], num_rows: int) -> Int[Tensor, "N"]:
    """The expert of each row. No gradient, and no wait for the device.

    Args:
        chunks: rows of each rank for each expert, int64.
        num_rows: N, their sum.
    """
    if chunks.is_cuda and chunks.numel() <= MAX_CHUNKS and not torch.compiler.is_compiling():
        from isozyme.moe.kernels.triton_chunk_experts import launch_chunk_experts

        return launch_chunk_experts(chunks, num_rows)
    return chunk_experts_twin(chunks, num_rows)
