"""Transformer Engine's `GroupedLinear` over weights that are ours: the matrix product of `experts.te`.

The module is built empty, and views of our parameters are put where its weights would be. What it quantises
may be made before the call, or be kept over the micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from isozyme.core.errors import BackendError
from isozyme.moe.experts.delayed import Later
from isozyme.moe.experts.te_main_grad import claim_in_backward
from isozyme.parallel.main_grad import OpenStep

Quantized = dict[str, Any]
"""Quantised weights under the names by which a module looks for kept ones."""


class EmptyGroupedLinear:
    """A `te.GroupedLinear` without weights of its own.

    Args:
        te: the package.
        like: says the type and the device of the weights.
        count: how many GEMMs.
        inputs: width of a row.
        outputs: width of a result.
        delay: leave the weights' gradients to `gradient_later`.
        cache: keep quantised weights while a step lasts.
    """

    def __init__(
        self, te: Any, like: Tensor, count: int, inputs: int, outputs: int, *, delay: bool, cache: bool
    ) -> None:
        self._module = te.GroupedLinear(
            count,
            inputs,
            outputs,
            bias=False,
            params_dtype=like.dtype,
            device="meta",
            delay_wgrad_compute=delay,
        )
        if cache and not hasattr(self._module, "_fp8_workspaces"):
            raise BackendError(
                "experts=te: this version of Transformer Engine keeps quantised weights elsewhere than "
                "2.20.2 does. Set model.moe.cache_quantized_weights=false."
            )
        self._delay, self._cached = delay, _StepOfWeights() if cache else None
        self._leaves: tuple[nn.Parameter, ...] = ()
        self._targets: tuple[Tensor | None, ...] = ()
        for index in range(count):
            delattr(self._module, f"weight{index}")
            setattr(self._module, f"bias{index}", like.new_empty(0))

    def quantized(self, parameters: Sequence[nn.Parameter]) -> Quantized | None:
        """The weights quantised as the next call would do it, for this call to take.

        None if it cannot be known how: before the first call, which makes the quantisers; in a version of
        Transformer Engine that has them elsewhere than 2.20.2; and where weights are kept over calls.
        """
        known = all(hasattr(self._module, name) for name in ("_get_weight_quantizers", "_fp8_workspaces"))
        if not known or self._cached is not None:
            return None
        made: Quantized = {}
        for index, quantizer in enumerate(self._module._get_weight_quantizers()):
            if quantizer is None:
                return None
            quantizer.set_usage(rowwise=True, columnwise=torch.is_grad_enabled())
            made[f"weight{index}"] = quantizer.quantize(_matrix(parameters[index].detach()))
        return made

    def __call__(
        self,
        rows: Float[Tensor, "R I"],
        splits: list[int],
        parameters: Sequence[nn.Parameter],
        quantized: Quantized | None = None,
    ) -> Float[Tensor, "R O"]:
        """The product of each group of rows with its weight, which may have been quantised before."""
        fused = torch.is_grad_enabled() and all(hasattr(p, "main_grad") for p in parameters)
        self._module.fuse_wgrad_accumulation = fused
        leaves = fused or self._delay
        self._bind(self._leaves_of(parameters) if leaves else [_matrix(p) for p in parameters])
        if quantized is None:
            result: Tensor = self._module(rows, splits, is_first_microbatch=self._first(parameters))
        else:
            self._module._fp8_workspaces.update(quantized)
            result = self._module(rows, splits, is_first_microbatch=False)  # takes what it finds there
            self._module._fp8_workspaces.clear()
        if fused:
            claim_in_backward(result, parameters)
        return result

    def gradient_later(self) -> Later:
        """What computes the weights' gradients of the pass just made, once its backward has been here.

        The gradients as a stack, or None where they were added to `main_grad`.
        """
        fused, leaves = self._module.fuse_wgrad_accumulation, self._leaves

        def compute() -> Tensor | None:
            # A later pass, such as an evaluation, may have set these otherwise.
            self._module.fuse_wgrad_accumulation = fused
            self._bind(leaves)
            self._module.backward_dw()
            if fused:
                return None
            gradients = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            return torch.stack([each for each in gradients if each is not None])

        return compute

    def _first(self, parameters: Sequence[nn.Parameter]) -> bool | None:
        """Transformer Engine's `is_first_microbatch`: None to quantise anew, False to use a kept copy if any.

        Never True, which would also overwrite `main_grad`.
        """
        if self._cached is None or not torch.is_grad_enabled():
            return None
        valid = self._cached.same(parameters)
        if not valid:
            self._module._fp8_workspaces.clear()
        return None if valid is None else False

    def _bind(self, weights: Sequence[Tensor]) -> None:
        for index, weight in enumerate(weights):
            self._module.__dict__[f"weight{index}"] = weight

    def _leaves_of(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """Leaves that view ours and whose `main_grad` views ours, so that no gradient enters the graph."""
        if len(self._leaves) != len(parameters) or self._leaves[0].data_ptr() != parameters[0].data_ptr():
            self._leaves = tuple(nn.Parameter(_matrix(parameter.detach())) for parameter in parameters)
            self._targets = ()
        targets = tuple(getattr(parameter, "main_grad", None) for parameter in parameters)
        if len(targets) != len(self._targets) or any(map(is_not, targets, self._targets)):
            self._targets = targets
            for leaf, target in zip(self._leaves, targets, strict=True):
                if target is not None:
                    leaf.main_grad = target.view(leaf.shape)  # type: ignore[attr-defined]
        return self._leaves


class _StepOfWeights:
    """Whether weights are those of the last call: within one open step of their gradient buffer, unwritten.

    Two signs, since a kept copy of weights that have changed is a silent fault: the step, which the buffer
    opens and closes around all updates (however they write), and the weights' version, which every in-place
    change by torch raises (loading, for instance).
    """

    def __init__(self) -> None:
        self._known: tuple[int, int, int] | None = None

    def same(self, weights: Sequence[Tensor]) -> bool | None:
        """None where no step is open: then nothing may be kept."""
        step: OpenStep | None = getattr(weights[0], "open_step", None)
        if step is None or step.number is None:
            self._known = None
            return None
        before, self._known = self._known, (step.number, weights[0]._version, weights[0].data_ptr())
        return before == self._known


def _matrix(weight: Tensor) -> Tensor:
    """A weight as the matrix `[out, in]`: gate-up `[2, F, H]` becomes `[2F, H]`, without a copy."""
    return weight.flatten(0, -2)
