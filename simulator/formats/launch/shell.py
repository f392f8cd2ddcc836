"""Reads the arguments of a training program out of a shell script: variables, arrays, conditions, the last command.

Supported is what launch scripts are made of: assignments, ``${NAME:-default}``, arithmetic ``$(( ))``, arrays with
``+=``, ``if`` with tests of strings and numbers, and ``#SBATCH`` lines. Nothing is executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.launch.table import Stated

LONGEST = 1_000_000
"""Letters of the longest variable: scripts may double one again and again."""


@dataclass(frozen=True)
class Word:
    """A word of a command. quoted: it is not divided at spaces when a variable in it is expanded."""

    text: str
    line: int
    quoted: bool = False
    literal: bool = False


_PIECE = re.compile(
    r"""(?P<single>'[^']*') | (?P<double>"(?:\\.|\$\(\(.*?\)\)|\$\([^)]*\)|[^"\\])*")
      | (?P<math>\$\(\(.*?\)\)) | (?P<command>\$\([^)]*\)|`[^`]*`) | (?P<braces>\$\{[^}]*(?:\{[^}]*\}[^}]*)*\})
      | (?P<escaped>\\.) | (?P<comment>(?:(?<=[\s;(])|^)\#[^\n]*) | (?P<array>(?<==)\()
      | (?P<end>\n|;;|;|&&|\|\||\||&|\(|\))
      | (?P<space>[ \t\r]+) | (?P<plain>[^\s'"$`\\;|&()]+|\$[A-Za-z_0-9@*#?]*|.)""",
    re.VERBOSE | re.DOTALL,
)

_VARIABLE = re.compile(
    r"\$\{(?P<name>\w+)(?:\[[@*]\])?(?:(?P<sign>:?[-=])(?P<default>(?:[^{}]|\{[^{}]*\})*))?\}"
    r"|\$(?P<plain>[A-Za-z_]\w*)"
)
"""A variable, an array, or a variable with its default."""

_MATH = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

_TESTS = {
    "==": operator.eq,
    "=": operator.eq,
    "!=": operator.ne,
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


def split_statements(text: str) -> Iterator[list[Word | str]]:
    """Yields the statements of a script, each a list of words; arrays have the marks "(" and ")" around their words."""
    text = re.sub(r"\\\r?\n", lambda found: " \x00 ", text)  # a joined line; \x00 counts it
    splitter = _Splitter()
    for piece in _PIECE.finditer(text):
        kind, written = piece.lastgroup or "plain", piece[0]
        if kind in ("space", "comment") or written == "\x00":
            splitter.end_word()
        elif kind == "array":
            splitter.open_array()
        elif kind != "end":
            splitter.add_to_word(kind, written)
        elif statement := splitter.end_statement(written):
            yield statement
        splitter.line += written.count("\n") + written.count("\x00")
    splitter.end_word()
    if splitter.statement:
        yield splitter.statement


class _Splitter:
    """A script while it is split: the words of a statement, and the text of a word.

    word: None between words.
    begin: the line on which the word begins.
    depth: arrays around it.
    """

    def __init__(self) -> None:
        self.statement: list[Word | str] = []
        self.word: str | None = None
        self.quoted, self.literal, self.depth = False, True, 0
        self.line = self.begin = 1

    def add_to_word(self, kind: str, written: str) -> None:
        if self.word is None:
            self.word, self.begin = "", self.line
        if kind == "single":
            self.word, self.quoted = self.word + written[1:-1], True
        elif kind == "double":
            self.word, self.quoted, self.literal = self.word + written[1:-1].replace('\\"', '"'), True, False
        else:
            self.word, self.literal = self.word + (written[1:] if kind == "escaped" else written), False

    def end_word(self) -> None:
        if self.word is not None:
            self.statement.append(Word(self.word, self.begin, self.quoted, self.literal and self.quoted))
        self.word, self.quoted, self.literal = None, False, True

    def open_array(self) -> None:
        self.end_word()
        self.statement.append("(")
        self.depth += 1

    def end_statement(self, sign: str) -> list[Word | str]:
        """Returns the statement that a sign ends, if any; inside an array it ends a word or the array."""
        self.end_word()
        if self.depth:
            if sign == ")":
                self.statement.append(")")
                self.depth -= 1
            return []
        statement, self.statement = self.statement, [sign] if sign in ("&&", "||") else []
        return statement


@dataclass
class _Condition:
    """An `if` while it is read.

    reads: whether the statements of this branch are read.
    taken: whether those of a branch were.
    testing: whether its test may go on.
    """

    reads: bool
    taken: bool
    testing: bool = True


@dataclass
class Script:
    """A script while it is read: its variables, and the words of every command that starts a program."""

    where: str = "script"
    variables: dict[str, list[Word]] = field(default_factory=dict)
    commands: list[list[Word]] = field(default_factory=list)

    def read(self, text: str) -> None:
        """Reads all statements; those under a condition that does not hold are left out."""
        conditions: list[_Condition] = []
        for statement in split_statements(text):
            words, sign = [word for word in statement if word not in ("&&", "||")], statement[0]
            if sign in ("&&", "||") and conditions and conditions[-1].testing:
                held, holds = conditions[-1].reads, self._holds(words)
                conditions[-1].reads = conditions[-1].taken = (held and holds) if sign == "&&" else (held or holds)
                continue
            if _keyword(words) == "then" and conditions:
                conditions[-1].testing = False
            self._read_statement(words[1:] if _keyword(words) in ("then", "do", "{") else words, conditions)

    def _read_statement(self, words: list[Word | str], conditions: list[_Condition]) -> None:
        keyword, rest = _keyword(words), words[1:]
        if keyword == "if":
            holds = self._holds(rest)
            conditions.append(_Condition(holds, holds))
        elif keyword == "elif" and conditions:
            taken = conditions[-1].taken
            holds = not taken and self._holds(rest)
            conditions[-1] = _Condition(holds, taken or holds)
        elif keyword == "else" and conditions:
            conditions[-1] = _Condition(not conditions[-1].taken, True, False)
            if rest and conditions[-1].reads:
                self._run(rest)
        elif keyword == "fi":
            del conditions[-1:]
        elif words and all(condition.reads for condition in conditions):
            self._run(words)

    def _run(self, words: list[Word | str]) -> None:
        """Keeps assignments, and commands with their variables expanded."""
        while (
            words and isinstance(words[0], Word) and words[0].text in ("export", "local", "declare", "readonly", "-a")
        ):
            words = words[1:]
        if not words or not isinstance(words[0], Word):
            return
        given = re.match(r"([A-Za-z_]\w*)(\+?=)(.*)", words[0].text, re.DOTALL)
        if given is None:
            self.commands.append([one for word in words if isinstance(word, Word) for one in self.expand(word)])
            return
        name, sign, rest = given.groups()
        if len(words) > 1 and words[1] == "(":
            value = [one for word in words[2:] if isinstance(word, Word) for one in self.expand(word)]
        else:
            whole = Word(rest, words[0].line, True, words[0].literal)
            value = self.expand(whole)
        value = [*self.variables.get(name, []), *value] if sign == "+=" else value
        if sum(len(one.text) for one in value) > LONGEST:
            rule = f"the variable {name} grows beyond {LONGEST:,} letters"
            raise PlanError(f"{self.where}:{words[0].line}", rule, "Write out the arguments of the program")
        self.variables[name] = value
        if len(words) > 1 and words[1] != "(":  # NAME=value in front of a command
            self._run(words[1:])

    def expand(self, word: Word) -> list[Word]:
        """The words that a word stands for, with variables and arithmetic replaced."""
        if word.literal:
            return [word]
        if word.text in ("$@", "${@}", "$*", "${*}"):  # arguments of the script, of which nothing is known
            return []
        whole = re.fullmatch(r"\$\{?(\w+)(?:\[[@*]\])?\}?", word.text)
        if whole and whole[1] in self.variables:  # an array, or a variable alone: its words keep their lines
            return [
                part for one in self.variables[whole[1]] for part in _divide(one, word.quoted and "[" not in word.text)
            ]
        text = self.replace(word.text)
        return [Word(text, word.line, True)] if word.quoted else [Word(part, word.line) for part in text.split()]

    def replace(self, text: str) -> str:
        """A text with variables and arithmetic replaced; what is not known stays as it is written."""
        text = re.sub(r"\$\(\((.*?)\)\)", lambda found: _calculate(self._replace_names(found[1]), found[0]), text)

        def value(found: re.Match[str]) -> str:
            name, _, default = (found["name"] or found["plain"]), found["sign"], found["default"]
            if name in self.variables:
                return " ".join(one.text for one in self.variables[name])
            return self.replace(default.strip("\"'")) if default is not None else found[0]

        return _VARIABLE.sub(value, text)

    def _replace_names(self, text: str) -> str:
        """A formula with variables replaced, which need no $ there."""
        pattern = r"(?<![$\w{])[A-Za-z_]\w*"
        return self.replace(re.sub(pattern, lambda found: f"${{{found[0]}}}", text))

    def _holds(self, words: list[Word | str]) -> bool:
        """Whether a test such as ``[ "$X" = fp8 ]`` or ``[[ -n $X ]]`` holds; other commands: no."""
        parts = [self.replace(word.text) for word in words if isinstance(word, Word)]
        parts = [re.sub(r"^\$\{?\w+\}?$", "", one) for one in parts]  # a variable that nothing sets is empty
        negated = "!" in parts
        parts = [one for one in parts if one not in ("[", "]", "[[", "]]", "test", "!")]
        found = False
        if len(parts) == 2 and parts[0] in ("-n", "-z"):
            found = bool(parts[1]) == (parts[0] == "-n")
        elif len(parts) == 3 and parts[1] in _TESTS:
            numbers = all(re.fullmatch(r"-?\d+", one) for one in (parts[0], parts[2]))
            left, right = (int(one) if numbers else one for one in (parts[0], parts[2]))
            try:
                found = bool(_TESTS[parts[1]](left, right))
            except TypeError:
                found = False
        elif len(parts) == 1 and parts[0] in ("true", "1"):
            found = True
        return found != negated


def _keyword(words: list[Word | str]) -> str:
    """Returns the first word of a statement; "" if there is none."""
    return words[0].text if words and isinstance(words[0], Word) else ""


def _divide(word: Word, whole: bool) -> list[Word]:
    """A word of a variable, divided at its spaces unless it is one text (`whole`)."""
    if whole or not re.search(r"\s", word.text):
        return [word] if word.text else []
    return [
        Word(part, word.line + row)
        for row, line in enumerate(re.split(r"[\n\x00]", word.text))
        for part in line.split()
        if part
    ]


def _calculate(text: str, unknown: str) -> str:
    """The value of whole-number arithmetic; `unknown` if it holds anything else."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _MATH:
            return int(_MATH[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError(text)

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return unknown


def read_variable(text: str, where: str, name: str) -> Stated | None:
    """A variable that a script sets; None if it does not, or to what is not known."""
    script = Script(where)
    script.read(text)
    words = script.variables.get(name, [])
    if len(words) != 1 or "$" in words[0].text:
        return None
    return Stated(words[0].text, name, f"{where}:{words[0].line}")


def read_arguments(text: str, where: str) -> dict[str, Stated]:
    """The arguments of the training program in a script, by their names with ``_`` for ``-``.

    Of several commands the one with most arguments counts; a text without a command is a list of arguments. Variables
    of the resource manager (``#SBATCH --nodes``) are arguments of the launcher, too.
    """
    script = Script(where)
    script.read(text)
    if all(one[0].text.startswith("--") for one in script.commands if one):  # a list of arguments
        script.commands = [[word for one in script.commands for word in one]]
    words = max(script.commands, key=lambda one: sum(word.text.startswith("--") for word in one), default=[])
    if not any(word.text.startswith("--") for word in words):  # arguments in arrays that no command here uses
        words = [word for value in script.variables.values() for one in value for word in _divide(one, False)]
    found: dict[str, Stated] = {}
    for number, line in enumerate(text.splitlines(), 1):
        for name, value in re.findall(r"^#SBATCH\s+--([\w-]+)[= ](\S+)", line):
            found[f"sbatch_{name.replace('-', '_')}"] = Stated(value, f"#SBATCH --{name}", f"{where}:{number}")
    name = ""
    values: dict[str, list[str]] = {}
    for word in [part for one in words for part in (_divide(one, not one.text.startswith("--")))]:
        flag = re.match(r"--([A-Za-z][\w.-]*)(?:=(.*))?$", word.text, re.DOTALL)
        if flag:
            name = flag[1].replace("-", "_")
            values[name] = [flag[2]] if flag[2] is not None else []
            found[name] = Stated(True, f"--{flag[1]}", f"{where}:{word.line}")
        elif word.text.endswith(".py"):  # the program: what follows are its arguments, not values of the launcher's
            name = ""
        elif name:
            values[name].append(word.text)
        if name:
            given = values[name]
            value = True if not given else given[0] if len(given) == 1 else list(given)
            found[name] = Stated(value, found[name].shown, found[name].place)
    return found
