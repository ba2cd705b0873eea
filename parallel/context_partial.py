"""Attention that arrives in parts: an output and its log-sum-exp, into which tile after tile is merged.

`attention_in_parts` is the node of the graph; which keys come, and from where, is said by a `Parts`.

Softmax over two sets of keys is the mean of the two softmaxes weighted by their sums of exponentials (Milakov
and Gimelshein 2018, arXiv:1805.02867), so the order in which keys arrive does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isozyme.core.context import KernelName
from isozyme.parallel.context_kernels import choose_kernel
from isozyme.parallel.context_tiles import Tile, subdivided


class PartialAttention:
    """The attention of this rank's queries to the keys seen so far, in at least fp32.

    Args:
        q: this rank's queries.
        kernel: of the tiles, if it is to be cuDNN's.
    """

    def __init__(self, q: Float[Tensor, "B L N D"], kernel: KernelName = "torch") -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self._q, self._kernel = q, choose_kernel(q, kernel)
        self.out = torch.zeros(q.shape, dtype=wide, device=q.device)
        self.logsumexp = torch.full(q.shape[:-1], -math.inf, dtype=wide, device=q.device)

    def add(self, k: Float[Tensor, "B T M D"], v: Float[Tensor, "B T M D"], plan: Iterable[Tile]) -> None:
        """Merge what the queries see of some keys; `plan` names each pair once."""
        with torch.autocast(self._q.device.type, enabled=False):
            for tile in _fitting(plan, self._kernel.max_rows):
                rows, columns = (tile.windows, tile.queries), (tile.windows, tile.keys)
                out, logsumexp = self._kernel.forward(self._q[rows], k[columns], v[columns], tile.causal)
                merge_(self.out[rows], self.logsumexp[rows], out, logsumexp)


def merge_(
    out: Float[Tensor, "B L N D"],
    logsumexp: Float[Tensor, "B L N"],
    more_out: Float[Tensor, "B L N D"],
    more_logsumexp: Float[Tensor, "B L N"],
) -> None:
    """Replace `out` and `logsumexp` by those over both sets of keys; the first may be empty (-inf)."""
    both = torch.logaddexp(logsumexp, more_logsumexp)
    out.mul_((logsumexp - both).exp_()[..., None])
    out.addcmul_(more_out, (more_logsumexp - both).exp_()[..., None])
    logsumexp.copy_(both)


class PartialGradients:
    """The gradients of `PartialAttention`, tile after tile.

    Args:
        grad: gradient of the output.
        q: this rank's queries.
        out: the output, over all keys.
        logsumexp: over all keys.
        kernel: as for `PartialAttention`.
    """

    def __init__(
        self,
        grad: Float[Tensor, "B L N D"],
        q: Float[Tensor, "B L N D"],
        out: Float[Tensor, "B L N D"],
        logsumexp: Float[Tensor, "B L N"],
        kernel: KernelName = "torch",
    ) -> None:
        self._saved, self._kernel = (grad.contiguous(), q, out, logsumexp), choose_kernel(q, kernel)
        self.q = torch.zeros(q.shape, dtype=logsumexp.dtype, device=q.device)

    def add(
        self,
        k: Float[Tensor, "B T M D"],
        v: Float[Tensor, "B T M D"],
        grad_k: Float[Tensor, "B T M D"],
        grad_v: Float[Tensor, "B T M D"],
        plan: Iterable[Tile],
    ) -> None:
        """Add the gradients that come from some keys to `self.q`, and in place to `grad_k` and `grad_v`."""
        grad, q, out, logsumexp = self._saved
        with torch.autocast(q.device.type, enabled=False):
            for tile in _fitting(plan, self._kernel.max_rows):
                rows, columns = (tile.windows, tile.queries), (tile.windows, tile.keys)
                of_q, of_k, of_v = self._kernel.backward(
                    grad[rows], q[rows], k[columns], v[columns], out[rows], logsumexp[rows], tile.causal
                )
                self.q[rows] += of_q
                grad_k[columns] += of_k
                grad_v[columns] += of_v


@runtime_checkable
class Parts(Protocol):
    """The keys and values that this rank's queries meet, part by part, once in each direction."""

    def attend(
        self, partial: PartialAttention, k: Float[Tensor, "B T M D"], v: Float[Tensor, "B T M D"]
    ) -> None:
        """Add to `partial` all that the queries see, given this rank's own keys and values."""
        ...

    def gradients(
        self, grads: PartialGradients, k: Float[Tensor, "B T M D"], v: Float[Tensor, "B T M D"]
    ) -> tuple[Float[Tensor, "B T M D"], Float[Tensor, "B T M D"]]:
        """Add the same to `grads`; the gradients of this rank's own keys and values, at least fp32."""
        ...


def attention_in_parts(
    q: Float[Tensor, "B L N D"],
    k: Float[Tensor, "B T M D"],
    v: Float[Tensor, "B T M D"],
    parts: Parts,
    kernel: KernelName = "torch",
) -> Float[Tensor, "B L N D"]:
    """The attention that `parts` add up to, in the dtype of `q`; it can be differentiated once.

    Saved are q, k, v, the output and one number a query and head.

    Args:
        q: this rank's queries.
        k: this rank's keys.
        v: this rank's values.
        parts: what the queries meet.
        kernel: as for `PartialAttention`.
    """
    out: Tensor = _AttentionInParts.apply(q, k, v, parts, kernel)  # type: ignore[no-untyped-call]
    return out


class _AttentionInParts(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Parts, kernel: KernelName) -> Tensor:
        partial = PartialAttention(q, kernel)
        parts.attend(partial, k, v)
        out = partial.out.to(q.dtype)
        ctx.parts, ctx.kernel = parts, kernel
        ctx.save_for_backward(q, k, v, out, partial.logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        grads = PartialGradients(grad, q, out, logsumexp, ctx.kernel)
        grad_k, grad_v = ctx.parts.gradients(grads, k, v)
        return grads.q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _fitting(plan: Iterable[Tile], limit: int | None) -> Iterator[Tile]:
    for tile in plan:
        yield from [tile] if limit is None else subdivided(tile, limit)
