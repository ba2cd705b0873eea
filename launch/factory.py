"""Models of a user's own: the factory that `--model package.module:factory` names."""

from __future__ import annotations

import importlib
import os
import sys

from isozyme.core.errors import ConfigError
from isozyme.models.decoder import build_model
from isozyme.models.types import ModelFactory


def factory_of(name: str | None) -> ModelFactory:
    """The package's decoder without a name, else what `load_factory` finds."""
    return build_model if name is None else load_factory(name)


def load_factory(name: str) -> ModelFactory:
    """The factory that `package.module:name` names; the current folder is searched as well.

    Raises:
        ConfigError: if there is no such thing, or it cannot be called.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"a model is named package.module:factory: --model={name}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"the model's module must be importable: --model={name}; {error}.") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(
            f"the model must be a factory: --model={name}; {module_name} has no callable {attribute}."
        )
    return found
