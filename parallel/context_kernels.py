"""Attention of one tile, with the log-sum-exp that lets tiles be merged, and its backward.

Three kernels of one signature. `dense` is plain arithmetic in at least fp32: the meaning, on any device and
in fp64. `flash` is the FlashAttention kernel that ships with torch, for half precision on CUDA, and `cudnn`
that of cuDNN, which builds a plan for each new shape and so is for tiles whose shapes come again.

The backward of a tile takes the output and the log-sum-exp of the *whole* row, over all its tiles: then
`exp(logits - logsumexp)` are the true probabilities, and the gradients of the tiles simply add up (Dao 2023,
"FlashAttention-2", arXiv:2307.08691, section 3.1.2; Liu et al. 2023, "Ring Attention", arXiv:2310.01889).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from isozyme.core.context import KernelName

TILE_ELEMENTS = 2**24
"""Logits that the dense kernel holds at once: 64 MiB in fp32."""

Forward = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""(q, k, v, causal) → output and log-sum-exp of the tile, at least fp32."""
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]
"""(gradient of the output, q, k, v, output and log-sum-exp of the whole rows, causal) → dq, dk, dv."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way to compute a tile."""

    name: str
    forward: Forward
    backward: Backward
    max_rows: int | None
    """The most queries and the most keys of one tile; None if the kernel holds no logits."""


def choose_kernel(q: Float[Tensor, "B L N D"], preferred: KernelName = "torch") -> Kernel:
    """FlashAttention where it can run (CUDA, half precision, a head width of 8, 16, … 256), else dense.

    Args:
        q: queries.
        preferred: `cudnn` takes cuDNN instead, which `attention_kernels.kernel_problems` must allow.
    """
    if preferred == "cudnn":
        return Kernel(name="cudnn", forward=cudnn, backward=cudnn_backward, max_rows=None)
    windows, _, heads, width = q.shape
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and width % 8 == 0 and width <= 256:
        return Kernel(name="flash", forward=flash, backward=flash_backward, max_rows=None)
    rows = max(16, math.isqrt(TILE_ELEMENTS // max(windows * heads, 1)))
    return Kernel(name="dense", forward=dense, backward=dense_backward, max_rows=rows)


def dense(
    q: Float[Tensor, "B L N D"], k: Float[Tensor, "B T M D"], v: Float[Tensor, "B T M D"], causal: bool
) -> tuple[Float[Tensor, "B L N D"], Float[Tensor, "B L N"]]:
    """Softmax attention with scale 1/sqrt(D); query head n reads key head n // (N / M).

    Returns:
        The output and the log of the sum of exponentials of each query's logits, both at least fp32.
    """
    heads = k.shape[2]
    logits = _logits(q, k, causal)
    logsumexp = logits.logsumexp(dim=-1)
    probs = logits.sub_(logsumexp[..., None]).exp_()
    out = probs @ _keys(v, probs.dtype)
    length = q.shape[1]
    return (
        rearrange(out, "b m (g l) d -> b l (m g) d", l=length, m=heads),
        rearrange(logsumexp, "b m (g l) -> b l (m g)", l=length, m=heads),
    )


def dense_backward(
    grad: Float[Tensor, "B L N D"],
    q: Float[Tensor, "B L N D"],
    k: Float[Tensor, "B T M D"],
    v: Float[Tensor, "B T M D"],
    out: Float[Tensor, "B L N D"],
    logsumexp: Float[Tensor, "B L N"],
    causal: bool,
) -> tuple[Float[Tensor, "B L N D"], Float[Tensor, "B T M D"], Float[Tensor, "B T M D"]]:
    """The part of dq, dk and dv that comes from this tile, at least fp32; `out` is of the whole rows."""
    heads, length, scale = k.shape[2], q.shape[1], q.shape[-1] ** -0.5
    wide = logsumexp.dtype
    rows = rearrange(logsumexp, "b l (m g) -> b m (g l) 1", m=heads)
    probs = _logits(q, k, causal).sub_(rows).exp_()
    grad_rows, out_rows, q_rows = (_queries(x, heads, wide) for x in (grad, out, q))
    grad_v = probs.mT @ grad_rows
    grad_probs = grad_rows @ _keys(v, wide).mT
    grad_probs -= (grad_rows * out_rows).sum(dim=-1, keepdim=True)
    grad_logits = probs.mul_(grad_probs).mul_(scale)
    grad_q = grad_logits @ _keys(k, wide)
    grad_k = grad_logits.mT @ q_rows
    return (
        rearrange(grad_q, "b m (g l) d -> b l (m g) d", l=length),
        rearrange(grad_k, "b m t d -> b t m d"),
        rearrange(grad_v, "b m t d -> b t m d"),
    )


def flash(
    q: Float[Tensor, "B L N D"], k: Float[Tensor, "B T M D"], v: Float[Tensor, "B T M D"], causal: bool
) -> tuple[Float[Tensor, "B L N D"], Float[Tensor, "B L N"]]:
    """`dense` by FlashAttention: half-precision inputs, fp32 accumulation."""
    heads_first = [rearrange(x, "b l n d -> b n l d") for x in (q, k, v)]
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first, 0.0, causal)
    wide: Tensor = rearrange(out, "b n l d -> b l n d").float()
    return wide, rearrange(logsumexp, "b n l -> b l n")


def flash_backward(
    grad: Float[Tensor, "B L N D"],
    q: Float[Tensor, "B L N D"],
    k: Float[Tensor, "B T M D"],
    v: Float[Tensor, "B T M D"],
    out: Float[Tensor, "B L N D"],
    logsumexp: Float[Tensor, "B L N"],
    causal: bool,
) -> tuple[Float[Tensor, "B L N D"], Float[Tensor, "B T M D"], Float[Tensor, "B T M D"]]:
    """`dense_backward` by FlashAttention, in the inputs' dtype."""
    heads_first = [rearrange(x, "b l n d -> b n l d") for x in (grad, q, k, v, out)]
    rows = rearrange(logsumexp, "b l n -> b n l").contiguous()
    no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *heads_first, rows, None, None, q.shape[1], k.shape[1], 0.0, causal, no_dropout, no_dropout
    )
    grad_q, grad_k, grad_v = (rearrange(x, "b n l d -> b l n d") for x in grads)
    return grad_q, grad_k, grad_v


def cudnn(
    q: Float[Tensor, "B L N D"], k: Float[Tensor, "B T M D"], v: Float[Tensor, "B T M D"], causal: bool
) -> tuple[Float[Tensor, "B L N D"], Float[Tensor, "B L N"]]:
    """`dense` by cuDNN: half-precision inputs, fp32 accumulation."""
    heads_first = [rearrange(x, "b l n d -> b n l d") for x in (q, k, v)]
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, True, 0.0, causal
    )
    wide: Tensor = rearrange(out, "b n l d -> b l n d").float()
    return wide, rearrange(logsumexp, "b n l 1 -> b l n")


def cudnn_backward(
    grad: Float[Tensor, "B L N D"],
    q: Float[Tensor, "B L N D"],
    k: Float[Tensor, "B T M D"],
    v: Float[Tensor, "B T M D"],
    out: Float[Tensor, "B L N D"],
    logsumexp: Float[Tensor, "B L N"],
    causal: bool,
) -> tuple[Float[Tensor, "B L N D"], Float[Tensor, "B T M D"], Float[Tensor, "B T M D"]]:
    """`dense_backward` by cuDNN, in the inputs' dtype."""
    # It asks for one layout of the output and of its gradient, which may be slices of larger tensors.
    heads_first = [rearrange(x, "b l n d -> b n l d") for x in (grad.contiguous(), q, k, v, out.contiguous())]
    rows = rearrange(logsumexp, "b l n -> b n l 1").contiguous()
    no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
    no_bias, no_documents = None, (None, None)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first,
        rows,
        no_dropout,
        no_dropout,
        no_bias,
        *no_documents,
        q.shape[1],
        k.shape[1],
        0.0,
        causal,
    )
    grad_q, grad_k, grad_v = (rearrange(x, "b n l d -> b l n d") for x in grads)
    return grad_q, grad_k, grad_v


def _logits(q: Tensor, k: Tensor, causal: bool) -> Float[Tensor, "B M R T"]:
    """`[B, M, G x L, T]`: all queries that read one key head stand under each other."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = _queries(q, k.shape[2], wide) * q.shape[-1] ** -0.5 @ _keys(k, wide).mT
    if causal:
        length = q.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        rearrange(logits, "b m (g l) t -> b m g l t", l=length).masked_fill_(hidden, -math.inf)
    return logits


def _queries(x: Tensor, key_heads: int, dtype: torch.dtype) -> Tensor:
    return rearrange(x.to(dtype), "b l (m g) d -> b m (g l) d", m=key_heads)


def _keys(x: Tensor, dtype: torch.dtype) -> Tensor:
    return rearrange(x.to(dtype), "b t m d -> b m t d")
