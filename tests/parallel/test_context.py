"""Every method of context parallelism against attention over the whole window in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isozyme.core.context import ContextMethod, ContextOrder, KernelName
from isozyme.core.errors import ConfigError
from isozyme.parallel import context_kernels, context_partial
from isozyme.parallel.communicator import SingleCommunicator
from isozyme.parallel.context import METHODS, plan_context, whole_window_attention
from isozyme.parallel.context_layout import ContextLayout
from isozyme.parallel.context_tiles import subdivided
from isozyme.parallel.simulated import SimulatedWorld, simulate

WINDOWS, WINDOW, WIDTH = 2, 16, 6
METHOD_NAMES: tuple[ContextMethod, ...] = ("allgather", "ring", "ulysses")
ORDERS: tuple[ContextOrder, ...] = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Case:
    """Inputs of whole windows, and what the slow twin makes of them."""

    inputs: tuple[Tensor, ...]
    documents: Tensor | None
    weight: Tensor
    """The loss is the sum of the output times this."""
    expected: tuple[Tensor, ...]
    """Output, and the gradients of q, k and v."""


def make_case(
    heads: int, key_heads: int, *, packed: bool, window: int = WINDOW, dtype: torch.dtype = torch.float64
) -> Case:
    generator = torch.Generator().manual_seed(heads + 10 * key_heads + 100 * packed)

    def draw(n: int) -> Tensor:
        return torch.randn(WINDOWS, window, n, WIDTH, generator=generator, dtype=dtype)

    inputs = (2 * draw(heads), 2 * draw(key_heads), draw(key_heads))
    documents = None
    if packed:
        # Unlike boundaries: within a chunk, on the boundary of two, a document of one token, and padding.
        documents = torch.zeros(WINDOWS, window, dtype=torch.long)
        for number, start in enumerate((3, 8, 9)):
            documents[0, start:] = number + 1
        documents[1, window - 5 :] = 7
    leaves = [x.clone().requires_grad_() for x in inputs]
    weight = draw(heads)
    out = whole_window_attention(leaves[0], leaves[1], leaves[2], documents)
    (out * weight).sum().backward()
    grads = [x.grad for x in leaves]
    assert all(grad is not None for grad in grads)
    return Case(inputs, documents, weight, (out.detach(), *(grad for grad in grads if grad is not None)))


def run(case: Case, method: ContextMethod, size: int, order: ContextOrder) -> list[Tensor]:
    """Output and gradients of the whole windows, put together from the ranks of a simulated world."""
    layout = ContextLayout(window=case.weight.shape[1], size=size, order=order)

    def program(world: SimulatedWorld) -> list[Tensor]:
        rank = world.rank
        plan = plan_context(world.whole("cp"), layout, case.documents)
        leaves = [layout.part(x, rank).clone().requires_grad_() for x in case.inputs]
        out = METHODS[method](leaves[0], leaves[1], leaves[2], plan)
        (out * layout.part(case.weight, rank)).sum().backward()
        return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]

    parts = simulate(size, program, schedule_seed=size)
    return [layout.restore(torch.cat(found, dim=1)) for found in zip(*parts, strict=True)]


def largest_error(case: Case, found: list[Tensor]) -> float:
    assert len(found) == len(case.expected) == 4
    return max(
        float((ours - theirs).abs().max() / theirs.abs().max())
        for ours, theirs in zip(found, case.expected, strict=True)
    )


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_output_and_every_gradient_equal_those_of_the_whole_window(
    method: ContextMethod, size: int, order: ContextOrder, packed: bool, key_heads: int
) -> None:
    case = make_case(4, key_heads, packed=packed)
    assert largest_error(case, run(case, method, size, order)) < 1e-12


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_tiles_smaller_than_a_chunk_change_nothing(
    method: ContextMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(4, 2, packed=True)

    def small(q: Tensor, kernel: KernelName) -> context_kernels.Kernel:
        return replace(context_kernels.choose_kernel(q, kernel), max_rows=3)

    monkeypatch.setattr(context_partial, "choose_kernel", small)
    assert largest_error(case, run(case, method, 2, "zigzag")) < 1e-12


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_half_precision_loses_no_more_than_its_own_rounding(method: ContextMethod) -> None:
    case = make_case(4, 2, packed=True)
    rounded = replace(case, inputs=tuple(x.bfloat16() for x in case.inputs), weight=case.weight.bfloat16())
    found = run(rounded, method, 4, "zigzag")
    assert all(x.dtype == torch.bfloat16 for x in found)
    assert largest_error(case, [x.double() for x in found]) < 0.03


@pytest.mark.parametrize("method", ["allgather", "ring"])
def test_autocast_does_not_reach_into_the_sums(method: ContextMethod) -> None:
    case = make_case(4, 2, packed=False)
    single = replace(case, inputs=tuple(x.float() for x in case.inputs), weight=case.weight.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(single, method, 2, "zigzag")
    assert largest_error(case, [x.double() for x in found]) < 1e-5


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ranks_send_the_bytes_that_the_docstrings_say(
    method: ContextMethod, packed: bool, size: int, dtype: torch.dtype
) -> None:
    heads, key_heads = 4, 2
    layout = ContextLayout(window=WINDOW, size=size)
    documents = torch.arange(WINDOW).div(5, rounding_mode="floor").expand(WINDOWS, -1) if packed else None

    def program(world: SimulatedWorld, *, backward: bool) -> None:
        plan = plan_context(world.whole("cp"), layout, documents)
        q, k, v = (
            torch.ones(WINDOWS, layout.local_length, n, WIDTH, dtype=dtype, requires_grad=True)
            for n in (heads, key_heads, key_heads)
        )
        out = METHODS[method](q, k, v, plan)
        if backward:
            out.sum().backward()

    _, forward = simulate(size, lambda world: program(world, backward=False), trace=True)
    _, both = simulate(size, lambda world: program(world, backward=True), trace=True)
    e, w = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    t = WINDOWS * layout.local_length * WIDTH
    n, m = t * key_heads, max(key_heads // size, 1)
    of_forward, of_backward = {
        "allgather": (2 * n * e * (size - 1), 2 * n * e * (size - 1) + 2 * n * w * (size - 1)),
        "ring": (2 * n * e * (size - 1), 2 * n * e * (size - 1) + 2 * n * w * size),
        "ulysses": (t * e * (heads + 2 * m * size + heads) * (size - 1) // size,) * 2,
    }[method]
    for rank in range(size):
        assert forward.bytes_by_group(rank) == {"cp": of_forward}
        assert both.bytes_by_group(rank) == {"cp": of_forward + of_backward}


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return result


def memory(method: ContextMethod, window: int, *, packed: bool) -> tuple[int, int]:
    """The bytes of the largest tensor, and those saved for backward, on rank 0 of two."""
    layout = ContextLayout(window=window, size=2)
    documents = (torch.arange(window) >= window // 3).long()[None] if packed else None

    def program(world: SimulatedWorld) -> tuple[int, int]:
        saved: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        plan = plan_context(world.whole("cp"), layout, documents)
        q, k, v = (torch.ones(1, layout.local_length, 2, 8, requires_grad=True) for _ in range(3))
        # A mode is of its thread; the ranks take turns, so each has its own.
        with _Largest() as largest:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                out = METHODS[method](q, k, v, plan)
            out.sum().backward()
        return largest.bytes, sum(saved.values())

    return simulate(2, program)[0]


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_memory_grows_with_the_window_and_not_with_its_square(
    method: ContextMethod, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_kernels, "TILE_ELEMENTS", 2**14)
    small, large = memory(method, 512, packed=packed), memory(method, 2048, packed=packed)
    assert large[1] <= 4 * small[1]
    assert large[0] <= 4 * small[0]
    assert large[0] < 2048 * 1024, "a byte for every query and key of one head"


def test_one_rank_alone_sends_nothing_and_needs_no_world() -> None:
    case = make_case(4, 2, packed=True)
    plan = plan_context(SingleCommunicator("cp"), ContextLayout(window=WINDOW, size=1), case.documents)
    for method in METHODS.values():
        q, k, v = case.inputs
        torch.testing.assert_close(method(q, k, v, plan), case.expected[0], rtol=1e-12, atol=1e-12)


def test_ulysses_refuses_heads_that_it_cannot_deal_out() -> None:
    case = make_case(3, 3, packed=False)
    with pytest.raises(ConfigError, match="3 % 2 = 1"):
        run(case, "ulysses", 2, "zigzag")


Fault = Callable[[pytest.MonkeyPatch], None]


def _merge_forgets_to_rescale(patch: pytest.MonkeyPatch) -> None:
    def wrong(out: Tensor, logsumexp: Tensor, more_out: Tensor, more_logsumexp: Tensor) -> None:
        both = torch.logaddexp(logsumexp, more_logsumexp)
        out.add_(more_out * (more_logsumexp - both).exp()[..., None])
        logsumexp.copy_(both)

    patch.setattr(context_partial, "merge_", wrong)


def _merge_takes_the_larger(patch: pytest.MonkeyPatch) -> None:
    def wrong(out: Tensor, logsumexp: Tensor, more_out: Tensor, more_logsumexp: Tensor) -> None:
        both = torch.maximum(logsumexp, more_logsumexp)
        out.mul_((logsumexp - both).exp()[..., None]).add_(
            more_out * (more_logsumexp - both).exp()[..., None]
        )
        logsumexp.copy_(both)

    patch.setattr(context_partial, "merge_", wrong)


def _triangle_taken_for_rectangle(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "isozyme.parallel.context_partial.subdivided",
        lambda tile, limit: subdivided(replace(tile, causal=False), limit),
    )


@pytest.mark.parametrize(
    "fault", [_merge_forgets_to_rescale, _merge_takes_the_larger, _triangle_taken_for_rectangle]
)
@pytest.mark.parametrize("method", ["allgather", "ring"])
def test_a_wrong_merge_and_a_wrong_mask_are_caught(
    method: ContextMethod, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(4, 2, packed=False)
    fault(monkeypatch)
    assert largest_error(case, run(case, method, 2, "zigzag")) > 1e-3


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_a_mask_of_the_other_layout_is_caught(method: ContextMethod) -> None:
    case = make_case(4, 2, packed=False)
    zigzag, contiguous = (ContextLayout(window=WINDOW, size=2, order=order) for order in ORDERS)

    def program(world: SimulatedWorld) -> Tensor:
        q, k, v = (zigzag.part(x, world.rank) for x in case.inputs)
        return METHODS[method](q, k, v, plan_context(world.whole("cp"), contiguous))

    found = zigzag.restore(torch.cat(simulate(2, program), dim=1))
    assert float((found.detach() - case.expected[0]).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("window", "packed", "kernel", "expected"),
    [
        (1024, False, "cudnn", "cudnn"),
        (1024, True, "cudnn", "flash"),
        (768, False, "cudnn", "flash"),  # chunks of 192 tokens
        (1024, False, "flash", "flash"),
    ],
)
def test_cudnn_takes_tiles_of_its_own_size_whose_shapes_come_again(
    window: int, packed: bool, kernel: KernelName, expected: KernelName
) -> None:
    documents = torch.zeros(1, window, dtype=torch.long) if packed else None
    plan = plan_context(SingleCommunicator(), ContextLayout(window=window, size=2), documents, kernel)
    assert plan.tile_kernel == expected


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_kernels_of_tiles_give_the_shapes_of_the_dense_one(name: str) -> None:
    """On tensors without values: what the operators take and give, in this release of torch."""
    forward, backward = (getattr(context_kernels, each) for each in (name, f"{name}_backward"))
    q, k = (torch.empty(2, 256, n, 64, dtype=torch.bfloat16, device="meta")[:, :128] for n in (4, 2))
    out, logsumexp = forward(q, k, k, False)
    assert (out.shape, logsumexp.shape) == (q.shape, q.shape[:-1])
    grads = backward(torch.empty_like(q), q, k, k, out.bfloat16(), logsumexp, False)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
