"""Expert weights: one contiguous stack a projection, and one leaf Parameter per expert that views it.

Grouped GEMMs take the stack, while optimiser, gradient buffer and checkpoint see one parameter per expert
with its own global name and `ShardSpec`. Nothing else holds the stack: it is read off the parameters' common
storage, so that it cannot go stale when something moves them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from isozyme.core.errors import ConfigError, UsageError, divisors
from isozyme.core.initialisation import Init
from isozyme.moe.kernels.accumulate import accumulate
from isozyme.parallel.main_grad import claim
from isozyme.parallel.parameters import local_initial_value
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import ShardSpec, attach, spec_of


def expert_specs(
    name: str, expert: int, *, hidden: int, ffn: int, init_std: float, output_std: float
) -> tuple[ShardSpec, ShardSpec]:
    """Ownership of one expert's gate-up `[2, F, H]` and down `[H, F]` weights.

    The expert lives on one EP rank, F is cut over ETP, and only EDP holds copies: there, and nowhere else,
    gradients are summed.
    """
    gate_up = ShardSpec(
        name=f"{name}.experts.{expert}.gate_up",
        global_shape=(2, ffn, hidden),
        grid="expert",
        split=((1, "etp"),),
        init_dim=1,
        replicas={"edp": "partial"},
        init=Init.normal(init_std),
    )
    down = ShardSpec(
        name=f"{name}.experts.{expert}.down",
        global_shape=(hidden, ffn),
        grid="expert",
        split=((1, "etp"),),
        init_dim=1,
        replicas={"edp": "partial"},
        init=Init.normal(output_std),
    )
    return gate_up, down


class ExpertWeights(nn.Module):
    """The weights of this rank's experts.

    Args:
        name: global name of the layer, such as `layers.3.moe`; parameters are `{name}.experts.{e}.gate_up`
            and `.down` with the global expert id e.
        num_experts: E, the experts of the whole model; this rank holds E/EP of them, contiguous by id.
        hidden: H.
        ffn: F, before the cut over ETP.
        groups: the communicators of this rank.
        seed: seed of the model; a weight depends on it and on the global name alone. None: see
            `isozyme.parallel.parameters.local_initial_value`.
        init_std: standard deviation of gate and up.
        output_std: standard deviation of down.
        device: where the weights are.
        dtype: their type.

    Raises:
        ConfigError: if EP does not divide E, or ETP does not divide F.
    """

    def __init__(
        self,
        *,
        name: str,
        num_experts: int,
        hidden: int,
        ffn: int,
        groups: ProcessGroups,
        seed: int | None,
        init_std: float,
        output_std: float,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        ep, etp = groups.topology.size("ep"), groups.topology.size("etp")
        for whole, value, axis, size in (("num_experts", num_experts, "ep", ep), ("ffn", ffn, "etp", etp)):
            if value % size:
                raise ConfigError(
                    f"{axis} must divide {whole}: {whole}={value}, {axis}={size}; {value} % {size} = "
                    f"{value % size}. Choose {axis} from {', '.join(map(str, divisors(value)))}."
                )
        count = num_experts // ep
        first = groups.coordinates["ep"] * count
        self.expert_ids = tuple(range(first, first + count))
        specs = [
            expert_specs(name, e, hidden=hidden, ffn=ffn, init_std=init_std, output_std=output_std)
            for e in self.expert_ids
        ]
        self.gate_up, self.down = (
            _stacked_parameters(column, groups, seed=seed, device=device, dtype=dtype)
            for column in zip(*specs, strict=True)
        )

    def stacks(self) -> tuple[Float[Tensor, "E_local F2 H"], Float[Tensor, "E_local H F"]]:
        """Both stacks, with gradient; F is this rank's share, and the F gate rows lie above the F up rows."""
        gate_up = stack_of(members(self.gate_up))
        return rearrange(gate_up, "e two f h -> e (two f) h"), stack_of(members(self.down))

    def tie(self) -> None:
        """Lay each projection's parameters out in one stack again, with their present values.

        Needed after something replaced them one by one (`copy.deepcopy`, `load_state_dict(assign=True)`).
        """
        for parameters in (self.gate_up, self.down):
            _move(parameters, lambda stack: stack.clone(), torch.stack([p.detach() for p in parameters]))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertWeights:  # noqa: ARG002
        """Move or cast (`.to`, `.bfloat16()`) each stack as a whole, so that its views stay views."""
        for parameters in (self.gate_up, self.down):
            _move(parameters, fn, stack_of(tuple(parameters)).detach())
        return self


def members(parameters: nn.ParameterList) -> tuple[nn.Parameter, ...]:
    """`tuple(parameters)`, in one look: a list's iterator finds each by its name, in every forward anew."""
    return tuple(cast(dict[str, nn.Parameter], parameters._parameters).values())


def _stacked_parameters(
    specs: Sequence[ShardSpec],
    groups: ProcessGroups,
    *,
    seed: int | None,
    device: torch.device | str,
    dtype: torch.dtype,
) -> nn.ParameterList:
    shape = specs[0].local_shape(groups.topology)
    stack = torch.empty((len(specs), *shape), device=device, dtype=dtype)
    parameters = []
    for view, spec in zip(stack.unbind(0), specs, strict=True):
        view.copy_(local_initial_value(spec, groups, seed=seed, device=device, dtype=dtype))
        parameters.append(nn.Parameter(view))
        attach(parameters[-1], spec)
    return nn.ParameterList(parameters)


def _move(parameters: nn.ParameterList, fn: Callable[[Tensor], Tensor], stack: Tensor) -> None:
    with torch.no_grad():
        moved = fn(stack)
        for index, (old, view) in enumerate(zip(parameters, moved.unbind(0), strict=True)):
            grad = None if old.grad is None else fn(old.grad)
            if torch._has_compatible_shallow_copy_type(old, view):
                old.data = view
                new = old
            else:  # another kind of tensor, such as from or to the meta device
                new = nn.Parameter(view, requires_grad=old.requires_grad)
                attach(new, spec_of(old))
                parameters[index] = new
            new.grad = grad


def _shared_stack(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor `[n, ...]` that equally shaped tensors view side by side, or None if they do not."""
    first, last = tensors[0], tensors[-1]
    step = first.numel() * first.element_size()
    base = _address(first)
    tied = (
        first.is_contiguous()
        and first.untyped_storage()._cdata == last.untyped_storage()._cdata
        and all(_address(tensor) == base + index * step for index, tensor in enumerate(tensors))
    )
    if not tied:
        return None
    return first.detach().as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def _address(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size() if tensor.is_meta else tensor.data_ptr()


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        stack = _shared_stack(parameters)
        if stack is None:
            raise UsageError(
                f"the parameters of {len(parameters)} experts no longer lie side by side in one storage: "
                "something replaced them one by one. Call ExpertWeights.tie() after it."
            )
        ctx.parameters = parameters
        ctx.set_materialize_grads(False)
        return stack

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:  # a backend has added them to `main_grad` itself
            return (None,) * len(ctx.parameters)
        main = main_grad_stack(ctx.parameters)
        if main is None:
            return grads[0].contiguous().unbind(0)
        accumulate(main, grads[0], first=claim(ctx.parameters))
        return (None,) * len(ctx.parameters)


def main_grad_stack(parameters: Sequence[Tensor]) -> Tensor | None:
    """The parameters' `main_grad` as one stack `[n, ...]`, or None if they have none."""
    if not all(hasattr(parameter, "main_grad") for parameter in parameters):
        return None
    return _shared_stack([parameter.main_grad for parameter in parameters])  # type: ignore[attr-defined]


def stack_of(parameters: Sequence[Tensor]) -> Tensor:
    """The stack `[n, ...]` that `parameters` view, without a copy (under `torch.compile`: with one).

    In backward each parameter gets its slice of the stack's gradient, a view, exactly zero for an expert
    without rows: so every expert takes part in whatever waits for gradients. Where a gradient buffer has
    given them adjacent `main_grad`, the whole stack is written or added to it at once (see
    `isozyme.parallel.main_grad`) and no single gradient appears.

    Raises:
        UsageError: if they do not lie side by side in one storage.
    """
    if torch.compiler.is_compiling():
        return torch.stack(tuple(parameters))
    return _Stack.apply(*parameters)  # type: ignore[no-untyped-call]
