"""Who this process is among the ranks, read from the environment that a launcher prepared.

The one place that knows the variables of torchrun and of SLURM. Contradictory or incomplete variables are
refused: a guessed address or rank has made every node a world of its own that then waited for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from isozyme.core.errors import CommunicationError, ConfigError, Rules

ERROR_FOLDER = "ISOZYME_ERROR_FOLDER"
"""Variable: folder in which each rank that the local launcher started leaves its error."""
PARENT = "ISOZYME_PARENT"
"""Variable: process id of the local launcher, without which its ranks must not go on."""
TRACEBACK = "ISOZYME_TRACEBACK"
"""Variable: 1 prints the traceback of an error that isozyme raised on purpose."""


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """One rank's place in the world."""

    rank: int
    world_size: int
    local_rank: int
    """Index among the ranks of this host: the CUDA device that the rank takes."""
    local_world_size: int
    """Ranks on this host: they share its cores."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    launcher: Literal["alone", "local", "torchrun", "slurm"] = "alone"

    def export(self, env: dict[str, str] | None = None) -> dict[str, str]:
        """The variables that torch.distributed reads, set in `env` (by default in this process)."""
        variables = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }
        (os.environ if env is None else env).update(variables)
        return variables


ALONE = RankEnvironment(rank=0, world_size=1, local_rank=0, local_world_size=1)
"""The environment of a world of one rank."""


def detect(env: Mapping[str, str]) -> RankEnvironment | None:
    """The place that a launcher gave this process, or None if no launcher did.

    torchrun (and the local launcher) set RANK; inside a SLURM step of several tasks, started by srun, each
    task is a rank and MASTER_ADDR and MASTER_PORT must be set by the batch script.

    Raises:
        ConfigError: if variables are missing, are not numbers, or contradict each other.
    """
    if "RANK" in env:
        return _from_torchrun(env)
    if _is_slurm_step(env):
        return _from_slurm(env)
    nodes = env.get("SLURM_NNODES", "1")
    if "SLURM_JOB_ID" in env and nodes != "1":
        raise ConfigError(
            f"the batch shell of a SLURM job is no rank: SLURM_NNODES={nodes}, and no step has been started. "
            "Start the ranks with srun, as launch/scripts/train.sbatch does."
        )
    return None


def threads_per_rank(local_world_size: int) -> int:
    """CPU threads for each rank: the cores this process may use, shared by the ranks of the host."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def die_with_parent(env: Mapping[str, str]) -> None:
    """Make the kernel kill this rank when the local launcher dies, so that no orphan keeps a device.

    Raises:
        CommunicationError: if the launcher is already gone.
    """
    parent = env.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(parent):
        raise CommunicationError(
            f"the launcher is gone: {PARENT}={parent}, but the parent is {os.getppid()}."
        )


def _is_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether this is a task of an srun step of more than one task (a batch shell has no SLURM_STEP_ID)."""
    return "SLURM_STEP_ID" in env and env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")) != "1"


def _from_torchrun(env: Mapping[str, str]) -> RankEnvironment:
    rules = Rules("environment (RANK is set, so torchrun or the like started this process)")
    numbers = _numbers(env, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"), rules)
    _need(env, "MASTER_ADDR", rules)
    rules.raise_if_broken()
    _check_order(numbers["RANK"], numbers["WORLD_SIZE"], ("RANK", "WORLD_SIZE"), rules)
    _check_order(
        numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"], ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), rules
    )
    rules.check(
        numbers["LOCAL_WORLD_SIZE"] <= numbers["WORLD_SIZE"],
        f"a host cannot hold more ranks than there are: LOCAL_WORLD_SIZE={numbers['LOCAL_WORLD_SIZE']}, "
        f"WORLD_SIZE={numbers['WORLD_SIZE']}.",
    )
    rules.raise_if_broken()
    return RankEnvironment(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        master_addr=env["MASTER_ADDR"],
        master_port=numbers["MASTER_PORT"],
        launcher="local" if PARENT in env else "torchrun",
    )


def _from_slurm(env: Mapping[str, str]) -> RankEnvironment:
    rules = Rules("environment (a SLURM step of several tasks: each is one rank)")
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    numbers = _numbers(env, ("SLURM_PROCID", tasks, "SLURM_LOCALID", "MASTER_PORT"), rules)
    _need(env, "MASTER_ADDR", rules)
    rules.raise_if_broken()
    local_size = _tasks_on_this_node(env, numbers[tasks], rules)
    _check_order(numbers["SLURM_PROCID"], numbers[tasks], ("SLURM_PROCID", tasks), rules)
    _check_order(numbers["SLURM_LOCALID"], local_size, ("SLURM_LOCALID", "tasks on this node"), rules)
    rules.raise_if_broken()
    return RankEnvironment(
        rank=numbers["SLURM_PROCID"],
        world_size=numbers[tasks],
        local_rank=numbers["SLURM_LOCALID"],
        local_world_size=local_size,
        master_addr=env["MASTER_ADDR"],
        master_port=numbers["MASTER_PORT"],
        launcher="slurm",
    )


def _tasks_on_this_node(env: Mapping[str, str], tasks: int, rules: Rules) -> int:
    """Tasks of this node, from `SLURM_STEP_TASKS_PER_NODE` such as `4(x2),2`."""
    listed = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE"))
    if listed is None:
        return tasks
    counts: list[int] = []
    for part in listed.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    node = int(env.get("SLURM_NODEID", "0"))
    rules.check(
        sum(counts) == tasks and node < len(counts),
        f"SLURM's variables must agree: tasks a node {listed} sum to {sum(counts)}, but the step has "
        f"{tasks} tasks; SLURM_NODEID={node}.",
    )
    return counts[node] if node < len(counts) else tasks


def _numbers(env: Mapping[str, str], names: tuple[str, ...], rules: Rules) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        if not _need(env, name, rules):
            continue
        if rules.check(env[name].isdigit(), f"{name} must be a whole number: {name}={env[name]!r}."):
            found[name] = int(env[name])
    return found


def _need(env: Mapping[str, str], name: str, rules: Rules) -> bool:
    return rules.check(bool(env.get(name)), f"{name} must be set, and is not. The launcher sets it.")


def _check_order(rank: int, size: int, names: tuple[str, str], rules: Rules) -> None:
    rules.check(rank < size, f"{names[0]} must be less than {names[1]}: {rank} of {size}.")
