"""torchtitan's configurations as Python functions, read as text: nothing of them runs.

Since February 2026 a run is a function of a ``config_registry.py`` that returns a ``Trainer.Config`` of dataclasses, or
changes what another function returns (pytorch/torchtitan @b5bcd76c6, torchtitan/config/README.md). The functions
are assignments, calls and returns; a value that follows from anything else is unknown, and asked for where it decides.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from typing import Any

from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.launch_file import LaunchFile
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

BASE = "base"
"""The setting for a function that makes a configuration, or a part of it, and that does not stand in a file here."""

OF_MODEL = {"moe_comm_backend": "parallelism.expert_parallel_comm_backend"}
"""Arguments of ``model_registry`` that earlier releases have as settings."""


@dataclass(frozen=True)
class UnknownValue:
    """A value that does not follow from the text. text: the expression."""

    text: str


@dataclass
class ConfigSection:
    """A configuration while functions fill it.

    kind: the class or the function that built it, without its module and ``Config``.
    positional: its arguments without a name.
    fields: its values by name.
    places: where they stand.
    """

    kind: str
    positional: list[ConfigValue] = field(default_factory=list)
    fields: dict[str, ConfigValue] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def copy(self) -> ConfigSection:
        """Returns a copy of the section, sections inside included."""
        inner = {
            name: value.copy() if isinstance(value, ConfigSection) else value for name, value in self.fields.items()
        }
        return ConfigSection(self.kind, list(self.positional), inner, dict(self.places))


@dataclass
class Following:
    """What has been followed of a configuration, in all files. left: expressions that may still be evaluated.

    calls: those of which nothing follows, with their places.
    """

    left: int = LONGEST
    calls: list[tuple[str, str]] = field(default_factory=list)


class ConfigModule:
    """The functions of a Python file that make configurations.

    file: it, with the variables that ``os.environ`` has.
    following: of the file that imports it, by this name.
    """

    def __init__(self, file: LaunchFile, following: Following | None = None, name: str = "") -> None:
        self.file, self._following, self._module = file, following or Following(), name
        try:
            with warnings.catch_warnings(action="ignore"):  # on the syntax of the file
                tree = ast.parse(file.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            tree = ast.Module([], [])
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.imports = {
            name.asname or name.name: (f"{'.' * node.level}{node.module or ''}", name.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        self._constants: dict[str, ast.expr] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._constants |= _match_names(target, node.value)
        self._imported: dict[str, ConfigModule | None] = {}

    @property
    def configs(self) -> list[str]:
        """Names of the functions that can be run: without arguments, whose names are not private."""
        return [
            name
            for name, node in self.functions.items()
            if not name.startswith("_") and not node.args.args and _returns_config(node)
        ]

    @property
    def _makers(self) -> list[str]:
        """Names of the functions that return a configuration of a run."""
        return [name for name, node in self.functions.items() if _returns_config(node, "Trainer.Config")]

    def settings_of(self, name: str, module: str) -> dict[str, Stated]:
        """Returns the settings of the configuration of a function by section and name.

        module: that of the models, where the file imports them relatively.
        """
        calls = self._following.calls
        calls.clear()
        config, place = self._call_own(name, [], {}, 0), self._place(self.functions[name].lineno)
        if not isinstance(config, ConfigSection):
            return {BASE: Stated(name, f"{name}()", place)}
        settings = dict(flatten_config(config, self.file.where))
        if not config.kind[:1].isupper():  # a function elsewhere
            settings[BASE] = Stated(config.kind, f"{config.kind}()", place)
        for call, at in calls:
            settings[f"call.{call}"] = Stated(call, f"{call}()", at)
        if module and "model.flavor" in settings:
            settings.setdefault("model.name", Stated(module, "model_registry", settings["model.flavor"].place))
        return settings

    def _place(self, line: int) -> str:
        return f"{self.file.where}:{line}"

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
        before = len(self._following.calls)
        config = self._run(node.body, values, depth)
        if not (isinstance(config, ConfigSection) and config.kind.endswith("Trainer")):
            del self._following.calls[before:]
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
                    both = ast.copy_location(ast.BinOp(target, kind, value), node)
                    self._assign(target, self._value(both, values, depth), values, depth)
                case ast.If(test=test, body=then, orelse=other):
                    chosen = self._value(test, values, depth)
                    if isinstance(chosen, UnknownValue):
                        self._note(f"if {chosen.text}", node)
                    elif (config := self._run(then if chosen else other, values, depth)) is not None:
                        return config
                case ast.Expr(value=ast.Call() as call):
                    self._note(ast.unparse(call.func), node)
                case ast.For() | ast.While() | ast.With() | ast.Try():
                    self._note(type(node).__name__.lower(), node)
        return None

    def _note(self, call: str, node: ast.stmt) -> None:
        self._following.calls.append((call, self._place(node.lineno)))

    def _assign(self, target: ast.expr, value: ConfigValue, values: dict[str, ConfigValue], depth: int) -> None:
        match target:
            case ast.Name(id=name):
                values[name] = value
            case ast.Tuple(elts=targets) if isinstance(value, list) and len(value) == len(targets):
                for part, inner in zip(targets, value, strict=True):
                    self._assign(part, inner, values, depth)
            case ast.Attribute(value=inner, attr=name):
                section = self._find_section(inner, values, depth)
                if section is not None:
                    section.fields[name], section.places[name] = value, self._place(target.lineno)

    def _find_section(self, node: ast.expr, values: dict[str, ConfigValue], depth: int) -> ConfigSection | None:
        """Returns the section that an expression names, a new section if a configuration does not have it yet."""
        section = self._value(node, values, depth)
        if isinstance(section, ConfigSection) or not isinstance(node, ast.Attribute):
            return section if isinstance(section, ConfigSection) else None
        owner = self._find_section(node.value, values, depth)
        if owner is None:
            return None
        owner.fields[node.attr] = inner = ConfigSection(node.attr)
        return inner

    # ----------------------------------------------------------------------------------------- expressions

    def _value(self, node: ast.expr, values: dict[str, ConfigValue], depth: int) -> ConfigValue:
        """Returns the value of an expression; UnknownValue if it does not follow from the text."""
        self._following.left -= 1
        if self._following.left < 0:
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
                decides = (word for word in words if bool(word) is isinstance(kind, ast.Or))
                return next(decides, words[-1]) if known else UnknownValue(ast.unparse(node))
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
        places = {word.arg: self._place(word.value.lineno) for word in node.keywords if word.arg is not None}
        module, function = (self, name) if name in self.functions else self._find_imported(name)
        if module is not None:
            return module._call_own(function, positional, named, depth + 1)
        return self._build(node, name, ConfigSection(_kind_of(name), positional, named, places))

    def _build(self, node: ast.Call, name: str, section: ConfigSection) -> ConfigValue:
        """Returns what a function elsewhere makes of its arguments. section: of its name and these."""
        origin, last = self.imports.get(name, ("", name.rpartition(".")[2]))
        first, *others = section.positional or (None,)
        if last in STOCK_CONFIGS and not section.positional and not section.fields:
            return make_section(STOCK_CONFIGS[last])
        if last in ("replace", "deepcopy") and isinstance(first, ConfigSection):
            changed = first.copy()
            changed.fields |= section.fields
            changed.places |= section.places
            return changed
        if name in ("os.environ.get", "os.getenv") and section.positional:
            return self.file.options.environment.get(str(first), others[0] if others else None)
        if name in NUMBERS and len(section.positional) == 1:
            return _convert(NUMBERS[name], first, ast.unparse(node))
        if last == "model_registry" and (model := self._name_model(origin)):
            section.fields["name"] = model
        return section

    def _name_model(self, origin: str) -> str:
        """Returns the model whose registry is imported from a module, which may be that of this file."""
        origin = f"{self._module}." if origin.startswith(".") else origin
        return origin.rpartition(".models.")[2].partition(".")[0] if ".models." in origin else ""

    def _find_imported(self, name: str) -> tuple[ConfigModule | None, str]:
        """Returns the file that a function of this name is imported from, if it makes a configuration there, and its
        name there."""
        module, function = self.imports.get(name, ("", ""))
        path = module.lstrip(".").replace(".", "/")
        if path and module not in self._imported:
            above = "../" * (len(module) - len(module.lstrip(".")) - 1)
            companion = self.file.find_companion(f"{above}{path}.py")
            self._imported[module] = ConfigModule(companion, self._following, module) if companion is not None else None
        imported = self._imported.get(module)
        return (imported if imported is not None and function in imported._makers else None), function


def _convert(kind: Callable[[ConfigValue], ConfigValue], value: ConfigValue, text: str) -> ConfigValue:
    """Returns the number or the text of a literal. text: of the expression."""
    if isinstance(value, str | int | float):
        with suppress(ValueError, OverflowError):
            return kind(value)
    return UnknownValue(text)


def _match_names(target: ast.expr, value: ast.expr) -> dict[str, ast.expr]:
    """Returns the names that an assignment at the top of a file sets, with their expressions."""
    if isinstance(target, ast.Name):
        return {target.id: value}
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = zip(target.elts, value.elts, strict=False)
        return {name: inner for part, expression in pairs for name, inner in _match_names(part, expression).items()}
    return {}


def _returns_config(node: ast.FunctionDef, kind: str = "Config") -> bool:
    stated = ast.unparse(node.returns) if node.returns is not None else ""
    returned = any(isinstance(part, ast.Return) and part.value is not None for part in ast.walk(node))
    return stated.strip("'\"").endswith(kind) or (not stated and returned)


def _kind_of(name: str) -> str:
    """Returns the class or function of a call, without its module and ``Config``."""
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


def flatten_config(config: ConfigSection, where: str, prefix: str = "") -> Iterator[tuple[str, Stated]]:
    """Yields the settings of a configuration by their names of earlier releases, where those had them."""
    for name, value in config.fields.items():
        at, path = config.places.get(name, where), f"{prefix}{name}"
        if path == "activation_checkpoint" and value is None:
            yield _state(f"{path}.mode", "none", path, at)
        elif not isinstance(value, ConfigSection) or prefix in FLAT:
            yield _state(path, value, path, at)
        elif path == "model_spec":
            yield from _flatten_model(value, at)
        elif path in ("loss", "optimizer", "model_converters"):
            yield from _flatten_component(path, value, at)
        else:
            if value.kind in POLICIES:
                yield _state(f"{path}.mode", POLICIES[value.kind], path, at)
            yield from flatten_config(value, at, f"{path}.")


def _flatten_model(spec: ConfigSection, place: str) -> Iterator[tuple[str, Stated]]:
    fields = dict(zip(("flavor",), spec.positional, strict=False)) | spec.fields
    for name, value in fields.items():
        at = spec.places.get(name, place)
        if name == "converters":
            yield from _flatten_converters(value, at)
        else:
            yield _state(OF_MODEL.get(name, f"model.{name}"), value, name, at)


def _flatten_component(path: str, section: ConfigSection, place: str) -> Iterator[tuple[str, Stated]]:
    if path == "model_converters":
        yield from _flatten_converters(section.fields.get("converters", section.positional), place, path)
    elif path == "loss":
        name = section.kind if section.kind != "loss" else section.fields.get("name", "CrossEntropyLoss")
        yield _state("loss.name", name, "loss", place)
        if "num_chunks" in section.fields:
            yield _state("loss.num_chunks", section.fields["num_chunks"], "num_chunks", place)
    else:
        groups = [group for group in section.fields.get("param_groups") or () if isinstance(group, ConfigSection)]
        names = [group.fields.get("optimizer_name", "AdamW") for group in groups]
        other = next((name for name in names if name not in ("Adam", "AdamW")), None)
        name = section.fields.get("name", "AdamW" if section.kind in ("optimizer", "default_adamw") else None)
        usual = "AdamW" if section.kind == "OptimizersContainer" else section.kind
        yield _state("optimizer.name", other or name or usual, "optimizer", place)
        if "implementation" in section.fields:
            yield _state("optimizer.implementation", section.fields["implementation"], "implementation", place)


def _flatten_converters(converters: ConfigValue, place: str, shown: str = "converters") -> Iterator[tuple[str, Stated]]:
    if not isinstance(converters, list):
        yield _state("model.converters", converters, shown, place)
        return
    sections = [converter for converter in converters if isinstance(converter, ConfigSection)]
    names = [part.kind if isinstance(part, ConfigSection) else part for part in converters]
    yield _state("model.converters", names, shown, place)
    for section in sections:
        for name, value in section.fields.items():
            label, at = f"{section.kind}.{name}", section.places.get(name, place)
            yield _state(f"converters.{label}", value, label, at)


def _state(name: str, value: ConfigValue, shown: str, place: str) -> tuple[str, Stated]:
    """Returns the setting of a value; a value that does not follow from the text is unknown."""
    if isinstance(value, UnknownValue | ConfigSection):
        text = value.text if isinstance(value, UnknownValue) else f"{value.kind}(...)"
        return name, Stated(text, shown, place, (text,))
    if isinstance(value, list):
        value = [f"{part.kind}(...)" if isinstance(part, ConfigSection) else part for part in value]
    return name, Stated(value, shown, place)
