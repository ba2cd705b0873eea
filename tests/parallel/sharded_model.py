"""A small global model that is sharded in every way a spec can say, and an oracle that sees all ranks.

Each rank that has a part of a tensor's gradient gets its own random part, so nothing here could pass with the
same data everywhere. The oracle adds the parts up on whole tensors and knows no groups.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from isozyme.core.initialisation import Init
from isozyme.core.topology import Layout, Topology
from isozyme.parallel.parameters import local_initial_value
from isozyme.parallel.process_groups import ProcessGroups, World
from isozyme.parallel.shard_spec import Replica, ShardSpec, attach

UNCHECKED = pytest.mark.usefixtures("unchecked_annotations")
"""For sweeps over layouts: the tests beside them check annotations at layouts that are given."""
NUM_EXPERTS = 8
PARTIAL: Mapping[str, Replica] = {"tp": "partial", "cp": "partial", "dp": "partial"}


HEADS = 2
"""Parts of the weight that has fewer of them than some layouts have TP ranks."""


def _layouts(most: int) -> list[Layout]:
    sizes = itertools.product((1, 2, 4), (1, 2), (1, 2, 3, 4), (1, 2), (1, 2, 4), (1, 2, 4, 8))
    found = []
    for tp, cp, dp, pp, etp, ep in sizes:
        layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep)
        if tp * cp * dp * pp <= most and not layout.problems():
            found.append(layout)
    return found


def layouts(most: int = 8) -> st.SearchStrategy[Layout]:
    """Every legal layout of up to `most` ranks whose axes divide the model."""
    return st.sampled_from(_layouts(most))


@cache
def global_specs(pp: int = 1, tp: int = 1) -> tuple[tuple[ShardSpec, tuple[int, ...], int | None], ...]:
    """(spec, pipeline stages that hold it, number of the expert) of every tensor of the model."""
    normal = Init.normal(0.5)
    found: list[tuple[ShardSpec, tuple[int, ...], int | None]] = []

    def dense(name: str, shape: tuple[int, ...], stages: tuple[int, ...], **more: object) -> None:
        spec = ShardSpec(name=name, global_shape=shape, init=normal, **more)  # type: ignore[arg-type]
        found.append((spec, stages, None))

    ends = (0, pp - 1) if pp > 1 else (0,)
    tied: dict[str, Replica] = {"cp": "partial", "dp": "partial", "embedding": "partial"}
    dense("embedding", (8, 3), ends, split=((0, "tp"),), replicas=tied)
    for layer in range(2):
        at = f"layers.{layer}"
        stages = (layer * pp // 2,)
        dense(f"{at}.norm", (5,), stages, replicas=PARTIAL, decay=False)
        dense(f"{at}.column", (8, 3), stages, split=((0, "tp"),), replicas={"cp": "partial", "dp": "partial"})
        dense(f"{at}.row", (3, 8), stages, split=((1, "tp"),), replicas={"cp": "partial", "dp": "partial"})
        few: dict[str, Replica] = {"cp": "partial", "dp": "partial"}
        heads = "tp"
        if tp > HEADS:
            heads = f"tp//{tp // HEADS}"
            few[f"tp%{tp // HEADS}"] = "partial"
        dense(f"{at}.few", (2 * HEADS, 3), stages, split=((0, heads),), replicas=few)
        same: dict[str, Replica] = {"tp": "identical", "cp": "partial", "dp": "partial"}
        dense(f"{at}.same", (2, 2), stages, replicas=same, decay=False)
        for expert in range(NUM_EXPERTS):
            for part, shape, dim in (("gate_up", (2, 4, 3), 1), ("down", (3, 4), 1)):
                spec = ShardSpec(
                    name=f"{at}.experts.{expert}.{part}",
                    global_shape=shape,
                    grid="expert",
                    split=((dim, "etp"),),
                    replicas={"edp": "partial"},
                    init=normal,
                )
                found.append((spec, stages, expert))
    return tuple(found)


def holds(topology: Topology, rank: int, stages: tuple[int, ...], expert: int | None) -> bool:
    """Whether `rank` holds (a shard of) the tensor."""
    at = topology.coordinates(rank)
    if at["pp"] not in stages:
        return False
    return expert is None or expert // (NUM_EXPERTS // topology.size("ep")) == at["ep"]


class ShardedModel(nn.Module):
    """One rank's part. The experts of one layer are views of one stack, as in the real thing."""

    def __init__(self, groups: ProcessGroups, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        super().__init__()
        topology, rank = groups.topology, groups.rank
        specs = [
            spec
            for spec, stages, expert in global_specs(topology.size("pp"), topology.size("tp"))
            if holds(topology, rank, stages, expert)
        ]
        self.stacks: dict[str, Tensor] = {}
        self.stacked: dict[str, list[nn.Parameter]] = {}
        kinds = {spec.name: _stack_of(spec.name) for spec in specs}
        for kind in dict.fromkeys(kind for kind in kinds.values() if kind):
            members = [spec for spec in specs if kinds[spec.name] == kind]
            values = [local_initial_value(s, groups, seed=seed, device="cpu", dtype=dtype) for s in members]
            self.stacks[kind] = torch.stack(values)
        self.weights = nn.ParameterList()
        counts = dict.fromkeys(self.stacks, 0)
        for spec in specs:
            kind = kinds[spec.name]
            if kind:
                value = self.stacks[kind][counts[kind]]
                counts[kind] += 1
            else:
                value = local_initial_value(spec, groups, seed=seed, device="cpu", dtype=dtype)
            parameter = nn.Parameter(value)
            attach(parameter, spec)
            self.weights.append(parameter)
            if kind:
                self.stacked.setdefault(kind, []).append(parameter)

    def by_name(self) -> dict[str, nn.Parameter]:
        """Parameters by global name."""
        return {parameter.shard_spec.name: parameter for parameter in self.weights}


def _stack_of(name: str) -> str:
    layer, experts, rest = name.partition(".experts.")
    return f"{layer}.{rest.split('.')[1]}" if experts else ""


def build(
    world: World, layout: Layout, dtype: torch.dtype = torch.float64
) -> tuple[ProcessGroups, ShardedModel]:
    """The groups and the model of one rank."""
    groups = ProcessGroups(Topology(layout), world)
    return groups, ShardedModel(groups, dtype)


def random_tensor(name: str, shape: tuple[int, ...], *key: int) -> Tensor:
    """A float64 tensor that depends on its name and key alone; magnitudes differ much from name to name."""
    return _drawn(name, shape, *key).clone()


@cache
def _drawn(name: str, shape: tuple[int, ...], *key: int) -> Tensor:
    """Once: a world asks for the same numbers several times, and so does the next one."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), *key])
    return torch.from_numpy(rng.standard_normal(shape)) * 10.0 ** float(rng.integers(-2, 3))


def gradient_part(spec: ShardSpec, topology: Topology, rank: int, step: int = 0) -> Tensor:
    """The part of the gradient of the *global* tensor that `rank` would compute, were it not cut.

    It differs between the ranks along partial axes, and is the same along identical and split ones.
    """
    return random_tensor(spec.name, spec.global_shape, step, *_part_key(spec, topology, rank))


def _part_key(spec: ShardSpec, topology: Topology, rank: int) -> tuple[int, ...]:
    """The index of `rank` along each axis over which the gradient is summed."""
    second_end = int(rank != topology.embedding_group(rank)[0])
    axes = sorted(spec.reduce_axes)
    return tuple(second_end if axis == "embedding" else topology.index(rank, axis) for axis in axes)


def global_gradients(topology: Topology, step: int = 0) -> dict[str, Tensor]:
    """The oracle: the whole gradient of every global tensor."""
    found: dict[str, Tensor] = {}
    for spec, stages, expert in global_specs(topology.size("pp"), topology.size("tp")):
        parts: dict[tuple[int, ...], Tensor] = {}
        for rank in range(topology.world_size):
            if holds(topology, rank, stages, expert):
                parts[_part_key(spec, topology, rank)] = gradient_part(spec, topology, rank, step)
        found[spec.name] = torch.stack(list(parts.values())).sum(0)
    return found


def backward(
    model: ShardedModel, groups: ProcessGroups, step: int = 0, skip: frozenset[str] = frozenset()
) -> None:
    """Two micro-batches whose gradients add up to this rank's part, by real backward passes."""
    for share in (0.25, 0.75):
        loss = torch.zeros((), dtype=torch.float64)
        for name, parameter in model.by_name().items():
            if name not in skip:
                spec = parameter.shard_spec
                part = gradient_part(spec, groups.topology, groups.rank, step)
                local = part[spec.slices(groups.topology, groups.rank)]
                loss = loss + (parameter.double() * local).sum() * share
        if loss.requires_grad:
            loss.backward()
