"""docs/architectures.md is executed as it stands: the file it shows, and the commands below it."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from isozyme.core.errors import ConfigError
from isozyme.launch.cli import main
from isozyme.launch.evaluate import evaluate_file
from isozyme.launch.factory import factory_of, load_factory
from isozyme.models.decoder import build_model

GUIDE = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text()


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the guide, in a folder that holds the file of the guide."""
    (source,) = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
    (tmp_path / "convolution.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "convolution", raising=False)
    (lines,) = re.findall(r"```sh\n(.*?)```", GUIDE, flags=re.DOTALL)
    return [shlex.split(line)[1:] for line in lines.splitlines()]


def test_the_guides_model_is_the_same_at_every_layout(commands: list[list[str]]) -> None:
    (verify,) = [command for command in commands if command[0] == "verify"]
    assert main([*verify, "--dtype", "fp64", "--dispatchers", "alltoall"]) == 0


SMALL = ("layout.dp=1", "layout.ep=1", "data.window=64", "data.markov_order=1", "train.eval_windows=1")


def test_the_guides_model_trains_and_is_scored(
    commands: list[list[str]], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    train, score = (next(c for c in commands if c[0] == name) for name in ("train", "eval"))
    assert main([*train, *SMALL]) == 0
    (tmp_path / "some.fa").write_text(f">one\n{'ACGGT' * 60}\n")
    score[2] = "some.fa"
    assert main([*score, "data.window=64"]) == 0
    assert "bases of some.fa" in capfd.readouterr().out
    with pytest.raises(ConfigError, match=r"trained with --model convolution:build\. Give the same"):
        evaluate_file(score[1], score[2])


@pytest.mark.slow
def test_the_guides_commands_run_as_they_stand(commands: list[list[str]]) -> None:
    for command in commands:
        assert main(command) == 0


def test_without_a_name_it_is_the_decoder() -> None:
    assert factory_of(None) is build_model
    with pytest.raises(ConfigError, match="importable: --model=nowhere:build"):
        load_factory("nowhere:build")
