"""torchtitan's configurations as Python functions, read as text: nothing of them runs.

Since February 2026 a run is a function of a ``config_registry.py`` that returns a ``Trainer.Config`` of dataclasses, or
changes one that another function returns (pytorch/torchtitan @b5bcd76c6, torchtitan/config/README.md). The functions
are assignments, calls and returns; a value that follows from anything else is unknown, and asked for where it decides.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from meshcast.simulator.formats.launch.programs.torchtitan_configs import STOCK_CONFIGS
from meshcast.simulator.formats.launch.table import Stated

ConfigValue = Any
"""What an expression of a configuration gives: a literal, a list, a `ConfigSection` or an `UnknownValue`."""

DEEPEST = 16
"""Functions that call each other."""

LONGEST = 1_000_000
"""Largest result of a product of numbers and lists, and largest number of evaluated expressions."""

OPERATORS: Mapping[type[ast.AST], Callable[[ConfigValue, ConfigValue], ConfigValue]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv, ast.Mod: operator.mod},
}

NUMBERS: Mapping[str, Callable[[ConfigValue], ConfigValue]] = {"int": int, "float": float, "str": str}

POLICIES = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget"}
"""Modes of activation checkpointing by their classes."""

FLAT = ("training.", "parallelism.", "compile.", "activation_checkpoint.")
"""Sections that have no sections inside."""

OF_MODEL = {"moe_comm_backend": "parallelism.expert_parallel_comm_backend"}
"""Arguments of ``model_registry`` that earlier releases have as settings."""


@dataclass(frozen=True)
class UnknownValue:
    """A value that does not follow from the text. text: the expression."""

    text: str


@dataclass
class ConfigSection:
    """A configuration while functions fill it.

    kind: the class or the function that made it, without its module and ``Config``.
    positional: its arguments without a name. fields: its values by name. lines: where they stand.
    """

    kind: str
    positional: list[ConfigValue] = field(default_factory=list)
    fields: dict[str, ConfigValue] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def copy(self) -> ConfigSection:
        """Returns the section with fields of its own, sections inside included."""
        inner = {
            name: value.copy() if isinstance(value, ConfigSection) else value for name, value in self.fields.items()
        }
        return ConfigSection(self.kind, list(self.positional), inner, dict(self.lines))


class ConfigModule:
    """The functions of a Python file that make configurations.

    text, where: the file. environment: variables that ``os.environ`` has.
    """

    def __init__(self, text: str, where: str, environment: Mapping[str, str]) -> None:
        self.where, self.environment = where, environment
        try:
            with warnings.catch_warnings(action="ignore"):  # on the syntax of the file
                tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            tree = ast.Module([], [])
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.imports = {
            name.asname or name.name: (node.module or "", name.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        self._constants: dict[str, ast.expr] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._constants |= _match_names(target, node.value)
        self._left = LONGEST
        self._calls: list[tuple[str, int]] = []

    @property
    def configs(self) -> list[str]:
        """Names of the functions that can be run: without arguments, whose names are not private."""
        return [
            name
            for name, node in self.functions.items()
            if not name.startswith("_") and not node.args.args and _returns_config(node)
        ]

    def settings_of(self, name: str, module: str) -> dict[str, Stated]:
        """Returns the settings of the configuration of a function by section and name.

        module: that of the models, where the file imports them relatively.
        """
        self._calls.clear()
        config = self._call_own(name, [], {}, 0)
        if not isinstance(config, ConfigSection):
            return {}
        settings = dict(flatten_config(config, self.where))
        for call, line in self._calls:
            settings[f"call.{call}"] = Stated(call, f"{call}()", f"{self.where}:{line}")
        origin = next((source for source, imported in self.imports.values() if imported == "model_registry"), "")
        model = origin.rpartition(".models.")[2].partition(".")[0] if ".models." in origin else module
        if model and "model.flavor" in settings:
            settings.setdefault("model.name", Stated(model, "model_registry", settings["model.flavor"].place))
        return settings

    # ------------------------------------------------------------------------------------------- functions

    def _call_own(
        self, name: str, positional: list[ConfigValue], named: dict[str, ConfigValue], depth: int
    ) -> ConfigValue:
        node = self.functions[name]
        if depth > DEEPEST:
            return UnknownValue(f"{name}()")
        usual = zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)
        pairs = [*usual, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
        values = {argument.arg: self._constant(value) for argument, value in pairs if value is not None}
        values |= dict(zip((argument.arg for argument in node.args.args), positional, strict=False)) | named
        before = len(self._calls)
        config = self._run(node.body, values, depth)
        if not (isinstance(config, ConfigSection) and config.kind.endswith("Trainer")):
            del self._calls[before:]
        return config

    def _constant(self, node: ast.expr) -> ConfigValue:
        return self._value(node, {}, 0)

    def _run(self, body: list[ast.stmt], values: dict[str, ConfigValue], depth: int) -> ConfigValue:
        """Returns what statements return; None if they return nothing."""
        for node in body:
            match node:
                case ast.Return(value=ast.expr() as value):
                    return self._value(value, values, depth)
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self._assign(target, self._value(value, values, depth), values, depth)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._assign(target, self._value(value, values, depth), values, depth)
                case ast.AugAssign(target=target, op=kind, value=value):
                    both = ast.copy_location(ast.BinOp(_as_read(target), kind, value), node)
                    self._assign(target, self._value(both, values, depth), values, depth)
                case ast.If(test=test, body=then, orelse=other):
                    chosen = self._value(test, values, depth)
                    if isinstance(chosen, UnknownValue):
                        self._calls.append((f"if {chosen.text}", node.lineno))
                    elif (config := self._run(then if chosen else other, values, depth)) is not None:
                        return config
                case ast.Expr(value=ast.Call() as call):
                    self._calls.append((ast.unparse(call.func), node.lineno))
                case ast.For() | ast.While() | ast.With() | ast.Try():
                    self._calls.append((type(node).__name__.lower(), node.lineno))
        return None

    def _assign(self, target: ast.expr, value: ConfigValue, values: dict[str, ConfigValue], depth: int) -> None:
        match target:
            case ast.Name(id=name):
                values[name] = value
            case ast.Tuple(elts=targets) if isinstance(value, list) and len(value) == len(targets):
                for part, inner in zip(targets, value, strict=True):
                    self._assign(part, inner, values, depth)
            case ast.Attribute(value=inner, attr=name):
                section = self._value(inner, values, depth)
                if isinstance(section, ConfigSection):
                    section.fields[name], section.lines[name] = value, target.lineno

    # ----------------------------------------------------------------------------------------- expressions

    def _value(self, node: ast.expr, values: dict[str, ConfigValue], depth: int) -> ConfigValue:
        """Returns the value of an expression; UnknownValue if it does not follow from the text."""
        self._left -= 1
        if self._left < 0:
            return UnknownValue("...")
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self._value(part, values, depth) for part in parts]
            case ast.Name(id=name):
                return self._name(name, values, depth)
            case ast.Attribute(value=inner, attr=name):
                return self._attribute(node, self._value(inner, values, depth), name)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                number = self._value(inner, values, depth)
                return -number if isinstance(number, int | float) else UnknownValue(ast.unparse(node))
            case ast.BinOp(left=left, op=kind, right=right):
                return self._operate(node, kind, self._value(left, values, depth), self._value(right, values, depth))
            case ast.BoolOp(op=kind, values=parts):
                words = [self._value(part, values, depth) for part in parts]
                known = not any(isinstance(word, UnknownValue) for word in words)
                return (all(words) if isinstance(kind, ast.And) else any(words)) if known else UnknownValue("...")
            case ast.Call():
                return self._call(node, values, depth)
        return UnknownValue(ast.unparse(node))

    def _name(self, name: str, values: dict[str, ConfigValue], depth: int) -> ConfigValue:
        if name in values:
            return values[name]
        if name in self._constants and depth <= DEEPEST:
            return self._value(self._constants[name], {}, depth + 1)
        return UnknownValue(name)

    @staticmethod
    def _attribute(node: ast.expr, section: ConfigValue, name: str) -> ConfigValue:
        if not isinstance(section, ConfigSection):
            return UnknownValue(ast.unparse(node))
        if name not in section.fields and section.kind in ("Trainer", "FaultTolerantTrainer"):
            section.fields[name] = ConfigSection(name)
        return section.fields.get(name, UnknownValue(ast.unparse(node)))

    @staticmethod
    def _operate(node: ast.expr, kind: ast.operator, left: ConfigValue, right: ConfigValue) -> ConfigValue:
        method = OPERATORS.get(type(kind))
        numbers = all(isinstance(number, int | float) and abs(number) < LONGEST**2 for number in (left, right))
        lists = isinstance(kind, ast.Add) and isinstance(left, list) and isinstance(right, list)
        if (
            method is None
            or not (numbers or lists)
            or (right == 0 and not isinstance(kind, ast.Add | ast.Sub | ast.Mult))
        ):
            return UnknownValue(ast.unparse(node))
        return method(left, right)

    def _call(self, node: ast.Call, values: dict[str, ConfigValue], depth: int) -> ConfigValue:
        """Returns what a call makes: that of a function of the file, a stock configuration, or a section."""
        name = ast.unparse(node.func)
        positional = [self._value(part, values, depth) for part in node.args if not isinstance(part, ast.Starred)]
        named = {word.arg: self._value(word.value, values, depth) for word in node.keywords if word.arg is not None}
        lines = {word.arg: word.value.lineno for word in node.keywords if word.arg is not None}
        if name in self.functions:
            return self._call_own(name, positional, named, depth + 1)
        last = self.imports.get(name, ("", name.rpartition(".")[2]))[1]
        if last in STOCK_CONFIGS and not positional and not named:
            return make_section(STOCK_CONFIGS[last])
        if last in ("replace", "deepcopy") and positional and isinstance(positional[0], ConfigSection):
            changed = positional[0].copy()
            changed.fields |= named
            changed.lines |= lines
            return changed
        if name in ("os.environ.get", "os.getenv") and positional:
            return self.environment.get(str(positional[0]), positional[1] if len(positional) > 1 else None)
        if name in NUMBERS and len(positional) == 1:
            return _convert(NUMBERS[name], positional[0], ast.unparse(node))
        return ConfigSection(_kind_of(name), positional, named, lines)


def _convert(kind: Callable[[ConfigValue], ConfigValue], value: ConfigValue, text: str) -> ConfigValue:
    """The number or the text of a literal. text: of the expression."""
    if isinstance(value, str | int | float):
        with suppress(ValueError, OverflowError):
            return kind(value)
    return UnknownValue(text)


def _match_names(target: ast.expr, value: ast.expr) -> dict[str, ast.expr]:
    """The names that an assignment at the top of a file sets, with their expressions."""
    if isinstance(target, ast.Name):
        return {target.id: value}
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = zip(target.elts, value.elts, strict=False)
        return {name: inner for part, expression in pairs for name, inner in _match_names(part, expression).items()}
    return {}


def _as_read(target: ast.expr) -> ast.expr:
    """The expression that reads what another one assigns to."""
    match target:
        case ast.Name(id=name):
            return ast.copy_location(ast.Name(name, ast.Load()), target)
        case ast.Attribute(value=inner, attr=name):
            return ast.copy_location(ast.Attribute(inner, name, ast.Load()), target)
    return target


def _returns_config(node: ast.FunctionDef) -> bool:
    stated = ast.unparse(node.returns) if node.returns is not None else ""
    returned = any(isinstance(part, ast.Return) and part.value is not None for part in ast.walk(node))
    return stated.endswith("Config") or (not stated and returned)


def _kind_of(name: str) -> str:
    """The class or function of a call, without its module and ``Config``."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] == "Config" else parts[-1]


def make_section(settings: Mapping[str, ConfigValue]) -> ConfigSection:
    """Returns the configuration of some settings by section and name."""
    config = ConfigSection("Trainer")
    for name, value in settings.items():
        if name == "activation_checkpoint":
            value = next((ConfigSection(kind) for kind, mode in POLICIES.items() if mode == value), None)
        *parents, last = name.split(".")
        at = config
        for parent in parents:
            at = at.fields.setdefault(parent, ConfigSection(parent))
        at.fields[last] = value
    return config


def flatten_config(config: ConfigSection, where: str, prefix: str = "", line: int = 0) -> Iterator[tuple[str, Stated]]:
    """Yields the settings of a configuration by their names of earlier releases, where those had them."""
    for name, value in config.fields.items():
        at, path = config.lines.get(name, line), f"{prefix}{name}"
        if path == "activation_checkpoint" and value is None:
            yield _state(f"{path}.mode", "none", path, where, at)
        elif not isinstance(value, ConfigSection) or prefix in FLAT:
            yield _state(path, value, path, where, at)
        elif path == "model_spec":
            yield from _flatten_model(value, where, at)
        elif path in ("loss", "optimizer", "model_converters"):
            yield from _flatten_component(path, value, where, at)
        else:
            if value.kind in POLICIES:
                yield _state(f"{path}.mode", POLICIES[value.kind], path, where, at)
            yield from flatten_config(value, where, f"{path}.", at)


def _flatten_model(spec: ConfigSection, where: str, line: int) -> Iterator[tuple[str, Stated]]:
    fields = dict(zip(("flavor",), spec.positional, strict=False)) | spec.fields
    for name, value in fields.items():
        at = spec.lines.get(name, line)
        if name == "converters":
            yield from _flatten_converters(value, where, at)
        else:
            yield _state(OF_MODEL.get(name, f"model.{name}"), value, name, where, at)


def _flatten_component(path: str, section: ConfigSection, where: str, line: int) -> Iterator[tuple[str, Stated]]:
    if path == "model_converters":
        yield from _flatten_converters(section.fields.get("converters", section.positional), where, line, path)
    elif path == "loss":
        name = section.kind if section.kind != "loss" else section.fields.get("name", "CrossEntropyLoss")
        yield _state("loss.name", name, "loss", where, line)
        if "num_chunks" in section.fields:
            yield _state("loss.num_chunks", section.fields["num_chunks"], "num_chunks", where, line)
    else:
        groups = [group for group in section.fields.get("param_groups") or () if isinstance(group, ConfigSection)]
        names = [group.fields.get("optimizer_name", "AdamW") for group in groups]
        other = next((name for name in names if name not in ("Adam", "AdamW")), None)
        name = section.fields.get("name", "AdamW" if section.kind in ("optimizer", "default_adamw") else None)
        usual = "AdamW" if section.kind == "OptimizersContainer" else section.kind
        yield _state("optimizer.name", other or name or usual, "optimizer", where, line)
        if "implementation" in section.fields:
            yield _state("optimizer.implementation", section.fields["implementation"], "implementation", where, line)


def _flatten_converters(
    converters: ConfigValue, where: str, line: int, shown: str = "converters"
) -> Iterator[tuple[str, Stated]]:
    if not isinstance(converters, list):
        yield _state("model.converters", converters, shown, where, line)
        return
    sections = [converter for converter in converters if isinstance(converter, ConfigSection)]
    names = [part.kind if isinstance(part, ConfigSection) else part for part in converters]
    yield _state("model.converters", names, shown, where, line)
    for section in sections:
        for name, value in section.fields.items():
            label, at = f"{section.kind}.{name}", section.lines.get(name, line)
            yield _state(f"converters.{label}", value, label, where, at)


def _state(name: str, value: ConfigValue, shown: str, where: str, line: int) -> tuple[str, Stated]:
    """The setting of a value; one that does not follow from the text is unknown."""
    place = f"{where}:{line}" if line else where
    if isinstance(value, UnknownValue | ConfigSection):
        text = value.text if isinstance(value, UnknownValue) else f"{value.kind}(...)"
        return name, Stated(text, shown, place, (text,))
    if isinstance(value, list):
        value = [f"{part.kind}(...)" if isinstance(part, ConfigSection) else part for part in value]
    return name, Stated(value, shown, place)
