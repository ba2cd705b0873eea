"""The reader accepts every well-formed file and refuses each kind of malformed one with its place."""

from __future__ import annotations

import gzip
import os
import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isozyme.core.errors import DataError
from isozyme.core.genome import fasta
from isozyme.core.genome.fasta import read_fasta

Found = list[tuple[str, str]]


def read(path: Path) -> Found:
    return [(record.name, record.sequence.tobytes().decode()) for record in read_fasta(path)]


def written(folder: Path, content: bytes, name: str = "genome.fa") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


letters = st.text("ACGTNRYSWKMBDHVacgtn", min_size=1, max_size=40)


@given(
    sequences=st.lists(letters, min_size=1, max_size=5),
    width=st.integers(1, 12),
    end=st.sampled_from(["\n", "\r\n"]),
    last_end=st.booleans(),
    gap=st.integers(0, 2),
    zipped=st.booleans(),
    block=st.integers(1, 9),
)
def test_reading_inverts_writing(
    tmp_path_factory: pytest.TempPathFactory,
    sequences: list[str],
    width: int,
    end: str,
    last_end: bool,
    gap: int,
    zipped: bool,
    block: int,
) -> None:
    text = ""
    for number, sequence in enumerate(sequences):
        lines = [sequence[i : i + width] for i in range(0, len(sequence), width)]
        text += end.join([f">r{number} about > this", *lines]) + end * (1 + gap)
    content = (text if last_end else text.rstrip("\r\n")).encode()
    path = written(tmp_path_factory.mktemp("fasta"), gzip.compress(content) if zipped else content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fasta, "_BLOCK_BYTES", block)
        assert read(path) == [(f"r{n}", sequence.upper()) for n, sequence in enumerate(sequences)]


def test_compression_is_told_by_content_not_by_suffix(tmp_path: Path) -> None:
    plain = written(tmp_path, b">a\nAC\n", "plain.fa.gz")
    zipped = written(tmp_path, gzip.compress(b">a\nAC\n"), "zipped.fa")
    assert read(plain) == read(zipped) == [("a", "AC")]


def test_all_members_of_a_gzip_file_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, gzip.compress(b">a\nAC\nG") + gzip.compress(b"T\n>b\nT\n"))
    assert read(path) == [("a", "ACGT"), ("b", "T")]


MALFORMED = {
    "empty": (b"", "must not be empty"),
    "empty_gzip": (gzip.compress(b""), "must not be empty"),
    "truncated_gzip": (gzip.compress(b">a\n" + b"ACGT\n" * 99)[:-12], "truncated"),
    "short_gzip": (b"\x1f\x8b\x08", "truncated"),
    "damaged_gzip": (gzip.compress(b">a\nACGT\n")[:-8] + b"12345678", "must be intact"),
    "garbage_after_gzip": (gzip.compress(b">a\nACGT\n") + b"garbage", "must be intact"),
    "text_first": (b"ACGT\n>a\nACGT\n", r"must start with '>': .*line 1; it starts with b'ACGT"),
    "blank_first": (b"\n>a\nACGT\n", "must start with '>'"),
    "fastq": (b"@a\nACGT\n+\nIIII\n", "looks like FASTQ"),
    "byte_order_mark": (b"\xef\xbb\xbf>a\nACGT\n", "byte-order mark"),
    "zipped_twice": (gzip.compress(gzip.compress(b">a\nACGT\n")), "compressed twice"),
    "nul": (b">a\nAC\n>b\nAC\nA\0GT\n", r"NUL.*record 'b', line 5"),
    "nul_in_name": (b">a\0b\nAC\n", r"NUL.*line 1"),
    "digit": (b">a\nAC\n>b\nACGT\nAC1T\n", r"IUPAC.*record 'b', line 5; column 3 holds b'1'"),
    "header_inside_a_line": (b">a\nAC>b\n", r"line 2; column 3 holds b'>'"),
    "space": (b">a\nAC GT\n", "Remove the white space"),
    "trailing_space": (b">a\nACGT \n", r"column 5 holds b' '"),
    "gap": (b">a\nAC-GT\n", "alignment"),
    "rna": (b">a\nACUG\n", "RNA"),
    "protein": (b">a\nMEEPQ\n", r"column 2 holds b'E'"),
    "ragged_short": (b">a\nACGT\nAC\nACGT\n", r"record 'a', line 3; this line has 2 letters.*first has 4"),
    "ragged_long": (b">a\nACGT\nACGTA\nACGT\n", r"line 3; this line has 5 letters"),
    "last_line_long": (b">a\nACGT\nACGTA\n>b\nA\n", r"line 3; this line has 5 letters"),
    "blank_inside": (b">a\nACGT\n\nACGT\n", r"no blank line.*line 3"),
    "blank_inside_crlf": (b">a\r\nACGT\r\n\r\nACGT\r\n", r"no blank line.*line 3"),
    "blank_after_header": (b">a\n\nACGT\n", r"no blank line.*line 2"),
    "empty_record": (b">a\nACGT\n>b\n>c\nACGT\n", r"record 'b', line 3; it holds 0 letters"),
    "empty_last_record": (b">a\nACGT\n>b", r"record 'b', line 3; it holds 0 letters"),
    "duplicate": (b">a x\nACGT\n>b\nA\n>a y\nACGT\n", r"record 'a', line 5; .*line 1"),
    "no_name": (b">a\nACGT\n>\nACGT\n", r"needs a name.*line 3"),
    "space_for_name": (b"> a\nACGT\n", r"needs a name.*line 1"),
    "only_header_mark": (b">", r"needs a name.*line 1"),
    "old_mac_line_ends": (b">a\rACGT\rACGT\r", "LF or CRLF"),
    "lone_carriage_return": (b">a\nACGT\rACGT\n", "Convert the line ends"),
    "name_not_utf8": (b">\xff\xfe\nACGT\n", "UTF-8"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_with_its_place(tmp_path: Path, case: str) -> None:
    content, message = MALFORMED[case]
    path = written(tmp_path, content)
    with pytest.raises(DataError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert re.fullmatch(r"(?s).+: .+; .+\. .+\.", str(caught.value)), str(caught.value)


@pytest.mark.parametrize("keep", ["whole", "cut"])
def test_a_bgzf_file_cut_between_blocks_is_refused(tmp_path: Path, keep: str) -> None:
    end = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")
    raw = gzip.compress(b">a\nACGT\n", mtime=0)
    extra = b"\x06\x00BC\x02\x00" + (len(raw) + 7).to_bytes(2, "little")
    block = raw[:3] + b"\x04" + raw[4:10] + extra + raw[10:]
    path = written(tmp_path, block + (end if keep == "whole" else b""))
    if keep == "whole":
        assert read(path) == [("a", "ACGT")]
    else:
        with pytest.raises(DataError, match="truncated"):
            read(path)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read(tmp_path / "missing.fa")
    with pytest.raises(DataError, match="directory"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe"):
        read(tmp_path / "pipe")


def test_ten_megabases_take_well_under_two_seconds(tmp_path: Path) -> None:
    line = bytes(random.Random(0).choices(b"ACGTacgtN", k=60)) + b"\n"
    path = written(tmp_path, b">chr1\n" + line * 170_000)
    start = time.process_time()
    (record,) = read_fasta(path)
    assert record.sequence.size == 60 * 170_000
    assert time.process_time() - start < 2
