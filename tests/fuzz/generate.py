"""Malformed input files: seeded mutations of valid ones, in their data, in their text and in their bytes."""

from __future__ import annotations

import copy
import gzip
import io
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**53 + 1, 10**30, -(10**30), 10**400, 0.5, -0.0, 1e-308, 1e308),
    *(math.nan, math.inf, -math.inf, "", " ", "1", "2", "80 GiB", "nan", "none", "\0", "ä\U0001f600", "..", "/", "~x"),
    *("a" * 5000, "dgx-h100:1", "data/ddp", "llama3-8b", [], [[]], [1, 2], ["tp"], {}, {"a": 1}, {"": None}, {1: 2}),
]
"""Values of the wrong type or size."""

ODD_WORDS = [
    *("", "0", "-1", "-0", "nan", "inf", "-Infinity", "1e308", "1e-320", "1e999", "1_0", "0x1f", "9" * 25, "9" * 5000),
    *(
        "null",
        "true",
        "'",
        '"',
        ",",
        "\t",
        "\0",
        "\x1b[31m",
        "\u202e",
        "\u2028",
        "\ufeff",
        "é",
        "\U0001f600",
        "%s",
        "[]",
    ),
]
"""Words that take the place of a number or a cell."""

ODD_CELLS = [None, True, -1, 2**62, math.nan, math.inf, "", "\x1b[31m", "a" * 5000, b"\xff", [1], {"a": 1}]
"""Values that fill a column of a Parquet file."""

ODD_LETTERS = [*"[]{}:,-#&*!|>'\"%@`?~ \t\0\r\n\x85\u2028é", "<<: ", "*a ", "&a ", "!!int ", "- ", "1e", "\\ud800"]

QuickLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
QuickDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's, where PyYAML was built with it: most of the time would be spent on making the files."""

DEEP = 3000
"""Levels of nesting beyond what parsers take."""


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in `tree` and key in it."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from places(value)


def mutate(content: bytes, form: str, rng: random.Random) -> bytes:
    """One malformed file. The same state of `rng` gives the same file.

    Args:
        content: a valid file.
        form: its format, a key of `LAYERS`.
        rng: source of all choices.
    """
    for layer in rng.choice(LAYERS[form]):
        content = layer(content, form, rng)
    return content


# ---------------------------------------------------------------------------------------------- data


def mutate_data(content: bytes, form: str, rng: random.Random) -> bytes:
    """Drops, exchanges, renames and repeats up to three values of a YAML, JSON or JSON lines file."""
    if form == "jsonl":
        trees = [json.loads(line) for line in content.splitlines() if line.strip()]
    else:
        trees = [json.loads(content) if form == "json" else yaml.load(content, QuickLoader)]
    for _ in range(rng.randint(1, 3)):
        tree = rng.choice(trees)
        if found := list(places(tree)):
            _mutate_value(*rng.choice(found), found, rng)
    if rng.random() < 0.02:
        trees[0] = copy.deepcopy(rng.choice(ODD))
    if form == "yaml":
        style = rng.choice([None, True])
        text = yaml.dump(trees[0], None, QuickDumper, sort_keys=False, allow_unicode=True, default_flow_style=style)
    else:
        text = "\n".join(json.dumps(tree, ensure_ascii=rng.random() < 0.5) for tree in trees) + "\n"
    return text.encode("utf-8", "surrogatepass")


def _mutate_value(at: Any, key: Any, found: list[tuple[Any, Any]], rng: random.Random) -> None:
    if key not in (at if isinstance(at, dict) else range(len(at))):
        return  # an earlier mutation removed it
    match rng.choice(["drop", "replace", "replace", "retype", "rename", "move", "scale", "repeat"]):
        case "drop":
            del at[key]
        case "replace":
            at[key] = copy.deepcopy(rng.choice(ODD))
        case "retype":
            value = at[key]
            at[key] = rng.choice([str(value), [value], {"a": value}, [value, value], bool(value)])
        case "rename" if isinstance(at, dict):
            at[f"{key}{rng.choice(ODD_LETTERS)}"] = at.pop(key)
        case "move":
            other, name = rng.choice(found)
            if name in (other if isinstance(other, dict) else range(len(other))):
                at[key] = copy.deepcopy(other[name])
        case "scale" if isinstance(at[key], int | float):
            at[key] = rng.choice([at[key] * 2, at[key] + 1, -at[key], at[key] // 2, at[key] * 10**9])
        case "repeat" if isinstance(at, list):
            at[key:key] = [copy.deepcopy(at[key])] * rng.choice([1, 1, 100])


def nest(content: bytes, form: str, rng: random.Random) -> bytes:
    """Puts a value into thousands of lists or mappings."""
    level, end = rng.choice([(b"[", b"]"), (b'{"a":', b"}"), (b"- ", b"")])
    at = content.find(b":", rng.randrange(len(content) + 1)) + 1
    return content[:at] + DEEP * level + rng.choice([b"1" + DEEP * end, b""]) + content[at:]


# ---------------------------------------------------------------------------------------------- text


def mutate_text(content: bytes, form: str, rng: random.Random) -> bytes:
    """Changes letters, numbers and lines, and at times the encoding."""
    lines = content.decode("utf-8", "surrogateescape").split("\n")
    for _ in range(rng.randint(1, 3)):
        i = rng.randrange(len(lines))
        line = lines[i]
        at = rng.randint(0, len(line))
        match rng.choice(["insert", "word", "word", "drop", "cut", "repeat", "indent", "swap"]):
            case "insert":
                lines[i] = line[:at] + rng.choice(ODD_LETTERS) + line[at:]
            case "word":
                lines[i] = _replace_word(line, rng)
            case "drop" if len(lines) > 1:
                del lines[i]
            case "cut":
                lines[i] = line[:at]
            case "repeat":
                lines[i:i] = [line] * rng.choice([1, 1, 50])
            case "indent":
                lines[i] = rng.choice([" ", "\t"]) + line
            case "swap":
                lines[i] = rng.choice(lines)
    encoding = rng.choice(["utf-8", "utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1"])
    text = "\n".join(lines)
    return text.encode(encoding, "surrogateescape" if encoding.startswith("utf-8") else "replace")


def _replace_word(line: str, rng: random.Random) -> str:
    """The line with an odd word in place of one between commas, colons, blanks or brackets."""
    ends = [-1, *(i for i, letter in enumerate(line) if letter in " ,:[]{}"), len(line)]
    i = rng.randrange(len(ends) - 1)
    return line[: ends[i] + 1] + rng.choice(ODD_WORDS) + line[ends[i + 1] :]


def mutate_words(content: bytes, form: str, rng: random.Random) -> bytes:
    """Drops, repeats, exchanges and replaces words of a command line, or the value behind the ``=`` of one."""
    words = content.decode("utf-8", "surrogateescape").split("\n")
    for _ in range(rng.randint(1, 2)):
        i = rng.randrange(len(words))
        key, equals, _ = words[i].partition("=")
        match rng.choice(["drop", "repeat", "swap", "value", "value", "word", "add"]):
            case "drop" if len(words) > 1:
                del words[i]
            case "repeat":
                words.insert(rng.randint(0, len(words)), words[i])
            case "swap":
                words[i], words[0] = words[0], words[i]
            case "value" if equals:
                words[i] = f"{key}={_write_odd(rng)}"
            case "add":
                words.insert(i, rng.choice([*ODD_WORDS, "--json", "--", "-", "--no-such", "-q"]))
            case _:
                words[i] = _write_odd(rng)
    return "\n".join(words).encode("utf-8", "surrogateescape")


def _write_odd(rng: random.Random) -> str:
    """An odd word, or an odd value as YAML writes it in a line."""
    if rng.random() < 0.5:
        return rng.choice(ODD_WORDS)
    return yaml.safe_dump(rng.choice(ODD), default_flow_style=True, width=math.inf).split("\n")[0]


def mutate_column(content: bytes, form: str, rng: random.Random) -> bytes:
    """Drops, repeats or renames a column of a CSV file, or fills it with an odd word."""
    rows = [line.split(",") for line in content.decode().splitlines()]
    i, kind, word = rng.randrange(len(rows[0])), rng.choice(["drop", "repeat", "rename", "fill"]), rng.choice(ODD_WORDS)
    for number, row in enumerate(rows):
        if i >= len(row):
            continue
        if kind in ("drop", "repeat"):
            row[i : i + 1] = [] if kind == "drop" else [row[i], row[i]]
        elif (kind == "rename") == (number == 0):
            row[i] = word
    return "\n".join(map(",".join, rows)).encode()


def mutate_table(content: bytes, form: str, rng: random.Random) -> bytes:
    """Drops, renames or fills a column of a Parquet file, or leaves out or repeats its rows."""
    table = pq.ParquetFile(io.BytesIO(content)).read()
    i = rng.randrange(table.num_columns)
    match rng.choice(["drop", "rename", "fill", "fill", "fill", "empty", "repeat"]):
        case "drop" if table.num_columns > 1:
            table = table.remove_column(i)
        case "rename":
            names = table.column_names
            names[i] = rng.choice([*ODD_WORDS, *names])
            table = table.rename_columns(names)
        case "fill":
            table = table.set_column(i, table.column_names[i], pa.array([rng.choice(ODD_CELLS)] * len(table)))
        case "empty":
            table = table.slice(0, 0)
        case "repeat":
            table = pa.concat_tables([table] * 3)
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


# --------------------------------------------------------------------------------------------- bytes


def mutate_bytes(content: bytes, form: str, rng: random.Random) -> bytes:
    """Cuts the file, or exchanges, adds and removes random bytes."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 10])):
        at = rng.randint(0, len(data))
        match rng.choice(["cut", "exchange", "exchange", "insert", "remove", "zeros"]):
            case "cut":
                del data[at:]
            case "exchange" if at < len(data):
                data[at] = rng.randrange(256)
            case "insert":
                data[at:at] = rng.randbytes(rng.choice([1, 4, 1000]))
            case "remove":
                del data[at : at + rng.choice([1, 4, 100])]
            case "zeros":
                data[at : at + 8] = bytes(8)
    return bytes(data)


def compress(content: bytes, form: str, rng: random.Random) -> bytes:
    """Compresses the file, half of the time damaged afterwards."""
    packed = gzip.compress(content, mtime=0)
    return packed if rng.random() < 0.5 else mutate_bytes(packed, form, rng)


Layer = Callable[[bytes, str, random.Random], bytes]

TREE: list[tuple[Layer, ...]] = [
    *4 * [(mutate_data,)],
    *2 * [(mutate_text,)],
    (mutate_data, mutate_text),
    (mutate_data, compress),
    (mutate_bytes,),
    (nest,),
]
LINES: list[tuple[Layer, ...]] = [
    *4 * [(mutate_text,)],
    (mutate_text, mutate_text),
    (mutate_bytes,),
    (mutate_text, compress),
]

LAYERS: dict[str, list[tuple[Layer, ...]]] = {
    "yaml": TREE,
    "json": TREE,
    "jsonl": TREE,
    "csv": [*LINES, *3 * [(mutate_column,)], (mutate_column, mutate_text)],
    "text": LINES,
    "words": [*4 * [(mutate_words,)], (mutate_words, mutate_words), *2 * [(mutate_text,)], (mutate_bytes,)],
    "parquet": [
        (mutate_bytes,),
        (mutate_table,),
        (mutate_table,),
        (mutate_table, mutate_table),
        (mutate_table, mutate_bytes),
    ],
}
"""Mutations of each format, one of which is applied."""
