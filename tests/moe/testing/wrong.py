"""Dispatchers, routers and layers that are wrong in one place each, and a right one to derive from.

The right one is written as users write theirs: plain tensors and torch.distributed, nothing of isozyme.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isozyme.moe.testing import Place


class Exchange(torch.autograd.Function):
    """All-to-all of rows; the backward is the inverse one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, into: list[int], out: list[int], group: Any) -> Tensor:
        ctx.splits = (into, out, group)
        result = x.new_empty((sum(out), *x.shape[1:]))
        dist.all_to_all_single(result, x.contiguous(), out, into, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        into, out, group = ctx.splits
        return Exchange.apply(grads[0], out, into, group), None, None, None


class Right:
    """Sort slots by expert, exchange counts, rows and weights, group what arrives; and back."""

    def __init__(self, place: Place) -> None:
        self.group, self.experts, self.local = place.group, place.num_experts, place.num_local_experts
        self.ranks, self.rank = place.ep_size, place.ep_rank

    def dispatch(self, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Any:
        topk, flat = topk_ids.shape[1], topk_ids.flatten()
        order = self.order(flat)[(flat < 0).sum() :]
        sent = torch.bincount(flat[order], minlength=self.experts).view(self.ranks, self.local)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.group)
        into, out = sent.sum(1).tolist(), got.sum(1).tolist()
        rows = self.exchange(tokens[order // topk], into, out)
        probs = self.exchange_probs(topk_probs.flatten()[order], into, out)
        local = torch.arange(self.local).repeat(self.ranks).repeat_interleave(got.flatten())
        regroup = torch.argsort(local, stable=True)
        handle = (order, topk, tokens.shape, into, out, regroup)
        return rows[regroup], got.sum(0), probs[regroup], handle

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        order, topk, shape, into, out, regroup = handle
        back = self.exchange(self.ungrouped(rows, regroup), out, into)
        return torch.zeros(shape, dtype=rows.dtype).index_add(0, order // topk, back)

    def order(self, flat: Tensor) -> Tensor:
        return torch.argsort(flat, stable=True)

    def exchange(self, x: Tensor, into: list[int], out: list[int]) -> Tensor:
        return Exchange.apply(x, into, out, self.group)

    def exchange_probs(self, x: Tensor, into: list[int], out: list[int]) -> Tensor:
        return self.exchange(x, into, out)

    def ungrouped(self, rows: Tensor, regroup: Tensor) -> Tensor:
        return rows[torch.argsort(regroup)]


class RegroupedTwice(Right):
    """Applies the permutation again instead of its inverse: right where it happens to be its own inverse."""

    def ungrouped(self, rows: Tensor, regroup: Tensor) -> Tensor:
        return rows[regroup]


class SwappedChunks(Right):
    """The chunks of two source ranks change places on the way back."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        order, topk, shape, into, out, regroup = handle
        chunks = self.ungrouped(rows, regroup).split(out)
        if len(chunks) > 1 and chunks[0].shape == chunks[1].shape:
            rows = torch.cat([chunks[1], chunks[0], *chunks[2:]])
            regroup = torch.arange(len(rows))
        return super().combine(rows, (order, topk, shape, into, out, regroup))


class AnotherRanksRow(Right):
    """Sends right, and takes the neighbour's rows if there are as many."""

    def exchange(self, x: Tensor, into: list[int], out: list[int]) -> Tensor:
        found = super().exchange(x, into, out)
        if len(set(out)) == 1 and self.ranks > 1:
            found = found.roll(out[0], dims=0)
        return found


class Unsorted(Right):
    """Never groups by local expert what arrived."""

    def dispatch(self, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Any:
        rows, counts, probs, handle = super().dispatch(tokens, topk_ids, topk_probs)
        regroup = handle[-1]
        back = torch.argsort(regroup)
        return rows[back], counts, probs[back], (*handle[:-1], torch.arange(len(regroup)))


class OffByOneSplit(Right):
    """The border between two experts' rows is one row too late."""

    def dispatch(self, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Any:
        rows, counts, probs, handle = super().dispatch(tokens, topk_ids, topk_probs)
        if len(counts) > 1 and counts[1] > 0:
            counts = counts.clone()
            counts[0] += 1
            counts[1] -= 1
        return rows, counts, probs, handle


class ForeignWeights(Right):
    """Weights stay in the order of the tokens while rows are sorted."""

    def exchange_probs(self, x: Tensor, into: list[int], out: list[int]) -> Tensor:
        return super().exchange_probs(x.flip(0), into, out)


class SkipsEmpty(Right):
    """A rank without rows to send or receive leaves the exchange out."""

    def exchange(self, x: Tensor, into: list[int], out: list[int]) -> Tensor:
        return x if len(x) == 0 and sum(out) == 0 else super().exchange(x, into, out)


class FreshWhenEmpty(Right):
    """A rank that gets no row back returns a fresh tensor, so that its backward collectives never start."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        out = super().combine(rows, handle)
        return torch.zeros(handle[2], dtype=rows.dtype) if out.shape[0] == 0 else out


class MutatesTokens(Right):
    """Scales the tokens in place."""

    def dispatch(self, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Any:
        found = super().dispatch(tokens, topk_ids, topk_probs)
        with torch.no_grad():
            topk_probs.mul_(0.5)
        return found


class AveragesGradients(Right):
    """The backward of the exchange divides by the ranks, as data parallelism would."""

    def exchange(self, x: Tensor, into: list[int], out: list[int]) -> Tensor:
        found = super().exchange(x, into, out)
        scale = 1 / self.ranks
        return found * scale + found.detach() * (1 - scale)


class DetachedWeights(Right):
    """Combine weights lose their gradient."""

    def exchange_probs(self, x: Tensor, into: list[int], out: list[int]) -> Tensor:
        return super().exchange_probs(x.detach(), into, out)


class DropsTheLast(Right):
    """The last slot is lost where there is more than one."""

    def dispatch(self, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Any:
        if topk_ids.numel() > 1:
            topk_ids = topk_ids.clone()
            topk_ids[-1, -1] = -1
        return super().dispatch(tokens, topk_ids, topk_probs)


class UnstableOrder(Right):
    """Sorts slots of one expert from the last to the first: a legal order, but not the promised one."""

    def order(self, flat: Tensor) -> Tensor:
        return torch.argsort(flat * len(flat) - torch.arange(len(flat)))


class Renormalises(Right):
    """Divides the weights by their sum, which is the router's business."""

    def dispatch(self, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Any:
        return super().dispatch(
            tokens, topk_ids, topk_probs / topk_probs.sum(1, keepdim=True).clamp_min(1e-9)
        )


class WideOutput(Right):
    """Returns the result in fp64, whatever came in."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(rows, handle).double()


class KeepsTheFirst(Right):
    """Carries the weights of its first step into all later ones."""

    first: Any = None

    def dispatch(self, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Any:
        if self.first is None or not topk_probs.requires_grad:
            self.first = topk_probs.detach().clone()
            return super().dispatch(tokens, topk_ids, topk_probs)
        return super().dispatch(tokens, topk_ids, topk_probs * 0 + self.first)


def who_comes_first() -> type[Right]:
    """A dispatcher whose ranks share one list, as code does that knows one process only."""
    arrived: list[int] = []

    class InOrderOfArrival(Right):
        def dispatch(self, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Any:
            arrived.append(self.rank)
            late = arrived[-self.ranks :].index(self.rank) if self.ranks > 1 else 0
            found = super().dispatch(tokens, topk_ids, topk_probs)
            return found[0] * (1 + late), *found[1:]

    return InOrderOfArrival


class WrongKind(Right):
    """The first rank makes another collective than the others."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        if self.rank == 0:
            dist.barrier(group=self.group)
        return super().combine(rows, handle)


class GlobalRank(Right):
    """Takes the group's ranks for global ones: right only if the group starts at rank 0."""

    def dispatch(self, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Any:
        if dist.get_rank() >= self.ranks:
            tokens = tokens * 1
            topk_ids = (topk_ids + self.local) % self.experts
        return super().dispatch(tokens, topk_ids, topk_probs)


class NoisyFiller(Right):
    """Appends a row of zeros to the last expert, with a weight."""

    def dispatch(self, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Any:
        rows, counts, probs, handle = super().dispatch(tokens, topk_ids, topk_probs)
        counts = counts.clone()
        counts[-1] += 1
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return rows, counts, torch.cat([probs, probs.new_ones(1)]), (*handle, len(rows) - 1)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(rows[: handle[-1]], handle[:-1])


class QuietFiller(NoisyFiller):
    """Appends a row of zeros with weight 0, and does not read it: right, where filler is promised."""

    def dispatch(self, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Any:
        rows, counts, probs, handle = super().dispatch(tokens, topk_ids, topk_probs)
        return rows, counts, torch.cat([probs[:-1], probs.new_zeros(1)]), handle


class ReadsTheFiller(QuietFiller):
    """Adds what the experts made of the filler, times zero, to the result."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(rows, handle) + rows[-1] * 0


class _Sliced(torch.autograd.Function):
    """Identity; in the backward every rank keeps its own gradient and forgets the others' share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: int) -> Tensor:
        ctx.keep = keep
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].clone()
        grad[ctx.keep :] = 0
        return grad, None


class SlicesInBackward(Right):
    """Where all ranks' gradients should be added up, one rank's slice is taken instead."""

    def exchange(self, x: Tensor, into: list[int], out: list[int]) -> Tensor:
        return super().exchange(_Sliced.apply(x, into[0]) if x.dim() == 2 else x, into, out)


class _Averaged(torch.autograd.Function):
    """Identity; the backward divides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: int) -> Tensor:
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] / ctx.by, None


class _Multiplied(_Averaged):
    """Identity; the backward multiplies."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.by, None


class AveragesExperts(Right):
    """The experts' gradients are divided by the ranks; those of tokens and weights are not."""

    def dispatch(self, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Any:
        rows, counts, probs, handle = super().dispatch(tokens, topk_ids, topk_probs)
        times = self.ranks
        return _Multiplied.apply(rows, times), counts, _Multiplied.apply(probs, times), handle

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(_Averaged.apply(rows, self.ranks), handle)


class CountsOneTooMany(Right):
    """The counts sum to one row more than there is."""

    def dispatch(self, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Any:
        rows, counts, probs, handle = super().dispatch(tokens, topk_ids, topk_probs)
        return rows, counts + (torch.arange(self.local) == 0), probs, handle


class Raises(Right):
    """Divides by the number of tokens."""

    def dispatch(self, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Any:
        _ = 1 // len(tokens)
        return super().dispatch(tokens, topk_ids, topk_probs)


class TwoFaults(ForeignWeights):
    """Wrong weights; and without tokens, the wrong dtype."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        out = super().combine(rows, handle)
        return out.double() if out.numel() == 0 else out


def fails_once() -> type[Right]:
    """A class that remembers, over all runs, that it has failed, and never does so again."""
    failed: list[bool] = []

    class FailsOnce(Right):
        def combine(self, rows: Tensor, handle: Any) -> Tensor:
            out = super().combine(rows, handle)
            if failed or out.numel() == 0:
                return out
            failed.append(True)
            return out + 1.0

    return FailsOnce
