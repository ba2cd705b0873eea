"""Traces: what each rank said to whom, in order, and from which line of the caller's code.

A simulated world records one; tests hold the traces of the ranks against each other, and a planner sums
their bytes. A trace has no times: it counts what a program asks for, not what a network makes of it.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from isozyme.parallel.communicator import Call, Kind

_SKIPPED = frozenset({"torch", "jaxtyping", "beartype", "contextlib", "functools", "threading"})


class Source(NamedTuple):
    """A line of the caller's code."""

    filename: str
    line: int

    def __str__(self) -> str:
        near = os.path.relpath(self.filename)
        return f"{self.filename if near.startswith('..') else near}:{self.line}"


def caller() -> Source:
    """The innermost line of the running call that lies outside of isozyme.parallel and of torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module: str = frame.f_globals.get("__name__", "")
        written = not frame.f_code.co_filename.startswith("<")
        if written and module.partition(".")[0] not in _SKIPPED and not module.startswith("isozyme.parallel"):
            break
        frame = frame.f_back
    return Source(frame.f_code.co_filename, frame.f_lineno)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One communication of one rank."""

    kind: Kind
    group: str
    """The name of the communicator, such as `ep`."""
    ranks: tuple[int, ...]
    """The global ranks of the group."""
    shape: tuple[int, ...] | None
    """The shape of the tensor given; None for a barrier or an object."""
    dtype: torch.dtype | None
    input_sizes: tuple[int, ...] | None
    output_sizes: tuple[int, ...] | None
    peer: int | None
    bytes_sent: int
    """See `bytes_sent`."""
    source: Source

    @classmethod
    def of(cls, call: Call, group: str, ranks: Sequence[int], rank: int, source: Source) -> Record:
        """The record of `call`, made by group rank `rank`."""
        return cls(
            kind=call.kind,
            group=group,
            ranks=tuple(ranks),
            shape=None if call.input is None else tuple(call.input.shape),
            dtype=None if call.input is None else call.input.dtype,
            input_sizes=call.input_sizes,
            output_sizes=call.output_sizes,
            peer=call.peer,
            bytes_sent=bytes_sent(call, rank, len(ranks)),
            source=source,
        )


def bytes_sent(call: Call, rank: int, size: int) -> int:
    """The bytes that group rank `rank` of `size` must send to the others for `call`.

    A part is sent straight to whoever needs it, and an all-reduce is a reduce-scatter and an all-gather, so
    it costs 2 n (size-1)/size, rounded down. Objects and barriers count nothing.
    """
    tensor = call.input
    if tensor is None:
        return 0
    whole = tensor.numel() * tensor.element_size()
    if call.kind == "all_reduce":
        return 2 * whole * (size - 1) // size
    if call.kind == "all_gather":
        return whole * (size - 1)
    if call.kind in ("reduce_scatter", "all_to_all"):
        assert call.input_sizes is not None
        rows = sum(call.input_sizes)
        return whole // rows * (rows - call.input_sizes[rank]) if rows else 0
    if call.kind == "broadcast":
        return whole * (size - 1) if call.peer == rank else 0
    if call.kind == "scatter":
        return whole // size * (size - 1) if call.peer == rank else 0
    if call.kind in ("gather", "reduce"):
        return 0 if call.peer == rank else whole
    return whole if call.kind == "send" else 0


class Trace:
    """The communications of all ranks of one run: `trace[rank]` lists those of one rank in order."""

    def __init__(self, records: Sequence[Sequence[Record]]) -> None:
        self._records = tuple(tuple(of_rank) for of_rank in records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, rank: int) -> tuple[Record, ...]:
        return self._records[rank]

    def __iter__(self) -> Iterator[tuple[Record, ...]]:
        return iter(self._records)

    def kinds(self, rank: int) -> list[str]:
        """What one rank does, in order, such as `["all_to_all over ep", "all_reduce over dp"]`."""
        return [f"{record.kind} over {record.group}" for record in self[rank]]

    def difference(self) -> str | None:
        """The first place where two ranks do not make the same kind of call on the same axis; None if none.

        Ranks of one program without pipeline stages make the same calls, whatever the sizes are: a rank
        that skips a collective because it has no rows is found here.
        """
        for rank in range(1, len(self)):
            first, second = self.kinds(0), self.kinds(rank)
            for step in range(max(len(first), len(second))):
                a, b = first[step : step + 1], second[step : step + 1]
                if a != b:
                    return (
                        f"call {step}: rank 0 makes {self._at(0, step)}, rank {rank} makes "
                        f"{self._at(rank, step)}"
                    )
        return None

    def bytes_by_group(self, rank: int | None = None) -> dict[str, int]:
        """Bytes sent on each axis, by one rank or by all together."""
        total: Counter[str] = Counter()
        for number, records in enumerate(self):
            for record in records:
                if rank is None or number == rank:
                    total[record.group] += record.bytes_sent
        return dict(total)

    def _at(self, rank: int, step: int) -> str:
        records = self[rank]
        if step >= len(records):
            return "no call"
        return f"{records[step].kind} over {records[step].group} at {records[step].source}"
