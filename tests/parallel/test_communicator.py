"""The base class refuses wrong arguments on the spot; a group of one rank is an ordinary communicator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from isozyme.parallel.communicator import Call, Communicator, Finished, SingleCommunicator
from isozyme.parallel.simulated import simulate

single = SingleCommunicator("ep", 5)


def test_a_group_of_one_rank_is_an_ordinary_communicator() -> None:
    x = torch.arange(6.0).view(3, 2)
    assert (single.name, single.ranks, single.rank, single.size) == ("ep", (5,), 0, 1)
    assert single.all_reduce(x) is x
    for copy in (
        single.all_gather(x),
        single.all_gather(x, [3]),
        single.reduce_scatter(x),
        single.reduce_scatter(x, [3], "max"),
        single.all_to_all(x),
        single.all_to_all(x, [3], [3]),
    ):
        assert torch.equal(copy, x)
        assert copy.data_ptr() != x.data_ptr()
    assert single.broadcast(x) is x
    assert single.all_gather_object("a") == ["a"]
    single.barrier()
    assert single.exchange([], []) == []


def test_a_group_of_one_rank_has_nobody_to_send_to() -> None:
    with pytest.raises(ValueError, match="a group of one rank has no peer"):
        single.send(torch.ones(1), 0)


def test_a_pending_result_is_there_after_wait() -> None:
    pending = single.all_gather_async(torch.ones(2))
    assert torch.equal(pending.wait(), pending.wait())
    assert Finished(3).wait() == 3


def test_rows_that_are_not_contiguous_are_sent_all_the_same() -> None:
    x = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(single.all_gather(x), x)


WRONG: dict[str, tuple[Callable[[Communicator], object], str]] = {
    "all_gather of another number of rows": (
        lambda c: c.all_gather(torch.ones(2), [3, 3]),
        r"all_gather over ep, rank \d of 2: sizes\[\d\]=3, but the tensor has 2 rows",
    ),
    "sizes for too few ranks": (
        lambda c: c.all_gather(torch.ones(2), [2]),
        r"one non-negative number for each of the 2 ranks: sizes=\[2\]",
    ),
    "negative sizes": (lambda c: c.reduce_scatter(torch.ones(2), [3, -1]), r"sizes=\[3, -1\]"),
    "rows that do not divide": (lambda c: c.reduce_scatter(torch.ones(3)), "3 rows are not divisible by 2"),
    "sizes that do not add up": (
        lambda c: c.reduce_scatter(torch.ones(3), [1, 1]),
        r"sum\(sizes\)=2, but the tensor has 3 rows",
    ),
    "splits that do not add up": (
        lambda c: c.all_to_all(torch.ones(3), [1, 1], [1, 1]),
        r"sum\(input_splits\)=2, but the tensor has 3 rows",
    ),
    "one of the splits only": (
        lambda c: c.all_to_all(torch.ones(2), [1, 1]),
        "give both output_splits and input_splits, or neither",
    ),
    "rows that cannot be shared": (lambda c: c.all_to_all(torch.ones(3)), "3 rows are not divisible by 2"),
    "a scalar": (lambda c: c.all_gather(torch.tensor(1.0)), "at least one dim, not a scalar"),
    "a strided tensor in place": (
        lambda c: c.all_reduce(torch.ones(2, 3).t()),
        r"works in place and needs a contiguous tensor: shape=\(3, 2\), stride=\(1, 3\)",
    ),
    "a peer that is not there": (
        lambda c: c.broadcast(torch.ones(1), 2),
        "no group rank 2; there are 2 ranks",
    ),
    "a destination that is not there": (lambda c: c.send(torch.ones(1), -1), "no group rank -1"),
    "an exchange with nobody": (lambda c: c.exchange([(torch.ones(1), 7)], []), "no group rank 7"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_refused_before_anything_is_sent(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        simulate(2, lambda world: call(world.whole("ep")))


def test_a_call_describes_itself_in_one_line() -> None:
    call = Call(kind="all_to_all", input=torch.ones(3, 4).bfloat16(), input_sizes=(1, 2), output_sizes=(0, 5))
    assert call.describe() == "all_to_all((3, 4) bfloat16, input_sizes=[1, 2], output_sizes=[0, 5])"
    assert Call(kind="send", input=torch.ones(2), peer=3).describe() == "send((2,) float32, peer=3)"
    assert (
        Call(kind="all_reduce", input=torch.ones(2), op="max").describe() == "all_reduce((2,) float32, max)"
    )
    assert Call(kind="barrier").describe() == "barrier()"
