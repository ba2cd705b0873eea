"""Where each gradient lies: parameters packed into flat groups, one for each set of ranks that sums them.

The packing is a pure function of the specs and of the order in which parameters are given, so it is the same
on all ranks that reduce together. Parameters that view one storage (the experts of one stack) stay adjacent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isozyme.core.topology import Topology
from isozyme.parallel.communicator import Communicator
from isozyme.parallel.process_groups import ProcessGroups, group_axes
from isozyme.parallel.shard_spec import EMBEDDING, ShardSpec, spec_of

ALIGNMENT = 64
"""Elements to which the start of a run of parameters is aligned (256 bytes in fp32), as kernels want it."""


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
    """Gradients of one dtype that are summed over the same ranks, in one contiguous tensor."""

    name: str
    """Axes and dtype, such as `expert edp float32` (for messages)."""
    communicators: tuple[Communicator, ...]
    """The sum over the replicas is the sum over each of these in turn; empty if nobody else has a part."""
    num_replicas: int
    """Ranks that hold the same shards: the weight of this group in the global norm is one over this."""
    data: Tensor
    segments: tuple[Segment, ...]


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


def _one_or_several(axes: set[str], topology: Topology, groups: ProcessGroups) -> list[Communicator]:
    wanted = topology.size(axes)
    for known in group_axes(topology):
        # A group over more axes has the same ranks if the further axes have size one.
        if axes <= set(known) and topology.size(known) == wanted:
            return [groups[known]]
    return [groups[axis] for axis in topology.grid(axes).axes if axis in axes]


def pack(parameters: Iterable[nn.Parameter], groups: ProcessGroups) -> tuple[FlatGroup, ...]:
    """Allocate zeroed flat groups for all parameters that require a gradient, in an order fixed by the specs.

    Groups are ordered by reduce axes, grid, number of replicas, dtype and device; within a group parameters
    keep the order given, except that views of one storage are placed together, in the order of their offset.

    Raises:
        ValueError: if two parameters have the same global name, or one has no spec or is not contiguous.
    """
    members: dict[tuple[str, ...], list[tuple[int, nn.Parameter, ShardSpec]]] = {}
    names: set[str] = set()
    for order, parameter in enumerate(parameters):
        spec = spec_of(parameter)
        if spec.name in names:
            raise ValueError(f"two parameters are called {spec.name}. Global names are unique.")
        names.add(spec.name)
        if not parameter.is_contiguous():
            raise ValueError(
                f"parameters are contiguous: {spec.name} has shape {tuple(parameter.shape)} and stride "
                f"{parameter.stride()}. Make it from tensor.contiguous()."
            )
        if parameter.requires_grad:
            key = _key(parameter, spec, groups.topology)
            members.setdefault(key, []).append((order, parameter, spec))
    return tuple(_pack_group(members[key], groups) for key in sorted(members))


def _key(parameter: nn.Parameter, spec: ShardSpec, topology: Topology) -> tuple[str, ...]:
    return (
        "+".join(sorted(spec.reduce_axes)),
        spec.grid,
        str(spec.num_replicas(topology)),
        str(accumulate_dtype(parameter.dtype)).removeprefix("torch."),
        str(parameter.device),
    )


def _pack_group(members: list[tuple[int, nn.Parameter, ShardSpec]], groups: ProcessGroups) -> FlatGroup:
    runs: dict[int, list[tuple[int, nn.Parameter, ShardSpec]]] = {}
    for member in members:
        parameter = member[1]
        # An empty storage has the address 0, and so says nothing about who shares it.
        address = parameter.untyped_storage().data_ptr()
        runs.setdefault(address if address else -1 - member[0], []).append(member)
    segments: list[Segment] = []
    end = 0
    for run in runs.values():
        end = math.ceil(end / ALIGNMENT) * ALIGNMENT
        for order, parameter, spec in sorted(run, key=lambda member: member[1].storage_offset()):
            stop = end + parameter.numel()
            segments.append(Segment(parameter=parameter, spec=spec, start=end, stop=stop, order=order))
            end = stop
    _, parameter, spec = members[0]
    dtype = accumulate_dtype(parameter.dtype)
    axes = "+".join(spec.reduce_axes) or "unshared"
    return FlatGroup(
        name=f"{spec.grid} {axes} {str(dtype).removeprefix('torch.')}",
        communicators=reduce_communicators(spec, groups),
        num_replicas=spec.num_replicas(groups.topology),
        data=torch.zeros(end, dtype=dtype, device=parameter.device),
        segments=tuple(segments),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Bucket:
    """A contiguous part of a flat group that is reduced by one call."""

    group: FlatGroup
    segments: tuple[Segment, ...]

    @property
    def data(self) -> Tensor:
        """The gradients of the bucket, as a contiguous view."""
        return self.group.data[self.segments[0].start : self.segments[-1].stop]

    def signature(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What ranks that reduce this bucket together must agree on."""
        return tuple((segment.spec.name, tuple(segment.parameter.shape)) for segment in self.segments)


def cut(groups: Sequence[FlatGroup], bucket_bytes: int | None) -> tuple[Bucket, ...]:
    """Buckets of at most `bucket_bytes` (but at least one parameter), in the order in which they are reduced.

    That is from the last parameter to the first, as backward completes them.
    """
    buckets: list[Bucket] = []
    for group in groups:
        limit = math.inf if bucket_bytes is None else bucket_bytes / group.data.element_size()
        chosen: list[Segment] = []
        for segment in group.segments:
            if chosen and segment.stop - chosen[0].start > limit:
                buckets.append(Bucket(group=group, segments=tuple(chosen)))
                chosen = []
            chosen.append(segment)
        buckets.append(Bucket(group=group, segments=tuple(chosen)))
    return tuple(sorted(buckets, key=lambda bucket: -max(segment.order for segment in bucket.segments)))
