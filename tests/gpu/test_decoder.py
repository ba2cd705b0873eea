"""The dense decoder on a CUDA device: near fp64 on the CPU, no host synchronisation, no S x S scores."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from isozyme.core.batch import Batch
from isozyme.models.decoder import build_model
from isozyme.models.types import Chunk
from tests.models.common import random_batch, single_groups, tiny, whole

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def _packed() -> Batch:
    documents = torch.zeros(2, 64, dtype=torch.long)
    documents[0, 20:], documents[1, 33:] = 1, 1
    return random_batch(2, 64, documents=documents, packed=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)]
)
def test_loss_on_a_gpu_is_near_fp64_on_the_cpu(packed: bool, dtype: torch.dtype, tolerance: float) -> None:
    config = tiny(pattern="D", init_std=0.1)
    batch = _packed() if packed else random_batch(2, 64)
    exact = whole(config)
    with torch.no_grad():
        for tensor in exact.parameters():
            tensor.copy_(tensor.to(dtype))
    model = build_model(config, single_groups(), Chunk.whole(3), CUDA, dtype)
    expected, found = exact(batch).loss_sum, model(batch.to(CUDA)).loss_sum
    assert found.item() == pytest.approx(expected.item(), rel=tolerance)


@pytest.mark.parametrize("packed", [False, True])
def test_forward_and_backward_never_wait_for_the_device(packed: bool) -> None:
    batch = (_packed() if packed else random_batch(2, 64)).to(CUDA)
    model = build_model(tiny(pattern="D"), single_groups(), Chunk.whole(3), CUDA, torch.bfloat16)
    model(batch).loss_sum.backward()  # libraries initialise
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(batch).loss_sum.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_batch_moves_with_its_flag() -> None:
    batch = dataclasses.replace(random_batch(), packed=True).to(CUDA)
    assert batch.packed
    assert batch.lengths == ((16,), (16,))
    assert batch.tokens.device.type == "cuda"
