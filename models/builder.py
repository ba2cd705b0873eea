"""How the modules of a model make their parameters: the context they share, and the specs of dense weights.

A module says a weight's global name, shape and distribution; ownership, the local slice and its initial value
follow from these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from isozyme.core.config import Precision
from isozyme.core.initialisation import Init
from isozyme.parallel.communicator import Communicator
from isozyme.parallel.parameters import create_parameter
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import EMBEDDING, Replica, ShardSpec, dense_spec


@dataclass(frozen=True, kw_only=True)
class Builder:
    """What every module of one model needs to make its parameters on this rank."""

    groups: ProcessGroups
    seed: int | None
    """None: see `isozyme.parallel.parameters.local_initial_value`."""
    device: torch.device
    dtype: torch.dtype
    precision: Precision | None = None
    """Precision of the experts' matrix products; that of `dtype` if None."""

    @property
    def tp(self) -> Communicator:
        """The tensor-parallel ranks, which hold the parts of each sequence."""
        return self.groups["tp"]

    def parameter(self, spec: ShardSpec) -> nn.Parameter:
        """This rank's shard of the tensor that `spec` describes, initialised by its global name."""
        return create_parameter(spec, self.groups, seed=self.seed, device=self.device, dtype=self.dtype)

    def split_weight(
        self,
        name: str,
        shape: tuple[int, ...],
        std: float,
        *,
        dim: int,
        units: int | None = None,
        decay: bool = True,
        on_both_ends: bool = False,
    ) -> nn.Parameter:
        """A Gaussian weight whose `dim` is cut over the tensor-parallel ranks.

        Args:
            name: global canonical name.
            shape: shape of the whole tensor.
            std: standard deviation of the initial values.
            dim: the output dim of a column-parallel weight, the input dim of a row-parallel one; its indices
                are seeded one by one, so that a shard costs only its share to initialise.
            units: how many parts `dim` has that must not be cut (K/V heads), if they may be fewer than the
                ranks: then neighbouring ranks hold the same one, and their gradients are parts of the sum.
            decay: whether weight decay applies.
            on_both_ends: whether the first and the last pipeline stage hold a copy each, whose gradients are
                parts of the sum: a tied embedding.
        """
        split: tuple[tuple[int, str], ...] = ((dim, "tp"),)
        replicas: dict[str, Replica] = {"cp": "partial", "dp": "partial"}
        if units is not None and units < self.tp.size:
            split, held_by = _shared_split(dim, self.tp.size // units, self.tp.size)
            replicas = {held_by: "partial", **replicas}
        if on_both_ends:
            replicas[EMBEDDING] = "partial"
        return self.parameter(
            ShardSpec(
                name=name,
                global_shape=shape,
                split=split,
                init_dim=dim,
                replicas=replicas,
                init=Init.normal(std),
                decay=decay,
            )
        )

    def norm_weight(self, name: str, width: int) -> nn.Parameter:
        """The gain of a norm: ones, whole on every rank, without weight decay.

        Decay would pull a gain towards zero, which scales the layer down without regularising it; leaving
        norms (and biases) out is the custom since GPT-3 (Brown et al. 2020) and BERT.
        """
        return self.parameter(dense_spec(name, (width,), Init.constant(1.0), decay=False))


def _shared_split(dim: int, copies: int, tp: int) -> tuple[tuple[tuple[int, str], ...], str]:
    """The split of a dim of which `copies` neighbouring ranks hold each part, and the axis along them."""
    if copies == tp:
        return (), "tp"
    return ((dim, f"tp//{copies}"),), f"tp%{copies}"
