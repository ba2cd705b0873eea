"""A run from the first step to the closing table, resumed runs, and what they refuse."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from isozyme.core.errors import CheckpointError, ConfigError, DataError
from isozyme.launch.environment import ALONE
from isozyme.launch.evaluate import evaluate_file
from isozyme.launch.start import run_rank
from isozyme.launch.trainer import METRICS, WEIGHTS
from isozyme.models.decoder import build_model
from tests.launch.tiny import letters, tiny


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "genome.fa"
    path.write_text(f">one\n{letters(3000)}\n>two\n{letters(1000, seed=1)}\n")
    return path


def run(out: Path, fasta: Path, *overrides: str, factory: Any = build_model) -> int:
    config = tiny(
        f"out={out}",
        f"data.fasta={fasta}",
        "model.moe.router.expert_bias_rate=0.01",
        "train.steps=6",
        *overrides,
    )
    return run_rank(config, ALONE, factory)


def records(out: Path, kind: str = "train") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return [record for record in found if record["kind"] == kind]


def losses(out: Path) -> list[tuple[int, float, float]]:
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records(out)]


def test_a_run_leaves_metrics_weights_and_a_table(
    tmp_path: Path, fasta: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "out", fasta, "train.eval_every=4", "model.moe.capacity_factor=0.75") == 0
    steps = records(tmp_path / "out")
    assert [record["step"] for record in steps] == list(range(6))
    for record in steps:
        assert record["tokens_per_s"] > 0
        assert record["memory_bytes"] > 0
        assert all(sum(layer) == pytest.approx(1, abs=1e-4) for layer in record["expert_load"])
        assert record["dropped"] > 0
    assert [record["step"] for record in records(tmp_path / "out", "eval")] == [3]
    (final,) = records(tmp_path / "out", "final")
    assert 0 < final["markov_bits_per_base"] < 3
    table = capsys.readouterr().out
    for words in (
        "held-out",
        "Markov baseline",
        "MoE layer 1",
        "dropped slots",
        "dispatcher",
        "optimiser",
        "auto",
    ):
        assert words in table
    assert f"{final['bits_per_base']:.4f} bits per base" in table
    assert len(load_file(tmp_path / "out" / WEIGHTS)) > 10


def test_a_resumed_run_makes_the_same_steps_to_the_last_bit(tmp_path: Path, fasta: Path) -> None:
    run(tmp_path / "whole", fasta)
    run(tmp_path / "parts", fasta, "train.checkpoint_every=2", "optim.decay_steps=6", "train.steps=5")
    run(tmp_path / "parts", fasta, "resume=latest")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len({loss for _, loss, _ in losses(tmp_path / "whole")}) == 6
    one, other = (load_file(tmp_path / name / WEIGHTS) for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)


def test_a_run_goes_on_with_state_sharded_or_not_and_with_or_without_recomputation(
    tmp_path: Path, fasta: Path
) -> None:
    run(tmp_path / "plain", fasta)
    run(
        tmp_path / "out",
        fasta,
        "train.checkpoint_every=2",
        "optim.decay_steps=6",
        "train.steps=5",
        "optim.sharded=true",
        "optim.overlap_reduce=true",
        "model.recompute=full",
    )
    run(tmp_path / "out", fasta, "resume=latest", "model.recompute=selective")
    for (_, loss, norm), (_, want, want_norm) in zip(
        losses(tmp_path / "out"), losses(tmp_path / "plain"), strict=True
    ):
        assert loss == pytest.approx(want, rel=1e-4)
        assert norm == pytest.approx(want_norm, rel=1e-3)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, fasta: Path) -> None:
    run(tmp_path / "out", fasta, "train.checkpoint_every=1", "train.keep_checkpoints=2")
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert names == ["step_00000005", "step_00000006"]


def test_a_damaged_checkpoint_is_passed_over_and_said(
    tmp_path: Path, fasta: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run(out, fasta, "train.checkpoint_every=2", "train.steps=5", "optim.decay_steps=6")
    file = next((out / "checkpoints" / "step_00000004").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    run(out, fasta, "resume=latest")
    shown = capsys.readouterr().out
    assert "passed over a newer checkpoint" in shown
    assert "2 steps done" in shown
    assert [step for step, _, _ in losses(out)] == list(range(6))


def test_latest_without_a_checkpoint_starts_and_says_so(
    tmp_path: Path, fasta: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "out", fasta, "resume=latest", "train.steps=1")
    assert "no checkpoint in" in capsys.readouterr().out


def test_a_resume_with_another_problem_is_refused_with_every_difference(tmp_path: Path, fasta: Path) -> None:
    run(tmp_path / "out", fasta, "train.checkpoint_every=1", "train.steps=1")
    other = tmp_path / "other.fa"
    other.write_text(f">one\n{letters(3000, seed=5)}\n>two\n{letters(1000, seed=6)}\n")
    with pytest.raises(CheckpointError) as raised:
        run(tmp_path / "out", other, "resume=latest", "model.moe.router.topk=1", "seed=3", "optim.lr=0.1")
    text = str(raised.value)
    assert "model.moe.router.topk: 2 in the checkpoint, 1 now" in text
    assert "seed: 0 in the checkpoint, 3 now" in text
    assert "another genome" in text
    assert "optim" not in text


def test_a_signal_saves_after_the_step_and_the_run_goes_on_from_there(
    tmp_path: Path, fasta: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def interrupting(*arguments: Any) -> Any:
        model = build_model(*arguments)

        def before(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 6:  # in the second step: four micro-batches each
                os.kill(os.getpid(), signal.SIGUSR1)

        model.register_forward_pre_hook(before)
        return model

    run(tmp_path / "whole", fasta)
    assert run(tmp_path / "out", fasta, factory=interrupting) == 0
    assert len(calls) == 8
    assert "stopped by SIGUSR1 after step 2" in capsys.readouterr().out
    assert not (tmp_path / "out" / WEIGHTS).exists()
    run(tmp_path / "out", fasta, "resume=latest")
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_trained_weights_score_a_genome_as_the_run_did(tmp_path: Path) -> None:
    train, held_out = letters(3000), letters(400, seed=1)
    both, alone = tmp_path / "both.fa", tmp_path / "alone.fa"
    both.write_text(f">train\n{train}\n>held\n{held_out}\n")
    alone.write_text(f">held\n{held_out}\n")
    run(tmp_path / "out", both)
    (final,) = records(tmp_path / "out", "final")
    line, _ = evaluate_file(str(tmp_path / "out" / WEIGHTS), str(alone), ["train.micro_batch=3"])
    assert line.startswith(f"{final['bits_per_base']:.4f} bits per base over {final['labels']:,} bases")


def test_weights_of_another_origin_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="readable safetensors"):
        evaluate_file(str(tmp_path / "none.safetensors"), "x.fa")


def test_a_genome_shorter_than_a_window_is_refused_before_training(tmp_path: Path) -> None:
    short = tmp_path / "short.fa"
    short.write_text(">one\nACGTACGT\n")
    with pytest.raises(ConfigError, match=r"data\.window=64"):
        run(tmp_path / "out", short)


def test_a_malformed_genome_is_refused_before_training(tmp_path: Path) -> None:
    bad = tmp_path / "bad.fa"
    bad.write_text(">one\nACGT!ACGT\n")
    with pytest.raises(DataError, match=r"bad\.fa"):
        run(tmp_path / "out", bad)
