"""The configuration of a run: frozen, keyword-only dataclasses that say their own broken rules.

A recipe (YAML) and `key=value` overrides are composed into one `RunConfig` by `isozyme.launch.compose`.
Every section has `problems()`, which lists its broken rules in words; `RunConfig.validate` raises them all
at once, before any process group exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from isozyme.core.context import AttentionConfig
from isozyme.core.errors import Rules, divisors
from isozyme.core.experts import ExpertBackend as ExpertBackend
from isozyme.core.experts import MoEConfig as MoEConfig
from isozyme.core.experts import RouterConfig as RouterConfig
from isozyme.core.pipeline import PipelineConfig
from isozyme.core.recording import recording_problems
from isozyme.core.tensor import tensor_problems
from isozyme.core.topology import Layout
from isozyme.core.training import OptimConfig as OptimConfig
from isozyme.core.training import TrainConfig as TrainConfig

Precision = Literal[
    "fp64",
    "fp32",
    "bf16",
    "fp8_rowwise",
    "fp8_current",
    "fp8_block",
    "fp8_delayed",
    "mxfp8",
    "mxfp8_emulated",
]
Recompute = Literal["none", "selective", "full"]
NormImplementation = Literal["auto", "te", "apex", "torch"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer with dense and mixture-of-experts layers."""

    vocab_size: int = 256
    hidden: int = 384
    num_layers: int = 2
    num_heads: int = 6
    num_kv_heads: int = 6
    head_dim: int | None = None
    """Width of one attention head; hidden / num_heads if null."""
    ffn: int = 1536
    """Hidden width of the dense layers' MLP."""
    pattern: str = "M"
    """Kinds of layers, repeated over the depth: M mixture of experts, D dense."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    rope_theta: float = 10_000.0
    norm: NormImplementation = "auto"
    """Whose kernels compute the norms; `auto` is the first usable of te, apex and torch."""
    norm_eps: float = 1e-5
    tied: bool = False
    """Whether the head shares the embedding's weight."""
    init_std: float = 0.02
    """Standard deviation of the weights; output projections are scaled by 1/sqrt(2 * num_layers)."""
    embedding_std: float | None = None
    """Standard deviation of the embedding. If null 1, or `init_std` where it is the head as well: logits of
    width-H products with a unit embedding would start in the hundreds."""
    recompute: Recompute = "none"
    """What backward makes again: nothing, the attention core and experts' activation, or whole layers."""

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.head_dim if self.head_dim is not None else self.hidden // self.num_heads

    @property
    def embedding_scale(self) -> float:
        """The standard deviation of the embedding."""
        if self.embedding_std is not None:
            return self.embedding_std
        return self.init_std if self.tied else 1.0

    def layer_kinds(self) -> str:
        """One letter a layer: the pattern repeated over the depth."""
        return (self.pattern * self.num_layers)[: self.num_layers]

    def problems(self, where: str = "model") -> list[str]:
        """Every broken rule in words."""
        rules = Rules(where)
        for name in ("vocab_size", "hidden", "num_layers", "num_heads", "num_kv_heads", "ffn"):
            value = getattr(self, name)
            rules.check(value >= 1, f"{where}.{name} must be at least 1: {where}.{name}={value}.")
        if not rules.broken:
            rules.check(
                self.head_dim is not None or self.hidden % self.num_heads == 0,
                f"num_heads must divide hidden when head_dim is null: {where}.hidden={self.hidden}, "
                f"{where}.num_heads={self.num_heads}. "
                f"Choose from {', '.join(map(str, divisors(self.hidden)))}.",
            )
            rules.check(
                self.num_heads % self.num_kv_heads == 0,
                f"num_kv_heads must divide num_heads: {where}.num_heads={self.num_heads}, "
                f"{where}.num_kv_heads={self.num_kv_heads}. "
                f"Choose from {', '.join(map(str, divisors(self.num_heads)))}.",
            )
            rules.check(
                self.head_width % 2 == 0 and self.head_width > 0,
                f"rotary embeddings need an even head width: {self.head_width}. Set {where}.head_dim.",
            )
        rules.check(
            bool(self.pattern) and set(self.pattern) <= {"M", "D"},
            f"pattern holds the letters M (experts) and D (dense) only: {where}.pattern={self.pattern!r}.",
        )
        for name in ("init_std", "embedding_std", "norm_eps", "rope_theta"):
            value = getattr(self, name)
            given = value is not None
            rules.check(not given or value > 0, f"{where}.{name} must be positive: {where}.{name}={value}.")
        rules.extend(self.moe.problems(f"{where}.moe"))
        return rules.broken


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which genome, how it is cut into windows, and which part is held out."""

    fasta: str = "sample:lambda"
    """Path of a FASTA file (plain or gzip), or `sample:lambda` for the phage that ships with the package."""
    window: int = 256
    """S, tokens a window."""
    overlap: int = 0
    """Tokens that neighbouring windows share; the stride is window - overlap."""
    held_out: float = 0.1
    """Share of the bases held out for evaluation."""
    split: Literal["auto", "contig", "tail"] = "auto"
    """Hold out whole contigs, or the tail; `auto` takes contigs if they come near the share `held_out`."""
    reverse_complement: bool = True
    """Draw each training window from either strand."""
    markov_order: int | None = None
    """Order of the Markov baseline; the best of 0..8 on the training part's own tail if null."""
    cache: str | None = None
    """Folder of the tokenised genome; beside the run's output if null."""

    def problems(self, where: str = "data") -> list[str]:
        """Every broken rule in words."""
        rules = Rules(where)
        rules.check(self.window >= 2, f"{where}.window must be at least 2: {where}.window={self.window}.")
        rules.check(
            0 <= self.overlap < max(self.window, 1),
            f"overlap must be at least 0 and less than window: {where}.overlap={self.overlap}, "
            f"{where}.window={self.window}.",
        )
        rules.check(
            0 < self.held_out < 1,
            f"{where}.held_out is a share between 0 and 1: {where}.held_out={self.held_out}. Try 0.1.",
        )
        rules.check(
            self.markov_order is None or 0 <= self.markov_order <= 12,
            f"{where}.markov_order must be between 0 and 12: {where}.markov_order={self.markov_order}.",
        )
        return rules.broken


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything about one run."""

    name: str = "run"
    seed: int = 0
    out: str | None = None
    """Folder of the results; `runs/<name>` if null."""
    resume: str | None = None
    """`latest`, or the path of a checkpoint."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Precision = "fp32"
    layout: Layout = field(default_factory=Layout)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def problems(self, world_size: int | None = None) -> list[str]:
        """Every broken rule of every section, and of their combination."""
        rules = Rules(self.name)
        rules.check(
            -(2**63) <= self.seed < 2**63, f"seed must be a number of 64 bits: seed={self.seed}. Try 0."
        )
        layout_problems = self.layout.problems(world_size)
        rules.extend(layout_problems)
        model_problems = self.model.problems()
        rules.extend(model_problems)
        rules.extend(self.data.problems())
        dp = None if layout_problems else self.layout.resolved().dp
        micro_batches = self.train.micro_batches(dp)
        rules.extend(self.optim.problems(micro_batches=micro_batches))
        rules.extend(self.train.problems(dp=dp))
        if self.layout.pp >= 1 and self.model.num_layers >= 1:
            rules.extend(
                self.pipeline.problems(
                    stages=self.layout.pp,
                    num_layers=self.model.num_layers,
                    micro_batches=micro_batches,
                )
            )
        if not model_problems and min(self.layout.tp, self.layout.cp, self.layout.etp) >= 1:
            rules.extend(tensor_problems(self.model, self.layout, self.data.window))
        experts, ep = self.model.moe.router.num_experts, self.layout.ep
        if ep >= 1 and experts >= 1 and "M" in self.model.layer_kinds():
            rules.check(
                experts % ep == 0,
                f"ep must divide num_experts: model.moe.router.num_experts={experts}, layout.ep={ep}; "
                f"{experts} % {ep} = {experts % ep}. "
                f"Choose ep from {', '.join(map(str, divisors(experts)))}.",
            )
        rules.extend(
            self.model.attention.problems(
                window=self.data.window,
                cp=self.layout.cp,
                tp=self.layout.tp,
                num_heads=self.model.num_heads,
                num_kv_heads=self.model.num_kv_heads,
            )
        )
        rules.check(
            self.model.recompute != "full" or self.precision != "fp8_delayed",
            f"delayed scaling must see each maximum once: model.recompute={self.model.recompute}, "
            f"precision={self.precision}. Use recompute=selective, or precision=fp8_current.",
        )
        rules.check(
            self.model.moe.dispatcher != "local" or ep == 1,
            "the local dispatcher holds all experts on one rank: "
            f"model.moe.dispatcher=local, layout.ep={ep}. "
            "Use alltoall, allgather or auto.",
        )
        if self.train.cuda_graph and not model_problems and min(ep, self.layout.etp) >= 1:
            rules.extend(recording_problems(self))
        return rules.broken

    def validate(self, world_size: int | None = None) -> None:
        """Raise one `ConfigError` that lists every broken rule."""
        rules = Rules(self.name)
        rules.extend(self.problems(world_size))
        rules.raise_if_broken()
