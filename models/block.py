"""One layer of the decoder: attention, then a dense network or experts, each added to its input."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from isozyme.core.config import ModelConfig
from isozyme.models.attention import Attention, Context
from isozyme.models.builder import Builder
from isozyme.models.mlp import MLP
from isozyme.models.norm import RMSNorm
from isozyme.models.recompute import recomputed_layer
from isozyme.moe.layer import MoELayer
from isozyme.moe.types import MoEOutput, Routing


class Block(nn.Module):
    """A pre-norm layer: `x + attention(norm(x))`, then `x + network(norm(x))`.

    Output projections start smaller by `1/sqrt(2 * num_layers)`, so that the sum of all branches keeps the
    variance of one (Radford et al. 2019, GPT-2).

    Args:
        builder: makes the parameters.
        index: global index of the layer, whichever chunk holds it.
        config: sizes; `config.layer_kinds()[index]` decides between `mlp` and `moe`.
    """

    def __init__(self, builder: Builder, index: int, config: ModelConfig) -> None:
        super().__init__()
        name, hidden, std = f"layers.{index}", config.hidden, config.init_std
        output_std = std / math.sqrt(2 * config.num_layers)
        norm: dict[str, Any] = {"eps": config.norm_eps, "implementation": config.norm}
        self.attention_norm = RMSNorm(builder, f"{name}.attention_norm", hidden, **norm)
        self.attention = Attention(builder, f"{name}.attention", config, output_std=output_std)
        self.mlp_norm = RMSNorm(builder, f"{name}.mlp_norm", hidden, **norm)
        self.mlp: MLP | None = None
        self.moe: MoELayer | None = None
        if config.layer_kinds()[index] == "D":
            self.mlp = MLP(builder, f"{name}.mlp", hidden, config.ffn, std=std, output_std=output_std)
        else:
            self.moe = MoELayer(
                config.moe,
                name=f"{name}.moe",
                hidden=hidden,
                groups=builder.groups,
                seed=builder.seed,
                init_std=std,
                output_std=output_std,
                precision=builder.precision,
                device=builder.device,
                dtype=builder.dtype,
                recompute_activation=config.recompute == "selective",
            )
        self.recompute = config.recompute == "full"

    def forward(
        self,
        x: Float[Tensor, "B P H"],
        context: Context,
        token_valid: Bool[Tensor, "B P"],
        routing_override: Routing | None = None,
        places: Int[Tensor, "B P"] | None = None,
    ) -> tuple[Float[Tensor, "B P H"], MoEOutput | None]:
        """The new hidden states, and what the experts' layer reports (None from a dense layer).

        Args:
            x: hidden states of this rank's part of each window (tensor-parallel ranks have a part each, on
                which norms, routers and residual additions work alone).
            context: rotation and documents of the micro-batch.
            token_valid: which of these tokens are not padding, and so are routed.
            routing_override: expert choices to replay, for a mixture-of-experts layer.
            places: where in its whole window each token stands, if context-parallel ranks share the windows.
        """
        run = partial(self._run, context, token_valid, places)
        if self.recompute:
            return recomputed_layer(run, x, routing_override, tuple(self.parameters()))
        return run(x, routing_override)

    def _run(
        self,
        context: Context,
        token_valid: Bool[Tensor, "B P"],
        places: Int[Tensor, "B P"] | None,
        x: Float[Tensor, "B P H"],
        routing_override: Routing | None,
    ) -> tuple[Float[Tensor, "B P H"], MoEOutput | None]:
        x = x + self.attention(self.attention_norm(x), context)
        normed = self.mlp_norm(x)
        if self.moe is None:
            assert self.mlp is not None
            return x + self.mlp(normed), None
        output: MoEOutput = self.moe(normed, token_valid, routing_override, positions=places)
        return x + output.tokens, output
