"""Opens input files: regular files within a stated size, on disk and decompressed; their text, JSON and CSV.

A pipe or a device would be read forever, and 8 MB of gzip may hold 8 GB of zeros. Every reader of text of a user starts
here, so that limits, line ends and encodings are the same for all of them.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import re
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from math import isinf
from pathlib import Path
from typing import Any, NamedTuple

from meshcast.hardware.errors import MeshcastError

GZIP = b"\x1f\x8b"
"""First bytes of a gzip file, whatever its name."""

CHUNK = 1 << 20
"""Bytes that are read at a time."""


class SizeLimit(NamedTuple):
    """Largest file of a kind.

    Attributes:
        nbytes: bytes, decompressed.
        lines: number of lines; a line costs more memory than its bytes.
        remedy: what to do about a larger file.
    """

    nbytes: int
    lines: int
    remedy: str


DESCRIPTION = SizeLimit(10_000_000, 1_000_000, "Name the description itself, not data")
"""Jobs, sweeps, clusters, models, calibrations, campaigns: none is near it, and parsing more would look like a hang."""

LAUNCH = SizeLimit(3_000_000, 1_000_000, "Name the launch file itself, not data")
"""Launch files. The largest public ones have 0.1 MB; the syntax tree of 3 MB of Python takes 1.5 GB and 9 s."""

DATA = SizeLimit(200_000_000, 2_000_000, "Split the file")
"""Tables, logs, rows of runs, schedules, measurements. The largest public log of nccl-tests has less than 1 MB."""

TRACE = SizeLimit(1_000_000_000, 1_000_000_000, "Record fewer steps, without stacks and shapes")
"""Traces of a profiler. Parsed, they take about ten times as much memory."""


NO_MEMORY = "reading it takes more memory than there is"


class Unreadable(Exception):
    """A file that cannot be read: the rule, what to do about it ("" where the reader knows better), and the line.

    Readers say what they expect, so each of them turns this into another error; see `read_text`.
    """

    def __init__(self, rule: str, remedy: str = "", line: int = 0) -> None:
        super().__init__(rule)
        self.rule, self.remedy, self.line = rule, remedy, line

    def error(self, kind: type[MeshcastError], where: str, remedy: str, value: str | None = None) -> MeshcastError:
        """Returns the same as an error for users. remedy: where the file's fault names none."""
        place = f"{where}:{self.line}" if self.line and value is None else where
        rule = f"line {self.line}: {self.rule}" if self.line and value is not None else self.rule
        return kind(place, rule, self.remedy or remedy, value)


def read_bytes(path: Path, limit: SizeLimit) -> bytes:
    """Returns the content of a regular file, decompressed if it is gzipped. Raises Unreadable for anything else.

    The file is opened before it is looked at, so that it cannot be exchanged in between; without waiting for the writer
    of a pipe.
    """
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            _check_regular(os.fstat(file.fileno()), limit)
            packed = file.peek(2)[:2] == GZIP
            content = _read_up_to((gzip.GzipFile(fileobj=file) if packed else file).read, limit.nbytes + 1)
    except EOFError:
        raise Unreadable("it cannot be read (compressed and incomplete)") from None
    except (zlib.error, gzip.BadGzipFile):
        raise Unreadable("it cannot be read (compressed and damaged)") from None
    except IsADirectoryError:
        raise Unreadable("it is a folder, not a regular file", "Name a file in it") from None
    except OSError as error:
        raise Unreadable(f"it cannot be read ({error.strerror or error})") from None
    except ValueError as error:  # a null byte in the name
        raise Unreadable(f"it cannot be read ({error})") from None
    except MemoryError:
        raise Unreadable(NO_MEMORY, limit.remedy) from None
    if len(content) > limit.nbytes:
        kind = "decompressed bytes" if packed else "bytes"
        raise Unreadable(f"more than {limit.nbytes:,} {kind}, which is the most that is read", limit.remedy)
    return content


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def _check_regular(status: os.stat_result, limit: SizeLimit) -> None:
    if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
        raise Unreadable("it is a pipe, not a regular file", "Save what the pipe brings to a file, and name that")
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable("it is a device, not a regular file", "Name a file")
    if status.st_size > limit.nbytes:
        raise Unreadable(f"{status.st_size:,} bytes, at most {limit.nbytes:,} are read", limit.remedy)


def _read_up_to(read: Callable[[int], bytes], most: int) -> bytes:
    parts, nbytes = list[bytes](), 0
    while nbytes < most and (part := read(CHUNK)):
        parts.append(part)
        nbytes += len(part)
    return b"".join(parts)


def is_file(path: Path) -> bool:
    """Returns whether there is a file of this path; False, too, for a path that no file can have, as a path that is too
    long."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


WIDE = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16", codecs.BOM_UTF32_BE: "UTF-32"}
"""Encodings by the first bytes of a file; those of UTF-32, little endian, begin like UTF-16."""

SAVE = "Save it as UTF-8 text"


def read_text(path: Path, limit: SizeLimit) -> str:
    """Returns the text of a file in UTF-8, with ``\\n`` at the end of every line, however the file ends its lines.

    Raises Unreadable, with the line, for other encodings and for NUL characters.
    """
    content = read_bytes(path, limit)
    for mark, encoding in WIDE.items():
        if content.startswith(mark):
            raise Unreadable(f"it is {encoding} text, not UTF-8", SAVE, 1)
    if b"\r" in content:
        content = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if (count := content.count(b"\n")) > limit.lines:
        raise Unreadable(f"{count:,} lines, at most {limit.lines:,} are read", limit.remedy)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable("not UTF-8 text", SAVE, content.count(b"\n", 0, error.start) + 1) from None
    if (at := text.find("\0")) >= 0:
        raise Unreadable("a NUL character, which text does not have", SAVE, text.count("\n", 0, at) + 1)
    return text


# ----------------------------------------------------------------------------------------------- CSV


MAX_CELLS = 10_000_000
"""Most cells of a CSV file: each costs more memory than its bytes."""

CSV_PROBLEMS = {
    "unexpected end of data": "a quote is not closed",
    "',' expected after": "letters follow a closing quote",
    "field larger than": f"a cell of more than {csv.field_size_limit():,} characters",
}
"""Plain words for the problems that Python's reader finds, by its words."""


class CsvRow(NamedTuple):
    """A row of a CSV file.

    line: its first line, from 1.
    cells: without blanks around them; none in an empty line.
    """

    line: int
    cells: list[str]


def parse_csv(text: str) -> list[CsvRow]:
    """Returns the rows of the text of a CSV file. Raises Unreadable, with the line, for what is none."""
    reader, rows, begin, count = csv.reader(io.StringIO(text, newline=""), strict=True), list[CsvRow](), 1, 0
    try:
        for cells in reader:
            rows.append(CsvRow(begin, [cell.strip() for cell in cells]))
            begin, count = reader.line_num + 1, count + len(cells)
            if count > MAX_CELLS:
                raise Unreadable(f"more than {MAX_CELLS:,} cells, which is the most that is read", DATA.remedy)
    except csv.Error as error:
        plain = next((words for part, words in CSV_PROBLEMS.items() if str(error).startswith(part)), str(error))
        raise Unreadable(f"not valid CSV ({plain})", "", begin) from None
    return rows


def split_lines(text: str) -> list[str]:
    """Returns the lines of a text as editors and shells count them. Python's `splitlines` ends them at eight more
    characters, such as U+2028, behind which a comment would go on as another line."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


# ----------------------------------------------------------------------------------------- TOML, JSON


def parse_toml(text: str) -> dict[str, object]:
    """Returns the data of TOML text. Raises Unreadable for what is none."""
    import tomllib  # few files are TOML

    try:
        return tomllib.loads(text)
    except RecursionError:
        raise Unreadable("TOML nested too deeply") from None
    except ValueError as error:
        rule = str(error).partition(" for ")[0]  # Python's advice on long numbers follows
        raise Unreadable(f"not valid TOML ({rule})") from None


MAX_VALUES = 10_000_000
"""Most values of a JSON text: each costs more memory than its letters. Traces may have more: `most` of `parse_json`."""

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""A half of a pair by which JSON writes a character beyond U+FFFF."""

JSON_PROBLEMS = {
    "Expecting value": "a value is missing, or a word is not in double quotes",
    "Extra data": "more follows after the end of the value",
    "Expecting ',' delimiter": "a comma is missing between two values",
    "Expecting ':' delimiter": "a colon is missing after a key",
    "Expecting property name": "a key is missing, or is not in double quotes",
    "Illegal trailing comma": "a comma before a closing bracket",
    "Invalid control character": "a line end, a tab or a control character within quotes",
    "Unterminated string": "a quote is not closed",
    "Invalid \\escape": "a backslash before a letter that it does not go with",
    "Invalid \\uXXXX": "\\u without four hexadecimal digits",
}
"""Plain words for the problems that Python's parser finds, by its words."""


def parse_json(text: str, constants: bool = False, repeated: bool = False, most: int = MAX_VALUES) -> Any:
    """Returns the value of JSON text. Raises Unreadable for invalid JSON, for NaN and Infinity, which Python's parser
    accepts, and for a repeated key, of which Python's parser keeps the last.

    constants: accept NaN, Infinity and -Infinity, which transformers writes into a config.json.
    repeated: accept repeated keys, of which the last counts, as trace viewers do.
    most: number of values.
    """
    if len(text) > most and sum(map(text.count, ",[{")) > most:
        raise Unreadable(f"more than {most:,} values, which is the most that is read", DATA.remedy)
    pairs, constant = None if repeated else _refuse_repeated, None if constants else _refuse_constant
    try:
        value = json.loads(
            text, object_pairs_hook=pairs, parse_constant=constant, parse_float=None if constants else _parse_finite
        )
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        plain = next((words for part, words in JSON_PROBLEMS.items() if error.msg.startswith(part)), error.msg)
        raise Unreadable(f"not valid JSON ({plain}, column {error.colno})", "", error.lineno) from None
    except MemoryError:
        raise Unreadable(NO_MEMORY, DATA.remedy) from None
    except RecursionError:
        raise Unreadable(f"JSON nested too deeply, by more than {sys.getrecursionlimit() // 2:,} levels") from None
    except UnicodeEncodeError:
        raise Unreadable("half a character: a \\u escape of a surrogate without the other one", SAVE) from None
    except ValueError as error:
        rule = str(error).partition(" for ")[0]  # Python's advice on long numbers follows
        raise Unreadable(f"not valid JSON ({rule})") from None


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise Unreadable(f"the key {counts.most_common(1)[0][0]!r} is given twice", "Keep one of the two")
    return unique


def _parse_finite(digits: str) -> float:
    """Refuses numbers like 1e400, which Python's parser reads as infinity."""
    number = float(digits)
    if isinf(number):
        raise Unreadable(f"{digits} is too large for a number of 64 bits", "Write a smaller number, or null")
    return number


def _refuse_constant(name: str) -> None:
    raise Unreadable(f"{name} is not a number in JSON", "Write a finite number, or null")
