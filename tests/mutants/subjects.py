"""What the toolkit is pointed at: each subject is one call of a check on one of our objects, as users do it.

Imported only after a mutant is in place. All checks run with their default budgets. `check_moe_layer`
compares a layer at some layout with one rank; where a subject says `definition`, that is the dense `Twin`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isozyme.core.config import MoEConfig, OptimConfig, RouterConfig
from isozyme.core.topology import Layout, Topology
from isozyme.moe.capacity import DropPolicy, apply_capacity
from isozyme.moe.dispatch_allgather import AllGatherDispatcher
from isozyme.moe.dispatch_alltoall import AllToAllDispatcher
from isozyme.moe.dispatch_local import LocalDispatcher
from isozyme.moe.expert_bias import update_expert_bias
from isozyme.moe.kernels.row_map import row_map
from isozyme.moe.kernels.rows import gather_rows, scatter_rows
from isozyme.moe.router import Router
from isozyme.moe.testing import (
    ISOZYME,
    LayerPromises,
    Place,
    Promises,
    Report,
    RouterPromises,
    check_capacity,
    check_dispatcher,
    check_moe_layer,
    check_permutation,
    check_router,
)
from isozyme.moe.types import MoEOutput, Routing
from isozyme.parallel.collectives import reduce_from_group
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.grad_norm import clip_, global_norm
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import named_shards
from isozyme.parallel.sharded_optimizer import make_optimizer
from tests.mutants.twin import BIAS_STEP, RATE, Twin
from tests.properties.adapters import (
    InHalves,
    Layer,
    capacity_cut,
    dense_layer,
    padded,
    permute_by_ids,
    router,
    unpermute_by_slots,
)

FACTOR = 2.5


# --- Permutation with aligned padding


def permute_padded(tokens: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Any, Any]:
    """Each expert's rows filled up to a multiple of four."""
    slot_row, counts, ends = row_map(ids.clamp(min=0), ids >= 0, num_experts, 4)
    rows = scatter_rows(tokens, slot_row, int(ends[-1]), counts, ends)
    return rows, torch.diff(ends, prepend=ends.new_zeros(1)).long(), slot_row


def unpermute_padded(rows: Tensor, handle: Any) -> Tensor:
    return gather_rows(rows, handle)


# --- Routers that must be as if they were plain ones


def scaled_router(config: RouterConfig) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """With a scaling factor, which is then divided out."""
    route = router(replace(config, scaling_factor=FACTOR))

    def plain(logits: Tensor) -> tuple[Tensor, Tensor]:
        routing = route(logits)
        return routing.topk_ids, routing.topk_probs / FACTOR

    return plain


def biased_router(config: RouterConfig) -> Callable[[Tensor], Routing]:
    """With the same bias for all experts, which changes no choice and no weight."""
    groups = ProcessGroups(Topology(Layout()), SingleWorld())

    def route(logits: Tensor) -> Routing:
        module = Router(
            replace(config, expert_bias_rate=0.1),
            name="router",
            hidden=config.num_experts,
            groups=groups,
            seed=0,
            dtype=logits.dtype,
        )
        with torch.no_grad():
            module.weight.copy_(torch.eye(config.num_experts))
            assert module.expert_bias is not None
            module.expert_bias.fill_(0.25)
        return module(logits, torch.ones(len(logits), dtype=torch.bool), 1 if len(logits) else 0)[0]

    return route


def second_window_cut(policy: DropPolicy) -> Callable[[Tensor, Tensor, int, int], Tensor]:
    """Capacity on the second of two windows; the first is full of slots."""

    def cut(ids: Tensor, weights: Tensor, num_experts: int, capacity: int) -> Tensor:
        routing = Routing(
            topk_ids=torch.cat([ids, ids]),
            topk_probs=torch.cat([weights + 1, weights]),
            kept=torch.ones(2 * len(ids), ids.shape[1], dtype=torch.bool),
            num_experts=num_experts,
        )
        kept = apply_capacity(routing, 2 if len(ids) else 0, capacity, policy).routing.kept
        return kept[len(ids) :]

    return cut


# --- Layers


class Measured(Layer):
    """Our layer; with the gradients it shows the sums of its losses and its counts."""

    steps, worst = False, False

    def __init__(self, place: Place, **changes: Any) -> None:
        super().__init__(place, **changes)
        self.passes: list[MoEOutput] = []

    def forward(self, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        self.given = tokens.detach(), valid
        out = self._pass(tokens, valid)
        return out.tokens, out.stats.aux_loss + out.stats.z_loss

    def gradients(self) -> Mapping[str, Tensor | None]:
        return {**super().gradients(), **self._sums()}

    def _pass(self, tokens: Tensor, valid: Tensor) -> MoEOutput:
        self.passes.append(self.module(tokens, valid))
        return self.passes[-1]

    def _sums(self) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        names = {"aux": "aux_loss", "z": "z_loss", "routed": "routed", "dropped": "dropped"}
        for short, name in names.items():
            parts = [getattr(each.stats, name).detach().double() for each in self.passes]
            found[short] = reduce_from_group(torch.stack(parts), self.groups.world, differentiable=False)
        return found


class Replayed(Measured):
    """Replays a choice that the tokens would not make: the experts with the lowest scores."""

    worst = True

    def _pass(self, tokens: Tensor, valid: Tensor) -> MoEOutput:
        with torch.no_grad():
            flat = -tokens.detach().flatten(0, 1)
            other, _ = self.module.router(flat, valid.flatten(), len(tokens))
        self.passes.append(self.module(tokens, valid, other))
        return self.passes[-1]


class Trained(Measured):
    """Two micro-batches into a gradient buffer, the bias updated in between; norm, clipping and an update."""

    steps = True

    def __init__(
        self, place: Place, *, sharded: bool = False, bucket_bytes: int | None = None, **changes: Any
    ) -> None:
        super().__init__(place, **changes)
        self.buffer = GradientBuffer(
            self.module.parameters(), self.groups, sharded=sharded, bucket_bytes=bucket_bytes
        )
        config = OptimConfig(eps=1.0, weight_decay=0.0, sharded=sharded)
        self.optimizer = make_optimizer(self.buffer, config)

    def gradients(self) -> Mapping[str, Tensor | None]:
        module, buffer = self.module, self.buffer
        rate = module.config.router.expert_bias_rate
        if rate:
            update_expert_bias(module.router, self.passes[0].stats.routed, self.groups, rate=rate)
        tokens, valid = self.given
        second = self._pass(tokens, valid)
        task = (second.tokens * valid[..., None]).square().sum()
        (task + second.stats.aux_loss + second.stats.z_loss).backward()
        buffer.reduce()
        norm = global_norm(buffer)
        clip_(buffer, norm, norm / 2)
        self.optimizer.step(RATE)
        buffer.gather()
        found: dict[str, Tensor | None] = {"norm": torch.tensor(norm, dtype=torch.float64)}
        for name, tensor, spec in named_shards(module):
            if spec.kind == "buffer":
                found[name] = tensor.clone()
                continue
            found[name] = self._whole(tensor.main_grad, spec).clone()
            found[f"{name}, updated"] = self._whole(tensor.detach(), spec).clone()
        return {**found, **self._sums()}


def by_definition(
    kind: type[Measured], changes: dict[str, Any], options: dict[str, Any], place: Place
) -> Any:
    """Our layer on several ranks, the dense twin on one."""
    routing = {"aux_loss": 0.1, "z_loss": 0.01, **changes}
    layer = {name: routing.pop(name) for name in list(routing) if name in MoEConfig.__dataclass_fields__}
    config = RouterConfig(num_experts=place.num_experts, topk=place.topk, **routing)
    if place.topology.world_size > 1:
        return kind(place, router=config, **layer, **options)
    return Twin(MoEConfig(router=config, ffn=4, **layer), place.hidden, steps=kind.steps, worst=kind.worst)


def defined(kind: type[Measured], *, uneven: bool = True, options: Any = None, **changes: Any) -> Any:
    """The check of a layer against its definition."""
    return partial(
        check_moe_layer,
        partial(by_definition, kind, changes, options or {}),
        promises=LayerPromises(split_windows=True, uneven=uneven, padding=True),
    )


EXACT = RouterPromises(groups=True, dtypes=("float64",), bad_logits=False)
BIASED: dict[str, Any] = {"score": "sigmoid", "scaling_factor": FACTOR, "expert_bias_rate": BIAS_STEP}

SUBJECTS: dict[str, Callable[[], Report]] = {
    "local": partial(check_dispatcher, lambda place: LocalDispatcher(), promises=replace(ISOZYME, ranks=1)),
    "allgather": partial(check_dispatcher, lambda place: AllGatherDispatcher(place.placement)),
    "alltoall": partial(check_dispatcher, lambda place: AllToAllDispatcher(place.placement)),
    "alltoall in halves": partial(check_dispatcher, InHalves),
    "padded": partial(check_dispatcher, padded, promises=replace(ISOZYME, filler=True)),
    "permutation": partial(
        check_permutation,
        permute_by_ids,
        unpermute_by_slots,
        promises=Promises(drops=True, ordered=True, wide_sums=True, experts_per_rank=6),
    ),
    "aligned permutation": partial(
        check_permutation,
        permute_padded,
        unpermute_padded,
        promises=Promises(drops=True, ordered=True, filler=True, experts_per_rank=6),
    ),
    "router": partial(check_router, router, promises=RouterPromises(groups=True)),
    "router with a scaling factor": partial(check_router, scaled_router, promises=EXACT),
    "router with a bias": partial(check_router, biased_router, promises=EXACT),
    "capacity by probability": partial(check_capacity, capacity_cut("probability"), policy="probability"),
    "capacity by position": partial(check_capacity, capacity_cut("position"), policy="position"),
    "capacity of a second window": partial(
        check_capacity, second_window_cut("probability"), policy="probability"
    ),
    "layer": partial(
        check_moe_layer,
        Layer,
        promises=LayerPromises(split_windows=True),
        reference=dense_layer,
    ),
    "layer with a shared expert": partial(
        check_moe_layer, partial(Layer, shared_ffn=4), promises=LayerPromises(split_windows=True)
    ),
    "layer, by definition": defined(Measured),
    "layer with a replayed choice, by definition": defined(Replayed),
    "layer with all-gather, by definition": defined(Measured, dispatcher="allgather"),
    "layer with a shared expert, by definition": defined(Measured, shared_ffn=4),
    "layer with capacity, by definition": defined(Measured, capacity_factor=0.75),
    "layer with capacity by position, by definition": defined(
        Measured, capacity_factor=0.5, drop_policy="position"
    ),
    "layer with sigmoid scores, by definition": defined(Measured, score="sigmoid", scaling_factor=FACTOR),
    "training, by definition": defined(Trained, **BIASED, shared_ffn=4),
    "sharded training, by definition": defined(Trained, options={"sharded": True}, shared_ffn=4),
    "training in small buckets, by definition": defined(Trained, options={"bucket_bytes": 256}),
}
"""By the name that the catalogue uses."""
