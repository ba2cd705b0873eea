"""A strict, streaming FASTA reader, plain or gzip, that repairs nothing and skips nothing.

Common readers accept an empty file, cut a sequence at a NUL byte or keep duplicate names without a word; a
model then trains on something else than its user believes. Here each such file is refused with its record,
its line and what to do. The work is done by bytes operations on one record at a time.
"""

from __future__ import annotations

import gzip
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import UInt8

from isozyme.core.errors import DataError
from isozyme.core.genome.tokens import IUPAC

_BLOCK_BYTES: Final = 1 << 20
_GZIP_MAGIC: Final = b"\x1f\x8b"
_BGZF_END: Final = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")
"""The empty block that ends every complete BGZF file (SAM/BAM specification, section 4.1.2)."""
_LETTERS: Final = IUPAC + IUPAC.lower()
_UPPER: Final = bytes(range(256)).upper()


@dataclass(frozen=True, eq=False)
class Record:
    """One record of a FASTA file."""

    name: str
    """The header up to the first white space."""
    sequence: UInt8[np.ndarray, " N"]
    """The letters, upper-cased, as ASCII codes."""


@dataclass(frozen=True)
class _Place:
    """Where in a file the reader is: what every error message names."""

    file: str
    record: str | None = None
    line: int | None = None

    def error(self, rule: str, found: str, fix: str) -> DataError:
        """The error in the form that all messages share."""
        where = self.file
        where += "" if self.record is None else f", record '{self.record}'"
        where += "" if self.line is None else f", line {self.line:,}"
        return DataError(f"{rule}: {where}; {found}. {fix}.")


def read_fasta(path: Path) -> Iterator[Record]:
    """The records of a FASTA file in order, each fully validated before it is given.

    Rules: the file is a regular, readable file, plain or gzip by its first bytes (not by its suffix), and not
    empty; it starts with `>`; each record has a name of its own and at least one letter; letters are IUPAC
    nucleotide codes without U, in either case; lines of one record have equal length, but for a shorter last
    one; no blank line stands inside a record (after it is allowed). LF and CRLF are both line ends.

    Raises:
        DataError: a rule is broken; names the file, the record, the line and the fix.
    """
    place = _Place(str(path))
    first_lines: dict[str, int] = {}
    line = 1
    for text in _record_texts(_blocks(path), place):
        name = _name(text, _Place(place.file, line=line))
        here = _Place(place.file, name, line)
        if name in first_lines:
            raise here.error(
                "record names must differ",
                f"the name was first used on line {first_lines[name]:,}",
                "Rename or remove one of the records",
            )
        first_lines[name] = line
        yield Record(name, _sequence(text, here))
        line += text.count(b"\n")
    if not first_lines:
        raise place.error("a FASTA file must not be empty", "it holds 0 bytes", "Give a file with a sequence")


def _blocks(path: Path) -> Iterator[bytes]:
    """The decompressed content, block by block; what the system or gzip says becomes a `DataError`."""
    place = _Place(str(path))
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            found = "it is a directory" if path.is_dir() else "it is a pipe, a device or a socket"
            raise place.error("a FASTA source must be a regular file", found, "Give the path of a file")
        with path.open("rb") as raw:
            head = raw.read(len(_BGZF_END))
            raw.seek(0)
            if not head.startswith(_GZIP_MAGIC):
                yield from iter(lambda: raw.read(_BLOCK_BYTES), b"")
                return
            with gzip.GzipFile(fileobj=raw) as unzipped:
                yield from iter(lambda: unzipped.read(_BLOCK_BYTES), b"")
            raw.seek(0, 2)
            raw.seek(-min(raw.tell(), len(_BGZF_END)), 2)
            if head[3] & 4 and head[12:14] == b"BC" and raw.read() != _BGZF_END:
                raise EOFError("the end-of-file block of a BGZF file is missing")
    except EOFError as error:
        raise place.error(
            "a gzip file must be complete", f"it is truncated ({error})", "Download or copy it again"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise place.error("a gzip file must be intact", str(error), "Download or copy it again") from error
    except OSError as error:
        raise place.error(
            "a FASTA file must be readable",
            error.strerror or str(error),
            "Check the path and its permissions",
        ) from error


def _record_texts(blocks: Iterator[bytes], place: _Place) -> Iterator[bytearray]:
    """The text of one record after another, from its `>` to the line end before the next one's."""
    pending = bytearray()
    seen_any = False
    for block in blocks:
        if not seen_any and not block.startswith(b">"):
            raise _Place(place.file, line=1).error(
                "a FASTA file must start with '>'", f"it starts with {block[:12]!r}", _foreign_format(block)
            )
        seen_any = True
        search_from = max(len(pending) - 1, 0)
        pending += block
        while (line_end := pending.find(b"\n>", search_from)) >= 0:
            yield pending[: line_end + 1]
            del pending[: line_end + 1]
            search_from = 0
    if pending:
        yield pending


def _foreign_format(block: bytes) -> str:
    """What to do about a file whose first block is not FASTA."""
    known = {
        b"@": "It looks like FASTQ: convert it to FASTA",
        b"LOCUS": "It looks like GenBank: convert it to FASTA",
        b"\xef\xbb\xbf": "It starts with a byte-order mark: save it without one",
        _GZIP_MAGIC: "It is compressed twice: decompress it once",
        b"BZh": "It is bzip2: decompress it, or compress it with gzip",
        b"\xfd7zXZ": "It is xz: decompress it, or compress it with gzip",
        b"\x28\xb5\x2f\xfd": "It is zstd: decompress it, or compress it with gzip",
        b"PK": "It is a zip archive: unpack it",
    }
    matches = (fix for magic, fix in known.items() if block.startswith(magic))
    return next(matches, "Remove what stands before the first header, or give a FASTA file")


def _name(text: bytearray, place: _Place) -> str:
    """The name in a record's header; refuses a NUL byte anywhere in the record first."""
    line_end = text.find(b"\n")
    header = bytes(text[1 : line_end if line_end >= 0 else len(text)]).removesuffix(b"\r")
    words = header.split(maxsplit=1)
    if b"\0" in text:
        shown = (
            words[0].decode("ascii", errors="backslashreplace") if words and b"\0" not in words[0] else None
        )
        line = (place.line or 1) + text.count(b"\n", 0, text.find(b"\0"))
        raise _Place(place.file, shown, line).error(
            "a FASTA file must not hold NUL bytes", "one was found", "The file is damaged: download it again"
        )
    if b"\r" in header:
        raise place.error(
            "lines must end with LF or CRLF", "a carriage return stands alone", "Convert the line ends to LF"
        )
    if not words or header[:1].isspace():
        raise place.error(
            "every record needs a name", f"its header is {b'>' + header[:20]!r}", "Write one right after '>'"
        )
    try:
        return words[0].decode("utf-8")
    except UnicodeDecodeError as error:
        raise place.error("names must be UTF-8", f"this one is {words[0]!r}", "Rename the record") from error


def _sequence(text: bytearray, place: _Place) -> UInt8[np.ndarray, " N"]:
    """The validated, upper-cased letters of a record whose header stands on the line of `place`."""
    header_end = text.find(b"\n")
    body = bytes(text[header_end + 1 :]) if header_end >= 0 else b""
    if b"\r" in body:
        body = body.replace(b"\r\n", b"\n")
    body = body.rstrip(b"\n")
    if not body:
        raise place.error("a record must hold a sequence", "it holds 0 letters", "Remove the record")
    if body.translate(None, _LETTERS + b"\n"):
        raise _illegal_letter(body, place)
    _check_lines(body, place)
    return np.frombuffer(body.translate(_UPPER, b"\n"), dtype=np.uint8)


def _illegal_letter(body: bytes, place: _Place) -> DataError:
    """The error about the first byte of `body` that is neither a legal letter nor a line end."""
    legal = np.zeros(256, dtype=bool)
    legal[list(_LETTERS + b"\n")] = True
    at = int(np.argmin(legal[np.frombuffer(body, dtype=np.uint8)]))
    line = (place.line or 1) + 1 + body.count(b"\n", 0, at)
    column = at - body.rfind(b"\n", 0, at)
    fixes = {
        b"U": "It looks like RNA: write T for U",
        b"u": "It looks like RNA: write T for U",
        b"-": "It looks like an alignment: remove the gaps",
        b"\r": "Convert the line ends to LF",
        b" ": "Remove the white space",
    }
    letter = body[at : at + 1]
    return _Place(place.file, place.record, line).error(
        f"a sequence holds the IUPAC letters {IUPAC.decode()} only",
        f"column {column:,} holds {letter!r}",
        fixes.get(letter, "Correct the letter, or write N for an unknown base"),
    )


def _check_lines(body: bytes, place: _Place) -> None:
    """Refuse blank lines and ragged ones: all lines are as long as the first, the last may be shorter."""
    ends = np.flatnonzero(np.frombuffer(body, dtype=np.uint8) == ord("\n"))
    if not ends.size:
        return
    width = int(ends[0])
    lengths = np.diff(ends, prepend=-1, append=len(body)) - 1
    wrong = lengths != width
    wrong[-1] = lengths[-1] > width
    wrong |= lengths == 0
    if not wrong.any():
        return
    index = int(np.argmax(wrong))
    here = _Place(place.file, place.record, (place.line or 1) + 1 + index)
    if lengths[index] == 0:
        raise here.error("no blank line may stand inside a record", "this line is blank", "Remove it")
    raise here.error(
        "lines of one record must have equal length, but for a shorter last one",
        f"this line has {lengths[index]:,} letters, the record's first has {width:,}",
        "The file may have lost text: download it again, or wrap its lines anew",
    )
