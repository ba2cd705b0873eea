"""The local launcher: ranks find each other, the right one is blamed, and none is left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from isozyme.core.topology import Layout, Topology
from isozyme.launch.local import run_ranks

TWO = Topology(Layout(dp=2, ep=2))
FAULTY = Path(__file__).with_name("faulty_rank.py")
PRELUDE = """
import json, os, signal, sys, time
rank, folder = int(os.environ["RANK"]), os.environ["ISOZYME_ERROR_FOLDER"]
def leave(kind, consequence, at, code=1):
    failure = dict(rank=rank, kind=kind, message=f"{kind} of {rank}", exit_code=code, at=at)
    failure["consequence"] = consequence
    open(f"{folder}/rank{rank}.json", "w").write(json.dumps(failure))
    sys.exit(code)
"""


def program(text: str) -> list[str]:
    """A rank that is a few lines of Python and imports nothing slow."""
    return [sys.executable, "-S", "-c", PRELUDE + text]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_rank_gets_its_place_and_success_is_zero(tmp_path: Path) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
    code = f"open(r'{tmp_path}/' + str(rank), 'w').write(' '.join(os.environ[n] for n in '{names}'.split()))"
    assert run_ranks(program(code), TWO) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["0 2 0 2", "1 2 1 2"]


def test_the_cause_is_blamed_and_not_its_consequence(capfd: pytest.CaptureFixture[str]) -> None:
    code = "leave('Consequence', True, 1.0, 5) if rank == 0 else leave('Cause', False, 2.0, 3)"
    assert run_ranks(program(code), TWO) == 3
    shown = capfd.readouterr().err
    assert "rank 1 of 2 (tp=0 cp=0 dp=1 pp=0 etp=0 ep=1 edp=0): Cause: Cause of 1" in shown
    assert "rank 0 then: Consequence" in shown


def test_the_earlier_of_two_causes_is_blamed(capfd: pytest.CaptureFixture[str]) -> None:
    code = "leave('Late', False, 9.0, 1) if rank == 0 else leave('Early', False, 2.0, 3)"
    assert run_ranks(program(code), TWO) == 3
    assert "rank 1 of 2" in capfd.readouterr().err


def test_a_killed_rank_ends_the_run_within_seconds_and_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = f"""
open(r"{tmp_path}/" + str(rank), "w").write(str(os.getpid()))
os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(100)
"""
    began = time.monotonic()
    assert run_ranks(program(code), TWO) == 128 + signal.SIGKILL
    assert time.monotonic() - began < 20
    shown = capfd.readouterr().err
    assert "rank 1 of 2" in shown
    assert "SIGKILL" in shown
    assert "rank 0 said nothing and was stopped by the launcher" in shown
    assert not alive(int((tmp_path / "0").read_text()))


def test_a_suspended_rank_is_blamed_and_not_those_that_waited_for_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.5)
leave('CommunicationError', True, 1.0, 5)
"""
    assert run_ranks(program(code), TWO) == 5
    shown = capfd.readouterr().err
    assert "isozyme: rank 1 of 2" in shown
    assert "suspended" in shown
    assert "rank 0 then: CommunicationError" in shown


def test_ranks_with_the_same_error_are_not_repeated(capfd: pytest.CaptureFixture[str]) -> None:
    code = PRELUDE.replace("of {rank}", "of all") + "leave('Shared', False, 1.0 + rank, 6)"
    assert run_ranks([sys.executable, "-S", "-c", code], TWO) == 6
    shown = capfd.readouterr().err
    assert shown.count("Shared of all") == 1
    assert "rank 1 says the same" in shown


def test_ctrl_c_before_the_first_step_is_no_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = f"""
open(r"{tmp_path}/ready" + str(rank), "w").close()
time.sleep(100)
"""
    ready = [tmp_path / "ready0", tmp_path / "ready1"]
    stop = threading.Thread(target=_when, args=(ready, [signal.SIGINT]))
    stop.start()
    assert run_ranks(program(code), TWO) == 128 + signal.SIGINT
    stop.join()
    shown = capfd.readouterr().err
    assert "nothing more was saved" in shown
    assert "Killed" not in shown


def test_a_rank_that_leaves_without_a_word_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(program("os._exit(9 if rank == 0 else 0)"), TWO) == 9
    assert "rank 0 of 2" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_stop_reaches_every_rank_and_leaves_it_time_to_save(
    tmp_path: Path, number: signal.Signals
) -> None:
    code = f"""
def save(*_):
    time.sleep(0.3)
    open(r"{tmp_path}/saved" + str(rank), "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(r"{tmp_path}/ready" + str(rank), "w").close()
time.sleep(100)
"""
    stop = threading.Thread(target=_when, args=([tmp_path / "ready0", tmp_path / "ready1"], [number]))
    stop.start()
    assert run_ranks(program(code), TWO) == 0
    stop.join()
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}


def test_a_second_interrupt_kills_ranks_that_do_not_listen(tmp_path: Path) -> None:
    code = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(r"{tmp_path}/ready" + str(rank), "w").close()
time.sleep(100)
"""
    ready = [tmp_path / "ready0", tmp_path / "ready1"]
    stop = threading.Thread(target=_when, args=(ready, [signal.SIGINT, signal.SIGINT]))
    stop.start()
    assert run_ranks(program(code), TWO) == 128 + signal.SIGINT
    stop.join()


def test_ranks_that_take_too_long_to_save_are_killed(tmp_path: Path) -> None:
    code = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(r"{tmp_path}/ready" + str(rank), "w").close()
time.sleep(100)
"""
    ready = [tmp_path / "ready0", tmp_path / "ready1"]
    stop = threading.Thread(target=_when, args=(ready, [signal.SIGTERM]))
    stop.start()
    assert run_ranks(program(code), TWO, save_s=0.2) == 128 + signal.SIGTERM
    stop.join()


def test_handlers_of_the_caller_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    run_ranks(program(""), TWO)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raise", 1, "ZeroDivisionError: the third micro-batch"),
        pytest.param("kill", 137, "SIGKILL", marks=pytest.mark.slow),
        pytest.param("nan", 7, "rank 1:", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_while_training_is_blamed(
    tmp_path: Path, how: str, code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, str(FAULTY), str(tmp_path), "1", how]
    root = Path(__file__).parents[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{root}{os.pathsep}{root / 'src'}")
        assert run_ranks(command, TWO) == code
    shown = capfd.readouterr().err
    assert said in shown
    if how != "nan":
        assert "isozyme: rank 1 of 2" in shown


def _when(files: list[Path], numbers: list[signal.Signals]) -> None:
    """Send signals to this process when all the files are there."""
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in files) and time.monotonic() < deadline:
        time.sleep(0.02)
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.3)
