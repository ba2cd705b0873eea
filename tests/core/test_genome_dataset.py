"""From a configuration to batches and a baseline that is scored on the labels of exactly those batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from isozyme.core.config import DataConfig
from isozyme.core.errors import ConfigError
from isozyme.core.genome.dataset import GenomeData
from isozyme.core.genome.store import Genome


def test_lambda_has_a_baseline_below_two_bits(tmp_path: Path) -> None:
    data = GenomeData.open(DataConfig(window=256), seed=0, cache=tmp_path)
    score = data.markov()
    batch = data.held_out_batch(range(len(data.held_out)))
    assert score.labels == int(batch.label_valid.sum()) == 4849
    assert score.order == 4
    assert score.bits_per_base == pytest.approx(1.9786, abs=5e-5)


def test_the_baseline_of_some_windows_is_scored_on_their_labels(tmp_path: Path) -> None:
    data = GenomeData.open(DataConfig(window=128, markov_order=3), seed=0, cache=tmp_path)
    chosen = [0, 1, 5]
    assert data.markov(chosen).labels == int(data.held_out_batch(chosen).label_valid.sum())
    assert data.markov(chosen).order == 3
    assert data.markov(chosen).bits_per_base != data.markov().bits_per_base


def test_the_configuration_reaches_every_part() -> None:
    genome = Genome.from_sequences({"a": "ACGT" * 100, "b": "GATTACA" * 20})
    config = DataConfig(window=32, overlap=8, held_out=0.2, split="tail", reverse_complement=False)
    data = GenomeData.of(genome, config, seed=7)
    assert data.split.held_out[-1].contig == 1
    assert (data.train.window, data.train.stride, data.train.seed) == (32, 24, 7)
    assert not data.train.both_strands
    assert data.train_batch([0, 1, 2]).tokens.shape == (3, 32)
    auto = GenomeData.of(genome, DataConfig(window=32, held_out=0.2), seed=7)
    assert [region.contig for region in auto.split.held_out] == [1]


def test_a_window_longer_than_the_held_out_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"held-out part has 4,850 of 48,502 bases.*4,850 < 8,192 \+ 1"):
        GenomeData.open(DataConfig(window=8192), seed=0, cache=tmp_path)
