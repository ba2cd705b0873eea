"""Tensor files in the safetensors format, written tensor by tensor and hashed on the way.

Neither safetensors nor torch notices a flipped bit when it loads, so every file gets a SHA-256 of its bytes
as they were meant. Writing streams: a file of many tensors never needs more memory than its largest one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

DTYPE_CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""How safetensors writes a dtype."""


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its size in bytes and the SHA-256 of its contents."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFileWriter:
    """Writes one safetensors file: entries are declared first, then their tensors are given in that order.

    Args:
        path: the file; must not exist.
        entries: keys, dtypes and shapes.
        metadata: strings for the header.

    Raises:
        OSError: if the file cannot be written.
    """

    def __init__(
        self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None
    ) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for entry in entries:
            header[entry.key] = {
                "dtype": DTYPE_CODES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [offset, offset + entry.nbytes],
            }
            offset += entry.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._todo = list(reversed(entries))
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._file = path.open("xb")
        self._write(len(text).to_bytes(8, "little") + text)

    def append(self, tensor: Tensor) -> None:
        """Write the next tensor."""
        entry = self._todo.pop()
        assert tensor.dtype == entry.dtype, f"{entry.key}: {tensor.dtype} instead of {entry.dtype}"
        assert tuple(tensor.shape) == entry.shape, f"{entry.key}: {tuple(tensor.shape)}, not {entry.shape}"
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            self._write(flat.view(torch.uint8).numpy().data)

    def finish(self) -> FileRecord:
        """Bring the file to the disk; returns what it must be when it is read again."""
        assert not self._todo, f"not written: {[entry.key for entry in self._todo]}"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._bytes, self._hash.hexdigest())

    def abandon(self) -> None:
        """Close the file as it is, after an error."""
        with contextlib.suppress(OSError):  # the buffered rest may not fit either
            self._file.close()

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Write a small file and bring it to the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def sync_folder(path: Path) -> None:
    """Bring a folder's list of names to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def damage(path: Path, record: FileRecord) -> str | None:
    """What is wrong with a file, in words, or None if it is as it was written."""
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"{path} is damaged: it has {size} bytes instead of {record.bytes}"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if digest != record.sha256:
        return f"{path} is damaged: its SHA-256 is {digest[:12]}… instead of {record.sha256[:12]}…"
    return None
