"""Adding a low-precision tensor to an fp32 one, in place, in one vectorised pass.

torch's own addition of mixed dtypes casts element by element and reaches about 60 % of the bandwidth.
"""

from torch import Tensor


def accumulate_twin(total: Tensor, part: Tensor) -> None:
    """`accumulate` in plain PyTorch."""
    total.add_(part)


def accumulate(total: Tensor, part: Tensor) -> None:
    """`total += part`, in the dtype of `total`; both of one shape. No gradient.

    The kernel takes contiguous tensors of different dtypes on CUDA; anything else goes to torch.
    """
    plain = total.dtype == part.dtype or not (total.is_contiguous() and part.is_contiguous())
    if plain or not total.is_cuda:
        accumulate_twin(total, part)
        return
    from isozyme.moe.kernels.triton_accumulate import launch_accumulate

    launch_accumulate(total, part)
