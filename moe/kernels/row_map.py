"""The row map: a deterministic, stable counting sort of (token, slot) pairs by expert.

Rows are expert-major; within an expert they are in token, then slot order. Sentinels of dropped slots never
enter the sort, so they shift nothing. With `align` > 1 each expert starts at a multiple of it.
"""

from typing import no_type_check

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from isozyme.moe.kernels import direct

MAX_EXPERTS = 1024
"""The kernel holds one counter for each expert in registers."""


def row_map_twin(
    topk_ids: Int[Tensor, "T K"], kept: Bool[Tensor, "T K"], num_experts: int, align: int
) -> tuple[Int[Tensor, "T K"], Int[Tensor, "E"], Int[Tensor, "E"]]:
    """`row_map` by a stable sort: obviously right, several passes."""
    flat = torch.where(kept, topk_ids, num_experts).flatten()
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    aligned = (counts + align - 1) // align * align
    order = torch.sort(flat, stable=True).indices[: int(counts.sum())]
    starts = aligned.cumsum(0) - aligned
    experts = flat[order]
    within = torch.arange(len(order), device=flat.device) - (counts.cumsum(0) - counts)[experts]
    slot_row = torch.full_like(flat, -1, dtype=torch.int32)
    slot_row[order] = (starts[experts] + within).int()
    return slot_row.view(topk_ids.shape), counts.int(), aligned.cumsum(0).int()


def run_row_map(
    topk_ids: Tensor, kept: Tensor, num_experts: int, align: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`row_map` without an operator."""
    if topk_ids.is_cuda:
        from isozyme.moe.kernels.triton_row_map import launch_row_map

        return launch_row_map(topk_ids, kept, num_experts, align)
    return row_map_twin(topk_ids, kept, num_experts, align)


row_map_op = torch.library.custom_op("isozyme::row_map", run_row_map, mutates_args=())


@row_map_op.register_fake
@no_type_check
def _(topk_ids: Tensor, kept: Tensor, num_experts: int, align: int) -> tuple[Tensor, Tensor, Tensor]:
    del kept, align
    counts = topk_ids.new_empty(num_experts, dtype=torch.int32)
    return torch.empty_like(topk_ids, dtype=torch.int32), counts, torch.empty_like(counts)


def row_map(
    topk_ids: Int[Tensor, "T K"], kept: Bool[Tensor, "T K"], num_experts: int, align: int
) -> tuple[Int[Tensor, "T K"], Int[Tensor, "E"], Int[Tensor, "E"]]:
    """Where each slot's row goes in the expert-major buffer.

    Args:
        topk_ids: int64, expert of each slot, in `0 .. num_experts-1`.
        kept: slots that are sent at all.
        num_experts: E, at most `MAX_EXPERTS`.
        align: every expert's rows are padded to a multiple of this (1: no padding).

    Returns:
        `slot_row` int32, -1 where not kept; `counts` int32, kept slots of each expert; `ends` int32, the end
        of each expert's (padded) rows, as grouped GEMMs take their offsets. No host synchronisation on CUDA.
    """
    found: tuple[Tensor, Tensor, Tensor] = direct(row_map_op, run_row_map)(topk_ids, kept, num_experts, align)
    return found
