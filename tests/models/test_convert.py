"""Conversion to and from Mixtral: exact both ways, and the same logits as transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isozyme.core.config import RunConfig
from isozyme.core.errors import CheckpointError, ConfigError
from isozyme.models.convert import from_mixtral, load_canonical, mixtral_config, to_mixtral
from isozyme.parallel.shard_spec import named_shards
from tests.models.common import random_batch, single_groups, tiny, whole


def _canonical(config: RunConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    shards = named_shards(whole(config, dtype))
    return {name: tensor.detach() for name, tensor, spec in shards if spec.kind == "parameter"}


@pytest.mark.parametrize("tied", [False, True])
def test_conversion_to_mixtral_and_back_changes_no_bit(tied: bool) -> None:
    config = tiny(pattern="M", tied=tied)
    ours = _canonical(config)
    back = from_mixtral(to_mixtral(ours, config), config)
    assert set(back) == set(ours)
    assert all(torch.equal(back[name], ours[name]) for name in ours)


def test_gate_is_w1_up_is_w3_and_down_is_w2() -> None:
    config = tiny(pattern="M")
    ours = _canonical(config)
    theirs = to_mixtral(ours, config)
    gate, up = ours["layers.1.moe.experts.2.gate_up"]
    expert = "model.layers.1.block_sparse_moe.experts.2"
    assert torch.equal(theirs[f"{expert}.w1.weight"], gate)
    assert torch.equal(theirs[f"{expert}.w3.weight"], up)
    assert torch.equal(theirs[f"{expert}.w2.weight"], ours["layers.1.moe.experts.2.down"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
def test_a_model_saved_by_transformers_has_the_same_logits_here(
    tied: bool, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    """fp64 is looser than one would expect, because transformers computes angles and norms in fp32."""
    transformers = pytest.importorskip("transformers")
    config = tiny(pattern="M", tied=tied, init_std=0.1)
    theirs = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **mixtral_config(config), attn_implementation="eager", experts_implementation="eager"
        )
    )
    theirs.to(dtype).eval().save_pretrained(tmp_path)
    ours = whole(config, dtype)
    load_canonical(ours, from_mixtral(load_file(tmp_path / "model.safetensors"), config), single_groups())
    batch = random_batch(length=24)
    with torch.no_grad():
        expected = theirs(batch.tokens).logits
        torch.testing.assert_close(ours.logits(batch), expected, rtol=tolerance, atol=tolerance)
    assert expected.std() > 0.05  # so that the tolerance means something


def test_a_model_saved_here_is_loaded_by_transformers_with_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = tiny(pattern="M", init_std=0.1, rope_theta=500.0, norm_eps=1e-3)
    ours = whole(config, torch.float32)
    save_file(
        to_mixtral(_canonical(config), config), tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    (tmp_path / "config.json").write_text(json.dumps(mixtral_config(config)))
    theirs = transformers.MixtralForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    batch = random_batch(length=24)
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(batch), theirs(batch.tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        tiny(pattern="DM"),
        tiny(pattern="M", moe=dataclasses.replace(tiny().model.moe, shared_ffn=8)),
        tiny(pattern="M", moe=dataclasses.replace(tiny().model.moe, capacity_factor=1.0)),
    ],
)
def test_what_a_mixtral_cannot_express_is_refused(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="converted"):
        to_mixtral({}, config)
    with pytest.raises(ConfigError, match="converted"):
        from_mixtral({}, config)
    with pytest.raises(ConfigError, match="converted"):
        mixtral_config(config)


def test_missing_and_unknown_tensors_are_named() -> None:
    config = tiny(pattern="M")
    tensors = _canonical(config)
    tensors["surplus"] = tensors.pop("head.weight")
    with pytest.raises(CheckpointError, match=r"1 missing \['head.weight'\], 1 unknown \['surplus'\]"):
        to_mixtral(tensors, config)


def test_loading_refuses_a_missing_or_misshapen_tensor() -> None:
    model, tensors = whole(tiny()), _canonical(tiny())
    with pytest.raises(CheckpointError, match=r"final_norm\.weight is \[3\], the model needs \[32\]"):
        load_canonical(model, tensors | {"final_norm.weight": torch.ones(3)}, single_groups())
    del tensors["head.weight"]
    with pytest.raises(CheckpointError, match=r"head\.weight is missing"):
        load_canonical(model, tensors, single_groups())
