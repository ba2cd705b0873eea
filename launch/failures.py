"""How a run ends when it fails: one exit code for each kind of error, one readable block, one file a rank.

| exit code | meaning |
|---|---|
| 0 | finished, or stopped on request after saving a checkpoint |
| 1 | any other error (with its traceback) |
| 2 | configuration: nothing was started |
| 3 | data: an input file is not what it must be |
| 4 | backend: something asked for by name cannot run here |
| 5 | communication: ranks disagree, or a peer is gone |
| 6 | checkpoint: missing, incomplete, damaged, or of another model |
| 7 | non-finite loss or gradient |
| 128 + n | stopped by signal n (130: Ctrl-C) |
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from isozyme.core.errors import (
    BackendError,
    CheckpointError,
    CommunicationError,
    ConfigError,
    DataError,
    IsozymeError,
    NonFiniteError,
)
from isozyme.launch.environment import ERROR_FOLDER, TRACEBACK

_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (ConfigError, 2),
    (DataError, 3),
    (BackendError, 4),
    (CommunicationError, 5),
    (CheckpointError, 6),
    (NonFiniteError, 7),
)


@dataclass(frozen=True)
class Failure:
    """What one rank left behind when it failed."""

    rank: int
    kind: str
    message: str
    exit_code: int
    at: float
    """Seconds since the epoch."""
    trace: str = ""
    """The traceback, of errors that isozyme did not raise on purpose."""
    consequence: bool = False
    """Whether the error only says that another rank is gone."""


def exit_code(error: BaseException) -> int:
    """The exit code of a kind of error."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return next((code for kind, code in _CODES if isinstance(error, kind)), 1)


def failure_of(error: BaseException, rank: int, env: Mapping[str, str]) -> Failure:
    """Describe an error of one rank."""
    intended = isinstance(error, IsozymeError) and env.get(TRACEBACK) != "1"
    trace = "" if intended else "".join(traceback.format_exception(error))
    peer_gone = isinstance(error, CommunicationError) or _is_lost_connection(error)
    code = 5 if peer_gone else exit_code(error)
    return Failure(rank, type(error).__name__, str(error), code, time.time(), trace, peer_gone)


def _is_lost_connection(error: BaseException) -> bool:
    """Whether torch.distributed reports a lost peer (gloo: a RuntimeError about the connection)."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error) and "onnection" in str(error)


def record(failure: Failure, error: BaseException, env: Mapping[str, str]) -> None:
    """Leave the failure where a launcher looks for it: our own folder, and torchrun's error file."""
    folder = env.get(ERROR_FOLDER)
    if folder:
        partial = Path(folder) / f".rank{failure.rank}.part"
        partial.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        partial.rename(Path(folder) / f"rank{failure.rank}.json")
    elif env.get("TORCHELASTIC_ERROR_FILE") and isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

        ErrorHandler().record_exception(error)


def read_all(folder: Path) -> list[Failure]:
    """The failures that ranks left in a folder, in the order in which they happened."""
    found = [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank*.json")]
    return sorted(found, key=lambda failure: failure.at)


def root_cause(failures: Sequence[Failure]) -> Failure | None:
    """The first failure that is not merely the loss of another rank; else the first of all."""
    causes = [failure for failure in failures if not failure.consequence]
    return next(iter(causes or failures), None)


def block(failure: Failure, world_size: int = 1, where: str = "") -> str:
    """The readable text of one failure, for stderr."""
    who = f"rank {failure.rank} of {world_size}{where}: " if world_size > 1 else ""
    text = f"isozyme: {who}{failure.kind}: {failure.message}"
    return f"{failure.trace.rstrip()}\n{text}" if failure.trace else text
