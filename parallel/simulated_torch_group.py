"""A process group of torch.distributed whose members are simulated ranks.

Each operation that torch asks of a process group becomes one `Call` of the simulated communicator, so the
ranks are matched, scheduled and traced as in any simulated world. Torch 2.13 renamed some of the operations;
both names are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from isozyme.core.errors import CommunicationError
from isozyme.parallel.communicator import Call, Kind
from isozyme.parallel.simulated import SimulatedCommunicator, SimulatedWorld
from isozyme.parallel.simulated_torch_calls import Calls, reduction
from isozyme.parallel.simulated_torch_work import SimulatedWork

_ProcessGroup: Any = dist.ProcessGroup
"""The stubs of its methods differ between the versions of torch."""


class SimulatedProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """One simulated rank's view of a process group.

    Args:
        world: the rank.
        key: the name that torch gave the group, equal on all members.
        ranks: the global ranks of the group.
    """

    def __init__(self, world: SimulatedWorld, key: str, ranks: Sequence[int]) -> None:
        super().__init__(ranks.index(world.rank), len(ranks))
        self.world, self._key, self._ranks = world, key, tuple(ranks)
        self._calls = Calls(world.rank, ranks)
        self._description = ""
        self._joined: SimulatedCommunicator | None = None

    # --- What torch asks about a group

    def getBackendName(self) -> str:
        """The name of the backend."""
        return "simulated"

    @property
    def group_name(self) -> Any:
        """The name that torch knows the group by."""
        return self._key

    @property
    def group_desc(self) -> str:
        """What the user calls the group."""
        return self._description

    def _set_group_name(self, name: Any) -> None:
        assert name == self._key

    def _set_group_desc(self, desc: str) -> None:
        """Named, a group is complete: it meets its other members."""
        self._description = desc
        named = {"default_pg": "world", "undefined": f"group {self._key}"}
        self._joined = self.world.join(self._key, named.get(desc, desc), self._ranks)

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: Any = None,  # noqa: ARG002
        pg_options: Any = None,  # noqa: ARG002
        group_name: Any = None,
        group_desc: str | None = None,
    ) -> SimulatedProcessGroup | None:
        """Torch 2.13 lets the default group make the others, whatever backend they ask for."""
        if self.world.rank not in ranks:
            return None
        group = SimulatedProcessGroup(self.world, group_name, ranks)
        group._set_group_desc(group_desc or "undefined")
        return group

    def shutdown(self) -> None:
        """Nothing is held."""

    def abort(self) -> None:
        """Nothing is held."""

    # --- Collectives

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> SimulatedWork:
        """Reduce each tensor over the ranks, in place."""
        op = reduction(opts)
        calls = [Call(kind="all_reduce", input=self._whole("all_reduce", x), op=op) for x in tensors]
        return self._work([(call, [x]) for call, x in zip(calls, tensors, strict=True)], tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> SimulatedWork:
        """Reduce a tensor to the root, in place."""
        (tensor,) = tensors
        given = self._whole("reduce", tensor)
        call = Call(kind="reduce", input=given, op=reduction(opts), peer=opts.rootRank)
        return self._work([(call, tensors)], tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> SimulatedWork:
        """Replace a tensor by the root's."""
        (tensor,) = tensors
        call = Call(kind="broadcast", input=self._whole("broadcast", tensor), peer=opts.rootRank)
        return self._work([(call, tensors)], tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:  # noqa: ARG002
        """Gather equal shapes into one tensor."""
        return self._work([(self._calls.all_gather([output], input), [output])], [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> SimulatedWork:
        """Several all-gathers at once."""
        pairs = list(zip(outputs, inputs, strict=True))
        return self._work([(self._calls.all_gather([out], x), [out]) for out, x in pairs], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> SimulatedWork:
        """Gather into a list of tensors, which may differ in shape."""
        pairs = list(zip(output_lists, inputs, strict=True))
        outputs = [tensor for tensors in output_lists for tensor in tensors]
        return self._work([(self._calls.all_gather(tensors, x), tensors) for tensors, x in pairs], outputs)

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> SimulatedWork:
        """Gather several tensors; torch lists the outputs by rank."""
        return self.allgather(list(zip(*output_lists, strict=True)), inputs)

    def gather(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> SimulatedWork:
        """Gather equal shapes into a list on the root."""
        (given,) = inputs
        targets = list(output_lists[0]) if output_lists else []
        self._calls.same_dtype("gather", [given, *targets])
        call = Call(kind="gather", input=self._whole("gather", given), peer=opts.rootRank)
        return self._work([(call, targets)], targets)

    def scatter(
        self, outputs: Sequence[Tensor], input_lists: Sequence[Sequence[Tensor]], opts: Any
    ) -> SimulatedWork:
        """Give each rank one of the root's tensors."""
        (output,) = outputs
        given = list(input_lists[0]) if input_lists else []
        return self._work([(self._calls.scatter(output, given, opts.rootRank), outputs)], outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        """Reduce, and keep this rank's share of the rows."""
        return self._work([(self._calls.reduce_scatter(output, [input], opts), [output])], [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SimulatedWork:
        """Several reduce-scatters at once."""
        pairs = list(zip(outputs, inputs, strict=True))
        return self._work([(self._calls.reduce_scatter(out, [x], opts), [out]) for out, x in pairs], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: Sequence[Tensor], input_lists: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> SimulatedWork:
        """Reduce a list of tensors, which may differ in shape, and keep this rank's."""
        pairs = list(zip(outputs, input_lists, strict=True))
        return self._work(
            [(self._calls.reduce_scatter(out, given, opts), [out]) for out, given in pairs], outputs
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        opts: Any = None,  # noqa: ARG002
    ) -> SimulatedWork:
        """Send rows of the input to each rank; rows of the output come from each rank."""
        call = self._calls.all_to_all_rows(output, input, output_split_sizes, input_split_sizes)
        return self._work([(call, [output])], [output])

    alltoall_base = all_to_all_single

    def alltoall(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> SimulatedWork:
        """Send one tensor to each rank and receive one from each; sizes count elements."""
        return self._work([(self._calls.all_to_all_lists(outputs, inputs), outputs)], outputs)

    def barrier(self, opts: Any = None) -> SimulatedWork:  # noqa: ARG002
        """Wait for all ranks."""
        return self._work([(Call(kind="barrier"), [])])

    # --- Messages

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> SimulatedWork:
        """Send to a rank of the group."""
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> SimulatedWork:
        """Receive from a rank of the group."""
        return self._message("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> SimulatedWork:  # noqa: ARG002
        """Refused: which message came first would depend on the schedule."""
        raise CommunicationError(
            f"a simulated receive must name its source: rank={self.world.rank}, src=None. Give src."
        )

    # --- From tensors to calls

    def _work(
        self, calls: Sequence[tuple[Call, Sequence[Tensor]]], outputs: Sequence[Tensor] = ()
    ) -> SimulatedWork:
        assert self._joined is not None
        return SimulatedWork([(self._joined._start(call), targets) for call, targets in calls], outputs)

    def _whole(self, kind: str, tensor: Tensor) -> Tensor:
        return self._calls.contiguous(kind, [tensor])[0]

    def _message(self, kind: Kind, tensors: Sequence[Tensor], peer: int, tag: int) -> SimulatedWork:
        (tensor,) = tensors
        call = Call(kind=kind, input=self._whole(kind, tensor), peer=peer, tag=tag)
        return self._work([(call, tensors if kind == "recv" else [])], tensors)
