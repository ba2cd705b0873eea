"""What is prepared during the step before is what the step would have made of the data itself."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from isozyme.core.batch import Batch, StepTotals
from isozyme.core.topology import Layout, Topology
from isozyme.launch.prepare import Preparation
from isozyme.parallel.process_groups import ProcessGroups, World
from isozyme.parallel.simulated import simulate
from tests.models.common import random_batch


@pytest.mark.usefixtures("unchecked_annotations")
def test_counts_are_those_of_all_dense_replicas_and_batches_those_of_this_rank() -> None:
    def rank(world: World) -> tuple[StepTotals, bool]:
        groups = ProcessGroups(Topology(Layout(tp=2, dp=2)), world)
        replica = groups.coordinates["dp"]
        valid = torch.arange(16).expand(2, -1) < 5 + replica
        given = [random_batch(2, 16, seed=10 * replica + part, label_valid=valid) for part in range(2)]
        prepared = Preparation(groups, torch.device("cpu"))(given)
        return prepared.totals, all(map(same, prepared.batches(), given))

    expected = StepTotals(valid_labels=4 * 5 + 4 * 6, windows=8, real_tokens=8 * 16)
    assert simulate(4, rank) == [(expected, True)] * 4


def same(one: Batch, other: Batch) -> bool:
    pairs = ((getattr(one, field.name), getattr(other, field.name)) for field in fields(Batch))
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)
