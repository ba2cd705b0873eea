"""The real transport: communicators over torch.distributed (gloo for CPU tensors, NCCL for CUDA tensors).

`torch_world(...)` joins the ranks and yields a `TorchWorld`, whose `split` makes one backend group per named
group. Nothing here reads the environment: the launcher passes rank, size and address. What a backend lacks is
expressed by what it has: uneven all-gathers are all-to-alls on gloo; bool and 8-bit floats travel as bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isozyme.core.errors import CommunicationError
from isozyme.parallel.communicator import (
    Call,
    Communicator,
    Finished,
    Pending,
    SingleCommunicator,
)

_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed the two; 2.11 knows the old names only.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_MOVED_AS_BYTES = frozenset(
    dtype
    for name in ("bool", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2")
    if (dtype := getattr(torch, name, None)) is not None
)


@contextmanager
def torch_world(
    *,
    rank: int,
    world_size: int,
    init_method: str,
    device: torch.device | str = "cpu",
    timeout: timedelta = timedelta(minutes=10),
) -> Iterator[TorchWorld]:
    """Join the other ranks, and leave them at the end of the block.

    Args:
        rank: this rank.
        world_size: the number of ranks.
        init_method: where to meet: `tcp://host:port` (rank 0 listens there, unless torchrun already does) or
            `file:///path` (a file that does not exist yet).
        device: the device that this rank computes on; for CUDA it becomes the current one.
        timeout: how long a call may wait for its peers.

    Raises:
        CommunicationError: if the ranks do not meet within the timeout.
    """
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"the ranks must meet before anything else: rank={rank}, world_size={world_size}, "
            f"init_method={init_method}; {_first_line(error)}. Check that all ranks run and reach "
            "that address."
        ) from error
    try:
        yield TorchWorld(where, timeout)
    finally:
        dist.destroy_process_group()


class TorchWorld:
    """All ranks of torch.distributed's default group (the `World` of a `ProcessGroups`).

    Args:
        device: the device that this rank computes on.
        timeout: how long a call of a group may wait for its peers.
    """

    def __init__(
        self, device: torch.device | str = "cpu", timeout: timedelta = timedelta(minutes=10)
    ) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.device = torch.device(device)
        self._timeout = timeout

    def split(self, name: str, partition: Sequence[tuple[int, ...]]) -> Communicator:
        """The communicator of this rank's part. Every rank calls it with the same partition of all ranks.

        Raises:
            ValueError: if the partition lacks this rank.
        """
        mine: Communicator | None = None
        for part in partition:
            if len(part) == 1:
                if part[0] == self.rank:
                    mine = SingleCommunicator(name, self.rank)
                continue
            group = dist.new_group(list(part), timeout=self._timeout)
            if self.rank in part:
                mine = TorchCommunicator(name, part, self.rank, group, self.device)
        if mine is None:
            raise ValueError(
                f"a split must name every rank once: name={name}, partition={list(partition)} lacks "
                f"rank {self.rank}."
            )
        return mine

    def whole(self, name: str = "world") -> Communicator:
        """A communicator over all ranks."""
        return self.split(name, [tuple(range(self.size))])


class TorchCommunicator(Communicator):
    """One rank's view of a torch.distributed group.

    Args:
        name: the axes of the group.
        ranks: its global ranks, ascending.
        rank: the global rank of this process.
        group: the backend group.
        device: the device that this rank computes on.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], rank: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__(name, ranks, tuple(ranks).index(rank))
        self.group, self.device = group, device

    def _start(self, call: Call) -> Pending:
        with torch.no_grad(), _Named(self, call):
            if call.kind == "object":
                return Finished(self._objects(call.payload))
            return _TorchPending(self, call, self._work(call))

    def _start_together(self, calls: Sequence[Call]) -> list[Pending]:
        if not calls:
            return []
        with torch.no_grad(), _Named(self, calls[0]):
            operations = [
                dist.P2POp(
                    dist.isend if call.kind == "send" else dist.irecv,
                    _movable(call.input),
                    group=self.group,
                    group_peer=call.peer,
                )
                for call in calls
            ]
            works = dist.batch_isend_irecv(operations)
        return [_TorchPending(self, calls[min(i, len(calls) - 1)], work) for i, work in enumerate(works)]

    def _objects(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def _work(self, call: Call) -> Any:
        group, kind = self.group, call.kind
        if kind == "barrier":
            ids = [self.device.index] if self.device.type == "cuda" else None
            return dist.barrier(group=group, async_op=True, device_ids=ids)
        assert call.input is not None
        assert call.output is not None
        if kind in ("all_reduce", "reduce_scatter"):
            return self._reduction(call, call.input, call.output)
        given, output = _movable(call.input), _movable(call.output)
        if kind == "all_gather":
            return self._all_gather(call, given, output)
        if kind == "all_to_all":
            assert call.output_sizes is not None
            assert call.input_sizes is not None
            return dist.all_to_all_single(
                output, given, list(call.output_sizes), list(call.input_sizes), group=group, async_op=True
            )
        if kind == "broadcast":
            return dist.broadcast(output, group=group, group_src=call.peer, async_op=True)
        if kind == "send":
            return dist.isend(given, group=group, group_dst=call.peer)
        assert kind == "recv"
        return dist.irecv(output, group=group, group_src=call.peer)

    def _reduction(self, call: Call, given: Tensor, output: Tensor) -> Any:
        op = _OPS[call.op]
        if given.dtype == torch.bool:  # as bytes 0 and 1, of which the sum is the maximum (a logical or)
            given, output = given.view(torch.uint8), output.view(torch.uint8)
            op = _OPS["min" if call.op == "min" else "max"]
        if call.kind == "all_reduce":
            return dist.all_reduce(output, op, group=self.group, async_op=True)
        sizes = call.input_sizes
        assert sizes is not None
        if len(set(sizes)) == 1:
            return _reduce_scatter_single(output, given, op, group=self.group, async_op=True)
        return dist.reduce_scatter(
            output, list(given.split(list(sizes))), op, group=self.group, async_op=True
        )

    def _all_gather(self, call: Call, given: Tensor, output: Tensor) -> Any:
        sizes = call.output_sizes
        assert sizes is not None
        if len(set(sizes)) == 1:
            return _all_gather_single(output, given, group=self.group, async_op=True)
        if given.is_cuda:
            return dist.all_gather(list(output.split(list(sizes))), given, group=self.group, async_op=True)
        # gloo gathers equal shapes only; sending one's rows to each rank moves the same bytes.
        copies = given.repeat(self.size, *[1] * (given.ndim - 1))
        return dist.all_to_all_single(
            output, copies, list(sizes), [given.shape[0]] * self.size, group=self.group, async_op=True
        )


class _TorchPending(Pending):
    def __init__(self, comm: TorchCommunicator, call: Call, work: Any) -> None:
        self._comm, self._call, self._work = comm, call, work

    def wait(self) -> Any:
        if self._work is not None:
            with _Named(self._comm, self._call):
                self._work.wait()
            self._work = None
        return self._call.output


class _Named:
    """Turns an error of the backend into one that names the call, the group and this rank."""

    def __init__(self, comm: TorchCommunicator, call: Call) -> None:
        self._comm, self._call = comm, call

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (RuntimeError, ValueError)) and not isinstance(error, CommunicationError):
            comm = self._comm
            raise CommunicationError(
                f"a call failed: {self._call.describe()} over {comm.name} on rank {comm.ranks[comm.rank]} of "
                f"ranks {list(comm.ranks)}; {_first_line(error)}. Unless the backend refuses the "
                "call itself, a peer is gone, late by more than the timeout, or makes another call: see the "
                "logs of the other ranks."
            ) from error


def _movable(tensor: Tensor | None) -> Tensor:
    """The same memory in a dtype that backends move."""
    assert tensor is not None
    return tensor.view(torch.uint8) if tensor.dtype in _MOVED_AS_BYTES else tensor


def _first_line(error: BaseException) -> str:
    """What the backend says, without its source line and its general advice."""
    line = str(error).strip().split("\n", 1)[0]
    return re.sub(r"^\[\S+:\d+\] |\. This is typically caused by.*", "", line).rstrip(".")
