"""Expert weights and backends, against a formula applied row by row and against each other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isozyme.core.errors import BackendError, ConfigError, DataError, UsageError
from isozyme.core.topology import Layout, Topology
from isozyme.moe.experts.experts import Experts
from isozyme.moe.experts.grouped_mm import grouped_linear, grouped_mm_experts, row_offsets
from isozyme.moe.experts.loop import loop_experts
from isozyme.moe.experts.measured import SCHEMA, MeasuredTable, Measurement, Shape, shipped_tables, table_from
from isozyme.moe.experts.registry import GROUPED_MM, LOOP, Backend, ExpertSetting, choose_backend
from isozyme.moe.experts.storage import ExpertWeights, stack_of
from isozyme.moe.types import Dispatched, ExpertFunction
from isozyme.parallel.communicator import Communicator, SingleCommunicator
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import named_shards, spec_of

HIDDEN, FFN = 16, 8


def single_groups() -> ProcessGroups:
    return ProcessGroups(Topology(Layout()), SingleWorld())


class NthRank:
    """A world in which nothing is said: enough to build weights as any one rank of a layout."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def split(self, name: str, partition: Any) -> Communicator:
        return SingleCommunicator(name)


def weights(layout: Layout | None = None, rank: int = 0, **changes: Any) -> ExpertWeights:
    topology = Topology(layout or Layout())
    options: dict[str, Any] = {
        "name": "layers.1.moe",
        "num_experts": 4,
        "hidden": HIDDEN,
        "ffn": FFN,
        "groups": ProcessGroups(topology, NthRank(rank, topology.world_size)),
        "seed": 3,
        "init_std": 0.5,
        "output_std": 0.25,
        "dtype": torch.float64,
    }
    return ExpertWeights(**{**options, **changes})


def make_dispatched(counts: list[int], *, dtype: torch.dtype, spare: int = 0) -> Dispatched:
    """Distinct rows and probabilities, and `spare` rows of NaN behind them."""
    total = sum(counts)
    rows = torch.randn(total + spare, HIDDEN, dtype=torch.float64).to(dtype)
    probs = torch.rand(total + spare, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    rows[total:], probs[total:] = float("nan"), float("nan")
    return Dispatched(
        rows=rows.requires_grad_(),
        probs=probs.requires_grad_(),
        tokens_per_expert=torch.tensor(counts),
        num_rows=total,
        host_counts=tuple(counts),
    )


def naive(dispatched: Dispatched, gate_up: Tensor, down: Tensor) -> Tensor:
    """`(silu(x @ gate.T) * (x @ up.T) * prob) @ down.T` of the real rows, one row after the other."""
    owner = torch.repeat_interleave(torch.arange(len(down)), dispatched.tokens_per_expert)
    gate, up = gate_up[:, :FFN], gate_up[:, FFN:]
    out = [
        down[e] @ (torch.nn.functional.silu(gate[e] @ x) * (up[e] @ x) * p)
        for e, x, p in zip(owner.tolist(), dispatched.rows, dispatched.probs, strict=False)
    ]
    zero = 0 * (dispatched.rows[:0].sum() + dispatched.probs[:0].sum() + gate_up.sum() + down.sum())
    return (torch.stack(out) if out else dispatched.rows[:0]) + zero


def run(
    function: ExpertFunction | Any, counts: list[int], dtype: torch.dtype, spare: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Values of the real rows, and gradients of rows, probabilities, gate-up and down."""
    torch.manual_seed(len(counts))
    dispatched = make_dispatched(counts, dtype=dtype, spare=spare)
    gate_up = torch.randn(len(counts), 2 * FFN, HIDDEN, dtype=torch.float64).to(dtype).requires_grad_()
    down = torch.randn(len(counts), HIDDEN, FFN, dtype=torch.float64).to(dtype).requires_grad_()
    if function is naive:
        out = naive(dispatched, gate_up, down)
    else:
        out = function(dispatched.rows, dispatched.probs, gate_up, down, dispatched)
        assert out.shape == dispatched.rows.shape
    upstream = torch.randn(sum(counts), HIDDEN, dtype=torch.float64).to(dtype)
    if function is not naive and spare:
        upstream = torch.cat([upstream, torch.full((spare, HIDDEN), float("nan"), dtype=dtype)])
    grads = torch.autograd.grad(out, (dispatched.rows, dispatched.probs, gate_up, down), upstream)
    return out[: sum(counts)].detach(), list(grads)


COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@given(COUNTS, st.integers(0, 3))
def test_the_loop_follows_the_formula_and_poison_behind_the_rows_touches_nothing(
    counts: list[int], spare: int
) -> None:
    found, found_grads = run(loop_experts, counts, torch.float64, spare)
    want, want_grads = run(naive, counts, torch.float64, spare)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
    for got, expected in zip(found_grads, want_grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


@given(COUNTS, st.integers(0, 3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_grouped_mm_equals_the_loop_in_values_and_gradients(
    counts: list[int], spare: int, dtype: torch.dtype
) -> None:
    found, found_grads = run(grouped_mm_experts, counts, dtype, spare)
    want, want_grads = run(loop_experts, counts, dtype, spare)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for got, expected in zip([found, *found_grads], [want, *want_grads], strict=True):
        assert torch.isfinite(got).all()
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * max(scale, 1e-6))


@pytest.mark.parametrize("counts", [[3, 0, 2, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize(
    ("function", "dtype"),
    [(loop_experts, torch.float64), (loop_experts, torch.float32), (grouped_mm_experts, torch.float32)],
)
def test_empty_experts_get_gradients_that_are_exactly_zero(
    counts: list[int], function: Any, dtype: torch.dtype
) -> None:
    for grad in run(function, counts, dtype, spare=2)[1][2:]:
        for count, of_expert in zip(counts, grad, strict=True):
            assert (of_expert != 0).any() if count else (of_expert == 0).all()


def test_a_rank_without_rows_never_calls_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", fail)
    for grad in run(grouped_mm_experts, [0, 0], torch.bfloat16, spare=2)[1]:
        assert (grad == 0).all()


def test_weights_that_change_between_forward_and_backward_are_noticed() -> None:
    module = weights()
    gate_up, _ = module.stacks()
    loss = (gate_up**2).sum()
    with torch.no_grad():
        module.gate_up[0].mul_(2)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        loss.backward()


def test_grouped_mm_takes_an_expanded_gradient() -> None:
    dispatched = make_dispatched([2, 1], dtype=torch.float32)
    gate_up, down = torch.randn(2, 2 * FFN, HIDDEN), torch.randn(2, HIDDEN, FFN)
    out = grouped_mm_experts(dispatched.rows, dispatched.probs, gate_up, down, dispatched)
    out.sum().backward()
    assert dispatched.rows.grad is not None


def test_row_offsets_are_int32_and_an_overflow_is_refused() -> None:
    assert row_offsets(torch.tensor([2, 0, 3]), 5).dtype == torch.int32
    with pytest.raises(OverflowError, match="2147483648 rows"):
        row_offsets(torch.tensor([2**31]), 2**31)


def setting(**changes: Any) -> ExpertSetting:
    options: dict[str, Any] = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "num_local_experts": 2,
        "hidden": HIDDEN,
        "ffn": FFN,
    }
    return ExpertSetting(**{**options, **changes})


def test_auto_says_what_it_chose_and_why_not_the_others() -> None:
    assert choose_backend("auto", setting())[0].name == "grouped_mm"
    backend, reason = choose_backend("auto", setting(dtype=torch.float64, hidden=7))
    assert backend.name == "loop"
    assert "grouped_mm cannot run" in reason
    assert "float64" in reason
    assert "hidden=7 x 8 bytes = 56" in reason


def planted(**ms: float) -> MeasuredTable:
    """Two shapes in fp32, the nearer one to `setting()` with these times, the other one with the reverse."""
    far = dict(zip(ms, sorted(ms.values(), reverse=True), strict=True))
    near = Shape(hidden=HIDDEN, ffn=2 * FFN, num_local_experts=2)
    return MeasuredTable(
        gpu="a GPU",
        measurements=(
            Measurement(precision="fp32", shape=Shape(hidden=512, ffn=FFN, num_local_experts=64), ms=far),
            Measurement(precision="fp32", shape=near, ms=ms),
            Measurement(precision="fp64", shape=near, ms={"grouped_mm": 1.0, "te": 2.0}),
        ),
    )


def test_auto_takes_what_was_measured_fastest_at_the_nearest_shape() -> None:
    assert choose_backend("auto", setting())[0].name == "grouped_mm"  # by the fixed order
    backend, words = choose_backend("auto", setting(), measured=planted(loop=1.5, grouped_mm=2.0))
    assert backend.name == "loop"
    where = "h=16 f=16 E=2 rows=32,768, fp32, a GPU"
    assert words == f"auto chose loop (measured fastest at {where}: 1.50 ms; grouped_mm 2.00)"
    far = setting(hidden=512, ffn=16, num_local_experts=64)
    assert choose_backend("auto", far, measured=planted(loop=1.5, grouped_mm=2.0))[0].name == "grouped_mm"


def test_a_measured_backend_that_cannot_run_is_passed_over_and_one_never_measured_does_not_win() -> None:
    no_luck = Backend(name="te", problems=lambda _: ["no luck"], build=lambda _s, _w: loop_experts)
    unknown = Backend(name="new", problems=lambda _: [], build=lambda _s, _w: loop_experts)
    table = planted(te=1.0, loop=1.5, grouped_mm=2.0)
    backend, words = choose_backend("auto", setting(), (unknown, no_luck, GROUPED_MM, LOOP), table)
    assert backend.name == "loop"
    assert "1.50 ms; grouped_mm 2.00; te cannot run: no luck" in words


def test_a_precision_in_which_nothing_usable_was_measured_keeps_the_fixed_order() -> None:
    assert choose_backend("auto", setting(dtype=torch.float64), measured=planted(loop=1.0))[0].name == "loop"
    backend, _ = choose_backend("auto", setting(dtype=torch.bfloat16), measured=planted(loop=1.0))
    assert backend.name == "grouped_mm"


def test_a_user_of_8_bits_hears_where_bf16_is_faster() -> None:
    (table,) = [each for each in shipped_tables() if each.gpu == "NVIDIA H200"]
    te = Backend(name="te", problems=lambda _: [], build=lambda _s, _w: loop_experts)

    def words(hidden: int, ffn: int, experts: int) -> str:
        asked = setting(hidden=hidden, ffn=ffn, num_local_experts=experts, precision="fp8_current")
        return choose_backend("auto", asked, (te,), table)[1]

    assert "precision=bf16 is faster there: grouped_mm_fused" in words(2048, 768, 64)
    assert "bf16" not in words(4096, 14_336, 8)


def test_a_table_of_another_kind_is_refused() -> None:
    with pytest.raises(DataError, match="schema="):
        table_from({"schema": "other"}, "x.json")


ROW = {"precision": "bf16", "hidden": 8, "ffn": 8, "num_local_experts": 1, "rows": 8, "ms": {"te": 1.0}}


@pytest.mark.parametrize(
    "broken",
    [
        [],
        {"schema": SCHEMA},
        {"schema": SCHEMA, "gpu": "G", "measurements": [{**ROW, "ms": [1.0]}]},
        {"schema": SCHEMA, "gpu": "G", "measurements": [{**ROW, "rows": None}]},
        {"schema": SCHEMA, "gpu": "G", "measurements": [{**ROW, "ms": {"te": "fast"}}]},
    ],
)
def test_a_table_with_something_missing_is_refused_by_name(broken: Any) -> None:
    with pytest.raises(DataError, match=r"x\.json"):
        table_from(broken, "x.json")


def test_experts_on_the_meta_device_wait_with_the_choice_of_a_backend() -> None:
    def experts(backend: str) -> Experts:
        return Experts(
            name="m",
            num_experts=4,
            hidden=HIDDEN,
            ffn=FFN,
            groups=single_groups(),
            seed=None,
            init_std=0.5,
            output_std=0.5,
            backend=backend,
            device="meta",
        )

    waiting = experts("te")  # which a CPU has not
    assert waiting.backend is None
    assert "not chosen yet" in waiting.choice
    with pytest.raises(UsageError, match="meta device"):
        waiting(make_dispatched([1, 0, 2, 0], dtype=torch.float32))
    assert experts("auto").to_empty(device="cpu").backend == "grouped_mm"


def test_a_named_backend_that_cannot_run_is_refused_with_every_unmet_condition() -> None:
    with pytest.raises(BackendError) as caught:
        choose_backend("grouped_mm", setting(dtype=torch.float64, hidden=7, precision="fp8_block"))
    for part in ("float64", "hidden=7", "fp8_block"):
        assert part in str(caught.value)


def test_a_misspelt_backend_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(BackendError, match="Did you mean 'grouped_mm'"):
        choose_backend("groupedmm", setting())


def test_auto_refuses_when_nothing_runs() -> None:
    broken = Backend(name="x", problems=lambda _: ["no luck"], build=lambda _s, _w: loop_experts)
    with pytest.raises(BackendError, match="x cannot run: no luck"):
        choose_backend("auto", setting(), (broken,))


@pytest.mark.parametrize(("hidden", "ffn"), [(6, 8), (8, 6)])
def test_widths_that_are_no_multiple_of_16_bytes_are_refused(hidden: int, ffn: int) -> None:
    assert "6 x 4 bytes = 24" in " ".join(choose_backend("auto", setting(hidden=hidden, ffn=ffn))[1:])


def test_the_stride_rule_is_the_one_that_the_kernel_enforces() -> None:
    rows, weight = torch.randn(2, 6), torch.randn(1, 8, 6)
    with pytest.raises(RuntimeError, match="16 bytes"):
        grouped_linear(rows, weight, torch.tensor([2], dtype=torch.int32))


def whole(layout: Layout) -> dict[str, Tensor]:
    """Every expert weight of the global model, put together from all ranks of a layout."""
    topology = Topology(layout)
    found: dict[str, Tensor] = {}
    for rank in range(topology.world_size):
        for name, value, spec in named_shards(weights(layout, rank)):
            place = found.setdefault(name, torch.full(spec.global_shape, float("nan"), dtype=value.dtype))
            place[spec.slices(topology, rank)] = value.detach()
    return found


@pytest.mark.parametrize("layout", [Layout(ep=2), Layout(ep=4), Layout(etp=2), Layout(ep=2, etp=2)], ids=str)
def test_the_global_weights_are_the_same_at_every_layout_and_all_experts_differ(layout: Layout) -> None:
    one, many = whole(Layout()), whole(layout)
    assert (
        set(one)
        == set(many)
        == {f"layers.1.moe.experts.{e}.{p}" for e in range(4) for p in ("gate_up", "down")}
    )
    assert all(one[name].equal(many[name]) for name in one)
    values = [value.flatten()[: HIDDEN * FFN] for value in many.values()]
    assert all(not a.equal(b) for i, a in enumerate(values) for b in values[:i])


def test_specs_say_that_only_edp_sums_gradients() -> None:
    for _, parameter, spec in named_shards(weights(Layout(dp=4, ep=2), rank=3)):
        assert spec.grid == "expert"
        assert spec.reduce_axes == ("edp",)
        assert tuple(parameter.shape) == spec.local_shape(Topology(Layout(dp=4, ep=2)))
    assert weights(Layout(dp=4, ep=2), rank=3).expert_ids == (2, 3)


@pytest.mark.parametrize(("layout", "sum_"), [(Layout(ep=3), "4 % 3 = 1"), (Layout(etp=3), "8 % 3 = 2")])
def test_a_layout_that_does_not_divide_the_experts_is_refused(layout: Layout, sum_: str) -> None:
    with pytest.raises(ConfigError, match=sum_):
        weights(layout)


def is_tied(module: ExpertWeights) -> bool:
    """Whether a change of a parameter shows in the stack."""
    for parameters in (module.gate_up, module.down):
        stack = stack_of(tuple(parameters))
        with torch.no_grad():
            for index, parameter in enumerate(parameters):
                parameter.flatten()[-1] = 100.0 + index
                if stack[index].flatten()[-1] != 100.0 + index:
                    return False
    return True


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m,
        lambda m: m.bfloat16(),
        lambda m: m.double(),
        lambda m: m.to("cpu", torch.float32),
        lambda m: m.half(),
    ],
)
def test_casts_keep_parameters_stack_specs_and_gradients_together(cast: Any) -> None:
    module = weights()
    before = {name: value.detach().clone() for name, value, _ in named_shards(module)}
    identities = [id(p) for p in module.parameters()]
    for index, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, float(index))
    cast(module)
    assert [id(p) for p in module.parameters()] == identities
    for index, (name, value, spec) in enumerate(named_shards(module)):
        assert spec.name == name
        assert value.detach().equal(before[name].to(value.dtype))
        assert value.grad is not None
        assert value.grad.dtype == value.dtype
        assert (value.grad == index).all()
    assert is_tied(module)


def test_moving_to_meta_and_back_by_to_empty_keeps_specs_and_views() -> None:
    module = weights().to("meta")
    assert {spec.name for _, _, spec in named_shards(module)} == set(whole(Layout()))
    module.to_empty(device="cpu")
    assert is_tied(module)


def test_a_state_dict_round_trip_keeps_the_stack() -> None:
    module, other = weights(), weights(seed=9)
    other.load_state_dict(module.state_dict())
    assert stack_of(tuple(other.down)).equal(stack_of(tuple(module.down)))
    assert is_tied(other)


def test_parameters_that_left_their_stack_are_refused_until_tied_again() -> None:
    module = copy.deepcopy(weights())
    values = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(UsageError, match="tie"):
        module.stacks()
    module.tie()
    assert all(p.equal(v) for p, v in zip(module.parameters(), values, strict=True))
    assert is_tied(module)


def test_the_stack_hands_each_parameter_its_slice_of_the_gradient() -> None:
    module = weights()
    gate_up, down = module.stacks()
    assert gate_up.shape == (4, 2 * FFN, HIDDEN)
    assert down.shape == (4, HIDDEN, FFN)
    upstream = torch.randn_like(gate_up)
    upstream[2] = 0
    torch.autograd.backward([gate_up, down.sum()], [upstream, None])
    for index, parameter in enumerate(module.gate_up):
        assert parameter.grad is not None
        assert parameter.grad.is_contiguous()
        assert parameter.grad.reshape(2 * FFN, HIDDEN).equal(upstream[index])
    assert all((p.grad == 1).all() for p in module.down)


def test_a_gradient_buffer_gets_the_sums_and_empty_experts_leave_it_as_it_was() -> None:
    plain, buffered = weights(), weights()
    for parameters in (buffered.gate_up, buffered.down):
        before = torch.full((4, *parameters[0].shape), 7.0, dtype=torch.float64)
        for parameter, view in zip(parameters, before.unbind(0), strict=True):
            parameter.main_grad = view
    for module in (plain, buffered):
        torch.manual_seed(0)
        for counts in ([3, 0, 2, 0], [0, 0, 4, 0]):
            dispatched = make_dispatched(counts, dtype=torch.float64, spare=1)
            rows = loop_experts(dispatched.rows, dispatched.probs, *module.stacks(), dispatched)
            rows[: sum(counts)].square().sum().backward()
    for (name, parameter), other in zip(plain.named_parameters(), buffered.parameters(), strict=True):
        assert other.grad is None
        if name.endswith((".1", ".3")):  # experts without a row in any micro-batch
            assert (other.main_grad == 7).all()
        else:
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 0
            torch.testing.assert_close(other.main_grad, 7 + parameter.grad, rtol=0, atol=1e-11)


def test_gate_is_the_first_half_of_the_stack() -> None:
    module = weights()
    gate_up, _ = module.stacks()
    assert gate_up[1, :FFN].equal(module.gate_up[1][0])
    assert spec_of(module.gate_up[1]).global_shape == (2, FFN, HIDDEN)


def test_experts_accumulate_over_micro_batches_and_rechoose_their_backend_when_cast() -> None:
    experts = Experts(
        name="m",
        num_experts=2,
        hidden=HIDDEN,
        ffn=FFN,
        groups=single_groups(),
        seed=0,
        init_std=0.1,
        output_std=0.1,
    )
    assert experts.choice == "auto chose grouped_mm"
    experts.double()
    assert experts.choice.startswith("auto chose loop")
    dispatched = make_dispatched([3, 0], dtype=torch.float64)
    experts(dispatched).sum().backward()
    once = [p.grad.clone() for p in experts.parameters() if p.grad is not None]
    experts(dispatched).sum().backward()
    assert len(once) == 4
    for parameter, grad in zip(experts.parameters(), once, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, 2 * grad)
