"""The torch.distributed transport where one process suffices; many processes are in tests/distributed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from isozyme.core.errors import CommunicationError
from isozyme.core.topology import Layout, Topology
from isozyme.parallel.communicator import SingleCommunicator
from isozyme.parallel.distributed import TorchCommunicator, torch_world
from isozyme.parallel.process_groups import ProcessGroups, World


def test_a_world_of_one_process_builds_its_groups_and_leaves_nothing(tmp_path: Path) -> None:
    with torch_world(rank=0, world_size=1, init_method=f"file://{tmp_path}/meeting") as world:
        assert isinstance(world, World)
        assert (world.rank, world.size) == (0, 1)
        groups = ProcessGroups(Topology(Layout()), world)
        assert isinstance(groups["ep"], SingleCommunicator)
        assert groups["ep"].all_reduce(torch.ones(1)).item() == 1
    assert not dist.is_initialized()


def test_an_error_in_the_block_still_leaves_the_world(tmp_path: Path) -> None:
    def block() -> None:
        with torch_world(rank=0, world_size=1, init_method=f"file://{tmp_path}/meeting"):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        block()
    assert not dist.is_initialized()


def test_a_missing_peer_is_reported_with_rank_size_and_address(tmp_path: Path) -> None:
    def block() -> None:
        with torch_world(
            rank=0, world_size=2, init_method=f"file://{tmp_path}/meeting", timeout=timedelta(seconds=0.5)
        ):
            raise AssertionError

    with pytest.raises(CommunicationError, match="rank=0, world_size=2, init_method=file://"):
        block()
    assert not dist.is_initialized()


def test_a_partition_that_lacks_this_rank_is_refused(tmp_path: Path) -> None:
    with (
        torch_world(rank=0, world_size=1, init_method=f"file://{tmp_path}/meeting") as world,
        pytest.raises(ValueError, match=r"name=ep, partition=\[\] lacks rank 0"),
    ):
        world.split("ep", [])


def test_an_error_of_the_backend_names_the_call_the_group_and_the_rank(tmp_path: Path) -> None:
    with torch_world(rank=0, world_size=1, init_method=f"file://{tmp_path}/meeting") as world:
        comm = TorchCommunicator("ep", (0,), 0, dist.new_group([0]), world.device)
        with pytest.raises(
            CommunicationError, match=r"all_reduce\(\(2,\) complex64, max\) over ep on rank 0"
        ):
            comm.all_reduce(torch.ones(2, dtype=torch.complex64), "max")
