"""Triton kernel of the one-pass AdamW: one launch for many parameters, through tables of addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from isozyme.parallel.kernels.adamw import Coefficients, Update

BLOCK = 4096
"""Elements of one program."""


@triton.jit
@no_type_check
def _adamw_kernel(
    addresses, sizes, decays, first_block, block_slot, count,
    lr, beta1, beta2, eps, scale, step_size, root_correction,
    COPY: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    slot = tl.load(block_slot + block)
    start = (block - tl.load(first_block + slot)) * BLOCK
    size = tl.load(sizes + slot)
    table = addresses + slot
    master_at, grad_at = tl.load(table), tl.load(table + count)
    first_at, second_at = tl.load(table + 2 * count), tl.load(table + 3 * count)
    if ALIGNED:
        master_at, grad_at = tl.multiple_of(master_at, 16), tl.multiple_of(grad_at, 16)
        first_at, second_at = tl.multiple_of(first_at, 16), tl.multiple_of(second_at, 16)
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    pointer = tl.pointer_type(tl.float32)
    masters, grads = master_at.to(pointer) + at, grad_at.to(pointer) + at
    firsts, seconds = first_at.to(pointer) + at, second_at.to(pointer) + at
    grad = tl.load(grads, mask=inside, other=0.0) * scale
    first = tl.load(firsts, mask=inside, other=0.0)
    second = tl.load(seconds, mask=inside, other=0.0)
    master = tl.load(masters, mask=inside, other=0.0)
    first = beta1 * first + (1 - beta1) * grad
    second = beta2 * second + (1 - beta2) * grad * grad
    master = master * (1 - lr * tl.load(decays + slot))
    master = master - step_size * first / (tl.sqrt(second) / root_correction + eps)
    tl.store(firsts, first, mask=inside)
    tl.store(seconds, second, mask=inside)
    tl.store(masters, master, mask=inside)
    if COPY is not None:
        copy_at = tl.load(table + 4 * count)
        if ALIGNED:
            copy_at = tl.multiple_of(copy_at, 16)
        tl.store(copy_at.to(tl.pointer_type(COPY)) + at, master.to(COPY), mask=inside)


class AdamWLaunches:
    """The kernel bound to its tensors: one launch for each type of copy, and one for parameters without.

    Args:
        updates: what is updated. The tensors are kept; their addresses must not change.
    """

    def __init__(self, updates: Sequence[Update]) -> None:
        kinds: dict[torch.dtype | None, list[Update]] = {}
        for each in updates:
            if each.master.numel():
                kinds.setdefault(None if each.copy is None else each.copy.dtype, []).append(each)
        self._tables = [_Table(chosen, dtype) for dtype, chosen in kinds.items()]

    def __call__(self, numbers: Coefficients) -> None:
        """Update everything once."""
        for table in self._tables:
            table.launch(numbers)


class _Table:
    def __init__(self, updates: Sequence[Update], copy: torch.dtype | None) -> None:
        self._kept = tuple(updates)
        device = updates[0].master.device
        columns = [_tensors(each) for each in updates]
        addresses = [[tensor.data_ptr() for tensor in row] for row in zip(*columns, strict=True)]
        sizes = torch.tensor([each.master.numel() for each in updates])
        blocks = (sizes + (BLOCK - 1)) // BLOCK
        slots = torch.arange(len(updates), dtype=torch.int32)
        self._programs = int(blocks.sum())
        self._aligned = all(address % 16 == 0 for row in addresses for address in row)
        self._copy = {None: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[copy]
        self._arguments: tuple[Any, ...] = (
            torch.tensor(addresses, dtype=torch.int64).to(device),
            sizes.to(device),
            torch.tensor([each.weight_decay for each in updates], dtype=torch.float32).to(device),
            (blocks.cumsum(0) - blocks).to(device),
            slots.repeat_interleave(blocks).to(device),
            len(updates),
        )

    def launch(self, numbers: Coefficients) -> None:
        _adamw_kernel[(self._programs,)](
            *self._arguments,
            numbers.lr, numbers.beta1, numbers.beta2, numbers.eps, numbers.scale,
            numbers.step_size, numbers.root_correction,
            COPY=self._copy, ALIGNED=self._aligned, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


def _tensors(update: Update) -> list[Tensor]:
    state = [update.master, update.grad, update.exp_avg, update.exp_avg_sq]
    return state if update.copy is None else [*state, update.copy]
