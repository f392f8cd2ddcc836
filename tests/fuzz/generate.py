"""Malformed input files: seeded mutations of valid ones, in their data, their syntax, their text and their bytes, and
what may lie in the place of a file."""

from __future__ import annotations

import copy
import gzip
import io
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from datetime import time as clock
from decimal import Decimal
from pathlib import Path
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
    *("null", "true", "'", '"', ",", "\t", "\0", "\x1b[31m", "\u202e", "\u2066", "\u200b", "\u2028", "\ufeff", "é"),
    *("\U0001f600", "%s", "[]", "٣", "²", "{{figure}}", "$\\frac{$", "=1+1", "<b>", "a" * 200_000),
]
"""Words that take the place of a number or a cell."""

ODD_CELLS: list[Any] = [
    *(None, True, -1, 2**62, math.nan, math.inf, "", "\x1b[31m", "a" * 5000, b"\xff", [1], {"a": 1}, [[]], [{"a": 1}]),
    *("{", "[{}]", '[{"op": 1}]', date(2026, 1, 1), datetime(2026, 1, 1), timedelta(1), Decimal("1.5"), clock(1)),
]
"""Values that fill a column of a Parquet file."""

ODD_NOTES = [b"", b"{", b"null", b"[]", b'"a"', b"\xff", b'{"fields": 1}', b'{"fields": ["a"], "kind": []}']
"""What stands in the metadata of a Parquet file in place of meshcast's own."""

ODD_LETTERS = [
    *"[]{}:,-#&*!|>'\"%@`?~ \t\0\r\n\x0b\x85\u2028é\u202e",
    *("<<: ", "*a ", "&a ", "!!int ", "- ", "1e", "\\ud800"),
]

YAML_MARKS = re.split(
    r"   +|\n",
    """!!int   !!float   !!bool   !!null   !!str   !!binary   !!set   !!omap   !!pairs   !!timestamp   !!seq   !!map
!!merge   !!value   !!python/object/apply:os.system   !mine   !<tag:a>   &a   *a   &a !!int   |   >-   ?
? [1] :   <<: *a   {<<: {tp: 2}}   {<<: [{tp: 2}, 1]}   {a: 1, a: 2}   - -   {*a : 1}   ---   ...   %YAML 1.1
2026-02-31   0o17   1:30   .inf   -.nan   &a [*a]   {? {a: 1} : 2}""",
)
"""What YAML's syntax has besides data: tags, anchors, aliases, merges, styles, documents."""

LAUGHS = "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}' if i else '1'] * 9)}]\n" for i in range(12))
"""Aliases of aliases, 9**12 values."""

SHELL_LINES = re.split(
    r"   +|\n",
    r"""A=$A$A$A$A   for i in $(seq 1 1000000000); do A=$A$i; done   while true; do A=x$A; done   f() { f; f; }; f
until false; do :; done   for ((i=0;;i++)); do :; done   select x in a b; do break; done   source $0   . run.sh
case $A in (*) ;; *|a) B=1;& esac   if [[ $A =~ (a+)+$ && -f x || ! -z ${A//a/b} ]]; then   fi   done   }   )
{   (   ((   A=("$@" [5]=x [99999999]=y)   ${A[@]:1:2} ${!A} ${A^^} ${A:-${B:=${C:?no}}} ${#A} ${A%%*} ${A/#a/b}
declare -A M   A=$((2**63)) B=$((1/0)) C=$((A=A+1,B++)) D=$((08)) E=$((1<<9999))   cat <<EOF > x.json   EOF
<<<a   cat <<'E   let A=A**A   eval $A   exec "$@"   set -euo pipefail; shift 99; exit   trap 'A=1' EXIT
getopts a: x   read -r A < /dev/zero   python - <<EOF | tee x &   A=`echo \`echo a\``   $(< /etc/passwd)
printf -v A '%*s' 999999999   {a..z}{0..99999999}   srun bash -c 'torchrun a.py --tp $A'   export A+=1   local A
unset A; A[-1]=2   coproc a { b; }   '   "   $(   ${   `   \
torchrun --nproc_per_node=$N --nnodes=$((N*N)) x.py --tensor-model-parallel-size   A=$(f $(f $(f)))
echo ${A@Q} ${*: -1}""",
)
"""Lines and parts of lines of shell scripts, by bash's grammar: many without an end, some that never end."""

QuickLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
QuickDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's, where PyYAML was built with it: most of the time would be spent on making the files."""

DEEP = 3000
"""Levels of nesting beyond what parsers take."""

INFLATED = 0.004
"""Share of files that are a gzip file of hundreds of megabytes."""


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
    layers = (inflate,) if rng.random() < INFLATED and form not in ("words", "parquet") else rng.choice(LAYERS[form])
    for layer in layers:
        content = layer(content, form, rng)
    return content


# ---------------------------------------------------------------------------------------------- data


def mutate_data(content: bytes, form: str, rng: random.Random) -> bytes:
    """Drops, exchanges, renames and repeats up to three values of a YAML, JSON or JSON lines file."""
    if form == "jsonl":
        trees = [json.loads(line) for line in content.splitlines() if line.strip()]
    else:
        trees = [yaml.load(content, QuickLoader) if form == "yaml" else json.loads(content)]
    for _ in range(rng.randint(1, 3)):
        tree = rng.choice(trees)
        if found := list(places(tree)):
            _mutate_value(*rng.choice(found), found, rng)
    if rng.random() < 0.01:
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


def mutate_syntax(content: bytes, form: str, rng: random.Random) -> bytes:
    """Puts tags, anchors, aliases, merges and keys given twice into the lines of a YAML file."""
    lines = content.decode().split("\n")
    for _ in range(rng.randint(1, 3)):
        i = rng.randrange(len(lines))
        head, colon, value = lines[i].partition(":")
        match rng.choice(["mark", "mark", "mark", "replace", "anchor", "twice", "merge", "laugh"]):
            case "mark" if colon:
                lines[i] = f"{head}: {rng.choice(YAML_MARKS)}{value}"
            case "replace" if colon:
                lines[i] = f"{head}: {rng.choice(YAML_MARKS)}"
            case "anchor" if colon:
                lines[i] = f"{head}: &a{value}"
                j = rng.randrange(len(lines))
                lines[j] = f"{lines[j].partition(':')[0]}: *a"
            case "twice":
                lines.insert(i, f"{head}: {rng.choice(ODD_WORDS)!r}")
            case "merge":
                indent = head[: len(head) - len(head.lstrip())]
                lines.insert(i, f"{indent}<<: {rng.choice(['*a', '{tp: 4}', '[{a: 1}, {a: 2}]', '1', '~'])}")
            case "laugh":
                lines = [LAUGHS, *lines[:i], f"{head}: *x{rng.randrange(12)}", *lines[i + 1 :]]
    return "\n".join(lines).encode("utf-8", "surrogateescape")


def mutate_script(content: bytes, form: str, rng: random.Random) -> bytes:
    """Drops, doubles, joins, exchanges and cuts lines of a launch file, and puts in others of the shell."""
    lines = content.decode("utf-8", "surrogateescape").splitlines(keepends=True) or [""]
    for _ in range(rng.randint(1, 4)):
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        at = rng.randint(0, len(lines[i]))
        match rng.choice(["drop", "double", "swap", "cut", "line", "line", "part", "part", "number", "word"]):
            case "drop":
                lines[i] = ""
            case "double":
                lines.insert(i, lines[i])
            case "swap":
                lines[i], lines[j] = lines[j], lines[i]
            case "cut":
                lines[i] = lines[i][:at]
            case "line":
                lines.insert(i, rng.choice(SHELL_LINES) + "\n")
            case "part":
                lines[i] = lines[i][:at] + rng.choice(SHELL_LINES) + lines[i][at:]
            case "number":
                word = rng.choice(["0", "-1", "3", "9" * 30, "nan", "$X", "1e308", "1" * 5000])
                lines[i] = re.sub(r"\d+", word, lines[i], count=1)
            case _:
                lines[i] = _replace_word(lines[i], rng)
    return "".join(lines).encode("utf-8", "surrogateescape")


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


def mutate_ends(content: bytes, form: str, rng: random.Random) -> bytes:
    """Ends lines in another way, encodes the text otherwise, or puts marks, NUL characters or a very long line in."""
    text = content.decode("utf-8", "replace")
    match rng.choice(["ends", "ends", "encode", "mark", "nul", "long"]):
        case "ends":
            text = text.replace(
                "\n", rng.choice(["\r", "\r\n", "\n\r", "\x0b", "\x0c", "\x85", "\u2028", "\r\r\n", "\0"])
            )
        case "encode":
            return text.encode(rng.choice(["utf-16", "utf-16-be", "utf-32", "latin-1", "utf-7", "cp037"]), "replace")
        case "mark":
            text = "\ufeff" * rng.choice([1, 2]) + text
        case "nul":
            at = rng.randint(0, len(text))
            text = text[:at] + "\0" * rng.choice([1, 5000]) + text[at:]
        case "long":
            at = rng.randint(0, len(text))
            text = text[:at] + rng.choice("a1 ,\t#'(\\") * rng.choice([200_000, 1_000_000]) + text[at:]
    return text.encode()


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
    match rng.choice(["drop", "rename", "fill", "fill", "fill", "text", "nest", "note", "empty", "repeat"]):
        case "drop" if table.num_columns > 1:
            table = table.remove_column(i)
        case "rename":
            names = table.column_names
            names[i] = rng.choice([*ODD_WORDS, *names])
            table = table.rename_columns(names)
        case "fill":
            table = table.set_column(i, table.column_names[i], pa.array([rng.choice(ODD_CELLS)] * len(table)))
        case "text":
            words = [rng.choice([*ODD_WORDS, str(one)]) for one in table.column(i).to_pylist()]
            table = table.set_column(i, table.column_names[i], pa.array(words))
        case "nest":
            cells = pa.StructArray.from_arrays([table.column(i).combine_chunks()], ["a"])
            array = cells if rng.random() < 0.5 else table.column(i).combine_chunks().dictionary_encode()
            table = table.set_column(i, table.column_names[i], array)
        case "note":
            notes = {key: rng.choice(ODD_NOTES) for key in (table.schema.metadata or {b"meshcast": b""})}
            table = table.replace_schema_metadata(rng.choice([None, notes]))
        case "empty":
            table = table.slice(0, 0)
        case "repeat":
            table = pa.concat_tables([table] * 3)
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def mutate_trace(content: bytes, form: str, rng: random.Random) -> bytes:
    """Moves, stretches, relabels, mixes, repeats and drops events of a Kineto trace: what overlaps, has no launch or no
    step, two correlations or the lane of another, or lasts for days."""
    trace = json.loads(content)
    events = trace["traceEvents"]
    for _ in range(rng.randint(1, 4)):
        event, other = rng.choice(events), rng.choice(events)
        inside, begin = event.get("args"), event.get("ts")
        names = ("name", "cat", "ph", "tid", "pid", "ts", "dur", "args")
        match rng.choice(["time", "time", "last", "field", "field", "number", "repeat", "drop", "order", "lane"]):
            case "time":
                later = begin + 15 if isinstance(begin, int | float) else 0
                event["ts"] = rng.choice([0, -5, later, other.get("ts"), 1e15, 2**53 + 1, math.nan, "1", None])
            case "last":
                event["dur"] = rng.choice([0, -1, 5, 1e3, 1e15, math.inf, True, [1]])
            case "field":
                name = rng.choice(names)
                event[name] = copy.deepcopy(rng.choice([other.get(name), rng.choice(ODD), ""]))
            case "number" if isinstance(inside, dict) and inside:
                inside[rng.choice([*inside])] = copy.deepcopy(rng.choice([0, 1, 2, -1, *ODD]))
            case "repeat":
                events += [copy.deepcopy(event)] * rng.choice([1, 1, 50])
            case "drop" if len(events) > 1:
                events.remove(event)
            case "order":
                rng.shuffle(events)
            case "lane":
                events += [dict(one, tid=rng.choice([7, 20, "7", -1]), pid=rng.choice([0, 1, 99])) for one in events]
    return json.dumps(trace).encode("utf-8", "surrogatepass")


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


def inflate(content: bytes, form: str, rng: random.Random) -> bytes:
    """A small gzip file of 600 MB: the file and more of it, zeros, line ends, commas or brackets."""
    part = rng.choice([b"\0", b"\n", b",", b"[", b"[],", b"a: 1\n", b"- ", b"1,2\n", content])
    packed = gzip.compress(part * (20_000_000 // max(1, len(part))), 1, mtime=0)
    return gzip.compress(content if rng.random() < 0.5 else b"[", mtime=0) + packed * 30


def compress(content: bytes, form: str, rng: random.Random) -> bytes:
    """Compresses the file, half of the time damaged afterwards."""
    packed = gzip.compress(content, mtime=0)
    return packed if rng.random() < 0.5 else mutate_bytes(packed, form, rng)


Layer = Callable[[bytes, str, random.Random], bytes]

TREE: list[tuple[Layer, ...]] = [
    *12 * [(mutate_data,)],
    *4 * [(mutate_text,)],
    *2 * [(mutate_data, mutate_text)],
    *2 * [(mutate_ends,)],
    *2 * [(mutate_bytes,)],
    (mutate_data, compress),
    (nest,),
]
LINES: list[tuple[Layer, ...]] = [
    *4 * [(mutate_text,)],
    (mutate_text, mutate_text),
    (mutate_ends,),
    (mutate_bytes,),
    (mutate_text, compress),
]

LAYERS: dict[str, list[tuple[Layer, ...]]] = {
    "yaml": [*TREE, *6 * [(mutate_syntax,)], (mutate_data, mutate_syntax)],
    "json": TREE,
    "jsonl": TREE,
    "trace": [*TREE, *16 * [(mutate_trace,)], *4 * [(mutate_trace, mutate_data)]],
    "csv": [*LINES, *3 * [(mutate_column,)], (mutate_column, mutate_text)],
    "text": LINES,
    "script": [*LINES, *6 * [(mutate_script,)], (mutate_script, mutate_text)],
    "words": [*4 * [(mutate_words,)], (mutate_words, mutate_words), *2 * [(mutate_text,)], (mutate_bytes,)],
    "parquet": [
        (mutate_bytes,),
        *4 * [(mutate_table,)],
        *2 * [(mutate_table, mutate_table)],
        (mutate_table, mutate_bytes),
    ],
}
"""Mutations of each format, one of which is applied."""

# --------------------------------------------------------------------------------------- in place of a file

PLACED = ("nothing", "folder", "pipe", "device", "circle", "broken link")


def place(kind: str, path: Path) -> None:
    """Puts something into the place of a file."""
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "circle":
            path.symlink_to(path.name)
        case "broken link":
            path.symlink_to("none")
