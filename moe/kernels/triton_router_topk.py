"""Triton kernels of the router: a block of tokens by all experts stays in registers from logits to choice."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
@no_type_check
def _forward_kernel(
    logits, valid, scores, ids, probs, lse, counts, length, scaling,
    E: tl.constexpr, K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    window = tl.program_id(0)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    alive = places < length
    tokens = window.to(tl.int64) * length + places
    experts = tl.arange(0, WIDTH)
    inside = alive[:, None] & (experts < E)[None, :]
    where = tokens[:, None] * E + experts[None, :]
    x = tl.load(logits + where, mask=inside, other=float("-inf"))
    x = tl.where(alive[:, None], x, 0.0)
    # x - x is 0 for a finite number and NaN for any other: one such logit makes its whole row NaN.
    x += tl.sum(tl.where(inside, x - x, 0.0), axis=1)[:, None]
    top = tl.max(x, axis=1)
    e = tl.exp(x - top[:, None])
    total = tl.sum(e, axis=1)
    p = e / total[:, None]
    real = tl.load(valid + tokens, mask=alive, other=0) != 0
    tl.store(scores + where, tl.where(real[:, None], p, 0.0), mask=inside)
    tl.store(lse + tokens, top + tl.log(total), mask=alive)
    counted = real.to(tl.int32)
    slots = tl.zeros((WIDTH,), dtype=tl.int32)
    # NaN compares false with everything: rank such scores first, as a descending sort does.
    rank = tl.where(p == p, p, 2.0)
    rank = tl.where((experts < E)[None, :], rank, -1.0)
    left = rank
    chosen_sum = tl.zeros((BLOCK,), dtype=p.dtype)
    for k in tl.static_range(K):
        best = tl.max(left, axis=1)
        expert = tl.min(tl.where(left == best[:, None], experts[None, :], WIDTH), axis=1)
        hit = experts[None, :] == expert[:, None]
        value = tl.sum(tl.where(hit, p, 0.0), axis=1)
        chosen_sum += value
        slots += tl.sum(tl.where(hit, counted[:, None], 0), axis=0)
        tl.store(ids + tokens * K + k, expert.to(tl.int64), mask=alive)
        left = tl.where(hit, -1.0, left)
    left = rank
    for k in tl.static_range(K):
        best = tl.max(left, axis=1)
        expert = tl.min(tl.where(left == best[:, None], experts[None, :], WIDTH), axis=1)
        hit = experts[None, :] == expert[:, None]
        value = tl.sum(tl.where(hit, p, 0.0), axis=1)
        if RENORMALIZE:
            value = value / chosen_sum
        tl.store(probs + tokens * K + k, tl.where(real, value * scaling, 0.0), mask=alive)
        left = tl.where(hit, -1.0, left)
    # Integers: the order of additions changes nothing.
    row = counts + window * (E + 1)
    tl.atomic_add(row + experts, slots, mask=(experts < E) & (slots > 0))
    tl.atomic_add(row + E, tl.sum(counted, axis=0))


@triton.jit
@no_type_check
def _backward_kernel(
    d_scores, d_probs, d_lse, scores, ids, d_logits, num_tokens, scaling,
    E: tl.constexpr, K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    alive = tokens < num_tokens
    experts = tl.arange(0, WIDTH)
    inside = alive[:, None] & (experts < E)[None, :]
    wide = tokens.to(tl.int64)
    where = wide[:, None] * E + experts[None, :]
    p = tl.load(scores + where, mask=inside, other=0.0)
    upstream = tl.load(d_scores + where, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), dtype=p.dtype)
    inner = tl.zeros((BLOCK,), dtype=p.dtype)
    if RENORMALIZE:
        for k in tl.static_range(K):
            expert = tl.load(ids + wide * K + k, mask=alive, other=0).to(tl.int32)
            value = tl.sum(tl.where(experts[None, :] == expert[:, None], p, 0.0), axis=1)
            total += value
            inner += tl.load(d_probs + wide * K + k, mask=alive, other=0.0) * scaling * value
        total = tl.where(total == 0, 1.0, total)  # no token, or one that is not valid
    for k in tl.static_range(K):
        expert = tl.load(ids + wide * K + k, mask=alive, other=0).to(tl.int32)
        grad = tl.load(d_probs + wide * K + k, mask=alive, other=0.0) * scaling
        if RENORMALIZE:
            grad = (grad - inner / total) / total
        upstream += tl.where(experts[None, :] == expert[:, None], grad[:, None], 0.0)
    mean = tl.sum(upstream * p, axis=1)
    z = tl.load(d_lse + tokens, mask=alive, other=0.0)
    tl.store(d_logits + where, p * (upstream - mean[:, None] + z[:, None]), mask=inside)


def _shape(num_tokens: int, num_experts: int) -> tuple[int, int, int]:
    """(BLOCK tokens, WIDTH experts, programs)."""
    width = max(2, triton.next_power_of_2(num_experts))
    block = max(1, min(64, 4096 // width))
    return block, width, triton.cdiv(num_tokens, block)


def launch_router_topk(
    logits: Tensor, valid: Tensor, windows: int, topk: int, renormalize: bool, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`router_topk` on the device of `logits`."""
    logits, flags = logits.contiguous(), valid.contiguous().view(torch.uint8)
    count, experts = logits.shape
    scores = torch.empty_like(logits)
    ids = logits.new_empty((count, topk), dtype=torch.int64)
    probs, lse = logits.new_empty((count, topk)), logits.new_empty(count)
    counts = torch.zeros((windows, experts + 1), dtype=torch.int32, device=logits.device)
    if count:
        length = count // windows
        block, width, programs = _shape(length, experts)
        _forward_kernel[(windows, programs)](
            logits, flags, scores, ids, probs, lse, counts, length, scaling,
            E=experts, K=topk, RENORMALIZE=renormalize, BLOCK=block, WIDTH=width,
        )  # fmt: skip
    return scores, ids, probs, lse, counts


def launch_router_topk_backward(
    d_scores: Tensor,
    d_probs: Tensor,
    d_lse: Tensor,
    scores: Tensor,
    ids: Tensor,
    renormalize: bool,
    scaling: float,
) -> Tensor:
    """`router_topk_backward` on the device of `scores`."""
    d_scores, d_probs, d_lse = d_scores.contiguous(), d_probs.contiguous(), d_lse.contiguous()
    scores, ids = scores.contiguous(), ids.contiguous()
    count, experts = scores.shape
    d_logits = torch.empty_like(scores)
    if count:
        block, width, programs = _shape(count, experts)
        _backward_kernel[(programs,)](
            d_scores, d_probs, d_lse, scores, ids, d_logits, count, scaling,
            E=experts, K=ids.shape[1], RENORMALIZE=renormalize, BLOCK=block, WIDTH=width,
        )  # fmt: skip
    return d_logits
