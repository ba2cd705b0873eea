"""The dense feed-forward network: SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from isozyme.models.builder import Builder
from isozyme.parallel.tensor import column_parallel_linear, row_parallel_linear


class MLP(nn.Module):
    """`y = (silu(x @ gate.T) * (x @ up.T)) @ down.T`.

    `gate_up` has the shape `[2, F, H]`: gate at index 0, up at index 1, so that a cut of F keeps both halves
    of each feature together.

    Args:
        builder: makes the parameters.
        name: global name of the module, such as `layers.3.mlp`.
        hidden: H, width of the tokens.
        ffn: F, width of the activation.
        std: standard deviation of `gate_up`.
        output_std: standard deviation of `down`.
    """

    def __init__(
        self, builder: Builder, name: str, hidden: int, ffn: int, *, std: float, output_std: float
    ) -> None:
        super().__init__()
        self.tp = builder.tp
        self.gate_up = builder.split_weight(f"{name}.gate_up", (2, ffn, hidden), std, dim=1)
        self.down = builder.split_weight(f"{name}.down", (hidden, ffn), output_std, dim=1)

    def forward(self, x: Float[Tensor, "*batch H"]) -> Float[Tensor, "*batch H"]:
        """Apply the network to each of this rank's tokens; tensor-parallel ranks call it together."""
        weight = rearrange(self.gate_up, "two f h -> (two f) h")
        (wide,) = column_parallel_linear(x, (weight,), self.tp)
        gate, up = wide.chunk(2, dim=-1)
        return row_parallel_linear(F.silu(gate) * up, self.down, self.tp)
