"""Which attention kernel runs, decided from facts alone, and what the operators take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from isozyme.core.context import AttentionKernel, KernelName
from isozyme.core.errors import BackendError
from isozyme.parallel.attention_kernels import AttentionFacts, attend, choose_attention, kernel_problems
from isozyme.parallel.context import whole_window_attention

HOPPER = AttentionFacts(
    device="cuda",
    dtype=torch.bfloat16,
    head_width=64,
    grouped=True,
    capability=(9, 0),
    cudnn=91900,
    cudnn_enabled=True,
    flash_enabled=True,
    deterministic=False,
)


@pytest.mark.parametrize(
    ("changes", "chosen", "words"),
    [
        ({}, "cudnn", "flash for packed windows"),
        ({"dtype": torch.float16}, "cudnn", "preferred"),
        ({"deterministic": True}, "flash", "not deterministic"),
        ({"cudnn": 91002}, "flash", "from cuDNN 91501 on, and torch has loaded 91002"),
        ({"cudnn": 90100}, "flash", "cuDNN 90500 or later: torch has loaded 90100"),
        ({"cudnn": None}, "flash", "torch has loaded none that it accepts"),
        ({"cudnn_enabled": False}, "flash", "enable_cudnn_sdp(False)"),
        ({"head_width": 192}, "flash", "at most 128: head width=192"),
        ({"head_width": 60}, "torch", "multiple of 8"),
        ({"capability": (8, 0)}, "flash", "9.0 and 10.x only"),
        ({"capability": (10, 0)}, "flash", "grouped key/value heads"),
        ({"capability": (10, 0), "grouped": False}, "cudnn", "preferred"),
        ({"capability": (7, 5)}, "torch", "this GPU has 7.5"),
        ({"flash_enabled": False, "deterministic": True}, "torch", "enable_flash_sdp(False)"),
        ({"dtype": torch.float64}, "torch", "this is float64 on cuda"),
        ({"device": "cpu", "capability": None}, "torch", "this is bfloat16 on cpu"),
    ],
)
def test_auto_takes_the_fastest_that_can_run_and_says_why(
    changes: dict[str, Any], chosen: KernelName, words: str
) -> None:
    name, choice = choose_attention("auto", replace(HOPPER, **changes))
    assert (name, choice.name) == (chosen, chosen)
    assert words in str(choice)


@pytest.mark.parametrize("name", ["torch", "cudnn", "flash"])
def test_a_named_kernel_runs_wherever_it_can_also_where_auto_would_not_take_it(name: AttentionKernel) -> None:
    for changes in ({"capability": (10, 0)}, {"capability": (8, 0)}, {"cudnn": 91002}):
        assert choose_attention(name, replace(HOPPER, **changes))[0] == name


def test_a_named_kernel_that_cannot_run_is_refused_with_every_unmet_condition() -> None:
    facts = AttentionFacts(
        device="cpu",
        dtype=torch.float32,
        head_width=130,
        grouped=False,
        capability=None,
        cudnn=None,
        cudnn_enabled=False,
        flash_enabled=False,
        deterministic=True,
    )
    assert len(kernel_problems("cudnn", facts)) == 5
    assert len(kernel_problems("flash", facts)) == 4
    with pytest.raises(BackendError, match=r"kernel=cudnn.*device=cpu.*float32.*130.*enable_cudnn.*determin"):
        choose_attention("cudnn", facts)
    assert choose_attention("torch", facts)[0] == "torch"


def test_the_facts_of_this_process_follow_the_switches_of_torch() -> None:
    def here() -> AttentionFacts:
        return AttentionFacts.here(
            torch.device("cpu"), torch.float32, head_width=8, num_heads=4, num_kv_heads=2
        )

    assert here().grouped
    assert not here().deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert here().deterministic
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_a_kernel_is_one_differentiable_operator(kernel: KernelName) -> None:
    """On tensors without values: the operator takes grouped heads, and gives gradients of their shapes."""
    q, k, v = (
        torch.empty(2, 128, n, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (4, 2, 2)
    )
    out = attend(q, k, v, kernel)
    assert out.shape == q.shape
    grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


def test_torch_s_dispatch_equals_the_slow_twin_with_grouped_heads() -> None:
    q, k, v = (torch.randn(2, 16, n, 8, dtype=torch.float64) for n in (4, 2, 2))
    torch.testing.assert_close(attend(q, k, v), whole_window_attention(q, k, v))
