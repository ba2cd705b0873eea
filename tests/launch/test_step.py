"""One optimiser step: how it is split changes nothing, and numbers that are not finite change no weight."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor, nn

from isozyme.core.batch import Batch, StepTotals
from isozyme.core.errors import NonFiniteError, UsageError
from isozyme.core.genome.schedule import step_indices
from isozyme.core.genome.windows import totals_of
from isozyme.launch.step import StepResult, TrainStep, step_totals
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.optimizer import Optimizer
from isozyme.parallel.process_groups import World
from isozyme.parallel.shard_spec import named_shards
from isozyme.parallel.simulated import simulate
from tests.launch.tiny import genome_data, model_on, tiny

UNCHECKED = pytest.mark.usefixtures("unchecked_annotations")
"""For steps on several ranks; the steps of one rank check annotations."""
CPU = torch.device("cpu")
FP64 = ("precision=fp64", "model.moe.experts=loop", "model.moe.router.z_loss=0.001", "optim.clip=0.1")


def joined(batches: list[Batch]) -> Batch:
    """Several batches as one."""
    tensors = [f.name for f in fields(Batch) if isinstance(getattr(batches[0], f.name), Tensor)]
    return replace(batches[0], **{n: torch.cat([getattr(b, n) for b in batches]) for n in tensors})


class Trial:
    """A model, its optimiser and its step on one rank."""

    def __init__(self, *overrides: str, world: World | None = None) -> None:
        self.config = tiny(*FP64, *overrides)
        self.model, self.groups = model_on(self.config, world)
        self.buffer = GradientBuffer(self.model.parameters(), self.groups)
        self.optimizer = Optimizer(self.buffer, self.config.optim)
        self.step = TrainStep.of(self.config, self.model, self.buffer, self.optimizer, self.groups)
        self.data = genome_data(self.config)

    def batches(self, number: int = 0) -> list[Batch]:
        at, size = self.groups.coordinates["dp"], self.groups.topology.size("dp")
        train = self.config.train
        plan = step_indices(number, train.global_batch, at, size, train.micro_batch)
        return [self.data.train_batch(indices) for indices in plan]

    def run(self, batches: list[Batch] | None = None) -> tuple[StepResult, dict[str, Tensor]]:
        """One step, and the gradients that it used."""
        batches = self.batches() if batches is None else batches
        gradients: dict[str, Tensor] = {}

        def keep() -> None:
            for name, tensor, spec in named_shards(self.model):
                if spec.kind == "parameter":
                    gradients[name] = tensor.main_grad.clone()

        totals = step_totals(totals_of(batches), self.groups, torch.device("cpu"))
        return self.step(batches, totals, 1e-3, on_gradients=keep), gradients


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor, _ in named_shards(model)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in found.items():
        assert torch.allclose(tensor, expected[name], rtol=1e-9, atol=1e-12), name


def test_the_split_into_micro_batches_changes_no_gradient_and_no_weight() -> None:
    whole, split = Trial(), Trial()
    batches = split.batches()
    counts = [int(batch.label_valid.sum()) for batch in batches]
    assert len(set(counts)) > 1, "micro-batches with equal counts could not tell a mean of means"
    one, gradients = whole.run([joined(batches)])
    four, others = split.run(batches)
    assert_same(gradients, others)
    assert_same(weights(whole.model), weights(split.model))
    assert one.loss == pytest.approx(four.loss, rel=1e-12)
    assert one.grad_norm == pytest.approx(four.grad_norm, rel=1e-12)
    assert (one.routed == four.routed).all()
    assert one.clip < 1


def test_the_optimiser_gets_the_coefficient_that_gradients_would_be_clipped_by() -> None:
    """AdamW hardly sees the scale of gradients, unless it changes: each step is clipped by another number."""

    def train(clip: float, in_place: bool) -> dict[str, Tensor]:
        trial = Trial(f"optim.clip={clip}")
        for number in range(3):
            batches = trial.batches(number)
            totals = step_totals(totals_of(batches), trial.groups, CPU)
            trial.step(batches, totals, 0.05, on_gradients=(lambda: None) if in_place else None)
        return weights(trial.model)

    clipped = train(0.1, in_place=True)
    assert_same(train(0.1, in_place=False), clipped)
    apart = train(0.0, in_place=False)
    assert any((apart[name] - clipped[name]).abs().max() > 1e-4 for name in clipped), (
        "a test must be able to fail"
    )


def test_parameters_that_were_replaced_are_refused_before_an_update() -> None:
    trial = Trial()
    before = {name: tensor.clone() for name, tensor in trial.model.state_dict().items()}
    trial.model.load_state_dict(trial.model.state_dict(), assign=True)
    with pytest.raises(UsageError, match=r"are others, such as \S+ \(load_state_dict"):
        trial.step(trial.batches(), step_totals(totals_of(trial.batches()), trial.groups, CPU), 1e-3)
    assert_same(trial.model.state_dict(), before)


def test_the_next_step_is_prepared_once_between_gradients_and_update() -> None:
    trial, seen = Trial(), []
    batches = trial.batches()
    totals = step_totals(totals_of(batches), trial.groups, CPU)
    before = weights(trial.model)

    def meanwhile() -> None:
        assert trial.buffer.reduced
        assert_same(weights(trial.model), before)
        seen.append(True)

    trial.step(batches, totals, 1e-3, meanwhile=meanwhile)
    assert seen == [True]


@UNCHECKED
@pytest.mark.parametrize(("dp", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_ranks_together_make_the_step_of_one_rank(dp: int, ep: int) -> None:
    bias = "model.moe.router.expert_bias_rate=0.01"
    alone = Trial(bias)
    expected, gradients = alone.run()

    def rank(world: World) -> tuple[StepResult, dict[str, Tensor], dict[str, Tensor]]:
        trial = Trial(bias, f"layout.dp={dp}", f"layout.ep={ep}", world=world)
        result, found = trial.run()
        return result, found, weights(trial.model)

    for result, found, after in simulate(dp, rank):
        assert_same(found, gradients)
        assert_same(after, weights(alone.model))
        assert result.totals == expected.totals
        assert result.loss == pytest.approx(expected.loss, rel=1e-12)
        assert result.aux_loss == pytest.approx(expected.aux_loss, rel=1e-12)
        assert result.z_loss == pytest.approx(expected.z_loss, rel=1e-12)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
        assert (result.routed == expected.routed).all()


@UNCHECKED
def test_ranks_that_share_windows_count_every_loss_once() -> None:
    expected, _ = Trial().run()
    for result in simulate(4, lambda world: Trial("layout.tp=2", "layout.cp=2", world=world).run()[0]):
        for name in ("loss", "aux_loss", "z_loss", "grad_norm", "clip"):
            assert getattr(result, name) == pytest.approx(getattr(expected, name), rel=1e-10), name
        assert (result.routed == expected.routed).all()


@UNCHECKED
@pytest.mark.parametrize(("dp", "ep", "tp"), [(4, 2, 1), (2, 2, 2)])
def test_the_balance_loss_refers_to_the_step_before_on_all_ranks_alike(dp: int, ep: int, tp: int) -> None:
    lagged = ("model.moe.router.aux_scope=global_lagged", "model.moe.router.aux_loss=0.5")

    def steps(trial: Trial) -> tuple[list[StepResult], dict[str, Tensor]]:
        return [trial.run(trial.batches(number))[0] for number in range(3)], weights(trial.model)

    alone = Trial(*lagged)
    expected, after = steps(alone)
    kept = {name: tensor for name, tensor in after.items() if name.endswith("lagged_counts")}
    assert [tensor.tolist() for tensor in kept.values()] == expected[-1].routed.tolist()

    def rank(world: World) -> tuple[list[StepResult], dict[str, Tensor]]:
        return steps(Trial(*lagged, f"layout.dp={dp}", f"layout.ep={ep}", f"layout.tp={tp}", world=world))

    for results, others in simulate(dp * tp, rank):
        for result, one in zip(results, expected, strict=True):
            assert result.aux_loss == pytest.approx(one.aux_loss, rel=1e-9)
            assert result.grad_norm == pytest.approx(one.grad_norm, rel=1e-9)
        for name, tensor in kept.items():
            assert torch.equal(others[name], tensor)
    windowed, _ = steps(Trial(lagged[1]))
    assert windowed[-1].aux_loss != pytest.approx(expected[-1].aux_loss, rel=1e-3)


def test_the_loss_is_the_mean_over_all_valid_labels() -> None:
    trial = Trial()
    batches = trial.batches()
    with torch.no_grad():
        outputs = [trial.model(batch) for batch in batches]
    labels = sum(int(batch.label_valid.sum()) for batch in batches)
    by_hand = sum(float(output.loss_sum) for output in outputs) / labels
    assert trial.run(batches)[0].loss == pytest.approx(by_hand, rel=1e-12)


def test_the_gradient_is_that_of_three_terms_each_divided_by_its_own_count() -> None:
    trial = Trial("optim.clip=0")
    batches = trial.batches()
    totals = totals_of(batches)
    assert len({totals.valid_labels, totals.windows, totals.real_tokens}) == 3
    plain, _ = model_on(trial.config)  # the same weights, without a gradient buffer
    outputs = [plain(batch) for batch in batches]
    terms = (
        sum(output.loss_sum for output in outputs) / totals.valid_labels,
        sum(stats.aux_loss for output in outputs for stats in output.stats) / totals.windows,
        sum(stats.z_loss for output in outputs for stats in output.stats) / totals.real_tokens,
    )
    named = {name: tensor for name, tensor, spec in named_shards(plain) if spec.kind == "parameter"}
    parts = [
        torch.autograd.grad(term, list(named.values()), retain_graph=True, materialize_grads=True)
        for term in terms
    ]
    for part in parts:
        router = part[list(named).index("layers.0.moe.router.weight")]
        assert router.abs().max() > 1e-7, "a term without a gradient could be left out unseen"
    assert_same(trial.run(batches)[1], {name: sum(each) for name, *each in zip(named, *parts, strict=True)})


def test_expert_bias_moves_only_where_it_has_a_rate() -> None:
    for rate, moves in ((0.01, True), (0.0, False)):
        trial = Trial(f"model.moe.router.expert_bias_rate={rate}")
        trial.run()
        biases = [t for name, t in weights(trial.model).items() if name.endswith("expert_bias")]
        assert any(bool(bias.abs().max() > 0) for bias in biases) == moves


def test_a_step_without_valid_labels_leaves_everything_alone() -> None:
    trial = Trial()
    before = weights(trial.model)
    blank = [replace(b, label_valid=torch.zeros_like(b.label_valid)) for b in trial.batches()]
    result, gradients = trial.run(blank)
    assert result.skipped
    assert math.isnan(result.loss)
    assert gradients == {}
    assert trial.optimizer.updates == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trial.model).items())


def test_a_rank_without_valid_labels_steps_with_the_others() -> None:
    def rank(world: World) -> StepResult:
        trial = Trial("layout.dp=2", "layout.ep=2", world=world)
        batches = trial.batches()
        if world.rank == 1:
            batches = [replace(b, label_valid=torch.zeros_like(b.label_valid)) for b in batches]
        return trial.run(batches)[0]

    first, second = simulate(2, rank)
    assert first.loss == second.loss
    assert not first.skipped


def test_a_loss_that_is_not_finite_stops_all_ranks_alike_and_changes_no_weight() -> None:
    def rank(world: World) -> tuple[str, bool]:
        trial = Trial("layout.dp=2", "layout.ep=1", world=world)
        before = weights(trial.model)
        if world.rank == 1:
            with torch.no_grad():
                trial.model.final_norm.weight[0] = math.nan
                before = weights(trial.model)
        with pytest.raises(NonFiniteError) as raised:
            trial.run()
        after = weights(trial.model)
        unchanged = all(torch.equal(after[n].nan_to_num(), before[n].nan_to_num()) for n in before)
        return str(raised.value), unchanged

    (message, unchanged), (other, also_unchanged) = simulate(2, rank)
    assert message == other
    assert "rank 1: cross-entropy" in message
    assert "rank 0" not in message
    assert unchanged
    assert also_unchanged


def test_a_gradient_that_is_not_finite_stops_the_step_though_the_loss_is() -> None:
    trial = Trial()
    before = weights(trial.model)
    trial.model.final_norm.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFiniteError, match=r"final_norm"):
        trial.run()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trial.model).items())


def test_totals_are_summed_over_dense_replicas() -> None:
    def rank(world: World) -> StepTotals:
        trial = Trial("layout.dp=2", "layout.ep=2", world=world)
        local = StepTotals(valid_labels=10 + world.rank, windows=1, real_tokens=100 * world.rank)
        return step_totals(local, trial.groups, torch.device("cpu"))

    for totals in simulate(2, rank):
        assert totals == StepTotals(valid_labels=21, windows=2, real_tokens=100)
