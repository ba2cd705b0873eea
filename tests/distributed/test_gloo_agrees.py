"""Every collective over real processes (gloo, NCCL on GPUs) gives what the simulated world gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from isozyme.core.topology import Layout, Topology
from isozyme.parallel import collectives as C
from isozyme.parallel.communicator import Communicator
from isozyme.parallel.process_groups import ProcessGroups, World
from isozyme.parallel.simulated import simulate
from tests.distributed.spawn import ProcessFailed, TorchWorld, spawn

ROWS = [0, 1, 3]
COUNTS = [[0, 2, 1], [0, 0, 3], [1, 0, 0]]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
MOVED = [*DTYPES, torch.uint8, torch.float8_e4m3fn]


def values(rank: int, rows: int, dtype: torch.dtype, device: str) -> Tensor:
    """Small whole numbers, different on every rank, so that every dtype adds them exactly."""
    numbers = torch.arange(rows * 2).view(rows, 2)
    chosen = numbers % (rank + 2) == 0 if dtype == torch.bool else (numbers % 5 + rank).to(dtype)
    return chosen.to(device)


def reductions(comm: Communicator, device: str) -> dict[str, Tensor]:
    """Every reduction, dtype and operation, with and without empty ranks."""
    found, rank, rows = {}, comm.rank, ROWS[: comm.size]
    for dtype in DTYPES:
        for op in ("sum", "max", "min"):
            found[f"all_reduce {op} {dtype}"] = comm.all_reduce(values(rank, 4, dtype, device), op)
            found[f"scatter {op} {dtype}"] = comm.reduce_scatter(values(rank, 6, dtype, device), None, op)
            uneven = values(rank, sum(rows), dtype, device)
            found[f"uneven scatter {op} {dtype}"] = comm.reduce_scatter(uneven, rows, op)
    pending = [comm.all_reduce_async(values(rank, 2, torch.float32, device) * k) for k in range(3)]
    found["async"] = torch.stack([one.wait() for one in reversed(pending)])
    return found


def moves(comm: Communicator, device: str) -> dict[str, Tensor]:
    """Every exchange of rows and every dtype, with and without empty ranks; tensors of no rows or dims."""
    found, rank, size = {}, comm.rank, comm.size
    rows, counts = ROWS[:size], [count[:size] for count in COUNTS[:size]]
    after, before = (rank + 1) % size, (rank - 1) % size
    sent, received = counts[rank], [count[rank] for count in counts]
    for dtype in MOVED:
        found[f"gather {dtype}"] = comm.all_gather(values(rank, 2, dtype, device))
        found[f"uneven gather {dtype}"] = comm.all_gather(values(rank, rows[rank], dtype, device), rows)
        found[f"all_to_all {dtype}"] = comm.all_to_all(values(rank, sum(sent), dtype, device), received, sent)
        found[f"equal all_to_all {dtype}"] = comm.all_to_all(values(rank, 6, dtype, device))
        found[f"broadcast {dtype}"] = comm.broadcast(values(rank, 2, dtype, device), size - 1)
        ring = [(torch.zeros(2, 2, device=device).to(dtype), before)]
        found[f"exchange {dtype}"] = comm.exchange([(values(rank, 2, dtype, device), after)], ring)[0]
    odd = {"zero rows": torch.zeros(0, 2, device=device), "scalar": torch.tensor(rank, device=device)}
    for name, tensor in odd.items():
        found[f"all_reduce {name}"] = comm.all_reduce(tensor.clone())
        found[f"broadcast {name}"] = comm.broadcast(tensor.clone(), 1)
        found[f"exchange {name}"] = comm.exchange([(tensor, after)], [(tensor.clone(), before)])[0]
    nothing = torch.zeros(0, 4, device=device)
    found["nothing"] = comm.all_to_all(nothing, [0] * size, [0] * size)
    if rank == 0:
        comm.send(torch.full((2,), 7.0, device=device), size - 1)
    if rank == size - 1:
        found["received"] = comm.recv(torch.zeros(2, device=device), 0)
    return found


def groups(world: World, device: str) -> dict[str, Any]:
    """Several groups, some of one rank; Python objects; the process-group manager."""
    rank, last = world.rank, world.size - 1
    comm = world.split("all", [tuple(range(world.size))])
    found: dict[str, Any] = {"objects": comm.all_gather_object({"rank": rank, "name": "x" * rank})}
    comm.barrier()
    part = world.split("part", [(0, last), *((other,) for other in range(1, last))])
    found["part"] = part.all_reduce(torch.tensor([rank + 1], device=device))
    found["part ranks"] = (part.ranks, part.rank, part.size)
    if part.size > 1:
        found["from the other"] = part.broadcast(torch.tensor([rank], device=device), 1)
    manager = ProcessGroups(Topology(Layout(dp=world.size, ep=world.size)), world)
    found["ep"] = manager["ep"].all_reduce(torch.tensor([rank], device=device))
    found["edp"] = manager["edp"].all_reduce(torch.tensor([rank], device=device))
    return found


def gradients(comm: Communicator, device: str) -> dict[str, Tensor]:
    """Through every autograd pair, with empty ranks."""
    rank, size = comm.rank, comm.size
    rows = ROWS[:size]
    x = (
        torch.arange(rows[rank] * 2, dtype=torch.float64, device=device)
        .view(-1, 2)
        .add(rank)
        .requires_grad_()
    )
    y = C.gather_from_group(x, comm, rows) * (rank + 1)
    y = C.reduce_scatter_to_group(y, comm, rows)
    z = C.copy_to_group(C.gather_replicated_from_group(y, comm, rows), comm) * (rank + 2)
    z = C.split_to_group(C.reduce_from_group(z, comm), comm, rows)
    counts = [[0, 0, 0], [1, 0, 0], [1, 1, 1]]
    sent, received = counts[rank][:size], [count[rank] for count in counts[:size]]
    w = C.all_to_all(z, comm, received, sent)
    w = C.finish(C.all_to_all_start(w, comm, sent, received))
    (w**2 * (rank + 1)).sum().backward()
    assert x.grad is not None
    return {"value": w.detach(), "gradient": x.grad}


def everything(world: World, device: str = "cpu") -> dict[str, Any]:
    comm = world.split("ep", [tuple(range(world.size))])
    parts = (reductions(comm, device), moves(comm, device), groups(world, device), gradients(comm, device))
    found = {name: value for part in parts for name, value in part.items()}
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in found.items()}


def assert_equal(real: list[dict[str, Any]], simulated: list[dict[str, Any]]) -> None:
    for rank, expected in enumerate(simulated):
        assert real[rank].keys() == expected.keys()
        for name, value in expected.items():
            ours = real[rank][name]
            if isinstance(value, Tensor):
                assert (ours.shape, ours.dtype) == (value.shape, value.dtype), (rank, name)
                same = torch.equal(ours.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
                assert same, (rank, name, ours, value)
            else:
                assert ours == value, (rank, name)


def test_gloo_and_the_simulated_world_agree_on_every_collective() -> None:
    assert_equal(spawn(everything, 3), simulate(3, everything))


@pytest.mark.gpu(count=2)
def test_nccl_and_the_simulated_world_agree_on_every_collective() -> None:
    assert_equal(spawn(everything, 2, "cuda", device="cuda"), simulate(2, everything))


def leaves_early(world: TorchWorld) -> None:
    comm = world.whole("ep")
    comm.barrier()
    if world.rank == 1:
        raise ValueError("rank 1 has a fault of its own")
    comm.all_reduce(torch.ones(2))


def test_a_peer_that_is_gone_is_reported_with_the_call_the_group_and_the_rank() -> None:
    with pytest.raises(ProcessFailed) as caught:
        spawn(leaves_early, 2)
    text = str(caught.value)
    assert "rank 1 has a fault of its own" in text
    assert (
        "CommunicationError: a call failed: all_reduce((2,) float32, sum) over ep on rank 0 of ranks [0, 1]"
        in text
    )
