"""A batch keeps what the host knows of its documents when it moves to a device."""

from __future__ import annotations

import torch

from tests.models.common import random_batch

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2], [3, 3, 3, 3, 3, 3, 3, 3]])
LENGTHS = ((3, 1, 4), (8,))


def test_a_packed_batch_that_leaves_the_host_notes_the_lengths_of_its_documents() -> None:
    packed = random_batch(2, 8, documents=DOCUMENTS, packed=True)
    moved = packed.to("meta")
    assert moved.lengths == LENGTHS
    assert moved.to("meta").lengths == LENGTHS  # nothing is read again
    assert random_batch(2, 8).to("meta").lengths is None
