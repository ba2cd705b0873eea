"""Other people's experts, bound to the same problem: Hugging Face's two, a torchtitan data flow, Liger's.

Hugging Face's and Liger's modules are the installed ones, given our weights. torchtitan's layer is not a
library, so its data flow is written out here from its description: sort, gather, three grouped GEMMs with a
plain SwiGLU, scatter-add.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isozyme.core.config import Precision
from isozyme.core.errors import BackendError, ConfigError, did_you_mean
from isozyme.launch.bench_problem import Built, Contender, Problem, three_stacks, two_stacks


def mixtral_experts(problem: Problem, implementation: str) -> Built:
    """`MixtralExperts` of the installed transformers (5 or later) with one of its implementations.

    Raises:
        BackendError: if transformers is missing or older.
    """
    modeling = optional_module("transformers.models.mixtral.modeling_mixtral", "transformers>=5")
    if not hasattr(modeling, "MixtralExperts"):
        raise BackendError("transformers has no MixtralExperts; it needs version 5 or later")
    config = _mixtral_config(problem)
    config._experts_implementation = implementation
    return _stacked(problem, modeling.MixtralExperts, config)


def liger_experts(problem: Problem) -> Built:
    """`LigerExperts` of the installed liger-kernel (0.8 or later): Triton grouped GEMMs that gather rows.

    Raises:
        BackendError: if liger-kernel is missing or older, or the problem is not on CUDA.
    """
    swiglu = optional_module("liger_kernel.transformers.swiglu", "liger-kernel>=0.8")
    if not hasattr(swiglu, "LigerFusedMoEFunction"):
        raise BackendError("this liger-kernel has no fused MoE; 0.8 and later have one")
    if problem.device.type != "cuda":
        raise BackendError(f"Liger's kernels run on CUDA, not on {problem.device.type}")
    return _stacked(problem, swiglu.LigerExperts, _mixtral_config(problem))


def torchtitan_data_flow(problem: Problem) -> Built:
    """Sort by expert, gather rows, grouped GEMMs for gate, up and down, weights last, scatter-add.

    Raises:
        BackendError: in fp64, which torch's grouped GEMM does not multiply.
    """
    if problem.dtype == torch.float64:
        raise BackendError("torch's grouped_mm does not multiply float64")
    stacked, down_weights = problem.weights.stacked_leaves()
    gate_weights, up_weights = (nn.Parameter(half.contiguous()) for half in stacked.detach().chunk(2, dim=1))
    ids, probs, shape = problem.topk_ids, problem.topk_probs, problem.shape

    def forward() -> Tensor:
        order = torch.argsort(ids.flatten(), stable=True)
        bins = ids.flatten().float() if ids.device.type == "cpu" else ids.flatten().int()
        counts = torch.histc(bins, bins=shape.num_experts, min=0, max=shape.num_experts - 1)
        ends = counts.cumsum(0).to(torch.int32)
        index = (order // shape.topk)[:, None].expand(-1, shape.hidden)
        rows = problem.tokens.gather(0, index)
        gate = F.grouped_mm(rows, gate_weights.mT, offs=ends)
        up = F.grouped_mm(rows, up_weights.mT, offs=ends)
        result = F.grouped_mm(F.silu(gate) * up, down_weights.mT, offs=ends)
        weighted = (result.float() * probs.flatten()[order][:, None]).to(result.dtype)
        return torch.zeros_like(problem.tokens).scatter_add(0, index, weighted)

    return Built(
        forward=forward,
        inputs={"d_tokens": problem.tokens, "d_probs": probs},
        weights=[gate_weights, up_weights, down_weights],
        weight_gradients=three_stacks,
    )


PEERS: Mapping[str, Callable[[Problem], Built]] = MappingProxyType(
    {
        "hf-eager": lambda problem: mixtral_experts(problem, "eager"),
        "hf-grouped_mm": lambda problem: mixtral_experts(problem, "grouped_mm"),
        "torchtitan-like": torchtitan_data_flow,
        "liger": liger_experts,
    }
)
"""All peers by name."""


def peer_contenders(names: Sequence[str], precision: Precision) -> list[Contender]:
    """The peers that the command line names, in a precision that is a dtype.

    Raises:
        ConfigError: if a name is unknown.
    """
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"unknown peer: --peers={name}. {did_you_mean(name, PEERS)}")
    return [Contender(name=name, kind="peer", precision=precision, build=PEERS[name]) for name in names]


def optional_module(name: str, package: str) -> Any:
    """An optional import.

    Raises:
        BackendError: with the reason, if it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise BackendError(f"not installed: {package} ({type(error).__name__}: {error})") from error


def _mixtral_config(problem: Problem) -> Any:
    shape = problem.shape
    return optional_module("transformers", "transformers>=5").MixtralConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.topk,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_hidden_layers=1,
    )


def _stacked(problem: Problem, kind: Any, config: Any) -> Built:
    """A module with `gate_up_proj` and `down_proj` that is called with tokens, ids and weights."""
    with torch.device("meta"):
        module = kind(config)
    module.gate_up_proj, module.down_proj = problem.weights.stacked_leaves()
    module.train()

    def forward() -> Tensor:
        result: Tensor = module(problem.tokens, problem.topk_ids, problem.topk_probs)
        return result

    return Built(
        forward=forward,
        inputs={"d_tokens": problem.tokens, "d_probs": problem.topk_probs},
        weights=[module.gate_up_proj, module.down_proj],
        weight_gradients=two_stacks,
    )
