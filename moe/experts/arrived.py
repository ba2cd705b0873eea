"""What expert backends that start from arrived rows have in common."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.moe.host_copy import HostCopy
from isozyme.moe.types import Arrival


def host_counts(arrival: Arrival, counts: Int[Tensor, "E_local"]) -> tuple[int, ...]:
    """Rows of each expert, on the host: what the dispatcher knew, or `counts` from the row map (one wait)."""
    if arrival.host_counts is not None:
        return arrival.host_counts
    return tuple(HostCopy(counts).wait().tolist())


def no_rows(
    arrival: Arrival, gate_up: Float[Tensor, "E_local F2 H"], down: Float[Tensor, "E_local H F"]
) -> Float[Tensor, "N H"]:
    """The result where no expert has a row: zeros, with every input in the graph and a zero gradient.

    No kernel is called: grouped GEMMs over nothing but empty groups are not tested upstream.
    """
    touched = arrival.rows[:0].sum() + gate_up[:, :0].sum() + down[:, :0].sum() + arrival.probs[:0].sum()
    return torch.zeros_like(arrival.rows) + touched.to(arrival.rows.dtype)
