"""Ids are ASCII codes, and the complement is that of the IUPAC codes' sets of bases."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from isozyme.core.genome import tokens

SETS = {
    "A": "A", "C": "C", "G": "G", "T": "T", "R": "AG", "Y": "CT", "S": "CG", "W": "AT", "K": "GT", "M": "AC",
    "B": "CGT", "D": "AGT", "H": "ACT", "V": "ACG", "N": "ACGT",
}  # fmt: skip
"""The bases that each IUPAC code stands for (IUPAC-IUB Commission, 1984)."""


def test_ids_are_those_of_the_field() -> None:
    assert (tokens.EOS, tokens.PAD, tokens.BOS, tokens.UNK) == (0, 1, 2, 3)
    assert tokens.encode("ACGT").tolist() == [65, 67, 71, 84]
    assert sorted(SETS) == sorted(tokens.IUPAC.decode())
    assert ord("Y") + 1 == tokens.MIN_VOCAB_SIZE


def test_the_complement_of_a_code_stands_for_the_complements_of_its_bases() -> None:
    pairs = dict(zip("ACGT", "TGCA", strict=True))
    for letter, other in product(SETS, SETS):
        same = {pairs[base] for base in SETS[letter]} == set(SETS[other])
        assert (chr(tokens.COMPLEMENT[ord(letter)]) == other) == same


@given(ids=arrays(np.uint8, st.integers(0, 50)))
def test_reverse_complement_is_an_involution_over_all_ids(ids: np.ndarray) -> None:
    assert (tokens.reverse_complement(tokens.reverse_complement(ids)) == ids).all()


def test_ends_change_places_on_the_other_strand() -> None:
    ids = np.array([tokens.BOS, *b"AAC", tokens.EOS], dtype=np.uint8)
    assert tokens.decode(tokens.reverse_complement(ids)) == "<bos>GTT<eos>"


def test_only_the_four_bases_count_as_labels() -> None:
    everything = np.arange(256, dtype=np.uint8)
    assert bytes(everything[tokens.is_base(everything)]) == b"ACGT"
    assert [tokens.BASE_INDEX[letter] for letter in b"ACGTN"] == [0, 1, 2, 3, tokens.NO_BASE]


def test_encoding_is_upper_case_and_marks_the_unknown() -> None:
    assert tokens.decode(tokens.encode("acgtnry -é")) == "ACGTNRY<unk><unk><unk>"
