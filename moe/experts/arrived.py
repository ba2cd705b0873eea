"""What expert backends that start from arrived rows have in common."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.moe.types import Arrival


def weights_by_row(
    probs: Float[Tensor, "N K"], slot_row: Int[Tensor, "N K"], num_rows: int
) -> Float[Tensor, "R"]:
    """The combine weight of each row of the expert-major buffer, with gradient; zero for padding."""
    place = torch.where(slot_row < 0, num_rows, slot_row).flatten().long()
    return probs.new_zeros(num_rows + 1).scatter(0, place, probs.flatten())[:-1]


def weights_by_slot(by_row: Float[Tensor, "R"], slot_row: Int[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """The inverse: the value of each slot's row; zero for a slot without one."""
    picked = by_row[slot_row.clamp(min=0).long()]
    return torch.where(slot_row < 0, torch.zeros_like(picked), picked)


def no_rows(
    arrival: Arrival, gate_up: Float[Tensor, "E_local F2 H"], down: Float[Tensor, "E_local H F"]
) -> Float[Tensor, "N H"]:
    """The result where no expert has a row: zeros, with every input in the graph and a zero gradient.

    No kernel is called: grouped GEMMs over nothing but empty groups are not tested upstream.
    """
    touched = arrival.rows[:0].sum() + gate_up[:, :0].sum() + down[:, :0].sum() + arrival.probs[:0].sum()
    return torch.zeros_like(arrival.rows) + touched.to(arrival.rows.dtype)
