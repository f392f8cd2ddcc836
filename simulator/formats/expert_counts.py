"""The option that says the routing of tokens, and files with the token counts of experts that runs have recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from meshcast.hardware.documents.input_file import DATA, Unreadable, parse_csv, parse_json, read_text
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.schemas import PlainValidator, WithJsonSchema
from meshcast.simulator.ir.routing import REMEDY, TRAINED, Routing, Rows

MAX_UNEVEN = 10.0
"""Largest exponent of Zipf's law: the second expert then gets a thousandth of the tokens of the first."""

LARGEST_COUNT = 1e18
"""Largest count of tokens: sums of more could overflow."""

REMEDY_OF_TRACE = "Name a JSON file with a list for each step, of counts or of rows of them, or a CSV file of rows"

WORDS = ("balanced", *TRAINED, "trained", "zipf", "counts", "trace")

RoutingFields = Mapping[str, Any]
"""A routing that is stated as a mapping."""

MAX_STEPS = 500
"""Most steps of routing that changes: each is a forecast."""


def read_routing(option: Any) -> Routing:
    """Returns the routing of an option: ``balanced``, ``natural``, ``loss-free``, ``{trained: natural, documents:
    16}``, ``{zipf: 1.1}``, ``{zipf: 1.1, drift: 0.02, steps: 20, seed: 0}``, ``{counts: FILE}`` or ``{trace: FILE}``.

    Raises ValueError for any other value, PlanError for a file without valid counts.
    """
    if isinstance(option, Routing):
        return option
    if option == "balanced":
        return Routing()
    if isinstance(option, str) and option in TRAINED:
        return Routing(trained=option)
    if not isinstance(option, Mapping):
        raise ValueError(ROUTINGS)
    unknown = [key for key in option if key not in (*_READERS, "documents", *_OF_STEPS)]
    if unknown:
        raise ValueError(f"no such routing as {unknown[0]!r}. {nearest(str(unknown[0]), WORDS)}")
    kinds = [word for word in _READERS if word in option]
    more = {"zipf": [*_OF_STEPS], "trace": ["warmup"], "trained": ["documents"]}
    if len(kinds) != 1 or {*option} - {*kinds, *more.get(kinds[0], [])}:
        raise ValueError(ROUTINGS)
    return _READERS[kinds[0]](option)


def _read_trained(option: RoutingFields) -> Routing:
    if option["trained"] not in TRAINED:
        raise ValueError(f"trained must be one of {', '.join(TRAINED)}")
    return Routing(trained=option["trained"], documents=_read_number("documents", option.get("documents", 1.0)))


def _read_counted(option: RoutingFields) -> Routing:
    return Routing(counts=read_counts(Path(_read_path(option, "counts"))), file=option["counts"])


def _read_traced(option: RoutingFields) -> Routing:
    path = _read_path(option, "trace")
    trace, warmup = read_trace(Path(path)), _read_number("warmup", option.get("warmup", 0))
    if warmup >= len(trace):
        raise ValueError(f"warmup must be less than the {len(trace)} steps of {path}")
    return Routing(trace=trace, file=path, warmup=warmup, steps=len(trace) - warmup)


def _read_zipf(option: RoutingFields) -> Routing:
    return Routing(**{key: _read_number(key, option[key]) for key in option})


def _read_path(option: RoutingFields, word: str) -> str:
    path = option[word]
    if not isinstance(path, str):
        raise ValueError(f"{word} must be the path of a file")
    return path


ROUTINGS = (
    "must be balanced, natural, loss-free, {trained: natural or loss-free}, also with documents, {zipf: exponent}, "
    "also with drift, steps, warmup and seed, {counts: file}, or {trace: file}, also with warmup"
)

_READERS = {"trained": _read_trained, "zipf": _read_zipf, "counts": _read_counted, "trace": _read_traced}
"""Words of which a mapping has exactly one, and what reads it."""

_OF_STEPS = {"drift": (0, 1), "steps": (1, MAX_STEPS), "warmup": (0, MAX_STEPS), "seed": (0, 2**32 - 1)}
"""Keys of Zipf's law over several steps, and their least and largest values."""


def _read_number(key: str, value: Any) -> Any:
    """Reads the value of a key of Zipf's law; raises ValueError."""
    least, most = {**_OF_STEPS, "documents": (1, LARGEST_COUNT)}.get(key, (0, MAX_UNEVEN))
    whole = key in ("steps", "warmup", "seed")
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        of = {"zipf": "the exponent of zipf", "drift": "drift, a share of the experts,"}.get(key, key)
        kind = "a whole number from" if whole else "between"
        even = "0 (even)" if key == "zipf" else f"{least:g}"
        raise ValueError(f"{of} must be {kind} {even} {'to' if whole else 'and'} {most:,}")
    return value if whole else float(value)


RoutingOption = Annotated[
    Routing,
    PlainValidator(read_routing),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["balanced", *TRAINED]},
                {
                    "type": "object",
                    "properties": {
                        "trained": {"enum": [*TRAINED]},
                        "documents": {"type": "number", "minimum": 1, "maximum": LARGEST_COUNT},
                    },
                    "required": ["trained"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {
                        "zipf": {"type": "number", "minimum": 0, "maximum": MAX_UNEVEN},
                        "drift": {"type": "number", "minimum": 0, "maximum": 1},
                        "steps": {"type": "integer", "minimum": 1, "maximum": MAX_STEPS},
                        "warmup": {"type": "integer", "minimum": 0, "maximum": MAX_STEPS},
                        "seed": {"type": "integer", "minimum": 0},
                    },
                    "required": ["zipf"],
                    "additionalProperties": False,
                },
                *(
                    {
                        "type": "object",
                        "properties": {key: {"type": "string"}, **more},
                        "required": [key],
                        "additionalProperties": False,
                    }
                    for key, more in (("counts", {}), ("trace", {"warmup": {"type": "integer", "minimum": 0}}))
                ),
            ]
        }
    ),
]
"""The type of an option that says the routing."""


def read_counts(path: Path) -> Rows:
    """Reads counts from a file: a JSON list of numbers or list of rows, or a CSV file without a header.

    Raises PlanError for a file without valid counts.
    """
    rows = _read_lists(path, REMEDY)
    return tuple(_row(f"{path} row {i}", row, len(rows[0])) for i, row in enumerate(rows, 1))


def read_trace(path: Path) -> tuple[Rows, ...]:
    """Reads the counts of each step from a file: a JSON list of what `read_counts` reads, or a CSV file with a row for
    each step.

    Raises PlanError for a file without valid counts.
    """
    lists = _read_lists(path, REMEDY_OF_TRACE)
    if len(lists) > MAX_STEPS:
        raise PlanError(str(path), f"a trace has at most {MAX_STEPS} steps", "Leave some out", len(lists))
    steps = [rows if isinstance(rows, list) and rows and isinstance(rows[0], list) else [rows] for rows in lists]
    length = len(steps[0][0]) if isinstance(steps[0][0], list) else 0
    return tuple(
        tuple(_row(f"{path} step {i} row {j}", row, length, REMEDY_OF_TRACE) for j, row in enumerate(rows, 1))
        for i, rows in enumerate(steps)
    )


def _read_lists(path: Path, remedy: str) -> list[Any]:
    """Reads what a file of counts holds, a list for each row of it or for each step."""
    try:
        text = read_text(path, DATA)
        lists = _of_json(path, text, remedy) if path.suffix == ".json" else _of_csv(text)
    except Unreadable as error:
        raise error.error(PlanError, str(path), remedy) from None
    if not lists:
        raise PlanError(str(path), "it holds no counts", remedy)
    return lists


def _of_json(path: Path, text: str, remedy: str) -> list[Any]:
    rows = parse_json(text)
    if not isinstance(rows, list):
        raise PlanError(str(path), "it holds no list", remedy)
    return rows if not rows or isinstance(rows[0], list) else [rows]


def _of_csv(text: str) -> list[Any]:
    return [[_number(cell) for cell in row.cells] for row in parse_csv(text) if row.cells]


def _row(where: str, row: Any, length: int, remedy: str = REMEDY) -> tuple[float, ...]:
    if not isinstance(row, list) or len(row) != length:
        raise PlanError(where, f"every row has as many counts as the first one, {length}", remedy)
    counts = tuple(_count(f"{where} count {place}", cell, remedy) for place, cell in enumerate(row, 1))
    if not any(counts):
        raise PlanError(where, "at least one count of a row is positive", remedy)
    return counts


def _count(where: str, cell: Any, remedy: str) -> float:
    is_number = isinstance(cell, int | float) and not isinstance(cell, bool)
    if not is_number or not 0 <= cell <= LARGEST_COUNT:
        rule = f"a count is a number from 0 to {LARGEST_COUNT:g}, in JSON without quotes"
        raise PlanError(where, rule, remedy, cell)
    return float(cell)


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell
