"""Fused operations around the grouped GEMMs: each a torch operator with a plain-PyTorch twin.

On a CPU an operator runs its twin; on CUDA it launches the Triton kernel of `triton_<name>.py`, which is
imported only then. Tests hold each kernel to its twin under Triton's interpreter and on the GPU.

`run_<operator>` is the function behind an operator: the same arithmetic without a graph and without the
dispatcher's cost, for use inside autograd functions. `direct` picks it, except while `torch.compile` traces.

Row maps: `slot_row[t, k]` is the row of slot k of token t in the expert-major buffer, or -1 for a slot that
is not kept. Indices are stored as int32 (a buffer has fewer than 2^31 rows); every address is computed in
int64, since rows * hidden passes 2^31 easily.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def direct(operator: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, the function behind `operator`; the operator itself while `torch.compile` traces."""
    return operator if torch.compiler.is_compiling() else run
