"""What the gradient buffer is made of: parameters in flat groups, which are cut into buckets.

A flat group is summed over one set of ranks, a bucket by one call, and with a sharded optimiser each rank
owns one slice of every bucket. Where everything lies is decided by `isozyme.parallel.grad_packing`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isozyme.core.errors import CommunicationError, UsageError
from isozyme.core.topology import Topology
from isozyme.parallel.communicator import Communicator
from isozyme.parallel.process_groups import ProcessGroups, group_axes
from isozyme.parallel.shard_spec import EMBEDDING, ShardSpec


@dataclass(frozen=True, eq=False, kw_only=True)
class Segment:
    """One parameter and its place, in elements, in the flat group."""

    parameter: nn.Parameter
    spec: ShardSpec
    start: int
    stop: int
    order: int
    """Its number in the order in which parameters were given."""

    def view(self, flat: Tensor) -> Tensor:
        """The part of `flat` that belongs to this parameter, in the parameter's shape."""
        return flat[self.start : self.stop].view(self.parameter.shape)


@dataclass(frozen=True, eq=False, kw_only=True)
class FlatGroup:
    """Gradients of parameters of one dtype that are summed over the same ranks, in one contiguous tensor."""

    name: str
    """Axes and dtype, such as `expert edp float32` (for messages)."""
    communicators: tuple[Communicator, ...]
    """The sum over the replicas is the sum over each of these in turn; empty if nobody else has a part."""
    slicers: tuple[Communicator, ...] = ()
    """With a sharded optimiser the groups that deal slices out, one after the other: those of the sum, then
    those whose ranks have the same gradient. Together they are all replicas."""
    num_replicas: int
    """Ranks that hold the same shards."""
    data: Tensor
    segments: tuple[Segment, ...]

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of masters and moments, which is at least that of the gradients."""
        return accumulate_dtype(self.data.dtype)

    @property
    def narrow(self) -> bool:
        """Whether gradients are kept in less than fp32, so that nothing is added to them."""
        return self.data.dtype != self.state_dtype

    def gaps(self) -> list[Tensor]:
        """The parts of `data` that belong to no parameter: alignment, and padding of buckets."""
        found, end = [], 0
        for segment in sorted(self.segments, key=lambda segment: (segment.start, segment.stop)):
            if segment.start > end:
                found.append(self.data[end : segment.start])
            end = segment.stop
        if end < self.data.numel():
            found.append(self.data[end:])
        return found


@dataclass(frozen=True, eq=False, kw_only=True)
class Bucket:
    """A contiguous part of a flat group that is reduced by one call."""

    group: FlatGroup
    segments: tuple[Segment, ...]
    start: int
    stop: int
    """Its end in the flat group, in elements; padded so that every owner's slice is as long."""
    unit: int | None = None
    """The part of the model after whose backward no further gradient comes; None: only the end is sure."""

    @property
    def data(self) -> Tensor:
        """The gradients of the bucket, as a contiguous view."""
        return self.group.data[self.start : self.stop]

    @property
    def own(self) -> slice:
        """What this rank's optimiser updates, in elements of the group: all of the bucket, or a slice."""
        start, stop = self.start, self.stop
        for communicator in self.group.slicers:
            share = (stop - start) // communicator.size
            start += communicator.rank * share
            stop = start + share
        return slice(start, stop)

    def signature(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What ranks that reduce this bucket together must agree on."""
        return tuple((segment.spec.name, tuple(segment.parameter.shape)) for segment in self.segments)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients, masters and moments of a parameter are kept: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def reduce_communicators(spec: ShardSpec, groups: ProcessGroups) -> tuple[Communicator, ...]:
    """The groups of more than one rank over which the gradient of `spec` is summed, one after the other.

    One group over all axes where the manager has it, else one an axis: the sum is the same.
    """
    topology = groups.topology
    axes = {axis for axis in spec.reduce_axes if axis != EMBEDDING}
    found: list[Communicator] = []
    if axes:
        found = _one_or_several(axes, topology, groups)
    if EMBEDDING in spec.reduce_axes:
        found.append(groups.embedding)
    return tuple(communicator for communicator in found if communicator.size > 1)


def copy_communicators(spec: ShardSpec, groups: ProcessGroups) -> tuple[Communicator, ...]:
    """The groups of more than one rank whose ranks hold the same shard *and* have the same gradient of it."""
    axes = {axis for axis, kind in spec.replicas.items() if kind == "identical"}
    found = _one_or_several(axes, groups.topology, groups) if axes else []
    return tuple(communicator for communicator in found if communicator.size > 1)


def _one_or_several(axes: set[str], topology: Topology, groups: ProcessGroups) -> list[Communicator]:
    wanted = topology.size(axes)
    for known in group_axes(topology):
        # A group over more axes has the same ranks if the further axes have size one.
        if axes <= set(known) and topology.size(known) == wanted:
            return [groups[known]]
    return [groups[axis] for axis in topology.grid(axes).axes if axis in axes]


def refuse_frozen(segments: Iterable[Segment]) -> None:
    """Raise a `UsageError` if a parameter requires no gradient (any more)."""
    frozen = [segment.spec.name for segment in segments if not segment.parameter.requires_grad]
    if frozen:
        raise UsageError(
            "parameters in a gradient buffer are updated, with weight decay at the least: "
            f"requires_grad=False for {len(frozen)} of them, such as {frozen[0]}. "
            "Freeze parameters first, then make the gradient buffer and the optimiser."
        )


def agree_on_buckets(buckets: Sequence[Bucket]) -> None:
    """See that the ranks which reduce together hold the same parameters; all of them call it together.

    Raises:
        CommunicationError: if they do not.
    """
    for bucket in buckets:
        for communicator in bucket.group.slicers or bucket.group.communicators:
            mine = bucket.signature()
            digest = hashlib.blake2b(repr(mine).encode()).hexdigest()
            if len(set(communicator.all_gather_object(digest))) == 1:
                continue
            everyone = communicator.all_gather_object(mine)
            differ = (i for i, names in enumerate(zip(*everyone, strict=False)) if len(set(names)) > 1)
            first = next(differ, None)
            where = f"from {everyone[0][first][0]} on" if first is not None else "in number"
            raise CommunicationError(
                f"the ranks {list(communicator.ranks)} sum gradients over {communicator.name}, but their "
                f"parameters differ {where} ({bucket.group.name}). Build the same model on all of them, "
                "with parameters in the same order."
            )


def stack_in(flat: Sequence[FlatGroup], parameters: Sequence[nn.Parameter]) -> Tensor:
    """The gradients of equally shaped, adjacent parameters: a view `[len(parameters), ...]` of their group.

    Raises:
        ValueError: if they are not adjacent in one group.
    """
    places = {id(segment.parameter): (group, segment) for group in flat for segment in group.segments}
    found = [places.get(id(parameter)) for parameter in parameters]
    if not found or found[0] is None:
        raise ValueError("stack_view needs at least one parameter, all of them in this gradient buffer.")
    group, first = found[0]
    end = first.start
    for place in found:
        if (
            place is None
            or place[0] is not group
            or place[1].start != end
            or place[1].parameter.shape != first.parameter.shape
        ):
            raise ValueError(
                f"the gradients from {first.spec.name} on are not one contiguous stack of "
                f"{len(found)} x {tuple(first.parameter.shape)}. Make the parameters consecutive views "
                "of one tensor, and give them in its order."
            )
        end = place[1].stop
    return group.data[first.start : end].view(len(found), *first.parameter.shape)
