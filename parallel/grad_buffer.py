"""The gradient buffer: gradients are added up in at least fp32 and summed over ranks by an explicit call.

Each parameter's `main_grad` is a view of a flat group. A hook moves `.grad` there after every backward, and
nothing else reads `.grad`: a fused backward may write `main_grad` itself, and an expert without tokens may
have no gradient at all. All ranks reduce the same buckets in the same order, whatever was touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from isozyme.core.errors import ConfigError, UsageError
from isozyme.parallel.communicator import Pending
from isozyme.parallel.grad_layout import Segment, agree_on_buckets, refuse_frozen, stack_in
from isozyme.parallel.grad_packing import pack
from isozyme.parallel.grad_reduce import finish_gather, finish_sum, start_gather, start_sum
from isozyme.parallel.main_grad import OpenStep, adopt, fill, forget, release, take
from isozyme.parallel.process_groups import ProcessGroups

Peaks = dict[int, tuple[Tensor, ...]]


class GradientBuffer:
    """Gradients of all parameters of one rank, from the first micro-batch to the optimiser step.

    A step is `zero()`, then a backward for each micro-batch, then `reduce()` once. Sums are never averaged:
    the loss has been divided by the step's count of labels already. The first gradient of a step overwrites
    `main_grad`, so between `zero()` and `reduce()` it means something only after `settle()`.

    A backward that adds a weight gradient to `parameter.main_grad` by itself sets
    `parameter.grad_added_to_main_grad = True` and returns any placeholder (it is dropped unread), or returns
    None and leaves the flag alone. It must not be mixed with an ordinary gradient of the same parameter in
    the same backward. If it asks `isozyme.parallel.main_grad.claim`, it may be told to overwrite; a parameter
    that was not claimed in one step is filled with zeros for the next, so that it need not ask.

    Args:
        parameters: the parameters of this rank, each with a `ShardSpec`, in an order that is the same on all
            ranks that hold the same shards. Those that do not require a gradient are left out.
        groups: the communicators of this rank.
        bucket_bytes: upper limit of what one call reduces; by default one call a flat group (and unit).
        sharded: sum each gradient to one owner, for `isozyme.parallel.sharded_optimizer`; after `reduce()`
            only the slices that this rank owns hold sums.
        units: parts of the model, in the order in which backward completes them, each with its parameters.
            Their buckets can start early: see `expect` and `passed`. Parameters may be in none.
        as_computed: keep the gradients of parameters that nobody else has a part of in the parameters' own
            type, in which backward computes them. A step is then one backward, and no number changes.

    Attributes:
        groups: the communicators.
        sharded: as given.
        flat: the flat groups (`FlatGroup`), in a fixed order.
        buckets: the parts that are reduced one by one (`Bucket`), in the order in which they are.
        segments: every parameter with its place, in the order in which parameters were given.
        peaks: for each shared bucket of this step, by number, the largest magnitude of each tensor before the
            ranks' parts were added. A recorded step, in which nothing is noted anew, puts its own here.

    Raises:
        ConfigError: if `bucket_bytes` is not positive.
        UsageError: if a parameter belongs to another gradient buffer already.
        ValueError: if parameters break a rule of `isozyme.parallel.grad_packing.pack`.
        CommunicationError: if the ranks that sum together do not have the same parameters.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        groups: ProcessGroups,
        *,
        bucket_bytes: int | None = None,
        sharded: bool = False,
        units: Sequence[Sequence[nn.Parameter]] = (),
        as_computed: bool = False,
    ) -> None:
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes must be positive: bucket_bytes={bucket_bytes}. Leave it out.")
        self.groups, self.sharded, self._num_units = groups, sharded, len(units)
        self.flat, self.buckets = pack(
            parameters,
            groups,
            bucket_bytes=bucket_bytes,
            sharded=sharded,
            units=units,
            as_computed=as_computed,
        )
        agree_on_buckets(self.buckets)
        self._reduced = False
        self._step, self._steps = OpenStep(), 0
        self._ready: set[int] = set()
        self._passes_left: list[int] = []
        """For each unit the backward passes that are still to come; empty if nobody said how many."""
        self._pending: list[Pending | None] = []
        self.peaks: Peaks = {}
        held = (segment for group in self.flat for segment in group.segments)
        self.segments = sorted(held, key=lambda segment: segment.order)
        self._parameters = [segment.parameter for segment in self.segments]
        self._gaps = [gap for group in self.flat for gap in group.gaps()]
        """What lies between parameters: never written but by reductions, of zeros."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        for index, bucket in enumerate(self.buckets):
            for segment in bucket.segments:
                self._adopt(segment, segment.view(bucket.group.data), index)

    @property
    def reduced(self) -> bool:
        """Whether `main_grad` holds the sum over all ranks (and over all micro-batches)."""
        return self._reduced

    def zero(self) -> None:
        """Forget all gradients: the start of a step.

        Raises:
            UsageError: if buckets are being reduced, or a parameter was frozen since the buffer was made.
        """
        if len(self._pending) not in (0, len(self.buckets)):
            raise UsageError(
                "zero() while buckets are being reduced: call reduce() first, which waits for them."
            )
        refuse_frozen(self.segments)
        if self._gaps:
            torch._foreach_zero_(self._gaps)
        for parameter in self._parameters:
            parameter.grad = None
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        forget(self._parameters)
        self._reduced = False
        self._step.number = self._steps = self._steps + 1
        self._ready.clear()
        self._passes_left.clear()
        self._pending.clear()
        self.peaks.clear()

    def settle(self) -> None:
        """Fill with zeros what no gradient has come for, for those who use `main_grad` before `reduce()`."""
        fill(self._parameters)

    def ready(self, bucket: int) -> None:
        """Say that no further gradient will come for a bucket, so that its reduction may start.

        Reductions start in the order of `buckets` whatever the order of these calls: a bucket waits for those
        before it. Calling it is optional; `reduce()` starts what has not been started.

        Raises:
            UsageError: after `reduce()`, for a bucket that does not exist, and for one that was ready before.
        """
        self._must_be_open(f"ready({bucket})")
        if not 0 <= bucket < len(self.buckets):
            raise UsageError(f"there is no bucket {bucket}: the buffer has {len(self.buckets)}.")
        if bucket in self._ready:
            raise UsageError(f"ready({bucket}) was called twice in one step. Call zero() between steps.")
        self._ready.add(bucket)
        while len(self._pending) in self._ready:
            self._start(len(self._pending))

    def expect(self, passes: int) -> None:
        """Say, after `zero()`, how many backward passes (micro-batches) this step will have.

        The buckets of a unit then start when as many have `passed` it. Without this call all wait for
        `reduce()`.

        Raises:
            UsageError: after `reduce()`, or if there are several, and gradients are kept as computed.
        """
        self._must_be_open(f"expect({passes})")
        narrow = [group.name for group in self.flat if group.narrow]
        if passes > 1 and narrow:
            raise UsageError(
                f"gradients kept as computed are never added up: expect({passes}), and {', '.join(narrow)} "
                "would be. Make one micro-batch a step, or set optim.main_grad=fp32."
            )
        self._passes_left = [passes] * self._num_units

    def passed(self, unit: int) -> None:
        """Say that one backward has left a unit, whose gradients of that micro-batch are all there.

        All ranks pass the same units in the same order (it is that of the layers), whichever experts got
        tokens, and so start the same reductions at the same places.

        Raises:
            UsageError: if there were more passes than expected.
        """
        if not self._passes_left:
            return
        self._must_be_open(f"passed({unit})")
        self._passes_left[unit] -= 1
        if self._passes_left[unit] < 0:
            raise UsageError(
                f"more backward passes than expected: unit {unit} of {self._num_units} was passed again "
                "after its reduction had started. Call expect() with the number of micro-batches."
            )
        if self._passes_left[unit] == 0:
            for index, bucket in enumerate(self.buckets):
                if bucket.unit == unit:
                    self.ready(index)

    def reduce(self) -> None:
        """Sum every gradient over the ranks that hold a part of it: once, after the last micro-batch.

        A parameter without a gradient contributes zeros, so all ranks of a group make the same calls. Bytes
        sent: 2 n (size-1)/size for each flat group of n bytes, half of that if sharded.

        Raises:
            UsageError: if it was called since the last `zero()`.
        """
        self._must_be_open("reduce()")
        while len(self._pending) < len(self.buckets):
            self._start(len(self._pending))
        for bucket, pending in zip(self.buckets, self._pending, strict=True):
            finish_sum(bucket, pending)
        self._reduced = True
        self._step.number = None

    def counted(self) -> list[tuple[Tensor, int]]:
        """The reduced gradients of this rank as flat tensors, each with the number of ranks that hold it.

        Slices with one owner have 1. What an optimiser reads lies within these.
        """
        self.settle()
        if self.sharded:
            return [(bucket.group.data[bucket.own], 1) for bucket in self.buckets]
        return [(group.data, group.num_replicas) for group in self.flat]

    def gather(self) -> None:
        """Give every rank the whole sums again, where slices were dealt out. All ranks call it together.

        For those who look at gradients between `reduce()` and the update; the update itself does not need it.
        """
        for bucket in self.buckets:
            slicers = bucket.group.slicers
            if slicers:
                own = bucket.group.data[bucket.own].clone()
                bucket.data.copy_(finish_gather(own, slicers, start_gather(own, slicers)))

    def stack_view(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The gradients of equally shaped, adjacent parameters as one tensor `[len(parameters), ...]`.

        For experts that view one stack `[E_local, ...]`, this is the stack of their gradients, not a copy.

        Raises:
            ValueError: if they are not adjacent in the buffer.
        """
        fill(parameters)
        return stack_in(self.flat, parameters)

    def non_finite(self) -> list[str]:
        """Global names of tensors whose gradient *on this rank* is not finite.

        Of tensors that are summed over ranks it is this rank's own part that counts (as it was before the
        sum, which spreads a NaN to everybody).
        """
        self.settle()
        names: list[str] = []
        for index, bucket in enumerate(self.buckets):
            segments = [segment for segment in bucket.segments if segment.parameter.numel()]
            peaks = self.peaks.get(index)
            if peaks is None:
                peaks = tuple(segment.view(bucket.group.data).abs().max() for segment in segments)
            names += [s.spec.name for s, peak in zip(segments, peaks, strict=True) if not peak.isfinite()]
        return sorted(names)

    def close(self) -> None:
        """Detach from the parameters: remove the hooks and `main_grad`."""
        for hook in self._hooks:
            hook.remove()
        for segment in self.segments:
            release(segment.parameter)
        self._hooks.clear()

    def _adopt(self, segment: Segment, main_grad: Tensor, bucket: int) -> None:
        parameter = segment.parameter
        if hasattr(parameter, "main_grad"):
            raise UsageError(
                f"{segment.spec.name} belongs to another gradient buffer already. Call close() on that one."
            )
        adopt(parameter, main_grad, self._step)
        hook = partial(self._move, segment.spec.name, bucket)
        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _move(self, name: str, bucket: int, parameter: Tensor) -> None:
        if self._reduced or len(self._pending) > bucket:
            raise UsageError(
                f"a gradient of {name} came after its reduction had started. Call zero() before the first "
                "backward of a step, and reduce() or ready() after the last."
            )
        take(name, parameter)

    def _must_be_open(self, call: str) -> None:
        if self._reduced:
            raise UsageError(
                f"{call} after reduce(): the gradients are summed over ranks already, and a second sum would "
                "count them several times. Call zero() between steps."
            )

    def _start(self, index: int) -> None:
        bucket = self.buckets[index]
        fill(segment.parameter for segment in bucket.segments)
        if bucket.group.communicators:
            views = [s.view(bucket.group.data) for s in bucket.segments if s.parameter.numel()]
            if views:
                self.peaks[index] = tuple(torch._foreach_norm(views, float("inf")))
        self._pending.append(start_sum(bucket))
