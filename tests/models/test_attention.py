"""Attention against softmax written out, grouped heads against repeated ones, and isolation of documents."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from isozyme.core.errors import UsageError
from isozyme.models.attention import Attention, Context
from isozyme.parallel.shard_spec import spec_of
from tests.models.common import builder, random_batch, tiny

DOCUMENTS = torch.tensor([[0] * 3 + [1] * 9 + [2] * 4, [0] * 16])


def _slow(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """One query at a time."""
    out = torch.zeros_like(q)
    windows, length, heads, width = q.shape
    for b in range(windows):
        for s in range(length):
            seen = [t for t in range(s + 1) if documents[b, t] == documents[b, s]]
            for n in range(heads):
                m = n // (heads // k.shape[2])
                weights = torch.softmax(k[b, seen, m] @ q[b, s, n] / math.sqrt(width), dim=0)
                out[b, s, n] = weights @ v[b, seen, m]
    return out


def _qkv(heads: int, kv_heads: int) -> list[torch.Tensor]:
    return [
        torch.randn(2, 16, count, 8, dtype=torch.float64, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_equals_one_query_at_a_time_in_value_and_gradient(kv_heads: int, packed: bool) -> None:
    q, k, v = _qkv(4, kv_heads)
    documents = DOCUMENTS if packed else torch.zeros_like(DOCUMENTS)
    batch = random_batch(documents=documents, packed=packed)
    fast = Context.of(batch, tiny().model, q.dtype).mix(q, k, v)
    slow = _slow(q, k, v, documents)
    torch.testing.assert_close(fast, slow)
    upstream = torch.randn_like(fast)
    for one, other in zip(
        torch.autograd.grad(fast, (q, k, v), upstream),
        torch.autograd.grad(slow, (q, k, v), upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_grouped_heads_equal_multi_head_attention_with_repeated_weights() -> None:
    config = tiny(init_std=1.0).model
    grouped = Attention(builder(), "a", config, output_std=1.0)
    full = Attention(builder(), "b", dataclasses.replace(config, num_kv_heads=4), output_std=1.0)
    with torch.no_grad():
        full.q.weight.copy_(grouped.q.weight)
        full.output.weight.copy_(grouped.output.weight)
        for ours, theirs in ((grouped.k, full.k), (grouped.v, full.v)):
            heads = ours.weight.unflatten(0, (2, 8))
            theirs.weight.copy_(heads[[0, 0, 1, 1]].flatten(0, 1))
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    context = Context.of(random_batch(), config, torch.float64)
    torch.testing.assert_close(grouped(x, context), full(x, context))


def test_context_plans_documents_for_packed_windows_only() -> None:
    config = tiny().model
    assert Context.of(random_batch(), config, torch.float32).packed is None
    assert Context.of(random_batch(packed=True), config, torch.float32).packed is not None


def test_context_takes_cudnn_for_multiples_of_its_tile_only() -> None:
    kernels = [
        Context.of(random_batch(1, length), tiny().model, torch.float32, kernel="cudnn").kernel
        for length in (128, 192)
    ]
    assert kernels == ["cudnn", "flash"]


def test_projections_are_cut_by_output_rows_and_the_output_by_input_columns() -> None:
    module = Attention(builder(), "layers.1.attention", tiny().model, output_std=0.1)
    specs = {spec_of(parameter).name: spec_of(parameter) for parameter in module.parameters()}
    assert {name: (spec.global_shape, spec.split) for name, spec in specs.items()} == {
        "layers.1.attention.q.weight": ((32, 32), ((0, "tp"),)),
        "layers.1.attention.k.weight": ((16, 32), ((0, "tp"),)),
        "layers.1.attention.v.weight": ((16, 32), ((0, "tp"),)),
        "layers.1.attention.output.weight": ((32, 32), ((1, "tp"),)),
    }
    assert specs["layers.1.attention.output.weight"].init.value == 0.1


@pytest.mark.parametrize("change", ["cut", "joined", "shorter"])
def test_lengths_of_other_windows_are_refused_and_not_attended_by(change: str) -> None:
    config = tiny().model
    batch = random_batch(2, documents=DOCUMENTS, packed=True).to("cpu")
    assert batch.lengths == ((3, 9, 4), (16,))
    index = {"cut": (slice(1),), "joined": ([0, 1, 0],), "shorter": (slice(None), slice(8))}[change]
    tensors = {
        field.name: getattr(batch, field.name)[index]
        for field in dataclasses.fields(batch)
        if isinstance(getattr(batch, field.name), torch.Tensor)
    }
    with pytest.raises(UsageError, match=r"must cover its windows: .* sum to \[16, 16\]"):
        Context.of(dataclasses.replace(batch, **tensors), config, torch.float64)
    Context.of(dataclasses.replace(batch, **tensors, lengths=None), config, torch.float64)
