"""The layer under `torch.compile`."""

import subprocess
import sys

from tests.repo.source_tree import ROOT


def test_the_layer_compiles_without_a_graph_break_to_the_same_numbers() -> None:
    program = [sys.executable, "-m", "tests.moe.compiled_layer"]
    result = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "equal", result.stderr
