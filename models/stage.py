"""What one rank holds of a model, and how micro-batches pass through it: one chunk, or a stage of a pipeline.

The training step, evaluation and verification call a `Stage` and never a chunk, so that one rank alone, a
stage of a pipeline and one with several chunks take the same path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from isozyme.core.batch import Batch
from isozyme.core.config import ModelConfig, RunConfig
from isozyme.core.errors import ConfigError, UsageError
from isozyme.core.pipeline import PipelineConfig
from isozyme.models.types import Chunk, ModelFactory, ModelOutput
from isozyme.moe.types import Routing
from isozyme.parallel.pipeline_runner import ChunkOutput, run_schedule
from isozyme.parallel.pipeline_schedule import Schedule, forward_schedule, schedule
from isozyme.parallel.process_groups import ProcessGroups

Overrides = Sequence[Sequence[Routing]]
"""For each micro-batch the routing to replay in each expert layer of this rank, in order."""


Visitor = Callable[[int, int, ModelOutput], None]
"""`(chunk, micro_batch, output)`: looks at what each chunk of this rank made, right after its forward."""


def chunks_of(config: RunConfig, stages: int, stage: int) -> list[Chunk]:
    """The chunks that one of `stages` pipeline stages holds, from the embedding to the head.

    >>> from isozyme.core.config import ModelConfig
    >>> [list(chunk.layers) for chunk in chunks_of(RunConfig(model=ModelConfig(num_layers=3)), 2, 1)]
    [[1, 2]]
    """
    layers = config.pipeline.layers(config.model.num_layers, stages)
    last = len(layers) - 1
    return [
        Chunk(layers=layers[v], has_embedding=v == 0, has_head=v == last)
        for v in range(stage, len(layers), stages)
    ]


def expert_layers(model: ModelConfig, chunk: Chunk) -> range:
    """The numbers of a chunk's expert layers among those of the whole model."""
    kinds = model.layer_kinds()
    before = kinds[: chunk.layers.start].count("M")
    return range(before, before + kinds[chunk.layers.start : chunk.layers.stop].count("M"))


class Stage(nn.Module):
    """The chunks of a model that one rank holds.

    Args:
        chunks: follow `isozyme.models.types.Model`, in order; exactly one where there is no pipeline.
        groups: this rank's groups. With several stages all ranks of a pipeline build it together (one
            barrier, which NCCL needs before the first send).
        config: the run, for a pipeline of several stages; None for a whole model.
        dtype: of hidden states.
        device: where they are.

    Raises:
        UsageError: if the chunks are not those that the configuration gives this stage.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        groups: ProcessGroups,
        *,
        config: RunConfig | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.groups = groups
        self.pipeline = PipelineConfig() if config is None else config.pipeline
        self.hidden = 0 if config is None else config.model.hidden
        self.expert_layers: list[range] | None = None
        """For each chunk the numbers of its expert layers in the whole model; None if it is the whole."""
        self.num_expert_layers = 0 if config is None else config.model.layer_kinds().count("M")
        self.num_experts = 0 if config is None else config.model.moe.router.num_experts
        self._dtype, self._device = dtype, torch.device(device)
        self._communicator = groups["pp"]
        stages = self._communicator.size
        wanted = self.pipeline.num_chunks(stages)
        if len(chunks) != wanted or (stages > 1 and config is None):
            raise UsageError(
                f"a stage holds the chunks that its pipeline says: {len(chunks)} were given, "
                f"layout.pp={stages} and pipeline.chunks={self.pipeline.chunks} want {wanted}. "
                "Use Stage.build."
            )
        if config is not None and stages > 1:
            held = chunks_of(config, stages, self._communicator.rank)
            self.expert_layers = [expert_layers(config.model, chunk) for chunk in held]
            self._communicator.barrier()

    @classmethod
    def build(
        cls,
        factory: ModelFactory,
        config: RunConfig,
        groups: ProcessGroups,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Stage:
        """This rank's stage of the model that `factory` builds, as `config.pipeline` cuts it."""
        stages, stage = groups.topology.size("pp"), groups.coordinates["pp"]
        held = chunks_of(config, stages, stage)
        chunks = [factory(config, groups, chunk, device, dtype) for chunk in held]
        return cls(chunks, groups, config=config, dtype=dtype, device=device)

    @property
    def choices(self) -> dict[str, str]:
        """What the `auto` settings of this rank's layers became, and why."""
        return {key: words for chunk in self.chunks for key, words in getattr(chunk, "choices", {}).items()}

    def train_on(
        self,
        batches: Sequence[Batch],
        loss_of: Callable[[ModelOutput], Tensor | None],
        visit: Visitor,
        overrides: Overrides | None = None,
    ) -> None:
        """Forward and backward of every micro-batch, in the order of the pipeline's schedule.

        All ranks call it together, with as many micro-batches each; those of one pipeline with the same.

        Args:
            batches: this rank's micro-batches, on its device.
            loss_of: what one chunk's output adds to the step's loss, a scalar; None if nothing. Losses of
                layers before the head stay on their stage: they are not sent, only their gradients are.
            visit: called after each forward.
            overrides: routings to replay.
        """
        stages, kind = self._communicator.size, self.pipeline.schedule
        order: Schedule = schedule(
            kind if stages > 1 else "1f1b", stages, len(batches), self.pipeline.num_chunks(stages)
        )
        self._run(order, batches, loss_of, visit, overrides)

    @torch.no_grad()
    def evaluate_on(self, batches: Sequence[Batch], visit: Visitor) -> None:
        """Forward alone of every micro-batch; otherwise as `train_on`."""
        stages = self._communicator.size
        order = forward_schedule(stages, len(batches), self.pipeline.num_chunks(stages))
        self._run(order, batches, lambda _: None, visit, None)

    def _run(
        self,
        order: Schedule,
        batches: Sequence[Batch],
        loss_of: Callable[[ModelOutput], Tensor | None],
        visit: Visitor,
        overrides: Overrides | None,
    ) -> None:
        def forward(chunk: int, micro_batch: int, hidden: Tensor | None) -> ChunkOutput:
            replayed = None if overrides is None else self._of_chunk(overrides[micro_batch], chunk)
            output: ModelOutput = self.chunks[chunk](
                batches[micro_batch], hidden=hidden, routing_override=replayed
            )
            self._check(output, chunk)
            visit(chunk, micro_batch, output)
            return ChunkOutput(hidden=output.hidden, loss=loss_of(output))

        run_schedule(order, forward, self._communicator, lambda index: self._hidden_like(batches[index]))

    def _hidden_like(self, batch: Batch) -> Tensor:
        """An empty tensor for this rank's part of a micro-batch's hidden states: `[B, S / (cp * tp), H]`."""
        length = batch.window_length // self.groups.topology.size(("tp", "cp"))
        return torch.empty((batch.num_windows, length, self.hidden), dtype=self._dtype, device=self._device)

    def _of_chunk(self, routings: Sequence[Routing], chunk: int) -> Sequence[Routing]:
        if self.expert_layers is None:
            return routings
        counts = [len(layers) for layers in self.expert_layers]
        if len(routings) != sum(counts):
            raise ConfigError(
                f"one routing for each expert layer of this stage: {len(routings)} were given for "
                f"{sum(counts)} layers. Give {sum(counts)} for each micro-batch, or None."
            )
        first = sum(counts[:chunk])
        return routings[first : first + counts[chunk]]

    def _check(self, output: ModelOutput, chunk: int) -> None:
        if self.expert_layers is not None and len(output.stats) != len(self.expert_layers[chunk]):
            raise ConfigError(
                "in a pipeline a chunk reports one RouterStats for each of its layers of kind M: chunk "
                f"{chunk} of stage {self._communicator.rank} reported {len(output.stats)}, "
                f"model.pattern gives it {len(self.expert_layers[chunk])}. "
                "Make model.pattern say what the model is."
            )
