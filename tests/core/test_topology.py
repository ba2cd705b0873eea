"""Rank arithmetic against naive enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isozyme.core.errors import ConfigError
from isozyme.core.topology import DEFAULT_ORDER, DENSE_AXES, EXPERT_AXES, Grid, Layout, Topology

SMALL = st.integers(1, 3)
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def grid_of(sizes: list[int]) -> Grid:
    return Grid(tuple("abcd"[: len(sizes)]), tuple(sizes))


@st.composite
def orders(draw: st.DrawFn) -> str:
    return "-".join([*draw(st.permutations(["tp", "cp", "ep", "dp"])), "pp"])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Legal layouts: dp is a multiple of the smallest legal one."""
    sizes = {axis: draw(SMALL) for axis in ("tp", "cp", "pp", "ep", "etp")}
    smallest = Layout(**sizes, order=draw(orders())).resolved()
    assert smallest.dp is not None
    return Layout(**sizes, dp=smallest.dp * draw(st.integers(1, 2)), order=smallest.order)


def enumerated(grid: Grid) -> Iterator[dict[str, int]]:
    """All coordinates in the order of the ranks: the leftmost axis runs fastest."""
    for reverse in itertools.product(*(range(size) for size in reversed(grid.sizes))):
        yield dict(zip(grid.axes, reversed(reverse), strict=True))


@given(sizes=SIZES)
def test_coordinates_count_up_with_the_leftmost_axis_fastest(sizes: list[int]) -> None:
    grid = grid_of(sizes)
    assert [grid.coordinates(rank) for rank in range(grid.world_size)] == list(enumerated(grid))


@given(sizes=SIZES)
def test_rank_inverts_coordinates(sizes: list[int]) -> None:
    grid = grid_of(sizes)
    assert [grid.rank(at) for at in enumerated(grid)] == list(range(grid.world_size))


@given(sizes=SIZES, data=st.data())
def test_a_group_is_the_ranks_that_differ_on_its_axes_only(sizes: list[int], data: st.DataObject) -> None:
    grid = grid_of(sizes)
    axes = data.draw(st.lists(st.sampled_from(grid.axes), unique=True))
    rank = data.draw(st.integers(0, grid.world_size - 1))
    at = grid.coordinates(rank)
    naive = [
        other
        for other, there in enumerate(enumerated(grid))
        if all(there[axis] == at[axis] for axis in grid.axes if axis not in axes)
    ]
    assert grid.group(rank, axes) == tuple(naive)
    assert len(naive) == grid.size(axes)


@given(sizes=SIZES, data=st.data())
def test_the_groups_over_any_axes_partition_the_ranks(sizes: list[int], data: st.DataObject) -> None:
    grid = grid_of(sizes)
    axes = data.draw(st.lists(st.sampled_from(grid.axes), unique=True))
    groups = {grid.group(rank, axes) for rank in range(grid.world_size)}
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    assert all(grid.group(member, axes) == group for group in groups for member in group)


@given(sizes=SIZES, data=st.data())
def test_a_split_axis_keeps_every_rank_and_refines_its_coordinate(
    sizes: list[int], data: st.DataObject
) -> None:
    grid = grid_of(sizes)
    axis = data.draw(st.sampled_from(grid.axes))
    size = grid.size(axis)
    inner = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    finer = grid.split_axis(axis, inner)
    assert finer.world_size == grid.world_size
    for rank in range(grid.world_size):
        old, new = grid.coordinates(rank), finer.coordinates(rank)
        assert old.pop(axis) == new.pop(f"{axis}%{inner}") + inner * new.pop(f"{axis}//{inner}")
        assert old == new
        assert grid.group(rank, axis) == finer.group(rank, (f"{axis}%{inner}", f"{axis}//{inner}"))


def test_kv_heads_on_more_tp_ranks_are_held_by_neighbours() -> None:
    grid = Grid(("tp", "dp"), (4, 2)).split_axis("tp", 2)
    assert [grid.group(rank, "tp%2") for rank in (0, 2, 5)] == [(0, 1), (2, 3), (4, 5)]
    assert grid.group(1, "tp//2") == (1, 3)


def test_an_axis_is_split_by_its_divisors_only() -> None:
    with pytest.raises(ValueError, match="tp=4 is not divisible by 3"):
        Grid(("tp",), (4,)).split_axis("tp", 3)


def test_a_topology_understands_parts_of_an_axis() -> None:
    topology = Topology(Layout(tp=4, dp=2, ep=8))
    assert topology.size(("tp%2", "dp")) == 4
    assert topology.group(3, ("tp%2", "dp")) == (2, 3, 6, 7)
    assert [topology.index(rank, "tp//2") for rank in range(4)] == [0, 0, 1, 1]
    assert [topology.index(rank, "tp%2") for rank in range(4)] == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="no grid has the axes"):
        topology.size(("tp", "tp%2"))


@given(layout=layouts())
def test_the_default_dp_is_the_smallest_legal_one(layout: Layout) -> None:
    free = Layout(tp=layout.tp, cp=layout.cp, pp=layout.pp, ep=layout.ep, etp=layout.etp, order=layout.order)
    legal = next(
        dp for dp in itertools.count(1) if layout.tp * layout.cp * dp % (layout.ep * layout.etp) == 0
    )
    assert free.resolved().dp == legal
    assert free.problems() == []


@given(layout=layouts())
def test_both_grids_number_the_same_ranks(layout: Layout) -> None:
    topology = Topology(layout)
    assert topology.dense.world_size == topology.expert.world_size == topology.world_size
    assert set(topology.dense.axes) == set(DENSE_AXES)
    assert set(topology.expert.axes) == set(EXPERT_AXES)
    for rank in range(topology.world_size):
        assert topology.dense.coordinates(rank)["pp"] == topology.expert.coordinates(rank)["pp"]
        assert topology.group(rank, ("tp", "cp", "dp")) == topology.group(rank, ("etp", "ep", "edp"))


@given(layout=layouts())
def test_every_expert_shard_has_as_many_replicas_as_edp(layout: Layout) -> None:
    """The ranks of one expert group hold different shards, and those of one edp group the same."""
    topology = Topology(layout)
    for rank in range(topology.world_size):
        at = [
            tuple(topology.coordinates(other)[axis] for axis in ("etp", "ep"))
            for other in topology.group(rank, ("etp", "ep"))
        ]
        assert len(set(at)) == layout.etp * layout.ep
        replicas = topology.group(rank, "edp")
        assert (
            len({tuple(topology.coordinates(other)[a] for a in ("etp", "ep", "pp")) for other in replicas})
            == 1
        )


@given(order=orders())
def test_the_order_string_says_which_axis_runs_fastest(order: str) -> None:
    topology = Topology(Layout(tp=2, cp=2, dp=2, pp=2, ep=2, order=order))
    dense = [axis for axis in order.split("-") if axis != "ep"]
    strides = [topology.group(0, axis)[1] for axis in dense]
    assert strides == [1, 2, 4, 8]


@given(layout=layouts())
def test_the_embedding_group_is_the_two_ends_of_the_pipeline(layout: Layout) -> None:
    topology = Topology(layout)
    for rank in range(topology.world_size):
        stages = [topology.coordinates(other)["pp"] for other in topology.embedding_group(rank)]
        assert stages == ([0, layout.pp - 1] if layout.pp > 1 else [0])


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=0), r"at least 1: layout\.tp=0"),
        (Layout(dp=-1), r"at least 1: layout\.dp=-1"),
        (Layout(dp=3, ep=2), r"etp\*ep must divide tp\*cp\*dp.*3 % 2 = 1.*Choose etp\*ep from 1, 3"),
        (Layout(order="tp-cp-ep-dp"), "must name each of tp, cp, ep, dp, pp once"),
        (Layout(order="tp-tp-ep-dp-pp"), "must name each of tp, cp, ep, dp, pp once"),
        (Layout(order="tp-cp-ep-dp-qq"), "must name each of tp, cp, ep, dp, pp once"),
        (Layout(order="pp-tp-cp-ep-dp"), "pp must be outermost"),
    ],
)
def test_an_illegal_layout_is_refused_with_its_arithmetic(layout: Layout, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology(layout)


def test_every_broken_size_is_reported_at_once() -> None:
    assert len(Layout(tp=0, cp=0, ep=-1).problems()) == 3


@pytest.mark.parametrize(
    ("layout", "ranks", "fix"),
    [
        (Layout(tp=2, dp=2), 8, "Set layout.dp=4"),
        (Layout(tp=2), 3, "Start a multiple of 2 ranks"),
    ],
)
def test_a_wrong_number_of_ranks_is_refused_with_a_fix(layout: Layout, ranks: int, fix: str) -> None:
    (problem,) = layout.problems(ranks)
    assert f"but there are {ranks}" in problem
    assert fix in problem


def test_axes_of_different_grids_have_no_group() -> None:
    with pytest.raises(ValueError, match="no grid has the axes"):
        Topology(Layout()).group(0, ("tp", "ep"))


def test_a_million_ranks_cost_nothing() -> None:
    topology = Topology(Layout(tp=8, dp=8192, pp=16, ep=64))
    assert topology.world_size == 1_048_576
    assert len(topology.group(1_000_000, "ep")) == 64
    assert topology.dense.rank(topology.dense.coordinates(987_654)) == 987_654


def test_the_table_shows_the_coordinates_and_says_what_it_leaves_out() -> None:
    lines = Topology(Layout(dp=4, ep=2)).table(limit=3).splitlines()
    assert lines[0].split() == ["rank", "tp", "cp", "dp", "pp", "etp", "ep", "edp"]
    assert lines[3].split() == ["2", "0", "0", "2", "0", "0", "0", "1"]
    assert lines[4].strip() == "... 1 more"


def test_the_default_order_is_the_documented_one() -> None:
    assert DEFAULT_ORDER == "tp-cp-ep-dp-pp"
