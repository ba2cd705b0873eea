"""Transformer Engine is imported late, and whatever its import raises becomes a reason."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from isozyme.core import transformer_engine
from isozyme.core.errors import BackendError
from isozyme.core.transformer_engine import (
    FUSED_GROUPED_MLP_SWITCH,
    cudnn_of_torch,
    fused_switch_is_set,
    load,
    why_not,
)


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """A package called transformer_engine whose `pytorch` runs the given source, on a machine with CUDA."""

    def install(source: str) -> None:
        package = tmp_path / "transformer_engine"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "pytorch.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    before = {name: module for name, module in sys.modules.items() if name.startswith("transformer_engine")}
    for name in before:
        del sys.modules[name]
    transformer_engine._attempt.cache_clear()
    monkeypatch.setenv(FUSED_GROUPED_MLP_SWITCH, "")  # so that it is restored afterwards
    monkeypatch.delenv(FUSED_GROUPED_MLP_SWITCH)
    yield install
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]
    sys.modules.update(before)
    transformer_engine._attempt.cache_clear()


@pytest.mark.parametrize(
    "error",
    ["ImportError", "ModuleNotFoundError", "OSError", "FileNotFoundError", "RuntimeError", "AssertionError"],
)
def test_every_way_in_which_the_import_fails_becomes_a_reason(pretend, error):
    pretend(f"raise {error}('libcudnn is missing')")
    reason = why_not()
    assert reason is not None
    assert error in reason
    assert "libcudnn is missing" in reason
    with pytest.raises(BackendError, match="libcudnn is missing"):
        load()


def test_an_error_of_another_kind_is_not_hidden(pretend):
    pretend("1 / 0")
    with pytest.raises(ZeroDivisionError):
        why_not()


def test_the_module_is_returned_once_it_can_be_imported(pretend):
    pretend("loaded = True")
    assert why_not() is None
    module = load()
    assert isinstance(module, ModuleType)
    assert module.loaded


SEEN = f"import os; seen = os.environ.get({FUSED_GROUPED_MLP_SWITCH!r})"


def test_the_switch_of_the_fused_kernel_is_set_before_the_import(pretend):
    pretend(SEEN)
    assert fused_switch_is_set()
    assert load().seen == "1"
    assert fused_switch_is_set()


def test_a_switch_that_the_user_turned_off_stays_off(pretend, monkeypatch):
    monkeypatch.setenv(FUSED_GROUPED_MLP_SWITCH, "0")
    pretend(SEEN)
    assert not fused_switch_is_set()
    assert load().seen == "0"


def test_an_import_without_the_switch_is_not_taken_for_one_with_it(pretend):
    pretend(SEEN)
    importlib.import_module("transformer_engine.pytorch")  # by somebody else, before us
    assert load().seen is None
    assert not fused_switch_is_set()


def test_without_cuda_nothing_is_imported(pretend, monkeypatch):
    pretend("raise SystemExit('was imported')")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = why_not()
    assert reason is not None
    assert "CUDA device" in reason


def test_an_absent_package_is_said_to_be_absent(monkeypatch):
    monkeypatch.setattr(transformer_engine.importlib.util, "find_spec", lambda name: None)
    assert why_not() == "transformer_engine is not installed"


def test_its_norm_saves_what_its_backward_takes(monkeypatch):
    """With the functions of the compiled module written out: the order of arguments, and both gradients."""

    def forward(x, weight, eps, out, quantizer, dtype, sm_margin, zero_centered):
        assert (x.dim(), out, quantizer, dtype, sm_margin, zero_centered) == (2, None, None, 7, 0, False)
        scale = (x.square().mean(1) + eps).rsqrt()
        return x * scale[:, None] * weight, None, scale

    def backward(grad, x, scale, weight, sm_margin, zero_centered):
        assert (grad.is_contiguous(), sm_margin, zero_centered) == (True, 0, False)
        normed, inner = x * scale[:, None], grad * weight
        of_x = scale[:, None] * (inner - normed * (inner * normed).mean(1, keepdim=True))
        return of_x, (grad * normed).sum(0)

    dtypes = SimpleNamespace(kFloat32=7, kFloat16=8, kBFloat16=9)
    compiled = SimpleNamespace(rmsnorm_fwd=forward, rmsnorm_bwd=backward, DType=dtypes)
    monkeypatch.setattr(transformer_engine, "kernels", lambda: compiled)
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.rand(8, requires_grad=True)
    ours = transformer_engine.rms_norm(x, weight, 1e-5)
    theirs = torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    upstream = torch.randn(3, 2, 8).transpose(0, 1)
    found, expected = (torch.autograd.grad(y, (x, weight), upstream) for y in (ours, theirs))
    for one, other in zip((ours, *found), (theirs, *expected), strict=True):
        torch.testing.assert_close(one, other)


def test_the_cudnn_of_torch_is_found_among_the_loaded_libraries(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r--p 00000000 08:01 11  /usr/lib/libcuda.so.1\n"
        "7f02-7f03 r-xp 00000000 00:00 0\n"
        "7f04-7f05 r--p 00000000 08:01 12  /opt/env/nvidia/cudnn/lib/libcudnn.so.9\n"
    )
    assert cudnn_of_torch(maps) == "/opt/env/nvidia/cudnn/lib"


def test_a_cudnn_that_the_user_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine, "cudnn_of_torch", lambda: "/torch/lib")
    monkeypatch.delenv("CUDNN_PATH", raising=False)
    monkeypatch.setenv("CUDNN_HOME", "/mine")
    with transformer_engine._with_cudnn_of_torch():
        assert os.environ["CUDNN_HOME"] == "/mine"
    monkeypatch.delenv("CUDNN_HOME")
    with transformer_engine._with_cudnn_of_torch():
        assert os.environ["CUDNN_HOME"] == "/torch/lib"
    assert "CUDNN_HOME" not in os.environ
