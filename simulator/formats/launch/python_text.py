"""What a Python file of settings builds, read from its text: nothing of it is run.

Assignments, attributes, calls with constants, functions of the same file, and branches whose condition is known are
followed. Every other value is `OpenValue`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass

Value = Any
"""What an expression is worth: of Python, or `OpenValue`, `Built` or `Named`."""

STEPS = 20_000
"""Statements and expressions of a file that are followed at most."""

DEPTH = 40
"""Calls inside each other that are followed at most."""


@dataclass(frozen=True)
class OpenValue:
    """A value that the text does not tell. text: the expression."""

    text: str


@dataclass
class Built:
    """What a call builds.

    name: dotted name of what is called, as the imports spell it.
    line: of the call.
    arguments: without a name.
    fields: arguments with a name, and attributes that are set later.
    lines: of the fields.
    """

    name: str
    line: int
    arguments: list[Value] = field(default_factory=list)
    fields: dict[str, Value] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    @property
    def last_name(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    def set_field(self, name: str, value: Value, line: int) -> None:
        """Sets an attribute."""
        self.fields[name] = value
        self.lines[name] = line

    def walk(self, prefix: str = "") -> Iterator[tuple[str, Value, int]]:
        """Yields all values below it: dotted name, value and line."""
        for name, value in self.fields.items():
            if isinstance(value, Built) and (value.fields or not value.line):
                if prefix.count(".") < DEPTH:
                    yield from value.walk(f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value, self.lines.get(name, self.line)

    def list_parts(self, depth: int = DEPTH) -> Iterator[Built]:
        """Yields it, and what is built in its fields. depth: fields inside each other at most."""
        yield self
        for value in self.fields.values() if depth else ():
            if isinstance(value, Built):
                yield from value.list_parts(depth - 1)


@dataclass(frozen=True)
class Named:
    """A name of another module. name: dotted, as imports spell it."""

    name: str


class _Return(Exception):
    def __init__(self, value: Value) -> None:
        self.value = value


class _LeaveRound(_Return):
    """A round of a loop ends; outside of a loop, which is no Python, the function. is_last: whether the loop ends."""

    def __init__(self, is_last: bool) -> None:
        super().__init__(None)
        self.is_last = is_last


PARSED = "parse_args"
"""Name of the arguments of a command line (``argparse``)."""

HARMLESS = re.compile(
    r"^(pretrain|finetune|train|run|main|add|Partial|Config|Experiment|setup|validate|deepcopy|copy|str|repr|len|isinstance|print\w*"
    r"|info|debug|warning|\w*save\w*|\w*dump\w*|\w*omegaconf\w*|\w*override\w*|\w*log\w*|\w*yaml\w*|\w*executor\w*"
    r"|submit\w*|launch\w*|append|partial|\w*_cli\w*|cli|\w*checkpoint\w*)$",
    re.IGNORECASE,
)
"""Names of functions that start a run, print or save their arguments, or read overrides of the command line."""

WRAPPERS = ("Config", "Partial", "partial", "ConfigContainer")
"""Calls of ``nemo_run`` and ``functools`` whose first argument is what is configured."""

OPERATORS: Mapping[type, Callable[[Value, Value], Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: (str(item) if isinstance(items, dict) else item) in items,
    ast.NotIn: lambda item, items: (str(item) if isinstance(items, dict) else item) not in items,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}

LONGEST = 100_000
"""Texts and lists that are longer are open."""


class PythonText:
    """The text of a Python file, followed statement by statement.

    names: values of the names of the module.
    calls: everything that was built by a call, in order.
    """

    def __init__(
        self,
        text: str,
        where: str,
        names: Mapping[str, Value] | None = None,
        options: Mapping[str, Value] | None = None,
    ) -> None:
        """text, where: content and name of the file.

        names: values that names have from the start.
        options: of the command line, for ``argparse``.
        """
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            place = f"{where}:{line}" if line else where
            raise PlanError(place, "it is no valid Python", "Correct this line of the file") from None
        self.names: dict[str, Value] = dict(names or {})
        self.calls: list[Built] = []
        self._known = frozenset(self.names)
        self._options = dict(options or {})
        self._steps = 0
        self._depth = 0

    def follow(self) -> None:
        """Follows the statements of the module, and what it does when it is started. An error that it raises is that
        of a check of what surrounds it, such as a variable of the environment, which its user sets."""
        self.names["__name__"] = "__main__"
        for statement in self.tree.body:
            with suppress(_Return, RecursionError):
                self._run([statement], self.names)

    def call_functions(self) -> None:
        """Follows the functions that calls take, such as the factory of a recipe; without any, all functions of
        the module that need no arguments."""
        taken = [
            value
            for call in self.calls
            for value in (*call.arguments, *call.fields.values())
            if isinstance(value, ast.FunctionDef)
        ]
        functions = taken or [value for value in self.names.values() if isinstance(value, ast.FunctionDef)]
        for function in functions:
            if len(function.args.args) == len(function.args.defaults) and function.name != "main":
                with suppress(RecursionError):
                    self._call_function(function, [], {})

    def call(self, function: ast.FunctionDef) -> Value:
        """Returns what a function of the module returns without arguments."""
        with suppress(RecursionError):
            return self._call_function(function, [], {})
        return OpenValue(function.name)

    def find_changes(self, built: Built) -> list[Built]:
        """Returns the calls of other modules that take what `built` is, or a part of it, and may change it."""
        parts = {id(part) for part in built.list_parts()}
        return [
            call
            for call in self.calls
            if any(id(value) in parts for value in (*call.arguments, *call.fields.values()))
            and id(call) not in parts
            and not HARMLESS.search(call.last_name)
        ]

    # ------------------------------------------------------------------------------------- statements

    def _run(self, body: Sequence[ast.stmt], scope: dict[str, Value]) -> None:
        for statement in body:
            self._steps += 1
            if self._steps > STEPS:
                return
            self._run_statement(statement, scope)

    def _run_statement(self, node: ast.stmt, scope: dict[str, Value]) -> None:
        match node:
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                self._import(node, names, scope)
            case ast.FunctionDef(name=name):
                scope[name] = node
            case ast.ClassDef(name=name):
                scope[name] = Named(name)
            case ast.Assign(targets=targets, value=value):
                result = self.evaluate(value, scope)
                for target in targets:
                    self._assign(target, result, scope)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._assign(target, self.evaluate(value, scope), scope)
            case ast.AugAssign(target=target, op=op, value=value):
                before = self.evaluate(ast.BinOp(target, op, value), scope)
                self._assign(target, before, scope)
            case ast.Expr(value=value):
                self.evaluate(value, scope)
            case ast.Return(value=value):
                raise _Return(self.evaluate(value, scope) if value is not None else None)
            case ast.Break() | ast.Continue():
                raise _LeaveRound(isinstance(node, ast.Break))
            case ast.Raise():
                raise _Return(OpenValue(ast.unparse(node)))
            case _:
                self._run_compound(node, scope)

    def _run_compound(self, node: ast.stmt, scope: dict[str, Value]) -> None:
        match node:
            case ast.If():
                self._branch(node, scope)
            case ast.For():
                self._loop(node, scope)
            case ast.While(test=test):
                self._open_names(node.body, ast.unparse(test), scope)
            case ast.With(body=body):
                self._run(body, scope)
            case ast.Try(body=body, orelse=orelse, finalbody=final):
                self._run([*body, *orelse, *final], scope)

    def _import(self, node: ast.stmt, names: Sequence[ast.alias], scope: dict[str, Value]) -> None:
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
        for alias in names:
            bound = alias.asname or (alias.name if module else alias.name.partition(".")[0])
            if bound not in self._known:
                scope[bound] = Named(f"{module}{alias.name}" if alias.asname or module else bound)

    def _assign(self, target: ast.expr, value: Value, scope: dict[str, Value]) -> None:
        match target:
            case ast.Name(id=name):
                scope[name] = value
            case ast.Attribute(value=inner, attr=name):
                owner = self.evaluate(inner, scope)
                if not isinstance(owner, Built):
                    owner = Built("", 0)
                    self._assign(inner, owner, scope)
                owner.set_field(name, value, target.lineno)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                values = value if isinstance(value, list) and len(value) == len(elements) else None
                for index, element in enumerate(elements):
                    self._assign(element, OpenValue(ast.unparse(element)) if values is None else values[index], scope)
            case ast.Subscript(value=inner, slice=key):
                owner, name = self.evaluate(inner, scope), self.evaluate(key, scope)
                if isinstance(owner, dict) and not isinstance(name, OpenValue):
                    owner[str(name)] = value

    def _branch(self, node: ast.If, scope: dict[str, Value]) -> None:
        """Runs the branch that the condition chooses; where it is open, what either sets is open."""
        test = self.evaluate(node.test, scope)
        if not isinstance(test, OpenValue | Built | Named):
            self._run(node.body if test else node.orelse, scope)
            return
        self._open_names([*node.body, *node.orelse], ast.unparse(node.test), scope)

    def _open_names(self, body: Sequence[ast.stmt], test: str, scope: dict[str, Value]) -> None:
        """Leaves open what statements set which may be run, or run again, or not."""
        for inner in (inner for statement in body for inner in ast.walk(statement)):
            if isinstance(inner, ast.Assign | ast.AugAssign | ast.AnnAssign):
                for target in inner.targets if isinstance(inner, ast.Assign) else [inner.target]:
                    self._assign(target, OpenValue(f"{ast.unparse(target)} if {test}"), scope)

    def _loop(self, node: ast.For, scope: dict[str, Value]) -> None:
        items = self.evaluate(node.iter, scope)
        if not isinstance(items, list):
            self._open_names(node.body, ast.unparse(node.iter), scope)
            return
        for item in items:
            self._assign(node.target, item, scope)
            try:
                self._run(node.body, scope)
            except _LeaveRound as leaving:
                if leaving.is_last:
                    break

    # ------------------------------------------------------------------------------------ expressions

    def evaluate(self, node: ast.expr, scope: dict[str, Value]) -> Value:
        """Returns the value of an expression; `OpenValue` where the text does not tell it."""
        self._steps += 1
        if self._steps > STEPS:
            return OpenValue("...")
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return scope.get(name, self.names.get(name, Named(name)))
            case ast.Attribute(value=inner, attr=name):
                return self._get_attribute(self.evaluate(inner, scope), name, node)
            case ast.Call():
                return self._call(node, scope)
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                return [self.evaluate(element, scope) for element in elements]
            case ast.ListComp(elt=element, generators=[generator]) if not generator.ifs:
                return self._comprehend(element, generator, scope)
            case ast.Dict(keys=keys, values=values):
                pairs = ((key, value) for key, value in zip(keys, values, strict=True) if key is not None)
                return {str(self.evaluate(key, scope)): self.evaluate(value, scope) for key, value in pairs}
            case ast.IfExp(test=test, body=body, orelse=orelse):
                chosen = self.evaluate(test, scope)
                return (
                    OpenValue(ast.unparse(node))
                    if isinstance(chosen, OpenValue | Named)
                    else self.evaluate(body if chosen else orelse, scope)
                )
            case ast.JoinedStr():
                return self._join(node, scope)
            case _:
                return self._operate(node, scope)

    def _comprehend(self, element: ast.expr, generator: ast.comprehension, scope: dict[str, Value]) -> Value:
        items = self.evaluate(generator.iter, scope)
        if not isinstance(items, list):
            return OpenValue(ast.unparse(element))
        inner, values = dict(scope), []
        for item in items[:1000]:
            if self._steps > STEPS:
                return OpenValue(ast.unparse(element))
            self._assign(generator.target, item, inner)
            values.append(self.evaluate(element, inner))
        return values

    def _join(self, node: ast.JoinedStr, scope: dict[str, Value]) -> Value:
        parts = [
            self.evaluate(part.value if isinstance(part, ast.FormattedValue) else part, scope) for part in node.values
        ]
        plain = all(isinstance(part, str | int | float) and len(str(part)) < LONGEST // 100 for part in parts)
        return "".join(map(str, parts)) if plain else OpenValue(ast.unparse(node))

    def _operate(self, node: ast.expr, scope: dict[str, Value]) -> Value:
        """Returns the value of operators on known values."""
        opened = OpenValue(ast.unparse(node))
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                value = self.evaluate(operand, scope)
                return opened if isinstance(value, OpenValue | Named) else not value
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self.evaluate(operand, scope)
                return -value if isinstance(value, int | float) else opened
            case ast.BoolOp(op=op, values=values):
                return self._combine(isinstance(op, ast.And), values, scope, opened)
            case ast.BinOp(left=left, op=op, right=right):
                return self._apply(op, left, right, scope, opened)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._apply(op, left, right, scope, opened)
            case ast.Subscript(value=inner, slice=key):
                owner, name = self.evaluate(inner, scope), self.evaluate(key, scope)
                if isinstance(owner, dict) and not isinstance(name, OpenValue):
                    return owner.get(str(name), opened)
                if isinstance(owner, list) and isinstance(name, int) and -len(owner) <= name < len(owner):
                    return owner[name]
        return opened

    def _combine(self, every: bool, values: Sequence[ast.expr], scope: dict[str, Value], opened: OpenValue) -> Value:
        result: Value = opened
        for value in values:
            result = self.evaluate(value, scope)
            if isinstance(result, OpenValue) or bool(result) is not every:
                return result
        return result

    def _apply(self, op: ast.AST, left: ast.expr, right: ast.expr, scope: dict[str, Value], opened: OpenValue) -> Value:
        values = self.evaluate(left, scope), self.evaluate(right, scope)
        if isinstance(op, ast.Div) and isinstance(values[1], str):  # of a path, whose begin may be open
            return f"{values[0]}/{values[1]}" if isinstance(values[0], str) else values[1]
        if any(isinstance(value, OpenValue | Built | Named) for value in values) or type(op) not in OPERATORS:
            is_null = isinstance(op, ast.Is | ast.IsNot) and values[1] is None and isinstance(values[0], Built)
            return isinstance(op, ast.IsNot) if is_null else opened
        if _is_too_large(op, *values):
            return opened
        try:
            return OPERATORS[type(op)](*values)
        except (TypeError, ValueError, ZeroDivisionError, OverflowError):
            return opened

    def _get_attribute(self, owner: Value, name: str, node: ast.expr) -> Value:
        match owner:
            case Built() if owner.last_name == PARSED:
                return self._read_option(name, node)
            case Built():
                if name not in owner.fields and owner.name and not owner.name.islower():
                    owner.set_field(name, Built("", 0), node.lineno)
                return owner.fields.get(name, OpenValue(ast.unparse(node)))
            case Named(name=module):
                return Named(f"{module}.{name}")
            case _:
                return OpenValue(ast.unparse(node))

    def _read_option(self, name: str, node: ast.expr) -> Value:
        """Reads the value of an argument of the command line, or its default."""
        if name in self._options:
            return _parse_word(self._options[name])
        for call in self.calls:
            flags = [str(word).lstrip("-").replace("-", "_") for word in call.arguments]
            if call.last_name == "add_argument" and (name in flags or call.fields.get("dest") == name):
                usual = False if call.fields.get("action") == "store_true" else None
                return (
                    OpenValue(ast.unparse(node)) if call.fields.get("required") else call.fields.get("default", usual)
                )
        return OpenValue(ast.unparse(node))

    # ------------------------------------------------------------------------------------------ calls

    def _call(self, node: ast.Call, scope: dict[str, Value]) -> Value:
        arguments = [self.evaluate(word, scope) for word in node.args if not isinstance(word, ast.Starred)]
        named: dict[str, Value] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, scope)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, dict):
                named |= value
        if isinstance(node.func, ast.Attribute):
            owner = self.evaluate(node.func.value, scope)
            if isinstance(owner, Built | list | dict | str):
                return self._call_method(owner, node.func.attr, arguments, named, node)
        called = self.evaluate(node.func, scope)
        if isinstance(called, ast.FunctionDef):
            return self._call_function(called, arguments, named)
        if not isinstance(called, Named):
            return OpenValue(ast.unparse(node))
        return self._build(called.name, node, arguments, named)

    def _build(self, name: str, node: ast.Call, arguments: list[Value], named: dict[str, Value]) -> Value:
        """Returns what a call of another module builds."""
        if (value := _apply_builtin(name, arguments, named)) is not _NO_BUILTIN:
            return value
        if name.rpartition(".")[2] in WRAPPERS and arguments:
            inner, *arguments = arguments
            if isinstance(inner, ast.FunctionDef):
                return self._call_function(inner, arguments, named)
            name = inner.name if isinstance(inner, Named | Built) else name
        built = Built(name, node.lineno, arguments)
        for key, value in named.items():
            line = next((word.value.lineno for word in node.keywords if word.arg == key), node.lineno)
            built.set_field(key, value, line)
        self.calls.append(built)
        return built

    def _call_method(
        self, owner: Value, name: str, arguments: list[Value], named: dict[str, Value], node: ast.Call
    ) -> Value:
        match owner:
            case str() if name in ("lower", "upper", "strip") and not arguments:
                return getattr(owner, name)()
            case dict() if name == "get" and arguments:
                return owner.get(str(arguments[0]), arguments[1] if len(arguments) > 1 else None)
            case list() if name == "append" and arguments:
                owner.append(arguments[0])
                return None
            case list() if name == "extend" and arguments and isinstance(arguments[0], list):
                owner.extend(arguments[0][: max(0, LONGEST - len(owner))])
                return None
            case Built() if isinstance(owner.fields.get(name), ast.FunctionDef):
                return self._call_function(owner.fields[name], arguments, named)
            case Built() if name == "parse_known_args":
                return [Built(PARSED, node.lineno), []]
            case Built():
                built = Built(f"{owner.name}.{name}", node.lineno, [*owner.arguments, *arguments], {**named})
                built.lines = dict.fromkeys(named, node.lineno)
                self.calls.append(built)
                return built
        return OpenValue(ast.unparse(node))

    def _call_function(self, function: ast.FunctionDef, arguments: list[Value], named: Mapping[str, Value]) -> Value:
        """Returns the value that a function of the same file returns."""
        if self._depth >= DEPTH:
            return OpenValue(function.name)
        parameters = [*function.args.posonlyargs, *function.args.args]
        scope: dict[str, Value] = dict(self.names)
        defaults = function.args.defaults
        for parameter, default in zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True):
            scope[parameter.arg] = self.evaluate(default, self.names)
        for parameter, usual in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
            if usual is not None:
                scope[parameter.arg] = self.evaluate(usual, self.names)
        scope |= {parameter.arg: value for parameter, value in zip(parameters, arguments, strict=False)}
        scope |= named
        for parameter in parameters:
            scope.setdefault(parameter.arg, OpenValue(parameter.arg))
        if function.args.kwarg is not None:
            known = {parameter.arg for parameter in (*parameters, *function.args.kwonlyargs)}
            scope[function.args.kwarg.arg] = {key: value for key, value in named.items() if key not in known}
        self._depth += 1
        try:
            self._run(function.body, scope)
        except _Return as returned:
            return returned.value
        finally:
            self._depth -= 1
        return None


def _is_too_large(op: ast.AST, left: Value, right: Value) -> bool:
    """Returns whether an operator would make a text, a list or a number too large to follow."""
    sizes = [len(value) if isinstance(value, str | list) else 0 for value in (left, right)]
    numbers = [abs(value) for value in (left, right) if isinstance(value, int | float)]
    match op:
        case ast.Add():
            return sum(sizes) > LONGEST
        case ast.Mult():
            return max(sizes) * max(numbers, default=1) > LONGEST or max(numbers, default=0) > 10**18
        case ast.Pow():
            return len(numbers) < 2 or numbers[0] > 10**6 or numbers[1] > 60
        case ast.Mod():
            return isinstance(left, str)
    return False


_NO_BUILTIN = object()

PLAIN: Mapping[str, Callable[[Value], Value]] = {
    **{"int": int, "float": float, "str": str, "bool": bool, "len": len, "list": list, "tuple": list}
}
"""Functions of Python on a known value."""

TYPES: Mapping[str, type] = {"str": str, "int": int, "float": float, "list": list, "dict": dict, "bool": bool}


def _apply_builtin(name: str, arguments: list[Value], named: dict[str, Value]) -> Value:
    """Returns the value of a function of Python; `_NO_BUILTIN` if it is none, or if its arguments are open."""
    match name.removeprefix("typing."), arguments:
        case "dict", []:
            return named
        case "cast", [_, value]:
            return value
        case "getattr", [Built() as owner, str(field), *default] if field in owner.fields or default:
            return owner.fields.get(field, default[0] if default else None)
        case "isinstance", [value, Named(name=kind)] if kind in TYPES and not isinstance(value, OpenValue | Named):
            return isinstance(value, TYPES[kind])
        case word, [value] if word in PLAIN and not isinstance(value, OpenValue | Built | Named):
            try:
                return PLAIN[word](value)
            except (TypeError, ValueError, OverflowError):
                return OpenValue(f"{word}({value!r})")
    return _NO_BUILTIN


def _parse_word(word: Value) -> Value:
    """Returns a word of a command line as a number, if it is one."""
    try:
        return ast.literal_eval(word) if isinstance(word, str) else word
    except (ValueError, SyntaxError):
        return word
