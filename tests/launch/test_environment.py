"""A rank's place is read from the launcher's variables, and never guessed."""

from __future__ import annotations

import pytest

from isozyme.core.errors import ConfigError
from isozyme.launch.environment import detect, threads_per_rank

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NNODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_torchrun_and_slurm_say_who_a_process_is() -> None:
    place = detect(TORCHRUN)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)
    place = detect(SLURM)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 6, 1, 2)
    assert (place.master_addr, place.master_port, place.launcher) == ("node0", 29500, "slurm")


def test_equal_tasks_on_each_node_are_understood() -> None:
    place = detect(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2)"})
    assert place is not None
    assert place.local_world_size == 3


def test_a_process_that_nobody_launched_is_no_rank() -> None:
    assert detect({}) is None
    assert detect({"MASTER_ADDR": "node0"}) is None


def test_torchrun_inside_a_slurm_step_decides() -> None:
    place = detect(SLURM | TORCHRUN)
    assert place is not None
    assert (place.rank, place.launcher) == (3, "torchrun")


@pytest.mark.parametrize(
    "missing", ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
)
def test_a_missing_variable_of_torchrun_is_refused(missing: str) -> None:
    env = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(ConfigError, match=f"{missing} must be set"):
        detect(env)


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_LOCALID", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_of_slurm_is_refused(missing: str) -> None:
    env = {name: value for name, value in SLURM.items() if name != missing}
    with pytest.raises(ConfigError, match=f"{missing} must be set"):
        detect(env)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "RANK must be less than WORLD_SIZE: 4 of 4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK must be less than LOCAL_WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "8"}, "a host cannot hold more ranks"),
        ({"RANK": "one"}, "RANK must be a whole number: RANK='one'"),
        ({"MASTER_PORT": ""}, "MASTER_PORT must be set"),
    ],
)
def test_contradictory_variables_of_torchrun_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("'", ".")):
        detect(TORCHRUN | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": "6"}, "SLURM_PROCID must be less than SLURM_STEP_NUM_TASKS"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID must be less than"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,1"}, "variables must agree"),
    ],
)
def test_contradictory_variables_of_slurm_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect(SLURM | change)


def test_several_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError, match="3 rules broken"):
        detect({"RANK": "0", "WORLD_SIZE": "x", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})


def test_the_batch_shell_of_a_job_of_several_nodes_is_told_to_use_srun() -> None:
    with pytest.raises(ConfigError, match="srun"):
        detect({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    assert (
        detect({"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    )


def test_ranks_of_a_host_share_its_cores() -> None:
    alone = threads_per_rank(1)
    assert threads_per_rank(alone) == 1
    assert threads_per_rank(10_000) == 1
