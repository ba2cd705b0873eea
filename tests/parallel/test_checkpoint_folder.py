"""Only whole checkpoints count, the newest first, and damaged ones are skipped aloud."""

from __future__ import annotations

import pytest
import torch

from isozyme.core.errors import CheckpointError
from isozyme.core.initialisation import Init
from isozyme.core.topology import Layout, Topology
from isozyme.parallel.checkpoint import load_checkpoint, save_checkpoint
from isozyme.parallel.checkpoint_folder import find_latest, prune
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import dense_spec
from isozyme.parallel.simulated import simulate


def save(root, *steps: int) -> None:
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    for step in steps:
        shards = [("w", torch.full((4,), float(step)), dense_spec("w", (4,), Init.constant(0.0)))]
        save_checkpoint(root, step, shards, groups)


def flip(path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("make", [True, False])
def test_an_empty_or_absent_folder_has_no_checkpoint(tmp_path, make):
    root = tmp_path / "checkpoints"
    if make:
        root.mkdir()
    assert find_latest(root) is None


def test_the_latest_is_the_highest_step(tmp_path):
    save(tmp_path, 9, 100, 20)
    found = find_latest(tmp_path)
    assert found is not None
    assert (found.step, found.path, found.skipped) == (100, tmp_path / "step_00000100", ())


@pytest.mark.parametrize("lost", ["COMPLETE", "index.json"])
def test_an_incomplete_checkpoint_is_never_the_latest(tmp_path, lost):
    save(tmp_path, 1, 2)
    (tmp_path / "step_00000002" / lost).unlink()
    (tmp_path / ".step_00000003.partial").mkdir()
    found = find_latest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert lost in found.skipped[0]


def test_damaged_files_are_skipped_on_request_and_named(tmp_path):
    save(tmp_path, 1, 2, 3)
    for step in (2, 3):
        flip(tmp_path / f"step_0000000{step}" / "rank_00000.safetensors")
    latest, intact = find_latest(tmp_path), find_latest(tmp_path, skip_damaged=True)
    assert latest is not None
    assert latest.step == 3
    assert intact is not None
    assert intact.step == 1
    assert ["step_00000003" in intact.skipped[0], "step_00000002" in intact.skipped[1]] == [True, True]
    tensor = torch.zeros(4)
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    load_checkpoint(intact.path, [("w", tensor, dense_spec("w", (4,), Init.constant(0.0)))], groups)
    assert tensor.tolist() == [1.0] * 4


def test_a_folder_of_damaged_checkpoints_is_an_error(tmp_path):
    save(tmp_path, 1)
    flip(tmp_path / "step_00000001" / "state.json")
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        find_latest(tmp_path, skip_damaged=True)


def test_all_ranks_get_the_answer_of_rank_0(tmp_path):
    save(tmp_path, 5)

    def program(world):
        # The other ranks are told of another folder: theirs must not matter.
        return find_latest(tmp_path if world.rank == 0 else tmp_path / "none", world.whole())

    assert {found.step for found in simulate(3, program)} == {5}


def test_pruning_keeps_the_newest_and_removes_leftovers(tmp_path):
    save(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step_00000003" / "COMPLETE").unlink()
    (tmp_path / ".step_00000009.partial").mkdir()
    (tmp_path / "notes").mkdir()
    deleted = prune(tmp_path, keep=2)
    assert [path.name for path in deleted] == ["step_00000001"]
    assert {p.name for p in tmp_path.iterdir()} == {
        "step_00000002",
        "step_00000003",  # not complete: not counted, and left for a person to look at
        "step_00000004",
        "notes",
    }


def test_the_newest_is_never_pruned(tmp_path):
    save(tmp_path, 1)
    assert prune(tmp_path, keep=1) == []
    with pytest.raises(CheckpointError, match="keep=0"):
        prune(tmp_path, keep=0)
