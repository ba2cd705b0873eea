"""Overwriting or adding weight gradients, with a stand-in for Transformer Engine's grouped linear layer."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isozyme.core.initialisation import Init
from isozyme.core.topology import Layout, Topology
from isozyme.moe.experts.te_main_grad import claim_in_backward
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import attach, dense_spec


class _Grouped(torch.autograd.Function):
    """`y_e = x_e w_e`; writes `main_grad` as Transformer Engine does, and returns no weight gradient."""

    @staticmethod
    def forward(ctx: Any, known: bool, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weights = weights
        if known:
            ctx.origin_weights_overwrite_main_grad = getattr(weights[0], "overwrite_main_grad", False)
        return torch.stack([x @ weight.detach() for weight in weights])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        for weight, grad in zip(ctx.weights, grads[0], strict=True):
            if getattr(ctx, "origin_weights_overwrite_main_grad", False):
                weight.main_grad.copy_(x.T @ grad)
            else:
                weight.main_grad.add_(x.T @ grad)
        return None, None, *[None] * len(ctx.weights)


def setting(count: int = 3) -> tuple[GradientBuffer, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.randn(4, 5, dtype=torch.float64)) for _ in range(count)]
    for number, parameter in enumerate(parameters):
        attach(parameter, dense_spec(f"w{number}", (4, 5), Init.constant(0.0)))
    return GradientBuffer(parameters, ProcessGroups(Topology(Layout()), SingleWorld())), parameters


def apply(x: Tensor, parameters: list[nn.Parameter], *, known: bool) -> Tensor:
    result: Tensor = _Grouped.apply(known, x, *parameters)  # type: ignore[no-untyped-call]
    claim_in_backward(result, parameters)
    return result


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_backwards_in_any_order_give_the_sum_of_this_step_alone(order: tuple[int, ...], known: bool) -> None:
    buffer, parameters = setting()
    for step in range(3):
        buffer.zero()
        xs = [torch.randn(6, 4, dtype=torch.float64) for _ in order]
        results = [apply(x, parameters, known=known) for x in xs]
        for index in order:
            results[index].sum().backward()
        buffer.reduce()
        want = sum(x.T @ torch.ones(6, 5, dtype=torch.float64) for x in xs)
        for parameter in parameters:
            torch.testing.assert_close(parameter.main_grad, want)
            parameter.main_grad.fill_(float("nan") if step == 0 else 1e9)


def test_the_first_gradient_overwrites_and_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, parameters = setting()
    written: list[str] = []
    for name in ("copy_", "add_", "zero_"):
        plain = getattr(Tensor, name)

        def noting(self: Tensor, *args: Any, _name: str = name, _plain: Any = plain) -> Any:
            written.append(_name)
            return _plain(self, *args)

        monkeypatch.setattr(Tensor, name, noting)
    for _ in range(2):
        buffer.zero()
        written.clear()
        for _ in range(2):
            apply(torch.ones(2, 4, dtype=torch.float64), parameters, known=True).sum().backward()
        seen = list(written)
        buffer.reduce()
    assert seen == ["copy_"] * 3 + ["add_"] * 3


def test_a_forward_without_a_backward_leaves_no_stale_number() -> None:
    buffer, parameters = setting()
    for step in range(3):
        buffer.zero()
        result = apply(torch.ones(2, 4, dtype=torch.float64), parameters, known=True)
        if step < 2:
            result.sum().backward()
        buffer.reduce()
    assert all((parameter.main_grad == 0).all() for parameter in parameters)


def test_the_graph_is_freed_as_without_the_hook() -> None:
    _, parameters = setting()
    result = apply(torch.ones(2, 4, dtype=torch.float64), parameters, known=True)
    node = weakref.ref(result.grad_fn)
    gc.disable()
    try:
        del result
        assert node() is None
    finally:
        gc.enable()
