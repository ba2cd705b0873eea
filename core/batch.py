"""The batch that travels from the data to the model, and the two masks that it carries."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of sequence windows, as seen by one rank.

    Two masks that are never confused: `label_valid` says where the loss counts (the label is A, C, G or T
    and belongs to the same document), `token_valid` says what is not padding and so is routed and counted.
    """

    tokens: Int[Tensor, "B S"]
    labels: Int[Tensor, "B S"]
    """The next token at each position; any value where `label_valid` is false."""
    label_valid: Bool[Tensor, "B S"]
    token_valid: Bool[Tensor, "B S"]
    positions: Int[Tensor, "B S"]
    """Index within the document, for rotary embeddings; starts again at each packed boundary."""
    documents: Int[Tensor, "B S"]
    """Number of the packed document within its window; tokens attend within one document only."""
    packed: bool = True
    """Whether a window may hold several documents, as the data knows without asking the device. False, which
    promises that `documents` is constant within each window, lets attention use its faster causal kernels."""
    lengths: tuple[tuple[int, ...], ...] | None = None
    """Lengths of the documents of each whole window, where the host knows them without asking the device. Who
    makes a batch with other windows or documents from this one sets None."""

    @property
    def num_windows(self) -> int:
        """B, the number of sequence windows."""
        return self.tokens.shape[0]

    @property
    def window_length(self) -> int:
        """S, the number of tokens of a window, padding included."""
        return self.tokens.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """All its tensors, `[B, S]` each, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device. Leaving the host, a packed one notes the `lengths`.

        Nothing waits: a copy to a CUDA device starts from pinned memory.
        """
        pinned = torch.device(device).type == "cuda" and self.tokens.device.type == "cpu"
        moved: dict[str, Any] = {
            name: (value.contiguous().pin_memory() if pinned else value).to(device, non_blocking=True)
            for name, value in self.tensors().items()
        }
        if self.packed and self.lengths is None and self.documents.device.type == "cpu":
            moved["lengths"] = document_lengths(self.documents)
        return replace(self, **moved)


def document_lengths(documents: Int[Tensor, "B S"]) -> tuple[tuple[int, ...], ...]:
    """The lengths of the documents of each window, in order; a document is a run of equal numbers.

    Reads the device once.

    >>> document_lengths(torch.tensor([[0, 0, 1, 2], [5, 5, 5, 5]]))
    ((2, 1, 1), (4,))
    """
    length = documents.shape[1]
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts: list[list[int]] = [[] for _ in range(documents.shape[0])]
    for window, place in begins.nonzero().tolist():
        starts[window].append(place)
    return tuple(tuple(end - begin for begin, end in pairwise([*found, length])) for found in starts)


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Counts over a whole optimiser step: all micro-batches of all ranks, known before the first forward.

    Losses are sums and are divided by the first three once, so that neither the layout nor the split into
    micro-batches changes a gradient.
    """

    valid_labels: int
    windows: int
    """Windows with at least one real token: the divisor of the balance loss."""
    real_tokens: int
    """Tokens that are not padding: the divisor of the z-loss."""
    packed_windows: int = 0
    """Windows of several documents, whose lengths the host must know: a step with any is not replayed."""
