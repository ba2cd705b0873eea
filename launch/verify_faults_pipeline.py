"""Faults of pipelines and of the sharded optimiser, on purpose.

Each says at which layout it can show. See `isozyme.launch.verify_faults`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from isozyme.core.config import RunConfig
from isozyme.core.topology import Layout, Topology
from isozyme.launch.verify_tamper import ChangedOutput, Fault, Tamper, TamperedWorld, complete, respecified
from isozyme.models.types import ModelOutput
from isozyme.parallel.communicator import Call, Communicator, Pending
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import EMBEDDING, ShardSpec


def _embedding_not_summed(_module: nn.Module, spec: ShardSpec) -> ShardSpec:
    return complete(spec, EMBEDDING)


class _CountedTwice(ShardSpec):
    """The spec of a shard of which only half the copies are known."""

    def num_replicas(self, topology: Topology) -> int:
        """Half of what it is."""
        return super().num_replicas(topology) // 2


def _embedding_counted_twice(_module: nn.Module, spec: ShardSpec) -> ShardSpec:
    return _CountedTwice(**vars(spec)) if EMBEDDING in spec.replicas else spec


def _balance_loss_of_every_stage(model: nn.Module, groups: ProcessGroups) -> nn.Module:
    size = groups["pp"].size
    return ChangedOutput(
        model, lambda out: replace(out, stats=[replace(s, aux_loss=s.aux_loss * size) for s in out.stats])
    )


def _router_losses_of_the_head_alone(model: nn.Module, _groups: ProcessGroups) -> nn.Module:
    def change(output: ModelOutput) -> ModelOutput:
        if output.loss_sum is not None:
            return output
        stats = [replace(s, aux_loss=s.aux_loss.detach(), z_loss=s.z_loss.detach()) for s in output.stats]
        return replace(output, stats=stats)

    return ChangedOutput(model, change)


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


def _sharded(config: RunConfig) -> RunConfig:
    return replace(config, optim=replace(config.optim, sharded=True))


PP = Layout(pp=2, dp=1)

PIPELINE_FAULTS: tuple[Fault, ...] = (
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
        model=respecified(_embedding_counted_twice),
    ),
    Fault(
        name="tied embedding not summed",
        says="the first and the last stage keep their own part of the shared embedding's gradient",
        layout=PP,
        run=_tied,
        model=respecified(_embedding_not_summed),
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
