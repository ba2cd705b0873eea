"""Windows of a genome: which bases a sample holds is a pure function of (seed, epoch, index), nothing else.

Training windows are cut from the circular token stream of the training regions: all with the same stride,
from a phase that each epoch draws, in an order that each epoch draws, each on a strand of its own. Held-out
windows tile the held-out stream once, forward, and never change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Int64, UInt8

from isozyme.core.batch import Batch, StepTotals
from isozyme.core.genome.permutation import permuted
from isozyme.core.genome.split import Region
from isozyme.core.genome.stream import TokenStream
from isozyme.core.genome.tokens import PAD, is_base, reverse_complement
from isozyme.core.initialisation import name_key

BLANK: Final = -1
"""The index of a window of padding alone, which fills a micro-batch where real windows have run out."""


@dataclass(frozen=True)
class Place:
    """Where a training sample lies: its first token in the stream, and its strand."""

    epoch: int
    offset: int
    """The window covers the stream's tokens [offset, offset + S), on either strand."""
    reverse: bool


class WindowSampler:
    """The training windows of a token stream.

    An epoch has ceil(stream / stride) windows and covers every token of the stream at least once. A window
    that crosses the end of a document goes on with the next one, the last with the first.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        window: int,
        overlap: int = 0,
        seed: int = 0,
        reverse_complement: bool = True,
    ) -> None:
        assert len(stream) > window > overlap >= 0, (len(stream), window, overlap)
        self.stream = stream
        self.window = window
        self.stride = window - overlap
        self.seed = seed
        self.both_strands = reverse_complement

    @property
    def windows_per_epoch(self) -> int:
        """Samples until every token of the stream has been seen."""
        return -(-len(self.stream) // self.stride)

    def place(self, index: int) -> Place:
        """Where the sample with this global index lies; indices count on through the epochs."""
        epoch, within = divmod(index, self.windows_per_epoch)
        phase = name_key(self.seed, "genome/phase", epoch) % len(self.stream)
        slot = permuted(within, self.windows_per_epoch, self.seed, f"genome/order/{epoch}")
        reverse = self.both_strands and bool(name_key(self.seed, f"genome/strand/{epoch}", within) & 1)
        return Place(epoch, (phase + slot * self.stride) % len(self.stream), reverse)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The windows of some global sample indices."""
        return _collate([self._read(self.place(index)) for index in indices], self.window)

    def totals(self, indices: Iterable[int]) -> StepTotals:
        """What `totals_of` says of these samples, window by window: cheap enough for a whole global batch."""
        return totals_of(self.batch([index]) for index in indices)

    def _read(self, place: Place) -> tuple[UInt8[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
        """S + 1 tokens and their documents: the window and the token that its last label is."""
        if not place.reverse:
            return self.stream.read(place.offset, self.window + 1)
        tokens, documents = self.stream.read(place.offset - 1, self.window + 1)
        return reverse_complement(tokens), documents[-1] - documents[::-1]


class HeldOutWindows:
    """The held-out windows: they tile the stream, so that each base is a label at most once.

    The only bases that are no label are the first of a region that begins within a contig (nothing precedes
    it) and letters other than A, C, G and T. The last window is filled up with padding.
    """

    def __init__(self, stream: TokenStream, *, window: int) -> None:
        self.stream = stream
        self.window = window

    def __len__(self) -> int:
        """Number of windows."""
        return -(-len(self.stream) // self.window)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The windows of some indices; `BLANK` gives a window of padding alone."""
        return _collate([self._read(index) for index in indices], self.window)

    def label_regions(self, indices: Iterable[int] | None = None) -> list[tuple[Region, int, int]]:
        """What the labels of some windows are: (region, start, stop), with start and stop within the contig.

        Bases [start, stop) are the labels, where they are A, C, G or T; the region's bases before `start` may
        serve as context. Neighbouring windows are merged. All windows if `indices` is null.
        """
        starts, found = self.stream.starts, list[tuple[Region, int, int]]()
        for index in sorted(range(len(self)) if indices is None else {i for i in indices if i != BLANK}):
            first, last = index * self.window + 1, min((index + 1) * self.window + 1, len(self.stream))
            document = int(np.searchsorted(starts, first, side="right")) - 1
            while document < len(self.stream.regions) and starts[document] < last:
                region = self.stream.regions[document]
                origin = int(starts[document]) + self.stream.has_bos[document] - region.start
                begin = max(first, int(starts[document]) + 1) - origin
                end = min(last - origin, region.stop)
                if found and found[-1][0] == region and found[-1][2] == begin and begin < end:
                    begin = found.pop()[1]
                if begin < end:
                    found.append((region, begin, end))
                document += 1
        return found

    def _read(self, index: int) -> tuple[UInt8[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
        """Up to S + 1 tokens and their documents; none for a blank window."""
        assert index == BLANK or 0 <= index < len(self), f"window {index} of {len(self)}"
        start = index * self.window
        length = 0 if index == BLANK else min(self.window + 1, len(self.stream) - start)
        return self.stream.read(start, length)


def totals_of(batches: Iterable[Batch]) -> StepTotals:
    """The counts of some batches together."""
    valid_labels = windows = real_tokens = packed = 0
    for batch in batches:
        valid_labels += int(batch.label_valid.sum())
        windows += int(batch.token_valid.any(dim=1).sum())
        real_tokens += int(batch.token_valid.sum())
        if batch.packed:
            packed += int((batch.documents != batch.documents[:, :1]).any(dim=1).sum())
    return StepTotals(
        valid_labels=valid_labels, windows=windows, real_tokens=real_tokens, packed_windows=packed
    )


def _collate(windows: list[tuple[UInt8[np.ndarray, " _"], Int64[np.ndarray, " _"]]], window: int) -> Batch:
    """A batch from windows of up to S + 1 tokens with document numbers; what is missing becomes padding.

    Padding is a document of its own. A label counts if it is a base of the same document as its position.
    """
    tokens = np.full((len(windows), window + 1), PAD, dtype=np.uint8)
    documents = np.empty((len(windows), window + 1), dtype=np.int64)
    positions = np.empty((len(windows), window), dtype=np.int64)
    token_valid = np.zeros((len(windows), window), dtype=bool)
    for row, (some_tokens, some_documents) in enumerate(windows):
        size = some_tokens.size
        tokens[row, :size] = some_tokens
        documents[row, :size] = some_documents
        documents[row, size:] = some_documents[-1] + 1 if size else 0
        token_valid[row, :size] = True
        index = np.arange(window)
        begins = np.diff(documents[row, :window], prepend=-1) != 0
        positions[row] = index - np.maximum.accumulate(np.where(begins, index, 0))
    same_document = documents[:, 1:] == documents[:, :-1]
    return Batch(
        tokens=torch.from_numpy(tokens[:, :-1].astype(np.int64)),
        labels=torch.from_numpy(tokens[:, 1:].astype(np.int64)),
        label_valid=torch.from_numpy(
            is_base(tokens[:, 1:].reshape(-1)).reshape(same_document.shape) & same_document
        ),
        token_valid=torch.from_numpy(token_valid),
        positions=torch.from_numpy(positions),
        documents=torch.from_numpy(documents[:, :-1].copy()),
        packed=bool((documents[:, :-1] != documents[:, :1]).any()),
    )
