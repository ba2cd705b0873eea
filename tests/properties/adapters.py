"""Our own objects as the testing toolkit wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from isozyme.core.config import MoEConfig, RouterConfig
from isozyme.core.topology import Layout, Topology
from isozyme.moe.capacity import DropPolicy, apply_capacity
from isozyme.moe.dispatch_alltoall import AllToAllDispatcher
from isozyme.moe.dispatch_padded import PaddedAllToAllDispatcher
from isozyme.moe.experts.experts import Experts
from isozyme.moe.grouping import group_rows, ungroup_rows
from isozyme.moe.layer import MoELayer
from isozyme.moe.permute import permute, sort_slots, unpermute
from isozyme.moe.reference import reference_moe
from isozyme.moe.router import Router
from isozyme.moe.testing import Place
from isozyme.moe.types import Dispatched, Routing
from isozyme.parallel.collectives import reduce_from_group
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import ShardSpec, named_shards


def padded(place: Place) -> PaddedAllToAllDispatcher:
    """Buffers of the smallest size that fits; at least one row."""
    return PaddedAllToAllDispatcher(place.placement, max(place.capacity, 1))


class InHalves:
    """The all-to-all dispatcher by its starts and finishes."""

    def __init__(self, place: Place) -> None:
        self._inner = AllToAllDispatcher(place.placement)

    def dispatch(self, tokens: Tensor, routing: Routing) -> Dispatched:
        return group_rows(self._inner.send_finish(self._inner.send_start(tokens, routing)))

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        started = self._inner.bring_back_start(ungroup_rows(rows, dispatched), dispatched.handle.arrival)
        return self._inner.bring_back_finish(started)


def permute_by_ids(tokens: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Any, Any]:
    """Our permutation, from ids of which -1 is dropped."""
    routing = Routing(
        topk_ids=ids.clamp(min=0),
        topk_probs=torch.ones(ids.shape),
        kept=ids >= 0,
        num_experts=num_experts,
    )
    slots = sort_slots(routing)
    return permute(tokens, slots), slots.counts, slots


def unpermute_by_slots(rows: Tensor, slots: Any) -> Tensor:
    """The inverse of `permute_by_ids`."""
    return unpermute(rows, slots)


def router(config: RouterConfig) -> Callable[[Tensor], Routing]:
    """Our router, fed with logits: its weight is the identity, so tokens are logits."""
    groups = ProcessGroups(Topology(Layout()), SingleWorld())

    def route(logits: Tensor) -> Routing:
        module = Router(
            config, name="router", hidden=config.num_experts, groups=groups, seed=0, dtype=logits.dtype
        )
        with torch.no_grad():
            module.weight.copy_(torch.eye(config.num_experts))
        routing, _ = module(logits, torch.ones(len(logits), dtype=torch.bool), 1 if len(logits) else 0)
        return routing

    return route


def capacity_cut(policy: DropPolicy) -> Callable[[Tensor, Tensor, int, int], Tensor]:
    """Our capacity, on one window."""

    def cut(ids: Tensor, weights: Tensor, num_experts: int, capacity: int) -> Tensor:
        routing = Routing(
            topk_ids=ids,
            topk_probs=weights,
            kept=torch.ones_like(ids, dtype=torch.bool),
            num_experts=num_experts,
        )
        return apply_capacity(routing, 1 if len(ids) else 0, capacity, policy).routing.kept

    return cut


class Layer:
    """Our layer in fp64 with loop experts; its gradients are summed as their specs say."""

    def __init__(self, place: Place, **changes: Any) -> None:
        self.groups = place.groups
        routing = RouterConfig(num_experts=place.num_experts, topk=place.topk, aux_loss=0.1, z_loss=0.01)
        self.module = MoELayer(
            MoEConfig(**{"router": routing, "ffn": 4, "experts": "loop", **changes}),
            name="moe",
            hidden=place.hidden,
            groups=place.groups,
            seed=1,
            init_std=0.7,
            output_std=0.7,
            dtype=torch.float64,
        )

    def forward(self, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        output = self.module(tokens, valid)
        return output.tokens, output.stats.aux_loss + output.stats.z_loss

    def gradients(self) -> Mapping[str, Tensor | None]:
        found = {}
        for name, parameter, spec in named_shards(self.module):
            total = parameter.grad
            for axis in spec.reduce_axes if total is not None else ():
                total = reduce_from_group(total, self.groups[axis], differentiable=False)
            found[name] = total if total is None else self._whole(total, spec)
        return found

    def _whole(self, shard: Tensor, spec: ShardSpec) -> Tensor:
        """The whole tensor from the shards of the TP ranks."""
        if not any(axis == "tp" for _, axis in spec.split):
            return shard
        whole = torch.zeros(spec.global_shape, dtype=shard.dtype)
        whole[spec.slices(self.groups.topology, self.groups.rank)] = shard
        return reduce_from_group(whole, self.groups["tp"], differentiable=False)


def dense_layer(layer: Layer, tokens: Tensor, valid: Tensor) -> Tensor:
    """What the layer on one rank must give, by the dense loop."""
    flat = tokens.flatten(0, 1)
    routing, _ = layer.module.router(flat, valid.flatten(), len(tokens))
    experts = layer.module.experts
    assert isinstance(experts, Experts)
    weights = experts.weights
    out = reference_moe(flat, routing, torch.stack(list(weights.gate_up)), torch.stack(list(weights.down)))
    return out.detach().view_as(tokens)
