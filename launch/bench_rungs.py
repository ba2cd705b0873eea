"""The rungs of an ablation: the layer with its router, put together from parts that can be had in two ways.

This composition exists for the benchmark alone; the product has no such switches. `plain` is what one writes
first in PyTorch, the other way is the package's own operation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from isozyme.core.config import Precision, RouterConfig
from isozyme.launch.bench_problem import Built, Contender, Problem, parameters_by_expert
from isozyme.moe.dispatch_local import LocalDispatcher
from isozyme.moe.experts.experts import Experts
from isozyme.moe.experts.grouped_mm import grouped_linear
from isozyme.moe.kernels.router_topk import router_topk
from isozyme.moe.kernels.row_map import row_map
from isozyme.moe.kernels.rows import gather_rows, scatter_rows_and_probs
from isozyme.moe.kernels.swiglu import swiglu_prob, weighted_swiglu
from isozyme.moe.scores import combine_weights, log_scores, select_experts, selection_scores
from isozyme.moe.types import Routing


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Which way each part is done."""

    grouped_gemm: bool = False
    """One GEMM for all experts, or a loop over them."""
    fused_permute: bool = False
    """Counting sort, scatter and gather-sum kernels, or sort, indexing and its autograd."""
    fused_swiglu: bool = False
    """SwiGLU times the weight in one pass, or in a few."""
    backend: str | None = None
    """A backend of the registry instead of the three above."""
    fused_router: bool = False
    """Softmax, top-k and weights in one pass, or the model's router."""


def rung(name: str, composition: Composition, precision: Precision) -> Contender:
    """A contender whose forward starts at the router."""

    def build(problem: Problem) -> Built:
        experts = None
        if composition.backend is not None:
            experts = Experts.over(problem.weights, backend=composition.backend, precision=precision)
        return _bind(problem, composition, experts)

    return Contender(name=name, kind="rung", precision=precision, build=build, includes_router=True)


def _bind(problem: Problem, composition: Composition, experts: Experts | None) -> Built:
    dispatcher = LocalDispatcher()
    all_kept = torch.ones_like(problem.topk_ids, dtype=torch.bool)

    def forward() -> Tensor:
        ids, probs = _route(problem, composition.fused_router)
        if experts is None:
            return _experts(problem, composition, ids, probs, all_kept)
        routing = Routing(
            topk_ids=ids, topk_probs=probs, kept=all_kept, num_experts=problem.shape.num_experts
        )
        arrival = dispatcher.send(problem.tokens, routing)
        result: Tensor = dispatcher.bring_back(experts.on_arrival(arrival), arrival)
        return result

    return Built(
        forward=forward,
        inputs={"d_tokens": problem.tokens, "d_router": problem.router},
        weights=[*problem.weights.gate_up, *problem.weights.down],
        weight_gradients=parameters_by_expert,
    )


def _route(problem: Problem, fused: bool) -> tuple[Tensor, Tensor]:
    """Expert ids and combine weights; the offset makes the choice that of the problem, gradients included."""
    wide = problem.topk_probs.dtype
    logits = F.linear(problem.tokens.to(wide), problem.router.to(wide)) + problem.logit_offset
    if fused:
        everywhere = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
        _, ids, probs, _, _ = router_topk(logits, everywhere, 1, problem.shape.topk, True, 1.0)
        return ids, probs
    config = RouterConfig(num_experts=problem.shape.num_experts, topk=problem.shape.topk)
    log_score = log_scores(logits, config.score)
    ids = select_experts(selection_scores(log_score), config)
    return ids, combine_weights(log_score, ids, config)


def _experts(
    problem: Problem, composition: Composition, ids: Tensor, probs: Tensor, all_kept: Tensor
) -> Tensor:
    shape, dtype = problem.shape, problem.dtype
    gate_up, down = problem.weights.stacks()
    slot_row = None
    if composition.fused_permute:
        slot_row, _, ends = row_map(ids, all_kept, shape.num_experts, 1)
        rows, weights = scatter_rows_and_probs(problem.tokens, probs, slot_row, shape.rows)
    else:
        by_expert, order = torch.sort(ids.flatten(), stable=True)
        ends = torch.bincount(by_expert, minlength=shape.num_experts).cumsum(0).to(torch.int32)
        rows = problem.tokens[order // shape.topk]
        weights = probs.flatten()[order]
    hidden = _multiply(rows, gate_up, ends, composition.grouped_gemm)
    if composition.fused_swiglu:
        middle = swiglu_prob(hidden, weights)
    else:
        middle = weighted_swiglu(hidden, weights, dtype)
    result = _multiply(middle, down, ends, composition.grouped_gemm)
    if slot_row is not None:
        return gather_rows(result, slot_row)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(shape.rows, device=order.device))
    by_token = result[places].view(shape.tokens, shape.topk, shape.hidden)
    return by_token.sum(dim=1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)


def _multiply(rows: Tensor, stack: Tensor, ends: Tensor, grouped: bool) -> Tensor:
    if grouped:
        return grouped_linear(rows, stack, ends)
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    pieces = [F.linear(x, w) for x, w in zip(rows.split(counts), stack.unbind(0), strict=True)]
    return torch.cat(pieces)


def chained(precision: Precision, low_precision: str | None) -> list[Contender]:
    """Every part added to those before it, from a plain loop to what the package runs.

    Args:
        precision: of the plain rungs.
        low_precision: that of the last rung, by Transformer Engine (row-wise FP8: by `grouped_fp8`); None
            leaves it out.
    """
    loop = Composition()
    grouped = replace(loop, grouped_gemm=True)
    permute = replace(grouped, fused_permute=True)
    swiglu = replace(permute, fused_swiglu=True)
    node = Composition(backend="grouped_mm_fused")
    router = replace(node, fused_router=True)
    rungs = [
        rung("loop", loop, precision),
        rung("+ grouped GEMM", grouped, precision),
        rung("+ fused permute", permute, precision),
        rung("+ fused SwiGLU·prob", swiglu, precision),
        rung("+ one node, nothing kept twice", node, precision),
        rung("+ one-pass router", router, precision),
    ]
    if low_precision is not None:
        backend = "grouped_fp8" if low_precision == "fp8_rowwise" else "te"
        low = Composition(backend=backend, fused_router=True)
        rungs.append(rung(f"{low_precision} by {backend}", low, low_precision))  # type: ignore[arg-type]
    return rungs


def leave_one_out(precision: Precision) -> list[Contender]:
    """All four fused parts, as separate operations, and each of them taken away alone."""
    whole = Composition(grouped_gemm=True, fused_permute=True, fused_swiglu=True, fused_router=True)
    return [
        rung("all parts", whole, precision),
        rung("without grouped GEMM", replace(whole, grouped_gemm=False), precision),
        rung("without fused permute", replace(whole, fused_permute=False), precision),
        rung("without fused SwiGLU·prob", replace(whole, fused_swiglu=False), precision),
        rung("without one-pass router", replace(whole, fused_router=False), precision),
    ]
