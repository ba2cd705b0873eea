"""Faults of tensor, context and expert-tensor parallelism, on purpose.

Each says at which layout it can show. See `isozyme.launch.verify_faults`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from isozyme.core.batch import Batch
from isozyme.core.config import RunConfig
from isozyme.core.topology import Layout
from isozyme.launch.verify_tamper import (
    Altered,
    Change,
    ChangedOutput,
    Fault,
    Tamper,
    TamperedWorld,
    complete,
    respecified,
)
from isozyme.models.norm import RMSNorm
from isozyme.models.types import ModelOutput
from isozyme.moe.router import Router
from isozyme.parallel.communicator import Call, Communicator, Finished, Pending
from isozyme.parallel.context_layout import ContextLayout
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import ShardSpec, spec_of


def _not_summed_over_tp(kind: type[nn.Module]) -> Change:
    return respecified(lambda module, spec: complete(spec, "tp") if isinstance(module, kind) else spec)


def _kv_not_summed(_module: nn.Module, spec: ShardSpec) -> ShardSpec:
    shared = any(name.startswith("tp") for name in spec.replicas) and ".attention." in spec.name
    return complete(spec, "tp") if shared else spec


def _experts_over_dp(_module: nn.Module, spec: ShardSpec) -> ShardSpec:
    if spec.grid == "dense":
        return spec
    return replace(spec, grid="dense", split=(), replicas={"dp": "partial"})


@torch.no_grad()
def _fused_cut(model: nn.Module, groups: ProcessGroups) -> nn.Module:
    group = groups["etp"]
    for parameter in model.parameters():
        spec = spec_of(parameter)
        if spec.grid == "expert" and parameter.ndim == 3:
            whole = group.all_gather(parameter.detach().movedim(1, 0).contiguous()).movedim(0, 1)
            parameter.copy_(whole.flatten(0, 1).chunk(group.size)[group.rank].view_as(parameter))
    return model


def _loss_of_every_tp_rank(model: nn.Module, groups: ProcessGroups) -> nn.Module:
    size = groups["tp"].size

    def change(output: ModelOutput) -> ModelOutput:
        return output if output.loss_sum is None else replace(output, loss_sum=output.loss_sum * size)

    return ChangedOutput(model, change)


class _LocalPositions(nn.Module):
    """A model in which each context-parallel rank numbers its own tokens from zero."""

    def __init__(self, model: nn.Module, groups: ProcessGroups) -> None:
        super().__init__()
        self.model, self._size = model, groups["cp"].size

    def forward(self, batch: Batch, **given: Any) -> ModelOutput:
        """Run the model on wrong positions."""
        layout = ContextLayout(window=batch.window_length, size=self._size)
        by_rank = torch.arange(layout.local_length).repeat(self._size)
        positions = layout.restore(by_rank[None]).expand_as(batch.positions)
        output: ModelOutput = self.model(replace(batch, positions=positions), **given)
        return output


def _slice_in_backward(inner: Communicator, call: Call) -> Pending | None:
    """Where a backward should add all ranks' gradients, each rank takes its slice of its own."""
    if call.kind != "reduce_scatter" or torch._C._current_graph_task_id() == -1:
        return None
    assert call.input is not None
    assert call.output is not None
    assert call.input_sizes is not None
    call.output.copy_(call.input.split(list(call.input_sizes))[inner.rank])
    return Finished(call.output)


def _no_sum(numbers: Literal["floating", "whole"]) -> Tamper:
    """Each rank keeps its own part where parts should be added (or the largest be found)."""

    def tamper(_inner: Communicator, call: Call) -> Pending | None:
        if call.kind != "all_reduce" or call.input is None:
            return None
        return Finished(call.output) if call.input.is_floating_point() == (numbers == "floating") else None

    return tamper


def _shares_in_a_row(inner: Communicator, call: Call) -> Pending | None:
    """Gathered keys and values lie as if the ranks held contiguous shares."""
    if call.kind != "all_gather" or call.input is None or call.input.ndim != 5:
        return None
    layout = ContextLayout(window=call.input.shape[0] * inner.size, size=inner.size)
    return Altered(inner._start(call), lambda window: layout.deal(window, dim=0))


def _one_kv_head(config: RunConfig) -> RunConfig:
    return replace(config, model=replace(config.model, num_kv_heads=1))


TP, CP, ETP = Layout(tp=2, dp=1), Layout(cp=2, dp=1), Layout(dp=2, etp=2)

SPLIT_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="router not summed over TP",
        says="each TP rank keeps the router's gradient of its own tokens",
        layout=Layout(tp=2, dp=1, ep=2),
        model=_not_summed_over_tp(Router),
    ),
    Fault(
        name="norms not summed over TP",
        says="each TP rank keeps the norms' gradient of its own tokens",
        layout=TP,
        model=_not_summed_over_tp(RMSNorm),
    ),
    Fault(
        name="K/V replicas not summed",
        says="ranks that hold the same K/V head keep the gradient of their own query heads",
        layout=TP,
        run=_one_kv_head,
        model=respecified(_kv_not_summed),
    ),
    Fault(
        name="backward slices what forward gathered",
        says="the gradient of tokens gathered over TP is cut instead of added",
        layout=TP,
        world=lambda world: TamperedWorld(world, ["tp"], _slice_in_backward),
    ),
    Fault(
        name="vocabulary not summed",
        says="each TP rank normalises over its own part of the vocabulary",
        layout=TP,
        world=lambda world: TamperedWorld(world, ["tp"], _no_sum("floating")),
    ),
    Fault(
        name="loss of every TP rank",
        says="the loss over a cut vocabulary, which all TP ranks have, is counted TP times",
        layout=TP,
        model=_loss_of_every_tp_rank,
    ),
    Fault(
        name="experts summed over DP alone",
        says="experts at EP=1 are summed over DP alone, though TP ranks hold copies too (TP is not ETP)",
        layout=Layout(tp=2, dp=2),
        model=respecified(_experts_over_dp),
    ),
    Fault(
        name="gate and up cut as one",
        says="each ETP rank holds a contiguous part of the fused gate-up weight: all gate, or all up",
        layout=ETP,
        model=_fused_cut,
    ),
    Fault(
        name="positions of the rank",
        says="rotary positions count from the first token of each CP rank",
        layout=CP,
        model=_LocalPositions,
    ),
    Fault(
        name="zig-zag not undone",
        says="keys gathered over CP lie in the order of the ranks, not of the window",
        layout=CP,
        world=lambda world: TamperedWorld(world, ["cp"], _shares_in_a_row),
    ),
    Fault(
        name="balance loss of a share",
        says="the balance loss counts the tokens of each CP rank's share, not of the whole window",
        layout=CP,
        world=lambda world: TamperedWorld(world, ["tp+cp"], _no_sum("whole")),
    ),
)
"""Part of `isozyme.launch.verify_faults.FAULTS`."""
