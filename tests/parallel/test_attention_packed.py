"""Attention inside packed documents against the masked slow twin, and the memory that it does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isozyme.core.batch import document_lengths
from isozyme.parallel import attention_packed
from isozyme.parallel.attention_kernels import AttentionFacts
from isozyme.parallel.attention_packed import Tiled, VariableLength, packed_attention
from isozyme.parallel.context import whole_window_attention
from tests.parallel.test_attention_kernels import HOPPER

CPU = torch.device("cpu")
SKEWED = ((1, 1, 40, 2, 20), (64,), (1,) * 64)
"""Documents of one token, a whole window, and as many documents as tokens."""


def _documents(lengths: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.stack(
        [torch.repeat_interleave(torch.arange(len(window)), torch.tensor(window)) for window in lengths]
    )


def _inputs(windows: int, length: int, heads: int, key_heads: int, width: int = 8) -> list[Tensor]:
    return [
        torch.randn(windows, length, n, width, dtype=torch.float64, requires_grad=True)
        for n in (heads, key_heads, key_heads)
    ]


def _one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    starts_k: Tensor,
    longest: int,
    longest_k: int,
    grouped: bool,
) -> Tensor:
    """What torch's function is told to do, document by document."""
    assert starts.dtype == torch.int32
    assert grouped == (q.shape[1] != k.shape[1])
    spans = list(zip(starts.tolist(), starts[1:].tolist(), strict=False))
    assert longest == max(end - begin for begin, end in spans)
    parts = [whole_window_attention(q[None, a:b], k[None, a:b], v[None, a:b])[0] for a, b in spans]
    return torch.cat(parts)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("way", ["tiles", "variable length"])
def test_packed_attention_equals_the_masked_slow_twin_in_value_and_gradient(
    way: str, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_packed, "_varlen_attn", lambda: _one_by_one)
    inputs, documents = _inputs(3, 64, 4, key_heads), _documents(SKEWED)
    assert document_lengths(documents) == SKEWED
    ours = (Tiled.of(SKEWED, 64) if way == "tiles" else VariableLength.of(SKEWED, CPU))(*inputs)
    slow = whole_window_attention(*inputs, documents)
    upstream = torch.randn_like(ours)
    found, expected = (torch.autograd.grad(out, inputs, upstream) for out in (ours, slow))
    for one, other in zip((ours, *found), (slow, *expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


class _Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return out


@pytest.mark.parametrize("lengths", [(1500, 1, 2595), (4096,)])
def test_no_tensor_of_s_by_s_elements_is_made(lengths: tuple[int, ...]) -> None:
    length = sum(lengths)
    q, k, v = (torch.randn(2, length, n, 4, requires_grad=True) for n in (2, 1, 1))
    with _Largest() as largest:
        out = Tiled.of((lengths, lengths), length)(q, k, v)
        out.sum().backward()
    assert 0 < largest.elements < length * length


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (HOPPER, VariableLength),
        (AttentionFacts.here(CPU, torch.bfloat16, head_width=64, num_heads=4, num_kv_heads=2), Tiled),
    ],
)
def test_documents_go_to_flash_attention_where_it_runs_and_to_tiles_elsewhere(
    facts: AttentionFacts, expected: type
) -> None:
    assert isinstance(packed_attention(SKEWED, 64, facts, CPU), expected)


def test_variable_length_attention_of_torch_takes_what_it_is_given() -> None:
    """On tensors without values, with the signature of this release of torch."""
    q, k, v = (
        torch.empty(3, 64, n, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (4, 2, 2)
    )
    out = VariableLength.of(SKEWED, torch.device("meta"))(q, k, v)
    assert out.shape == q.shape
    grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


def test_no_windows_are_attended_to_without_a_kernel() -> None:
    attention = packed_attention((), 64, HOPPER, CPU)
    nothing = torch.zeros(0, 64, 2, 8)
    assert isinstance(attention, Tiled)
    assert attention(nothing, nothing, nothing).shape == nothing.shape
