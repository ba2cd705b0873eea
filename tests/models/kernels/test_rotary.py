"""The rotation kernel against its twin, and its gradient against autograd."""

import pytest
import torch

from isozyme.models.kernels.rotary import rotate_pairs, rotate_pairs_op, rotate_pairs_twin
from isozyme.models.kernels.triton_rotary import launch_rotate_pairs

SHAPES = [(2, 5, 3, 8), (1, 1, 1, 2), (1, 4, 6, 64), (0, 3, 2, 8), (2, 3, 20, 12)]


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_twin(
    shape: tuple[int, int, int, int], dtype: torch.dtype, inverse: bool, device: str
) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    x = torch.randn(shape, device=device).to(dtype)
    angles = torch.randn(*shape[:2], shape[3] // 2, device=device, dtype=wide)
    got = launch_rotate_pairs(x, angles.cos(), angles.sin(), inverse)
    torch.testing.assert_close(got, rotate_pairs_twin(x, angles.cos(), angles.sin(), inverse))


def test_the_inverse_undoes_the_rotation_and_is_its_gradient(device: str) -> None:
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, device=device, requires_grad=True)
    angles = torch.randn(2, 3, 3, dtype=torch.float64, device=device)
    turned = rotate_pairs(x, angles.cos(), angles.sin(), False)
    torch.testing.assert_close(rotate_pairs(turned, angles.cos(), angles.sin(), True), x)
    assert torch.autograd.gradcheck(lambda y: rotate_pairs(y, angles.cos(), angles.sin(), False), (x,))


def test_operator_passes_the_library_checks(device: str) -> None:
    x = torch.randn(1, 3, 2, 4, device=device, requires_grad=True)
    torch.library.opcheck(
        rotate_pairs_op, (x, torch.rand(1, 3, 2, device=device), torch.rand(1, 3, 2, device=device), False)
    )
