"""The cross-entropy's kernels against their twins, and the twins against torch in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from isozyme.models.kernels.cross_entropy import (
    cross_entropy_gradient_,
    cross_entropy_gradient_op,
    cross_entropy_gradient_twin,
    softmax_parts,
    softmax_parts_op,
    softmax_parts_twin,
)
from isozyme.models.kernels.triton_cross_entropy import (
    launch_cross_entropy_gradient_,
    launch_softmax_parts,
)

SHAPES = [(3, 9000), (37, 70), (1, 1), (5, 4096), (0, 16), (300, 3)]
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of a gradient; the two numbers of a softmax are not rounded to narrow types."""


def draw(count: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with peaks anywhere, targets (some elsewhere) and which tokens count."""
    logits = (torch.randn(count, vocab, device=device) * 4 + torch.randn(count, 1, device=device) * 20).to(
        dtype
    )
    targets = torch.randint(-1, vocab, (count,), device=device)
    return logits, targets, torch.rand(count, device=device) < 0.8


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_twins(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    logits, targets, valid = draw(*shape, dtype, device)
    wide = torch.promote_types(dtype, torch.float32)
    peak, total = launch_softmax_parts(logits)
    want_peak, want_total = softmax_parts_twin(logits)
    assert torch.equal(peak, want_peak)
    torch.testing.assert_close(total, want_total, rtol=BOUND[wide], atol=0)
    upstream = torch.tensor(0.37, dtype=wide, device=device)
    want = cross_entropy_gradient_twin(logits, peak, total.log(), targets, valid, upstream)
    launch_cross_entropy_gradient_(logits, peak, total.log(), targets, valid, upstream)
    torch.testing.assert_close(logits, want, rtol=BOUND[dtype], atol=BOUND[wide])


@pytest.mark.parametrize("vocab", [11, 5000])
def test_they_are_value_and_gradient_of_the_cross_entropy(vocab: int, device: str) -> None:
    logits, targets, valid = draw(6, vocab, torch.float64, device)
    targets, upstream = targets.clamp(min=0), torch.tensor(-1.3, dtype=torch.float64, device=device)
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf, targets.masked_fill(~valid, -100), ignore_index=-100, reduction="sum")
    (expected,) = torch.autograd.grad(loss, leaf, upstream)
    peak, total = launch_softmax_parts(logits)
    of_label = logits.gather(1, targets[:, None])[:, 0]
    ours = (total.log() + peak - of_label).masked_fill(~valid, 0.0).sum()
    torch.testing.assert_close(ours, loss.detach(), rtol=1e-12, atol=1e-12)
    launch_cross_entropy_gradient_(logits, peak, total.log(), targets, valid, upstream)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of the interpreter
def test_ids_without_probability_add_nothing_and_other_non_finite_logits_make_nan(device: str) -> None:
    inf = math.inf
    rows = [[-inf] * 3, [-inf, 1.0, -inf], [math.nan, 1.0, 2.0], [1.0, inf, 2.0], [inf, inf, -inf]]
    for vocab in (3, 5000):  # within one lane's loop, too
        logits = torch.tensor(rows, device=device)
        logits = F.pad(logits, (0, vocab - 3), value=-inf)
        peak, total = launch_softmax_parts(logits)
        assert peak[:2].tolist() == [torch.finfo(torch.float32).min, 1.0]
        assert total[:2].tolist() == [0.0, 1.0]
        assert total[2:].isnan().all()


def test_a_token_that_does_not_count_gets_zeros_whatever_its_logits(device: str) -> None:
    logits = torch.full((2, 40), math.nan, device=device)
    logits[0] = 0.0
    parts = (
        torch.tensor([0.0, math.nan], device=device),
        torch.tensor([math.log(40), math.nan], device=device),
    )
    valid = torch.tensor([True, False], device=device)
    targets = torch.tensor([3, -1], device=device)
    launch_cross_entropy_gradient_(logits, *parts, targets, valid, torch.ones((), device=device))
    assert torch.equal(logits[1], torch.zeros_like(logits[1]))
    torch.testing.assert_close(logits[0], 1 / 40 - F.one_hot(targets[0], 40).float())


def test_operators_pass_the_library_checks(device: str) -> None:
    logits, targets, valid = draw(4, 6, torch.float32, device)
    torch.library.opcheck(softmax_parts_op, (logits,))
    peak, total = softmax_parts(logits)
    given = (logits, peak, total.log(), targets, valid, torch.ones((), device=device))
    torch.library.opcheck(cross_entropy_gradient_op, given)
    want = cross_entropy_gradient_twin(*given)
    cross_entropy_gradient_(*given)
    torch.testing.assert_close(logits, want)
