"""What autograd keeps for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def kept_bytes(compute: Callable[[], object], weights: Sequence[Tensor]) -> int:
    """Bytes of the storages that autograd saves while `compute` runs, those of `weights` left out."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    known = {weight.data_ptr() for weight in weights}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for pointer, size in storages.items() if pointer not in known)
