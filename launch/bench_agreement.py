"""Agreement with a higher-precision reference, which decides whether an implementation is timed at all.

The reference computes expert by expert in fp64 on a CPU and in fp32 (without TF32) on a GPU, from the same
inputs; in fp64 everywhere if the inputs are fp64. The error of a quantity is ‖a - b‖ / ‖b‖ over all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from isozyme.core.config import Precision
from isozyme.launch.bench_problem import Outcome, Problem

BOUNDS: Mapping[Precision, float] = MappingProxyType(
    {
        "fp64": 1e-10,
        "fp32": 1e-4,
        "bf16": 2e-2,
        "fp8_rowwise": 0.2,
        "fp8_current": 0.2,
        "fp8_block": 0.2,
        "fp8_delayed": 0.2,
        "mxfp8": 0.2,
        "mxfp8_emulated": 0.2,
    }
)
"""Largest relative error of any quantity. A bf16 operand rounds by up to 2^-9 and errors of six products add
up; E4M3 and E5M2 operands round by up to 2^-4 and 2^-3. A lost expert is an error near 1."""


def reference_outcome(problem: Problem, *, with_router: bool = False) -> Outcome:
    """The right answer, by autograd on one expert after the other.

    Args:
        problem: what to compute.
        with_router: whether combine weights come from the problem's router (then `d_router` takes the place
            of `d_probs`) instead of being given.
    """
    on_cpu = problem.device.type == "cpu"
    wide = torch.float64 if on_cpu or problem.dtype == torch.float64 else torch.float32
    tokens, upstream = problem.tokens.detach().to(wide), problem.upstream.to(wide)
    router = problem.router.detach().to(wide).requires_grad_()
    routed_tokens = tokens.clone().requires_grad_()
    probs = problem.topk_probs.detach().to(wide)
    if with_router:
        logits = F.linear(routed_tokens, router) + problem.logit_offset.to(wide)
        probs = logits.gather(1, problem.topk_ids).softmax(dim=1)
    out, d_tokens = torch.zeros_like(tokens), torch.zeros_like(tokens)
    d_probs = torch.zeros_like(probs)
    d_gate_up, d_down = [], []
    for expert, (gate_up, down) in enumerate(zip(problem.weights.gate_up, problem.weights.down, strict=True)):
        token, slot = torch.where(problem.topk_ids == expert)
        leaves = [
            x.detach().to(wide).requires_grad_()
            for x in (tokens[token], probs[token, slot], gate_up.flatten(0, 1), down)
        ]
        result = _expert(*leaves)
        d_rows, d_weight, d_first, d_second = torch.autograd.grad(result, leaves, upstream[token])
        out.index_add_(0, token, result.detach())
        d_tokens.index_add_(0, token, d_rows)
        d_probs[token, slot] = d_weight
        d_gate_up.append(d_first)
        d_down.append(d_second)
    found = {"out": [out], "d_gate_up": d_gate_up, "d_down": d_down}
    if not with_router:
        return found | {"d_tokens": [d_tokens], "d_probs": [d_probs]}
    through_router, d_router = torch.autograd.grad(probs, [routed_tokens, router], d_probs)
    return found | {"d_tokens": [d_tokens + through_router], "d_router": [d_router]}


def _expert(rows: Tensor, probs: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(rows, gate_up).chunk(2, dim=1)
    return F.linear(F.silu(gate) * up, down) * probs[:, None]


def relative_errors(outcome: Outcome, reference: Outcome) -> dict[str, float]:
    """‖a - b‖ / ‖b‖ of every quantity of the reference; infinite where one is missing or not finite."""
    errors = {}
    for name, right in reference.items():
        given = outcome.get(name, ())
        if len(given) != len(right):
            errors[name] = math.inf
            continue
        difference, size = 0.0, 0.0
        for ours, theirs in zip(given, right, strict=True):
            if ours.numel() != theirs.numel():
                difference = math.inf
                break
            apart = ours.detach().to(theirs.dtype).reshape(theirs.shape) - theirs
            difference += float(torch.linalg.vector_norm(apart)) ** 2
            size += float(torch.linalg.vector_norm(theirs)) ** 2
        error = math.sqrt(difference) / math.sqrt(size) if size > 0 else math.sqrt(difference)
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def disagreement(errors: Mapping[str, float], precision: Precision) -> str | None:
    """What is wrong with an implementation, in words; None if all its errors are within the bound."""
    bound = BOUNDS[precision]
    wrong = {name: error for name, error in errors.items() if not error <= bound}
    if not wrong:
        return None
    listed = ", ".join(f"{name} {error:.2g}" for name, error in wrong.items())
    return f"disagrees with the reference: relative error of {listed}; the bound for {precision} is {bound:g}"
