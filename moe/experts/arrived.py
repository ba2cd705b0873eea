"""What expert backends that start from arrived rows have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.moe.host_copy import HostCopy
from isozyme.moe.types import Arrival


def host_counts_start(arrival: Arrival, counts: Int[Tensor, "E_local"]) -> Callable[[], tuple[int, ...]]:
    """Start to bring the rows of each expert to the host; the function that is returned waits for them.

    They are what the dispatcher knew, without a wait, or else `counts` from the row map. What is queued
    between the two gives the device work while the host waits and then queues more.
    """
    known = arrival.host_counts
    if known is not None:
        return lambda: known
    copy = HostCopy(counts)
    return lambda: tuple(copy.wait().tolist())


def host_counts(arrival: Arrival, counts: Int[Tensor, "E_local"]) -> tuple[int, ...]:
    """Rows of each expert, on the host: `host_counts_start`, and at once the wait."""
    return host_counts_start(arrival, counts)()


def no_rows(
    arrival: Arrival, gate_up: Float[Tensor, "E_local F2 H"], down: Float[Tensor, "E_local H F"]
) -> Float[Tensor, "N H"]:
    """The result where no expert has a row: zeros, with every input in the graph and a zero gradient.

    No kernel is called: grouped GEMMs over nothing but empty groups are not tested upstream.
    """
    touched = arrival.rows[:0].sum() + gate_up[:, :0].sum() + down[:, :0].sum() + arrival.probs[:0].sum()
    return torch.zeros_like(arrival.rows) + touched.to(arrival.rows.dtype)
