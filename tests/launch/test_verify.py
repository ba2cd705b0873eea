"""The command: what it accepts, what it prints, how it ends; models of one's own, right and wrong."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

from isozyme.core.config import MoEConfig, RouterConfig, RunConfig
from isozyme.core.errors import ConfigError
from isozyme.core.topology import Layout
from isozyme.launch.compose import compose
from isozyme.launch.verify import load_factory, main
from isozyme.launch.verify_all import Subject, verify_families
from isozyme.launch.verify_families import FAMILIES, Family, draws
from isozyme.launch.verify_judge import Reference, judge
from isozyme.launch.verify_plan import default_layouts, prepare, settings, verify
from isozyme.launch.verify_report import print_verdicts
from isozyme.launch.verify_run import Experiment, Setting
from isozyme.launch.verify_tamper import Fault
from isozyme.models.decoder import build_model
from isozyme.models.types import Chunk
from isozyme.moe.router import Router
from isozyme.parallel.process_groups import ProcessGroups

UNCHECKED = pytest.mark.usefixtures("unchecked_annotations")
"""Where several settings are run; annotations are checked where one is."""
SPREAD = Layout(dp=2, ep=2)
USER = "tests.launch.user_model:right"


def _at(layout: Layout) -> Setting:
    return Setting(layout=layout, dtype=torch.float64, dispatcher="alltoall", experts="loop")


def test_a_layout_that_agrees_ends_with_exit_code_zero(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["L0_sanity", "--layouts", "dp=2 ep=2", "model.num_layers=1", "--dtype", "fp64"])
    printed = capsys.readouterr().out
    assert code == 0
    assert "dp=2 ep=2" in printed
    assert "all 2 settings agree" in printed
    assert "tokens per expert" in printed


def test_a_wrong_model_ends_with_exit_code_one_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = "tests.launch.user_model:forgotten_reduction"
    code = main(["L0_sanity", "--layouts", "dp=2", "--model", model, "--dtype", "fp64"])
    printed = capsys.readouterr().out
    assert code == 1
    assert "gradient of out.weight, step 0" in printed
    assert "2 of 2 settings FAILED" in printed


@UNCHECKED
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_model_of_ones_own_is_verified(dtype: torch.dtype) -> None:
    factory = load_factory(USER)
    layouts = [SPREAD, Layout(dp=4, ep=2)]
    experiment = prepare(compose("L0_sanity"), layouts, factory)
    for outcome in verify(experiment, layouts, dtypes=[dtype], dispatchers=["alltoall"]):
        assert outcome.passed, outcome.explain()


@pytest.mark.parametrize(
    ("name", "symptom"),
    [
        ("mean_loss", "loss, step 0"),
        ("forgotten_reduction", "only dense tensors differ: out.weight"),
        ("crashing", "RuntimeError: out of luck"),
    ],
)
def test_what_is_wrong_with_a_model_of_ones_own_is_found(name: str, symptom: str) -> None:
    factory = load_factory(f"tests.launch.user_model:{name}")
    experiment = prepare(compose("L0_sanity"), [SPREAD], factory)
    (outcome,) = verify(experiment, [SPREAD], dtypes=[torch.float64], dispatchers=["alltoall"])
    assert not outcome.passed
    assert symptom in outcome.explain()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.launch.user_model", "package.module:factory"),
        ("no.such.module:build", "importable"),
        ("tests.launch.user_model:absent", "no callable absent"),
        ("tests.launch.user_model:not_callable", "no callable not_callable"),
    ],
)
def test_a_factory_that_cannot_be_had_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_factory(name)


def test_all_impossible_layouts_are_refused_together() -> None:
    with pytest.raises(ConfigError) as raised:
        prepare(compose("L0_sanity"), [Layout(dp=3, ep=3), Layout(dp=8, ep=8)], load_factory(USER))
    assert "dp=3 ep=3: ep must divide num_experts" in str(raised.value)
    assert "dp=8 ep=8: ep must divide num_experts" in str(raised.value)


def test_default_layouts_spread_the_experts_where_they_can_be() -> None:
    odd = RunConfig()
    odd = replace(odd, model=replace(odd.model, moe=MoEConfig(router=RouterConfig(num_experts=3))))
    assert SPREAD in default_layouts(RunConfig())
    assert all(layout.ep == 1 for layout in default_layouts(odd))


def test_fp32_is_run_with_every_backend_of_the_cpu_and_fp64_with_loop() -> None:
    config = prepare(compose("L0_sanity"), [SPREAD]).config
    both = settings(config, [SPREAD], dtypes=[torch.float64, torch.float32], dispatchers=["alltoall"])
    assert [s.experts for s in both if s.exact] == ["loop"]
    found = [s.experts for s in both if not s.exact]
    assert found[0] == "loop"
    assert "grouped_mm" in found
    assert "mxfp8_emulated" not in found


def _tied_rows(
    config: RunConfig, groups: ProcessGroups, chunk: Chunk, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """Two experts that every token scores alike, so that the lower one wins by its number alone."""
    model = build_model(config, groups, chunk, device, dtype)
    for module in model.modules():
        if isinstance(module, Router):
            with torch.no_grad():
                module.weight[3] = module.weight[2]
    return model


def _favour(by: float) -> Fault:
    """Expert 3 scores a little higher than its equal, expert 2, wherever more than one rank runs."""

    def change(model: nn.Module, groups: ProcessGroups) -> nn.Module:
        for module in model.modules():
            if isinstance(module, Router):
                with torch.no_grad():
                    module.weight[3] *= 1 + by
        return model

    return Fault(name="favour", says="a score moves", model=change)


@pytest.fixture(scope="module")
def near_ties() -> tuple[Experiment, Reference]:
    """A model whose choices hang on the last bit."""
    recipe = compose("L0_sanity", ["model.moe.router.topk=1"])
    experiment = prepare(recipe, [SPREAD], _tied_rows)
    return experiment, Reference.of(experiment, torch.float64)


@UNCHECKED
def test_flips_of_near_ties_are_replayed_and_reported(near_ties: tuple[Experiment, Reference]) -> None:
    outcome = judge(near_ties[0], _at(SPREAD), near_ties[1], fault=_favour(1e-14))
    assert outcome.flips
    assert max(flip.gap for flip in outcome.flips) < 1e-12
    assert outcome.passed, outcome.explain()


@UNCHECKED
def test_flips_between_scores_that_are_apart_fail(near_ties: tuple[Experiment, Reference]) -> None:
    outcome = judge(near_ties[0], _at(SPREAD), near_ties[1], fault=_favour(1e-10))
    assert outcome.wrong_flips
    assert not outcome.passed
    first = outcome.wrong_flips[0]
    text = f"window {first.window}, token {first.position}, expert layer {first.layer}, score gap"
    assert text in outcome.explain()


SMALL = [Family(name="two", layouts=(Layout(dp=2),)), Family(name="spread", layouts=(SPREAD,))]


@UNCHECKED
def test_all_families_agree_on_one_process_and_on_two() -> None:
    subject = Subject(factory=build_model, overrides=("model.num_layers=1",))
    here, there = (verify_families(subject, SMALL, workers=n, dtypes=[torch.float64]) for n in (1, 2))
    for verdicts in (here, there):
        assert [verdict.family.name for verdict in verdicts] == ["two", "spread"]
        assert all(outcome.passed for verdict in verdicts for outcome in verdict.outcomes)
    first, second = (verdicts[1].outcomes[0].comparison for verdicts in (here, there))
    assert first is not None
    assert second is not None
    for one, two in zip(first.losses, second.losses, strict=True):  # threads may add in another order
        assert one == pytest.approx(two, abs=1e-12)


@UNCHECKED
def test_a_layout_that_the_recipe_cannot_have_is_named_and_not_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    subject = Subject(factory=build_model, overrides=("model.moe.router.num_experts=3",))
    mixed = Family(name="mixed", layouts=(Layout(dp=2, ep=2), Layout(dp=2)))
    verdicts = verify_families(subject, [mixed], dtypes=[torch.float64])
    assert print_verdicts(verdicts, Console(width=140))
    printed = capsys.readouterr().out
    assert "not possible with this recipe: mixed, dp=2 ep=2" in printed
    assert "num_experts=3" in printed
    assert "all 1 settings agree" in printed


def test_a_recipe_that_can_have_none_of_the_layouts_does_not_pass() -> None:
    subject = Subject(factory=build_model, overrides=("model.moe.router.num_experts=3",))
    none = Family(name="none", layouts=(SPREAD,))
    assert not print_verdicts(verify_families(subject, [none]), Console(file=io.StringIO()))


def test_draws_depend_on_the_seed_alone_and_keep_to_what_is_possible() -> None:
    def possible(family: Family, layout: Layout) -> bool:
        return layout.pp == 1

    first, again, other = (draws(seed, 4, possible) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(first) == 4
    assert all(family.layouts[0].pp == 1 for family in first)
    assert not {family.name for family in first} & {family.name for family in FAMILIES}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layouts", "dp=2"], "name a recipe"),
        (["model.num_layers=1"], "name a recipe"),
        (["--all", "--layouts", "dp=2"], "brings its own layouts"),
        (["--all", "--workers", "0"], "--workers=0"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(arguments)
