"""Train over gloo at one layout after another: each goes on from the checkpoint of the one before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_cli import clean_env
from tests.launch.tiny import TINY

COMMON = (
    "precision=fp64",
    "model.pattern=DM",
    "train.checkpoint_every=2",
    "optim.decay_steps=100",
    "train.eval_windows=4",
)


def _train(out: Path, steps: int, *overrides: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "isozyme.launch", "train", "L0_sanity", *TINY, *COMMON, f"out={out}"]
    done = subprocess.run(
        [*command, f"train.steps={steps}", *overrides],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "train"]


def _layout(**sizes: int) -> list[str]:
    return [f"layout.{axis}={sizes.get(axis, 1)}" for axis in ("tp", "cp", "dp", "pp", "ep", "etp")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_from_tp_to_cp_to_pp_to_all_of_them_as_one_rank_does(tmp_path: Path) -> None:
    whole = _train(tmp_path / "one", 8, *_layout())
    layouts = [_layout(tp=2), _layout(cp=2, ep=2), _layout(pp=2), _layout(tp=2, cp=2, pp=2, ep=2)]
    for number, layout in enumerate(layouts):
        found = _train(tmp_path / "moved", 2 * number + 2, *layout, "resume=latest")
    assert [record["step"] for record in found] == [record["step"] for record in whole] == list(range(8))
    for name in ("loss", "grad_norm"):
        for one, moved in zip(whole, found, strict=True):
            assert moved[name] == pytest.approx(one[name], rel=1e-9), (name, one["step"])
