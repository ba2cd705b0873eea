"""Writing a low-precision tensor into an fp32 one, or adding it, in place, in one vectorised pass.

torch's own addition of mixed dtypes casts element by element and reaches about 60 % of the bandwidth.
"""

from torch import Tensor


def accumulate_twin(total: Tensor, part: Tensor, *, first: bool = False) -> None:
    """`accumulate` in plain PyTorch."""
    if first:
        total.copy_(part)
    else:
        total.add_(part)


def accumulate(total: Tensor, part: Tensor, *, first: bool = False) -> None:
    """`total += part`, in the dtype of `total`; both of one shape. No gradient.

    The kernel takes contiguous tensors of different dtypes on CUDA; anything else goes to torch.

    Args:
        total: the sum.
        part: what is added to it.
        first: whether `total` holds nothing of worth yet: it is overwritten, and not read.
    """
    plain = total.dtype == part.dtype or not (total.is_contiguous() and part.is_contiguous())
    if plain or not total.is_cuda:
        accumulate_twin(total, part, first=first)
        return
    from isozyme.moe.kernels.triton_accumulate import launch_accumulate

    launch_accumulate(total, part, first=first)
