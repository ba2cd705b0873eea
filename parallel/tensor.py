"""Tensor parallelism with sequence parallelism: linear maps and an embedding cut over the ranks of a group.

Between these functions each rank holds its part of the sequence; inside, all ranks' parts and its share of
the features. Column-parallel maps gather the tokens, row-parallel ones add up the ranks' partial results and
keep their own tokens, so the two sides of a block cost what one all-reduce would.

Sources: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053) for the cut of the weights; Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198) for that of the sequence.

Rows are gathered rank by rank: `[n, ...]` on each of R ranks becomes `[R n, ...]`. For maps that treat every
token alike the order does not matter. Where it does, `to_sequence` puts whole windows together and
`from_sequence` takes them apart again. A group of one rank has all of it already, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from isozyme.core.errors import ConfigError, divisors
from isozyme.parallel.collectives import gather_from_group, reduce_scatter_to_group
from isozyme.parallel.communicator import Communicator


def sequence_part(x: Shaped[Tensor, "B S *rest"], group: Communicator) -> Shaped[Tensor, "B P *rest"]:
    """This rank's contiguous part of each window, as a view; for what has no gradient (masks, ids).

    Args:
        x: whole windows, the same on all ranks.
        group: the tensor-parallel ranks.

    Raises:
        ConfigError: if their number does not divide S.
    """
    length = _part_length(x.shape[1], group)
    return x.narrow(1, group.rank * length, length)


def to_sequence(rows: Shaped[Tensor, "RB P *rest"], group: Communicator) -> Shaped[Tensor, "B S *rest"]:
    """Gathered parts of windows, `(rank window) part`, as whole windows, `window (rank part)`."""
    return rows if group.size == 1 else rearrange(rows, "(r b) p ... -> b (r p) ...", r=group.size)


def from_sequence(windows: Shaped[Tensor, "B S *rest"], group: Communicator) -> Shaped[Tensor, "RB P *rest"]:
    """The inverse of `to_sequence`: the parts of whole windows, rank by rank.

    Raises:
        ConfigError: if the number of ranks does not divide S.
    """
    part = _part_length(windows.shape[1], group)
    return windows if group.size == 1 else rearrange(windows, "b (r p) ... -> (r b) p ...", p=part)


def _part_length(length: int, group: Communicator) -> int:
    """The tokens of a window that one rank holds."""
    part, rest = divmod(length, group.size)
    if rest:
        raise ConfigError(
            f"tp must divide a window's tokens on each rank: {length} % {group.size} = {rest}. "
            f"Choose tp from {', '.join(map(str, divisors(length)))}, or another data.window."
        )
    return part


def gather_tokens(x: Float[Tensor, "N *row"], group: Communicator) -> Float[Tensor, "RN *row"]:
    """All ranks' tokens, rank by rank, for computations that differ between the ranks.

    Forward: all-gather, each rank sending n (R-1) bytes for n bytes of x. Backward: reduce-scatter of the
    same volume. Conjugate: `scatter_sum`.
    """
    return x if group.size == 1 else gather_from_group(x, group)


def scatter_sum(partial: Float[Tensor, "RN *row"], group: Communicator) -> Float[Tensor, "N *row"]:
    """The sum of all ranks' partial results, of which each rank keeps its own tokens.

    Forward: reduce-scatter in the dtype of `partial`, each rank sending n (R-1) bytes for n bytes of result.
    Backward: all-gather of the same volume. Conjugate: `gather_tokens`.
    """
    return partial if group.size == 1 else reduce_scatter_to_group(partial, group)


def column_parallel_linear(
    x: Float[Tensor, "N *row I"], weights: Sequence[Float[Tensor, "_ I"]], group: Communicator
) -> tuple[Float[Tensor, "RN *row _"], ...]:
    """`y = x_of_all_ranks @ weight.T` for each weight: this rank's share of the features for all tokens.

    Forward: one all-gather whatever the number of weights, each rank sending n (R-1) bytes for n bytes of x.
    Backward: the tokens are gathered again rather than kept, while the gradient of x is computed, and that
    is reduce-scattered while those of the weights are: 2 n (R-1) bytes. Its slow twin is `F.linear` on
    `gather_tokens(x)`. It can be differentiated once.

    Args:
        x: this rank's tokens.
        weights: this rank's rows `[O / R, I]` of each whole weight (or rows that several ranks hold).
        group: the R tensor-parallel ranks, which call it together with equally many tokens.
    """
    result: tuple[Tensor, ...] = _ColumnParallel.apply(x, group, *weights)  # type: ignore[no-untyped-call]
    return result


def row_parallel_linear(
    x: Float[Tensor, "RN *row _"], weight: Float[Tensor, "O _"], group: Communicator
) -> Float[Tensor, "N *row O"]:
    """`y = Σ_ranks x @ weight.T` for this rank's tokens.

    The partial results are rounded to the dtype of x before they are added, as is the custom: adding them in
    fp32 would double the volume.

    Args:
        x: this rank's share `I / R` of the features, for all ranks' tokens, rank by rank.
        weight: this rank's columns `[O, I / R]` of the whole weight.
        group: the R tensor-parallel ranks, which call it together.

    Returns:
        Forward: reduce-scatter, each rank sending n (R-1) bytes for n bytes of y. Backward: all-gather of the
        same volume.
    """
    return scatter_sum(F.linear(x, weight), group)


def vocabulary_parallel_embedding(
    tokens: Int[Tensor, "RN *row"], weight: Float[Tensor, "_ H"], group: Communicator
) -> Float[Tensor, "N *row H"]:
    """The vectors of this rank's tokens, from a table of which each rank holds its rows.

    Each rank looks up what it has of all tokens, zeros elsewhere; the sum of that is exact. Forward:
    reduce-scatter, each rank sending n (R-1) bytes for n bytes of result. Backward: all-gather of the same
    volume.

    Args:
        tokens: ids of all ranks' tokens, rank by rank, the same on all ranks.
        weight: rows `[V / R, H]`; rank r has those from `r V / R`.
        group: the R tensor-parallel ranks, which call it together.
    """
    if group.size == 1:
        return F.embedding(tokens, weight)
    rows, mine = vocabulary_rows(tokens, weight.shape[0], group)
    found = F.embedding(rows.masked_fill(~mine, 0), weight)
    return scatter_sum(found.masked_fill(~mine[..., None], 0.0), group)


def vocabulary_rows(
    ids: Int[Tensor, "*shape"], num_rows: int, group: Communicator
) -> tuple[Int[Tensor, "*shape"], Bool[Tensor, "*shape"]]:
    """For each id its row in this rank's part of a table, and whether it is this rank that looks it up.

    An id that no rank has is given to the first rank if it is negative, else to the last, so that the look-up
    fails there as it would in the whole table; nowhere does it count as zero.

    Args:
        ids: of the whole vocabulary.
        num_rows: rows of each rank's part.
        group: the ranks that hold the parts, in order.
    """
    rows = ids - group.rank * num_rows
    mine = torch.ones_like(ids, dtype=torch.bool)
    if group.rank > 0:
        mine &= rows >= 0
    if group.rank < group.size - 1:
        mine &= rows < num_rows
    return rows, mine


class _ColumnParallel(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Communicator, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.group = group
        whole = x if group.size == 1 else group.all_gather(x)
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group: Communicator = ctx.group
        x, *weights = ctx.saved_tensors
        need_x, _, *need_weights = ctx.needs_input_grad
        alone = group.size == 1
        gathering = group.all_gather_async(x) if any(need_weights) and not alone else None
        flat = [grad.flatten(0, -2) for grad in grads]
        grad_x = reducing = None
        if need_x:
            total = flat[0] @ weights[0]
            for grad, weight in zip(flat[1:], weights[1:], strict=True):
                total.addmm_(grad, weight)  # the product adds, and rounds once
            grad_x = total.view(*grads[0].shape[:-1], total.shape[1])
            reducing = None if alone else group.reduce_scatter_async(grad_x)
        whole = x if gathering is None else gathering.wait()
        grad_weights = [
            grad.T @ whole.flatten(0, -2) if needed else None
            for grad, needed in zip(flat, need_weights, strict=True)
        ]
        return (grad_x if reducing is None else reducing.wait(), None, *grad_weights)
