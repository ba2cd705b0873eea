"""How a step is measured: interleaved times, bytes kept and needed, kernels launched, waits of the host."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from isozyme.core import transformer_engine
from isozyme.core.errors import IsozymeError
from isozyme.launch.bench_problem import Built

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of the CUDA runtime in which the host waits for the device."""
_MARK = "isozyme benchmark step"
_WARM = 2
"""Steps after each change of contender that are not timed."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of one contender over all rounds, in milliseconds."""

    median: float
    low: float
    """The smallest median of a round; the distance to `high` is what a repetition of the run may change."""
    high: float
    samples: int


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one step keeps and needs, in bytes; None where the device cannot say."""

    saved_bytes: int | None
    """Distinct storages that autograd saves in forward, weights excluded."""
    held_bytes: int | None
    """What forward leaves allocated, its result excluded (includes what bypasses autograd)."""
    peak_bytes: int | None
    """The peak of forward and backward above weights and inputs: results and gradients are in it."""


def synchronize(device: torch.device) -> None:
    """Wait for the device, if it runs by itself."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Give memory that nobody uses back to the device, if it has some of its own."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def quick_collections() -> Iterator[None]:
    """Within the block, collecting garbage looks only at what the block made.

    A benchmark collects after every contender, so that none finds another's memory taken. Going through all
    that is imported takes a third of a second each time, in sum longer than what is measured.
    """
    transformer_engine.why_not()  # imports it, if it is there
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def reason_of(error: BaseException) -> str:
    """An error as a row of a table tells it."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = " ".join(str(error).split())
    shown = text if isinstance(error, IsozymeError) else f"{type(error).__name__}: {text}"
    return shown if len(shown) <= 400 else f"{shown[:400]} …"


def time_call(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Milliseconds of each of `repeats` calls: CUDA events on a GPU, else the clock."""
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - began))
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize(device)
    return [float(a.elapsed_time(b)) for a, b in pairwise(marks)]


def time_interleaved(
    steps: Mapping[int, Callable[[], object]], device: torch.device, *, rounds: int, repeats: int
) -> dict[int, Timing | str]:
    """Time several contenders in turns, so that a drift of the clocks meets them all.

    Every other round goes backwards (A B C, C B A, …). A contender that raises is out.

    Args:
        steps: forward and backward of each, by number.
        device: where they run.
        rounds: turns of each contender.
        repeats: timed calls in one turn, after two that are not.

    Returns:
        Times, or the reason why there are none.
    """
    found: dict[int, list[list[float]]] = {number: [] for number in steps}
    failed: dict[int, str] = {}
    for turn in range(rounds):
        order = list(steps) if turn % 2 == 0 else list(steps)[::-1]
        for number in order:
            if number in failed:
                continue
            try:
                time_call(steps[number], device, _WARM)
                found[number].append(time_call(steps[number], device, repeats))
            except Exception as error:
                failed[number] = reason_of(error)
    return {
        number: failed[number] if number in failed else _timing(samples) for number, samples in found.items()
    }


def _timing(samples: Sequence[Sequence[float]]) -> Timing:
    medians = [statistics.median(each) for each in samples]
    every = [value for each in samples for value in each]
    return Timing(median=statistics.median(every), low=min(medians), high=max(medians), samples=len(every))


def footprint(built: Built, upstream: Tensor, constants: Sequence[Tensor], device: torch.device) -> Footprint:
    """What one step keeps and needs; runs it a few times.

    Args:
        built: the contender, warmed up.
        upstream: gradient of its result.
        constants: weights, which are there anyway and are not counted as kept.
        device: where it runs.
    """
    saved = _saved_bytes(built, upstream, constants)
    held = peak = None
    if device.type == "cuda":
        synchronize(device)
        gc.collect()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        out = built.forward()
        held = torch.cuda.memory_allocated(device) - before - out.untyped_storage().nbytes()
        grads = built.backward(out, upstream)
        peak = torch.cuda.max_memory_allocated(device) - before
        del out, grads
    return Footprint(saved_bytes=saved, held_bytes=held, peak_bytes=peak)


def _saved_bytes(built: Built, upstream: Tensor, constants: Sequence[Tensor]) -> int | None:
    """None if something saves what has no storage of its own (a tensor subclass)."""
    known = {each.untyped_storage()._cdata for each in (*constants, *built.weights)}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known and not isinstance(tensor, nn.Parameter):
            storages[storage._cdata] = storage.nbytes()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = built.forward()
    except (RuntimeError, TypeError):
        return None
    built.backward(out, upstream)  # frees the graph, which the hooks tie to itself
    return sum(storages.values())


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What one step asks of the device, as the profiler sees it; None where there is nothing to see."""

    launches: int | None = None
    """Kernels, without copies and fills by the copy engine."""
    host_syncs: int | None = None
    """Times that the host waits for the device."""


def count_calls(step: Callable[[], object], device: torch.device) -> Calls:
    """Profile one step. Call it after timing: a profiler that has run can slow down later launches."""
    if device.type != "cuda":
        return Calls()
    from torch.profiler import ProfilerActivity, profile, record_function

    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            with record_function(_MARK):
                step()
            torch.cuda.synchronize(device)
        events = list(profiler.events() or [])
    except (RuntimeError, AssertionError):
        return Calls()
    kernels = [
        event
        for event in events
        if _is_device(event)
        and not event.name.startswith(("Memcpy", "Memset", _MARK))
        and not getattr(event, "is_user_annotation", False)
    ]
    spans = [e.time_range for e in events if e.name == _MARK and not _is_device(e)]
    if not kernels or not spans:
        return Calls()
    waits = [
        event
        for event in events
        if event.name in _WAITS and spans[0].start <= event.time_range.start <= spans[0].end
    ]
    return Calls(launches=len(kernels), host_syncs=len(waits))


def _is_device(event: Any) -> bool:
    return str(event.device_type).endswith("CUDA")


def poison(device: torch.device, like: torch.dtype, num_bytes: int) -> None:
    """Fill memory with NaN and free it, so that what reads unwritten memory is found out."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # else blocks of earlier steps, which hold right values, are taken first
        count = max(1, num_bytes // like.itemsize)
        free_bytes = torch.cuda.mem_get_info(device)[0]
        torch.full((min(count, free_bytes // 2 // like.itemsize),), float("nan"), dtype=like, device=device)
