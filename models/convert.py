"""Canonical tensors ⇄ the names of a Hugging Face Mixtral on disk, and canonical tensors → a model.

On disk an expert has `w1` (gate), `w3` (up) and `w2` (down), each `[out, in]`, whatever a version of
transformers fuses in memory. Channels are paired for rotary embeddings as here, so no weight is permuted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from isozyme.core.config import ModelConfig, RunConfig
from isozyme.core.errors import CheckpointError, Rules
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import named_shards

_LAYER_NAMES = (
    ("attention_norm.weight", "input_layernorm.weight"),
    ("attention.q.weight", "self_attn.q_proj.weight"),
    ("attention.k.weight", "self_attn.k_proj.weight"),
    ("attention.v.weight", "self_attn.v_proj.weight"),
    ("attention.output.weight", "self_attn.o_proj.weight"),
    ("mlp_norm.weight", "post_attention_layernorm.weight"),
    ("moe.router.weight", "block_sparse_moe.gate.weight"),
)


def mixtral_problems(model: ModelConfig) -> list[str]:
    """Why a Mixtral checkpoint cannot express `model`, one message a setting; empty if it can."""
    rules, router = Rules("model"), model.moe.router
    expected: tuple[tuple[str, object, object], ...] = (
        ("model.moe.shared_ffn", model.moe.shared_ffn, 0),
        ("model.moe.router.score", router.score, "softmax"),
        ("model.moe.router.renormalize", router.renormalize, True),
        ("model.moe.router.scaling_factor", router.scaling_factor, 1.0),
        ("model.moe.router.num_groups", router.num_groups, 1),
        ("model.moe.router.expert_bias_rate", router.expert_bias_rate, 0.0),
        ("model.moe.capacity_factor", model.moe.capacity_factor, None),
    )
    rules.check(
        set(model.layer_kinds()) == {"M"},
        f"every layer of a Mixtral has experts: model.pattern={model.pattern!r}. Only 'M' can be converted.",
    )
    rules.check(
        router.aux_scope != "global_lagged" or router.aux_loss == 0,
        "a Mixtral keeps no counts of the step before: model.moe.router.aux_scope=global_lagged. "
        "It cannot be converted.",
    )
    for name, value, needed in expected:
        rules.check(
            value == needed, f"a Mixtral has {name}={needed}: {name}={value}. It cannot be converted."
        )
    return rules.broken


def mixtral_config(config: RunConfig) -> dict[str, Any]:
    """The content of the checkpoint's `config.json`.

    Raises:
        ConfigError: if a Mixtral cannot express the model.
    """
    _require_mixtral(config)
    model = config.model
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden,
        "intermediate_size": model.moe.ffn,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": config.data.window,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": model.tied,
        "num_local_experts": model.moe.router.num_experts,
        "num_experts_per_tok": model.moe.router.topk,
        "router_aux_loss_coef": model.moe.router.aux_loss,
    }


def to_mixtral(tensors: Mapping[str, Tensor], config: RunConfig) -> dict[str, Tensor]:
    """Rename (and cut `gate_up` in two) from canonical names to those of a Mixtral on disk; copies nothing.

    Args:
        tensors: every weight of the whole model, unsharded, by canonical name.
        config: the run the weights belong to.

    Raises:
        ConfigError: if a Mixtral cannot express the model.
        CheckpointError: if a tensor is missing or has no place in the model.
    """
    _require_mixtral(config)
    names = dict(_plain_names(config.model))
    experts = dict(_expert_names(config.model))
    _require_names(tensors, {*names, *(f"{name}.{part}" for name in experts for part in ("gate_up", "down"))})
    out = {theirs: tensors[ours] for ours, theirs in names.items()}
    for ours, theirs in experts.items():
        gate, up = tensors[f"{ours}.gate_up"]
        out |= {f"{theirs}.w1.weight": gate, f"{theirs}.w3.weight": up}
        out[f"{theirs}.w2.weight"] = tensors[f"{ours}.down"]
    return out


def from_mixtral(tensors: Mapping[str, Tensor], config: RunConfig) -> dict[str, Tensor]:
    """The inverse of `to_mixtral`.

    Args:
        tensors: every tensor of the checkpoint's safetensors files, by its name on disk.
        config: the run whose model the checkpoint fits.

    Raises:
        ConfigError: if a Mixtral cannot express the model.
        CheckpointError: if a tensor is missing or has no place in the model.
    """
    _require_mixtral(config)
    names = dict(_plain_names(config.model))
    experts = dict(_expert_names(config.model))
    parts = ("w1", "w2", "w3")
    _require_names(
        tensors, {*names.values(), *(f"{name}.{part}.weight" for name in experts.values() for part in parts)}
    )
    out = {ours: tensors[theirs] for ours, theirs in names.items()}
    for ours, theirs in experts.items():
        gate, down, up = (tensors[f"{theirs}.{part}.weight"] for part in parts)
        out |= {f"{ours}.gate_up": torch.stack((gate, up)), f"{ours}.down": down}
    return out


def load_canonical(module: nn.Module, tensors: Mapping[str, Tensor], groups: ProcessGroups) -> None:
    """Copy this rank's part of canonical tensors into a model's parameters, in place.

    Args:
        module: a model, or a chunk of it.
        tensors: unsharded tensors by canonical name; those of other chunks are ignored, and a buffer that is
            not among them keeps its value.
        groups: this rank's communicators.

    Raises:
        CheckpointError: if a parameter is missing or has another shape.
    """
    with torch.no_grad():
        for name, target, spec in named_shards(module):
            if spec.kind == "buffer" and name not in tensors:
                continue
            if name not in tensors:
                raise CheckpointError(
                    f"every parameter must be given: {name} is missing. Give all the weights."
                )
            source = tensors[name]
            if tuple(source.shape) != spec.global_shape:
                raise CheckpointError(
                    f"a tensor must have the model's shape: {name} is {list(source.shape)}, "
                    f"the model needs {list(spec.global_shape)}. Use the configuration it was saved with."
                )
            target.copy_(source[spec.slices(groups.topology, groups.rank)])


def _plain_names(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """(ours, theirs) of the tensors that are only renamed."""
    yield "embedding.weight", "model.embed_tokens.weight"
    for index in range(model.num_layers):
        for ours, theirs in _LAYER_NAMES:
            yield f"layers.{index}.{ours}", f"model.layers.{index}.{theirs}"
    yield "final_norm.weight", "model.norm.weight"
    if not model.tied:
        yield "head.weight", "lm_head.weight"


def _expert_names(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """(ours, theirs) of each expert, without the part."""
    for index in range(model.num_layers):
        for expert in range(model.moe.router.num_experts):
            yield (
                f"layers.{index}.moe.experts.{expert}",
                f"model.layers.{index}.block_sparse_moe.experts.{expert}",
            )


def _require_mixtral(config: RunConfig) -> None:
    rules = Rules(config.name)
    rules.extend(mixtral_problems(config.model))
    rules.raise_if_broken()


def _require_names(tensors: Mapping[str, Tensor], needed: set[str]) -> None:
    missing, unknown = sorted(needed - set(tensors)), sorted(set(tensors) - needed)
    if missing or unknown:
        raise CheckpointError(
            f"a checkpoint must hold exactly the model's tensors: {len(missing)} missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}. Use the configuration that it was saved with."
        )
