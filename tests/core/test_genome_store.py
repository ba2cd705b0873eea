"""A cached genome equals its source, is reused while current, and is rebuilt whenever it is not."""

from __future__ import annotations

import gzip
import hashlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from isozyme.core.errors import ConfigError, DataError
from isozyme.core.genome import store
from isozyme.core.genome.fasta import read_fasta
from isozyme.core.genome.store import Genome

TEXT = b">a\nACGTNACG\nTT\n>b\nGGGRC\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small FASTA file, old enough for its time of change to be trusted."""
    path = tmp_path / "genome.fa"
    path.write_bytes(TEXT)
    os.utime(path, ns=(10**18, 10**18))
    return path


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The sources that were parsed, in order."""
    parsed: list[Path] = []

    def spy(path: Path):  # type: ignore[no-untyped-def]
        parsed.append(path)
        return read_fasta(path)

    monkeypatch.setattr(store, "read_fasta", spy)
    return parsed


def letters(genome: Genome) -> dict[str, str]:
    return {
        contig.name: genome.bases(number, 0, contig.length).tobytes().decode()
        for number, contig in enumerate(genome.contigs)
    }


EXPECTED = {"a": "ACGTNACGTT", "b": "GGGRC"}


def entry(cache: Path) -> tuple[Path, Path]:
    """The one index and the one token file of a cache."""
    (index,), (tokens,) = cache.glob("*/index.json"), cache.glob("*/*.tokens")
    return index, tokens


def test_the_sample_is_the_lambda_phage(tmp_path: Path) -> None:
    genome = Genome.open("sample:lambda", tmp_path)
    assert genome.lengths == (48_502,)
    assert genome.bases(0, 0, 12).tobytes() == b"GGGCGGCGACCT"
    assert dict(zip(*(v.tolist() for v in np.unique(genome.tokens, return_counts=True)), strict=True)) == {
        ord("A"): 12_334, ord("C"): 11_362, ord("G"): 12_820, ord("T"): 11_986
    }  # fmt: skip


def test_a_genome_is_parsed_once_and_mapped_afterwards(
    source: Path, tmp_path: Path, builds: list[Path]
) -> None:
    first = Genome.open(source, tmp_path / "cache")
    again = Genome.open(str(source), tmp_path / "cache")
    assert letters(first) == letters(again) == EXPECTED
    assert first.sha256 == again.sha256 == hashlib.sha256(TEXT).hexdigest()
    assert isinstance(again.tokens, np.memmap)
    assert not again.tokens.flags.writeable
    assert len(builds) == 1


def test_a_touched_source_is_reused_and_an_edited_one_is_not(
    source: Path, tmp_path: Path, builds: list[Path]
) -> None:
    cache = tmp_path / "cache"
    Genome.open(source, cache)
    os.utime(source)
    Genome.open(source, cache)
    assert len(builds) == 1
    source.write_bytes(TEXT.replace(b"GGGRC", b"GGGTC"))
    assert letters(Genome.open(source, cache)) == {**EXPECTED, "b": "GGGTC"}
    assert len(builds) == 2


def test_an_edit_within_the_clock_tick_is_noticed(tmp_path: Path) -> None:
    source, cache = tmp_path / "genome.fa", tmp_path / "cache"
    source.write_bytes(TEXT)
    times = source.stat()
    Genome.open(source, cache)
    source.write_bytes(TEXT.replace(b"GGGRC", b"GGGTC"))
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert letters(Genome.open(source, cache))["b"] == "GGGTC"


@pytest.mark.parametrize(
    "damage",
    ["no_index", "no_tokens", "short_tokens", "flipped_token", "cut_index", "edited_index", "version"],
)
def test_a_damaged_cache_is_rebuilt(source: Path, tmp_path: Path, builds: list[Path], damage: str) -> None:
    cache = tmp_path / "cache"
    Genome.open(source, cache)
    index, tokens = entry(cache)
    text, ids = index.read_bytes(), tokens.read_bytes()
    if damage == "no_index":
        index.unlink()
    elif damage == "no_tokens":
        tokens.unlink()
    elif damage == "short_tokens":
        tokens.write_bytes(ids[:-1])
    elif damage == "flipped_token":
        tokens.write_bytes(ids[:7] + b"T" + ids[8:])
    elif damage == "cut_index":
        index.write_bytes(text[: len(text) // 2])
    elif damage == "edited_index":
        index.write_bytes(text.replace(b'"a", 10', b'"a", 11').replace(b'"b", 5', b'"b", 4'))
    elif damage == "version":
        index.write_bytes(b"0" + text[1:])
    assert letters(Genome.open(source, cache)) == EXPECTED
    assert len(builds) == 2
    assert letters(Genome.open(source, cache)) == EXPECTED
    assert len(builds) == 2


def test_a_malformed_source_leaves_nothing_behind(tmp_path: Path) -> None:
    source, cache = tmp_path / "bad.fa", tmp_path / "cache"
    source.write_bytes(b">a\nACGT\n>b\nAC!\n")
    with pytest.raises(DataError, match="record 'b', line 4"):
        Genome.open(source, cache)
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_source_that_changes_while_it_is_read_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddle(path: Path):  # type: ignore[no-untyped-def]
        path.write_bytes(TEXT.replace(b"GGGRC", b"GGGTC"))
        return read_fasta(path)

    monkeypatch.setattr(store, "read_fasta", meddle)
    with pytest.raises(DataError, match="must not change while it is read"):
        Genome.open(source, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_two_sources_of_one_name_do_not_meet_in_a_cache(tmp_path: Path) -> None:
    for folder, base in (("x", "A"), ("y", "C")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "genome.fa").write_text(f">a\n{base}\n")
    opened = [Genome.open(tmp_path / folder / "genome.fa", tmp_path / "cache") for folder in "xy"]
    assert [letters(genome) for genome in opened] == [{"a": "A"}, {"a": "C"}]


def test_many_openers_at_once_all_see_the_whole_genome(source: Path, tmp_path: Path) -> None:
    barrier, found = threading.Barrier(8), list[dict[str, str]]()

    def opener() -> None:
        barrier.wait()
        found.append(letters(Genome.open(source, tmp_path / "cache")))

    threads = [threading.Thread(target=opener) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [EXPECTED] * 8
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_a_cache_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"data\.cache=.*file; .*Set data\.cache"):
        Genome.open(source, tmp_path / "file")


def test_a_missing_source_or_sample_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.fa; No such file"):
        Genome.open(tmp_path / "missing.fa", tmp_path / "cache")
    with pytest.raises(DataError, match="directory"):
        Genome.open(tmp_path, tmp_path / "cache")
    with pytest.raises(DataError, match="Did you mean 'lambda'"):
        Genome.open("sample:lamda", tmp_path / "cache")


def test_a_genome_in_memory_equals_the_one_on_disk(source: Path, tmp_path: Path) -> None:
    stored, made = Genome.open(source, tmp_path / "cache"), Genome.from_sequences(EXPECTED)
    assert stored.contigs == made.contigs
    assert (stored.tokens == made.tokens).all()


def test_gzip_and_plain_give_the_same_tokens(source: Path, tmp_path: Path) -> None:
    zipped = tmp_path / "genome.fa.gz"
    zipped.write_bytes(gzip.compress(TEXT))
    assert letters(Genome.open(zipped, tmp_path / "cache")) == EXPECTED
