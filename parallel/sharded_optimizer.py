"""AdamW whose masters and moments are dealt out over the replicas of each weight (ZeRO, stage 1).

Every bucket of a sharded gradient buffer is cut into slices of one length, one for each replica: dense
weights over TP x CP x DP as far as they are whole there, K/V weights over the ranks that share their heads,
experts over EDP, a tied embedding over both of its stages. A rank updates its slice and gathers the others'.
Source: Rajbhandari et al. 2020, ZeRO (arXiv:1910.02054). The slow twin is `isozyme.parallel.optimizer`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from isozyme.core.config import OptimConfig
from isozyme.core.errors import UsageError
from isozyme.parallel.communicator import Pending
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.grad_layout import Bucket, Segment
from isozyme.parallel.grad_reduce import finish_gather, start_gather
from isozyme.parallel.optimizer import EXP_AVG, EXP_AVG_SQ, MASTER, Optimizer, state_spec
from isozyme.parallel.optimizer_backends import Slot
from isozyme.parallel.shard_spec import OwnedBox, ShardSpec, boxes_of_range


def make_optimizer(buffer: GradientBuffer, config: OptimConfig) -> Optimizer:
    """The optimiser that goes with a buffer: sharded if the buffer is."""
    return (ShardedOptimizer if buffer.sharded else Optimizer)(buffer, config)


class ShardedOptimizer(Optimizer):
    """AdamW on this rank's slices of a sharded gradient buffer; otherwise as `Optimizer`.

    Parameters stay whole on every rank: `step` and `loaded` gather them, so all ranks call these together.
    State a rank: the flat groups' elements over their replicas, two moments (and a master, where parameters
    are of less than fp32) each. Bytes received a step: each parameter's bytes times (n-1)/n for n replicas.
    Gradients and parameters are not sharded.

    With `gather_ahead` (see `isozyme.parallel.gather_overlap`) `step` only starts the gathers, in the order
    in which a forward pass uses the parameters: the rest, then the last unit of the buffer to the first.
    Whoever reads parameters other than by a forward pass calls `finish` before, on all ranks.

    Raises:
        UsageError: if the buffer does not deal its sums out.
    """

    gather_ahead = False
    """Whether `step` leaves the gathers under way."""

    def step(self, lr: float, scale: float = 1.0) -> None:
        """Update this rank's slices once from the reduced gradients times `scale`, and gather the others'.

        Raises:
            UsageError: if the gradients have not been reduced, or a parameter was moved or cast.
        """
        self.finish()
        super().step(lr, scale)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for every gather under way. Afterwards parameters are whole, and those of the last update."""
        while self._under_way:
            self._under_way.popleft().finish_gather()

    @torch.no_grad()
    def about_to_use(self, unit: int | None) -> None:
        """Finish the gathers of a unit of the buffer (None: the rest), and all that were started before."""
        wanted = [number for number, share in enumerate(self._under_way) if share.bucket.unit == unit]
        for _ in range(max(wanted, default=-1) + 1):
            self._under_way.popleft().finish_gather()

    def state(self) -> Iterator[tuple[str, Tensor, ShardSpec]]:
        """As of `Optimizer`; finishes the gathers under way."""
        self.finish()
        yield from super().state()

    def loaded(self, updates: int) -> None:
        """As of `Optimizer`; the parameters are whole when it returns."""
        super().loaded(updates)
        self.finish()

    def _check(self, buffer: GradientBuffer) -> None:
        if not buffer.sharded:
            raise UsageError(
                "a sharded optimiser reads the slices that it owns: sharded=False. "
                "Make the gradient buffer with sharded=True."
            )

    def _slots(self) -> Iterator[Slot]:
        self._shares = [_Share(bucket) for bucket in self.buffer.buckets]
        self._under_way: deque[_Share] = deque()
        for share in self._shares:
            self._state += share.state(self.buffer)
            yield from share.slots()

    @torch.no_grad()
    def _publish(self, *, copied: bool) -> None:
        """Gather the parameters, each bucket's under way while the one before is copied into place."""
        self.finish()
        if self.gather_ahead:
            rest = [share for share in self._shares if share.bucket.unit is None]
            in_units = [share for share in self._shares if share.bucket.unit is not None]
            for share in (*rest, *reversed(in_units)):
                share.start_gather(copied=copied)
                self._under_way.append(share)
            return
        for share in self._shares:
            share.start_gather(copied=copied)
            self._under_way.append(share)
            if len(self._under_way) > 1:
                self._under_way.popleft().finish_gather()
        self.finish()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take masters from the parameters: after weights alone were loaded into the model.

        Gathers under way must have been finished before the weights were loaded.
        """
        self._must_be_in_place()
        for share in self._shares:
            share.refresh_masters()


@dataclass(frozen=True, eq=False, kw_only=True)
class _Piece:
    """The part of one parameter that lies in a slice."""

    segment: Segment
    first: int
    """Its first element in the flattened parameter …"""
    at: int
    """… and in the slice."""
    size: int

    @property
    def within(self) -> slice:
        """Its elements in the slice."""
        return slice(self.at, self.at + self.size)

    def of_parameter(self) -> Tensor:
        """The part of the parameter itself, flat."""
        return self.segment.parameter.detach().view(-1)[self.first : self.first + self.size]


class _Share:
    """This rank's slice of one bucket: its state, and how it becomes whole parameters again."""

    def __init__(self, bucket: Bucket) -> None:
        group, own = bucket.group, bucket.own
        self.bucket = bucket
        self.grad = group.data[own]
        state = group.state_dtype
        self.exp_avg, self.exp_avg_sq = (torch.zeros_like(self.grad, dtype=state) for _ in range(2))
        self.pieces = list(_pieces(bucket, own))
        self._dtype = bucket.segments[0].parameter.dtype
        self.masters = torch.zeros_like(self.grad, dtype=state) if self._dtype != state else None
        self.refresh_masters()
        self._sent: tuple[Tensor, Pending | None] | None = None

    @torch.no_grad()
    def refresh_masters(self) -> None:
        if self.masters is not None:
            for piece in self.pieces:
                self.masters[piece.within].copy_(piece.of_parameter())

    def slots(self) -> Iterator[Slot]:
        """What is updated: whole stretches where masters lie flat and are dealt out, else single parameters.

        A stretch ends where weight decay begins or ends. What lies between two parameters has no gradient,
        and stays zero. Where nothing is dealt out, the parameters are the masters' copies.
        """
        stretch: list[_Piece] = []
        single = self.masters is None or not self.bucket.group.slicers
        for piece in self.pieces:
            decays = piece.segment.spec.decay
            if stretch and (single or decays != stretch[0].segment.spec.decay):
                yield self._slot(stretch)
                stretch = []
            stretch.append(piece)
        if stretch:
            yield self._slot(stretch)

    def _slot(self, stretch: list[_Piece]) -> Slot:
        within = slice(stretch[0].at, stretch[-1].within.stop)
        return Slot(
            master=stretch[0].of_parameter() if self.masters is None else self.masters[within],
            grad=self.grad[within],
            exp_avg=self.exp_avg[within],
            exp_avg_sq=self.exp_avg_sq[within],
            copy=None if self.masters is None or self.bucket.group.slicers else stretch[0].of_parameter(),
            decay=stretch[0].segment.spec.decay,
        )

    def state(self, buffer: GradientBuffer) -> Iterator[tuple[str, Tensor, ShardSpec]]:
        """The live state, as boxes of the global tensors."""
        named = {EXP_AVG: self.exp_avg, EXP_AVG_SQ: self.exp_avg_sq}
        if self.masters is not None:
            named[MASTER] = self.masters
        topology, rank = buffer.groups.topology, buffer.groups.rank
        for piece in self.pieces:
            corner = [part.start for part in piece.segment.spec.slices(topology, rank)]
            shape, at = tuple(piece.segment.parameter.shape), piece.at
            for local in boxes_of_range(shape, piece.first, piece.first + piece.size):
                sizes = [part.stop - part.start for part in local]
                box = tuple(
                    slice(part.start + start, part.stop + start)
                    for part, start in zip(local, corner, strict=True)
                )
                end = at + math.prod(sizes)
                for prefix, flat in named.items():
                    spec = _boxed(state_spec(piece.segment.spec, prefix), box)
                    yield spec.name, flat[at:end].view(sizes), spec
                at = end

    def start_gather(self, *, copied: bool) -> None:
        """Send this rank's part of the parameters to the other owners; without any, update them in place.

        Args:
            copied: whether the update has rounded masters into parameters that are not dealt out.
        """
        if not self.bucket.group.slicers:
            if self.masters is not None and not copied and self.pieces:
                masters = [self.masters[piece.within] for piece in self.pieces]
                torch._foreach_copy_([piece.of_parameter() for piece in self.pieces], masters)
            return
        part = torch.zeros_like(self.grad, dtype=self._dtype)
        if self.masters is not None:
            part.copy_(self.masters)
        else:
            for piece in self.pieces:
                part[piece.within].copy_(piece.of_parameter())
        self._sent = part, start_gather(part, self.bucket.group.slicers)
        for segment in self.bucket.segments:
            segment.parameter.gather_under_way = True  # type: ignore[attr-defined]

    def finish_gather(self) -> None:
        """Copy all owners' parts into the parameters."""
        if self._sent is None:
            return
        part, pending = self._sent
        self._sent = None
        flat = finish_gather(part, self.bucket.group.slicers, pending)
        start = self.bucket.start
        parameters: list[Tensor] = [segment.parameter for segment in self.bucket.segments]
        found = [
            flat[segment.start - start : segment.stop - start].view(segment.parameter.shape)
            for segment in self.bucket.segments
        ]
        torch._foreach_copy_(parameters, found)
        for segment in self.bucket.segments:
            segment.parameter.gather_under_way = False  # type: ignore[attr-defined]


def _pieces(bucket: Bucket, own: slice) -> Iterator[_Piece]:
    """The parts of the bucket's parameters that lie in `own`, in order."""
    for segment in bucket.segments:
        start, stop = max(segment.start, own.start), min(segment.stop, own.stop)
        if start < stop:
            yield _Piece(
                segment=segment, first=start - segment.start, at=start - own.start, size=stop - start
            )


def _boxed(spec: ShardSpec, box: tuple[slice, ...]) -> OwnedBox:
    return OwnedBox(**{each.name: getattr(spec, each.name) for each in fields(spec)}, box=box)
