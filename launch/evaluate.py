"""Bits per base: a model's cross-entropy on bases it was not trained on, each base a label at most once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from isozyme.core.batch import Batch
from isozyme.core.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from isozyme.core.genome.dataset import must_hold_bases
from isozyme.core.genome.schedule import evaluation_indices
from isozyme.core.genome.split import Region
from isozyme.core.genome.store import Genome
from isozyme.core.genome.stream import TokenStream
from isozyme.core.genome.windows import BLANK, HeldOutWindows
from isozyme.core.topology import Topology
from isozyme.launch.compose import compose_stored
from isozyme.launch.factory import factory_of
from isozyme.launch.requirements import Machine, check
from isozyme.models.stage import Stage
from isozyme.models.types import Chunk, ModelOutput
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.weights import METADATA, load_weights


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts some bases."""

    bits_per_base: float
    labels: int
    """The bases predicted: labels that are A, C, G or T."""


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], groups: ProcessGroups, device: torch.device
) -> Evaluation:
    """The mean cross-entropy in bits over all valid labels of all ranks' batches.

    All ranks call it together, each with as many batches (padding alone where windows have run out), since
    the experts' ranks exchange tokens; those of one pipeline and one CP group with the same. The model is
    left in the mode (training or not) it was in.

    Args:
        model: this rank's `Stage`, or the whole model.
        batches: this rank's micro-batches.
        groups: this rank's groups.
        device: where the model is.

    Raises:
        DataError: if no label is valid.
        NonFiniteError: if the cross-entropy is NaN or infinite; on all ranks alike.
    """
    stage = model if isinstance(model, Stage) else Stage([model], groups)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    training = stage.training
    stage.eval()
    try:
        for round_ in _rounds(batches, device, groups["pp"].size):

            def add(_chunk: int, micro_batch: int, output: ModelOutput, round_: list[Batch] = round_) -> None:
                if output.loss_sum is not None:
                    labels = round_[micro_batch].label_valid.sum() * (groups["cp"].rank == 0)
                    sums.add_(torch.stack([output.loss_sum.double(), labels.double()]))

            stage.evaluate_on(round_, add)
    finally:
        stage.train(training)
    nats, labels = groups["pp"].all_reduce(groups["cp", "dp"].all_reduce(sums)).tolist()
    if not labels:
        raise DataError("there is nothing to predict: no label of the evaluated windows is A, C, G or T.")
    if not math.isfinite(nats):
        raise NonFiniteError(
            f"the cross-entropy must be finite: its sum over {int(labels):,} labels is {nats}. The weights "
            "hold NaN or infinity, or are too large for the precision. Take those of an earlier checkpoint."
        )
    return Evaluation(nats / labels / math.log(2), int(labels))


def _rounds(batches: Iterable[Batch], device: torch.device, stages: int) -> Iterator[list[Batch]]:
    """The batches on the device, one at a time, or as many at once as keep a pipeline mostly busy."""
    left = iter(batches)
    at_once = 1 if stages == 1 else 4 * stages
    while found := [batch.to(device) for batch in islice(left, at_once)]:
        yield found


def chosen_windows(available: int, wanted: int | None) -> list[int]:
    """Which held-out windows an evaluation reads: all, or `wanted` of them evenly spread.

    >>> chosen_windows(10, 3)
    [0, 3, 6]
    """
    count = available if wanted is None else min(wanted, available)
    return [index * available // count for index in range(count)]


def held_out_batches(
    windows: HeldOutWindows, chosen: Sequence[int], groups: ProcessGroups, micro_batch: int
) -> Iterator[Batch]:
    """This rank's micro-batches of the chosen windows, one for each call of the model."""
    plan = evaluation_indices(len(chosen), groups.coordinates["dp"], groups.topology.size("dp"), micro_batch)
    for places in plan:
        yield windows.batch([chosen[place] if place != BLANK else BLANK for place in places])


def evaluate_file(
    weights: str, fasta: str, overrides: Sequence[str] = (), model_name: str | None = None
) -> list[str]:
    """Score a whole FASTA file with the weights of a run, in this process config.

    Args:
        weights: a `weights.safetensors` of a run; its header holds the configuration.
        fasta: path of the genome.
        overrides: `key=value` on top of that configuration, such as data.window=1024 or device=cpu.
        model_name: `package.module:factory` of the model, if it is not the package's decoder. It must be said
            here: a file of weights alone never makes this process import something.

    Returns:
        Lines of text: the result, and what ran.

    Raises:
        CheckpointError: the weights are missing, damaged or of another model.
        ConfigError: the weights are of a model of a user's own, which was not named.
        DataError: the FASTA file is missing or malformed.
    """
    stored = read_metadata(Path(weights))
    if model_name is None and stored.get("model") is not None:
        raise ConfigError(
            f"these weights are of a model of your own: {weights} was trained with --model "
            f"{stored['model']}. Give the same --model, if you trust that module."
        )
    factory = factory_of(model_name)
    config = compose_stored(stored["config"], weights, [*_ALONE, *overrides, f"data.fasta={fasta}"])
    choice = check(config, Machine.here())
    device = torch.device(choice.device)
    groups = ProcessGroups(Topology(config.layout), SingleWorld())
    with TemporaryDirectory(prefix="isozyme-genome-") as temporary:
        genome = Genome.open(config.data.fasta, config.data.cache or temporary)
        whole = [Region(contig, 0, length) for contig, length in enumerate(genome.lengths)]
        must_hold_bases(genome, whole, "the file")
        windows = HeldOutWindows(TokenStream(genome, whole), window=config.data.window)
        model = factory(config, groups, Chunk.whole(config.model.num_layers), device, choice.dtype)
        load_weights(weights, model, groups)
        batches = held_out_batches(windows, range(len(windows)), groups, config.train.micro_batch)
        result = evaluate(model, batches, groups, device)
    return [
        f"{result.bits_per_base:.4f} bits per base over {result.labels:,} bases of {fasta}",
        f"weights {weights} (step {stored.get('step')}), window {config.data.window}, {choice.device} "
        f"({choice.why_device})",
    ]


_ALONE = (
    "layout={tp: 1, cp: 1, dp: 1, pp: 1, ep: 1, etp: 1}",
    "train.global_batch=${train.micro_batch}",
    "train.cuda_graph=false",
    "model.moe.dispatcher=auto",
    "model.moe.equal_tokens=false",
    "device=auto",
)
"""The settings of a run on many ranks, or of its device, that one process need not be able to share."""


def read_metadata(path: Path) -> dict[str, Any]:
    """What a run wrote into the header of its weights: configuration, step, digest of the genome.

    Raises:
        CheckpointError: if there is no such file, or it holds no such header.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found: dict[str, Any] = json.loads((file.metadata() or {})[METADATA])
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"weights must be a readable safetensors file: {path}; {error}.") from error
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"weights must carry the configuration of their run: the header of {path} has no {METADATA!r}. "
            "Give the weights.safetensors that isozyme train wrote."
        ) from error
    return found
