"""A folder of checkpoints: which is the latest that can be trusted, and which are old enough to go."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from isozyme.core.errors import CheckpointError
from isozyme.parallel.agreement import together
from isozyme.parallel.checkpoint import damages, open_index
from isozyme.parallel.communicator import Communicator, SingleCommunicator

CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints within a run's folder."""
_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.step_\d{8,}\.(partial|replaced|removed)")


@dataclass(frozen=True, kw_only=True)
class Found:
    """The checkpoint to go on from, and those that were newer but could not be used."""

    path: Path
    step: int
    skipped: tuple[str, ...] = ()
    """What is wrong with each newer one, newest first. Tell the user."""


def find_latest(
    root: Path | str, world: Communicator | None = None, *, skip_damaged: bool = False
) -> Found | None:
    """The newest complete checkpoint of a folder, or None if there is none.

    Args:
        root: the folder.
        world: all ranks: rank 0 looks, and all get its answer. By default this process looks alone.
        skip_damaged: check the hash of every file too, and take the newest checkpoint that is intact.

    Raises:
        CheckpointError: if there are checkpoints, but none that can be used; the message lists why not.
    """
    world = SingleCommunicator() if world is None else world
    found = together(
        world,
        f"looking for a checkpoint in {root}",
        lambda: _find(Path(root), skip_damaged) if world.rank == 0 else None,
    )
    return found[0]


def checkpoints_of(root: Path) -> list[Path]:
    """The folders named as checkpoints are, newest first, complete or not; none where there is no `root`."""
    if not root.is_dir():
        return []
    steps = [path for path in root.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(steps, key=_step, reverse=True)


def prune(root: Path | str, keep: int) -> list[Path]:
    """Delete all but the newest `keep` complete checkpoints, and what interrupted saves have left.

    One rank calls it, after a save was published. Folders that are not complete checkpoints are not touched.

    Returns:
        The folders of the checkpoints that were deleted.

    Raises:
        CheckpointError: if none is to be kept.
    """
    root = Path(root)
    if keep < 1:
        raise CheckpointError(f"the newest checkpoint is never deleted: keep={keep}. Use 1 or more.")
    for leftover in [path for path in root.iterdir() if _LEFTOVER.fullmatch(path.name)]:
        shutil.rmtree(leftover)
    complete = [path for path in checkpoints_of(root) if _why_unusable(path, check_files=False) is None]
    for path in complete[keep:]:
        # Renamed first: a folder that is half deleted must not look like a checkpoint.
        shutil.rmtree(path.rename(path.with_name(f".{path.name}.removed")))
    return complete[keep:]


def _find(root: Path, skip_damaged: bool) -> Found | None:
    skipped: list[str] = []
    for path in checkpoints_of(root):
        problem = _why_unusable(path, check_files=skip_damaged)
        if problem is None:
            return Found(path=path, step=_step(path), skipped=tuple(skipped))
        skipped.append(problem)
    if skipped:
        raise CheckpointError("\n  - ".join([f"no checkpoint in {root} can be used", *skipped]))
    return None


def _why_unusable(path: Path, *, check_files: bool) -> str | None:
    if check_files:
        return "; ".join(damages(path)) or None
    try:
        open_index(path)
    except CheckpointError as error:
        return str(error)
    return None


def _step(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    assert match is not None
    return int(match[1])
