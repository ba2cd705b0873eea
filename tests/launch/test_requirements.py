"""What a run needs and a machine lacks is said in full, before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isozyme.core.errors import BackendError, ConfigError
from isozyme.launch.requirements import Machine, check, output_folder
from tests.launch.tiny import tiny


def machine(devices: int = 0, capability: tuple[int, int] = (9, 0), te: str | None = "no TE here") -> Machine:
    return Machine(
        cuda_devices=devices,
        no_cuda="no CUDA here",
        capability=lambda: capability,
        no_transformer_engine=lambda: te,
        no_fused_adam={"te": lambda: te, "apex": lambda: "no apex here"},
    )


def refusal(machine: Machine, *overrides: str) -> str:
    with pytest.raises(BackendError) as raised:
        check(tiny(*overrides), machine)
    return str(raised.value)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_a_cpu_computes_in_plain_dtypes(precision: str, dtype: torch.dtype) -> None:
    choice = check(tiny("device=auto", f"precision={precision}"), machine())
    assert (choice.device, choice.dtype) == ("cpu", dtype)
    assert "no CUDA here" in choice.why_device


def test_auto_takes_cuda_only_if_every_rank_gets_a_device() -> None:
    one = tiny("device=auto")
    two = tiny("device=auto", "layout.dp=2", "layout.ep=2")
    assert check(one, machine(1)).device == "cuda"
    choice = check(two, machine(1))
    assert choice.device == "cpu"
    assert "too few for 2 ranks" in choice.why_device
    assert check(two, machine(1), world_size=2, local_world_size=1).device == "cuda"


def test_cuda_is_refused_where_ranks_outnumber_devices() -> None:
    assert "2 ranks on this host, 1 devices" in refusal(machine(1), "device=cuda", "layout.dp=2")
    assert "no CUDA here" in refusal(machine(), "device=cuda")


@pytest.mark.parametrize("precision", ["mxfp8", "fp8_current", "fp8_block", "fp8_delayed"])
def test_no_cpu_computes_in_eight_bits(precision: str) -> None:
    assert f"no CPU computes in {precision}" in refusal(machine(), f"precision={precision}")


@pytest.mark.parametrize(
    ("precision", "capability", "needed"),
    [
        ("mxfp8", (9, 0), "10.0 to 11.x (Blackwell)"),
        ("mxfp8", (12, 0), "10.0 to 11.x (Blackwell)"),
        ("fp8_block", (8, 9), "9.0 (Hopper)"),
        ("fp8_current", (8, 0), "8.9 (Ada)"),
    ],
)
def test_a_precision_names_the_architecture_that_it_needs(
    precision: str, capability: tuple[int, int], needed: str
) -> None:
    text = refusal(machine(1, capability), "device=cuda", f"precision={precision}")
    assert needed in text
    assert f"this GPU has {capability[0]}.{capability[1]}" in text
    assert "no TE here" in text


def test_row_wise_fp8_needs_hopper_and_no_transformer_engine_and_a_cpu_emulates_it() -> None:
    asked = ("precision=fp8_rowwise", "model.hidden=32", "model.moe.ffn=32")
    assert check(tiny(*asked), machine()).device == "cpu"
    for capability in ((8, 9), (10, 0)):
        text = refusal(machine(1, capability), "device=cuda", *asked)
        assert "9.x (Hopper), and this GPU has" in text
        assert "no TE here" not in text
    assert "Hopper" not in refusal(machine(1, (9, 0)), "device=cuda", "optim.implementation=apex", *asked)


def test_a_fitting_architecture_is_not_complained_about() -> None:
    text = refusal(machine(1, (10, 0), te=None), "device=cuda", "precision=mxfp8")
    assert "SM100" not in text  # what is left is that no expert backend multiplies in it


def test_a_named_backend_that_is_not_there_is_refused_with_its_reason() -> None:
    assert "float64" in refusal(machine(), "precision=fp64", "model.moe.experts=grouped_mm")
    text = refusal(machine(1), "device=cuda", "optim.implementation=apex")
    assert "no apex here" in text
    assert "device=cpu" in refusal(machine(), "optim.implementation=te")
    text = refusal(machine(), "model.attention.kernel=flash", "model.norm=apex")
    assert "lacks 2 things" in text
    assert "model.attention.kernel=flash; it runs on NVIDIA GPUs: device=cpu" in text
    assert "model.norm=apex" in text


def test_everything_that_is_lacking_is_listed_together() -> None:
    text = refusal(machine(), "device=cuda", "precision=mxfp8", "optim.implementation=te", "layout.dp=4")
    assert "lacks" in text
    assert text.count("\n  - ") >= 3


def test_a_world_of_another_size_than_the_layout_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match="need 1 ranks, but there are 3"):
        check(tiny(), machine(), world_size=3)


def test_layouts_that_the_model_cannot_run_are_refused_with_broken_rules() -> None:
    config = tiny()
    wrong = replace(config, train=replace(config.train, steps=0), optim=replace(config.optim, lr=-1.0))
    with pytest.raises(ConfigError) as raised:
        check(replace(wrong, device="cuda"), machine())
    assert "train.steps must be at least 1" in str(raised.value)
    assert "optim.lr must be positive" in str(raised.value)
    assert "no CUDA here" in str(raised.value)


def test_an_output_folder_is_made_and_leaves_no_trace_of_the_check(tmp_path: Path) -> None:
    folder = output_folder(replace(tiny(), out=str(tmp_path / "a" / "b")))
    assert folder.is_dir()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("below", ["file/x", "file"])
def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be writable: out="):
        output_folder(replace(tiny(), out=str(tmp_path / below)))


def test_options_of_the_experts_that_their_backend_lacks_are_refused_with_the_rest() -> None:
    asked = ("model.moe.delay_wgrad=true", "model.moe.cache_quantized_weights=true")
    emulated = ("model.moe.experts=mxfp8_emulated", "precision=mxfp8_emulated", "optim.implementation=te")
    found = refusal(machine(), *asked, *emulated)
    assert "lacks 2 things" in found
    assert all(key in found for key in ("delay_wgrad=false", "cache_quantized_weights=false", "optimiser te"))
