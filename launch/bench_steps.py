"""Training steps to be timed: ours, through the trainer's own step, and Hugging Face's Mixtral with FSDP2.

Both take the same random tokens, one micro-batch a step, and end a step with clipped gradients, an AdamW
update (torch's fused one) and the loss on the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from isozyme.core.batch import Batch
from isozyme.core.config import RunConfig
from isozyme.core.errors import BackendError
from isozyme.core.genome.windows import totals_of
from isozyme.launch.bench_measure import synchronize
from isozyme.launch.bench_peers import optional_module
from isozyme.launch.report import grouped_choices
from isozyme.launch.step import TrainStep, step_totals
from isozyme.models.convert import mixtral_config, mixtral_problems
from isozyme.models.decoder import build_model
from isozyme.models.types import Chunk
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.optimizer import Optimizer
from isozyme.parallel.process_groups import ProcessGroups

LEARNING_RATE = 1e-5
"""Small and constant: nothing is learnt from random tokens, and nothing may overflow."""

Step = Callable[[Tensor], float]
"""One optimiser step on `[B, S + 1]` tokens of this rank (on the CPU); returns the loss."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A model that is ready to train."""

    step: Step
    choices: Mapping[str, str] = field(default_factory=dict)
    """What runs, and why."""


def our_steps(config: RunConfig, groups: ProcessGroups, device: torch.device, dtype: torch.dtype) -> Steps:
    """The package's model, gradient buffer, optimiser and step."""
    model = build_model(config, groups, Chunk.whole(config.model.num_layers), device, dtype)
    buffer = GradientBuffer(model.parameters(), groups)
    optimizer = Optimizer(buffer, config.optim)
    train = TrainStep(model, buffer, optimizer, groups, clip=config.optim.clip)

    def step(tokens: Tensor) -> float:
        batch = random_batch(tokens)
        totals = step_totals(totals_of([batch]), groups, device)
        return train([batch.to(device)], totals, LEARNING_RATE).loss

    return Steps(step=step, choices={**grouped_choices(model.choices), "optimiser": str(optimizer.choice)})


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
    config: RunConfig, implementation: str, device: torch.device, dtype: torch.dtype, world_size: int
) -> Steps:
    """`MixtralForCausalLM` of the installed transformers, sharded layer by layer over all ranks.

    Parameters and optimiser state are fp32 shards; each layer is gathered in `dtype` (bf16) and its gradients
    are reduced in fp32. The default process group must exist.

    Args:
        config: a run whose model a Mixtral can express.
        implementation: how it computes the experts: `eager` or `grouped_mm`.
        device: of this rank.
        dtype: that of the computation.
        world_size: the number of ranks.

    Raises:
        BackendError: if transformers is missing or cannot express the model.
    """
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
    model.train()
    optim = config.optim
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )

    def step(tokens: Tensor) -> float:
        inputs = tokens[:, :-1].to(device)
        loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss  # it shifts the labels itself
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return Steps(step=step, choices={"experts": implementation, "optimiser": "torch.optim.AdamW(fused=True)"})


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


def time_steps(
    step: Step, config: RunConfig, device: torch.device, *, rank: int, warm_up: int, steps: int
) -> Timed:
    """Run and time steps over fresh random tokens, which differ from rank to rank."""
    draw = torch.Generator().manual_seed(1000 + rank)
    shape = (config.train.micro_batch, config.data.window + 1)
    losses, times = [], []
    for number in range(warm_up + steps):
        tokens = torch.randint(config.model.vocab_size, shape, generator=draw)
        synchronize(device)
        began = time.perf_counter()
        losses.append(step(tokens))
        synchronize(device)
        if number >= warm_up:
            times.append(1000 * (time.perf_counter() - began))
    return Timed(milliseconds=times, first_loss=losses[0], last_loss=losses[-1])


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Yields a function that says the peak of allocated bytes since the block began."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield lambda: torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
