"""The byte tokenizer: a nucleotide's id is its upper-case ASCII code, and four control ids stand below.

Letters other than A, C, G and T (N and the IUPAC ambiguity codes) are legal inputs, but never count as
labels. The complement is defined over ids, the control ids included, so that a whole window can be turned to
the other strand.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from jaxtyping import Bool, UInt8

EOS: Final = 0
PAD: Final = 1
BOS: Final = 2
UNK: Final = 3

BASES: Final = b"ACGT"
"""The letters that count as labels, in the order of their base index 0..3."""
IUPAC: Final = b"ACGTRYSWKMBDHVN"
"""The legal letters. U is not among them: its complement A would turn back to T."""
MIN_VOCAB_SIZE: Final = max(IUPAC) + 1
"""The smallest vocabulary that holds every id: 90."""
NO_BASE: Final = 4
"""The base index of everything that is not A, C, G or T."""
_LOWER: Final = 0x20
"""The bit of ASCII that makes a letter lower-case."""


def _table(default: int | None, pairs: dict[int, int]) -> UInt8[np.ndarray, "256"]:
    """A read-only map of bytes: `default` (or the byte itself if null), but for `pairs`."""
    table = np.arange(256, dtype=np.uint8) if default is None else np.full(256, default, dtype=np.uint8)
    for key, value in pairs.items():
        table[key] = value
    table.flags.writeable = False
    return table


_COMPLEMENT_PAIRS: Final = (*zip(b"ACGTRYKMBVDHSWN", b"TGCAYRMKVBHDSWN", strict=True), (BOS, EOS), (EOS, BOS))

COMPLEMENT: Final = _table(None, dict(_COMPLEMENT_PAIRS))
"""Id → id of the other strand. BOS and EOS change places: where one strand begins, the other ends."""
BASE_INDEX: Final = _table(NO_BASE, {letter: index for index, letter in enumerate(BASES)})
"""Id → 0..3 for A, C, G, T, and `NO_BASE` for everything else."""
_ENCODE: Final = _table(UNK, {letter | case: letter for letter in IUPAC for case in (0, _LOWER)})


def encode(text: str) -> UInt8[np.ndarray, " N"]:
    """Ids of a sequence's letters; lower case becomes upper case, anything that is not IUPAC becomes UNK.

    >>> encode("acgN-").tolist()
    [65, 67, 71, 78, 3]
    """
    return _ENCODE[np.frombuffer(text.encode("ascii", errors="replace"), dtype=np.uint8)]


def decode(ids: UInt8[np.ndarray, " N"]) -> str:
    """The letters of ids; control ids show as `<eos>`, `<pad>`, `<bos>` and `<unk>`.

    >>> decode(np.array([BOS, 65, 67, EOS], dtype=np.uint8))
    '<bos>AC<eos>'
    """
    names = ("<eos>", "<pad>", "<bos>", "<unk>")
    return "".join(names[token] if token < len(names) else chr(token) for token in ids.tolist())


def reverse_complement(ids: UInt8[np.ndarray, " N"]) -> UInt8[np.ndarray, " N"]:
    """The same stretch read on the other strand; its own inverse.

    >>> decode(reverse_complement(encode("AACGR")))
    'YCGTT'
    """
    return COMPLEMENT[ids[::-1]]


def is_base(ids: UInt8[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
    """Where an id is A, C, G or T, and so may count as a label."""
    return BASE_INDEX[ids] != NO_BASE
