"""Triton kernel of the one-pass AdamW: one launch for many parameters, through tables of addresses.

There is little arithmetic for the bytes, so what counts is how memory is accessed: 16 bytes a thread at a
time, all loads under way before the first is used, no mask but in what whole blocks leave over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from isozyme.parallel.kernels.adamw import Coefficients, Update


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the work is cut and cached; no number depends on it."""

    block: int = 1024
    """Elements of one program; a power of two, of 16 at least. Of 1,024 to 8,192 this was the fastest on an
    H200: 4.13 TB/s, where a copy reached 4.16."""
    num_warps: int = 4
    eviction: Literal["", "evict_first"] = ""
    """What caches are told; that every byte is touched once, `evict_first`, made it 2 % slower there."""


@triton.jit
@no_type_check
def _pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address as a pointer; what is known of a number does not survive the cast, so it is said here.

    Of types of two bytes no more is promised than that four elements may be accessed at once: with eight a
    thread, the fp32 elements of neighbouring threads would lie 32 bytes apart.
    """
    found = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        found = tl.multiple_of(found, TYPE.primitive_bitwidth // 2)
    return found


@triton.jit
@no_type_check
def _adamw_kernel(
    addresses, sizes, decays, first_block, block_slot, count,
    lr, beta1, beta2, eps, scale, step_size, inverse_root,
    GRAD: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    slot = tl.load(block_slot + block)
    table = addresses + slot
    at = (block - tl.load(first_block + slot)) * BLOCK + tl.arange(0, BLOCK)
    inside = None  # a mask keeps accesses from being vectors
    if MASKED:
        inside = at < tl.load(sizes + slot)
    shrink = 1 - lr * tl.load(decays + slot)
    masters = _pointer(tl.load(table), tl.float32, ALIGNED) + at
    grads = _pointer(tl.load(table + count), GRAD, ALIGNED) + at
    firsts = _pointer(tl.load(table + 2 * count), tl.float32, ALIGNED) + at
    seconds = _pointer(tl.load(table + 3 * count), tl.float32, ALIGNED) + at
    grad = tl.load(grads, mask=inside, eviction_policy=EVICT).to(tl.float32) * scale
    first = tl.load(firsts, mask=inside, eviction_policy=EVICT)
    second = tl.load(seconds, mask=inside, eviction_policy=EVICT)
    master = tl.load(masters, mask=inside, eviction_policy=EVICT)
    first = beta1 * first + (1 - beta1) * grad
    second = beta2 * second + (1 - beta2) * grad * grad
    master = master * shrink - step_size * first / (tl.sqrt(second) * inverse_root + eps)
    tl.store(firsts, first, mask=inside, eviction_policy=EVICT)
    tl.store(seconds, second, mask=inside, eviction_policy=EVICT)
    tl.store(masters, master, mask=inside, eviction_policy=EVICT)
    if COPY is not None:
        copies = _pointer(tl.load(table + 4 * count), COPY, ALIGNED) + at
        tl.store(copies, master.to(COPY), mask=inside, eviction_policy=EVICT)


class AdamWLaunches:
    """The kernel bound to its tensors: a launch for the whole blocks of all parameters, one for what is left.

    Parameters of other types of gradient or copy, or not aligned to 16 bytes, have launches of their own.

    Args:
        updates: what is updated. The tensors are kept; their addresses must not change.
        tuning: how the work is cut.
    """

    def __init__(self, updates: Sequence[Update], tuning: Tuning | None = None) -> None:
        tuning = tuning or Tuning()
        kinds: dict[tuple[Any, ...], list[Update]] = {}
        for part in (part for each in updates for part in _parts(each, tuning.block)):
            kinds.setdefault(_kind(part, tuning.block), []).append(part)
        self._tables = [_Table(parts, tuning) for parts in kinds.values()]

    def __call__(self, numbers: Coefficients) -> None:
        """Update everything once."""
        for table in self._tables:
            table.launch(numbers)


class _Table:
    """One launch; all updates are of one kind."""

    def __init__(self, updates: Sequence[Update], tuning: Tuning) -> None:
        self._kept = tuple(updates)
        device = updates[0].master.device
        columns = [[tensor.data_ptr() for tensor in _tensors(each)] for each in updates]
        sizes = torch.tensor([each.master.numel() for each in updates])
        blocks = (sizes + (tuning.block - 1)) // tuning.block
        slots = torch.arange(len(updates), dtype=torch.int32)
        self._programs = int(blocks.sum())
        self._arguments: tuple[Any, ...] = (
            torch.tensor(columns, dtype=torch.int64).t().contiguous().to(device),
            sizes.to(device),
            torch.tensor([each.weight_decay for each in updates], dtype=torch.float32).to(device),
            (blocks.cumsum(0) - blocks).to(device),
            slots.repeat_interleave(blocks).to(device),
            len(updates),
        )
        grad, copy, aligned, whole = _kind(updates[0], tuning.block)
        self._options: dict[str, Any] = {
            "GRAD": _TYPES[grad],
            "COPY": None if copy is None else _TYPES[copy],
            "ALIGNED": aligned,
            "MASKED": not whole,
            "BLOCK": tuning.block,
            "EVICT": tuning.eviction,
            "num_warps": tuning.num_warps,
            # Else each variant rounds where its compiler happens to fuse a product and a sum.
            "enable_fp_fusion": False,
        }

    def launch(self, numbers: Coefficients) -> None:
        _adamw_kernel[(self._programs,)](
            *self._arguments,
            numbers.lr, numbers.beta1, numbers.beta2, numbers.eps, numbers.scale,
            numbers.step_size, 1 / numbers.root_correction,
            **self._options,
        )  # fmt: skip


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _parts(update: Update, block: int) -> Iterator[Update]:
    """As many whole blocks as there are, and what is left: views of the update's tensors."""
    size = update.master.numel()
    whole = size - size % block
    for part in (slice(0, whole), slice(whole, size)):
        if part.start < part.stop:
            yield replace(
                update,
                master=update.master.view(-1)[part],
                grad=update.grad.view(-1)[part],
                exp_avg=update.exp_avg.view(-1)[part],
                exp_avg_sq=update.exp_avg_sq.view(-1)[part],
                copy=None if update.copy is None else update.copy.view(-1)[part],
            )


def _kind(part: Update, block: int) -> tuple[torch.dtype, torch.dtype | None, bool, bool]:
    """What one launch has in common: types of gradient and copy, whether aligned, whether of whole blocks."""
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in _tensors(part))
    copy = None if part.copy is None else part.copy.dtype
    return part.grad.dtype, copy, aligned, part.master.numel() % block == 0


def _tensors(update: Update) -> list[Tensor]:
    state = [update.master, update.grad, update.exp_avg, update.exp_avg_sq]
    return state if update.copy is None else [*state, update.copy]
