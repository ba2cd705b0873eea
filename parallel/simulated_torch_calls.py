"""From the tensors that torch.distributed passes to the `Call`s of simulated ranks.

Torch has several forms of one collective (one tensor or a list, equal or unequal); here they become one, and
what a backend would silently misread (strides, dtypes, sizes that do not add up) is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isozyme.core.errors import CommunicationError
from isozyme.parallel.communicator import Call, ForeignOp, ReduceOp

_OPS: dict[Any, ReduceOp | ForeignOp] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}


class Calls:
    """Builds the calls of one rank of one group.

    Args:
        rank: the global rank.
        ranks: the global ranks of the group.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.ranks = rank, tuple(ranks)
        self.size, self.member = len(self.ranks), self.ranks.index(rank)

    def all_gather(self, outputs: Sequence[Tensor], given: Tensor) -> Call:
        """An all-gather into one output, or one for each rank: of equal rows, or of unequal elements."""
        self.same_dtype("all_gather", [given, *outputs])
        (rows,) = self.contiguous("all_gather", [given])
        if len(outputs) == 1 or all(tensor.shape == given.shape for tensor in outputs):
            rows = rows if rows.ndim else rows.reshape(1)
            counts, needed = (rows.shape[0],) * self.size, rows.numel() * self.size
        else:
            rows, counts = rows.reshape(-1), tuple(tensor.numel() for tensor in outputs)
            self._equal("all_gather", "elements of this rank's output", counts[self.member], rows.numel())
            needed = sum(counts)
        total = sum(tensor.numel() for tensor in outputs)
        self._equal("all_gather", "elements of the output", total, needed)
        return Call(kind="all_gather", input=rows, output_sizes=counts)

    def reduce_scatter(self, output: Tensor, given: Sequence[Tensor], opts: Any) -> Call:
        """A reduce-scatter of one input, or one for each rank: of equal rows, or of unequal elements."""
        self.same_dtype("reduce_scatter", [output, *given])
        if len(given) == 1:
            (rows,) = self.contiguous("reduce_scatter", given)
            if rows.ndim == 0 or rows.shape[0] % self.size:
                rows = rows.reshape(-1)
            counts = (rows.shape[0] // self.size,) * self.size
            self._equal("reduce_scatter", "elements of the input", rows.numel(), output.numel() * self.size)
        else:
            rows, counts = flat(given), tuple(tensor.numel() for tensor in given)
            self._equal("reduce_scatter", "elements of the output", output.numel(), counts[self.member])
        return Call(kind="reduce_scatter", input=rows, input_sizes=counts, op=reduction(opts))

    def all_to_all_rows(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
    ) -> Call:
        """An all-to-all of rows; equal shares where the sizes are None or empty."""
        tensors = [output, given]
        self.same_dtype("all_to_all", self.contiguous("all_to_all", tensors))
        sent = self._splits("input_split_sizes", given, input_sizes)
        received = self._splits("output_split_sizes", output, output_sizes)
        self._equal("all_to_all", "rows from itself", received[self.member], sent[self.member])
        return Call(kind="all_to_all", input=given, input_sizes=sent, output_sizes=received)

    def all_to_all_lists(self, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> Call:
        """An all-to-all of one tensor for each rank; the sizes count elements."""
        self.same_dtype("all_to_all", self.contiguous("all_to_all", [*outputs, *given]))
        self._equal("all_to_all", "number of inputs", len(given), self.size)
        self._equal("all_to_all", "number of outputs", len(outputs), self.size)
        sent = tuple(tensor.numel() for tensor in given)
        received = tuple(tensor.numel() for tensor in outputs)
        self._equal("all_to_all", "elements from itself", received[self.member], sent[self.member])
        return Call(kind="all_to_all", input=flat(given), input_sizes=sent, output_sizes=received)

    def scatter(self, output: Tensor, given: Sequence[Tensor], root: int) -> Call:
        """A scatter of the root's tensors (elsewhere there are none); the sizes count elements."""
        self.same_dtype("scatter", [output, *given])
        mine = output.numel()
        if given:
            self._equal("scatter", "elements from itself", mine, given[self.member].numel())
        return Call(
            kind="scatter",
            input=flat(given) if given else output.detach().new_empty(0),
            input_sizes=tuple(tensor.numel() for tensor in given) if given else None,
            output_sizes=tuple(mine if member == root else 0 for member in range(self.size)),
            peer=root,
        )

    def contiguous(self, kind: str, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors, which a backend would read as if they were contiguous."""
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{kind} on rank {self.rank} needs contiguous tensors: shape={tuple(tensor.shape)}, "
                    f"stride={tensor.stride()}. Pass tensor.contiguous()."
                )
        return tensors

    def same_dtype(self, kind: str, tensors: Sequence[Tensor]) -> None:
        """A backend would copy bytes whatever their type."""
        dtypes = sorted({str(tensor.dtype) for tensor in tensors})
        if len(dtypes) > 1:
            raise ValueError(
                f"{kind} on rank {self.rank}: inputs and outputs must have one dtype, not "
                f"{' and '.join(dtypes)}. Convert before the call."
            )

    def _splits(self, name: str, tensor: Tensor, sizes: Sequence[int] | None) -> tuple[int, ...]:
        rows = tensor.shape[0] if tensor.ndim else 0
        if sizes:
            counts = tuple(int(count) for count in sizes)
            self._equal("all_to_all", f"number of {name}", len(counts), self.size)
            self._equal("all_to_all", f"sum({name})", sum(counts), rows)
            return counts
        self._equal("all_to_all", f"{rows} rows % {self.size} ranks without {name}", rows % self.size, 0)
        return (rows // self.size,) * self.size

    def _equal(self, kind: str, name: str, found: int, needed: int) -> None:
        if found != needed:
            raise ValueError(
                f"{kind} on rank {self.rank} (ranks {', '.join(map(str, self.ranks))}): {name} must be "
                f"{needed}, not {found}. Make the sizes and the tensors fit."
            )


def reduction(opts: Any) -> ReduceOp | ForeignOp:
    """The reduction that the options of a call name (the sum if there are none)."""
    if opts is None:
        return "sum"
    kind = getattr(opts.reduceOp, "op", opts.reduceOp)
    if kind not in _OPS:
        raise CommunicationError(
            f"this reduction is not simulated: op={kind}. Choose from {', '.join(_OPS.values())}."
        )
    return _OPS[kind]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all tensors, one after the other."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
