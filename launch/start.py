"""From the command line to running ranks: everything is checked first, then ranks are started or joined."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch

from isozyme.core.config import RunConfig
from isozyme.core.genome.dataset import GenomeData
from isozyme.core.topology import Topology
from isozyme.launch.compose import compose
from isozyme.launch.environment import ALONE, RankEnvironment, detect, die_with_parent, threads_per_rank
from isozyme.launch.factory import factory_of
from isozyme.launch.local import run_ranks
from isozyme.launch.requirements import Machine, check, output_folder
from isozyme.launch.run_folder import claimed
from isozyme.launch.trainer import Run, train_rank
from isozyme.parallel.distributed import torch_world
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld


def train(recipe: str, overrides: Sequence[str], env: Mapping[str, str], model: str | None = None) -> int:
    """The command `isozyme train`.

    In a process that torchrun, srun or the local launcher made a rank, it joins the others. Else it checks
    everything that can be checked, and starts one process for each rank of the layout (none for one rank).

    Args:
        recipe: name of a recipe or path of a YAML file.
        overrides: `key=value`.
        env: the environment variables.
        model: `package.module:factory` of a model of the user's own; the package's decoder if None.

    Returns:
        The exit code.
    """
    config = compose(recipe, overrides)
    factory_of(model)  # refuses what cannot be had before anything starts
    place = detect(env)
    if place is not None:
        die_with_parent(env)
        return run_rank(config, place, model)
    check(config, Machine.here())
    topology = Topology(config.layout)
    folder = output_folder(config)
    with claimed(config, folder):  # given up again for rank 0, which holds it while the run lasts
        open_data(config, folder)
    if topology.world_size == 1:
        return run_rank(config, ALONE, model)
    named = [] if model is None else ["--model", model]
    command = [sys.executable, "-m", "isozyme.launch", "train", recipe, *overrides, *named]
    return run_ranks(command, topology)


def run_rank(config: RunConfig, place: RankEnvironment, model: str | None = None) -> int:
    """Be one rank of a training run, from joining the others to the closing table.

    Args:
        config: the run, the same on all ranks.
        place: which rank this is.
        model: as for `train`.

    Returns:
        The exit code.
    """
    choice = check(
        config, Machine.here(), world_size=place.world_size, local_world_size=place.local_world_size
    )
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(place.local_world_size))
    device = torch.device(f"cuda:{place.local_rank}" if choice.device == "cuda" else "cpu")
    folder = output_folder(config)
    with claimed(config, folder) if place.rank == 0 else nullcontext():
        data = open_data(config, folder)
        with join(config, place, device) as groups:
            run = Run(
                config=config,
                groups=groups,
                device=device,
                choice=choice,
                folder=folder,
                data=data,
                model=model,
            )
            finish = train_rank(run, factory_of(model))
        return finish()


def open_data(config: RunConfig, folder: Path) -> GenomeData:
    """The run's genome, its tokens cached in `data.cache`, or in the run's folder."""
    cache = config.data.cache if config.data.cache is not None else folder / "genome"
    return GenomeData.open(config.data, seed=config.seed, cache=cache)


@contextmanager
def join(config: RunConfig, place: RankEnvironment, device: torch.device) -> Iterator[ProcessGroups]:
    """This rank's communicators, while the block lasts."""
    topology = Topology(config.layout)
    if place.world_size == 1:
        yield ProcessGroups(topology, SingleWorld())
        return
    with torch_world(
        rank=place.rank,
        world_size=place.world_size,
        init_method=f"tcp://{place.master_addr}:{place.master_port}",
        device=device,
        timeout=timedelta(seconds=config.train.timeout_s),
    ) as world:
        yield ProcessGroups(topology, world)
