"""What is computed a second time has the same values and gradients, and is not kept in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isozyme.core.config import RunConfig
from isozyme.core.topology import Layout, Topology
from isozyme.models.stage import Stage
from isozyme.moe.router import Router
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.recompute import recompute, remade
from isozyme.parallel.simulated import simulate
from tests.models.common import random_batch, tiny, whole
from tests.models.pipeline_case import Seen, run_config, train


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def test_gradients_of_inputs_and_parameters_are_those_without_recomputation():
    x, y, weight, unused = leaves((3, 4), (3, 4), (4, 4), (2,))
    calls = 0

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        wide = torch.sin(x @ weight) * y
        return wide, wide.argmax(dim=1), wide.sum(), torch.ones(())

    def grads(results: Any) -> list[Tensor | None]:
        wide, best, _, _ = results
        loss = (wide * torch.arange(12.0).view(3, 4)).sum() + wide[0, best[0]]
        return list(torch.autograd.grad(loss, [x, y, weight, unused], allow_unused=True))

    want = grads(function(x, y))
    results = recompute(function, (x, y), (weight, unused))
    assert not results[1].requires_grad
    found = grads(results)
    assert calls == 3
    assert found[3] is None
    assert all(torch.equal(a, b) for a, b in zip(found[:3], want[:3], strict=True))


def test_parameters_get_gradients_though_no_input_wants_one():
    x = torch.randn(3, 4, dtype=torch.float64)
    (weight,) = leaves((4, 4))
    (result,) = recompute(lambda x: (torch.sin(x @ weight),), (x,), (weight,))
    result.sum().backward()
    found, weight.grad = weight.grad, None
    torch.sin(x @ weight).sum().backward()
    assert torch.equal(found, weight.grad)


def test_nothing_is_computed_twice_without_gradients():
    calls: list[Tensor] = []

    def function(x: Tensor) -> tuple[Tensor]:
        calls.append(x)
        return (x * 2,)

    with torch.no_grad():
        recompute(function, leaves((2,)))
    assert len(calls) == 1


def test_the_second_pass_sees_the_autocast_of_the_first():
    seen = []

    def function(x: Tensor) -> tuple[Tensor]:
        seen.append(torch.is_autocast_enabled("cpu"))
        return (x @ x,)

    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (result,) = recompute(function, (x,))
    assert result.dtype == torch.bfloat16
    result.sum().backward()
    assert seen == [True, True]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_remade_tensor_is_made_once_more_for_each_that_kept_it(transposed):
    a, weight = leaves((3, 3), (3, 3))
    calls = 0

    def recipe(a: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.sin(a)

    middle = recipe(a)
    with remade(middle, recipe, a):
        result = (middle.T if transposed else middle) @ weight
    result.square().sum().backward()
    found = a.grad, weight.grad
    assert calls == 2
    a.grad = weight.grad = None
    middle = torch.sin(a)
    ((middle.T if transposed else middle) @ weight).square().sum().backward()
    assert torch.equal(found[0], a.grad)
    assert torch.equal(found[1], weight.grad)


def config_of(mode: str, layout: Layout, *, capacity: float | None = None, shared: int = 0) -> RunConfig:
    config = run_config(layout=layout)
    moe = replace(config.model.moe, capacity_factor=capacity, shared_ffn=shared)
    return replace(config, model=replace(config.model, moe=moe, recompute=mode))


def seen(mode: str, layout: Layout, **options: Any) -> list[Seen]:
    config = config_of(mode, layout, **options)
    return simulate(Topology(layout).world_size, lambda world: train(config, world))


LAYOUTS = [
    (Layout(dp=1), {}),
    (Layout(dp=1), {"capacity": 0.75}),
    (Layout(dp=2, ep=2), {"shared": 16}),
    (Layout(dp=2, ep=2), {"capacity": 0.75}),
    (Layout(tp=2, dp=1, ep=2), {"capacity": 0.75, "shared": 16}),
    (Layout(cp=2, dp=1, ep=2, pp=2), {"capacity": 0.75}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "options"), LAYOUTS)
def test_values_gradients_and_counts_are_bitwise_those_without_recomputation(layout, options):
    plain = seen("none", layout, **options)
    for mode in ("selective", "full"):
        for one, other in zip(seen(mode, layout, **options), plain, strict=True):
            for result, want in zip(one.results, other.results, strict=True):
                assert (result.loss, result.aux_loss, result.z_loss) == (
                    want.loss,
                    want.aux_loss,
                    want.z_loss,
                )
                assert torch.equal(result.routed, want.routed)
                assert torch.equal(result.dropped, want.dropped)
            assert all(
                torch.equal(found[name], wanted[name])
                for found, wanted in zip(one.gradients, other.gradients, strict=True)
                for name in wanted
            )
            # Among them the expert biases, which count loads.
            assert all(torch.equal(one.weights[name], value) for name, value in other.weights.items())
            assert one.held_out == other.held_out
    if "capacity" in options:
        assert all(int(result.dropped.sum()) > 0 for result in plain[0].results)


def test_the_second_pass_replays_the_experts_of_the_first():
    model = whole(tiny(recompute="full", pattern="M", num_layers=2))
    chosen: dict[Router, list[Tensor]] = {}
    noise = torch.Generator().manual_seed(0)

    def nearly_tied(router: Router) -> None:
        """All experts score alike, but for rounding errors that are others each time."""

        def logits(tokens: Tensor, _: Tensor) -> Tensor:
            errors = torch.randn(tokens.shape[0], 4, generator=noise, dtype=tokens.dtype) * 1e-15
            return (tokens @ router.weight.T) * 0 + errors

        router.logits = logits  # type: ignore[method-assign]

    for module in model.modules():
        if isinstance(module, Router):
            nearly_tied(module)
            chosen[module] = []
            module.register_forward_hook(lambda router, _, output: chosen[router].append(output[0].topk_ids))
    output = model(random_batch())
    (output.loss_sum + sum(stats.aux_loss for stats in output.stats)).backward()
    for router, (first, second) in chosen.items():
        assert torch.equal(first, second)
        with torch.no_grad():
            other, _ = router(torch.zeros(32, 32, dtype=torch.float64), torch.ones(32, dtype=torch.bool), 2)
        assert not torch.equal(first, other.topk_ids)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("layout", [Layout(dp=4, ep=4), Layout(cp=2, dp=2, ep=4), Layout(tp=2, dp=2, ep=2)])
def test_ranks_make_the_same_calls_whoever_has_tokens(mode, layout):
    config = config_of(mode, layout)

    def only_the_first_expert(chunk: nn.Module, groups: ProcessGroups) -> nn.Module:
        for module in chunk.modules():
            if isinstance(module, Router):
                with torch.no_grad():
                    module.weight.zero_()  # ties go to the lower ids: all tokens to the first two of four
        return chunk

    _, trace = simulate(4, lambda world: train(config, world, only_the_first_expert), trace=True)
    kinds = [[(record.kind, record.group) for record in records] for records in trace]
    assert kinds.count(kinds[0]) == 4
    assert len(kinds[0]) > 100


def kept_bytes(mode: str) -> tuple[int, Stage | None]:
    """Bytes that autograd keeps from a forward to its backward, weights apart."""
    config = tiny(recompute=mode, hidden=64, num_layers=4, pattern="DM")
    moe = replace(config.model.moe, ffn=128, experts="grouped_mm")
    model = whole(replace(config, model=replace(config.model, moe=moe)), torch.float32)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(random_batch(windows=4, length=128))
        loss = output.loss_sum + sum(stats.aux_loss for stats in output.stats)
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    loss.backward()
    return found


def test_each_mode_keeps_less_than_the_one_before(record_property):
    none, selective, full = (kept_bytes(mode) for mode in ("none", "selective", "full"))
    for name, value in (("none", none), ("selective", selective), ("full", full)):
        record_property(name, value)
        print(f"recompute={name}: {value / 2**20:.2f} MiB kept for backward")
    assert selective < 0.8 * none
    assert full < 0.25 * none
