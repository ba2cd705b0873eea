"""Context-parallel attention that passes keys and values around a ring.

In each of as many steps as there are ranks, a rank attends to the keys that it holds while they travel on to
the next rank (Liu et al. 2023, "Ring Attention", arXiv:2310.01889). No rank ever holds a whole window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from isozyme.parallel.communicator import Communicator, Finished, Pending
from isozyme.parallel.context_partial import PartialAttention, PartialGradients, attention_in_parts
from isozyme.parallel.context_plan import ContextPlan


def ring_attention(
    q: Float[Tensor, "B L N D"], k: Float[Tensor, "B L M D"], v: Float[Tensor, "B L M D"], plan: ContextPlan
) -> Float[Tensor, "B L N D"]:
    """Causal attention of this rank's queries to the whole window. All ranks of the CP group call it.

    Bytes that a rank sends, for n = B L M D elements of one of k and v on a group of P > 1 ranks, e bytes
    each in the inputs' dtype and w in the accumulators' (at least fp32):

    - forward: P - 1 messages to the next rank, 2 n e (P - 1), each under way while a tile is computed;
    - backward: the same, and the gradients, which travel with their keys and home: 2 n w P.

    Memory: two pairs of local keys and values (in backward also of their gradients), whatever P is; saved: q,
    k, v, output and one number a query and head.

    Args:
        q: this rank's queries of N heads.
        k: this rank's keys of M heads; M divides N.
        v: this rank's values.
        plan: group, layout and documents. The zig-zag order gives the ranks equal work in every step but the
            first; in the contiguous order the last rank works in all steps, and the others wait for it.
    """
    return attention_in_parts(q, k, v, _Ring(plan), plan.tile_kernel)


@dataclass(frozen=True, eq=False)
class _Ring:
    """The keys of one rank after the other, from this one backwards."""

    plan: ContextPlan

    def attend(self, partial: PartialAttention, k: Tensor, v: Tensor) -> None:
        plan, comm = self.plan, self.plan.comm
        held = torch.stack([k, v])
        for step in range(comm.size):
            coming = _pass_on(held, comm) if step < comm.size - 1 else Finished(None)
            partial.add(held[0], held[1], plan.tiles_with((comm.rank - step) % comm.size))
            if step < comm.size - 1:
                (held,) = coming.wait()

    def gradients(self, grads: PartialGradients, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        plan, comm, wide = self.plan, self.plan.comm, grads.q.dtype
        held = torch.stack([k, v])
        # The gradient of the held keys follows them one step behind: it is complete only after their tile.
        arriving: Pending = Finished([torch.zeros(held.shape, dtype=wide, device=held.device)])
        for step in range(comm.size):
            coming = _pass_on(held, comm) if step < comm.size - 1 else Finished(None)
            own = torch.zeros(held.shape, dtype=wide, device=held.device)
            grads.add(held[0], held[1], own[0], own[1], plan.tiles_with((comm.rank - step) % comm.size))
            (of_held,) = arriving.wait()
            of_held = own.add_(of_held)
            arriving = _pass_on(of_held, comm) if comm.size > 1 else Finished([of_held])
            if step < comm.size - 1:
                (held,) = coming.wait()
        (of_own,) = arriving.wait()
        return of_own[0], of_own[1]


def _pass_on(x: Tensor, comm: Communicator) -> Pending:
    """Start sending `x` to the next rank and receiving as much from the one before; yields a list of one."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return comm.exchange_async([(x, after)], [(torch.empty_like(x), before)])
