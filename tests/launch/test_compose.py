"""Recipes and overrides become one configuration, or one error that says everything that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from isozyme.core.errors import ConfigError
from isozyme.launch.compose import (
    compose,
    compose_stored,
    compose_with_origins,
    recipe_names,
    to_yaml,
)


def refusal(recipe: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        compose(recipe, overrides)
    return str(raised.value)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_composes_and_survives_printing(name: str, tmp_path: Path) -> None:
    config = compose(name)
    printed = tmp_path / "printed.yaml"
    printed.write_text(to_yaml(config))
    assert compose(str(printed)) == config


def test_later_overrides_win_over_earlier_ones_and_over_the_recipe() -> None:
    config = compose("L0_sanity", ["train.steps=3", "train.steps=5", "optim.betas=[0.8,0.9]"])
    assert (config.train.steps, config.optim.betas) == (5, (0.8, 0.9))


def test_a_recipe_extends_its_base_and_keeps_what_it_does_not_set(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("base: L0_sanity\ntrain: {steps: 7}\nmodel: {hidden: 96}\n")
    (tmp_path / "second.yaml").write_text("base: first.yaml\nmodel: {num_layers: 4}\n")
    config = compose(str(tmp_path / "second.yaml"))
    assert (config.train.steps, config.model.hidden, config.model.num_layers) == (7, 96, 4)
    assert config.layout.ep == 2
    assert config.name == "second"


def test_recipes_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    assert "circle" in refusal(str(tmp_path / "a.yaml"))


def test_a_preset_sets_the_model_below_the_keys_of_its_own_layer() -> None:
    config = compose("L0_sanity", ["preset=mixtral_8x7b", "model.num_layers=3"])
    assert (config.model.hidden, config.data.window, config.model.num_layers) == (4096, 4096, 3)
    assert "'mixtral_8x7b'" in refusal("L0_sanity", "preset=mixtral_8x7")


def test_interpolations_see_overrides_and_defaults() -> None:
    config = compose("L0_sanity", ["data.window=128", "name=w${data.window}-${model.moe.router.score}"])
    assert config.name == "w128-softmax"


def test_an_interpolation_of_nothing_is_refused() -> None:
    assert "nope" in refusal("L0_sanity", "name=${nope}")


def test_null_clears_an_optional_value_and_only_such() -> None:
    config = compose("L0_sanity", ["model.moe.capacity_factor=2", "model.moe.capacity_factor=null"])
    assert config.model.moe.capacity_factor is None
    assert "train.steps must be a whole number: train.steps=null" in refusal("L0_sanity", "train.steps=null")


def test_text_overrides_are_taken_as_typed() -> None:
    assert compose("L0_sanity", ["name=007"]).name == "007"
    assert compose("L0_sanity", ["data.fasta=a=b.fa"]).data.fasta == "a=b.fa"


def test_an_integer_is_a_number_but_a_bool_is_no_integer() -> None:
    lr = compose("L0_sanity", ["optim.lr=1"]).optim.lr
    assert lr == 1.0
    assert isinstance(lr, float)
    assert "train.steps=true" in refusal("L0_sanity", "train.steps=true")


def test_all_mistakes_are_reported_together_with_path_origin_and_advice(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: L0_sanity\ntrain:\n  stps: 3\nmodel:\n  moe: {experts: lop}\nlayout: {ep: 3}\n")
    text = refusal(str(recipe), "topk=2", "optim.lr=fast", "train.micro_batch=1e2", "precision=fp31", "x")
    assert "9 rules broken" in text
    for part in (
        f"unknown key: train.stps ({recipe}:3). Did you mean 'train.steps'?",
        f"model.moe.experts='lop' ({recipe}:5). Did you mean 'loop'?",
        "unknown key: topk (override 'topk=2'). Did you mean model.moe.router.topk?",
        "optim.lr must be a number: optim.lr='fast' (override 'optim.lr=fast')",
        "train.micro_batch=100.0 (override 'train.micro_batch=1e2'). Write 100.",
        "Did you mean 'fp32'?",
        "an override must read key=value: 'x'",
        "etp*ep must divide tp*cp*dp",
        "ep must divide num_experts",
    ):
        assert part in text


def test_rules_about_a_value_that_was_not_understood_are_not_reported() -> None:
    text = refusal("L0_sanity", "layout.ep=two", "layout.dp=3")
    assert "layout.ep must be a whole number" in text
    assert "must divide" not in text


def test_a_section_is_no_value_and_a_value_is_no_section() -> None:
    assert "model is a section, not a value: model=3 (override 'model=3')" in refusal("L0_sanity", "model=3")
    text = refusal("L0_sanity", "model.hidden.x=3")
    assert "model.hidden must be a whole number" in text
    assert "(override 'model.hidden.x=3')" in text


def test_an_unknown_recipe_lists_the_known_ones_and_the_nearest() -> None:
    text = refusal("L0_santy")
    assert "Did you mean 'L0_sanity'?" in text
    assert all(name in text for name in recipe_names())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "no.yaml") in refusal(str(tmp_path / "no.yaml"))


@pytest.mark.parametrize(
    ("text", "where"),
    [("train:\n  steps: [1\n", ":3:"), ("a: 1\na: 2\n", ":2:"), ("- 1\n", "a list"), ("\tx: 1\n", ":1:")],
)
def test_an_ill_formed_file_is_refused_with_its_line(tmp_path: Path, text: str, where: str) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(text)
    assert where in refusal(str(recipe))


def test_every_value_knows_its_origin(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: L0_sanity\n\nseed: 4\n")
    composed = compose_with_origins(str(recipe), ["train.steps=9"])
    assert composed.origin("seed") == f"{recipe}:3"
    assert composed.origin("train.steps") == "override 'train.steps=9'"
    assert composed.origin("optim.eps") == "default"


def test_a_stored_configuration_composes_with_overrides() -> None:
    from dataclasses import asdict

    config = compose("L0_sanity", ["seed=5"])
    again = compose_stored(asdict(config), "weights", ["data.window=32"])
    assert (again.seed, again.data.window, again.layout) == (5, 32, config.layout)


def test_delayed_scaling_cannot_be_recomputed() -> None:
    message = refusal("L0_sanity", "model.recompute=full", "precision=fp8_delayed")
    assert "model.recompute=full, precision=fp8_delayed" in message
    assert compose("L0_sanity", ["model.recompute=selective", "precision=fp8_delayed"])


@pytest.mark.parametrize(
    "override", ["model.recompute=half", "optim.sharded=maybe", "optim.overlap_reduce=2"]
)
def test_settings_of_memory_and_overlap_have_few_values(override: str) -> None:
    assert override.split("=")[0] in refusal("L0_sanity", override)
