"""The run's numbers as JSON lines, one object a logged step, and what is derived from a step's counts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from isozyme.core.errors import CheckpointError
from isozyme.launch.step import StepResult


class MetricsLog:
    """Appends records to a `metrics.jsonl`.

    Args:
        path: the file; None for a log that writes nothing (ranks other than 0).
        start_step: the step that the run begins with. Records of later steps, left by a run that went on
            after the checkpoint that is resumed, are taken out, so that no step appears twice.

    Raises:
        CheckpointError: if the file cannot be read or written; `write` likewise.
    """

    def __init__(self, path: Path | None, start_step: int = 0) -> None:
        self.path = path
        if path is not None and path.exists():
            with self._explained(path):
                kept = [line for line in path.read_text().splitlines() if _step(line) < start_step]
                partial = path.with_suffix(".part")
                partial.write_text("".join(f"{line}\n" for line in kept))
                os.replace(partial, path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record. Numbers that JSON lacks (NaN, infinity) become null."""
        if self.path is None:
            return
        with self._explained(self.path), self.path.open("a") as file:
            file.write(json.dumps(_clean(record)) + "\n")

    @staticmethod
    @contextmanager
    def _explained(path: Path) -> Iterator[None]:
        """Turn a failure to read or write the file into the error that says what to do."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"the metrics must be writable: {path}; {error.strerror or error}. "
                "Free some space, or set out=PATH to a folder that you may write."
            ) from error


def step_record(
    step: int, result: StepResult, *, lr: float, seconds: float, ranks: int, memory_bytes: int
) -> dict[str, Any]:
    """One training step as a record.

    Args:
        step: number of the step, from 0.
        result: what it did.
        lr: its learning rate.
        seconds: wall time of the step on rank 0.
        ranks: the number of ranks.
        memory_bytes: peak memory of rank 0.
    """
    return {
        "kind": "train",
        "step": step,
        "loss": result.loss,
        "bits_per_base": result.bits_per_base,
        "aux_loss": result.aux_loss,
        "z_loss": result.z_loss,
        "grad_norm": result.grad_norm,
        "clip": result.clip,
        "lr": lr,
        "step_s": seconds,
        "tokens_per_s": result.totals.real_tokens / seconds,
        "tokens_per_s_per_rank": result.totals.real_tokens / seconds / ranks,
        "valid_labels": result.totals.valid_labels,
        "expert_load": shares(result.routed),
        "dropped": int(result.dropped.sum()),
        "skipped": result.skipped,
        "memory_bytes": memory_bytes,
    }


def shares(routed: Int[Tensor, "L E"]) -> list[list[float]]:
    """The share of each layer's slots that each expert got; a layer's shares sum to one."""
    total = routed.sum(dim=1, keepdim=True).clamp(min=1)
    return [[round(share, 6) for share in layer] for layer in (routed.double() / total).tolist()]


def peak_memory_bytes(device: torch.device) -> int:
    """The peak of allocated device memory, or of this process's resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _step(line: str) -> int:
    """The step of a record; a torn last line belongs to no step."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**62


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
