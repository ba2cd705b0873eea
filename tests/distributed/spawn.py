"""Real processes for tests: `spawn(fn, world_size)` runs `fn(world)` on each and returns the results.

`fn` must be importable (a function of a test module) and its result picklable. The processes meet at a file
in a new folder, so that no port is needed.
"""

from __future__ import annotations

import io
import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from isozyme.parallel.distributed import TorchWorld, torch_world

TIMEOUT = 60.0


class ProcessFailed(AssertionError):
    """A process raised, died or did not end in time; the message has every process's traceback."""


def spawn(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = TIMEOUT, device: str = "cpu"
) -> list[Any]:
    """Run `fn(world, *args)` in `world_size` processes, over gloo or (one GPU each) NCCL.

    Args:
        fn: one rank's program, a module-level function.
        world_size: the number of processes.
        args: passed on to `fn`.
        timeout: seconds for everything.
        device: `cpu` or `cuda`.

    Returns:
        The ranks' results in rank order.

    Raises:
        ProcessFailed: with the traceback of every process that failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        meeting = f"file://{Path(folder) / 'meeting'}"
        processes = [
            context.Process(target=_run, args=(fn, rank, world_size, meeting, timeout, device, answers, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            found = _collect(processes, answers, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.join(0.1)
                if process.is_alive():
                    process.kill()
                    process.join()
    errors = [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(found.items()) if not ok]
    if errors:
        raise ProcessFailed("\n".join(errors))
    return [torch.load(io.BytesIO(found[rank][1]), weights_only=False) for rank in range(world_size)]


def _collect(processes: list[Any], answers: Any, deadline: float) -> dict[int, tuple[bool, Any]]:
    found: dict[int, tuple[bool, Any]] = {}
    while len(found) < len(processes):
        try:
            rank, ok, value = answers.get(timeout=0.2)
            found[rank] = (ok, value)
        except queue.Empty:
            late = time.monotonic() > deadline
            for rank, process in enumerate(processes):
                if rank not in found and (late or process.exitcode not in (None, 0)):
                    why = "did not end in time" if late else f"died with exit code {process.exitcode}"
                    found[rank] = (False, why)
    return found


def _packed(value: Any) -> bytes:
    """Bytes rather than tensors, which a queue would share with a process that is about to end."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _run(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    meeting: str,
    timeout: float,
    device: str,
    answers: Any,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        with torch_world(
            rank=rank,
            world_size=world_size,
            init_method=meeting,
            device=f"cuda:{rank}" if device == "cuda" else device,
            timeout=timedelta(seconds=timeout / 2),
        ) as world:
            result = fn(world, *args)
        answers.put((rank, True, _packed(result)))
    except BaseException:
        answers.put((rank, False, traceback.format_exc()))


__all__ = ["ProcessFailed", "TorchWorld", "spawn"]
