"""Experts in row-wise FP8: held to products of operands quantised one by one, and to unquantised experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isozyme.core.config import MoEConfig, RouterConfig
from isozyme.core.errors import BackendError
from isozyme.core.topology import Layout, Topology
from isozyme.moe.experts import grouped_fp8
from isozyme.moe.experts.experts import Experts
from isozyme.moe.experts.grouped_fp8 import grouped_fp8_experts, grouped_fp8_problems
from isozyme.moe.experts.grouped_mm_fused import grouped_mm_fused_experts
from isozyme.moe.kernels.fp8_rows import dequantize_rows, quantize_rows
from isozyme.moe.layer import MoELayer
from isozyme.moe.types import Arrival
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.simulated import SimulatedWorld, simulate
from tests.moe.kept import kept_bytes

HIDDEN, FFN, EXPERTS = 32, 48, 4
NAMES = ("result", "d rows", "d probs", "d gate_up", "d down")


def draw(rows: int, choices: int, seed: int, *, hot: bool = False) -> tuple[Arrival, Tensor, Tensor]:
    """Skewed, distinct choices, some not kept; expert 1 gets nothing. With `hot`, expert 0 gets every row."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(rows, EXPERTS, generator=generator) * torch.linspace(1.0, 0.4, EXPERTS)
    score[:, 1] = -1.0
    if hot:
        score[:, 0] = 2.0
    ids = score.topk(choices, dim=1).indices
    arrival = Arrival(
        rows=torch.randn(rows, HIDDEN, generator=generator).requires_grad_(),
        expert_ids=ids,
        kept=(torch.rand(rows, choices, generator=generator) < 0.8) & (ids != 1),
        probs=(0.2 + torch.rand(rows, choices, generator=generator)).requires_grad_(),
        num_experts=EXPERTS,
    )
    gate_up = torch.randn(EXPERTS, 2 * FFN, HIDDEN, generator=generator).mul_(0.3).requires_grad_()
    return arrival, gate_up, torch.randn(EXPERTS, HIDDEN, FFN, generator=generator).mul_(0.3).requires_grad_()


def everything(function: object, arrival: Arrival, gate_up: Tensor, down: Tensor) -> list[Tensor]:
    """Result and all gradients, in fp32."""
    out = function(arrival, gate_up, down)  # type: ignore[operator]
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    grads = torch.autograd.grad(out, (arrival.rows, arrival.probs, gate_up, down), upstream)
    return [each.detach().float() for each in (out, *grads)]


def rounded(x: Tensor, dim: int = -1) -> Tensor:
    """What an FP8 product sees of an operand whose contraction runs over `dim`."""
    return dequantize_rows(*quantize_rows(x.movedim(dim, -1))).movedim(-1, dim)


class Linear(torch.autograd.Function):
    """`x @ weight.T` with operands of the forward and of the input's gradient quantised, the weight's not."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor, exact: Tensor) -> Tensor:
        """`exact` is what the weight's gradient is computed from."""
        ctx.save_for_backward(weight, exact)  # type: ignore[attr-defined]
        return rounded(x) @ rounded(weight).T

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        weight, exact = ctx.saved_tensors  # type: ignore[attr-defined]
        return rounded(grad) @ rounded(weight, dim=0), grad.T @ exact, None


def slot_by_slot(arrival: Arrival, gate_up: Tensor, down: Tensor) -> Tensor:
    """The definition: every kept slot of every row on its own, through quantised products."""
    out = []
    for row, ids, kept, probs in zip(
        arrival.rows, arrival.expert_ids.tolist(), arrival.kept.tolist(), arrival.probs, strict=True
    ):
        total = 0 * row
        for expert, keep, prob in zip(ids, kept, probs, strict=True):
            if keep:
                gate, up = Linear.apply(row[None], gate_up[expert], row[None]).chunk(2, dim=1)
                middle = torch.nn.functional.silu(gate) * up * prob
                total = total + Linear.apply(middle, down[expert], middle)[0]
        out.append(total)
    zero = 0 * (gate_up.sum() + down.sum() + arrival.probs.sum())
    return (torch.stack(out) if out else arrival.rows) + zero


@settings(max_examples=15)
@given(st.integers(0, 12), st.integers(1, 3), st.booleans(), st.integers(0, 2**31))
def test_four_products_are_of_quantised_operands_and_two_are_not(
    rows: int, choices: int, hot: bool, seed: int
) -> None:
    """In fp32, so that nothing but the order of sums, and the codes that hang on it, is left to differ."""
    given_ = draw(rows, choices, seed, hot=hot)
    found, want = everything(grouped_fp8_experts, *given_), everything(slot_by_slot, *given_)
    for name, got, expected in zip(NAMES, found, want, strict=True):
        error = (got - expected).norm() / expected.norm().clamp(min=1e-6)
        assert error < 0.02, f"{name}: {error:.4f}"
    assert torch.equal(found[3][1], torch.zeros_like(found[3][1]))
    assert torch.equal(found[4][1], torch.zeros_like(found[4][1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_row_follows_unquantised_experts_however_large_its_neighbours_are(dtype: torch.dtype) -> None:
    """Rows from 1e-4 to 1e3: with one scale for all, seven of eight would be nothing but zeros."""
    arrival, gate_up, down = draw(60, 2, 3)
    large = arrival.rows.detach() * torch.logspace(-4, 3, 60)[torch.randperm(60)][:, None]
    arrival = dataclasses.replace(arrival, rows=large.to(dtype).requires_grad_())
    wide = dataclasses.replace(arrival, rows=arrival.rows.detach().float().requires_grad_())
    weights = [stack.detach().to(dtype).requires_grad_() for stack in (gate_up, down)]
    found = everything(grouped_fp8_experts, arrival, *weights)
    plain = everything(
        grouped_mm_fused_experts, wide, *(w.detach().float().requires_grad_() for w in weights)
    )
    for name, got, want in zip(NAMES, found, plain, strict=True):
        error = ((got - want).norm() / want.norm()).item()
        assert 1e-3 < error < 0.15, f"{name}: {error:.4f}"
    kept = arrival.kept.any(dim=1)
    by_row = (found[0] - plain[0]).norm(dim=1)[kept] / plain[0].norm(dim=1)[kept]
    assert by_row.max() < 0.2
    assert by_row.median() < 0.09


def test_nothing_uninitialised_reaches_a_result_or_gradient() -> None:
    given_ = draw(30, 2, 5)
    torch.use_deterministic_algorithms(True)
    try:
        found = everything(grouped_fp8_experts, *given_)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(each).all() for each in found)


def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernels run also on a CPU, interpreted; unlike their twins they leave unfilled rows alone."""
    pytest.importorskip("triton")
    from isozyme.moe.kernels import triton_quantized_scatter as scatter
    from isozyme.moe.kernels import triton_quantized_swiglu as swiglu
    from isozyme.moe.kernels import triton_quantized_weights as weights

    for name, kernel in (
        ("run_scatter_quantized", scatter.launch_scatter_quantized),
        ("run_quantized_swiglu", swiglu.launch_quantized_swiglu),
        ("run_quantized_swiglu_backward", swiglu.launch_quantized_swiglu_backward),
        ("run_quantize_weights", weights.launch_quantize_weights),
        ("run_quantize_transposed", weights.launch_quantize_transposed),
    ):
        monkeypatch.setattr(grouped_fp8, name, kernel)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels; tests/gpu runs the compiled ones")
def test_bits_do_not_depend_on_what_unfilled_rows_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    arrival, gate_up, down = draw(10, 3, 6)
    assert 0 < arrival.kept.sum() < 0.8 * arrival.kept.numel()
    _with_kernels(monkeypatch)
    torch.use_deterministic_algorithms(True)
    try:
        poisoned = everything(grouped_fp8_experts, arrival, gate_up, down)
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        plain = everything(grouped_fp8_experts, arrival, gate_up, down)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, two in zip(poisoned, plain, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, two)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_shows_in_its_result_and_in_no_other(value: float) -> None:
    arrival, gate_up, down = draw(20, 2, 4)
    whole = grouped_fp8_experts(arrival, gate_up, down)
    with torch.no_grad():
        arrival.rows[3, 5] = value
    found = grouped_fp8_experts(arrival, gate_up, down)
    others = torch.arange(20) != 3
    assert arrival.kept[3].any()
    assert not found[3].isfinite().any()
    assert torch.equal(found[others], whole[others])


def test_only_the_input_the_pre_activation_the_map_and_maxima_are_saved() -> None:
    arrival, gate_up, down = draw(50, 2, 9)
    activations = kept_bytes(lambda: grouped_fp8_experts(arrival, gate_up, down), (gate_up, down))
    slots = arrival.kept.numel()
    bound = arrival.rows.numel() * 4 + slots * 2 * FFN * 4 + slots * (4 + 4) + EXPERTS * 4 + 4
    assert activations <= bound + EXPERTS * (HIDDEN + FFN) * 4


def experts(**options: Any) -> Experts:
    return Experts(
        name="m",
        num_experts=EXPERTS,
        hidden=HIDDEN,
        ffn=FFN,
        groups=ProcessGroups(Topology(Layout()), SingleWorld()),
        seed=1,
        init_std=0.3,
        output_std=0.3,
        dtype=torch.bfloat16,
        **{"precision": "fp8_rowwise", **options},
    )


def trained(module: Experts) -> list[Tensor]:
    """Two steps of two micro-batches with an update between, and a pass outside of any step."""
    buffer = GradientBuffer(module.parameters(), ProcessGroups(Topology(Layout()), SingleWorld()))
    found: list[Tensor] = []
    for _ in range(2):
        buffer.zero()
        for rows in (30, 7):
            arrival, _, _ = draw(rows, 2, rows)
            arrival = dataclasses.replace(arrival, rows=arrival.rows.detach().bfloat16().requires_grad_())
            out = module.on_arrival(arrival, module.stacks())
            out.backward(torch.cos(out.detach()))
            assert arrival.rows.grad is not None
            assert arrival.probs.grad is not None
            found += [out.detach(), arrival.rows.grad, arrival.probs.grad]
        buffer.reduce()
        found += [p.main_grad.clone() for p in module.parameters()]  # type: ignore[union-attr]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.data.sub_(parameter.main_grad)  # type: ignore[arg-type]
    found.append(module.on_arrival(arrival).detach())
    buffer.close()
    return found


@pytest.mark.parametrize("delay", [False, True])
def test_neither_kept_weights_nor_delayed_gradients_change_a_bit(
    delay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = trained(experts())
    passes: list[str] = []
    for name in ("run_quantize_weights", "run_quantize_transposed"):
        original = getattr(grouped_fp8, name)

        def counted(*args: Tensor, name: str = name, original: object = original) -> object:
            passes.append(name)
            return original(*args)  # type: ignore[operator]

        monkeypatch.setattr(grouped_fp8, name, counted)
    module = experts(cache_quantized=True, delay_wgrad=delay)
    assert module.backend == "grouped_fp8"
    for one, other in zip(trained(module), want, strict=True):
        assert torch.equal(one, other)
    assert passes.count("run_quantize_transposed") == 2 * 2, "two stacks in each of two steps"
    assert passes.count("run_quantize_weights") == 2 * 2 + 2, "and once more outside of them"


def test_kept_weights_are_made_anew_where_something_writes_the_weights_within_a_step() -> None:
    module, anew = experts(cache_quantized=True), experts()
    buffer = GradientBuffer(module.parameters(), ProcessGroups(Topology(Layout()), SingleWorld()))
    buffer.zero()
    arrival = dataclasses.replace(draw(9, 2, 1)[0], rows=torch.randn(9, HIDDEN).bfloat16())
    before = module.on_arrival(arrival)
    assert torch.equal(before, anew.on_arrival(arrival))
    with torch.no_grad():
        for each in (module, anew):
            each.weights.down[0].mul_(2)
    after = module.on_arrival(arrival)
    assert not torch.equal(after, before)
    assert torch.equal(after, anew.on_arrival(arrival))
    buffer.close()


def test_a_rank_without_rows_takes_part_and_a_hot_rank_agrees_with_one_that_holds_all() -> None:
    def program(world: SimulatedWorld) -> Tensor:
        layout = Layout(dp=world.size, ep=world.size)
        layer = MoELayer(
            MoEConfig(router=RouterConfig(num_experts=EXPERTS, topk=2), ffn=FFN, experts="grouped_fp8"),
            name="m",
            hidden=HIDDEN,
            groups=ProcessGroups(Topology(layout), world),
            seed=3,
            init_std=0.3,
            output_std=0.3,
            dtype=torch.bfloat16,
            precision="fp8_rowwise",
        )
        tokens = torch.randn(1, 8, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
        with torch.no_grad():  # every token to the first two experts, which the first rank holds
            layer.router.weight.zero_()
        tokens.requires_grad_()
        out = layer(tokens, torch.ones(1, 8, dtype=torch.bool)).tokens
        out.float().sum().backward()
        assert all(p.grad is not None for p in layer.experts.parameters())
        return torch.cat([out.detach().flatten(), tokens.grad.flatten()])  # type: ignore[union-attr]

    (alone,) = simulate(1, program)
    for found in simulate(2, program):
        assert torch.equal(found, alone)


def test_what_it_needs_is_said() -> None:
    cpu = torch.device("cpu")
    assert grouped_fp8_problems(cpu, torch.bfloat16, 32, 48) == []
    text = " ".join(grouped_fp8_problems(cpu, torch.float32, 40, 48))
    assert "hidden=40; 40 % 16 = 8" in text
    assert "bfloat16, not float32" in text
    with pytest.raises(BackendError, match=r"precision=bf16\. Set precision=fp8_rowwise"):
        experts(backend="grouped_fp8", precision=None)
