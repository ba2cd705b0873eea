"""How a run is made to go wrong on purpose: a fault wraps what it is made of, and no code is patched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from isozyme.core.batch import Batch
from isozyme.core.config import RunConfig
from isozyme.core.topology import Layout
from isozyme.models.types import ModelOutput
from isozyme.parallel.communicator import Call, Communicator, Pending
from isozyme.parallel.process_groups import ProcessGroups, World
from isozyme.parallel.shard_spec import Replica, ShardSpec, attach, spec_of

Tamper = Callable[[Communicator, Call], Pending | None]
"""Looks at a call of a group: returns what comes of it, or None to make the call as it is."""
Change = Callable[[nn.Module, ProcessGroups], nn.Module]
"""Changes or wraps the model that a rank has built."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong on a layout of more than one rank (the reference is left in order)."""

    name: str
    says: str
    """What goes wrong, in words."""
    world: Callable[[World], World] | None = None
    """Wraps the transport."""
    config: Callable[[RunConfig, ProcessGroups], RunConfig] | None = None
    """Changes the configuration that one rank builds its model from."""
    model: Change | None = None
    after_step: Callable[[nn.Module, ProcessGroups], None] | None = None
    """Runs on every rank after every step."""
    dispatcher: str = "alltoall"
    """Where it shows …"""
    layout: Layout | None = None
    """… and at which layout; None for experts on several ranks with several copies."""
    run: Callable[[RunConfig], RunConfig] | None = None
    """Changes the run, the reference's as well, to one in which it can show."""


class Altered(Pending):
    """The result of a call, changed once it is there."""

    def __init__(self, pending: Pending, change: Callable[[Tensor], Tensor]) -> None:
        self._pending, self._change = pending, change
        self._result: Tensor | None = None

    def wait(self) -> Any:
        """The wrong result, in the place of the right one."""
        result: Tensor = self._pending.wait()
        if self._result is None:
            self._result = result.copy_(self._change(result.clone()))
        return self._result


class TamperedWorld:
    """A world whose communicators of some names are tampered with.

    Args:
        world: the world in order.
        names: which groups, such as `ep`; all if empty.
        tamper: what happens to their calls.
    """

    def __init__(self, world: World, names: Sequence[str], tamper: Tamper) -> None:
        self._world, self._names, self._tamper = world, tuple(names), tamper
        self.rank, self.size = world.rank, world.size

    def split(self, name: str, partition: Sequence[tuple[int, ...]]) -> Communicator:
        """The communicator of this rank's part."""
        communicator = self._world.split(name, partition)
        wrong = communicator.size > 1 and (not self._names or name in self._names)
        return _Tampered(communicator, self._tamper) if wrong else communicator


class _Tampered(Communicator):
    def __init__(self, inner: Communicator, tamper: Tamper) -> None:
        super().__init__(inner.name, inner.ranks, inner.rank)
        self._inner, self._tamper = inner, tamper

    def _start(self, call: Call) -> Pending:
        result = self._tamper(self._inner, call)
        return self._inner._start(call) if result is None else result


def respecified(change: Callable[[nn.Module, ShardSpec], ShardSpec]) -> Change:
    """Another ownership record for some parameters."""

    def apply(model: nn.Module, _groups: ProcessGroups) -> nn.Module:
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                attach(parameter, change(module, spec_of(parameter)))
        return model

    return apply


def complete(spec: ShardSpec, axis: str) -> ShardSpec:
    """Gradients along `axis` (or a part of it) are taken for complete where they are parts of a sum."""
    replicas: dict[str, Replica] = {
        name: "identical" if name.split("%")[0] == axis else kind for name, kind in spec.replicas.items()
    }
    return replace(spec, replicas=replicas)


class ChangedOutput(nn.Module):
    """A model whose output is changed."""

    def __init__(self, model: nn.Module, change: Callable[[ModelOutput], ModelOutput]) -> None:
        super().__init__()
        self.model, self._change = model, change

    def forward(self, batch: Batch, **given: Any) -> ModelOutput:
        """Run the model and change what comes of it."""
        return self._change(self.model(batch, **given))
