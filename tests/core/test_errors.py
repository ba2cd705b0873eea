"""One family of errors, and one report of all broken rules."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isozyme.core import errors
from isozyme.core.errors import ConfigError, IsozymeError, Rules, did_you_mean, divisors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)]


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_every_error_belongs_to_the_family_and_explains_itself(error):
    assert issubclass(error, IsozymeError)
    assert error.__doc__


@given(st.lists(st.tuples(st.booleans(), st.text(min_size=1, max_size=8))))
def test_every_broken_rule_is_reported_and_no_other(checks):
    rules = Rules("subject")
    assert [rules.check(holds, message) for holds, message in checks] == [holds for holds, _ in checks]
    broken = [message for holds, message in checks if not holds]
    assert rules.broken == broken
    if not broken:
        rules.raise_if_broken()
        return
    with pytest.raises(ConfigError) as caught:
        rules.raise_if_broken()
    assert str(caught.value) == "\n  - ".join(
        [f"subject: {len(broken)} rule{'s' if len(broken) > 1 else ''} broken", *broken]
    )


def test_rules_of_another_section_are_taken_over():
    rules = Rules("run")
    rules.extend(["a", "b"])
    assert rules.broken == ["a", "b"]


@given(st.integers(1, 300))
def test_divisors_are_all_that_divide(number):
    assert divisors(number) == [d for d in range(1, number + 1) if not number % d]


def test_a_near_miss_is_suggested_and_else_all_are_listed():
    assert did_you_mean("alltoal", ["alltoall", "allgather", "local"]) == "Did you mean 'alltoall'?"
    assert did_you_mean("nccl", ["b", "a"]) == "Choose from a, b."
