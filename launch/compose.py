"""From a recipe's name (or a YAML path) and `key=value` overrides to one frozen `RunConfig`.

Layers are merged with OmegaConf in this order: the defaults of the dataclasses, the recipe's `base` and its
bases, the recipe, the overrides. A layer may name a `preset` of `isozyme.models.presets`, which sets `model`
and `data.window` before its own keys do. Interpolations such as `${data.window}` see the merged whole. The
strict conversion to the dataclasses is in `isozyme.launch.convert`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from isozyme.core.config import RunConfig
from isozyme.core.errors import ConfigError, Rules, did_you_mean
from isozyme.launch.convert import Origin, convert_run
from isozyme.models.presets import preset

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Layer:
    """One source of settings: a plain tree and the origin of each of its dotted keys."""

    values: dict[str, Any]
    origins: Mapping[str, Origin] = field(default_factory=dict)


@dataclass(frozen=True)
class Composed:
    """A composed configuration and the origin of each dotted key that is not a default."""

    config: RunConfig
    origins: Mapping[str, Origin]

    def origin(self, key: str) -> str:
        """Where the value of a dotted key came from, in words."""
        found = self.origins.get(key)
        return found.where if found is not None else "default"


def compose(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of one run.

    Args:
        recipe: the name of a recipe that ships with the package, or the path of a YAML file.
        overrides: `dotted.key=value`, the value in YAML; later ones win.

    Raises:
        ConfigError: listing every unknown key, wrong type, illegal value and broken rule together.

    >>> compose("L0_sanity", ["train.steps=3", "name=${data.window}-windows"]).name
    '256-windows'
    """
    return compose_with_origins(recipe, overrides).config


def compose_with_origins(recipe: str, overrides: Sequence[str] = ()) -> Composed:
    """As `compose`, with the origin of every value."""
    return _compose(f"recipe {recipe}", _defaults(Path(recipe).stem), _recipe_layers(recipe), overrides)


def compose_stored(stored: Mapping[str, Any], where: str, overrides: Sequence[str] = ()) -> RunConfig:
    """A configuration that a run has stored (as nested plain values), with overrides on top.

    Raises:
        ConfigError: as `compose`; also if the stored one comes from another version with other keys.
    """
    return _compose(f"configuration in {where}", _defaults("run"), [Layer(dict(stored))], overrides).config


def _compose(subject: str, defaults: Layer, given: list[Layer], overrides: Sequence[str]) -> Composed:
    """Merge the layers and the overrides, and convert; everything that is wrong is raised at once."""
    rules = Rules(subject)
    for override in overrides:
        try:
            given.append(_override_layer(override))
        except ConfigError as error:
            rules.check(False, str(error))
    layers = [defaults]
    for layer in given:
        layers += [*_preset_layer(layer, rules), layer]
    tree = _merge(layers)
    origins: dict[str, Origin] = {}
    for layer in layers:
        for key, origin in layer.origins.items():
            origins.pop(key, None)  # so that the order is that of the layers: the last one wins
            origins[key] = origin
    config = convert_run(tree, origins, rules)
    rules.raise_if_broken()
    return Composed(config, origins)


def recipe_names() -> list[str]:
    """The recipes that ship with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_path(recipe: str, beside: Path | None = None) -> Path:
    """The file of a recipe given by name or by path.

    Args:
        recipe: as the user typed it. Something with a slash or a YAML suffix is a path.
        beside: folder that a relative path starts from (that of the recipe which names it as `base`).

    Raises:
        ConfigError: if there is no such recipe or file.
    """
    if "/" in recipe or recipe.endswith((".yaml", ".yml")):
        path = (beside or Path()) / Path(recipe).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"a recipe must be a file or a known name: no file {path.absolute()}. "
                f"Known recipes: {', '.join(recipe_names())}."
            )
        return path
    path = RECIPES / f"{recipe}.yaml"
    if not path.is_file():
        near, known = did_you_mean(recipe, recipe_names()), ", ".join(recipe_names())
        listed = "" if known in near else f" Known recipes: {known}."
        raise ConfigError(f"unknown recipe: {recipe}. {near}{listed} Or give the path of a YAML file.")
    return path


def to_yaml(config: RunConfig) -> str:
    """The configuration as YAML that `compose` reads back to the same value."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(asdict(config))))


def _defaults(name: str) -> Layer:
    return Layer(_plain(asdict(RunConfig(name=name))))


def _preset_layer(layer: Layer, rules: Rules) -> list[Layer]:
    """The settings of the preset that a layer names, if it does; the key is taken out of the layer."""
    if "preset" not in layer.values:
        return []
    name = layer.values.pop("preset")
    try:
        found = preset(str(name))
    except ConfigError as error:
        rules.check(False, f"{error} ({layer.origins['preset'].where})")
        return []
    return [Layer({"model": _plain(asdict(found.model)), "data": {"window": found.window}})]


def _recipe_layers(recipe: str) -> list[Layer]:
    """The layers of a recipe, its furthest base first."""
    layers: list[Layer] = []
    seen: list[Path] = []
    path: Path | None = recipe_path(recipe)
    while path is not None:
        if path.resolve() in seen:
            chain = " -> ".join(str(p) for p in [*seen, path.resolve()])
            raise ConfigError(f"recipes must not extend each other in a circle: {chain}. Remove one base.")
        seen.append(path.resolve())
        layer = _file_layer(path)
        base = layer.values.pop("base", None)
        if base is not None and not isinstance(base, str):
            raise ConfigError(f"base names one recipe: base={base!r} in {path}. Write base: NAME.")
        layers.insert(0, layer)
        path = recipe_path(base, beside=path.parent) if base is not None else None
    return layers


def _file_layer(path: Path) -> Layer:
    """Read one YAML file, with the line of each key."""
    try:
        text = path.read_text(encoding="utf-8")
        values = OmegaConf.to_container(OmegaConf.create(text or "{}"), resolve=False)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else str(path)
        raise ConfigError(f"a recipe must be well-formed YAML: {place}: {error.problem}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, OSError, OmegaConfBaseException) as error:
        raise ConfigError(f"a recipe must be readable, well-formed YAML: {path}: {error}.") from error
    if not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else "a single value"
        raise ConfigError(f"a recipe must hold sections and keys: {path} holds {kind}. Write key: value.")
    origins = {key: Origin(f"{path}:{line}") for key, line in _lines(node)}
    return Layer({str(key): value for key, value in values.items()}, origins)


def _lines(node: yaml.Node | None, prefix: str = "") -> Iterable[tuple[str, int]]:
    """(dotted key, line number from 1) of every key below a YAML node."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            dotted = f"{prefix}{key.value}"
            yield dotted, key.start_mark.line + 1
            yield from _lines(value, f"{dotted}.")


def _override_layer(override: str) -> Layer:
    key, equals, raw = override.partition("=")
    key = key.strip()
    if not equals or not key or any(not part for part in key.split(".")):
        raise ConfigError(f"an override must read key=value: {override!r}. For instance train.steps=10.")
    try:
        loaded = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}={raw}"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        problem = getattr(error, "problem", None) or error
        raise ConfigError(
            f"an override's value must be well-formed YAML: {override!r}: {problem}."
        ) from error
    assert isinstance(loaded, dict)
    origins = {key: Origin(f"override {override!r}", raw)}
    return Layer({str(name): value for name, value in loaded.items()}, origins)


def _merge(layers: Sequence[Layer]) -> dict[str, Any]:
    """All layers as one plain tree, interpolations resolved."""
    try:
        merged = OmegaConf.merge(*(OmegaConf.create(layer.values) for layer in layers))
        tree = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        problem = str(error.msg if hasattr(error, "msg") else error).strip().splitlines()[0]
        key = getattr(error, "full_key", None)
        raise ConfigError(f"an interpolation cannot be resolved: {key or 'recipe'}: {problem}.") from error
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _plain(value: Any) -> Any:
    """Tuples as lists, all the way down (YAML knows no tuples)."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value
