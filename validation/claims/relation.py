"""Relations of claims such as ``base / split`` or ``ours < theirs``: plain arithmetic, never executed as Python.

A relation knows numbers, the names of jobs, ``+ - * / **``, parentheses, ``min max sum best`` and ``name[0]``. A chain
of ``<`` or ``>`` states an order; its value is the smallest ratio of neighbours, which is at least 1 where it is right.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

from hardware.errors import PlanError

LONGEST = 500
"""Maximum number of characters of a relation."""

FUNCTIONS = ("min", "max", "sum", "best")
VALID = "Valid: numbers, names of jobs, + - * / **, ( ), min() max() sum() best(), name[0], and one chain of < or >"

Quantity = float | list[float]
"""The value of a job: one number, or one for each stage or each point of an `over`."""

ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True)
class Relation:
    """A parsed relation. names: of the jobs in it, each once, in their order."""

    text: str
    names: tuple[str, ...]
    body: ast.expr

    @property
    def is_order(self) -> bool:
        """Whether it states an order: holds if its value is at least 1."""
        return isinstance(self.body, ast.Compare)

    def compute(self, values: Mapping[str, Quantity], better: str, where: str) -> float:
        """The value of the relation. better: ``lower`` or ``higher``, what `best` picks.

        Raises PlanError for a value that does not exist: division by zero, or a list where a number belongs.
        """
        try:
            found = _Evaluation(values, better).number(self.body)
        except (ArithmeticError, ValueError) as error:
            rule, _, remedy = str(error).partition(". ")
            raise PlanError(where, f"it has no value ({rule})", remedy or "Correct the relation", self.text) from None
        if isinstance(found, complex) or not math.isfinite(found):
            raise PlanError(where, "it has no finite value", "Correct the relation", self.text)
        return found


def parse_relation(text: str) -> Relation:
    """Parses a relation. Raises ValueError ("rule. remedy") if it is malformed."""
    if len(text) > LONGEST or "\n" in text.strip():
        raise ValueError(f"a relation is one line of at most {LONGEST} characters. Write base / split")
    try:
        body = ast.parse(text.strip(), mode="eval").body
        names: list[str] = []
        _check(body, names, top=True)
    except SyntaxError as error:
        raise ValueError(f"it cannot be read ({error.msg}). Write it like base / split") from None
    except (RecursionError, MemoryError):
        raise ValueError("nested too deeply. Write it shorter") from None
    return Relation(text, tuple(dict.fromkeys(names)), body)


def _check(node: ast.expr, names: list[str], top: bool = False) -> None:
    """Collects the names of a relation. Raises ValueError for what it may not have."""
    match node:
        case ast.Constant(int() | float() as value) if not isinstance(value, bool) and math.isfinite(value):
            pass
        case ast.Name(name):
            names.append(name)
        case ast.Subscript(ast.Name(name), ast.Constant(value)) if type(value) is int:
            names.append(name)
        case ast.UnaryOp(ast.USub(), operand):
            _check(operand, names)
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            _check(left, names)
            _check(right, names)
        case ast.Call(ast.Name(name), [_, *_] as given, []) if name in FUNCTIONS:
            for one in given:
                _check(one, names)
        case ast.Compare(left, ops, rights) if top and len({type(op) for op in ops}) == 1:
            if not isinstance(ops[0], ast.Lt | ast.Gt):
                _refuse("an order is a chain of < or of >")
            for one in (left, *rights):
                _check(one, names)
        case _:
            _refuse("only plain arithmetic is understood")


def _refuse(rule: str) -> NoReturn:
    raise ValueError(f"{rule}. {VALID}")


class _Evaluation:
    """Evaluates the nodes of a checked relation."""

    def __init__(self, values: Mapping[str, Quantity], better: str) -> None:
        self.values, self.better = values, better

    def number(self, node: ast.expr) -> float:
        found = self.quantity(node)
        if isinstance(found, list):
            if len(found) == 1:
                return found[0]
            name = ast.unparse(node)
            raise ValueError(f"{name} has {len(found)} values. Write max({name}) or {name}[0]")
        return found

    def quantity(self, node: ast.expr) -> Quantity:
        match node:
            case ast.Constant(value):
                return float(value)  # type: ignore[arg-type]
            case ast.Name(name):
                return self.values[name]
            case ast.Subscript(ast.Name(name), ast.Constant(place)):
                every = _flatten([self.values[name]])
                if not place < len(every):  # type: ignore[operator]
                    raise ValueError(f"{name} has {len(every)} values. Count from 0")
                return every[place]  # type: ignore[index]
            case ast.UnaryOp(_, operand):
                return -self.number(operand)
            case ast.BinOp(left, op, right):
                return ARITHMETIC[type(op)](self.number(left), self.number(right))
            case ast.Call(ast.Name(name), given):
                picks = {"min": min, "max": max, "sum": math.fsum, "best": min if self.better == "lower" else max}
                return picks[name](_flatten(map(self.quantity, given)))  # type: ignore[no-any-return, operator]
            case ast.Compare(left, ops, rights):
                terms = [self.number(one) for one in (left, *rights)]
                rising = terms if isinstance(ops[0], ast.Lt) else terms[::-1]
                return min(above / below for below, above in pairwise(rising))
        raise AssertionError(node)  # `_check` admits no other node


def _flatten(given: Sequence[Quantity] | map[Quantity]) -> list[float]:
    return [one for each in given for one in (each if isinstance(each, list) else [each])]
