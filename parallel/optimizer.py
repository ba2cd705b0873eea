"""AdamW over a gradient buffer: at least fp32 masters and moments, saved under the parameters' global names.

The state lies flat beside the gradient buffer's groups (one tensor of moments for each flat group). Every
replica makes the same update from the same summed gradient; nothing is communicated here. Its twin that deals
the state out over the replicas is in `isozyme.parallel.sharded_optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from isozyme.core.config import OptimConfig
from isozyme.core.errors import UsageError
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.grad_layout import FlatGroup
from isozyme.parallel.optimizer_backends import Slot, choose
from isozyme.parallel.shard_spec import ShardSpec

EXP_AVG, EXP_AVG_SQ, MASTER = "optim.exp_avg", "optim.exp_avg_sq", "optim.master"
"""Prefixes of the state's names: the first moment of `w` is called `optim.exp_avg.w`."""


class Optimizer:
    """AdamW (Loshchilov and Hutter, 2019) whose gradients are the `main_grad` of a gradient buffer.

    A parameter of less than fp32 has a master copy in fp32, which is updated and then rounded into it; others
    are their own masters. Weight decay applies where the parameter's spec says so.

    Args:
        buffer: the gradients, which also knows parameters and specs.
        config: betas, eps, weight decay and `implementation`.

    Attributes:
        choice: which implementation runs, and why not the others.
        updates: how many updates were made.

    Raises:
        BackendError: if `config.implementation` names one that cannot run here.
        UsageError: if the buffer deals its sums out, and this is not the sharded optimiser.
    """

    def __init__(self, buffer: GradientBuffer, config: OptimConfig) -> None:
        self._check(buffer)
        self.buffer = buffer
        self.updates = 0
        self._state: list[tuple[str, Tensor, ShardSpec]] = []
        self._rounded: list[tuple[nn.Parameter, Tensor]] = []
        """(parameter, master) of those that have a copy."""
        self._backend, self.choice = choose(list(self._slots()), config)
        self._addresses = [segment.parameter.data_ptr() for segment in buffer.segments]

    def step(self, lr: float, scale: float = 1.0) -> None:
        """Update every parameter once from the reduced gradients times `scale`, the clipping coefficient.

        Afterwards the gradients may be scaled or not: that depends on the implementation.

        Raises:
            UsageError: if the gradients have not been reduced, or a parameter was moved or cast.
        """
        if not self.buffer.reduced:
            raise UsageError(
                "step() before buffer.reduce(): each replica would go its own way. Call reduce() first."
            )
        self._must_be_in_place()
        self._backend.step(lr, scale)
        self.updates += 1
        self._publish(copied=self._backend.writes_copies)

    def finish(self) -> None:
        """Return when the parameters are those of the last update; see `ShardedOptimizer`."""

    def state(self) -> Iterator[tuple[str, Tensor, ShardSpec]]:
        """(global name, this rank's shard, spec) of every moment and every separate master.

        The tensors are the live ones: copying into them loads the state. Specs are those of the parameters
        under the state's names, so a checkpoint of them can be read at any layout. `updates` is not a tensor
        and is saved beside them.
        """
        yield from self._state

    @torch.no_grad()
    def loaded(self, updates: int) -> None:
        """Go on from state that was copied into the tensors of `state()`, after `updates` updates."""
        self.updates = updates
        self._backend.set_updates(updates)
        self._publish(copied=False)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take masters from the parameters: after weights alone were loaded into the model."""
        self._must_be_in_place()
        for parameter, master in self._rounded:
            master.copy_(parameter)

    def _must_be_in_place(self) -> None:
        """Refuse parameters that are elsewhere by now: the update would go to the memory that they left."""
        moved = [
            segment.spec.name
            for segment, address in zip(self.buffer.segments, self._addresses, strict=True)
            if segment.parameter.data_ptr() != address
        ]
        if moved:
            raise UsageError(
                "an optimiser updates parameters where they were when it was made: "
                f"{len(moved)} of {len(self._addresses)} were moved or cast since, such as {moved[0]}. "
                "Move and cast the model first, then make its gradient buffer and optimiser."
            )

    def _check(self, buffer: GradientBuffer) -> None:
        if buffer.sharded:
            raise UsageError(
                "the whole gradient is needed, but the buffer deals its sums out: sharded=True. "
                "Use ShardedOptimizer, or a buffer with sharded=False."
            )

    @torch.no_grad()
    def _publish(self, *, copied: bool) -> None:
        """Bring updated masters into the parameters, unless the update has done so."""
        if self._rounded and not copied:
            parameters, masters = zip(*self._rounded, strict=True)
            torch._foreach_copy_(parameters, masters)

    def _slots(self) -> Iterator[Slot]:
        """The tensors of every update; notes state and masters on the way."""
        for group in self.buffer.flat:
            yield from self._slots_of(group)

    def _slots_of(self, group: FlatGroup) -> Iterator[Slot]:
        dtype = group.state_dtype
        exp_avg, exp_avg_sq = (torch.zeros_like(group.data, dtype=dtype) for _ in range(2))
        copied = any(segment.parameter.dtype != dtype for segment in group.segments)
        masters = torch.zeros_like(group.data, dtype=dtype) if copied else None
        for segment in group.segments:
            parameter = segment.parameter
            own = parameter.dtype == dtype
            slot = Slot(
                master=parameter.detach() if own or masters is None else segment.view(masters),
                grad=segment.view(group.data),
                exp_avg=segment.view(exp_avg),
                exp_avg_sq=segment.view(exp_avg_sq),
                copy=None if own else parameter.detach(),
                decay=segment.spec.decay,
            )
            named = {EXP_AVG: slot.exp_avg, EXP_AVG_SQ: slot.exp_avg_sq}
            if not own:
                with torch.no_grad():
                    slot.master.copy_(parameter)
                self._rounded.append((parameter, slot.master))
                named[MASTER] = slot.master
            for prefix, tensor in named.items():
                self._state.append(
                    (f"{prefix}.{segment.spec.name}", tensor, state_spec(segment.spec, prefix))
                )
            yield slot


def state_spec(spec: ShardSpec, prefix: str) -> ShardSpec:
    """The spec of a parameter's state: the same under another name."""
    return replace(spec, name=f"{prefix}.{spec.name}", kind="buffer", decay=False)
