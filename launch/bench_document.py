"""The JSON of a benchmark: what was run, on which machine, with which versions, and the rows."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import isozyme
from isozyme.core.errors import DataError

SCHEMA = "isozyme.bench/1"
KINDS = ("layer", "train", "ablation", "layouts")
_PACKAGES = ("transformer_engine", "triton", "transformers", "liger_kernel", "nvidia_cudnn_frontend")


def new_document(kind: str, argv: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A document without rows.

    Args:
        kind: one of `KINDS`.
        argv: arguments after `isozyme bench`, for the command line.
        settings: what the measurement was asked to be.
    """
    return {
        "schema": SCHEMA,
        "kind": kind,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["isozyme", "bench", *argv]),
        "hardware": hardware(),
        "versions": versions(),
        "settings": dict(settings),
        "ceilings": {},
        "cases": [],
        "rows": [],
    }


def hardware() -> dict[str, Any]:
    """The device and its host."""
    found: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "cpu_cores": os.cpu_count()}
    if not torch.cuda.is_available():
        return found | {"gpu": None, "gpus": 0, "driver": None}
    first = torch.cuda.get_device_properties(0)
    return found | {
        "gpu": first.name,
        "gpus": torch.cuda.device_count(),
        "gpu_memory_bytes": first.total_memory,
        "capability": f"{first.major}.{first.minor}",
        "driver": _driver(),
    }


def versions() -> dict[str, str | None]:
    """The versions of everything that decides about speed; None for what is not installed."""
    found: dict[str, str | None] = {
        "isozyme": isozyme.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def write_document(document: Mapping[str, Any], path: Path) -> None:
    """Write it whole or not at all; numbers that JSON lacks become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(_clean(document), indent=1) + "\n")
    os.replace(partial, path)


def read_document(path: Path) -> dict[str, Any]:
    """Read a document back.

    Raises:
        DataError: if the file is not one.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"a benchmark's JSON must be readable: {path}: {error}.") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or found.get("kind") not in KINDS:
        raise DataError(f"a benchmark's JSON has schema={SCHEMA} and a known kind: {path} has not.")
    return found


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout else None


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
