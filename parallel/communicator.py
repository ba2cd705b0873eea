"""The communicator: what one rank can say to the others of one group.

`Communicator` is the base class of every transport. It checks the arguments, allocates the output and
describes the operation as one `Call`; a transport implements `_start(call)` and nothing else. A simulated
world compares the calls of its ranks, and a trace is the list of calls made.

Every collective is made by all ranks of the group in the same order. None of these has a gradient: the
autograd pairs are in `isozyme.parallel.collectives`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isozyme.parallel.calls import Call as Call
from isozyme.parallel.calls import Finished as Finished
from isozyme.parallel.calls import ForeignOp as ForeignOp
from isozyme.parallel.calls import Kind as Kind
from isozyme.parallel.calls import Pending as Pending
from isozyme.parallel.calls import ReduceOp as ReduceOp
from isozyme.parallel.calls import Together


class Communicator(ABC):
    """One rank's view of one group of ranks.

    Args:
        name: the axis or axes that the group runs over, such as `ep` (for messages and traces).
        ranks: the global ranks of the group, ascending.
        rank: the index of this rank within `ranks`.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank

    @property
    def size(self) -> int:
        """The number of ranks of the group."""
        return len(self.ranks)

    @abstractmethod
    def _start(self, call: Call) -> Pending:
        """Begin a checked call; its result is `call.output` (the list of objects for `object`)."""

    def all_reduce_async(self, tensor: Tensor, op: ReduceOp = "sum") -> Pending:
        """Start `all_reduce`."""
        self._contiguous(tensor, "all_reduce")
        return self._start(Call(kind="all_reduce", input=tensor, output=tensor, op=op))

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Replace `tensor`, in place, by the sum (max, min) over all ranks. Bytes sent: 2 n (size-1)/size."""
        result: Tensor = self.all_reduce_async(tensor, op).wait()
        return result

    def all_gather_async(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Pending:
        """Start `all_gather`."""
        self._rows(tensor, "all_gather")
        counts = self._sizes(sizes, tensor.shape[0], "all_gather", "sizes")
        self._agree(counts[self.rank], tensor.shape[0], "all_gather", f"sizes[{self.rank}]")
        output = tensor.new_empty((sum(counts), *tensor.shape[1:]))
        return self._start(
            Call(kind="all_gather", input=tensor.contiguous(), output=output, output_sizes=tuple(counts))
        )

    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Every rank's rows, in rank order along dim 0.

        Args:
            tensor: `[n, ...]`, this rank's rows.
            sizes: rows of each rank, the same list on all ranks; by default all have as many as this one.

        Returns:
            `[sum(sizes), ...]`. Bytes received: the rows of the others.

        Raises:
            ValueError: if the sizes are not one for each rank, or this rank's is not n.
        """
        result: Tensor = self.all_gather_async(tensor, sizes).wait()
        return result

    def reduce_scatter_async(
        self, tensor: Tensor, sizes: Sequence[int] | None = None, op: ReduceOp = "sum"
    ) -> Pending:
        """Start `reduce_scatter`."""
        self._rows(tensor, "reduce_scatter")
        if sizes is None:
            if tensor.shape[0] % self.size:
                raise ValueError(
                    f"reduce_scatter over {self.name}: {tensor.shape[0]} rows are not divisible by "
                    f"{self.size} ranks. Give sizes."
                )
            sizes = [tensor.shape[0] // self.size] * self.size
        counts = self._sizes(sizes, 0, "reduce_scatter", "sizes")
        self._agree(sum(counts), tensor.shape[0], "reduce_scatter", "sum(sizes)")
        output = tensor.new_empty((counts[self.rank], *tensor.shape[1:]))
        return self._start(
            Call(
                kind="reduce_scatter",
                input=tensor.contiguous(),
                output=output,
                input_sizes=tuple(counts),
                op=op,
            )
        )

    def reduce_scatter(
        self, tensor: Tensor, sizes: Sequence[int] | None = None, op: ReduceOp = "sum"
    ) -> Tensor:
        """The sum over ranks of `tensor` `[sum(sizes), ...]`; each rank gets its own `sizes[rank]` rows.

        Raises:
            ValueError: if the sizes are not one for each rank, or not those of the rows; without sizes, if
                the ranks do not divide the rows.
        """
        result: Tensor = self.reduce_scatter_async(tensor, sizes, op).wait()
        return result

    def all_to_all_async(
        self,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Pending:
        """Start `all_to_all`."""
        self._rows(tensor, "all_to_all")
        if (output_splits is None) != (input_splits is None):
            raise ValueError(
                f"all_to_all over {self.name}: give both output_splits and input_splits, or neither."
            )
        if input_splits is None and tensor.shape[0] % self.size:
            raise ValueError(
                f"all_to_all over {self.name}: {tensor.shape[0]} rows are not divisible by {self.size} "
                "ranks. Give output_splits and input_splits."
            )
        share = tensor.shape[0] // self.size
        sent = self._sizes(input_splits, share, "all_to_all", "input_splits")
        received = self._sizes(output_splits, share, "all_to_all", "output_splits")
        self._agree(sum(sent), tensor.shape[0], "all_to_all", "sum(input_splits)")
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        return self._start(
            Call(
                kind="all_to_all",
                input=tensor.contiguous(),
                output=output,
                input_sizes=tuple(sent),
                output_sizes=tuple(received),
            )
        )

    def all_to_all(
        self,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Tensor:
        """Send `input_splits[r]` rows to each rank r and receive `output_splits[r]` rows from it.

        Args:
            tensor: `[sum(input_splits), ...]`, rows for rank 0 first.
            output_splits: rows received from each rank; equal shares by default.
            input_splits: rows sent to each rank; equal shares by default.

        Returns:
            `[sum(output_splits), ...]`, rows from rank 0 first.
        """
        result: Tensor = self.all_to_all_async(tensor, output_splits, input_splits).wait()
        return result

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Replace `tensor`, in place, by that of group rank `src`."""
        self._contiguous(tensor, "broadcast")
        self._peer(src, "broadcast")
        result: Tensor = self._start(Call(kind="broadcast", input=tensor, output=tensor, peer=src)).wait()
        return result

    def send_async(self, tensor: Tensor, dst: int) -> Pending:
        """Start sending `tensor` to group rank `dst`."""
        self._peer(dst, "send")
        return self._start(Call(kind="send", input=tensor.contiguous(), output=tensor, peer=dst))

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send `tensor` to group rank `dst`."""
        self.send_async(tensor, dst).wait()

    def recv_async(self, tensor: Tensor, src: int) -> Pending:
        """Start filling `tensor` from group rank `src`."""
        self._contiguous(tensor, "recv")
        self._peer(src, "recv")
        return self._start(Call(kind="recv", input=tensor, output=tensor, peer=src))

    def recv(self, tensor: Tensor, src: int) -> Tensor:
        """Fill `tensor` from group rank `src`, and return it."""
        result: Tensor = self.recv_async(tensor, src).wait()
        return result

    def exchange_async(
        self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]
    ) -> Pending:
        """Start `exchange`."""
        calls = []
        for tensor, dst in sends:
            self._peer(dst, "send")
            calls.append(Call(kind="send", input=tensor.contiguous(), output=tensor, peer=dst))
        for tensor, src in recvs:
            self._contiguous(tensor, "recv")
            self._peer(src, "recv")
            calls.append(Call(kind="recv", input=tensor, output=tensor, peer=src))
        return Together(self._start_together(calls), [tensor for tensor, _ in recvs])

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]
    ) -> list[Tensor]:
        """Send and receive several tensors at once, without an order among them that could deadlock.

        Two neighbours that send to each other must exchange: two plain sends would wait for each other. Under
        NCCL, all ranks of the group must have made a collective before the first exchange (a barrier, say).

        Args:
            sends: tensors and the group ranks that they go to.
            recvs: tensors to be filled and the group ranks that they come from.

        Returns:
            The tensors of `recvs`, filled.
        """
        result: list[Tensor] = self.exchange_async(sends, recvs).wait()
        return result

    def _start_together(self, calls: Sequence[Call]) -> list[Pending]:
        """Begin sends and receives that may cross; a transport may group them."""
        return [self._start(call) for call in calls]

    def barrier(self) -> None:
        """Return when every rank of the group has called it."""
        self._start(Call(kind="barrier")).wait()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's Python object, in rank order (small ones: counts, messages, names)."""
        result: list[Any] = self._start(Call(kind="object", payload=value)).wait()
        return result

    def _sizes(self, sizes: Sequence[int] | None, default: int, kind: str, name: str) -> list[int]:
        found = [default] * self.size if sizes is None else [int(size) for size in sizes]
        if len(found) != self.size or any(size < 0 for size in found):
            raise ValueError(
                f"{kind} over {self.name}: {name} needs one non-negative number for each of the {self.size} "
                f"ranks: {name}={found}."
            )
        return found

    def _agree(self, counted: int, rows: int, kind: str, name: str) -> None:
        if counted != rows:
            raise ValueError(
                f"{kind} over {self.name}, rank {self.rank} of {self.size}: {name}={counted}, but the tensor "
                f"has {rows} rows."
            )

    def _rows(self, tensor: Tensor, kind: str) -> None:
        if tensor.ndim == 0:
            raise ValueError(f"{kind} over {self.name} needs a tensor with at least one dim, not a scalar.")

    def _contiguous(self, tensor: Tensor, kind: str) -> None:
        if not tensor.is_contiguous():
            raise ValueError(
                f"{kind} over {self.name} works in place and needs a contiguous tensor: "
                f"shape={tuple(tensor.shape)}, stride={tensor.stride()}. Pass tensor.contiguous()."
            )

    def _peer(self, peer: int, kind: str) -> None:
        if not 0 <= peer < self.size:
            raise ValueError(f"{kind} over {self.name}: no group rank {peer}; there are {self.size} ranks.")


class SingleCommunicator(Communicator):
    """The ordinary communicator of a group of one rank: every collective is a copy."""

    def __init__(self, name: str = "self", rank: int = 0) -> None:
        super().__init__(name, (rank,), 0)

    def _start(self, call: Call) -> Pending:
        if call.kind in ("send", "recv"):
            raise ValueError(f"{call.kind} over {self.name}: a group of one rank has no peer.")
        if call.kind == "object":
            return Finished([call.payload])
        if call.output is not None and call.output is not call.input:
            assert call.input is not None
            with torch.no_grad():
                call.output.copy_(call.input)
        return Finished(call.output)
