"""AdamW in one pass: clipping, both moments, the master and its low-precision copy, each touched once.

A multi-tensor optimiser over fp32 masters leaves two passes to others: gradients are scaled by the clipping
coefficient before it, and masters are rounded into the model's parameters after it. With billions of expert
weights a rank these passes are a tenth of a step. Source of the update: Loshchilov and Hutter 2019
(arXiv:1711.05101).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Update:
    """The tensors of one parameter, contiguous and of one size; all but `grad` and `copy` fp32."""

    master: Tensor
    grad: Tensor
    """In fp32, bf16 or fp16; is read as fp32."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copy: Tensor | None
    """Of lower precision: receives the rounded master."""
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """The numbers of one update, the same for every parameter."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    scale: float
    """Multiplies every gradient as it is read."""
    step: int
    """Number of this update, from 1, for the bias corrections."""

    @property
    def step_size(self) -> float:
        """Learning rate over the first moment's bias correction."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """Square root of the second moment's bias correction."""
        return math.sqrt(1 - self.beta2**self.step)


@torch.no_grad()
def adamw_twin(updates: Sequence[Update], numbers: Coefficients) -> None:
    """The update in plain PyTorch, one parameter after the other."""
    for each in updates:
        grad = each.grad.to(each.master.dtype) * numbers.scale
        each.exp_avg.mul_(numbers.beta1).add_(grad, alpha=1 - numbers.beta1)
        each.exp_avg_sq.mul_(numbers.beta2).addcmul_(grad, grad, value=1 - numbers.beta2)
        each.master.mul_(1 - numbers.lr * each.weight_decay)
        spread = each.exp_avg_sq.sqrt().div_(numbers.root_correction).add_(numbers.eps)
        each.master.addcdiv_(each.exp_avg, spread, value=-numbers.step_size)
        if each.copy is not None:
            each.copy.copy_(each.master)


def unmet(updates: Sequence[Update]) -> str | None:
    """Why the one-pass update cannot take these tensors, in words; None if it can."""
    for each in updates:
        state = (each.master, each.exp_avg, each.exp_avg_sq)
        if any(tensor.dtype != torch.float32 for tensor in state):
            return f"it updates float32 masters only: {_word(each.master)}"
        if each.grad.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it reads gradients of float32, bfloat16 and float16 only: {_word(each.grad)}"
        tensors = (*state, each.grad) if each.copy is None else (*state, each.grad, each.copy)
        if any(not tensor.is_contiguous() or tensor.numel() != each.master.numel() for tensor in tensors):
            return "it needs contiguous tensors of one size"
        if any(tensor.device != each.master.device for tensor in tensors):
            return "it needs a parameter's tensors on one device"
    return None


def _word(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
