"""One communication as one rank asks for it, and one that is under way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

Kind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
    "barrier",
    "object",
    # Not offered by a Communicator; code written for torch.distributed may ask for them.
    "gather",
    "scatter",
    "reduce",
]
ReduceOp = Literal["sum", "max", "min"]
ForeignOp = Literal["product", "avg", "band", "bor", "bxor"]
"""Reductions of torch.distributed that a Communicator does not offer (gradients are sums, never averages)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """One communication as one rank asks for it.

    `input_sizes` and `output_sizes` count rows (dim 0). For `all_gather`, output_sizes[r] is what rank r
    contributes; for `reduce_scatter`, input_sizes[r] is what rank r receives; for `all_to_all`,
    input_sizes[r] go to and output_sizes[r] come from rank r.
    """

    kind: Kind
    input: Tensor | None = None
    output: Tensor | None = None
    """Where the result goes; the input itself for the in-place operations."""
    input_sizes: tuple[int, ...] | None = None
    output_sizes: tuple[int, ...] | None = None
    op: ReduceOp | ForeignOp = "sum"
    peer: int | None = None
    """Group rank of the source or destination (broadcast, send, recv, gather, scatter, reduce)."""
    tag: int = 0
    """Sends and receives of one pair of ranks meet in order among those of the same tag."""
    payload: Any = None
    """The Python object of an `object` call."""

    def describe(self) -> str:
        """One line for error messages and traces."""
        parts: list[str] = []
        if self.input is not None:
            parts.append(f"{tuple(self.input.shape)} {str(self.input.dtype).removeprefix('torch.')}")
        if self.kind in ("all_reduce", "reduce_scatter", "reduce"):
            parts.append(self.op)
        if self.input_sizes is not None:
            parts.append(f"input_sizes={list(self.input_sizes)}")
        if self.output_sizes is not None:
            parts.append(f"output_sizes={list(self.output_sizes)}")
        if self.peer is not None:
            parts.append(f"peer={self.peer}")
        if self.tag:
            parts.append(f"tag={self.tag}")
        return f"{self.kind}({', '.join(parts)})"


class Pending(ABC):
    """A communication under way. `wait()` may be called once or more; the result is valid after it."""

    @abstractmethod
    def wait(self) -> Any:
        """Block until the result is there (for CUDA: until the current stream may use it), and return it."""


class Finished(Pending):
    """A communication that was complete when it was made."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def wait(self) -> Any:
        """The result."""
        return self.result


class Together(Pending):
    """Several communications under way, and what they yield together."""

    def __init__(self, parts: Sequence[Pending], result: Any) -> None:
        self._parts, self._result = parts, result

    def wait(self) -> Any:
        for part in self._parts:
            part.wait()
        return self._result
