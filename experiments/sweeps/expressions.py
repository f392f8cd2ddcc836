"""Constraints of a sweep such as ``plan.tp * plan.pp <= 64``: plain arithmetic, never executed as Python.

An expression is parsed with ``ast`` and compiled to nested functions of the values of its names. It knows numbers,
strings in quotes, true and false, names with dots, ``+ - * // % **``, comparisons, ``and or not`` and parentheses.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any, NoReturn

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass

LONGEST = 1_000
"""Maximum number of characters of an expression."""

MAX_BITS = 4_096
"""Maximum size of the result of a power [bits]; a larger result has a mistyped exponent."""

Look = Callable[[str], Any]
"""Returns the value of a name."""
Term = Callable[[Look], Any]

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: _power(base, exponent),
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
WORDS = {"true": True, "false": False, "null": None}

DOT = "\u00b7"
"""Replaces dots in names before ``ast`` parses them: a letter to Python, so that ``batch.global`` has no keyword."""
NAME = re.compile(r"""'[^']*'|"[^"]*"|(?<![\w.])[A-Za-z_]\w*(?:\.\w+)+""")


@dataclass(frozen=True)
class Expression:
    """A constraint. Raises PlanError if a point gives it no truth value: text in arithmetic, division by zero."""

    text: str
    where: str
    names: tuple[str, ...]
    holds: Term

    def __call__(self, look: Look) -> bool:
        try:
            return bool(self.holds(look))
        except (ArithmeticError, ValueError) as error:
            rule, _, remedy = str(error).partition(". ")
            raise PlanError(self.where, rule, remedy or "Correct the expression", self.text) from None

    def __reduce__(self) -> tuple[Any, ...]:  # functions inside functions cannot be sent to another process
        return parse_constraint, (self.text, self.where)


def parse_constraint(text: str, where: str) -> Expression:
    """Parses a constraint. where: its place in error messages. Raises PlanError if it is malformed."""
    reader = _Reader(text, where)
    if len(text) > LONGEST:
        reader.refuse(f"{len(text):,} characters, a constraint has at most {LONGEST:,}", "Write it as several")
    if DOT in text or "\n" in text.strip():
        reader.refuse("a constraint is one line of plain arithmetic", "For example plan.tp * plan.pp <= 64")
    marked = NAME.sub(lambda name: name[0] if name[0][0] in "'\"" else name[0].replace(".", DOT), text)
    try:
        node = ast.parse(marked.strip(), mode="eval").body
        holds = reader.condition(node)
    except (SyntaxError, ValueError) as error:
        problem = str(getattr(error, "msg", error)).replace(DOT, ".")
        single = re.search(r"(?<![=!<>])=(?!=)", text)
        remedy = "Compare with ==, like plan.tp == 4" if single else "Write it like plan.tp * plan.pp <= 64"
        reader.refuse(f"it cannot be read ({problem})", remedy)
    except (RecursionError, MemoryError):
        reader.refuse("nested too deeply", "Write it as several")
    return Expression(text, where, tuple(dict.fromkeys(reader.names)), holds)


class _Reader:
    """Compiles the nodes of an expression to functions."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text, where
        self.names: list[str] = []

    def refuse(self, rule: str, remedy: str) -> NoReturn:
        raise PlanError(self.where, rule, remedy, self.text)

    def condition(self, node: ast.expr) -> Term:
        """Compiles a node with a truth value."""
        match node:
            case ast.BoolOp(op, values):
                conditions, settles = [self.condition(value) for value in values], isinstance(op, ast.Or)
                return lambda look: settles if any(holds(look) is settles for holds in conditions) else not settles
            case ast.UnaryOp(ast.Not(), operand):
                inner = self.condition(operand)
                return lambda look: not inner(look)
            case ast.Compare(left, ops, rights):
                return self._comparison([left, *rights], ops)
            case ast.Constant(bool()):
                return lambda look: node.value
            case ast.Name(name) if name in WORDS or DOT in name:
                term = self.term(node)
                return lambda look: _truth(term(look), name.replace(DOT, "."))
        self.refuse("a constraint says yes or no", "Compare the number with another, like plan.tp <= 8")

    def _comparison(self, nodes: list[ast.expr], ops: list[ast.cmpop]) -> Term:
        for op in ops:
            if type(op) not in COMPARISONS:
                self.refuse("`in` and `is` are no comparisons here", "Valid: == != < <= > >=")
        terms = [self.term(node) for node in nodes]
        pairs = [
            (left, COMPARISONS[type(op)], isinstance(op, ast.Eq | ast.NotEq), right)
            for left, op, right in zip(terms, ops, terms[1:], strict=False)
        ]

        def holds(look: Look) -> bool:
            for left, compare, any_kind, right in pairs:
                a, b = left(look), right(look)
                if not compare(a, b) if any_kind else not compare(_number(a), _number(b)):
                    return False
            return True

        return holds

    def term(self, node: ast.expr) -> Term:
        """Compiles a node with a value of any type."""
        match node:
            case ast.Constant(value) if isinstance(value, int | float | str):
                if not isinstance(value, str) and not math.isfinite(value):
                    self.refuse("a number must be finite", "Write a plain number")
                return lambda look: value
            case ast.Name(name) if name in WORDS:
                return lambda look: WORDS[name]
            case ast.Name(name):
                dotted = name.replace(DOT, ".")
                self.names.append(dotted)
                return lambda look: look(dotted)
            case ast.UnaryOp(ast.USub(), operand):
                inner = self.term(operand)
                return lambda look: -_number(inner(look))
            case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
                a, b, compute = self.term(left), self.term(right), ARITHMETIC[type(op)]
                return lambda look: compute(_number(a(look)), _number(b(look)))
            case ast.BinOp(_, ast.Div(), _):
                self.refuse("/ is no operator here", "Write // for whole parts, or multiply the other side")
        remedy = "Valid: numbers, names with dots, + - * // % **, comparisons, and or not, parentheses"
        self.refuse("only plain arithmetic and comparisons are understood", remedy)


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no number. Only == and != compare words, true, false and null")
    return value


def _truth(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, neither true nor false. Compare it with something")
    return value


def _power(base: Any, exponent: Any) -> Any:
    if base < 0 and exponent != int(exponent):
        raise ValueError("a root of a negative number. Correct the exponent")
    if abs(exponent) * math.log2(abs(base) + 2) > MAX_BITS:
        raise ValueError(f"a power of more than {MAX_BITS:,} bits. Write a smaller exponent")
    return base**exponent
