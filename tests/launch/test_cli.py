"""The command line: what is printed, the exit codes, and a run of two ranks from the shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from isozyme.core import errors
from isozyme.launch.cli import main, parse_layout
from isozyme.launch.failures import exit_code
from tests.launch.tiny import TINY

SCRIPTS = Path(__file__).parents[2] / "launch" / "scripts"


def clean_env(**more: str) -> dict[str, str]:
    """This environment without the variables of a launcher."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in launcher and not k.startswith("SLURM_")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable} | more


def test_a_configuration_error_is_one_block_without_traceback_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "L0_sanity", "layout.ep=3", "train.stps=1"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("isozyme: ConfigError: recipe L0_sanity: 3 rules broken\n")
    assert "Traceback" not in shown.err


def test_the_traceback_is_shown_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOZYME_TRACEBACK", "1")
    assert main(["config", "L0_santy"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["precision=mxfp8"], 4),
        (["data.fasta=/no/such/file.fa"], 3),
        (["data.window=30000"], 2),
        (["out={tmp}/file/x"], 2),
    ],
)
def test_what_cannot_run_is_refused_before_any_rank_starts(
    tmp_path: Path, overrides: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("isozyme.launch.start.run_ranks", lambda *_: pytest.fail("ranks were started"))
    given = [override.format(tmp=tmp_path) for override in ["device=cpu", *overrides]]
    assert main(["train", "L0_sanity", *given]) == code


def test_each_kind_of_error_has_its_exit_code() -> None:
    kinds = ("Config", "Data", "Backend", "Communication", "Checkpoint", "NonFinite")
    assert [exit_code(getattr(errors, f"{kind}Error")()) for kind in kinds] == [2, 3, 4, 5, 6, 7]
    assert exit_code(ValueError()) == 1
    assert exit_code(KeyboardInterrupt()) == 130


def test_the_topology_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "dp=4 ep=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 ranks: dp=4 ep=2"
    assert len(lines) == 6
    assert main(["topology", "dp=4", "ep=2", "--limit", "1"]) == 0
    assert "3 more" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["dq=2", "dp=two", "dp"])
def test_a_layout_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(errors.ConfigError):
        parse_layout(text)


def test_the_configuration_is_printed_as_a_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", "L0_sanity", "train.steps=3"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(printed)
    assert main(["config", str(tmp_path / "again.yaml")]) == 0
    assert capsys.readouterr().out == printed


def test_a_command_with_a_parser_of_its_own_gets_its_arguments_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []
    module = types.ModuleType("isozyme.launch.verify")
    module.main = lambda argv: seen.append(argv) or 8  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "isozyme.launch.verify", module)
    assert main(["verify", "--help", "x=1"]) == 8
    assert seen == [["--help", "x=1"]]
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "verify" in capsys.readouterr().out


def test_two_ranks_train_from_the_shell_as_one_does(tmp_path: Path) -> None:
    given = ["train", "L0_sanity", *TINY, "train.steps=3", "precision=fp64"]
    done = subprocess.run(
        [sys.executable, "-m", "isozyme.launch", *given, f"out={tmp_path / 'two'}"],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Markov baseline") == 1
    assert main([*given, "layout.dp=1", "layout.ep=1", f"out={tmp_path / 'one'}"]) == 0
    losses = []
    for name in ("two", "one"):
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([record["loss"] for record in records if record["kind"] == "train"])
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_two_nodes_meet_through_the_torchrun_script(tmp_path: Path, unused_port: int) -> None:
    nodes = []
    for node in range(2):
        env = clean_env(
            NNODES="2",
            NODE_RANK=str(node),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(unused_port),
            NPROC_PER_NODE="1",
        )
        command = [str(SCRIPTS / "torchrun_node.sh"), "L0_sanity", *TINY, f"out={tmp_path}", "train.steps=2"]
        nodes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        outputs = [node.communicate(timeout=110) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert "2 ranks (dp=2 ep=2)" in outputs[0][0]
    assert "Markov" not in outputs[1][0]


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "must be set: NNODES NODE_RANK MASTER_ADDR MASTER_PORT NPROC_PER_NODE"),
        (
            {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "NPROC_PER_NODE": "1"},
            "NODE_RANK must be less than NNODES",
        ),
        (
            {
                "NNODES": "two",
                "NODE_RANK": "0",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "1",
                "NPROC_PER_NODE": "1",
            },
            "NNODES must be a whole number",
        ),
    ],
)
def test_the_torchrun_script_refuses_what_it_would_have_to_guess(env: dict[str, str], message: str) -> None:
    done = subprocess.run(
        [str(SCRIPTS / "torchrun_node.sh"), "L0_sanity"],
        env=clean_env(**env),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr


def test_the_torchrun_script_sees_a_held_port_at_once() -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        names = {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "NPROC_PER_NODE": "1"}
        done = subprocess.run(
            [str(SCRIPTS / "torchrun_node.sh"), "L0_sanity"],
            env=clean_env(**names, MASTER_PORT=port),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert done.returncode != 0
    assert f"MASTER_PORT={port} cannot be used" in done.stderr
