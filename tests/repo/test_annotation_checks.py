"""The import hook of pyproject.toml is at work where the tests run, and can be switched off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError

from isozyme.core.errors import divisors
from isozyme.moe.types import Dispatched


def test_a_wrong_type_is_refused() -> None:
    wrong: Any = "12"
    with pytest.raises(TypeCheckError):
        divisors(wrong)


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(TypeCheckError):
        Dispatched(
            rows=torch.zeros(3, 4), probs=torch.zeros(2), tokens_per_expert=torch.tensor([3]), num_rows=3
        )


@pytest.mark.usefixtures("unchecked_annotations")
def test_the_checks_can_be_switched_off() -> None:
    wrong: Any = "12"
    with pytest.raises(TypeError, match="can only concatenate str"):
        divisors(wrong)
