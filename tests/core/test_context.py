"""The rules of context parallelism, in words and with their legal values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isozyme.core.context import AttentionConfig, ContextMethod, ContextOrder, head_problems, window_problems


@pytest.mark.parametrize(("window", "order", "rest"), [(20, "zigzag", 4), (18, "contiguous", 2)])
def test_a_window_that_cannot_be_cut_is_refused_with_its_neighbours(
    window: int, order: ContextOrder, rest: int
) -> None:
    (message,) = window_problems(window, 4, order)
    assert f"= {rest}." in message
    assert "16 and " in message
    assert not window_problems(window, 1, order)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 12))
def test_the_named_sizes_are_the_ones_that_ulysses_accepts(share: int, key_heads: int, size: int) -> None:
    heads = share * key_heads
    messages = head_problems(heads, key_heads, size)
    if not messages:
        assert heads % size == 0
        assert key_heads % size == 0 or size % key_heads == 0
        return
    legal = messages[0].partition("Choose layout.cp from ")[2].partition(", or model")[0].split(", ")
    assert str(size) not in legal
    assert all(not head_problems(heads, key_heads, int(value)) for value in legal)


def test_every_rule_is_told_at_once_and_only_where_it_matters() -> None:
    sizes = {"window": 20, "cp": 4, "tp": 2, "num_heads": 12, "num_kv_heads": 12}
    assert len(AttentionConfig(context="ulysses").problems(**sizes)) == 2
    assert len(AttentionConfig(context="ring").problems(**sizes)) == 1
    assert not AttentionConfig(context="ring", context_order="contiguous").problems(**sizes)
    assert not AttentionConfig(context="ulysses").problems(**{**sizes, "cp": 1})


@pytest.mark.parametrize(
    ("window", "cp", "method", "multiple"),
    [(192, 1, "allgather", 128), (640, 2, "ring", 512), (192, 2, "ulysses", 128)],
)
def test_cudnn_by_name_is_refused_for_lengths_that_it_must_fill_up(
    window: int, cp: int, method: ContextMethod, multiple: int
) -> None:
    sizes = {"cp": cp, "tp": 1, "num_heads": 4, "num_kv_heads": 4}
    named = AttentionConfig(kernel="cudnn", context=method)
    (message,) = named.problems(window=window, **sizes)
    assert f"multiple of {multiple}" in message
    assert not named.problems(window=multiple, **sizes)
    assert not AttentionConfig(context=method).problems(window=window, **sizes)
