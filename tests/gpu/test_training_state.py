"""Accumulation, norm, update and checkpoints on a GPU equal those on the CPU, with every AdamW there is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isozyme.core.config import OptimConfig
from isozyme.core.errors import BackendError, NonFiniteError
from isozyme.core.initialisation import Init
from isozyme.core.topology import Layout, Topology
from isozyme.parallel.checkpoint import load_checkpoint, save_checkpoint
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.grad_norm import clip_, global_norm
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import attach, dense_spec, named_shards
from isozyme.parallel.sharded_optimizer import make_optimizer
from isozyme.parallel.weights import load_weights, save_weights

SHAPES = {"a": (300, 70), "b": (33,), "c": (5, 7, 3)}


def setup(
    device: str, implementation: str, dtype: torch.dtype, sharded: bool = False, as_computed: bool = False
):
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    generator = torch.Generator().manual_seed(0)
    module = nn.ParameterDict()
    for name, shape in SHAPES.items():
        value = torch.randn(shape, generator=generator)
        kept = torch.float32 if name == "b" else dtype
        module[name] = nn.Parameter(value.to(device, kept))
        attach(module[name], dense_spec(name, shape, Init.normal(1.0), decay=name != "b"))
    buffer = GradientBuffer(module.parameters(), groups, sharded=sharded, as_computed=as_computed)
    optimizer = make_optimizer(buffer, OptimConfig(weight_decay=0.1, implementation=implementation))  # type: ignore[arg-type]
    return groups, module, buffer, optimizer


def train(device: str, implementation: str, dtype: torch.dtype, sharded: bool = False):
    groups, module, buffer, optimizer = setup(device, implementation, dtype, sharded)
    norms = []
    for step in range(5):
        buffer.zero()
        for part in range(2):
            generator = torch.Generator().manual_seed(10 * step + part)
            loss = sum(
                (p.float() * torch.randn(p.shape, generator=generator).bfloat16().float().to(device)).sum()
                for p in module.parameters()
            )
            loss.backward()
        buffer.reduce()
        norms.append(global_norm(buffer))
        clip_(buffer, norms[-1], 3.0)
        optimizer.step(0.01)
    return groups, module, buffer, optimizer, norms


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["triton", "te", "apex", "torch"])
@pytest.mark.parametrize("sharded", [False, True])
def test_five_steps_on_a_gpu_equal_five_on_the_cpu(implementation, dtype, sharded, tmp_path):
    try:
        groups, module, buffer, optimizer, norms = train("cuda", implementation, dtype, sharded)
    except BackendError as error:
        pytest.skip(str(error))
    _, twin, _, reference, expected = train("cpu", "torch", dtype)
    assert norms == pytest.approx(expected, rel=1e-5)
    expected_state = {name: tensor for name, tensor, _ in reference.state()}
    found_state = {name: tensor for name, tensor, _ in optimizer.state()}  # one rank owns whole tensors
    assert found_state.keys() == expected_state.keys()
    for name, tensor in found_state.items():
        torch.testing.assert_close(tensor.cpu(), expected_state[name], rtol=1e-4, atol=1e-6, msg=name)
    atol = 1e-5 if dtype == torch.float32 else 2**-7
    for one, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.cpu().float(), other.float(), rtol=2**-7, atol=atol)

    if implementation == "te" and dtype == torch.bfloat16:
        assert "writes bfloat16 parameters" in optimizer.choice.why
    for name, parameter in module.items():
        master = found_state.get(f"optim.master.{name}")
        assert (master is None) == (parameter.dtype == torch.float32)
        if master is not None:
            assert torch.equal(parameter.detach(), master.to(dtype)), name

    everything = [*named_shards(module), *optimizer.state()]
    before = {name: tensor.detach().clone() for name, tensor, _ in everything}
    path = save_checkpoint(tmp_path, 1, everything, groups)
    save_weights(tmp_path / "w.safetensors", module, groups)
    for load in (
        lambda: load_checkpoint(path, everything, groups),
        lambda: load_weights(tmp_path / "w.safetensors", module, groups),
    ):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(9.0)
        load()
        assert all(torch.equal(before[name], tensor) for name, tensor, _ in everything)

    buffer.zero()
    buffer.settle()
    module["c"].main_grad[0, 0, 0] = float("nan")
    buffer.reduce()
    with pytest.raises(NonFiniteError, match="rank 0: c"):
        global_norm(buffer)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "te", "apex", "torch"])
def test_gradients_kept_as_computed_change_no_bit_on_a_gpu(implementation):
    def steps(as_computed: bool) -> list[torch.Tensor]:
        _, module, buffer, optimizer = setup("cuda", implementation, torch.bfloat16, as_computed=as_computed)
        kinds = {module[name].main_grad.dtype for name in ("a", "c")}
        assert kinds == {torch.bfloat16 if as_computed else torch.float32}
        norms = []
        for step in range(3):
            buffer.zero()
            generator = torch.Generator().manual_seed(step)
            sum(
                (p.float() * torch.randn(p.shape, generator=generator).to("cuda")).sum()
                for p in module.parameters()
            ).backward()
            buffer.reduce()
            norms.append(global_norm(buffer))
            optimizer.step(0.01, 3.0 / norms[-1])
        tensors = [*module.parameters(), *(tensor for _, tensor, _ in optimizer.state())]
        return [torch.tensor(norms, dtype=torch.float64), *(tensor.detach() for tensor in tensors)]

    try:
        found, want = steps(True), steps(False)
    except BackendError as error:
        pytest.skip(str(error))
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
