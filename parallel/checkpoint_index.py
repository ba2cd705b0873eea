"""The index of a checkpoint: which slice of which global tensor lies in which file, and how to read any.

Slices in the files follow the layout that saved them; slices that are asked for follow the layout that loads.
Neither needs to know the other: what is wanted is put together from whatever overlaps it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from isozyme.core.errors import CheckpointError
from isozyme.parallel.checkpoint_files import FileRecord

FORMAT = 1
"""Version of the index; a reader refuses those it does not know."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A box of one global tensor, and where its values are."""

    file: str
    key: str
    offset: tuple[int, ...]
    """Index of its first element in the global tensor, one number a dim."""
    shape: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """The part of the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One global tensor and the shards that make it up."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True)
class Index:
    """All tensors and files of a checkpoint in `folder`."""

    folder: Path
    tensors: dict[str, StoredTensor]
    files: dict[str, FileRecord]

    def to_json(self) -> bytes:
        """The index as it is written."""
        tensors = {
            name: {
                "shape": stored.shape,
                "dtype": str(stored.dtype).removeprefix("torch."),
                "shards": [asdict(shard) for shard in stored.shards],
            }
            for name, stored in sorted(self.tensors.items())
        }
        files = {name: asdict(record) for name, record in sorted(self.files.items())}
        return json.dumps({"format": FORMAT, "tensors": tensors, "files": files}, indent=1).encode()

    @staticmethod
    def from_json(folder: Path, text: bytes) -> Index:
        """Read what `to_json` wrote.

        Raises:
            CheckpointError: if it is of another version.
        """
        raw: dict[str, Any] = json.loads(text)
        if raw.get("format") != FORMAT:
            raise CheckpointError(
                f"this version reads checkpoints of format {FORMAT}: {folder} has format={raw.get('format')}."
            )
        tensors = {
            name: StoredTensor(
                shape=tuple(stored["shape"]),
                dtype=getattr(torch, stored["dtype"]),
                shards=tuple(
                    Shard(
                        file=shard["file"],
                        key=shard["key"],
                        offset=tuple(shard["offset"]),
                        shape=tuple(shard["shape"]),
                    )
                    for shard in stored["shards"]
                ),
            )
            for name, stored in raw["tensors"].items()
        }
        files = {name: FileRecord(**record) for name, record in raw["files"].items()}
        return Index(folder=folder, tensors=tensors, files=files)

    def incomplete(self) -> list[str]:
        """Tensors whose shards do not cover them exactly once, in words."""
        found = []
        for name, stored in self.tensors.items():
            covered, whole = sum(math.prod(s.shape) for s in stored.shards), math.prod(stored.shape)
            if whole and (
                covered != whole or len({shard.offset for shard in stored.shards}) != len(stored.shards)
            ):
                found.append(f"{name}: its shards hold {covered} of {whole} elements")
        return found


class Reader:
    """Reads slices of global tensors; keeps each file open (memory-mapped) while it lives."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._open: dict[str, Any] = {}

    def read(self, name: str, wanted: Sequence[slice]) -> Tensor:
        """The part `wanted` of global tensor `name`, on the CPU in the dtype that was stored."""
        stored = self._index.tensors[name]
        out = torch.empty([part.stop - part.start for part in wanted], dtype=stored.dtype)
        for shard in stored.shards:
            both = [
                slice(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(wanted, shard.box, strict=True)
            ]
            if all(part.start < part.stop for part in both):
                here = tuple(_shift(part, -b.start) for part, b in zip(both, shard.box, strict=True))
                there = tuple(_shift(part, -a.start) for part, a in zip(both, wanted, strict=True))
                out[there] = self._part(shard, here)
        return out

    def _part(self, shard: Shard, part: tuple[slice, ...]) -> Tensor:
        if shard.file not in self._open:
            self._open[shard.file] = safe_open(self._index.folder / shard.file, framework="pt")
        file = self._open[shard.file]
        if not part:
            scalar: Tensor = file.get_tensor(shard.key)
            return scalar
        values: Tensor = file.get_slice(shard.key)[part]
        return values


def merge(pieces: Iterable[tuple[str, tuple[int, ...], torch.dtype, Shard]]) -> dict[str, StoredTensor]:
    """Global tensors from the (name, global shape, dtype, shard) of all ranks.

    Raises:
        CheckpointError: if ranks disagree about a tensor's shape or dtype.
    """
    found: dict[str, StoredTensor] = {}
    for name, shape, dtype, shard in pieces:
        before = found.get(name)
        if before is not None and (before.shape, before.dtype) != (shape, dtype):
            raise CheckpointError(
                f"ranks disagree about {name}: {before.shape} {before.dtype} and {shape} {dtype}."
            )
        shards = (*(before.shards if before is not None else ()), shard)
        found[name] = StoredTensor(shape=shape, dtype=dtype, shards=shards)
    return found


def _shift(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
