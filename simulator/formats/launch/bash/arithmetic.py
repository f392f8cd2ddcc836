"""Arithmetic of bash on whole numbers: ``$(( ))``, ``(( ))``, ``let``, and indices of arrays."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(?:(?P<number>0[xX][0-9a-fA-F]+|\d+#\w+|\d+)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>\*\*|<<=|>>=|\+\+|--|&&|\|\||<<|>>|[<>=!+\-*/%&|^]=|[-+*/%<>=!~&|^?:(),\[\]]))"
)

LONGEST_NUMBER = 64
"""Bits of bash's numbers; what is beyond is not computed."""

DEEPEST = 100
"""Brackets, signs, assignments and exponents inside of each other."""


def _divide(left: int, right: int) -> int:
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _power(left: int, right: int) -> int:
    if right < 0 or right > LONGEST_NUMBER:
        raise ArithmeticError("exponent")
    return int(left**right)


def _shift(left: int, right: int) -> int:
    if not 0 <= right < LONGEST_NUMBER:
        raise ArithmeticError("shift")
    return left << right


BINARY: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "||": (1, lambda left, right: int(bool(left or right))),
    "&&": (2, lambda left, right: int(bool(left and right))),
    "|": (3, operator.or_),
    "^": (4, operator.xor),
    "&": (5, operator.and_),
    "==": (6, lambda left, right: int(left == right)),
    "!=": (6, lambda left, right: int(left != right)),
    "<": (7, lambda left, right: int(left < right)),
    ">": (7, lambda left, right: int(left > right)),
    "<=": (7, lambda left, right: int(left <= right)),
    ">=": (7, lambda left, right: int(left >= right)),
    "<<": (8, _shift),
    ">>": (8, lambda left, right: left >> min(max(right, 0), LONGEST_NUMBER)),
    "+": (9, operator.add),
    "-": (9, operator.sub),
    "*": (10, operator.mul),
    "/": (10, _divide),
    "%": (10, lambda left, right: left - right * _divide(left, right)),
    "**": (12, _power),
}
"""Operators with how strongly they bind, and what they compute."""

UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "!": lambda value: int(not value),
    "~": operator.invert,
}

TIGHTER_THAN_UNARY = 11


class Formula:
    """A formula while it is computed.

    read: returns the number that a variable holds; raises ArithmeticError if it holds none.
    write: sets a variable; None where a formula may set none.
    """

    def __init__(self, text: str, read: Callable[[str], int], write: Callable[[str, int], object]) -> None:
        self.tokens = _split_tokens(text)
        self.position, self.depth, self.skipping = 0, 0, 0
        self.read, self.write = read, write

    def compute(self) -> int:
        """Returns the value. Raises ArithmeticError for what is no formula of known whole numbers."""
        value = self._comma() if self.tokens else 0
        if self.position < len(self.tokens):
            raise ArithmeticError(self.tokens[self.position])
        return value

    def _next(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _take(self, *signs: str) -> str:
        token = self._next()
        if token not in signs:
            return ""
        self.position += 1
        return token

    def _demand(self, sign: str) -> None:
        if not self._take(sign):
            raise ArithmeticError(sign)

    def _comma(self) -> int:
        value = self._assignment()
        while self._take(","):
            value = self._assignment()
        return value

    def _deepen(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ArithmeticError("depth")

    def _assignment(self) -> int:
        self._deepen()
        after = self.tokens[self.position + 1] if self.position + 1 < len(self.tokens) else ""
        name = self._next()
        if re.match(r"[A-Za-z_]", name) and after.endswith("=") and after not in ("==", "!=", "<=", ">="):
            self.position += 2
            value = self._assignment()
            if after != "=":
                value = BINARY[after[:-1]][1](self._read(name), value)
            self._write(name, value)
        else:
            value = self._ternary()
        self.depth -= 1
        return value

    def _ternary(self) -> int:
        condition = self._binary(1)
        if not self._take("?"):
            return condition
        self.skipping += not condition
        left = self._assignment()
        self.skipping -= not condition
        self._demand(":")
        self.skipping += bool(condition)
        right = self._assignment()
        self.skipping -= bool(condition)
        return left if condition else right

    def _binary(self, weakest: int) -> int:
        left = self._unary()
        while (sign := self._next()) in BINARY and BINARY[sign][0] >= weakest:
            self.position += 1
            strength, compute = BINARY[sign]
            unneeded = (sign == "&&" and not left) or (sign == "||" and bool(left))
            self.skipping += unneeded
            self._deepen()
            right = self._binary(strength if sign == "**" else strength + 1)
            self.depth -= 1
            self.skipping -= unneeded
            left = 0 if self.skipping else _limit(compute(left, right))
        return left

    def _unary(self) -> int:
        self._deepen()
        if sign := self._take("++", "--"):
            name = self._next()
            self.position += 1
            value = self._read(name) + (1 if sign == "++" else -1)
            self._write(name, value)
        elif sign := self._take(*UNARY):
            value = UNARY[sign](self._binary(TIGHTER_THAN_UNARY))
        else:
            value = self._operand()
        self.depth -= 1
        return value

    def _operand(self) -> int:
        token = self._next()
        self.position += 1
        if token == "(":
            value = self._comma()
            self._demand(")")
        elif token[:1].isdigit():
            value = read_whole_number(token)
        elif re.match(r"[A-Za-z_]", token):
            value = self._read(token)
            if sign := self._take("++", "--"):
                self._write(token, value + (1 if sign == "++" else -1))
        else:
            raise ArithmeticError(token)
        return _limit(value)

    def _read(self, name: str) -> int:
        return 0 if self.skipping else self.read(name)

    def _write(self, name: str, value: int) -> None:
        if not self.skipping:
            self.write(name, _limit(value))


def _split_tokens(text: str) -> list[str]:
    tokens, position = [], 0
    text = text.strip()
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise ArithmeticError(text[position])
        tokens.append(token[token.lastgroup or 0])
        position = token.end()
    return tokens


def _limit(value: int) -> int:
    if value.bit_length() >= LONGEST_NUMBER:
        raise ArithmeticError("too large")
    return value


def read_decimal_number(text: str) -> int:
    """Returns a number as ``[`` reads it: ``010`` is ten. Raises ArithmeticError for anything else."""
    if not re.fullmatch(r"[-+]?[0-9]{1,19}", text):
        raise ArithmeticError(text)
    return _limit(int(text))


def read_whole_number(text: str) -> int:
    """Returns a whole number as bash writes it: ``8``, ``-8``, ``0x1F``, ``010`` (eight), ``2#101``.

    Raises ArithmeticError for anything else, or more than `LONGEST_NUMBER` bits.
    """
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    if len(digits) > LONGEST_NUMBER:
        raise ArithmeticError(text)
    base, mark, rest = digits.partition("#")
    try:
        if mark:
            number = int(rest, int(base))
        elif digits[:2] in ("0x", "0X"):
            number = int(digits, 16)
        elif not digits.isdecimal() or not digits.isascii():
            raise ArithmeticError(text)
        else:
            number = int(digits, 8 if digits.startswith("0") else 10)
    except ValueError as error:
        raise ArithmeticError(text) from error
    return _limit(sign * number)
