"""Training the same steps at several layouts, in real processes."""

import json
from pathlib import Path

import pytest

from isozyme.core.errors import ConfigError
from isozyme.launch import bench_layouts as bench_layouts_module
from isozyme.launch.bench import main
from isozyme.launch.bench_layouts import _compared, layout_runs

SMALL = ["data.window=32", "train.global_batch=4", "train.micro_batch=2", "optim.warmup_steps=2"]


@pytest.mark.slow
def test_two_ranks_train_as_one_and_a_run_that_does_not_is_failed(
    tmp_path: Path,
) -> None:
    layouts = ["dp=1 ep=1", "dp=2 ep=2", "dp=1 ep=1 optim.lr=0.02"]
    command = ["layouts", "L0_sanity", *SMALL, "--layouts", *layouts, "--steps", "5", "--tolerance", "1e-4"]
    assert main([*command, "--out", str(tmp_path)]) == 1
    rows = json.loads((tmp_path / "layouts.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["ok", "ok", "FAILED"]
    assert [row["ranks"] for row in rows] == [1, 2, 1]
    assert rows[0]["difference"] == 0.0
    assert rows[1]["difference"] < 1e-4
    assert rows[1]["peak_bytes"] > 0
    assert "the tolerance is 0.01%" in rows[2]["reason"]


def test_words_that_name_no_axis_are_settings_of_their_run() -> None:
    first, second = layout_runs("L0_sanity", ["dp=2 ep=2 precision=bf16", "dp=1 ep=1 optim.lr=0.5"], [], 8)
    assert (str(first.config.layout), first.config.precision) == ("dp=2 ep=2", "bf16")
    assert (second.config.precision, second.config.optim.lr) == ("fp32", 0.5)


def test_axes_that_are_not_named_have_size_one_whatever_the_recipe_says() -> None:
    texts = ["dp=1", "tp=2", "cp=2 ep=2", "precision=bf16", "order=tp-cp-dp-ep-pp"]
    layouts = [run.config.layout for run in layout_runs("L0_sanity", texts, [], 8)]
    assert [str(layout) for layout in layouts] == ["dp=1", "tp=2 dp=1", "cp=2 dp=1 ep=2", *2 * ["dp=2 ep=2"]]


def test_a_layout_that_breaks_a_rule_is_refused_before_any_run() -> None:
    with pytest.raises(ConfigError, match="tp"):
        layout_runs("L0_sanity", ["dp=1 ep=1", "tp=5 dp=1 ep=1"], [], 20)
    with pytest.raises(ConfigError, match="steps must be at least 5"):
        layout_runs("L0_sanity", ["dp=1 ep=1"], [], 2)


def test_settings_that_would_have_no_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sets train\.steps by itself: train\.steps=3\. Use --steps"):
        layout_runs("L0_sanity", ["dp=1"], ["train.steps=3"], 6)
    with pytest.raises(
        ConfigError, match=r"train\.eval_every by itself: train\.eval_every=2\. Use isozyme train"
    ):
        layout_runs("L0_sanity", ["dp=1 train.eval_every=2"], [], 6)


def test_a_loss_that_is_no_number_is_never_near() -> None:
    assert _compared([None, 1.0], [1.0, 1.0], 0.5)["status"] == "FAILED"
    assert _compared([1.0, 1.01], [1.0, 1.0], 0.02)["difference"] == pytest.approx(0.01)


def test_whoever_stops_one_run_stops_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def stopped(command: object, topology: object) -> int:
        asked.append((command, topology))
        return 143

    monkeypatch.setattr(bench_layouts_module, "run_ranks", stopped)
    runs = layout_runs("L0_sanity", ["dp=1 ep=1", "dp=2 ep=2"], [], 8)
    assert list(bench_layouts_module.bench_layouts("L0_sanity", runs, tolerance=0.1, say=str)) == []
    assert len(asked) == 1
