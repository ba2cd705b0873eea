"""Fused operations around the grouped GEMMs: each a torch operator with a plain-PyTorch twin.

On a CPU an operator runs its twin; on CUDA it launches the Triton kernel of `triton_<name>.py`, which is
imported only then. Tests hold each kernel to its twin under Triton's interpreter and on the GPU.

An operator's dispatch through `torch.library` costs the host more than a small kernel takes. So `<name>` is
the operator `<name>_op` only while `torch.compile` traces, and else an autograd function around
`run_<name>`: the same arithmetic, which code without a graph (inside autograd functions) calls by `direct`.

Row maps: `slot_row[t, k]` is the row of slot k of token t in the expert-major buffer, or -1 for a slot that
is not kept. Indices are stored as int32 (a buffer has fewer than 2^31 rows); every address is computed in
int64, since rows * hidden passes 2^31 easily.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def eager(
    run: Callable[..., Any], setup: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """`run` with a gradient, without an operator: for eager execution.

    Args:
        run: from all inputs, by position, to the output.
        setup: `(ctx, inputs, output)`, and
        backward: `(ctx, *grads)`: as `torch.library.register_autograd` takes them for the operator. But the
            operator's own backward is traced, so it must call operators where this one calls functions.
    """

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = run(*inputs)
        setup(ctx, inputs, output)
        return output

    name = run.__name__.removeprefix("run").title().replace("_", "")  # as a profile shows it
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Callable[..., Any] = type(name, (torch.autograd.Function,), parts).apply  # type: ignore[attr-defined]
    return function


def direct(operator: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, the function behind `operator`; the operator itself while `torch.compile` traces.

    Without a graph `run` is what runs; with one, the function that `eager` made.
    """
    return operator if torch.compiler.is_compiling() else run
