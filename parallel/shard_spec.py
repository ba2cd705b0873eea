"""Ownership of a tensor: which part of which global tensor a rank holds, and who holds the same part.

The group that reduces its gradient, its weight in the global norm, its share in a sharded optimiser, its
initial value and its name in a checkpoint all derive from its `ShardSpec`. Nothing matches on names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from isozyme.core.errors import UsageError
from isozyme.core.initialisation import Init
from isozyme.core.topology import Topology

Replica = Literal["partial", "identical"]

EMBEDDING = "embedding"
"""The name, in `ShardSpec.replicas`, of the stage pair that shares a tied embedding."""


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """Where one local tensor belongs in the global model.

    An axis of the grid is either in `split` (the tensor is cut along a dim), in `replicas` (every rank along
    it holds the same values), or neither: then the tensor lives at one coordinate of that axis (an expert on
    its EP rank, a layer on its pipeline stage).
    """

    name: str
    """Global canonical name, the same at every layout, such as `layers.3.moe.experts.5.gate_up`."""
    global_shape: tuple[int, ...]
    grid: Literal["dense", "expert"] = "dense"
    split: tuple[tuple[int, str], ...] = ()
    """(dim, axis) pairs: dim is cut into equal contiguous parts over the axis, or over a part of an axis:
    `tp//2` gives each pair of neighbours on `tp` the same shard, and then `tp%2` stands in `replicas`."""
    init_dim: int = 0
    """The dim whose indices are seeded one by one, so that a slice costs only its share to initialise."""
    replicas: Mapping[str, Replica] = field(default_factory=dict)
    """Axes with equal copies: `partial` if each copy's gradient is a part of the sum, else `identical`.

    Besides the grid's axes it may name `embedding`: the pair of first and last pipeline stage, both of which
    hold a tied embedding.
    """
    init: Init
    decay: bool = True
    """Whether weight decay applies."""
    kind: Literal["parameter", "buffer"] = "parameter"
    min_dtype: torch.dtype | None = None
    """The tensor keeps at least this precision when the model is cast."""

    @property
    def reduce_axes(self) -> tuple[str, ...]:
        """The axes over which gradients are summed."""
        return tuple(axis for axis, kind in self.replicas.items() if kind == "partial")

    def num_replicas(self, topology: Topology) -> int:
        """How many ranks hold this same shard; its weight in the global norm is one over this."""
        axes = tuple(axis for axis in self.replicas if axis != EMBEDDING)
        pair = len(topology.embedding_group(0)) if EMBEDDING in self.replicas else 1
        return pair * (topology.size(axes) if axes else 1)

    def slices(self, topology: Topology, rank: int) -> tuple[slice, ...]:
        """The part of the global tensor that `rank` holds.

        Raises:
            ValueError: if an axis does not divide the dim that is split over it.
        """
        parts = [slice(0, size) for size in self.global_shape]
        for dim, axis in self.split:
            count, whole = topology.size(axis), self.global_shape[dim]
            if whole % count:
                raise ValueError(
                    f"{self.name}: dim {dim} of size {whole} is not divisible by {axis}={count}."
                )
            share, index = whole // count, topology.index(rank, axis)
            parts[dim] = slice(index * share, (index + 1) * share)
        return tuple(parts)

    def local_shape(self, topology: Topology) -> tuple[int, ...]:
        """The shape of the part that each rank holds."""
        return tuple(part.stop - part.start for part in self.slices(topology, 0))

    def local_numel(self, topology: Topology) -> int:
        """The number of elements that each rank holds."""
        return math.prod(self.local_shape(topology))

    def is_writer(self, topology: Topology, rank: int) -> bool:
        """Whether `rank` is the replica that writes this shard to a checkpoint (coordinate 0 on each)."""
        if EMBEDDING in self.replicas and rank != topology.embedding_group(rank)[0]:
            return False
        return all(topology.index(rank, axis) == 0 for axis in self.replicas if axis != EMBEDDING)


@dataclass(frozen=True, kw_only=True)
class OwnedBox(ShardSpec):
    """A part of a rank's shard that this rank alone keeps: a box of the global tensor.

    Sharded optimiser state consists of such. The other fields are those of the shard that it is a part of.
    """

    box: tuple[slice, ...]

    def slices(self, topology: Topology, rank: int) -> tuple[slice, ...]:  # noqa: ARG002
        """The box, wherever the shard lies."""
        return self.box

    def is_writer(self, topology: Topology, rank: int) -> bool:  # noqa: ARG002
        """Nobody else has it."""
        return True


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """The elements `[start, stop)` of a row-major tensor as boxes, in order: at most two for each dim.

    >>> for rows, columns in boxes_of_range((3, 4), 2, 9):
    ...     print(rows.start, rows.stop, "x", columns.start, columns.stop)
    0 1 x 2 4
    1 2 x 0 4
    2 3 x 0 1
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    rest = tuple(slice(0, size) for size in shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # within one row
        for box in boxes_of_range(shape[1:], start - last * row, stop - last * row):
            yield (slice(last, last + 1), *box)
        return
    for box in boxes_of_range(shape[1:], start - (first - 1) * row, row) if first * row > start else ():
        yield (slice(first - 1, first), *box)
    if first < last:
        yield (slice(first, last), *rest)
    for box in boxes_of_range(shape[1:], 0, stop - last * row):
        yield (slice(last, last + 1), *box)


def dense_spec(name: str, global_shape: tuple[int, ...], init: Init, *, decay: bool = True) -> ShardSpec:
    """The spec of a dense tensor that every rank of a stage holds whole (norms, router, TP=1 weights)."""
    replicas: dict[str, Replica] = {"tp": "partial", "cp": "partial", "dp": "partial"}
    return ShardSpec(name=name, global_shape=global_shape, replicas=replicas, init=init, decay=decay)


def attach(tensor: Tensor, spec: ShardSpec) -> None:
    """Make `spec` the ownership record of a parameter or buffer (kept on the tensor itself)."""
    tensor.shard_spec = spec  # type: ignore[attr-defined]


def spec_of(tensor: Tensor) -> ShardSpec:
    """The ownership record of a parameter or buffer.

    Raises:
        ValueError: if none was attached.
    """
    spec: ShardSpec | None = getattr(tensor, "shard_spec", None)
    if spec is None:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} has no ShardSpec. "
            "Create it with isozyme.parallel.parameters.create_parameter, or call attach(tensor, spec)."
        )
    return spec


def named_shards(module: nn.Module) -> Iterator[tuple[str, Tensor, ShardSpec]]:
    """(global name, local tensor, spec) of every parameter, and every buffer that has a spec, each once.

    Raises:
        UsageError: while a parameter is being gathered after an update (`optim.overlap_gather`).
    """
    for parameter in module.parameters():
        spec = spec_of(parameter)
        if getattr(parameter, "gather_under_way", False):
            raise UsageError(
                f"parameters are read when they are whole: {spec.name} is still being gathered after the "
                "last update. Call finish() of the optimiser first, on all ranks."
            )
        yield spec.name, parameter, spec
    for buffer in module.buffers():
        if hasattr(buffer, "shard_spec"):
            spec = spec_of(buffer)
            yield spec.name, buffer, spec
