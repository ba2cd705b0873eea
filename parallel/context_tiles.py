"""Which queries meet which keys: causal attention inside documents as rectangles and triangles.

A tile is a rectangle, in which every query sees every key, or a triangle, in which the i-th query sees the
first i + 1 keys. Ranges of integers say it all: a mask is never made, and no work is spent on what is masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from jaxtyping import Int
from torch import Tensor

from isozyme.core.batch import document_lengths
from isozyme.parallel.context_layout import Segment

Span = tuple[int, int]
"""First and one past the last place of a document in its window."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Some queries of a local tensor against some keys of another; dim 0 is the window, dim 1 the token."""

    windows: slice
    queries: slice
    keys: slice
    causal: bool
    """A triangle (as many keys as queries) rather than a rectangle."""


@dataclass(frozen=True)
class Documents:
    """The documents of the windows of one micro-batch, on the host."""

    spans: tuple[tuple[slice, tuple[Span, ...]], ...]
    """(which windows, their documents in order)."""

    @staticmethod
    def one(window: int) -> Documents:
        """Every window is one document of `window` tokens."""
        return Documents(((slice(None), ((0, window),)),))

    @staticmethod
    def of(documents: Int[Tensor, "B S"]) -> Documents:
        """A document is a run of equal numbers. Reads the device once (where documents begin)."""
        return Documents.of_lengths(document_lengths(documents))

    @staticmethod
    def of_lengths(lengths: Sequence[Sequence[int]]) -> Documents:
        """From the lengths of the documents of each window, in order."""
        return Documents(
            tuple(
                (slice(window, window + 1), tuple(pairwise(accumulate(found, initial=0))))
                for window, found in enumerate(lengths)
            )
        )


def tiles(queries: Sequence[Segment], keys: Sequence[Segment], documents: Documents) -> Iterator[Tile]:
    """Each pair of a query and a key that it sees, exactly once.

    A query sees the keys of its document up to its own place. A run of queries must lie inside a run of keys
    or apart from it, as any two parts of one layout do.
    """
    for windows, spans in documents.spans:
        for first, last in spans:
            for rows in _inside(queries, first, last):
                for columns in _inside(keys, first, last):
                    yield from _meet(windows, rows, columns)


def subdivided(tile: Tile, limit: int) -> Iterator[Tile]:
    """The same pairs in tiles of at most `limit` queries and `limit` keys."""
    rows, columns = tile.queries, tile.keys
    for i in range(rows.start, rows.stop, limit):
        row = slice(i, min(i + limit, rows.stop))
        for j in range(columns.start, columns.stop, limit):
            column = slice(j, min(j + limit, columns.stop))
            below = j - columns.start - (i - rows.start)
            if not tile.causal or below <= 0:
                causal = tile.causal and below == 0
                yield Tile(windows=tile.windows, queries=row, keys=column, causal=causal)


def _inside(segments: Sequence[Segment], first: int, last: int) -> Iterator[Segment]:
    for segment in segments:
        begin, end = max(segment.place, first), min(segment.place + segment.length, last)
        if begin < end:
            offset = segment.offset + begin - segment.place
            yield Segment(place=begin, offset=offset, length=end - begin)


def _meet(windows: slice, rows: Segment, columns: Segment) -> Iterator[Tile]:
    """At most a rectangle (keys before all queries) and a triangle (the queries' own places)."""
    queries = slice(rows.offset, rows.offset + rows.length)
    before = min(max(rows.place - columns.place, 0), columns.length)
    if before:
        keys = slice(columns.offset, columns.offset + before)
        yield Tile(windows=windows, queries=queries, keys=keys, causal=False)
    if columns.place <= rows.place < columns.place + columns.length:
        assert columns.length - before >= rows.length, (rows, columns)
        keys = slice(columns.offset + before, columns.offset + before + rows.length)
        yield Tile(windows=windows, queries=queries, keys=keys, causal=True)
    else:
        assert columns.place > rows.place + rows.length - 1 or before == columns.length, (rows, columns)
