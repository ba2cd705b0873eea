"""Faults of tensor, context, pipeline and expert-tensor parallelism and of the sharded optimiser, on purpose.

Each says at which layout it can show. See `isozyme.launch.verify_faults`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isozyme.core.batch import Batch
from isozyme.core.config import RunConfig
from isozyme.core.topology import Layout, Topology
from isozyme.launch.verify_tamper import Altered, Change, Fault, Tamper, TamperedWorld
from isozyme.models.norm import RMSNorm
from isozyme.models.types import ModelOutput
from isozyme.moe.router import Router
from isozyme.parallel.communicator import Call, Communicator, Finished, Pending
from isozyme.parallel.context_layout import ContextLayout
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import EMBEDDING, Replica, ShardSpec, attach, spec_of


def _respecified(change: Callable[[nn.Module, ShardSpec], ShardSpec]) -> Change:
    """Another ownership record for some parameters."""

    def apply(model: nn.Module, _groups: ProcessGroups) -> nn.Module:
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                attach(parameter, change(module, spec_of(parameter)))
        return model

    return apply


def _complete(spec: ShardSpec, axis: str) -> ShardSpec:
    """Gradients along `axis` (or a part of it) are taken for complete where they are parts of a sum."""
    replicas: dict[str, Replica] = {
        name: "identical" if name.split("%")[0] == axis else kind for name, kind in spec.replicas.items()
    }
    return replace(spec, replicas=replicas)


def _not_summed_over_tp(kind: type[nn.Module]) -> Change:
    return _respecified(lambda module, spec: _complete(spec, "tp") if isinstance(module, kind) else spec)


def _kv_not_summed(_module: nn.Module, spec: ShardSpec) -> ShardSpec:
    shared = any(name.startswith("tp") for name in spec.replicas) and ".attention." in spec.name
    return _complete(spec, "tp") if shared else spec


def _experts_over_dp(_module: nn.Module, spec: ShardSpec) -> ShardSpec:
    if spec.grid == "dense":
        return spec
    return replace(spec, grid="dense", split=(), replicas={"dp": "partial"})


def _embedding_not_summed(_module: nn.Module, spec: ShardSpec) -> ShardSpec:
    return _complete(spec, EMBEDDING)


class _CountedTwice(ShardSpec):
    """The spec of a shard of which only half the copies are known."""

    def num_replicas(self, topology: Topology) -> int:
        """Half of what it is."""
        return super().num_replicas(topology) // 2


def _embedding_counted_twice(_module: nn.Module, spec: ShardSpec) -> ShardSpec:
    return _CountedTwice(**vars(spec)) if EMBEDDING in spec.replicas else spec


@torch.no_grad()
def _fused_cut(model: nn.Module, groups: ProcessGroups) -> nn.Module:
    group = groups["etp"]
    for parameter in model.parameters():
        spec = spec_of(parameter)
        if spec.grid == "expert" and parameter.ndim == 3:
            whole = group.all_gather(parameter.detach().movedim(1, 0).contiguous()).movedim(0, 1)
            parameter.copy_(whole.flatten(0, 1).chunk(group.size)[group.rank].view_as(parameter))
    return model


class _Output(nn.Module):
    """A model whose output is changed."""

    def __init__(self, model: nn.Module, change: Callable[[ModelOutput], ModelOutput]) -> None:
        super().__init__()
        self.model, self._change = model, change

    def forward(self, batch: Batch, **given: Any) -> ModelOutput:
        """Run the model and change what comes of it."""
        return self._change(self.model(batch, **given))


def _loss_of_every_tp_rank(model: nn.Module, groups: ProcessGroups) -> nn.Module:
    size = groups["tp"].size

    def change(output: ModelOutput) -> ModelOutput:
        return output if output.loss_sum is None else replace(output, loss_sum=output.loss_sum * size)

    return _Output(model, change)


def _balance_loss_of_every_stage(model: nn.Module, groups: ProcessGroups) -> nn.Module:
    size = groups["pp"].size
    return _Output(
        model, lambda out: replace(out, stats=[replace(s, aux_loss=s.aux_loss * size) for s in out.stats])
    )


def _router_losses_of_the_head_alone(model: nn.Module, _groups: ProcessGroups) -> nn.Module:
    def change(output: ModelOutput) -> ModelOutput:
        if output.loss_sum is not None:
            return output
        stats = [replace(s, aux_loss=s.aux_loss.detach(), z_loss=s.z_loss.detach()) for s in output.stats]
        return replace(output, stats=stats)

    return _Output(model, change)


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


def _one_too_late(stage: int) -> Tamper:
    """Of what one stage sends, each message carries the tensor of the one before it."""
    sent: list[Tensor] = []

    def tamper(inner: Communicator, call: Call) -> Pending | None:
        if call.kind != "send" or call.input is None or inner.rank != stage:
            return None
        sent.append(call.input.clone())
        return inner._start(replace(call, input=sent[max(0, len(sent) - 2)]))

    return tamper


def _slices_of_others(inner: Communicator, call: Call) -> Pending | None:
    """Each owner is given the sum of the slice after its own."""
    if call.kind != "reduce_scatter" or call.input is None:
        return None
    share = call.input.shape[0] // inner.size
    return inner._start(replace(call, input=call.input.roll(-share, dims=0)))


def _tied(config: RunConfig) -> RunConfig:
    return replace(config, model=replace(config.model, tied=True))


def _one_kv_head(config: RunConfig) -> RunConfig:
    return replace(config, model=replace(config.model, num_kv_heads=1))


def _sharded(config: RunConfig) -> RunConfig:
    return replace(config, optim=replace(config.optim, sharded=True))


TP, CP, PP, ETP = Layout(tp=2, dp=1), Layout(cp=2, dp=1), Layout(pp=2, dp=1), Layout(dp=2, etp=2)

AXIS_FAULTS: tuple[Fault, ...] = (
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
        model=_respecified(_kv_not_summed),
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
        model=_respecified(_experts_over_dp),
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
    Fault(
        name="balance loss once a stage",
        says="the balance loss of every layer is counted once for each pipeline stage",
        layout=PP,
        model=_balance_loss_of_every_stage,
    ),
    Fault(
        name="router losses of the head alone",
        says="router losses of the stages before the head are forgotten",
        layout=PP,
        model=_router_losses_of_the_head_alone,
    ),
    Fault(
        name="tied embedding twice in the norm",
        says="the embedding that the first and the last stage share counts twice in the gradient norm",
        layout=PP,
        run=_tied,
        model=_respecified(_embedding_counted_twice),
    ),
    Fault(
        name="tied embedding not summed",
        says="the first and the last stage keep their own part of the shared embedding's gradient",
        layout=PP,
        run=_tied,
        model=_respecified(_embedding_not_summed),
    ),
    Fault(
        name="hidden states of another micro-batch",
        says="a stage receives the hidden states of the micro-batch before",
        layout=PP,
        world=lambda world: TamperedWorld(world, ["pp"], _one_too_late(0)),
    ),
    Fault(
        name="gradients of another micro-batch",
        says="a stage receives the gradients of the micro-batch before",
        layout=PP,
        world=lambda world: TamperedWorld(world, ["pp"], _one_too_late(1)),
    ),
    Fault(
        name="slices of other owners",
        says="with a sharded optimiser each rank updates its slice with the sum that belongs to the next one",
        layout=Layout(dp=2),
        run=_sharded,
        world=lambda world: TamperedWorld(world, ["tp+cp+dp", "dp", "edp"], _slices_of_others),
    ),
)
"""Part of `isozyme.launch.verify_faults.FAULTS`."""
