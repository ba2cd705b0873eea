"""A stand-in for Transformer Engine's `GroupedLinear` that runs on a CPU, with the traps of the original.

What it imitates was read from version 2.20.2: who owns which weights, when they are quantised and kept, what
a delayed weight gradient does, and that gradients which are not there yet are uninitialised memory.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isozyme.core import transformer_engine
from isozyme.moe.experts import registry


class Quantizer:
    """Rounds weights coarsely, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return (weight.detach() * 16).round() / 16


class GroupedLinear(nn.Module):
    """See the module's docstring."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        params_dtype: torch.dtype,
        device: str,
        delay_wgrad_compute: bool = False,
        quantizer: Quantizer,
        calls: list[str],
    ) -> None:
        super().__init__()
        assert not bias
        self.num_gemms, self.delay, self.calls = num_gemms, delay_wgrad_compute, calls
        self.fuse_wgrad_accumulation = False
        self.quantizer = quantizer
        self._fp8_workspaces: dict[str, Tensor] = {}
        self.store: deque[Any] = deque()
        for index in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{index}", nn.Parameter(weight))

    def weights(self) -> list[Tensor]:
        return [getattr(self, f"weight{index}") for index in range(self.num_gemms)]

    def forward(self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        weights = self.weights()
        rounded = []
        for index, weight in enumerate(weights):
            kept = None if is_first_microbatch is None else self._fp8_workspaces.get(f"weight{index}")
            if kept is None or is_first_microbatch:
                kept = self.quantizer(weight)
                if is_first_microbatch is not None:
                    self._fp8_workspaces[f"weight{index}"] = kept
            rounded.append(kept)
        result: Tensor = _Product.apply(x, m_splits, self, is_first_microbatch, rounded, *weights)  # type: ignore[no-untyped-call]
        return result

    def backward_dw(self) -> None:
        if not self.delay or not self.store:
            return
        self.calls.append("backward_dw")
        compute, gradients = self.store.popleft()
        compute()
        if not self.fuse_wgrad_accumulation:
            for weight, gradient in zip(self.weights(), gradients, strict=True):
                weight.grad = gradient


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        splits: list[int],
        module: GroupedLinear,
        first: bool | None,
        rounded: list[Tensor],
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, *rounded)
        ctx.splits, ctx.module, ctx.first, ctx.weights = splits, module, first, weights
        ctx.fused = module.fuse_wgrad_accumulation
        ctx.origin_weights_overwrite_main_grad = getattr(weights[0], "overwrite_main_grad", False)
        return torch.cat([part @ w.T for part, w in zip(x.split(splits), rounded, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *rounded = ctx.saved_tensors
        parts, weights = grads[0].split(ctx.splits), ctx.weights
        d_x = torch.cat([part @ w for part, w in zip(parts, rounded, strict=True)])
        if ctx.fused:
            targets = [weight.main_grad for weight in weights]
        else:
            targets = [torch.full_like(weight, torch.nan) for weight in weights]
        adds = ctx.fused and not ctx.first and not ctx.origin_weights_overwrite_main_grad

        def compute() -> None:
            for target, part, rows in zip(targets, parts, x.split(ctx.splits), strict=True):
                gradient = part.T @ rows
                target.add_(gradient) if adds else target.copy_(gradient)

        if ctx.module.delay:
            ctx.module.store.append((compute, targets))
        else:
            compute()
        ours = [None] * len(weights) if ctx.fused else targets
        return d_x, None, None, None, None, *ours


def install(monkeypatch: pytest.MonkeyPatch) -> tuple[Quantizer, list[str]]:
    """Put the stand-in where Transformer Engine would be; what quantises, and the calls of `backward_dw`."""
    quantizer, calls = Quantizer(), list[str]()

    def grouped_linear(*args: Any, **options: Any) -> GroupedLinear:
        return GroupedLinear(*args, **options, quantizer=quantizer, calls=calls)

    def autocast(**_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    package = SimpleNamespace(GroupedLinear=grouped_linear, autocast=autocast)
    monkeypatch.setattr(transformer_engine, "load", lambda: package)
    monkeypatch.setattr(transformer_engine, "recipe_for", lambda _: object())
    monkeypatch.setattr(registry, "te_problems", lambda *_: [])
    return quantizer, calls
