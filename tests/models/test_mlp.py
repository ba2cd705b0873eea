"""The dense network against its formula."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from isozyme.models.mlp import MLP
from isozyme.parallel.shard_spec import spec_of
from tests.models.common import builder


def test_mlp_equals_its_formula_with_gate_first() -> None:
    mlp = MLP(builder(), "layers.0.mlp", 12, 20, std=0.5, output_std=0.5)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    gate, up = mlp.gate_up
    torch.testing.assert_close(mlp(x), (F.silu(x @ gate.T) * (x @ up.T)) @ mlp.down.T)


def test_mlp_weights_are_cut_along_the_activation() -> None:
    mlp = MLP(builder(), "layers.0.mlp", 12, 20, std=0.5, output_std=0.25)
    up, down = spec_of(mlp.gate_up), spec_of(mlp.down)
    assert (up.name, up.global_shape, up.split, up.init_dim) == (
        "layers.0.mlp.gate_up",
        (2, 20, 12),
        ((1, "tp"),),
        1,
    )
    assert (down.name, down.global_shape, down.split, down.init_dim) == (
        "layers.0.mlp.down",
        (12, 20),
        ((1, "tp"),),
        1,
    )
    assert (up.init.value, down.init.value) == (0.5, 0.25)
