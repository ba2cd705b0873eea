"""Experts of rows that come in chunks, against writing them down chunk by chunk."""

import pytest
import torch

from isozyme.moe.kernels.chunk_experts import chunk_experts_twin
from isozyme.moe.kernels.triton_chunk_experts import launch_chunk_experts


@pytest.mark.parametrize(
    "chunks",
    [
        [[3, 0, 2], [0, 0, 1]],
        [[0, 0], [0, 0]],
        [[0, 5], [4, 0], [0, 0], [1, 7]],
        [[300]],
        [[(3 * rank + expert) % 5 for expert in range(40)] for rank in range(8)],
    ],
    ids=["skewed", "no rows", "empty rank", "one chunk", "many"],
)
def test_kernel_and_twin_name_each_chunks_expert(chunks: list[list[int]], device: str) -> None:
    by_hand = [expert for of_rank in chunks for expert, count in enumerate(of_rank) for _ in range(count)]
    given = torch.tensor(chunks, device=device)
    for found in (launch_chunk_experts(given, len(by_hand)), chunk_experts_twin(given, len(by_hand))):
        assert found.dtype == torch.int64
        assert found.tolist() == by_hand
