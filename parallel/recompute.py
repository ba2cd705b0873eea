"""Computing a second time in backward what was not kept in forward.

`recompute` keeps the inputs of a function instead of everything in between; `remade` keeps the recipe of one
tensor instead of the tensor. Nothing random may happen inside: the second pass must make the same values.

Why not `torch.utils.checkpoint`: its second pass begins when backward first asks for a kept tensor, and ends
with the last one asked for. Both depend on the tokens of a rank, so ranks could make their collectives in
different orders. Here the whole second pass runs at one place of backward, the same on all ranks.
Sources: Chen et al. 2016 (arXiv:1604.06174); for selected parts Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Function = Callable[..., Sequence[Tensor]]


def recompute(
    function: Function,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor] = (),
    *,
    again: Function | None = None,
) -> tuple[Tensor, ...]:
    """`function(*inputs)`, of which backward keeps the inputs alone.

    In backward `again(*inputs)` runs whole, before any gradient of it, and so do its collectives: ranks that
    call this together must do so with gradients enabled on all or on none. Gradients of `inputs` and
    `parameters` are those of the second pass. There is no second derivative.

    Args:
        function: runs the first time, without a graph.
        inputs: tensors that it takes; whatever else it needs it brings along, without a gradient.
        parameters: leaves that it uses, besides the inputs, and that want a gradient. Those that a backward
            adds to `main_grad` by itself are among them.
        again: runs the second time, with as many results; by default `function`. It exists so that choices
            made in the first pass can be replayed.

    Returns:
        The results of the first pass. Those of floating point have a gradient.
    """
    if not torch.is_grad_enabled():
        return tuple(function(*inputs))
    results: tuple[Tensor, ...] = _Recompute.apply(
        function, again or function, len(inputs), *inputs, *parameters
    )  # type: ignore[no-untyped-call]
    return results


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Function, again: Function, count: int, *tensors: Tensor) -> Any:
        ctx.again, ctx.count, ctx.autocast = again, count, _autocast_of(tensors)
        ctx.set_materialize_grads(False)
        with torch.no_grad():
            results = tuple(function(*tensors[:count]))
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        # Every floating input takes part, wanted or not, so that each node of the second graph runs: some
        # write their weights' gradients as they do.
        inputs = [each.detach().requires_grad_(each.is_floating_point()) for each in saved[: ctx.count]]
        parameters = saved[ctx.count :]
        with torch.enable_grad(), ExitStack() as stack:
            for each in ctx.autocast:
                stack.enter_context(each())
            results = ctx.again(*inputs)
        roots = [
            (result, grad)
            for result, grad in zip(results, grads, strict=True)
            if grad is not None and result.requires_grad
        ]
        wanted = [each for each in (*inputs, *parameters) if each.requires_grad]
        found = iter(
            torch.autograd.grad(
                [result for result, _ in roots], wanted, [grad for _, grad in roots], allow_unused=True
            )
            if roots
            else [None] * len(wanted)
        )
        all_grads = [next(found) if each.requires_grad else None for each in (*inputs, *parameters)]
        return (None, None, None, *all_grads)


def _autocast_of(tensors: Sequence[Tensor]) -> list[Callable[[], torch.autocast]]:
    """Makers of the autocast contexts that are active on the devices of some tensors."""

    def maker(device: str) -> Callable[[], torch.autocast]:
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        return lambda: torch.autocast(device, dtype=dtype, enabled=enabled)

    return [maker(device) for device in sorted({tensor.device.type for tensor in tensors})]


@contextmanager
def remade(tensor: Tensor, recipe: Callable[..., Tensor], *ingredients: Tensor) -> Iterator[None]:
    """Inside this block, whoever keeps `tensor` for backward keeps `recipe(*ingredients)` instead.

    Worth it where the ingredients are kept anyway, and cheap where the recipe is elementwise: the values come
    back when backward asks for them, without running again what consumes them. No communication.

    Args:
        tensor: a result that nothing but the operations in the block needs.
        recipe: makes it again, bit for bit.
        ingredients: what it is made from; their graph is not kept.
    """
    made_from = [ingredient.detach() for ingredient in ingredients]
    storage = tensor.untyped_storage()._cdata

    def pack(kept: Tensor) -> Any:
        if kept.untyped_storage()._cdata != storage:
            return kept
        return _View(tuple(kept.shape), kept.stride(), int(kept.storage_offset()))

    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, _View):
            assert isinstance(kept, Tensor)
            return kept
        with torch.no_grad():
            again = recipe(*made_from)
        return again.as_strided(kept.shape, kept.stride, kept.offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _View:
    """What stands in for a kept view of the tensor."""

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> None:
        self.shape, self.stride, self.offset = shape, stride, offset
