"""What a cross-entropy needs of logits, one pass each way: two numbers a token, and later its gradient.

Logits are read in the type in which the matrix product leaves them; arithmetic has at least fp32 in
registers, so that wide logits never exist. The gradient takes the logits' place in memory.
"""

from typing import no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from isozyme.moe.kernels import direct


def softmax_parts_twin(logits: Float[Tensor, "T V"]) -> tuple[Float[Tensor, "T"], Float[Tensor, "T"]]:
    """`softmax_parts` in plain PyTorch."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    peak = wide.amax(dim=1).clamp_min(torch.finfo(wide.dtype).min)
    return peak, (wide - peak[:, None]).exp_().sum(dim=1)


def cross_entropy_gradient_twin(
    logits: Float[Tensor, "T V"],
    peak: Float[Tensor, "T"],
    log_total: Float[Tensor, "T"],
    targets: Int[Tensor, "T"],
    valid: Bool[Tensor, "T"],
    upstream: Float[Tensor, ""],
) -> Float[Tensor, "T V"]:
    """What `cross_entropy_gradient_` writes, in plain PyTorch and in memory of its own."""
    wide = (logits.to(peak.dtype) - peak[:, None]).sub_(log_total[:, None]).exp_()
    here = (targets >= 0).to(wide.dtype)
    wide.scatter_add_(1, targets.clamp(min=0)[:, None], -here[:, None])
    return wide.mul_(upstream).masked_fill_(~valid[:, None], 0.0).to(logits.dtype)


def run_softmax_parts(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`softmax_parts` without an operator."""
    if logits.is_cuda:
        from isozyme.models.kernels.triton_cross_entropy import launch_softmax_parts

        return launch_softmax_parts(logits)
    return softmax_parts_twin(logits)


softmax_parts_op = torch.library.custom_op("isozyme::softmax_parts", run_softmax_parts, mutates_args=())


@softmax_parts_op.register_fake
@no_type_check
def _(logits: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    peak = logits.new_empty(logits.shape[0], dtype=wide)
    return peak, torch.empty_like(peak)


def run_cross_entropy_gradient_(
    logits: Tensor, peak: Tensor, log_total: Tensor, targets: Tensor, valid: Tensor, upstream: Tensor
) -> None:
    """`cross_entropy_gradient_` without an operator."""
    if logits.is_cuda:
        from isozyme.models.kernels.triton_cross_entropy import launch_cross_entropy_gradient_

        launch_cross_entropy_gradient_(logits, peak, log_total, targets, valid, upstream)
    else:
        logits.copy_(cross_entropy_gradient_twin(logits, peak, log_total, targets, valid, upstream))


cross_entropy_gradient_op = torch.library.custom_op(
    "isozyme::cross_entropy_gradient_", run_cross_entropy_gradient_, mutates_args=("logits",)
)


def softmax_parts(logits: Float[Tensor, "T V"]) -> tuple[Float[Tensor, "T"], Float[Tensor, "T"]]:
    """For each token the largest logit, and the sum of `exp(logit - largest)`, in at least fp32.

    The largest is finite also where all logits are -inf: such a part of a vocabulary has the sum 0, and does
    not make those of other ranks NaN. A logit that is NaN or +inf makes the sum NaN. It has no gradient.
    """
    parts: tuple[Tensor, Tensor] = direct(softmax_parts_op, run_softmax_parts)(logits)
    return parts


def cross_entropy_gradient_(
    logits: Float[Tensor, "T V"],
    peak: Float[Tensor, "T"],
    log_total: Float[Tensor, "T"],
    targets: Int[Tensor, "T"],
    valid: Bool[Tensor, "T"],
    upstream: Float[Tensor, ""],
) -> None:
    """Replace logits by the gradient `(softmax(logits) - onehot(target)) * upstream` of the loss's sum.

    Args:
        logits: contiguous; overwritten, rounded once to their type.
        peak: the largest logit of each token over the whole vocabulary, at least fp32.
        log_total: logarithm of the sum of `exp(logit - peak)` over the whole vocabulary.
        targets: column of each token's label; -1 where it is not among these.
        valid: which tokens count; the gradient of others is zero, whatever their logits.
        upstream: gradient of the sum, of the type of `peak`.
    """
    given = (logits, peak, log_total, targets, valid, upstream)
    direct(cross_entropy_gradient_op, run_cross_entropy_gradient_)(*given)
