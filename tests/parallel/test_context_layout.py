"""Dealing windows out over context-parallel ranks, and the tiles that follow from it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isozyme.core.batch import Batch
from isozyme.core.context import ContextOrder
from isozyme.core.errors import ConfigError
from isozyme.parallel.context_layout import ContextLayout, Segment
from isozyme.parallel.context_tiles import Documents, Tile, subdivided, tiles

SIZES = st.integers(1, 5)
ORDERS: st.SearchStrategy[ContextOrder] = st.sampled_from(["zigzag", "contiguous"])


def _layout(size: int, order: ContextOrder, half: int) -> ContextLayout:
    return ContextLayout(window=2 * size * half, size=size, order=order)


LAYOUTS = st.builds(_layout, SIZES, ORDERS, st.integers(1, 4))


@given(LAYOUTS)
def test_every_token_has_one_rank(layout: ContextLayout) -> None:
    held = torch.cat([layout.places(rank) for rank in range(layout.size)])
    assert sorted(held.tolist()) == list(range(layout.window))
    assert all(len(layout.places(rank)) == layout.local_length for rank in range(layout.size))


@given(LAYOUTS)
def test_restore_inverts_deal(layout: ContextLayout) -> None:
    whole = torch.randn(2, layout.window, 3)
    parts = torch.cat([layout.part(whole, rank) for rank in range(layout.size)], dim=1)
    assert torch.equal(layout.deal(whole), parts)
    assert torch.equal(layout.restore(parts), whole)
    for rank in range(layout.size):
        assert torch.equal(layout.part(whole, rank), whole[:, layout.places(rank)])


@given(SIZES, st.integers(1, 4))
def test_zigzag_gives_every_rank_the_same_work(size: int, half: int) -> None:
    layout = ContextLayout(window=2 * size * half, size=size)
    work = {int((layout.places(rank) + 1).sum()) for rank in range(size)}
    assert len(work) == 1


def test_contiguous_gives_the_last_rank_nearly_twice_the_mean() -> None:
    layout = ContextLayout(window=800, size=8, order="contiguous")
    work = [int((layout.places(rank) + 1).sum()) for rank in range(8)]
    assert max(work) / (sum(work) / 8) > 1.8


def pairs(layout: ContextLayout, documents: Tensor, plan: list[Tile], rank: int, whole: bool) -> Tensor:
    """How often each (query, key) of each window is named, in places of the window."""
    count = torch.zeros(documents.shape[0], layout.window, layout.window, dtype=torch.long)
    queries = layout.places(rank)
    keys = torch.arange(layout.window) if whole else torch.arange(layout.local_length)
    for tile in plan:
        rows, columns = queries[tile.queries], keys[tile.keys]
        block = torch.ones(len(rows), len(columns), dtype=torch.long)
        block = block.tril() if tile.causal else block
        for window in range(documents.shape[0])[tile.windows]:
            count[window, rows[:, None], columns[None]] += block
    return count


@given(LAYOUTS, st.data(), st.integers(1, 5))
def test_tiles_name_every_visible_pair_once_and_no_other(
    layout: ContextLayout, data: st.DataObject, limit: int
) -> None:
    steps = data.draw(
        st.lists(
            st.lists(st.booleans(), min_size=layout.window, max_size=layout.window), min_size=1, max_size=2
        )
    )
    documents = torch.tensor(steps).long().cumsum(dim=1)
    places = torch.arange(layout.window)
    seen = (places[None] <= places[:, None]) & (documents[:, :, None] == documents[:, None, :])
    found = Documents.of(documents)
    for rank in range(layout.size):
        mine = layout.segments(rank)
        whole = list(tiles(mine, (Segment(place=0, offset=0, length=layout.window),), found))
        fine = [part for tile in whole for part in subdivided(tile, limit)]
        assert all(
            part.queries.stop - part.queries.start <= limit and part.keys.stop - part.keys.start <= limit
            for part in fine
        )
        expected = torch.zeros_like(seen).long()
        expected[:, layout.places(rank)] = seen[:, layout.places(rank)].long()
        assert torch.equal(pairs(layout, documents, whole, rank, whole=True), expected)
        assert torch.equal(pairs(layout, documents, fine, rank, whole=True), expected)
        by_source = torch.zeros_like(expected)
        for source in range(layout.size):
            plan = list(tiles(mine, layout.segments(source), found))
            local = pairs(layout, documents, plan, rank, whole=False)[:, :, : layout.local_length]
            by_source[:, :, layout.places(source)] += local
        assert torch.equal(by_source, expected)


def test_one_document_needs_no_more_than_two_tiles_a_run() -> None:
    layout = ContextLayout(window=64, size=4)
    plan = list(
        tiles(layout.segments(1), (Segment(place=0, offset=0, length=64),), Documents.one(layout.window))
    )
    assert [(tile.queries, tile.keys, tile.causal) for tile in plan] == [
        (slice(0, 8), slice(0, 8), False),
        (slice(0, 8), slice(8, 16), True),
        (slice(8, 16), slice(0, 48), False),
        (slice(8, 16), slice(48, 56), True),
    ]


def test_a_part_of_a_batch_keeps_what_belongs_together() -> None:
    layout = ContextLayout(window=8, size=2)
    numbers = torch.arange(16).view(2, 8)
    batch = Batch(
        tokens=numbers,
        labels=numbers + 100,
        label_valid=numbers % 2 == 0,
        token_valid=numbers % 3 > 0,
        positions=numbers + 200,
        documents=numbers + 300,
    )
    part = layout.part_of_batch(batch, 1)
    assert part.tokens.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert torch.equal(part.labels, part.tokens + 100)
    assert torch.equal(part.positions, part.tokens + 200)
    assert torch.equal(part.documents, part.tokens + 300)
    assert torch.equal(part.label_valid, part.tokens % 2 == 0)
    assert part.packed == batch.packed
    single = ContextLayout(window=8, size=1)
    assert single.part_of_batch(batch, 0) is batch
    assert {field.name for field in fields(batch)} == {field.name for field in fields(part)}
    assert not layout.part_of_batch(replace(batch, packed=False), 0).packed


@pytest.mark.parametrize(("window", "order"), [(20, "zigzag"), (18, "contiguous")])
def test_a_window_that_cannot_be_cut_is_refused(window: int, order: ContextOrder) -> None:
    with pytest.raises(ConfigError, match=r"data\.window"):
        ContextLayout(window=window, size=4, order=order)
    assert ContextLayout(window=window, size=1, order=order).local_length == window
