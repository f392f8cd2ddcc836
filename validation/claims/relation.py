"""Relations of claims such as ``base / split`` or ``ours < theirs``: plain arithmetic, never executed as Python.

A relation knows numbers, the names of jobs, ``+ - * / **``, parentheses, ``min max sum best`` and ``name[0]``. A name
with a measure behind a dot reads that number of the job: ``base.exposed_dp_s / base.step_time_s``. A chain of ``<`` or
``>`` states an order; its value is the smallest ratio of neighbours, which is at least 1 where it is right.
``same(name, 15, 1)`` is the share of the values of a list that are the stated ones: 1 if all are and none is missing.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NoReturn

from meshcast.hardware.errors import OutOfMemory, PlanError
from meshcast.hardware.records import dataclass

MAX_LENGTH = 500
"""Maximum number of characters of a relation."""

FUNCTIONS = ("min", "max", "sum", "best", "same")
VALID = (
    "Valid: numbers, names of jobs, name.measure, + - * / **, ( ), min() max() sum() best() same(), name[0], and < or >"
)

Quantity = float | list[float]
"""The value of a job: a single number, or a number for each stage or each point of an `over`."""

ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


class NothingFits(Exception):
    """A list of values is empty, for no job of it fits."""


@dataclass(frozen=True)
class Relation:
    """A parsed relation.

    reads: (job, measure) that it reads, each once; the measure is empty if it names none.
    """

    text: str
    reads: tuple[tuple[str, str], ...]
    body: ast.expr

    @property
    def names(self) -> tuple[str, ...]:
        """The jobs that it reads, each once, in their order."""
        return tuple(dict.fromkeys(name for name, _ in self.reads))

    @property
    def is_order(self) -> bool:
        """Whether it states an order: holds if its value is at least 1."""
        return isinstance(self.body, ast.Compare)

    def compute(self, values: Mapping[tuple[str, str], Quantity], better: str, where: str) -> float:
        """Returns the value of the relation. better: ``lower`` or ``higher``, what `best` picks.

        Raises OutOfMemory where no job of a list fits, and PlanError for a value that does not exist: division by zero,
        or a list where a number belongs.
        """
        try:
            value = _Evaluation(values, better).number(self.body)
        except NothingFits:
            raise OutOfMemory(where, "none of the jobs that it compares fits", "Correct the jobs", self.text) from None
        except (ArithmeticError, ValueError) as error:
            rule, _, remedy = str(error).partition(". ")
            raise PlanError(where, f"it has no value ({rule})", remedy or "Correct the relation", self.text) from None
        if isinstance(value, complex) or not math.isfinite(value):
            raise PlanError(where, "it has no finite value", "Correct the relation", self.text)
        return value


def parse_relation(text: str) -> Relation:
    """Parses a relation. Raises ValueError ("rule. remedy") if it is malformed."""
    if len(text) > MAX_LENGTH or "\n" in text.strip():
        raise ValueError(f"a relation is one line of at most {MAX_LENGTH} characters. Write base / split")
    try:
        body = ast.parse(text.strip(), mode="eval").body
        reads: list[tuple[str, str]] = []
        _check(body, reads, top=True)
    except SyntaxError as error:
        raise ValueError(f"it cannot be read ({error.msg}). Write it like base / split") from None
    except (RecursionError, MemoryError):
        raise ValueError("nested too deeply. Write it shorter") from None
    return Relation(text, tuple(dict.fromkeys(reads)), body)


def _read_of(node: ast.expr) -> tuple[str, str] | None:
    """Returns the job and measure of ``name`` or ``name.measure``; None for other nodes."""
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.insert(0, node.attr)
        node = node.value
    return (node.id, ".".join(words)) if isinstance(node, ast.Name) else None


def _check(node: ast.expr, reads: list[tuple[str, str]], top: bool = False) -> None:
    """Collects the names of a relation. Raises ValueError for what it may not have."""
    match node:
        case ast.Constant(int() | float() as value) if not isinstance(value, bool) and math.isfinite(value):
            pass
        case ast.Name() | ast.Attribute() if read := _read_of(node):
            reads.append(read)
        case ast.Subscript(inner, ast.Constant(value)) if type(value) is int and (read := _read_of(inner)):
            reads.append(read)
        case ast.UnaryOp(ast.USub(), operand):
            _check(operand, reads)
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            _check(left, reads)
            _check(right, reads)
        case ast.Call(ast.Name(name), [_, *_] as arguments, []) if name in FUNCTIONS:
            for argument in arguments:
                _check(argument, reads)
        case ast.Compare(left, ops, rights) if top and len({type(op) for op in ops}) == 1:
            if not isinstance(ops[0], ast.Lt | ast.Gt):
                _refuse("an order is a chain of < or of >")
            for term in (left, *rights):
                _check(term, reads)
        case _:
            _refuse("only plain arithmetic is understood")


def _refuse(rule: str) -> NoReturn:
    raise ValueError(f"{rule}. {VALID}")


class _Evaluation:
    """Evaluates the nodes of a checked relation."""

    def __init__(self, values: Mapping[tuple[str, str], Quantity], better: str) -> None:
        self.values, self.better = values, better

    def number(self, node: ast.expr) -> float:
        quantity = self.quantity(node)
        if isinstance(quantity, list):
            if len(quantity) == 1:
                return quantity[0]
            name = ast.unparse(node)
            if not quantity:
                raise NothingFits
            raise ValueError(f"{name} has {len(quantity)} values. Write max({name}) or {name}[0]")
        return quantity

    def quantity(self, node: ast.expr) -> Quantity:
        match node:
            case ast.Constant(value):
                return float(value)  # type: ignore[arg-type]
            case ast.Name() | ast.Attribute() if read := _read_of(node):
                return self.values[read]
            case ast.Subscript(inner, ast.Constant(place)) if read := _read_of(inner):
                every = flatten([self.values[read]])
                if not place < len(every):  # type: ignore[operator]
                    raise ValueError(f"{ast.unparse(inner)} has {len(every)} values. Count from 0")
                return every[place]  # type: ignore[index]
            case ast.UnaryOp(_, operand):
                return -self.number(operand)
            case ast.BinOp(left, op, right):
                return ARITHMETIC[type(op)](self.number(left), self.number(right))
            case ast.Call(ast.Name(name), arguments):
                if name == "same":
                    return self.share_of_equals(arguments[0], arguments[1:])
                every = flatten(map(self.quantity, arguments))
                if not every:
                    raise NothingFits
                picks = {"min": min, "max": max, "sum": math.fsum, "best": min if self.better == "lower" else max}
                return picks[name](every)  # type: ignore[no-any-return, operator]
            case ast.Compare(left, ops, rights):
                terms = [self.number(term) for term in (left, *rights)]
                rising = terms if isinstance(ops[0], ast.Lt) else terms[::-1]
                return min(above / below for below, above in pairwise(rising))
        raise AssertionError(node)  # `_check` admits no other node

    def share_of_equals(self, node: ast.expr, stated: Sequence[ast.expr]) -> float:
        """Returns the share of the values of a list that equal the stated values, over the longer of the two."""
        values, wanted = flatten([self.quantity(node)]), [self.number(term) for term in stated]
        equal = sum(math.isclose(value, other, rel_tol=1e-9) for value, other in zip(values, wanted, strict=False))
        return equal / max(len(values), len(wanted))


def flatten(quantities: Iterable[Quantity]) -> list[float]:
    """Returns all values in a list."""
    return [value for each in quantities for value in (each if isinstance(each, list) else [each])]
