"""Fetching numbers from the device while it goes on working.

`tensor.tolist()` stops the host until the device has done all that was queued before, and then the device has
nothing to do until the host queues more. A copy that is started early and awaited late leaves it work.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a small tensor on its way to the host; on a CPU the tensor itself.

    What is queued between construction and `wait` runs on the device while the host waits.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor.detach()
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """The numbers, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
