"""Presets are legal, have the sizes that they claim, and are found by name."""

from __future__ import annotations

import pytest

from isozyme.core.config import DataConfig, RunConfig
from isozyme.core.errors import ConfigError
from isozyme.models.count import count_parameters
from isozyme.models.presets import PRESETS, preset
from tests.models.common import random_batch, whole


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_legal_run(name: str) -> None:
    RunConfig(model=PRESETS[name].model, data=DataConfig(window=PRESETS[name].window)).validate()


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("genomic_small", 57e6, 19e6), ("genomic_1b", 1.1e9, 160e6), ("mixtral_8x7b", 46.7e9, 12.9e9)],
)
def test_presets_have_the_sizes_that_they_claim(name: str, total: float, active: float) -> None:
    count = count_parameters(preset(name).model)
    assert count.total == pytest.approx(total, rel=0.03)
    assert count.active == pytest.approx(active, rel=0.03)


def test_the_sanity_model_runs_on_a_cpu() -> None:
    sanity = preset("sanity")
    assert (sanity.model.hidden, sanity.model.num_layers, sanity.window) == (384, 2, 256)
    loss = whole(RunConfig(model=sanity.model))(random_batch(1, sanity.window, vocab=256)).loss_sum
    assert 3 < loss.item() / sanity.window < 8  # near ln 256 = 5.5 before training


def test_a_misspelt_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'mixtral_8x7b'"):
        preset("mixtral_8x7")
