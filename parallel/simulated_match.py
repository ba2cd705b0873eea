"""What one collective means: do the calls of the ranks fit together, and what does each rank receive?

Real backends hang or return garbage where ranks disagree; here every disagreement is an error that names the
ranks, the calls and the lines. Sums run in rank order in the tensor's own dtype, so results are
bit-deterministic.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isozyme.core.errors import CommunicationError
from isozyme.parallel.communicator import Call, ForeignOp, ReduceOp
from isozyme.parallel.trace import Source

_REDUCE: dict[ReduceOp | ForeignOp, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "avg": torch.add,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


@dataclass(eq=False)
class Post:
    """A call that a rank has made: what it sent, and, once its peers have called, what it receives."""

    rank: int
    """The global rank."""
    member: int
    """Its index in the group."""
    group: str
    ranks: tuple[int, ...]
    """The name and the global ranks of the group."""
    call: Call
    source: Source
    sent: Any
    """A copy of the input at the time of the call; of an object, its pickle."""
    received: Any = None
    done: bool = False
    together: dict[int, Post] = field(default_factory=dict)
    """The calls of one collective made so far, by group rank."""

    def where(self) -> str:
        """The group, for messages."""
        return f"{self.group} (ranks {', '.join(map(str, self.ranks))})"

    def missing(self) -> list[int]:
        """The global ranks whose call is awaited."""
        if self.call.kind in ("send", "recv"):
            assert self.call.peer is not None
            return [self.ranks[self.call.peer]]
        return [rank for member, rank in enumerate(self.ranks) if member not in self.together]

    def __str__(self) -> str:
        return f"rank {self.rank} calls {self.call.describe()} at {self.source}"


def copy_of_input(call: Call) -> Any:
    """What a rank sends at the time of its call; later changes of the input do not reach the others."""
    if call.kind == "object":
        return pickle.dumps(call.payload)
    return None if call.input is None else call.input.detach().clone(memory_format=torch.contiguous_format)


def unchanged(post: Post) -> bool:
    """Whether the input still holds, bit for bit, what it held when the call was made."""
    now = post.call.input
    if now is None or now.is_meta:
        return True
    before: Tensor = post.sent
    return torch.equal(_bits(now.detach()), _bits(before))


def check_fit(others: Sequence[Post], post: Post) -> None:
    """A call belongs to the same collective as those that other ranks have made (which fit each other).

    Raises:
        CommunicationError: naming what differs, both ranks, both calls and both lines.
    """
    if not others:
        return
    ours, theirs = post.call, others[0].call
    if ours.kind != theirs.kind:
        raise _disagreement(
            "ranks of a group must make the same collectives in the same order", others[0], post
        )
    for rule, a, b in _compared(theirs, ours):
        if a != b:
            raise _disagreement(f"ranks must agree on the {rule} of a collective", others[0], post)
    if ours.kind in ("all_to_all", "scatter"):
        for other in others:
            _check_splits(other, post)
            _check_splits(post, other)


def check_message(send: Post, recv: Post) -> None:
    """A send and the receive that it meets have the same shape and dtype."""
    assert send.call.input is not None
    assert recv.call.input is not None
    for rule in ("shape", "dtype"):
        if getattr(send.call.input, rule) != getattr(recv.call.input, rule):
            raise _disagreement(f"a send and its receive must agree on the {rule}", send, recv)


def complete(posts: Sequence[Post]) -> None:
    """Give every rank of a collective (in group order) what it receives."""
    call, sent = posts[0].call, [post.sent for post in posts]
    received: Sequence[Any]
    if call.kind == "all_reduce":
        received = [_reduced(sent, call.op)] * len(posts)
    elif call.kind == "all_gather":
        received = [torch.cat(sent)] * len(posts)
    elif call.kind == "reduce_scatter":
        received = _reduced(sent, call.op).split(list(call.input_sizes or ()))
    elif call.kind == "all_to_all":
        parts = [post.sent.split(list(post.call.input_sizes or ())) for post in posts]
        received = [torch.cat([part[member] for part in parts]) for member in range(len(posts))]
    elif call.kind == "broadcast":
        assert call.peer is not None
        received = [sent[call.peer]] * len(posts)
    elif call.kind in ("gather", "reduce"):
        total = _reduced(sent, call.op) if call.kind == "reduce" else torch.stack(sent)
        received = [total if member == call.peer else None for member in range(len(posts))]
    elif call.kind == "scatter":
        assert call.peer is not None
        received = sent[call.peer].split(list(posts[call.peer].call.input_sizes or ()))
    elif call.kind == "object":
        received = [[pickle.loads(value) for value in sent] for _ in posts]
    else:
        assert call.kind == "barrier"
        received = [None] * len(posts)
    for post, value in zip(posts, received, strict=True):
        post.received, post.done = value, True


def _compared(a: Call, b: Call) -> list[tuple[str, Any, Any]]:
    compared: list[tuple[str, Any, Any]] = [("root (src)", a.peer, b.peer)]
    if a.input is not None and b.input is not None:
        rows = 1 if a.kind in ("all_gather", "all_to_all", "scatter") else 0
        compared += [
            ("dtype", a.input.dtype, b.input.dtype),
            ("number of dims", a.input.ndim, b.input.ndim),
            ("shape" if rows == 0 else "shape beyond dim 0", a.input.shape[rows:], b.input.shape[rows:]),
        ]
    if a.kind in ("all_reduce", "reduce_scatter", "reduce"):
        compared.append(("operation", a.op, b.op))
    if a.kind in ("all_gather", "reduce_scatter"):
        compared += [("sizes", a.input_sizes, b.input_sizes), ("sizes", a.output_sizes, b.output_sizes)]
    return compared


def _check_splits(sender: Post, receiver: Post) -> None:
    if sender.call.input_sizes is None:  # a scatter has one sender
        return
    assert receiver.call.output_sizes is not None
    sent = sender.call.input_sizes[receiver.member]
    expected = receiver.call.output_sizes[sender.member]
    if sent != expected:
        raise _disagreement(
            f"rows sent must be rows expected: rank {sender.rank} sends {sent} to rank {receiver.rank} "
            f"(input_splits[{receiver.member}]), which expects {expected} (output_splits[{sender.member}])",
            sender,
            receiver,
        )


def _disagreement(rule: str, first: Post, second: Post) -> CommunicationError:
    return CommunicationError(
        f"{rule}: group={first.where()}\n  {first}\n  {second}\nMake the two calls fit."
    )


def _reduced(tensors: Sequence[Tensor], op: ReduceOp | ForeignOp) -> Tensor:
    total: Tensor = tensors[0]
    for tensor in tensors[1:]:
        total = _REDUCE[op](total, tensor)
    if op != "avg":
        return total
    if total.is_floating_point() or total.is_complex():
        return total / len(tensors)
    return total.div(len(tensors), rounding_mode="trunc")


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)
