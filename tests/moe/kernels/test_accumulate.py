"""Mixed-precision accumulation against torch's addition."""

import pytest
import torch

from isozyme.moe.kernels.accumulate import accumulate, accumulate_twin
from isozyme.moe.kernels.triton_accumulate import launch_accumulate


@pytest.mark.parametrize("shape", [(0,), (1,), (4096,), (3, 5, 1000)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("first", [False, True])
def test_kernel_equals_twin(shape: tuple[int, ...], dtype: torch.dtype, first: bool, device: str) -> None:
    total, part = torch.randn(shape, device=device), torch.randn(shape, device=device).to(dtype)
    if first:
        total.fill_(float("nan"))  # what was there before must not matter
    want = total.clone()
    accumulate_twin(want, part, first=first)
    launch_accumulate(total, part, first=first)
    assert torch.equal(total, want)
    assert not total.isnan().any()


def test_strided_tensors_are_added_too(device: str) -> None:
    total, part = torch.zeros(4, 6, device=device), torch.randn(6, 4, device=device).half().T
    accumulate(total, part)
    assert torch.equal(total, part.float())
