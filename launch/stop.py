"""Stopping on request: a signal is remembered, and all ranks agree at the next step boundary."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from isozyme.parallel.communicator import Communicator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What asks a rank to finish its step, save a checkpoint and exit. A second SIGINT ends it at once."""
_PROMISE = b"isozyme: finishing the step, then saving (Ctrl-C again stops at once)\n"


class StopRequest:
    """Whether any rank was asked to stop.

    Args:
        world: all ranks; they agree on the host, without waiting for a device.
    """

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self.received: int | None = None
        """The signal that this rank received."""

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler: remember, and go on.

        Raises:
            KeyboardInterrupt: at the second SIGINT.
        """
        if number == signal.SIGINT:
            if self.received == number:
                raise KeyboardInterrupt
            os.write(2, _PROMISE)  # not print, which must not be entered a second time
        self.received = number

    def agreed(self) -> int | None:
        """The signal that some rank has received, or None; the same on all ranks, which call it together."""
        mine = torch.tensor([self.received or 0], dtype=torch.int64)
        return int(self._world.all_reduce(mine, op="max")) or None


@contextmanager
def stop_on_signals(world: Communicator) -> Iterator[StopRequest]:
    """Remember the `SIGNALS` while the context lasts (main thread only, as Python requires)."""
    request = StopRequest(world)
    before = {number: signal.signal(number, request) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
