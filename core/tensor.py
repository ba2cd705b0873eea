"""The rules of tensor parallelism: which sizes of a model each of its cuts needs to divide.

TP > 1 implies sequence parallelism, so the window is cut as well as heads, networks and the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isozyme.core.errors import Rules, divisors
from isozyme.core.topology import Layout

if TYPE_CHECKING:
    from isozyme.core.config import ModelConfig


def tensor_problems(model: ModelConfig, layout: Layout, window: int | None = None) -> list[str]:
    """Why `model` cannot be cut over the TP and ETP ranks of `layout`, one message a rule; empty if it can.

    Args:
        model: the model, in order by itself.
        layout: the parallel sizes, each at least 1.
        window: tokens of a window, where they are known.
    """
    rules = Rules("layout")
    tp, kinds, moe = layout.tp, model.layer_kinds(), model.moe
    whole = {"num_heads": model.num_heads, "vocab_size": model.vocab_size}
    if "D" in kinds:
        whole["ffn"] = model.ffn
    if "M" in kinds and moe.shared_ffn:
        whole["moe.shared_ffn"] = moe.shared_ffn
    for name, size in whole.items():
        rules.check(
            size % tp == 0,
            f"tp must divide {name}: model.{name}={size}, layout.tp={tp}; {size} % {tp} = {size % tp}. "
            f"Choose tp from {_listed(divisors(size))}, or another model.{name}.",
        )
    rules.extend(_kv_problems(model.num_heads, model.num_kv_heads, tp))
    if window is not None and tp > 1:
        parts = tp * layout.cp
        rules.check(
            window % parts == 0,
            "tp*cp must divide the window, of which every rank holds an equal part: "
            f"data.window={window}, layout.tp={tp}, layout.cp={layout.cp}; {window} % {parts} = "
            f"{window % parts}. Choose tp*cp from {_listed(divisors(window))}, or set "
            f"data.window={max(window // parts, 1) * parts}.",
        )
    if "M" in kinds:
        etp = layout.etp
        rules.check(
            moe.ffn % etp == 0,
            f"etp must divide moe.ffn: model.moe.ffn={moe.ffn}, layout.etp={etp}; {moe.ffn} % {etp} = "
            f"{moe.ffn % etp}. Choose etp from {_listed(divisors(moe.ffn))}, or another model.moe.ffn.",
        )
    return rules.broken


def _kv_problems(num_heads: int, num_kv_heads: int, tp: int) -> list[str]:
    """K/V heads are dealt out evenly, or, if they are fewer than the ranks, each to equally many ranks."""
    rules = Rules("layout")
    legal = [n for n in divisors(num_heads) if n % num_kv_heads == 0 or num_kv_heads % n == 0]
    rules.check(
        tp % num_kv_heads == 0 or num_kv_heads % tp == 0,
        "tp must divide num_kv_heads or be a multiple of it: "
        f"model.num_kv_heads={num_kv_heads}, layout.tp={tp}; {num_kv_heads} % {tp} = {num_kv_heads % tp}, "
        f"{tp} % {num_kv_heads} = {tp % num_kv_heads}. Choose tp from {_listed(legal)}, or another "
        "model.num_kv_heads.",
    )
    return rules.broken


def _listed(numbers: list[int]) -> str:
    """At most twelve of them, in words."""
    shown = ", ".join(map(str, numbers[:12]))
    return shown if len(numbers) <= 12 else f"{shown}, … {numbers[-1]}"
