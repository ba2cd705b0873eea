"""Saving a run's checkpoints and going on from one: what must not have changed, and what may.

A checkpoint holds weights, buffers and optimiser state under global names, so the layout, the number of ranks
and the expert backend may change. The model, the data and the order of its windows may not: the loss would
go on from a state that belongs to another problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from isozyme.core.config import RunConfig
from isozyme.core.errors import CheckpointError
from isozyme.launch.report import count
from isozyme.parallel.checkpoint import load_checkpoint, load_state, save_checkpoint
from isozyme.parallel.checkpoint_folder import CHECKPOINTS, find_latest, prune
from isozyme.parallel.optimizer import Optimizer
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import ShardSpec, named_shards

FIXED = (
    "seed",
    "precision",
    "model",
    "data.window",
    "data.overlap",
    "data.held_out",
    "data.split",
    "data.reverse_complement",
    "train.global_batch",
)
"""Settings (and sections) that a resumed run must share with the one that it goes on with."""
FREE = (
    "model.attention",
    "model.norm",
    "model.recompute",
    *(f"model.moe.{name}" for name in ("dispatcher", "equal_tokens", "pad_to_capacity", "overlap_shared")),
    *(f"model.moe.{name}" for name in ("experts", "delay_wgrad", "cache_quantized_weights")),
)
"""Settings (and sections) within these that change how a result is computed, and not the result."""


class Checkpoints:
    """The checkpoints of one run, in `checkpoints/` of its folder. All ranks call each method together.

    Args:
        folder: the run's folder, on a file system that all ranks see.
        config: the run.
        genome_sha256: digest of the genome.
        model: its weights and buffers are saved and loaded.
        optimizer: likewise its state.
        groups: this rank's communicators.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        genome_sha256: str,
        model: nn.Module,
        optimizer: Optimizer,
        groups: ProcessGroups,
    ) -> None:
        self.root = folder / CHECKPOINTS
        self.config = config
        self.genome_sha256 = genome_sha256
        self.model = model
        self.optimizer = optimizer
        self.groups = groups

    def save(self, done: int) -> None:
        """Save after `done` steps, then delete the oldest.

        Raises:
            CheckpointError: on all ranks alike; the older checkpoints are untouched.
        """
        state = {
            "step": done,
            "updates": self.optimizer.updates,
            "config": asdict(self.config),
            "genome_sha256": self.genome_sha256,
        }
        save_checkpoint(self.root, done, self._tensors(), self.groups, state=state)
        if self.groups.world.rank == 0:
            prune(self.root, self.config.train.keep_checkpoints)

    def resume(self) -> tuple[int, list[str]]:
        """Load what `config.resume` names.

        Returns:
            The steps that were done (0 without a checkpoint), and lines to tell the user.

        Raises:
            CheckpointError: on all ranks alike if it is missing, damaged, or of a run that this one cannot
                go on with (all differences listed).
        """
        wanted = self.config.resume
        if wanted is None:
            return 0, []
        messages: list[str] = []
        path = Path(wanted)
        if wanted == "latest":
            found = find_latest(self.root, self.groups.world, skip_damaged=True)
            if found is None:
                return 0, [f"resume=latest: no checkpoint in {self.root} yet; starting at the first step"]
            messages += [f"passed over a newer checkpoint: {reason}" for reason in found.skipped]
            path = found.path
        self._must_fit(path, load_state(path, self.groups))
        state = load_checkpoint(path, self._tensors(), self.groups)
        self.optimizer.loaded(int(state["updates"]))
        done, steps = int(state["step"]), self.config.train.steps
        messages.append(f"resumed from {path}: {done} steps done")
        if done == steps:
            messages.append(f"train.steps={steps}: no step is left; writing the weights and evaluating them")
        return done, messages

    def _tensors(self) -> Iterator[tuple[str, Tensor, ShardSpec]]:
        self.optimizer.finish()
        yield from named_shards(self.model)
        yield from self.optimizer.state()

    def _must_fit(self, path: Path, state: Mapping[str, Any]) -> None:
        before, now = _flat(state["config"]), _flat(asdict(self.config))
        changed = [
            f"{key}: {before.get(key)} in the checkpoint, {now.get(key)} now"
            for key in sorted(before.keys() | now.keys())
            if _is_fixed(key) and before.get(key) != now.get(key)
        ]
        if state["genome_sha256"] != self.genome_sha256:
            changed.append(f"data.fasta: another genome ({self.config.data.fasta})")
        if int(state["step"]) > self.config.train.steps:
            changed.append(f"train.steps: {state['step']} steps done, {self.config.train.steps} wanted now")
        if changed:
            places = count(len(changed), "setting")
            head = f"a resumed run must go on with the same problem: {path} differs in {places}"
            tail = "Set them back, or start a new run with another out."
            raise CheckpointError("\n  - ".join([head, *changed]) + f"\n{tail}")


def _is_fixed(key: str) -> bool:
    return _is_of(key, FIXED) and not _is_of(key, FREE)


def _is_of(key: str, settings: Sequence[str]) -> bool:
    """Whether it is one of the settings, or of a section among them."""
    return any(key == each or key.startswith(f"{each}.") for each in settings)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key → value, with lists for tuples (as JSON gives them back)."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return found
