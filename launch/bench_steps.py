"""Training steps to be timed: ours, through the trainer's own step, and Hugging Face's Mixtral with FSDP2.

Both take random tokens, as many a rank, and end a step with clipped gradients, an AdamW update and the loss
on the host. Ours trains with what its configuration says; by default that is torch's fused AdamW, as theirs.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from isozyme.core.batch import Batch
from isozyme.core.config import RunConfig
from isozyme.core.errors import BackendError
from isozyme.launch.bench_measure import synchronize
from isozyme.launch.bench_model import device_filled_model, force_routing
from isozyme.launch.bench_peers import optional_module
from isozyme.launch.prepare import Preparation, Prepared
from isozyme.launch.report import grouped_choices
from isozyme.launch.step import TrainStep
from isozyme.launch.training_state import gradient_choice, training_state
from isozyme.models.convert import mixtral_config, mixtral_problems
from isozyme.models.stage import Stage
from isozyme.parallel.process_groups import ProcessGroups

LEARNING_RATE = 1e-5
"""Small and constant: nothing is learnt from random tokens, and nothing may overflow."""

Prepare = Callable[[Tensor], Any]
"""Starts to bring `[B, S + 1]` tokens, B windows, to the device; returns what a step takes."""
Step = Callable[[Any, Callable[[], None]], float]
"""One optimiser step on what was prepared, in micro-batches; calls its second argument once, while the device
is busy, and returns the loss."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A model that is ready to train."""

    prepare: Prepare
    step: Step
    windows: int
    """B, the windows that this rank's dense replica takes in a step."""
    replica: int
    """Number of the dense replica: ranks that have it in common take the same windows."""
    choices: Mapping[str, str] = field(default_factory=dict)
    """What runs, and why."""
    close: Callable[[], None] = lambda: None
    """Gives up what the end of communicators would wait for."""


def our_steps(
    config: RunConfig,
    groups: ProcessGroups,
    device: torch.device,
    dtype: torch.dtype,
    *,
    routing: str | None = None,
) -> Steps:
    """The package's model, gradient buffer, optimiser and step, as the trainer puts them together.

    Args:
        config: the run.
        groups: this rank's groups.
        device: of this rank.
        dtype: of the parameters.
        routing: what every router is made to choose, a form of `isozyme.launch.bench_routing`.
    """
    model = Stage.build(device_filled_model, config, groups, device, dtype)
    if routing is not None:
        force_routing(model, routing, config, groups, device)
    buffer, optimizer = training_state(model, groups, config.optim)
    train = TrainStep.of(config, model, buffer, optimizer, groups)

    preparation = Preparation(groups, device)

    def prepare(tokens: Tensor) -> Prepared:
        return preparation([random_batch(part) for part in tokens.split(config.train.micro_batch)])

    def step(given: Prepared, meanwhile: Callable[[], None]) -> float:
        return train(given.batches(), given.totals, LEARNING_RATE, meanwhile=meanwhile).loss

    return Steps(
        prepare=prepare,
        step=step,
        windows=config.train.global_batch // groups.topology.size("dp"),
        replica=groups.coordinates["dp"],
        choices={
            **grouped_choices(model.choices),
            "optimiser": str(optimizer.choice),
            **gradient_choice(buffer, config.optim),
        },
        close=train.close,
    )


def random_batch(tokens: Tensor) -> Batch:
    """Windows of one document each, every label valid."""
    inputs = tokens[:, :-1]
    positions = torch.arange(inputs.shape[1]).expand_as(inputs)
    everywhere = torch.ones_like(inputs, dtype=torch.bool)
    return Batch(
        tokens=inputs,
        labels=tokens[:, 1:],
        label_valid=everywhere,
        token_valid=everywhere,
        positions=positions,
        documents=torch.zeros_like(inputs),
        packed=False,
    )


def fsdp2_steps(
    config: RunConfig,
    implementation: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rank: int,
    world_size: int,
) -> Steps:
    """`MixtralForCausalLM` of the installed transformers, sharded layer by layer over all ranks.

    Parameters and optimiser state are fp32 shards; each layer is gathered in `dtype` (bf16) and its gradients
    are reduced in fp32. The default process group must exist.

    Args:
        config: a run whose model a Mixtral can express.
        implementation: how it computes the experts: `eager` or `grouped_mm`.
        device: of this rank.
        dtype: that of the computation.
        rank: this rank, which is a replica of its own.
        world_size: the number of ranks.

    Raises:
        BackendError: if transformers is missing or cannot express the model.
    """
    model = _sharded_mixtral(config, implementation, device, dtype, world_size)
    optim = config.optim
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )

    def prepare(tokens: Tensor) -> Tensor:
        inputs = tokens[:, :-1]
        return (inputs.pin_memory() if device.type == "cuda" else inputs).to(device, non_blocking=True)

    def step(given: Tensor, meanwhile: Callable[[], None]) -> float:
        parts = given.split(config.train.micro_batch)
        loss = torch.zeros((), device=device)
        for part in parts:
            output = model(input_ids=part, labels=part, use_cache=False)  # it shifts the labels
            own = output.loss / len(parts)
            own.backward()
            loss += own.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meanwhile()
        return float(loss)

    return Steps(
        prepare=prepare,
        step=step,
        windows=config.train.global_batch // world_size,
        replica=rank,
        choices={"experts": implementation, "optimiser": "torch.optim.AdamW(fused=True)"},
    )


def _sharded_mixtral(
    config: RunConfig, implementation: str, device: torch.device, dtype: torch.dtype, world_size: int
) -> Any:
    """Hugging Face's model with random weights, one FSDP2 unit a layer, ready to train."""
    problems = mixtral_problems(config.model)
    if problems:
        raise BackendError(f"a Mixtral cannot express this model: {'; '.join(problems)}")
    transformers = optional_module("transformers", "transformers>=5")
    settings = {k: v for k, v in mixtral_config(config).items() if k not in ("architectures", "model_type")}
    theirs = transformers.MixtralConfig(**settings, use_cache=False)
    theirs._experts_implementation = implementation
    theirs._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(theirs)
    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, torch.float32))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(theirs).to(device)  # its buffers are in no state
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            if parameter.dim() == 1:
                local.fill_(1.0)
            else:
                local.normal_(0, config.model.init_std)
    return model.train()


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Steps that were timed, on one rank."""

    milliseconds: list[float]
    first_loss: float
    last_loss: float

    @property
    def median_s(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.milliseconds) / 1000


def time_steps(steps: Steps, config: RunConfig, device: torch.device, *, warm_up: int, repeats: int) -> Timed:
    """Run and time steps over fresh random tokens, which differ from replica to replica.

    As in training, steps follow each other without a pause, and the tokens of a step are brought to the
    device during the step before. A step is timed from when the loss of the one before is known to when its
    own is.
    """
    draw = torch.Generator().manual_seed(1000 + steps.replica)
    shape = (steps.windows, config.data.window + 1)
    ahead: deque[Any] = deque()

    def prepare() -> None:
        ahead.append(steps.prepare(torch.randint(config.model.vocab_size, shape, generator=draw)))

    prepare()
    losses, times = [], []
    synchronize(device)
    began = time.perf_counter()
    for number in range(warm_up + repeats):
        losses.append(steps.step(ahead[0], prepare))
        ahead.popleft()
        began, before = time.perf_counter(), began
        if number >= warm_up:
            times.append(1000 * (began - before))
    return Timed(milliseconds=times, first_loss=losses[0], last_loss=losses[-1])


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Yields a function that says the peak of allocated bytes since the block began."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield lambda: torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
