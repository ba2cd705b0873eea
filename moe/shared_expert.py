"""The shared expert: a dense SwiGLU network that every token passes beside its routed experts.

It is laid out like a dense network: F is cut over TP, and the sequence parts of the TP ranks are gathered
before it and scattered after it. Source: DeepSeekMoE (arXiv 2401.06066).
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from isozyme.core.initialisation import Init
from isozyme.moe.experts.activation import through_swiglu
from isozyme.parallel.parameters import create_parameter
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import Replica, ShardSpec
from isozyme.parallel.tensor import column_parallel_linear, row_parallel_linear


class SharedExpert(nn.Module):
    """`down(silu(gate x) * up x)` for this rank's tokens.

    Args:
        name: global name, such as `layers.3.moe.shared_expert`.
        hidden: H.
        ffn: hidden width before the cut over TP.
        groups: the communicators of this rank.
        seed: seed of the model.
        init_std: standard deviation of gate and up.
        output_std: standard deviation of down.
        device: where the weights are.
        dtype: their type.

    Raises:
        ValueError: if TP does not divide `ffn` (a run's configuration is refused before that).
    """

    def __init__(
        self,
        *,
        name: str,
        hidden: int,
        ffn: int,
        groups: ProcessGroups,
        seed: int | None,
        init_std: float,
        output_std: float,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.tp, self.recompute = groups["tp"], recompute
        replicas: dict[str, Replica] = {"cp": "partial", "dp": "partial"}
        gate_up = ShardSpec(
            name=f"{name}.gate_up",
            global_shape=(2, ffn, hidden),
            split=((1, "tp"),),
            init_dim=1,
            replicas=replicas,
            init=Init.normal(init_std),
        )
        down = ShardSpec(
            name=f"{name}.down",
            global_shape=(hidden, ffn),
            split=((1, "tp"),),
            init_dim=1,
            replicas=replicas,
            init=Init.normal(output_std),
        )
        self.gate_up = create_parameter(gate_up, groups, seed=seed, device=device, dtype=dtype)
        self.down = create_parameter(down, groups, seed=seed, device=device, dtype=dtype)

    def forward(self, tokens: Float[Tensor, "T H"]) -> Float[Tensor, "T H"]:
        """The network's result for this rank's tokens; TP ranks hold equally many, and call it together."""
        return self.second_half(self.first_half(tokens), tokens.dtype)

    def first_half(self, tokens: Float[Tensor, "T H"]) -> Float[Tensor, "RT F2"]:
        """Gate and up of all TP ranks' tokens: two thirds of the work. All TP ranks call it together."""
        weight = rearrange(self.gate_up, "two f h -> (two f) h")
        (wide,) = column_parallel_linear(tokens, (weight,), self.tp)
        return wide

    def second_half(self, wide: Float[Tensor, "RT F2"], dtype: torch.dtype) -> Float[Tensor, "T H"]:
        """Activation, in `dtype`, and down for what `first_half` gave."""
        return through_swiglu(
            wide,
            None,
            dtype,
            lambda middle: row_parallel_linear(middle, self.down, self.tp),
            again=self.recompute,
        )
