"""Running one stage of a pipeline: its actions in order, with hidden states and gradients sent in between.

One function runs every schedule, also that of one stage, which communicates nothing. Shapes are known before
anything is sent. Knows neither models nor losses: a chunk is a function from hidden states to hidden states
and to the scalar that this chunk itself adds to the loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from isozyme.core.errors import UsageError
from isozyme.parallel.communicator import Communicator, Pending
from isozyme.parallel.pipeline_schedule import Action, Schedule
from isozyme.parallel.pipeline_timeline import Transfer, plan


@dataclass(frozen=True, kw_only=True)
class ChunkOutput:
    """What the forward of one micro-batch through one chunk gives."""

    hidden: Tensor | None = None
    """What the next virtual stage receives; None from the last."""
    loss: Tensor | None = None
    """A scalar that this chunk adds to the loss; None if it adds nothing."""


ChunkFunction = Callable[[int, int, Tensor | None], ChunkOutput]
"""`(chunk, micro_batch, hidden)` → output; `hidden` is None on the first virtual stage."""


def run_schedule(
    schedule: Schedule,
    forward: ChunkFunction,
    communicator: Communicator,
    hidden_like: Callable[[int], Tensor],
) -> None:
    """Do what `schedule` says for this rank's stage. All ranks of one pipeline call it together.

    Each backward starts from the gradient that the next virtual stage sent and from the chunk's own loss, and
    sends the gradient of the chunk's input to the previous one; parameters get their gradients as in any
    backward. A received or sent tensor is kept only as long as it is needed; of an output that was sent, only
    its place in the autograd graph is.

    Tensors travel as `plan` lays down: each starts as soon as it is made, and is waited for when it is used.
    Bytes sent: for each micro-batch, its hidden states once for each virtual stage but the last, and as many
    for gradients.

    Args:
        schedule: for each stage its actions; without backwards, nothing is kept for them.
        forward: runs a chunk of this rank.
        communicator: the pipeline group; its ranks are the stages in order.
        hidden_like: for each micro-batch an empty tensor in the shape, dtype and place of this rank's hidden
            states, the same on all stages.

    Raises:
        ConfigError: if the schedule cannot be played.
        UsageError: if it has another number of stages, or hidden states are not as `hidden_like` says.
    """
    if len(schedule) != communicator.size:
        raise UsageError(
            f"a schedule has one list for each stage: {len(schedule)} lists, but {communicator.name} has "
            f"{communicator.size} ranks. Make it for stages={communicator.size}."
        )
    trains = any(action.kind == "B" for action in schedule[0])
    run = _Run(forward, communicator, hidden_like, trains=trains)
    for step in plan(schedule)[communicator.rank]:
        made = None
        if step.action is not None:
            made = run.forward(step.action) if step.action.kind == "F" else run.backward(step.action)
        if step.transfers:
            run.exchange(step.transfers, made)
    run.finish()


class _Run:
    """One stage under way."""

    def __init__(
        self,
        forward: ChunkFunction,
        communicator: Communicator,
        hidden_like: Callable[[int], Tensor],
        *,
        trains: bool,
    ) -> None:
        self._forward, self._communicator = forward, communicator
        self._hidden_like, self._trains = hidden_like, trains
        self._sent_here: dict[Action, tuple[Pending, Tensor]] = {}
        """What comes or has come from other stages, by the action of this stage that needs it."""
        self._in_flight: dict[tuple[int, int], _Kept] = {}
        """By (chunk, micro-batch)."""
        self._open: deque[Pending] = deque()

    def forward(self, action: Action) -> Tensor | None:
        """Run a chunk; returns the hidden states to be sent."""
        hidden = self._received(action)
        if hidden is not None and self._trains:
            hidden.requires_grad_()
        output = self._forward(action.chunk, action.micro_batch, hidden)
        if output.hidden is not None:
            self._check(output.hidden, action)
        if self._trains:
            self._in_flight[action.chunk, action.micro_batch] = _Kept.of(hidden, output)
        return None if output.hidden is None else output.hidden.detach()

    def backward(self, action: Action) -> Tensor | None:
        """Run the backward of a chunk; returns the gradient of its input, to be sent."""
        gradient = self._received(action)
        return self._in_flight.pop((action.chunk, action.micro_batch)).backward(gradient)

    def exchange(self, transfers: Sequence[Transfer], made: Tensor | None) -> None:
        """Start to send what the action just made, and to receive what other stages made meanwhile."""
        sends, recvs = [], []
        for transfer in transfers:
            if transfer.source == self._communicator.rank:
                assert made is not None
                sends.append((made, transfer.destination))
            else:
                recvs.append((self._hidden_like(transfer.action.micro_batch), transfer))
        pending = self._communicator.exchange_async(sends, [(tensor, t.source) for tensor, t in recvs])
        for tensor, transfer in recvs:
            self._sent_here[transfer.action] = (pending, tensor)
        self._open.append(pending)
        # What was sent so long ago has been received, unless a stage lags: let go of it.
        while len(self._open) > 2 * self._communicator.size:
            self._open.popleft().wait()

    def finish(self) -> None:
        """Wait for what is still under way."""
        while self._open:
            self._open.popleft().wait()

    def _received(self, action: Action) -> Tensor | None:
        """What another stage made for this action; None if nobody does."""
        found = self._sent_here.pop(action, None)
        if found is None:
            return None
        pending, tensor = found
        pending.wait()
        return tensor

    def _check(self, hidden: Tensor, action: Action) -> None:
        like = self._hidden_like(action.micro_batch)
        if (hidden.shape, hidden.dtype) != (like.shape, like.dtype):
            raise UsageError(
                f"hidden states must have the shape that the next stage expects: {action} on stage "
                f"{self._communicator.rank} made {tuple(hidden.shape)} {hidden.dtype}, but hidden_like says "
                f"{tuple(like.shape)} {like.dtype}. Make one of them like the other."
            )


@dataclass(frozen=True)
class _Kept:
    """What a backward needs of its forward."""

    input: Tensor | None
    output: GradientEdge | None
    """The output's place in the graph; not its values, which the next stage has."""
    loss: Tensor | None

    @staticmethod
    def of(hidden: Tensor | None, made: ChunkOutput) -> _Kept:
        edge = (
            get_gradient_edge(made.hidden) if made.hidden is not None and made.hidden.requires_grad else None
        )
        return _Kept(hidden, edge, made.loss if made.loss is not None and made.loss.requires_grad else None)

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Backward from the received gradient and from the own loss together, in one pass."""
        roots: list[GradientEdge] = []
        gradients: list[Tensor] = []
        if self.output is not None:
            assert gradient is not None
            roots.append(self.output)
            gradients.append(gradient)
        if self.loss is not None:
            roots.append(get_gradient_edge(self.loss))
            gradients.append(torch.ones_like(self.loss))
        if roots:
            torch.autograd.backward(roots, gradients)
        if self.input is None:
            return None
        return torch.zeros_like(self.input) if self.input.grad is None else self.input.grad
