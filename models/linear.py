"""Linear maps without bias whose weights know their global name, cut over tensor-parallel ranks."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from isozyme.models.builder import Builder
from isozyme.parallel.tensor import column_parallel_linear, row_parallel_linear


class ColumnLinear(nn.Module):
    """`y = x @ weight.T`, with the output features cut: each rank makes its share of them for all tokens.

    Args:
        builder: makes the parameter.
        name: global name of the module; the weight `[width_out, width_in]` is `<name>.weight`.
        width_in: features of a row of `x`.
        width_out: features of a row of `y`, over all ranks.
        std: standard deviation of the initial weight.
        units: parts of `width_out` that are not cut; with fewer than ranks, neighbours make the same ones.
    """

    def __init__(
        self,
        builder: Builder,
        name: str,
        width_in: int,
        width_out: int,
        *,
        std: float,
        units: int | None = None,
    ) -> None:
        super().__init__()
        self.tp = builder.tp
        self.weight = builder.split_weight(f"{name}.weight", (width_out, width_in), std, dim=0, units=units)

    def forward(self, x: Float[Tensor, "N *row I"]) -> Float[Tensor, "RN *row O"]:
        """This rank's features of all ranks' tokens, rank by rank."""
        return column_parallel_linear(x, (self.weight,), self.tp)[0]


def together(x: Float[Tensor, "N *row I"], *maps: ColumnLinear) -> tuple[Float[Tensor, "RN *row _"], ...]:
    """Several maps of the same tokens, which are gathered once."""
    return column_parallel_linear(x, [each.weight for each in maps], maps[0].tp)


class RowLinear(nn.Module):
    """`y = x @ weight.T`, with the input features cut: the ranks' results are added, and tokens dealt out.

    Args:
        builder: makes the parameter.
        name: global name of the module; the weight `[width_out, width_in]` is `<name>.weight`.
        width_in: features of a row of `x`, over all ranks.
        width_out: features of a row of `y`.
        std: standard deviation of the initial weight.
    """

    def __init__(self, builder: Builder, name: str, width_in: int, width_out: int, *, std: float) -> None:
        super().__init__()
        self.tp = builder.tp
        self.weight = builder.split_weight(f"{name}.weight", (width_out, width_in), std, dim=1)

    def forward(self, x: Float[Tensor, "RN *row I"]) -> Float[Tensor, "N *row O"]:
        """All features of this rank's tokens, from this rank's features of all ranks' tokens."""
        return row_parallel_linear(x, self.weight, self.tp)
