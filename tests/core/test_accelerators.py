"""Optional parts are probed for what is needed of them, and say why they are missing."""

from __future__ import annotations

import pytest
import torch

from isozyme.core import accelerators, transformer_engine
from isozyme.core.accelerators import apex_fused_adam, te_fused_adam


@pytest.fixture(autouse=True)
def _fresh_probes():
    apex_fused_adam.cache_clear()
    te_fused_adam.cache_clear()
    yield
    apex_fused_adam.cache_clear()
    te_fused_adam.cache_clear()


def test_the_unrelated_package_called_apex_is_not_taken_for_nvidia_s(monkeypatch, tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    probe = apex_fused_adam()
    assert probe.part is None
    assert probe.why_not is not None
    assert "apex.optimizers" in probe.why_not


def test_apex_is_not_imported_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    probe = accelerators.apex_fused_adam()
    assert probe.part is None
    assert "CUDA" in str(probe.why_not)


def test_transformer_engine_s_reason_is_passed_on(monkeypatch):
    monkeypatch.setattr(transformer_engine, "why_not", lambda: "it is Tuesday")
    assert te_fused_adam().why_not == "it is Tuesday"
