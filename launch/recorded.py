"""Forward, backward and reduction of a step as one CUDA graph, so that the device never waits for the host.

A step of a mixture of experts launches a thousand kernels and more; where each is short, launching them takes
longer than running them. Here the first steps run as always, one is recorded, and later ones replay it on
their own windows: the same kernels in the same order, hence the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from isozyme.core.batch import Batch, StepTotals
from isozyme.core.errors import IsozymeError, UsageError
from isozyme.launch.microbatches import Divisors, Sums
from isozyme.models.stage import Overrides
from isozyme.moe.cuda_graph import GRAPHED_BACKENDS
from isozyme.moe.layer import MoELayer
from isozyme.parallel.grad_buffer import GradientBuffer, Peaks
from isozyme.parallel.grad_layout import refuse_frozen

EAGER_STEPS = 2
"""Steps before the recording: in them kernels are compiled, and communicators connect."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What forward, backward and reduction leave on the device, beside the gradients themselves."""

    sums: Sums
    """Of this rank's micro-batches."""
    numbers: Float[Tensor, "4"]
    """Over all ranks: cross-entropy, balance loss, z-loss, and the squared norm of the gradient; fp64."""
    counts: Int[Tensor, "2 L E"]
    """Over all ranks: routed and dropped slots of each expert layer of the model."""


MakeGradients = Callable[[Sequence[Batch], Divisors], Gradients]


class RecordedGradients:
    """Makes gradients by replaying a recorded step.

    A step in which some rank has a window of several documents runs as always, on all ranks: its kernels are
    launched by the lengths of the documents.

    Results lie in memory that the next step overwrites. Recording takes the memory of one step's activations,
    until `close`. Other shapes than before are recorded anew.

    Args:
        make: forward, backward and reduction. It must not wait for the device, and must do the same work
            whatever the values of its tensors are.
        model: what it runs.
        buffer: the gradients.

    Raises:
        UsageError: if the model cannot be recorded; every reason is listed.
    """

    def __init__(self, make: MakeGradients, model: nn.Module, buffer: GradientBuffer) -> None:
        problems = _problems(model)
        if problems:
            lines = "".join(f"\n  - {each}" for each in problems)
            raise UsageError(f"the step cannot be recorded: train.cuda_graph=true{lines}")
        self._make, self._buffer = make, buffer
        # Gradients are accumulated on the stream that first used a parameter, which must be the recorded one.
        self._stream = torch.cuda.Stream()
        self._eager: dict[_Shapes, int] = {}
        self._recordings: dict[_Shapes, _Recording] = {}

    def __call__(
        self, batches: Sequence[Batch], totals: StepTotals, overrides: Overrides | None = None
    ) -> Gradients:
        """The gradients of a step, in the buffer, and what belongs to them.

        Raises:
            UsageError: if routings shall be replayed, a batch wrongly says that it is packed, or something
                cannot be recorded.
        """
        if overrides is not None:
            raise UsageError(
                "a recorded step routes by itself: routing overrides need train.cuda_graph=false."
            )
        if any(batch.packed for batch in batches) and not totals.packed_windows:
            raise UsageError(
                "to replay a step it must be known that each window is one document: Batch.packed=True, and "
                "no window of the step has several (StepTotals.packed_windows=0). Make batches with "
                "packed=False, or set train.cuda_graph=false."
            )
        key = tuple(tuple(batch.tokens.shape) for batch in batches)
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        try:
            if totals.packed_windows or self._is_early(key):
                with torch.cuda.stream(self._stream):
                    return self._make(batches, Divisors.of(totals, batches[0].tokens.device))
            if key not in self._recordings:
                self._recordings[key] = self._record(batches, totals)
            with torch.cuda.stream(self._stream):
                return self._recordings[key].replay(batches, totals, self._buffer)
        finally:
            here.wait_stream(self._stream)

    def _is_early(self, key: _Shapes) -> bool:
        """Count a step; whether it comes before the recording of its shapes."""
        done = self._eager.get(key, 0)
        self._eager[key] = min(done + 1, EAGER_STEPS)
        return done < EAGER_STEPS

    def close(self) -> None:
        """Destroy the recordings. Communicators come after: NCCL waits until no graph uses them any more."""
        while self._recordings:
            self._recordings.popitem()[1].graph.reset()

    def _record(self, batches: Sequence[Batch], totals: StepTotals) -> _Recording:
        """Record a step on copies of these batches; nothing is computed yet."""
        inputs = [_copied(batch) for batch in batches]
        divisors = Divisors.of(totals, batches[0].tokens.device)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            # The watchdog thread of NCCL may ask for the state of older calls meanwhile: hence thread_local.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                found = self._make(inputs, divisors)
        except BaseException as error:
            graph.reset()  # as in `close`: the traceback may keep it
            reason = _reason(error)
            if reason is error:
                raise
            raise reason from error
        peaks = dict(self._buffer.peaks)
        return _Recording(graph=graph, inputs=inputs, divisors=divisors, found=found, peaks=peaks)


def _reason(error: BaseException) -> BaseException:
    """Why a recording has failed: for reasons of its own, or of an operation that cannot be recorded."""
    first = error.__context__ or error  # where a recording breaks off, its end is an error as well
    for known in (error, first):
        if isinstance(known, (IsozymeError, torch.OutOfMemoryError)) or not isinstance(known, RuntimeError):
            return known
    text = str(first).strip() or type(first).__name__
    return UsageError(
        "the step cannot be recorded, as a part of it waits for the device or changes with the data: "
        f"train.cuda_graph=true; {text.splitlines()[0]}. Set train.cuda_graph=false."
    )


_Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Recording:
    """A graph, where it reads from, and where it writes to."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Batch]
    divisors: Divisors
    found: Gradients
    peaks: Peaks
    """What the buffer noted on the device for `GradientBuffer.non_finite`."""

    def replay(self, batches: Sequence[Batch], totals: StepTotals, buffer: GradientBuffer) -> Gradients:
        """Make the gradients of other batches of the same shapes."""
        refuse_frozen(buffer.segments)
        for target, batch in zip(self.inputs, batches, strict=True):
            given = batch.tensors()
            for name, tensor in target.tensors().items():
                tensor.copy_(given[name], non_blocking=True)
        self.divisors.fill_(totals)
        self.graph.replay()
        buffer.peaks = dict(self.peaks)
        return self.found


def _copied(batch: Batch) -> Batch:
    copies: dict[str, Any] = {name: tensor.clone() for name, tensor in batch.tensors().items()}
    return replace(batch, **copies)


def _problems(model: nn.Module) -> list[str]:
    """Why the step of this model cannot be recorded, as far as its configuration does not say so already."""
    found = []
    if any(parameter.device.type != "cuda" for parameter in model.parameters()):
        found.append("its weights must be on CUDA: a graph is of kernels. Set train.cuda_graph=false")
    for name, layer in model.named_modules():
        if isinstance(layer, MoELayer) and layer.experts.backend not in GRAPHED_BACKENDS:
            found.append(
                f"{name}: the backend reads row counts on the host: {layer.experts.choice}. "
                f"Set model.moe.experts={' or '.join(GRAPHED_BACKENDS)}"
            )
    return found
