"""The process-group manager: the right ranks, in one order on all of them, at every layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isozyme.core.errors import ConfigError
from isozyme.core.topology import Layout, Topology
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld, World, group_axes
from isozyme.parallel.simulated import SimulatedWorld, simulate

LAYOUTS = [
    Layout(),
    Layout(dp=3, ep=3),
    Layout(tp=2, dp=2, ep=2),
    Layout(tp=2, cp=2, ep=4),
    Layout(tp=4, dp=2, ep=2),
    Layout(dp=2, pp=3, ep=2),
    Layout(tp=2, etp=2, dp=2, ep=2, pp=2),
    Layout(dp=4, ep=2, order="ep-dp-tp-cp-pp"),
]


@given(layout=st.sampled_from(LAYOUTS), schedule_seed=st.integers(0, 3))
def test_every_group_holds_the_ranks_that_the_topology_names(layout: Layout, schedule_seed: int) -> None:
    """Each rank contributes 2**rank, so the sum names who took part."""
    topology = Topology(layout)

    def program(world: SimulatedWorld) -> None:
        groups, rank = ProcessGroups(topology, world), world.rank
        assert (groups.rank, groups.coordinates) == (rank, topology.coordinates(rank))
        pairs = [(groups[axes], topology.group(rank, axes)) for axes in group_axes(topology)]
        pairs.append((groups.embedding, topology.embedding_group(rank)))
        for comm, ranks in pairs:
            if rank not in ranks:
                ranks = (rank,)
            assert (comm.ranks, comm.ranks[comm.rank], comm.size) == (ranks, rank, len(ranks))
            total = comm.all_reduce(torch.tensor(2**rank))
            assert int(total) == sum(2**member for member in ranks)

    simulate(topology.world_size, program, schedule_seed=schedule_seed)


def test_axes_are_named_in_any_order() -> None:
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    assert groups["dp", "cp"] is groups["cp", "dp"]
    assert groups["cp", "dp"].name == "cp+dp"
    assert groups.world is groups["tp", "cp", "dp", "pp"]


def test_an_unknown_group_is_refused_with_those_there_are() -> None:
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    with pytest.raises(KeyError, match=r"no group over tp\+ep; there are tp, cp"):
        groups["tp", "ep"]


def test_a_world_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs 2 ranks \(dp=2\)"):
        ProcessGroups(Topology(Layout(dp=2)), SingleWorld())


def test_both_worlds_keep_the_protocol() -> None:
    assert isinstance(SingleWorld(), World)
    assert simulate(2, lambda world: isinstance(world, World)) == [True, True]


def test_middle_stages_are_alone_in_their_embedding_group() -> None:
    topology = Topology(Layout(pp=4))
    found = simulate(4, lambda world: ProcessGroups(topology, world).embedding.ranks)
    assert found == [(0, 3), (1,), (2,), (0, 3)]
