"""Optional parts are probed for what is needed of them, and say why they are missing."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from isozyme.core import accelerators, transformer_engine
from isozyme.core.accelerators import apex_fused_adam, apex_rms_norm, te_fused_adam, te_rms_norm

PROBES = (apex_fused_adam, apex_rms_norm, te_fused_adam, te_rms_norm)


@pytest.fixture(autouse=True)
def _fresh_probes():
    """Nothing is remembered, neither a probe's answer nor a module called apex."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "apex"}
    for name in before:
        del sys.modules[name]
    for probe in PROBES:
        probe.cache_clear()
    yield
    for probe in PROBES:
        probe.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.parametrize(
    ("look", "needed"), [(apex_fused_adam, "apex.optimizers"), (apex_rms_norm, "apex.normalization")]
)
def test_the_unrelated_package_called_apex_is_not_taken_for_nvidia_s(monkeypatch, tmp_path, look, needed):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    probe = look()
    assert probe.part is None
    assert probe.why_not is not None
    assert needed in probe.why_not


def test_apex_is_not_imported_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for probe in (accelerators.apex_fused_adam(), accelerators.apex_rms_norm()):
        assert probe.part is None
        assert "CUDA" in str(probe.why_not)


def test_transformer_engine_s_reason_is_passed_on(monkeypatch):
    monkeypatch.setattr(transformer_engine, "why_not", lambda: "it is Tuesday")
    assert te_fused_adam().why_not == "it is Tuesday"
    assert te_rms_norm().why_not == "it is Tuesday"


def test_an_apex_without_its_compiled_norm_is_refused(monkeypatch, tmp_path):
    folder = tmp_path / "apex" / "normalization"
    folder.mkdir(parents=True)
    for path in (folder.parent, folder):
        (path / "__init__.py").write_text("")
    (folder / "fused_layer_norm.py").write_text("def fused_rms_norm_affine(*args):\n    raise RuntimeError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "fused_layer_norm_cuda" in str(apex_rms_norm().why_not)


def test_a_transformer_engine_without_the_norm_s_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(transformer_engine, "why_not", lambda: None)
    monkeypatch.setattr(transformer_engine, "kernels", lambda: SimpleNamespace(rmsnorm_fwd=None))
    assert te_rms_norm().why_not == "this Transformer Engine has no rmsnorm_bwd"
