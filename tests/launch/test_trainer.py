"""A run from the first step to the closing table, resumed runs, and what they refuse."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from isozyme.core.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from isozyme.launch import evaluate, start, trainer
from isozyme.launch.environment import ALONE
from isozyme.launch.evaluate import evaluate_file
from isozyme.launch.step import TrainStep
from isozyme.launch.trainer import METRICS, WEIGHTS
from isozyme.models.decoder import build_model
from tests.launch.tiny import letters, tiny

UNCHECKED = pytest.mark.usefixtures("unchecked_annotations")
"""For further runs of what the first tests run with every annotation checked."""


@pytest.fixture(scope="module")
def fasta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("genome") / "genome.fa"
    path.write_text(f">one\n{letters(3000)}\n>two\n{letters(1000, seed=1)}\n")
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, fasta: Path) -> Path:
    """The folder of a run that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole")
    run(out, fasta)
    return out


def run(out: Path, fasta: Path, *overrides: str, factory: Any = None) -> int:
    """One rank's run, of a model that `factory` builds if it is given."""
    config = tiny(
        f"out={out}",
        f"data.fasta={fasta}",
        "model.moe.router.expert_bias_rate=0.01",
        "train.steps=6",
        *overrides,
    )
    with pytest.MonkeyPatch.context() as patched:
        if factory is not None:
            patched.setattr(start, "factory_of", lambda _: factory)
        return start.run_rank(config, ALONE)


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


def test_a_resumed_run_makes_the_same_steps_to_the_last_bit(tmp_path: Path, fasta: Path, whole: Path) -> None:
    run(tmp_path / "parts", fasta, "train.checkpoint_every=2", "optim.decay_steps=6", "train.steps=5")
    run(tmp_path / "parts", fasta, "resume=latest")
    assert losses(tmp_path / "parts") == losses(whole)
    assert len({loss for _, loss, _ in losses(whole)}) == 6
    one, other = (load_file(folder / WEIGHTS) for folder in (whole, tmp_path / "parts"))
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)


@pytest.mark.slow
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
        "optim.overlap_gather=true",
        "train.eval_every=2",
        "model.recompute=full",
    )
    run(tmp_path / "out", fasta, "resume=latest", "model.recompute=selective")
    for (_, loss, norm), (_, want, want_norm) in zip(
        losses(tmp_path / "out"), losses(tmp_path / "plain"), strict=True
    ):
        assert loss == pytest.approx(want, rel=1e-4)
        assert norm == pytest.approx(want_norm, rel=1e-3)


@UNCHECKED
def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, fasta: Path) -> None:
    run(tmp_path / "out", fasta, "train.checkpoint_every=1", "train.keep_checkpoints=2")
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert names == ["step_00000005", "step_00000006"]


@UNCHECKED
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
    another = ("model.moe.router.topk=1", "seed=3", "optim.lr=0.1")
    otherwise = [f"model.moe.{x}" for x in ("dispatcher=allgather", "equal_tokens=true", "delay_wgrad=true")]
    with pytest.raises(CheckpointError) as raised:
        run(tmp_path / "out", other, "resume=latest", *another, *otherwise, "model.attention.context=ring")
    text = str(raised.value)
    assert "differs in 3 settings" in text
    assert "model.moe.router.topk: 2 in the checkpoint, 1 now" in text
    assert "seed: 0 in the checkpoint, 3 now" in text
    assert "another genome" in text
    assert "optim" not in text


@UNCHECKED
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 0), (signal.SIGINT, 130)])
def test_a_signal_saves_after_the_step_and_the_run_goes_on_from_there(
    tmp_path: Path,
    fasta: Path,
    whole: Path,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    calls: list[int] = []

    def interrupting(*arguments: Any) -> Any:
        model = build_model(*arguments)

        def before(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 6:  # in the second step: four micro-batches each
                os.kill(os.getpid(), number)

        model.register_forward_pre_hook(before)
        return model

    assert run(tmp_path / "out", fasta, factory=interrupting) == code
    assert len(calls) == 8
    assert f"stopped by {number.name} after step 2" in capsys.readouterr().out
    assert not (tmp_path / "out" / WEIGHTS).exists()
    run(tmp_path / "out", fasta, "resume=latest")
    assert losses(tmp_path / "out") == losses(whole)


def test_an_evaluation_that_is_interrupted_loses_no_weights(tmp_path: Path, fasta: Path) -> None:
    def interrupting(*arguments: Any) -> Any:
        model = build_model(*arguments)

        def before(module: Any, *_: Any) -> None:
            if not module.training:
                os.kill(os.getpid(), signal.SIGINT)

        model.register_forward_pre_hook(before)
        return model

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", fasta, "train.steps=1", factory=interrupting)
    assert evaluate_file(str(tmp_path / "out" / WEIGHTS), str(fasta))


@UNCHECKED
def test_a_new_run_never_mixes_its_checkpoints_with_those_of_an_older_one(
    tmp_path: Path, fasta: Path
) -> None:
    run(tmp_path / "out", fasta, "train.checkpoint_every=3")
    before = losses(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"resume=null, and .*step_00000006 exists\. Set resume=latest"):
        run(tmp_path / "out", fasta, "train.checkpoint_every=1", "train.steps=2")
    assert losses(tmp_path / "out") == before


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path: Path, fasta: Path) -> None:
    def meddling(*arguments: Any) -> Any:
        with pytest.raises(ConfigError, match=rf"is in use by process {os.getpid()} on"):
            run(tmp_path / "out", fasta, "train.steps=1")
        return build_model(*arguments)

    assert run(tmp_path / "out", fasta, "train.steps=1", factory=meddling) == 0
    assert run(tmp_path / "out", fasta, "train.steps=1") == 0


def test_a_second_run_says_that_it_replaces_the_results_of_the_first(
    tmp_path: Path, fasta: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for replaces in (False, True):
        run(tmp_path / "out", fasta, "train.steps=1")
        assert ("in place of an earlier run's" in capsys.readouterr().out) == replaces


def test_a_checkpoint_past_the_last_step_is_refused_and_one_at_it_is_evaluated(
    tmp_path: Path, fasta: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "out", fasta, "train.checkpoint_every=4", "train.steps=4")
    with pytest.raises(CheckpointError, match=r"train\.steps: 4 steps done, 3 wanted now"):
        run(tmp_path / "out", fasta, "resume=latest", "train.steps=3")
    capsys.readouterr()
    assert run(tmp_path / "out", fasta, "resume=latest", "train.steps=4") == 0
    shown = capsys.readouterr().out
    assert "no step is left" in shown
    assert "tokens/s" not in shown


def test_a_resume_with_another_model_is_refused_by_its_settings_and_not_by_its_tensors(
    tmp_path: Path, fasta: Path
) -> None:
    run(tmp_path / "out", fasta, "train.checkpoint_every=1", "train.steps=1")
    with pytest.raises(CheckpointError, match=r"model\.num_layers: 2 in the checkpoint, 3 now") as raised:
        run(tmp_path / "out", fasta, "resume=latest", "model.num_layers=3")
    assert "missing" not in str(raised.value)


def test_weights_that_hold_nan_are_not_scored(tmp_path: Path, fasta: Path) -> None:
    def spoiled(*arguments: Any) -> Any:
        model = build_model(*arguments)

        def before(module: Any, *_: Any) -> None:
            if not module.training:
                next(module.parameters()).data.fill_(float("nan"))

        model.register_forward_pre_hook(before)
        return model

    with pytest.raises(NonFiniteError, match=r"its sum over [\d,]+ labels is nan"):
        run(tmp_path / "out", fasta, "train.steps=1", factory=spoiled)


@UNCHECKED
def test_after_a_skipped_step_the_next_trains_on_its_own_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = tmp_path / "sparse.fa"
    sparse.write_text(
        f">one\n{''.join(letters(130, seed) + 'N' * 200 for seed in range(12))}{letters(400)}\n"
    )
    settings = ("train.global_batch=1", "train.micro_batch=1", "train.steps=12")
    run(tmp_path / "ahead", sparse, *settings)
    monkeypatch.setattr(trainer._Loop, "_prepare_ahead", lambda *_: None)
    run(tmp_path / "each", sparse, *settings)
    assert losses(tmp_path / "ahead") == losses(tmp_path / "each")
    skipped = [loss is None for _, loss, _ in losses(tmp_path / "each")]
    assert any(before and not after for before, after in pairwise(skipped))
    assert any(after and not before for before, after in pairwise(skipped))


@UNCHECKED
def test_what_was_recorded_is_given_up_when_a_step_fails(
    tmp_path: Path, fasta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(*arguments: Any) -> Any:
        model = build_model(*arguments)
        next(model.parameters()).data.fill_(float("nan"))
        return model

    closed: list[TrainStep] = []
    monkeypatch.setattr(TrainStep, "close", lambda step: closed.append(step))
    with pytest.raises(NonFiniteError, match="No weight was changed"):
        run(tmp_path / "out", fasta, factory=spoiled)
    assert len(closed) == 1


def test_metrics_that_cannot_be_written_say_what_to_do(tmp_path: Path, fasta: Path) -> None:
    (tmp_path / "out" / METRICS).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl; Is a directory.*set out=PATH"):
        run(tmp_path / "out", fasta, "train.steps=1")


def test_a_genome_without_a_known_base_is_refused_before_training(tmp_path: Path) -> None:
    unknown = tmp_path / "unknown.fa"
    unknown.write_text(f">one\n{'N' * 2000}\n")
    with pytest.raises(DataError, match=r"unknown\.fa; the training part has 1,800 letters"):
        run(tmp_path / "out", unknown)
    unknown.write_text(f">one\n{letters(1800)}{'N' * 200}\n")
    with pytest.raises(DataError, match=r"unknown\.fa; the held-out part has 200 letters"):
        run(tmp_path / "out", unknown)


@UNCHECKED
def test_weights_of_recorded_steps_are_scored_on_one_rank_without_a_gpu(
    fasta: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(whole / WEIGHTS)
    expected = evaluate_file(path, str(fasta))
    stored = evaluate.read_metadata(Path(path))
    config = stored["config"]
    config["device"], config["train"]["cuda_graph"] = "cuda", True
    config["layout"].update(dp=2, ep=2)
    config["model"]["moe"].update(dispatcher="allgather", equal_tokens=True)
    monkeypatch.setattr(evaluate, "read_metadata", lambda _: stored)
    assert evaluate_file(path, str(fasta)) == expected


@UNCHECKED
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
