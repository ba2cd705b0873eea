"""One file of final weights: all global tensors, whole, in safetensors, with the configuration in its header.

It is gathered to rank 0 one tensor at a time, so no rank holds more than one whole tensor beside its own
shards. A file `<name>.sha256` beside it, as `sha256sum --check` reads it, tells a damaged file on load.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from isozyme.core.errors import CheckpointError
from isozyme.parallel.agreement import together
from isozyme.parallel.checkpoint import NamedShards, load_tensors
from isozyme.parallel.checkpoint_files import DTYPE_CODES, Entry, FileRecord, TensorFileWriter, damage
from isozyme.parallel.checkpoint_index import Index, Shard, StoredTensor, merge
from isozyme.parallel.communicator import Communicator
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import ShardSpec, named_shards

METADATA = "isozyme"
"""Key of the file's header under which the metadata is kept, as JSON."""


def save_weights(
    path: Path | str,
    weights: nn.Module | NamedShards,
    groups: ProcessGroups,
    *,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write all weights of the model to one file. All ranks call it together.

    Args:
        path: the file, seen by rank 0; an existing one is replaced when the new one is whole.
        weights: this rank's module, or its (name, tensor, spec).
        groups: the communicators.
        metadata: what to keep with the weights, such as the configuration; written as JSON.

    Raises:
        CheckpointError: on all ranks alike if rank 0 cannot write.
    """
    path, world = Path(path), groups.world
    named = list(_named(weights))
    mine = {
        name: (tensor, spec) for name, tensor, spec in named if spec.is_writer(groups.topology, groups.rank)
    }
    offers = world.all_gather_object([_offer(path, *mine[name], groups) for name in sorted(mine)])
    stored = merge(piece for of_rank in offers for piece in of_rank)
    holes = Index(folder=path.parent, tensors=stored, files={}).incomplete()
    if holes:
        raise CheckpointError("\n  - ".join(["the ranks' shards do not make up whole tensors", *holes]))
    sources = {(name, shard): rank for rank, of_rank in enumerate(offers) for name, _, _, shard in of_rank}
    sink = _Sink(path, stored, metadata or {}) if world.rank == 0 else None
    device = named[0][1].device if named else torch.device("cpu")
    for name in sorted(stored):
        whole = torch.empty(stored[name].shape, dtype=stored[name].dtype) if sink is not None else None
        for shard in stored[name].shards:
            tensor = mine[name][0] if sources[name, shard] == world.rank else None
            part = _to_leader(tensor, sources[name, shard], shard, stored[name].dtype, device, world)
            if whole is not None and part is not None:
                whole[shard.box] = part.to(whole.device)
        if sink is not None and whole is not None:
            sink.append(whole)
    together(world, f"writing {path}", lambda: sink.finish() if sink is not None else None)
    return path


def load_weights(
    path: Path | str,
    weights: nn.Module | NamedShards,
    groups: ProcessGroups,
    *,
    allow_extra: bool = False,
    cast: bool = True,
) -> dict[str, Any]:
    """Fill this rank's weights from one file, at any layout. All ranks call it together.

    Args:
        path: a file of `save_weights`, seen by all ranks. Its hash is checked if `.sha256` lies beside.
        weights: this rank's module, or its (name, tensor, spec).
        groups: the communicators.
        allow_extra: accept tensors that no rank wants.
        cast: convert tensors to the dtype of the model; else another dtype is an error.

    Returns:
        The metadata.

    Raises:
        CheckpointError: on all ranks alike if the file is missing, damaged or does not fit the model.
    """
    path, world = Path(path), groups.world
    found = together(world, f"loading {path}", lambda: _open(path, check=world.rank == 0))
    index, metadata = found[world.rank]
    load_tensors(index, _named(weights), groups, subject=path, allow_extra=allow_extra, cast=cast)
    return metadata


class _Sink:
    """The file on rank 0. It keeps the first error until the end, so that the other ranks can send on."""

    def __init__(self, path: Path, stored: Mapping[str, StoredTensor], metadata: Mapping[str, Any]) -> None:
        self._path, self._partial = path, path.with_name(f".{path.name}.partial")
        self._error: Exception | None = None
        self._writer: TensorFileWriter | None = None
        entries = [Entry(name, stored[name].dtype, stored[name].shape) for name in sorted(stored)]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._partial.unlink(missing_ok=True)
            header = {"format": "pt", METADATA: json.dumps(dict(metadata))}
            self._writer = TensorFileWriter(self._partial, entries, header)
        except OSError as error:
            self._error = error

    def append(self, tensor: Tensor) -> None:
        if self._error is None and self._writer is not None:
            try:
                self._writer.append(tensor)
            except OSError as error:
                self._error = error

    def finish(self) -> None:
        checksum = _checksum_of(self._path)
        try:
            if self._error is not None:
                raise self._error
            assert self._writer is not None
            record = self._writer.finish()
            # Without a checksum for a moment, rather than with that of the other file.
            checksum.unlink(missing_ok=True)
            self._partial.replace(self._path)
            checksum.write_text(f"{record.sha256}  {self._path.name}\n")
        except OSError:
            if self._writer is not None:
                self._writer.abandon()
                self._partial.unlink(missing_ok=True)
            raise


def _named(weights: nn.Module | NamedShards) -> NamedShards:
    return named_shards(weights) if isinstance(weights, nn.Module) else weights


def _checksum_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _offer(
    path: Path, tensor: Tensor, spec: ShardSpec, groups: ProcessGroups
) -> tuple[str, tuple[int, ...], torch.dtype, Shard]:
    box = spec.slices(groups.topology, groups.rank)
    shard = Shard(
        file=path.name, key=spec.name, offset=tuple(part.start for part in box), shape=tuple(tensor.shape)
    )
    return spec.name, spec.global_shape, tensor.dtype, shard


@torch.no_grad()
def _to_leader(
    tensor: Tensor | None,
    source: int,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    world: Communicator,
) -> Tensor | None:
    """Move one shard from `source` to rank 0, as bytes; None on ranks that do not receive it."""
    numel = math.prod(shard.shape)
    if world.rank == source == 0:
        return tensor
    if world.rank == source and numel:
        assert tensor is not None
        world.send(tensor.contiguous().reshape(-1).view(torch.uint8), dst=0)
    if world.rank == 0:
        raw = torch.empty(numel * dtype.itemsize, dtype=torch.uint8, device=device)
        if numel:
            world.recv(raw, src=source)
        return raw.view(dtype).view(shard.shape)
    return None


def _open(path: Path, *, check: bool) -> tuple[Index, dict[str, Any]]:
    if not path.is_file():
        raise CheckpointError(f"there is no weights file at {path}.")
    checksum = _checksum_of(path)
    if check and checksum.is_file():
        expected = checksum.read_text(errors="replace").split(" ", 1)[0]
        problem = damage(path, FileRecord(path.stat().st_size, expected))
        if problem is not None:
            raise CheckpointError(problem)
    codes = {code: dtype for dtype, code in DTYPE_CODES.items()}
    tensors = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            shard = Shard(file=path.name, key=name, offset=(0,) * len(shape), shape=shape)
            tensors[name] = StoredTensor(shape=shape, dtype=codes[part.get_dtype()], shards=(shard,))
        metadata: dict[str, Any] = json.loads((file.metadata() or {}).get(METADATA, "{}"))
    return Index(folder=path.parent, tensors=tensors, files={}), metadata
