"""How experts are bound to Transformer Engine: delayed gradients and kept weights, with a stand-in for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isozyme.core.topology import Layout, Topology
from isozyme.moe.experts.experts import Experts
from isozyme.moe.experts.te import row_unit
from isozyme.moe.types import Arrival
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.recompute import recompute
from tests.moe.fake_te import Quantizer, install

EXPERTS, HIDDEN, FFN = 3, 16, 32


def build(**options: Any) -> Experts:
    return Experts(
        name="m",
        num_experts=EXPERTS,
        hidden=HIDDEN,
        ffn=FFN,
        groups=ProcessGroups(Topology(Layout()), SingleWorld()),
        seed=0,
        init_std=0.6,
        output_std=0.6,
        backend="te",
        precision="fp8_current",
        **{"dtype": torch.float32, **options},
    )


def arrival(seed: int, rows: Tensor | None = None, *, kept: bool = True) -> Arrival:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, EXPERTS - 1, (7, 1), generator=draw)  # the last expert gets nothing
    x = torch.randn(7, HIDDEN, generator=draw)
    return Arrival(
        rows=x.requires_grad_() if rows is None else rows,
        expert_ids=ids,
        kept=torch.full_like(ids, kept, dtype=torch.bool),
        probs=torch.rand(7, 1, generator=draw).requires_grad_(),
        num_experts=EXPERTS,
    )


def run(experts: Experts, seed: int, *, kept: bool = True) -> list[Tensor]:
    """One micro-batch; its result and the gradients of rows and weights of the slots."""
    given = arrival(seed, kept=kept)
    out = experts.on_arrival(given, experts.stacks())
    out.backward(torch.cos(out.detach()))
    assert given.rows.grad is not None
    assert given.probs.grad is not None
    return [out.detach(), given.rows.grad, given.probs.grad]


def again(experts: Experts, seed: int) -> list[Tensor]:
    """The same, computed a second time in backward."""
    given = arrival(seed)

    def function(rows: Tensor) -> tuple[Tensor]:
        return (experts.on_arrival(arrival(seed, rows), experts.stacks()),)

    (out,) = recompute(function, (given.rows,), tuple(experts.parameters()))
    out.backward(torch.cos(out.detach()))
    assert given.rows.grad is not None
    return [out.detach(), given.rows.grad]


def gradients(experts: Experts) -> list[Tensor]:
    found = [getattr(p, "main_grad", p.grad) for p in experts.parameters()]
    assert all(each is not None for each in found)
    return found


def buffer_of(experts: Experts) -> GradientBuffer:
    return GradientBuffer(experts.parameters(), ProcessGroups(Topology(Layout()), SingleWorld()))


def test_weight_gradients_that_gemms_write_in_fp32_stay_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    experts = build(dtype=torch.bfloat16)
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    buffer = GradientBuffer(experts.parameters(), groups, as_computed=True)
    assert {group.data.dtype for group in buffer.flat} == {torch.float32}


@pytest.mark.parametrize("passes", [run, again])
@pytest.mark.parametrize("buffered", [False, True])
def test_delayed_gradients_are_those_computed_at_once_also_over_micro_batches(
    buffered: bool, passes: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, calls = install(monkeypatch)
    both = [build(), build(delay_wgrad=True)]
    buffers = [buffer_of(experts) for experts in both] if buffered else []
    for step in range(2):
        for buffer in buffers:
            buffer.zero()
        for micro_batch in range(2):
            at_once, delayed = (passes(experts, 10 * step + micro_batch) for experts in both)
            assert all(torch.equal(one, other) for one, other in zip(at_once, delayed, strict=True))
        with torch.no_grad():
            both[1].on_arrival(arrival(5))  # an evaluation owes nothing
        for buffer in buffers:
            buffer.reduce()
        found = [gradients(experts) for experts in both]
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        assert any((grad != 0).any() for grad in found[0])
    assert calls == ["backward_dw"] * 8


@pytest.mark.parametrize("buffered", [False, True])
def test_weight_gradients_come_after_those_of_the_rows_have_left(
    buffered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, calls = install(monkeypatch)
    experts = build(delay_wgrad=True)
    if buffered:
        buffer_of(experts).zero()
    leaf = torch.randn(7, HIDDEN, requires_grad=True)
    sent = leaf * 1
    stacks = experts.stacks()
    arrived = sent * 1
    sent.register_hook(lambda _: calls.append("waited for"))
    arrived.register_hook(lambda _: calls.append("leaves"))
    experts.on_arrival(arrival(1, arrived), stacks).sum().backward()
    assert calls == ["leaves", "backward_dw", "backward_dw", "waited for"]


def test_a_rank_without_rows_owes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, calls = install(monkeypatch)
    experts = build(delay_wgrad=True)
    run(experts, 1, kept=False)
    assert all((grad == 0).all() for grad in gradients(experts))
    assert not calls


def test_wider_padding_of_large_experts_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    experts, copies = build(), 1024
    few = arrival(3)
    repeated = {name: getattr(few, name).detach().repeat(copies, 1) for name in ("rows", "kept", "probs")}
    many = replace(few, expert_ids=few.expert_ids.repeat(copies, 1), **repeated)
    assert row_unit(16, len(many.rows), EXPERTS) == 64
    assert row_unit(16, len(few.rows), EXPERTS) == 16
    expected = experts.on_arrival(few).repeat(copies, 1)
    torch.testing.assert_close(experts.on_arrival(many), expected)


@given(
    st.sampled_from([1, 16, 32]),
    st.integers(min_value=0, max_value=10**6),
    st.integers(min_value=1, max_value=64),
)
def test_padding_is_what_the_quantiser_asks_for_or_little(alignment: int, rows: int, experts: int) -> None:
    unit = row_unit(alignment, rows, experts)
    assert unit % alignment == 0
    assert unit == alignment or 32 * experts * unit <= rows


class Training:
    """Experts with a gradient buffer, and what quantises their weights."""

    def __init__(self, quantizer: Quantizer, **options: Any) -> None:
        self.experts, self.quantizer = build(**options), quantizer
        self.buffer = buffer_of(self.experts)

    def step(self, number: int, *, hidden_update: bool) -> list[Tensor]:
        self.buffer.zero()
        found = [each for batch in range(2) for each in run(self.experts, 10 * number + batch)]
        self.buffer.reduce()
        for parameter in self.experts.parameters():
            weight = parameter.data if hidden_update else parameter.detach()  # `data` raises no version
            weight.sub_(parameter.main_grad, alpha=0.5)
        return [*found, *(p.main_grad.clone() for p in self.experts.parameters())]


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("hidden_update", [False, True])
def test_kept_weights_change_no_bit_and_are_quantised_once_a_step(
    hidden_update: bool, delay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer, _ = install(monkeypatch)
    results, calls = [], []
    for cache in (False, True):
        training = Training(quantizer, cache_quantized=cache, delay_wgrad=delay)
        quantizer.calls = 0
        results.append([training.step(n, hidden_update=hidden_update) for n in range(3)])
        calls.append(quantizer.calls)
    assert calls == [3 * 2 * 2 * EXPERTS, 3 * 2 * EXPERTS]
    for steps in zip(*results, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(*steps, strict=True))
    assert not torch.equal(results[0][0][0], results[0][1][0])


def test_weights_loaded_within_a_step_are_quantised_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer, _ = install(monkeypatch)
    training = Training(quantizer, cache_quantized=True)
    training.buffer.zero()
    before = run(training.experts, 1)
    with torch.no_grad():
        training.experts.weights.gate_up[0].mul_(-1)
    after = run(training.experts, 1)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(after[0], run(training.experts, 1)[0])


def test_nothing_is_kept_outside_a_step_nor_for_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer, _ = install(monkeypatch)
    training = Training(quantizer, cache_quantized=True)
    for opened in (False, True):
        if opened:
            training.buffer.zero()
        quantizer.calls = 0
        for _ in range(2):
            with torch.no_grad():
                training.experts.on_arrival(arrival(1))
        assert quantizer.calls == 2 * 2 * EXPERTS
    training.buffer.reduce()
    quantizer.calls = 0
    for _ in range(2):
        arrived = arrival(1)
        training.experts.on_arrival(arrived)
    assert quantizer.calls == 2 * 2 * EXPERTS
