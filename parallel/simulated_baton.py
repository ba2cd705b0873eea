"""The baton: N threads of which one runs at a time, each in the surroundings of its own rank.

A rank keeps the baton until it blocks or offers it; who comes next is chosen by a function of the ranks that
may run, so a run is replayed by repeating the choices. Random streams and the default dtype are process-wide
in Python, NumPy and torch: they change hands with the baton. Knows nothing of communication.
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

Schedule = Callable[[Sequence[int]], int]
"""Chooses who runs next from the ranks that may run (ascending)."""


class Stopped(BaseException):
    """Unwinds a rank of a world that has failed elsewhere."""


class RankThread(threading.Thread):
    """The thread of one simulated rank."""


class Surroundings:
    """The process-wide state of one rank: its random streams (Python, NumPy, torch) and its default dtype."""

    def __init__(self, seed: int | None = None) -> None:
        """The present state, or fresh streams from `seed` with the present default dtype."""
        self._numpy: np.random.BitGenerator
        self.save()
        if seed is not None:
            self._numpy = np.random.MT19937(seed)
            self._python = random.Random(seed).getstate()
            self._torch = torch.Generator().manual_seed(seed).get_state()
            self._cuda = [torch.Generator(g.device).manual_seed(seed).get_state() for g in _cuda_generators()]

    def save(self) -> None:
        """Take over the present state of the process."""
        self._python = random.getstate()
        self._numpy = mtrand.get_bit_generator()
        self._torch = torch.default_generator.get_state()
        self._cuda = [generator.get_state() for generator in _cuda_generators()]
        self._dtype = torch.get_default_dtype()

    def load(self) -> None:
        """Make this the state of the process."""
        mtrand.set_bit_generator(self._numpy)
        torch.default_generator.set_state(self._torch)
        for generator, state in zip(_cuda_generators(), self._cuda, strict=False):
            generator.set_state(state)
        torch.set_default_dtype(self._dtype)
        random.setstate(self._python)  # last: annotation checkers draw from this stream


class Baton:
    """Runs one function per rank, one rank at a time.

    Args:
        size: the number of ranks.
        schedule: chooses the next rank among those that may run.
        stuck: makes the error for the case that no rank may run.
        seed: the random streams of rank r are derived from (seed, r) and from nothing else.
    """

    def __init__(self, size: int, schedule: Schedule, stuck: Callable[[], Exception], seed: int) -> None:
        self.failure: BaseException | None = None
        self._schedule, self._stuck, self._seed = schedule, stuck, seed
        self._turn = [threading.Lock() for _ in range(size)]
        self._end = threading.Lock()
        for lock in (*self._turn, self._end):
            lock.acquire()
        self._ready = set(range(size))
        self._held: set[int] = set()
        self._unfinished = set(range(size))
        self._surroundings: list[Surroundings] = []

    def run(self, body: Callable[[int], None]) -> None:
        """Run `body(rank)` for every rank to its end, then raise the first failure if there is one."""
        before, size = Surroundings(), len(self._turn)
        seeds = [random.Random(f"{self._seed}/{rank}").getrandbits(63) for rank in range(size)]
        self._surroundings = [Surroundings(seed) for seed in seeds]
        enter = _thread_state()
        first = self._next()
        threads = [
            RankThread(
                target=contextvars.copy_context().run,
                args=(self._main, rank, body, enter),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank in range(size)
        ]
        for thread in threads:
            thread.start()
        self._turn[first].release()
        try:
            self._end.acquire()
        except (
            BaseException
        ) as interruption:  # of this thread, as by Ctrl-C: the ranks stop at their next call
            self.failure = self.failure or interruption
            self._end.acquire()
        for thread in threads:
            thread.join()
        before.load()
        if self.failure is not None:
            raise self.failure

    def check(self) -> None:
        """Stop the running rank if the world has failed."""
        if self.failure is not None:
            raise Stopped

    def fail(self, error: BaseException, rank: int) -> BaseException:
        """Record what ends the run (the first one counts) and return it, to be raised by the running rank."""
        if self.failure is None and not isinstance(error, Stopped):
            error.add_note(f"(raised on simulated rank {rank} of {len(self._turn)})")
            self.failure = error
        return error

    def offer(self, rank: int) -> None:
        """Let the schedule choose who goes on; the running rank may be chosen again."""
        self.check()
        chosen = self._next()
        if chosen != rank:
            self._pass(rank, chosen)

    def hold(self, rank: int) -> None:
        """The running rank goes on only when no other one may run."""
        self._held.add(rank)
        self.offer(rank)
        self._held.discard(rank)

    def block(self, rank: int) -> None:
        """Give the baton away until another rank calls `wake(rank)`."""
        self.check()
        self._ready.discard(rank)
        if not self._ready:
            raise self.fail(self._stuck(), rank)
        self._pass(rank, self._next())

    def wake(self, rank: int) -> None:
        """A blocked rank may run again."""
        self._ready.add(rank)

    def _pass(self, rank: int, chosen: int) -> None:
        self._surroundings[rank].save()
        self._turn[chosen].release()
        self._turn[rank].acquire()
        self._surroundings[rank].load()
        self.check()

    def _next(self) -> int:
        if self.failure is not None:
            return min(self._unfinished)
        ready = sorted(self._ready - self._held) or sorted(self._ready)
        chosen = self._schedule(ready)
        if chosen not in ready:
            raise ValueError(
                f"the schedule must choose one of the ranks that may run: {chosen} not in {ready}."
            )
        return chosen

    def _main(self, rank: int, body: Callable[[int], None], enter: Callable[[], Any]) -> None:
        self._turn[rank].acquire()
        try:
            if self.failure is None:
                self._surroundings[rank].load()
                with enter():
                    body(rank)
        except BaseException as error:  # whatever ends a rank ends the run
            self.fail(error, rank)
        self._leave(rank)

    def _leave(self, rank: int) -> None:
        self._ready.discard(rank)
        self._unfinished.discard(rank)
        if not self._unfinished:
            self._end.release()
            return
        try:
            if not self._ready and self.failure is None:
                raise self._stuck()
            chosen = self._next()
        except Exception as error:
            self.fail(error, rank)
            chosen = self._next()
        self._turn[chosen].release()


def simulating() -> bool:
    """Whether the running thread is a simulated rank (whatever keeps process-wide state must refuse then)."""
    return isinstance(threading.current_thread(), RankThread)


def _thread_state() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A context that re-enters, in another thread, the present thread's state of torch."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    device = torch.get_default_device()
    cached = torch.is_autocast_cache_enabled()
    autocast = {d: torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            # The collectives of a backward pass must run on the thread of the rank, on a GPU as well. This
            # comes last, as entering (no) inference mode allows other threads again.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch.set_grad_enabled(grad))
            if device.type != "cpu":
                stack.enter_context(device)
            for kind, dtype in autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cached))
            yield

    return entered


def _cuda_generators() -> Sequence[torch.Generator]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()
