"""The decoder: embedding, layers, final norm and head, or the part of them that one pipeline chunk holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from isozyme.core.batch import Batch
from isozyme.core.config import ModelConfig, RunConfig
from isozyme.core.context import KernelName
from isozyme.core.errors import ConfigError, Rules
from isozyme.core.tensor import tensor_problems
from isozyme.core.topology import Layout
from isozyme.models.attention import Context, attention_facts
from isozyme.models.block import Block
from isozyme.models.builder import Builder
from isozyme.models.embedding import Embedding, Head
from isozyme.models.loss import cross_entropy_sum
from isozyme.models.norm import RMSNorm
from isozyme.models.types import Chunk, ModelOutput
from isozyme.moe.types import RouterStats, Routing
from isozyme.parallel.attention_kernels import choose_attention
from isozyme.parallel.context import plan_context
from isozyme.parallel.context_layout import ContextLayout
from isozyme.parallel.context_plan import ContextPlan
from isozyme.parallel.overlap import Unit
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.tensor import from_sequence, gather_tokens, sequence_part


def build_model(
    config: RunConfig,
    groups: ProcessGroups,
    chunk: Chunk,
    device: torch.device,
    dtype: torch.dtype,
    *,
    draw: bool = True,
) -> Decoder:
    """One chunk of the decoder on this rank: the `ModelFactory` of this package.

    A weight's initial value depends on `config.seed` and its global name alone, so a chunk holds the same
    values as that part of the whole model, at every layout.

    Args:
        config: the run; its `model`, `seed` and `precision` are used.
        groups: this rank's communicators.
        chunk: the layers to build, and whether with embedding and head.
        device: where the parameters live.
        dtype: of the parameters (buffers may ask for more).
        draw: whether random weights get their initial values; else they are left to someone who fills them.

    Raises:
        ConfigError: if the model's configuration is broken or cannot be cut at this layout, or the chunk
            names layers that the model lacks.
        BackendError: if the experts' backend cannot run here, or not in `config.precision`, or if the
            attention kernel or the norm that was named cannot.
    """
    model, rules = config.model, Rules(config.name)
    model_problems = model.problems()
    rules.extend(model_problems or _layout_problems(model, groups.topology.layout))
    depth, wanted = model.num_layers, chunk.layers
    rules.check(
        all(0 <= index < depth for index in (*wanted[:1], *wanted[-1:])),
        f"a chunk's layers must exist: chunk.layers={wanted}, model.num_layers={depth}. "
        f"Choose them from 0 to {depth - 1}.",
    )
    rules.raise_if_broken()
    builder = Builder(
        groups=groups,
        seed=config.seed if draw else None,
        device=device,
        dtype=dtype,
        precision=config.precision,
    )
    return Decoder(builder, model, chunk)


def _layout_problems(model: ModelConfig, layout: Layout) -> list[str]:
    """Why `model` cannot be cut so, whatever the window."""
    context = model.attention.problems(
        window=None,
        cp=layout.cp,
        tp=layout.tp,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
    )
    return [*tensor_problems(model, layout), *context]


class Decoder(nn.Module):
    """A chunk of a decoder-only transformer; see `isozyme.models.types.Model` for how it is called.

    Args:
        builder: makes the parameters.
        config: the model.
        chunk: the part to hold.
    """

    def __init__(self, builder: Builder, config: ModelConfig, chunk: Chunk) -> None:
        super().__init__()
        self.config = config
        self.chunk = chunk
        self.tp, self.cp = builder.tp, builder.groups["cp"]
        facts = attention_facts(config, builder.device, builder.dtype)
        self.attention_choice = choose_attention(config.attention.kernel, facts)[1]
        self.embedding = Embedding(builder, config) if chunk.has_embedding else None
        self.layers = nn.ModuleDict({str(index): Block(builder, index, config) for index in chunk.layers})
        self.final_norm: RMSNorm | None = None
        self.head: Head | None = None
        if chunk.has_head:
            self.final_norm = RMSNorm(
                builder, "final_norm", config.hidden, eps=config.norm_eps, implementation=config.norm
            )
            self.head = Head(builder, config, self.embedding)

    @property
    def choices(self) -> dict[str, str]:
        """What each layer's `auto` settings became and why, as `layers.3.moe.experts` → words."""
        found: dict[str, str] = {}
        for index, block in self._blocks():
            found[f"layers.{index}.attention"] = str(self.attention_choice)
            found[f"layers.{index}.norm"] = str(block.mlp_norm.choice)
            if block.moe is not None:
                found |= {f"layers.{index}.moe.{part}": it for part, it in block.moe.choices.items()}
        return found

    @property
    def backward_units(self) -> tuple[Unit, ...]:
        """The layers, and what follows the last, in the order in which backward leaves them.

        The embedding is in none, nor is a head that shares its weight: only the end of backward completes it.
        """
        found = [Unit(entry=block, parameters=tuple(block.parameters())) for _, block in self._blocks()]
        if self.final_norm is not None and self.head is not None:
            shared = set() if self.embedding is None else set(self.embedding.parameters())
            own = (p for part in (self.final_norm, self.head) for p in part.parameters())
            found.append(Unit(entry=self.final_norm, parameters=tuple(p for p in own if p not in shared)))
        return tuple(reversed(found))

    def forward(
        self,
        batch: Batch,
        hidden: Float[Tensor, "B P H"] | None = None,
        routing_override: Sequence[Routing] | None = None,
    ) -> ModelOutput:
        """Run one micro-batch through the chunk.

        Args:
            batch: this rank's whole windows; context- and tensor-parallel ranks give the same, and each works
                on its part.
            hidden: the previous chunk's output, P = S / (cp * tp) tokens of each window; None on the chunk
                with the embedding.
            routing_override: expert choices to replay, one for each mixture-of-experts layer of the chunk.

        Returns:
            `loss_sum` from a chunk with the head, else `hidden`; and each expert layer's stats and routing,
            which are those of this rank's part. `loss_sum` is over the labels of this context-parallel rank.

        Raises:
            ConfigError: if `hidden` is missing or superfluous, or the overrides do not match the layers.
        """
        batch, plan = self._share(batch)
        hidden, reports = self._run_layers(batch, plan, hidden, routing_override)
        loss_sum = None
        if self.head is not None:
            loss_sum = cross_entropy_sum(
                gather_tokens(hidden, self.tp).flatten(0, 1),
                self.head.weight,
                from_sequence(batch.labels, self.tp).flatten(),
                from_sequence(batch.label_valid, self.tp).flatten(),
                group=self.tp,
            )
        return ModelOutput(
            hidden=hidden if self.head is None else None,
            loss_sum=loss_sum,
            stats=tuple(stats for stats, _ in reports),
            routings=tuple(routing for _, routing in reports),
        )

    def logits(self, batch: Batch, hidden: Float[Tensor, "B P H"] | None = None) -> Float[Tensor, "B S V"]:
        """The scores of every token id at each position, in the model's dtype; labels are not looked at.

        S are the tokens of this context-parallel rank, in the order in which it holds them.

        Raises:
            ConfigError: if the chunk has no head.
        """
        if self.head is None:
            raise ConfigError(
                f"logits need the head: chunk.has_head=False, chunk.layers={self.chunk.layers}. "
                "Ask the last chunk."
            )
        return self.head(self._run_layers(*self._share(batch), hidden, None)[0])

    def _kernel(self) -> KernelName:
        """What computes attention, for each micro-batch anew.

        The model may have been cast, or deterministic algorithms asked for, since it was built.
        """
        some = next(self.parameters())
        facts = attention_facts(self.config, some.device, some.dtype)
        return choose_attention(self.config.attention.kernel, facts)[0]

    def _share(self, batch: Batch) -> tuple[Batch, ContextPlan | None]:
        """The tokens of this context-parallel rank, and the plan by which they see those of the others."""
        if self.cp.size == 1:
            return batch, None
        order = self.config.attention.context_order
        layout = ContextLayout(window=batch.window_length, size=self.cp.size, order=order)
        plan = plan_context(self.cp, layout, batch.documents if batch.packed else None, self._kernel())
        return layout.part_of_batch(batch, self.cp.rank), plan

    def _run_layers(
        self,
        batch: Batch,
        plan: ContextPlan | None,
        hidden: Tensor | None,
        routing_override: Sequence[Routing] | None,
    ) -> tuple[Tensor, list[tuple[RouterStats, Routing]]]:
        """Embedding, layers and final norm, as far as the chunk has them; and what expert layers report."""
        x = self._input(batch, hidden)
        kernel = self._kernel() if plan is None else plan.kernel
        context = Context.of(batch, self.config, x.dtype, plan, kernel)
        overrides = self._overrides(routing_override)
        token_valid = sequence_part(batch.token_valid, self.tp)
        places = None
        if plan is not None:
            own = plan.layout.places(plan.comm.rank, batch.tokens.device)
            places = sequence_part(own.expand(batch.num_windows, -1), self.tp)
        reports: list[tuple[RouterStats, Routing]] = []
        for _, block in self._blocks():
            override = next(overrides) if block.moe is not None else None
            x, output = block(x, context, token_valid, override, places)
            if output is not None:
                reports.append((output.stats, output.routing))
        return x if self.final_norm is None else self.final_norm(x), reports

    def _blocks(self) -> Iterator[tuple[str, Block]]:
        for index, block in self.layers.items():
            assert isinstance(block, Block)
            yield index, block

    def _input(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        if self.embedding is not None and hidden is None:
            return self.embedding(batch.tokens)
        if self.embedding is None and hidden is not None:
            return hidden
        raise ConfigError(
            f"hidden comes from the previous chunk: chunk.has_embedding={self.embedding is not None}, "
            f"hidden is {'missing' if hidden is None else 'given'}. "
            "Give it to every chunk but the one with the embedding."
        )

    def _overrides(self, given: Sequence[Routing] | None) -> Iterator[Routing | None]:
        count = sum(block.moe is not None for _, block in self._blocks())
        if given is None:
            return iter([None] * count)
        if len(given) != count:
            raise ConfigError(
                "one routing for each mixture-of-experts layer of the chunk: "
                f"len(routing_override)={len(given)}, but layers {list(self.chunk.layers)} hold {count}. "
                f"Give {count}, or None."
            )
        return iter(given)
