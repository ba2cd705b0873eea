"""Faults of distributed training, made on purpose: verification that misses one of them is worth nothing.

Each is one that users of training systems have met. Here are those of experts and replicas; those of the
other axes are in `isozyme.launch.verify_faults_split` and `isozyme.launch.verify_faults_pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from isozyme.core.batch import Batch
from isozyme.core.config import RunConfig
from isozyme.launch.verify_faults_pipeline import PIPELINE_FAULTS
from isozyme.launch.verify_faults_split import SPLIT_FAULTS
from isozyme.launch.verify_tamper import Altered, Change, Fault, TamperedWorld
from isozyme.models.types import ModelOutput
from isozyme.moe.experts.storage import ExpertWeights
from isozyme.moe.router import Router
from isozyme.moe.types import RouterStats, Routing
from isozyme.parallel.communicator import Call, Communicator, Finished, Pending
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import attach, named_shards, spec_of


def _shift_rows(inner: Communicator, call: Call) -> Pending | None:
    rows = call.output
    if call.kind != "all_to_all" or rows is None or rows.ndim != 2 or not rows.is_floating_point():
        return None
    return Altered(inner._start(call), lambda rows: rows.roll(1, dims=0))


def _slice_only(inner: Communicator, call: Call) -> Pending | None:
    if call.kind != "reduce_scatter":
        return None
    assert call.input is not None
    assert call.output is not None
    assert call.input_sizes is not None
    call.output.copy_(call.input.split(call.input_sizes)[inner.rank])
    return Finished(call.output)


def _leave_out_last_rank(inner: Communicator, call: Call) -> Pending | None:
    """The squared norm is the last of a step's numbers; see `isozyme.launch.recorded.Gradients`."""
    if call.kind != "all_reduce" or call.input is None or inner.rank < inner.size - 1:
        return None
    if call.input.is_floating_point() and call.input.shape == (4,):
        call.input[-1:].zero_()
    return None


def _scale_expert_gradients(factor: Callable[[int], float]) -> Change:
    def scale(model: nn.Module, groups: ProcessGroups) -> nn.Module:
        by = factor(groups.topology.size("ep"))
        for module in model.modules():
            if isinstance(module, ExpertWeights):
                module.stacks = _with_scaled_gradients(module.stacks, by)  # type: ignore[method-assign]
        return model

    return scale


def _with_scaled_gradients(
    stacks: Callable[[], tuple[Tensor, Tensor]], by: float
) -> Callable[[], tuple[Tensor, Tensor]]:
    """The stacks of some experts' weights, whose gradients come back multiplied.

    A hook on the parameters would not do: a gradient buffer is given the gradient of the whole stack.
    """

    def scaled() -> tuple[Tensor, Tensor]:
        both = stacks()
        for stack in both:
            if stack.requires_grad:
                stack.register_hook(lambda gradient: gradient * by)
        return both

    return scaled


def _dense_not_reduced(model: nn.Module, _groups: ProcessGroups) -> nn.Module:
    for parameter in model.parameters():
        spec = spec_of(parameter)
        if spec.grid == "dense":
            attach(parameter, replace(spec, replicas=dict.fromkeys(spec.replicas, "identical")))
    return model


def _experts_reduced_as_dense(model: nn.Module, _groups: ProcessGroups) -> nn.Module:
    for parameter in model.parameters():
        spec = spec_of(parameter)
        if spec.grid == "expert":
            partial = {"tp": "partial", "cp": "partial", "dp": "partial"}
            attach(parameter, replace(spec, grid="dense", split=(), replicas=partial))  # type: ignore[arg-type]
    return model


@torch.no_grad()
def _same_experts_everywhere(model: nn.Module, groups: ProcessGroups) -> nn.Module:
    for parameter in model.parameters():
        if spec_of(parameter).grid == "expert":
            parameter.copy_(groups["ep"].broadcast(parameter.detach().clone(), src=0))
    return model


def _probs_of_next_rank(model: nn.Module, groups: ProcessGroups) -> nn.Module:
    group = groups["ep"]

    def swap(
        _router: nn.Module, _args: Any, output: tuple[Routing, RouterStats]
    ) -> tuple[Routing, RouterStats]:
        routing, stats = output
        probs = routing.topk_probs
        others = group.all_gather(probs.detach()).chunk(group.size)
        wrong = others[(group.rank + 1) % group.size] + (probs - probs.detach())
        return replace(routing, topk_probs=wrong), stats

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(swap)
    return model


@torch.no_grad()
def _drift(model: nn.Module, groups: ProcessGroups) -> None:
    """The last rank's copy of the first replicated weight moves by a millionth."""
    if groups.rank != groups.world.size - 1:
        return
    for _, tensor, spec in named_shards(model):
        if spec.kind == "parameter" and spec.num_replicas(groups.topology) > 1:
            tensor.mul_(1 + 1e-6)
            return


class _PerRank(nn.Module):
    """A model whose losses are means over each rank's own share, averaged over ranks."""

    def __init__(self, model: nn.Module, groups: ProcessGroups, *, balance: bool) -> None:
        super().__init__()
        self.model, self._group, self._balance = model, groups["dp"], balance

    def forward(self, batch: Batch, **given: Any) -> ModelOutput:
        """Run the model and weigh its loss by the unit counts of this rank instead of all ranks."""
        output: ModelOutput = self.model(batch, **given)
        units = batch.token_valid.any(dim=1) if self._balance else batch.label_valid
        own = int(units.sum())
        everyone = int(self._group.all_reduce(torch.tensor([own])))
        weight = everyone / (self._group.size * max(own, 1))
        if not self._balance:
            assert output.loss_sum is not None
            return replace(output, loss_sum=output.loss_sum * weight)
        return replace(output, stats=[replace(s, aux_loss=s.aux_loss * weight) for s in output.stats])


def _own_seed(config: RunConfig, groups: ProcessGroups) -> RunConfig:
    return replace(config, seed=config.seed + groups.rank)


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="expert gradients too large",
        says="expert gradients are EP times too large (averaged over EDP where dense ones are over DP)",
        model=_scale_expert_gradients(lambda ep: ep),
    ),
    Fault(
        name="expert gradients averaged",
        says="expert gradients are divided by EP",
        model=_scale_expert_gradients(lambda ep: 1 / ep),
    ),
    Fault(
        name="experts reduced as dense",
        says="expert gradients are summed over the dense group, which adds up different experts",
        model=_experts_reduced_as_dense,
    ),
    Fault(
        name="dense gradients not reduced",
        says="each rank keeps its own part of the dense gradients",
        model=_dense_not_reduced,
    ),
    Fault(
        name="drifting replica",
        says="after each step one rank's copy of a replicated weight is a millionth off",
        after_step=_drift,
    ),
    Fault(
        name="slice for reduce-scatter",
        says="each rank takes its slice of its own rows where the rows of all should be added",
        world=lambda world: TamperedWorld(world, ["ep", "etp+ep"], _slice_only),
        dispatcher="allgather",
    ),
    Fault(
        name="seed of each rank", says="each rank draws its weights with a seed of its own", config=_own_seed
    ),
    Fault(
        name="same experts everywhere",
        says="every EP rank holds the experts of the first",
        model=_same_experts_everywhere,
    ),
    Fault(
        name="norm without a rank",
        says="the gradient norm leaves out the shards of the last rank",
        world=lambda world: TamperedWorld(world, ["tp+cp+dp+pp"], _leave_out_last_rank),
    ),
    Fault(
        name="balance loss by rank",
        says="the balance loss is divided by each rank's windows instead of all windows",
        model=lambda model, groups: _PerRank(model, groups, balance=True),
    ),
    Fault(
        name="loss by rank",
        says="the loss is divided by each rank's labels instead of all labels",
        model=lambda model, groups: _PerRank(model, groups, balance=False),
    ),
    Fault(
        name="weights of another rank",
        says="rows are multiplied by the combine weights of the next EP rank",
        model=_probs_of_next_rank,
    ),
    Fault(
        name="wrong rows",
        says="rows of the right shape arrive one place late",
        world=lambda world: TamperedWorld(world, ["ep", "etp+ep"], _shift_rows),
    ),
    *SPLIT_FAULTS,
    *PIPELINE_FAULTS,
)
"""All of them; `isozyme verify RECIPE --faults` runs each and wants each to be found."""
