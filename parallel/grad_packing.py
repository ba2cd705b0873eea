"""Where each gradient lies: parameters packed into flat groups, one for each set of ranks that sums them.

The packing is a pure function of the specs and of the order in which parameters are given, so it is the same
on all ranks that reduce together. Parameters that view one storage (the experts of one stack) stay adjacent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from isozyme.core.topology import Topology
from isozyme.parallel.grad_layout import (
    Bucket,
    FlatGroup,
    Segment,
    accumulate_dtype,
    copy_communicators,
    reduce_communicators,
)
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import ShardSpec, spec_of

ALIGNMENT = 64
"""Elements to which the start of a run of parameters is aligned (256 bytes in fp32), as kernels want it."""
SLICE_UNIT = 4
"""Elements that the length of an owner's slice is a multiple of (16 bytes in fp32), as NCCL wants it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Member:
    """One parameter, before it has a place."""

    order: int
    parameter: nn.Parameter
    spec: ShardSpec
    unit: int | None


def pack(
    parameters: Iterable[nn.Parameter],
    groups: ProcessGroups,
    *,
    bucket_bytes: int | None = None,
    sharded: bool = False,
    units: Sequence[Sequence[nn.Parameter]] = (),
    as_computed: bool = False,
) -> tuple[tuple[FlatGroup, ...], tuple[Bucket, ...]]:
    """Allocate zeroed flat groups for all parameters that require a gradient, and cut them into buckets.

    Groups are ordered by replicas, grid, dtypes, device and `written_wide`; within a group parameters keep
    the order given, except that views of one storage are placed together, in the order of their offset. Units
    move nothing: they only cut.

    Args:
        parameters: each with a spec.
        groups: the communicators of this rank.
        bucket_bytes: the most that a bucket holds (but at least one parameter; if sharded, one stack).
        sharded: pad every bucket, so that all replicas own slices of one length.
        units: parts of the model in the order in which backward completes them. No bucket holds gradients of
            two units, or of a unit and of the rest.
        as_computed: keep gradients to which no other rank adds in the parameters' own type, unless a backward
            computes them in fp32 (`isozyme.parallel.main_grad.written_wide`).

    Returns:
        The flat groups, and the buckets in the order in which they are reduced: unit by unit, then the rest;
        within these from the last parameter to the first, as backward completes them.

    Raises:
        ValueError: if two parameters have the same global name, or one has no spec, is not contiguous, or is
            in two units.
    """
    members: dict[tuple[str, ...], list[_Member]] = {}
    for member in _members(parameters, _unit_numbers(units)):
        members.setdefault(_key(member, groups.topology), []).append(member)
    flat: list[FlatGroup] = []
    buckets: list[Bucket] = []
    for key in sorted(members):
        group, cut = _pack_group(members[key], groups, bucket_bytes, sharded=sharded, as_computed=as_computed)
        flat.append(group)
        buckets += cut
    buckets.sort(key=lambda bucket: -max(segment.order for segment in bucket.segments))
    buckets.sort(key=lambda bucket: len(units) if bucket.unit is None else bucket.unit)
    return tuple(flat), tuple(buckets)


def _unit_numbers(units: Sequence[Sequence[nn.Parameter]]) -> dict[int, int]:
    """id of a parameter → the number of its unit."""
    found: dict[int, int] = {}
    for number, unit in enumerate(units):
        for parameter in unit:
            if found.setdefault(id(parameter), number) != number:
                raise ValueError(
                    f"a parameter is complete after one unit: {spec_of(parameter).name} is in units "
                    f"{found[id(parameter)]} and {number}. Leave it out of both."
                )
    return found


def _members(parameters: Iterable[nn.Parameter], unit_of: dict[int, int]) -> list[_Member]:
    found: list[_Member] = []
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
            unit = unit_of.get(id(parameter))
            found.append(_Member(order=order, parameter=parameter, spec=spec, unit=unit))
    return found


def _key(member: _Member, topology: Topology) -> tuple[str, ...]:
    spec, parameter = member.spec, member.parameter
    return (
        "+".join(sorted(spec.reduce_axes)),
        spec.grid,
        "+".join(sorted(set(spec.replicas) - set(spec.reduce_axes))),
        str(spec.num_replicas(topology)),
        _word(accumulate_dtype(parameter.dtype)),
        _word(parameter.dtype),
        str(parameter.device),
        "wide" if _written_wide(parameter) else "",
    )


def _written_wide(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "main_grad_written_wide", False))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pack_group(
    members: list[_Member],
    groups: ProcessGroups,
    bucket_bytes: int | None,
    *,
    sharded: bool,
    as_computed: bool,
) -> tuple[FlatGroup, list[Bucket]]:
    parameter, spec = members[0].parameter, members[0].spec
    summed = reduce_communicators(spec, groups)
    slicers = (*summed, *copy_communicators(spec, groups)) if sharded else ()
    keep = as_computed and not summed and not slicers and not _written_wide(parameter)
    dtype = parameter.dtype if keep else accumulate_dtype(parameter.dtype)
    packing = _Packing(
        limit=math.inf if bucket_bytes is None else bucket_bytes / dtype.itemsize,
        multiple=SLICE_UNIT * math.prod(each.size for each in slicers) if slicers else 1,
        whole_runs=sharded,
    )
    for run in _runs(members):
        packing.add(run)
    packing.close()
    group = FlatGroup(
        name=f"{spec.grid} {'+'.join(spec.reduce_axes) or 'unshared'} {_word(dtype)}",
        communicators=summed,
        slicers=slicers,
        num_replicas=spec.num_replicas(groups.topology),
        data=torch.zeros(packing.end, dtype=dtype, device=parameter.device),
        segments=tuple(segment for cut in packing.cuts for segment in cut.segments),
    )
    return group, [
        Bucket(group=group, segments=cut.segments, start=cut.start, stop=cut.stop, unit=cut.unit)
        for cut in packing.cuts
    ]


def _runs(members: list[_Member]) -> list[list[_Member]]:
    """The parameters of each storage together, as far as they are of one unit, in the order given."""
    runs: dict[tuple[int, int | None], list[_Member]] = {}
    for member in members:
        # An empty storage has the address 0, and so says nothing about who shares it.
        address = member.parameter.untyped_storage().data_ptr()
        runs.setdefault((address if address else -1 - member.order, member.unit), []).append(member)
    return [sorted(run, key=lambda member: member.parameter.storage_offset()) for run in runs.values()]


@dataclass(frozen=True, kw_only=True)
class _Cut:
    segments: tuple[Segment, ...]
    start: int
    stop: int
    unit: int | None


class _Packing:
    """Gives runs their places one after the other, and cuts buckets on the way."""

    def __init__(self, *, limit: float, multiple: int, whole_runs: bool) -> None:
        self.end = 0
        self.cuts: list[_Cut] = []
        self._limit, self._multiple, self._whole_runs = limit, multiple, whole_runs
        self._open: list[Segment] = []
        self._unit: int | None = None

    def add(self, run: list[_Member]) -> None:
        """Place a run, in the open bucket as far as it fits."""
        unit = run[0].unit
        atoms = [run] if self._whole_runs else [[member] for member in run]
        for number, atom in enumerate(atoms):
            size = sum(member.parameter.numel() for member in atom)
            start = self._place(number)
            if self._open and (unit != self._unit or start + size - self._open[0].start > self._limit):
                self.close()
                start = self._place(number)
            self._unit = unit
            for member in atom:
                stop = start + member.parameter.numel()
                self._open.append(
                    Segment(
                        parameter=member.parameter,
                        spec=member.spec,
                        start=start,
                        stop=stop,
                        order=member.order,
                    )
                )
                start = stop
            self.end = start

    def close(self) -> None:
        """End the open bucket, padded so that its owners have slices of one length."""
        if not self._open:
            return
        start = self._open[0].start
        stop = start + math.ceil((self.end - start) / self._multiple) * self._multiple
        self.cuts.append(_Cut(segments=tuple(self._open), start=start, stop=stop, unit=self._unit))
        self._open, self.end = [], stop

    def _place(self, number: int) -> int:
        """Where the next parameter begins; only the first of a run may leave a gap before it."""
        return self.end if number else math.ceil(self.end / ALIGNMENT) * ALIGNMENT
