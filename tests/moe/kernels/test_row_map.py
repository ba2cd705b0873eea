"""The counting sort against a loop that appends each slot to its expert's list."""

import pytest
import torch
from torch import Tensor

from isozyme.moe.kernels.row_map import row_map_op, row_map_twin
from isozyme.moe.kernels.triton_row_map import launch_row_map

SHAPES = [(50, 2, 4), (33, 3, 5), (0, 2, 4), (200, 8, 128), (7, 1, 1), (90, 2, 200), (9, 4, 4)]


def draw(tokens: int, topk: int, experts: int, keep: float, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Distinct experts for each token, skewed to the low ids, and a share of kept slots."""
    skew = torch.rand(tokens, experts) * torch.linspace(1.0, 0.3, experts)
    ids = skew.topk(topk, dim=1).indices
    return ids.to(device), (torch.rand(tokens, topk) < keep).to(device)


def append_by_hand(
    ids: Tensor, kept: Tensor, experts: int, align: int
) -> tuple[list[list[int]], list[int], list[int]]:
    lists: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for token in range(ids.shape[0]):
        for slot in range(ids.shape[1]):
            if kept[token, slot]:
                lists[int(ids[token, slot])].append((token, slot))
    slot_row, ends, start = [[-1] * ids.shape[1] for _ in range(ids.shape[0])], [], 0
    for members in lists:
        for offset, (token, slot) in enumerate(members):
            slot_row[token][slot] = start + offset
        start += -(-len(members) // align) * align
        ends.append(start)
    return slot_row, [len(members) for members in lists], ends


@pytest.mark.parametrize("align", [1, 16, 32])
@pytest.mark.parametrize("keep", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_twin_appends_in_token_then_slot_order(shape: tuple[int, int, int], keep: float, align: int) -> None:
    ids, kept = draw(*shape, keep)
    slot_row, counts, ends = row_map_twin(ids, kept, shape[2], align)
    expected = append_by_hand(ids, kept, shape[2], align)
    assert (slot_row.tolist(), counts.tolist(), ends.tolist()) == expected


@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("keep", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_twin(shape: tuple[int, int, int], keep: float, align: int, device: str) -> None:
    ids, kept = draw(*shape, keep, device)
    for got, want in zip(
        launch_row_map(ids, kept, shape[2], align), row_map_twin(ids, kept, shape[2], align), strict=True
    ):
        assert got.dtype == torch.int32
        assert torch.equal(got, want)


def test_operator_has_a_fake_and_no_hidden_mutation(device: str) -> None:
    ids, kept = draw(12, 2, 4, 0.8, device)
    torch.library.opcheck(row_map_op, (ids, kept, 4, 16))
