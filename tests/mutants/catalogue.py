"""All mutants, and those of them that stand for the rest where time is short."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.mutants.balance import BALANCE_MUTANTS
from tests.mutants.dispatch import DISPATCH_MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.permutation import PERMUTATION_MUTANTS
from tests.mutants.router import ROUTER_MUTANTS
from tests.mutants.training import TRAINING_MUTANTS

EVERY: tuple[Mutant, ...] = (
    *PERMUTATION_MUTANTS,
    *DISPATCH_MUTANTS,
    *ROUTER_MUTANTS,
    *BALANCE_MUTANTS,
    *TRAINING_MUTANTS,
)
MUTANTS: Mapping[str, Mutant] = MappingProxyType({mutant.id: mutant for mutant in EVERY})
"""By id."""

REPRESENTATIVE: tuple[str, ...] = (
    "dropped-slots-sort-first",
    "combine-without-sum",
    "padding-behind-all-experts",
    "swapped-chunks",
    "empty-rank-skips-the-counts",
    "backward-with-forward-splits",
    "slice-for-reduce-scatter",
    "weights-of-another-rank",
    "etp-member-missing",
    "capacity-off-by-one",
    "filler-has-a-weight",
    "ties-to-the-higher-id",
    "nan-chooses-one-expert-twice",
    "padding-is-routed",
    "balance-loss-twice",
    "one-slot-too-many",
    "identical-experts",
    "gradients-averaged",
    "norm-without-the-other-ranks",
)
"""Run by `make test`; `make mutants` runs all."""
