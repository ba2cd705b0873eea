"""Summing one bucket of gradients over its ranks: to all of them, or to the owner of each slice.

Both are exact sums of the same parts. The second costs half the bytes, the other half being spent when the
updated parameters are gathered (Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, stage 1).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from isozyme.parallel.communicator import Communicator, Pending
from isozyme.parallel.grad_layout import Bucket


def start_sum(bucket: Bucket) -> Pending | None:
    """Start to sum a bucket over the first of its groups; None if nobody else has a part of it."""
    group = bucket.group
    if not group.communicators:
        return None
    first = group.communicators[0]
    return first.reduce_scatter_async(bucket.data) if group.slicers else first.all_reduce_async(bucket.data)


def finish_sum(bucket: Bucket, pending: Pending | None) -> None:
    """Wait for what `start_sum` started, and sum over the other groups.

    Afterwards the bucket holds the sum; if slices are dealt out, only this rank's own one does, and the rest
    of it is this rank's part as before.
    """
    group = bucket.group
    if not group.slicers:
        if pending is not None:
            pending.wait()
        for communicator in group.communicators[1:]:
            communicator.all_reduce(bucket.data)
        return
    part = bucket.data if pending is None else pending.wait()
    for number, communicator in enumerate(group.slicers):
        if number == 0 and pending is not None:
            continue
        if number < len(group.communicators):
            part = communicator.reduce_scatter(part)
        else:  # its ranks have the same sum already
            part = part.view(communicator.size, -1)[communicator.rank]
    own = group.data[bucket.own]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part)


def start_gather(part: Tensor, slicers: Sequence[Communicator]) -> Pending | None:
    """Start to gather every owner's slice; None if this rank owns everything. `finish_gather` ends it."""
    return slicers[-1].all_gather_async(part) if slicers else None


def finish_gather(part: Tensor, slicers: Sequence[Communicator], pending: Pending | None) -> Tensor:
    """All slices in order: what `slicers` dealt out, put together again."""
    if pending is not None:
        part = pending.wait()
    for communicator in reversed(slicers[:-1]):
        part = communicator.all_gather(part)
    return part
