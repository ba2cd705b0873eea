"""A linear map without bias whose weight knows its global name and ownership."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from isozyme.models.builder import Builder


class Linear(nn.Module):
    """`y = x @ weight.T`, with `weight` of shape `[width_out, width_in]`.

    Args:
        builder: makes the parameter.
        name: global name of the module; the weight is `<name>.weight`.
        width_in: features of a row of `x`.
        width_out: features of a row of `y`.
        std: standard deviation of the initial weight.
        split: cut `rows` (output features) or `columns` (input features) over the tensor-parallel ranks.
    """

    def __init__(
        self, builder: Builder, name: str, width_in: int, width_out: int, *, std: float, split: str
    ) -> None:
        super().__init__()
        dim = {"rows": 0, "columns": 1}[split]
        self.weight = builder.split_weight(f"{name}.weight", (width_out, width_in), std, dim=dim)

    def forward(self, x: Float[Tensor, "*batch I"]) -> Float[Tensor, "*batch O"]:
        """Apply the map to the last dim."""
        return F.linear(x, self.weight)
