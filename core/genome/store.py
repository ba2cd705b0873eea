"""A genome on disk as one memory-mapped byte array, tokenised once and shared by all processes of a machine.

A cache folder holds, for each source, a token file named by the source's SHA-256 and an index with contig
names and lengths. Both are written beside their place and renamed, tokens first; since the content follows
from the source alone, any number of processes may build at once. An index or token file that is stale or
damaged is rebuilt. Superseded token files stay: another run may have them mapped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from jaxtyping import UInt8

from isozyme.core.errors import ConfigError, DataError, did_you_mean
from isozyme.core.genome.fasta import read_fasta
from isozyme.core.genome.tokens import encode

FORMAT_VERSION: Final = 1
SAMPLE_PREFIX: Final = "sample:"
_SAMPLE_SUFFIX: Final = ".fa.gz"
_CLOCK_TICK_NS: Final = 2_000_000_000
"""Times of files are trusted to this coarseness only (a change within it may leave the time as it was)."""
_PROBES: Final = 64
_PROBE_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Contig:
    """One sequence of a genome and where its tokens lie in the genome's array."""

    name: str
    offset: int
    length: int


@dataclass(frozen=True, eq=False)
class Genome:
    """All contigs of a genome as one read-only array of tokens, without any control ids."""

    source: str
    """The path or sample as the user named it."""
    sha256: str
    """Digest of the source file (of the letters, for a genome made in memory)."""
    contigs: tuple[Contig, ...]
    tokens: UInt8[np.ndarray, " N"]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Bases of each contig."""
        return tuple(contig.length for contig in self.contigs)

    def bases(self, contig: int, start: int, stop: int) -> UInt8[np.ndarray, " N"]:
        """A view of the tokens of one stretch of one contig; `start` and `stop` count within the contig."""
        here = self.contigs[contig]
        assert 0 <= start <= stop <= here.length, f"[{start}, {stop}) is not within {here}"
        return self.tokens[here.offset + start : here.offset + stop]

    @staticmethod
    def from_sequences(sequences: dict[str, str]) -> Genome:
        """A genome in memory, from names and letters.

        >>> Genome.from_sequences({"a": "ACGT", "b": "GG"}).lengths
        (4, 2)
        """
        tokens = encode("".join(sequences.values()))
        lengths = [(name, len(letters)) for name, letters in sequences.items()]
        return Genome("memory", hashlib.sha256(tokens.data).hexdigest(), _contigs(lengths), tokens)

    @staticmethod
    def open(source: str | Path, cache: str | Path) -> Genome:
        """The genome of a FASTA file or of a sample (`sample:lambda`), tokenised into `cache` if need be.

        Args:
            source: path of a FASTA file, plain or gzip, or `sample:<name>`.
            cache: folder of tokenised genomes, made if missing. A read-only one serves while it is valid.

        Raises:
            DataError: the source is missing or malformed.
            ConfigError: the cache has to be written and cannot be.
        """
        with _located(str(source)) as (path, key):
            entry = _Entry(Path(cache).expanduser() / key, path, str(source))
            genome = entry.load()
            return genome if genome is not None else entry.build()


def _contigs(lengths: list[tuple[str, int]]) -> tuple[Contig, ...]:
    """Contigs laid end to end."""
    stops = np.cumsum([0, *(length for _, length in lengths)]).tolist()
    return tuple(Contig(name, stop, length) for (name, length), stop in zip(lengths, stops, strict=False))


@contextlib.contextmanager
def _located(source: str) -> Iterator[tuple[Path, str]]:
    """The file of a source, and the name of its folder in a cache."""
    if not source.startswith(SAMPLE_PREFIX):
        path = Path(source).expanduser()
        digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()
        yield path, f"{path.name.split('.')[0]}-{digest}"
        return
    name = source.removeprefix(SAMPLE_PREFIX)
    folder = resources.files("isozyme.core") / "sample"
    known = [f.name.removesuffix(_SAMPLE_SUFFIX) for f in folder.iterdir() if f.name.endswith(_SAMPLE_SUFFIX)]
    if name not in known:
        raise DataError(f"no such sample genome: data.fasta={source}. {did_you_mean(name, known)}")
    with resources.as_file(folder / f"{name}{_SAMPLE_SUFFIX}") as path:
        yield path, f"sample-{name}"


@dataclass(frozen=True)
class _Entry:
    """One source and its folder in the cache."""

    folder: Path
    path: Path
    source: str

    @property
    def _index(self) -> Path:
        return self.folder / "index.json"

    def load(self) -> Genome | None:
        """The cached genome, or none if there is no valid one."""
        index = _read_index(self._index)
        if index is None or not self._is_current(index):
            return None
        try:
            tokens = np.memmap(self.folder / index["tokens"], dtype=np.uint8, mode="r")
        except (OSError, ValueError):
            return None
        lengths = [(name, length) for name, length in index["contigs"]]
        if (
            tokens.size != sum(length for _, length in lengths)
            or _fingerprint(tokens) != index["fingerprint"]
        ):
            return None
        return Genome(self.source, index["sha256"], _contigs(lengths), tokens)

    def _is_current(self, index: dict[str, Any]) -> bool:
        """Whether the source is still the one that the index was made from.

        Size and time of change decide if the time is clearly older than the index; else the digest does.
        """
        state = _state(self.path)
        if state == (index["size"], index["mtime_ns"]) and index["built_ns"] - state[1] > _CLOCK_TICK_NS:
            return True
        return state[0] == index["size"] and _sha256(self.path) == index["sha256"]

    def build(self) -> Genome:
        """Tokenise the source, put tokens and index in place, and map the result."""
        before = _state(self.path)
        sha256 = _sha256(self.path)
        name = f"{sha256[:32]}.v{FORMAT_VERSION}.tokens"
        lengths: list[tuple[str, int]] = []
        with self._explained():
            self.folder.mkdir(parents=True, exist_ok=True)
            with _replacing(self.folder / name) as file:
                for record in read_fasta(self.path):
                    file.write(record.sequence.data)
                    lengths.append((record.name, record.sequence.size))
                if _state(self.path) != before:
                    raise DataError(
                        f"a FASTA file must not change while it is read: {self.path}. Start again."
                    )
            tokens = np.memmap(self.folder / name, dtype=np.uint8, mode="r")
            payload = {
                "size": before[0],
                "mtime_ns": before[1],
                "sha256": sha256,
                "built_ns": time.time_ns(),
                "tokens": name,
                "fingerprint": _fingerprint(tokens),
                "contigs": lengths,
            }
            with _replacing(self._index) as file:
                file.write(_seal(payload))
        return Genome(self.source, sha256, _contigs(lengths), tokens)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn a failure to write into the error that names the setting."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"the cache must be a writable folder: data.cache={self.folder.parent}; {reason}: "
                f"{error.filename or self.folder}. Set data.cache to a folder with room that you may write."
            ) from error


def _state(path: Path) -> tuple[int, int]:
    """Size and time of change of a source, in bytes and nanoseconds; says what is wrong if it has none."""
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(
            f"a FASTA file must be readable: data.fasta={path}; {error.strerror}. "
            f"Check the path, or use {SAMPLE_PREFIX}lambda for the genome that ships with the package."
        ) from error
    return found.st_size, found.st_mtime_ns


def _sha256(path: Path) -> str:
    """The digest of a file's bytes."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(
            f"a FASTA file must be readable: data.fasta={path}; {error.strerror}. Give the path of a file."
        ) from error


def _fingerprint(tokens: UInt8[np.ndarray, " N"]) -> int:
    """A checksum over evenly spaced blocks: all of a genome up to 4 MiB, 4 MiB of a larger one."""
    last = max(tokens.size - _PROBE_BYTES, 0)
    starts = sorted({*np.linspace(0, last, _PROBES, dtype=np.int64).tolist()})
    if tokens.size <= _PROBES * _PROBE_BYTES:
        return zlib.crc32(tokens.data)
    checksum = 0
    for start in starts:
        checksum = zlib.crc32(tokens[start : start + _PROBE_BYTES].data, checksum)
    return checksum


def _seal(payload: dict[str, Any]) -> bytes:
    """The index file: a line of JSON, preceded by the format's version and the digest of that line."""
    body = json.dumps(payload).encode()
    return b"%d %s\n%s" % (FORMAT_VERSION, hashlib.sha256(body).hexdigest().encode(), body)


def _read_index(path: Path) -> dict[str, Any] | None:
    """The index, or none where there is none of this version that is intact."""
    try:
        head, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    sealed = b"%d %s" % (FORMAT_VERSION, hashlib.sha256(body).hexdigest().encode())
    return json.loads(body) if head == sealed else None


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that appears at `path` whole, or, after an exception, not at all."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
