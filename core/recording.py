"""The rules of recorded steps (`train.cuda_graph`): which settings let a step run without the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isozyme.core.errors import Rules

if TYPE_CHECKING:
    from isozyme.core.config import RunConfig


def recording_problems(config: RunConfig) -> list[str]:
    """Why the step of a run cannot be recorded in a CUDA graph, one message a rule; empty if it can.

    What only the machine or the built model says (the backend that `auto` takes) is checked there.
    """
    rules = Rules("train.cuda_graph")
    moe, layout = config.model.moe, config.layout
    on, off = "train.cuda_graph=true", "Set train.cuda_graph=false"
    rules.check(config.device != "cpu", f"CUDA graphs need CUDA: {on}, device=cpu. {off}.")
    rules.check(
        layout.pp == 1,
        f"stages of a pipeline wait for each other between micro-batches: {on}, layout.pp={layout.pp}. "
        f"{off}, or use layout.pp=1.",
    )
    rules.check(
        not config.optim.overlap_gather,
        f"the recorded step begins with whole parameters: {on}, optim.overlap_gather=true. Set one of them "
        "to false.",
    )
    if "M" not in config.model.layer_kinds():
        return rules.broken
    fixed = moe.pad_to_capacity or (moe.dispatcher == "allgather" and moe.equal_tokens)
    rules.check(
        layout.ep * layout.etp == 1 or fixed,
        "dispatch must not ask the host how many rows it receives: "
        f"{on}, layout.ep={layout.ep}, layout.etp={layout.etp}, model.moe.dispatcher={moe.dispatcher}, "
        f"model.moe.equal_tokens={str(moe.equal_tokens).lower()}. Set model.moe.dispatcher=allgather and "
        "model.moe.equal_tokens=true, or model.moe.pad_to_capacity=true.",
    )
    rules.check(
        moe.experts in ("auto", "grouped_mm_fused", "grouped_fp8"),
        f"the experts' backend must not read row counts on the host: {on}, model.moe.experts={moe.experts}. "
        "Set model.moe.experts=grouped_mm_fused (or grouped_fp8, with precision=fp8_rowwise).",
    )
    rules.check(
        config.precision in ("fp64", "fp32", "bf16", "fp8_rowwise"),
        f"experts in this precision read row counts on the host: {on}, precision={config.precision}. Use "
        "precision=bf16 or fp8_rowwise, or train.cuda_graph=false.",
    )
    return rules.broken
