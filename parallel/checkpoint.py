"""Checkpoints of global tensors: saved at one layout, loaded at any other, whole or not at all.

A checkpoint is a folder `step_00000100/`. Each unique shard is written by one rank; the folder is filled
under a temporary name, brought to the disk, and renamed when all ranks are done. `COMPLETE` holds the hash
of the index, and the index those of all files, so that an unfinished or damaged checkpoint is seen as such.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isozyme.core.errors import CheckpointError
from isozyme.parallel.agreement import together
from isozyme.parallel.checkpoint_files import (
    Entry,
    FileRecord,
    TensorFileWriter,
    damage,
    sync_folder,
    write_bytes,
)
from isozyme.parallel.checkpoint_index import Index, Reader, Shard, merge
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import OwnedBox, ShardSpec

NamedShards = Iterable[tuple[str, Tensor, ShardSpec]]
"""(global name, local tensor, spec), as `named_shards(module)` and `Optimizer.state()` give them."""

INDEX, STATE, MARKER = "index.json", "state.json", "COMPLETE"


def save_checkpoint(
    root: Path | str,
    step: int,
    tensors: NamedShards,
    groups: ProcessGroups,
    *,
    state: Mapping[str, Any] | None = None,
) -> Path:
    """Save one checkpoint. All ranks call it together; all return, or all raise, when it is decided.

    Args:
        root: folder of the checkpoints, on a file system that all ranks see; made if absent.
        step: optimiser steps done; names the folder. An older checkpoint of the same step is replaced.
        tensors: this rank's part of everything that is saved: weights, buffers, optimiser state.
        groups: the communicators.
        state: what else the run needs to go on (data position, updates, configuration); JSON, of rank 0.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: on all ranks alike if any rank failed (disk full, folder not writable); nothing was
            published and the unfinished folder was removed.
    """
    root, world = Path(root), groups.world
    final = root / f"step_{step:08d}"
    partial = root / f".{final.name}.partial"
    mine = _unique_shards(tensors, groups)
    leader = world.rank == 0
    what = f"saving {final}"
    sizes = together(world, what, lambda: sum(entry.nbytes for entry, _, _ in mine))
    together(world, what, lambda: _prepare(root, partial, sum(sizes)) if leader else None)
    try:
        written = together(world, what, lambda: _write_shards(partial, mine, groups))
        together(
            world, what, lambda: _publish(partial, final, written, dict(state or {})) if leader else None
        )
    except CheckpointError:
        if leader:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def load_checkpoint(
    path: Path | str,
    tensors: NamedShards,
    groups: ProcessGroups,
    *,
    allow_extra: bool = False,
    cast: bool = False,
) -> dict[str, Any]:
    """Fill this rank's tensors from a checkpoint that was saved at any layout. All ranks call it together.

    Every file is checked against its hash (the ranks share the work) before any tensor is changed; then each
    rank reads the slices that it needs.

    Args:
        path: the folder of the checkpoint.
        tensors: what to fill, in place.
        groups: the communicators.
        allow_extra: accept tensors in the checkpoint that no rank wants (to load weights alone).
        cast: accept tensors of another dtype, and convert them.

    Returns:
        The `state` that was saved.

    Raises:
        CheckpointError: on all ranks alike if the checkpoint is incomplete or damaged (the message names the
            file), or does not fit (it lists every missing, unexpected and misshapen tensor).
    """
    path, world = Path(path), groups.world
    what = f"loading {path}"
    index = together(world, what, lambda: open_index(path))[world.rank]
    together(world, what, lambda: _verify(index, first=world.rank, stride=world.size))
    load_tensors(index, tensors, groups, subject=path, allow_extra=allow_extra, cast=cast)
    state: dict[str, Any] = together(world, what, lambda: json.loads((path / STATE).read_bytes()))[0]
    return state


def load_state(path: Path | str, groups: ProcessGroups) -> dict[str, Any]:
    """The `state` of a checkpoint, without its tensors. All ranks call it together.

    Raises:
        CheckpointError: on all ranks alike if the checkpoint is incomplete, or its state damaged.
    """
    path = Path(path)

    def read() -> dict[str, Any]:
        index = open_index(path)
        problem = damage(path / STATE, index.files[STATE])
        if problem is not None:
            raise CheckpointError(problem)
        found: dict[str, Any] = json.loads((path / STATE).read_bytes())
        return found

    return together(groups.world, f"loading {path}", read)[0]


def load_tensors(
    index: Index,
    tensors: NamedShards,
    groups: ProcessGroups,
    *,
    subject: Path,
    allow_extra: bool,
    cast: bool,
) -> None:
    """Fill tensors from an index whose files were verified: the second half of loading `subject`.

    Raises:
        CheckpointError: on all ranks alike if checkpoint and tensors do not fit; every misfit is listed.
    """
    world, wanted = groups.world, list(tensors)
    everybody = {name for names in world.all_gather_object([name for name, _, _ in wanted]) for name in names}
    extra = [] if allow_extra else sorted(set(index.tensors) - everybody)
    problems = {
        problem for name, tensor, spec in wanted for problem in _misfits(index, name, tensor, spec, cast)
    }
    problems |= {f"unexpected: {name} is in the checkpoint, but nobody wants it" for name in extra}
    found = sorted({problem for of_rank in world.all_gather_object(sorted(problems)) for problem in of_rank})
    if found:
        head = f"the checkpoint must fit the model: {subject} does not in {len(found)} places"
        raise CheckpointError("\n  - ".join([head, *found]))

    def fill() -> None:
        reader = Reader(index)
        with torch.no_grad():
            for name, tensor, spec in wanted:
                tensor.copy_(reader.read(name, spec.slices(groups.topology, groups.rank)))

    together(world, f"loading {subject}", fill)


def open_index(path: Path) -> Index:
    """The index of a complete checkpoint; its files are not checked yet.

    Raises:
        CheckpointError: if the marker or the index is missing or damaged.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"there is no checkpoint at {path}. Give a folder step_…, or `latest` for the run's newest."
        )
    try:
        marker = (path / MARKER).read_text(errors="replace").strip()
        text = (path / INDEX).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {Path(str(error.filename)).name}: {error.strerror}. "
            "Give a folder step_… whose saving was finished."
        ) from error
    if hashlib.sha256(text).hexdigest() != marker:
        raise CheckpointError(f"{path / INDEX} is damaged: its SHA-256 is not the one in {MARKER}.")
    index = Index.from_json(path, text)
    holes = index.incomplete()
    if holes:
        raise CheckpointError("\n  - ".join([f"{path} lacks parts of {len(holes)} tensors", *holes]))
    return index


def damages(path: Path) -> list[str]:
    """Everything that is wrong with a checkpoint, in words; empty if it is complete and every hash holds."""
    try:
        index = open_index(path)
    except CheckpointError as error:
        return [str(error)]
    found = (damage(path / name, record) for name, record in sorted(index.files.items()))
    return [problem for problem in found if problem is not None]


_Piece = tuple[Entry, Tensor, ShardSpec]


def _unique_shards(tensors: NamedShards, groups: ProcessGroups) -> list[_Piece]:
    """What this rank writes: the shards of which it is the writer, in the order of their names."""
    mine = [
        (Entry(_key(name, spec), tensor.dtype, tuple(tensor.shape)), tensor, spec)
        for name, tensor, spec in tensors
        if spec.is_writer(groups.topology, groups.rank)
    ]
    return sorted(mine, key=lambda piece: piece[0].key)


def _key(name: str, spec: ShardSpec) -> str:
    """What a shard is called in its file: its tensor's name; with its offset, if a file may hold several."""
    if not isinstance(spec, OwnedBox):
        return name
    return f"{name}@{','.join(str(part.start) for part in spec.box)}"


def _prepare(root: Path, partial: Path, needed: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    free = shutil.disk_usage(root).free
    if free < needed:
        raise CheckpointError(
            f"no space for the checkpoint: it needs {needed:,} bytes, but {root} has {free:,} free. "
            "Free some space, or save elsewhere"
        )
    partial.mkdir()


_Written = tuple[list[tuple[str, tuple[int, ...], torch.dtype, Shard]], dict[str, FileRecord]]


def _write_shards(partial: Path, mine: list[_Piece], groups: ProcessGroups) -> _Written:
    if not mine:
        return [], {}
    file = f"rank_{groups.rank:05d}.safetensors"
    pieces = []
    with TensorFileWriter(partial / file, [entry for entry, _, _ in mine]) as writer:
        for entry, tensor, spec in mine:
            box = spec.slices(groups.topology, groups.rank)
            offset = tuple(part.start for part in box)
            shard = Shard(file=file, key=entry.key, offset=offset, shape=entry.shape)
            if entry.shape != tuple(part.stop - part.start for part in box):
                raise CheckpointError(f"{entry.key} has shape {entry.shape}, but its spec says {box}")
            writer.append(tensor)
            pieces.append((spec.name, spec.global_shape, entry.dtype, shard))
        record = writer.finish()
    return pieces, {file: record}


def _publish(partial: Path, final: Path, written: list[_Written], state: dict[str, Any]) -> None:
    pieces = [piece for of_rank, _ in written for piece in of_rank]
    files = {name: record for _, records in written for name, record in records.items()}
    files[STATE] = write_bytes(partial / STATE, json.dumps(state, indent=1).encode())
    index = Index(folder=partial, tensors=merge(pieces), files=files)
    holes = index.incomplete()
    if holes:
        raise CheckpointError("\n  - ".join(["the ranks' shards do not make up whole tensors", *holes]))
    record = write_bytes(partial / INDEX, index.to_json())
    write_bytes(partial / MARKER, record.sha256.encode())
    sync_folder(partial)
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _verify(index: Index, first: int, stride: int) -> None:
    names = sorted(index.files)[first::stride]
    found = (damage(index.folder / name, index.files[name]) for name in names)
    problems = [problem for problem in found if problem is not None]
    if problems:
        raise CheckpointError("; ".join(problems))


def _misfits(index: Index, name: str, tensor: Tensor, spec: ShardSpec, cast: bool) -> list[str]:
    stored = index.tensors.get(name)
    if stored is None:
        return [f"missing: {name} {spec.global_shape} is not in the checkpoint"]
    if stored.shape != spec.global_shape:
        return [f"misshapen: {name} is {stored.shape} in the checkpoint and {spec.global_shape} in the model"]
    if stored.dtype != tensor.dtype and not cast:
        return [
            f"of another dtype: {name} is {stored.dtype} in the checkpoint and {tensor.dtype} in the model"
        ]
    return []
