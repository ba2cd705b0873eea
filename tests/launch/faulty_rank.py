"""A rank program for tests: trains the tiny run, and the rank that is named fails in the way that is named.

Usage: faulty_rank.py OUT RANK raise|exit|kill|nan
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch import nn

from isozyme.core.config import RunConfig
from isozyme.launch.cli import report
from isozyme.launch.compose import compose
from isozyme.launch.environment import detect, die_with_parent
from isozyme.launch.start import run_rank
from isozyme.models.decoder import build_model
from isozyme.parallel.process_groups import ProcessGroups
from tests.launch.tiny import TINY


def failing(config: RunConfig, groups: ProcessGroups, *rest: Any) -> nn.Module:
    """A model that fails in its third micro-batch, on the rank and in the way that the command line names."""
    _, rank, how = sys.argv[1:]
    model = build_model(config, groups, *rest)
    calls = []

    def before(module: nn.Module, inputs: Any, keywords: Any) -> None:
        calls.append(1)
        if groups.rank != int(rank) or len(calls) != 3:
            return
        if how == "raise":
            raise ZeroDivisionError("the third micro-batch cannot be digested")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(9)
        with torch.no_grad():
            model.final_norm.weight.fill_(float("nan"))

    model.register_forward_pre_hook(before, with_kwargs=True)
    return model


def main(out: str) -> int:
    """Be one rank."""
    config = compose("L0_sanity", [*TINY, f"out={out}", "train.steps=4", "train.timeout_s=60"])
    place = detect(os.environ)
    assert place is not None
    die_with_parent(os.environ)
    try:
        return run_rank(config, place, "tests.launch.faulty_rank:failing")
    except Exception as error:
        return report(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
