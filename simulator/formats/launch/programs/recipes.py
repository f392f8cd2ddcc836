"""Recipes of training programs by their names: what a file that names a recipe leaves out is the recipe's.

Recipes are data (`recipes/*.json`), facts of the functions of these names with their source.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.python_text import Built, Named, OpenValue, PythonText, Value
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Stated

FOLDER = Path(__file__).parent / "recipes"

UNTUNED = "untuned recipe"
"""Setting of recipes that a program ships to work, and that nobody tuned for speed; no file has it."""


@dataclass(frozen=True)
class Recipes:
    """The recipes of a program.

    source: repository, commit and path.
    usual: settings of all recipes that do not state them.
    recipes: settings by name.
    aliases: further names of recipes.
    classes: presets by the classes of models.
    trainers, models: settings of modules, and shapes of models, by the names of their files.
    bases: settings by the names of the functions that recipes change.
    untuned: beginning of the paths of recipes that work and that nobody tuned; empty: the program does not tell them.
    """

    source: str
    usual: Mapping[str, Value]
    recipes: Mapping[str, Mapping[str, Value]]
    aliases: Mapping[str, str]
    classes: Mapping[str, str]
    trainers: Mapping[str, Mapping[str, Value]]
    models: Mapping[str, Mapping[str, Value]]
    bases: Mapping[str, Mapping[str, Value]]
    untuned: str = ""

    def find(self, name: str) -> dict[str, Stated] | None:
        """Returns the settings of a recipe, each with its name as its place; None if there is none of this name."""
        row = self.recipes.get(self.aliases.get(name, name)) or self.bases.get(name)
        if row is None:
            return None
        settings = {key: value for key, value in {**self.usual, **row}.items() if key != "path"}
        if self.untuned and str(row.get("path", "")).startswith(self.untuned):
            settings[UNTUNED] = True
        return {key: Stated(value, key, f"recipe {name}") for key, value in settings.items()}


@cache
def load_recipes(program: str) -> Recipes:
    """Returns the recipes of a program, by the name of its file."""
    data = json.loads((FOLDER / f"{program}.json").read_text("utf-8"))
    parts = ("recipes", "aliases", "classes", "trainers", "models", "bases")
    tables = {part: data.get(part, {}) for part in parts}
    return Recipes(data["source"], data["usual"], **tables, untuned=data.get("untuned", ""))


# ------------------------------------------------------------------------------------- Python files

SHOWN = ("mixed_precision", "plugins", "trainer.plugins", "peft", "comm_overlap", "model", "model.config", "data")
"""Fields whose class says something beside its fields."""

NOTHING = re.compile(
    r"^(\w+\.)*(log|logger|resume|tokenizer|checkpoint|scheduler|validation|profiling|rng|env_vars)(\.|$)"
)
"""Fields without influence, whose values are often open."""


def read_python_settings(built: Built, where: str) -> dict[str, Stated]:
    """Reads the settings of an object that a Python file builds, by their dotted names."""
    settings: dict[str, Stated] = {}
    model = built.fields.get("model")
    if isinstance(model, Built) and model.arguments and isinstance(model.arguments[0], Built):
        model.set_field("config", model.arguments[0], model.line)  # llm.LlamaModel(llm.Llama3Config8B())
    for path, value, line in built.walk():
        settings |= _read_value(path, value, f"{where}:{line}" if line else where, where)
    for path in SHOWN:
        inner = _follow(built, path)
        if isinstance(inner, Built) and inner.name:
            settings[path] = Stated(_call_name(inner), path, f"{where}:{inner.line}")
    return settings


def _read_value(path: str, value: Value, place: str, where: str) -> dict[str, Stated]:
    """Reads the setting that a value makes; of a list of callbacks those of each."""
    match value:
        case list() if any(isinstance(item, Built) for item in value):
            callbacks = (_read_callback(item, where) for item in value if isinstance(item, Built))
            return {name: stated for callback in callbacks for name, stated in callback.items()}
        case ast.FunctionDef():
            return {}
        case OpenValue(text=text):
            return {} if NOTHING.search(path) else {path: Stated(text, path, place, (text,))}
        case Built(name=name) if name.startswith(ARITHMETIC):
            return {path: Stated(name, path, place, (name,))}
    return {path: Stated(_plain(value), path, place)}


ARITHMETIC = ("math.", "int", "round", "max", "min", "len", "float")
"""Calls that make numbers, here of what the text does not tell."""


def _read_callback(built: Built, where: str) -> dict[str, Stated]:
    """Reads the settings of a callback on the overlap of communication; none of any other."""
    if not built.last_name.startswith(("MegatronCommOverlap", "MegatronMixedPrecision")):
        return {}
    fields = {name: value for name, value in built.fields.items() if isinstance(value, bool | int | str)}
    return {name: Stated(value, name, f"{where}:{built.lines.get(name, built.line)}") for name, value in fields.items()}


def _follow(built: Built, path: str) -> Value:
    value: Value = built
    for name in path.split("."):
        value = value.fields.get(name) if isinstance(value, Built) else None
    return value


def _call_name(built: Built) -> Value:
    """Returns what a call is known by: the text of an argument, as a name of a recipe or of a model, or its name."""
    argument = next((word for word in built.arguments if isinstance(word, str)), None)
    return (
        argument
        if (argument is not None and "from_" in built.name) or built.last_name.startswith(("get_", "default_peft"))
        else built.last_name
    )


def _plain(value: Value) -> Value:
    match value:
        case Named(name=name):
            return name.removeprefix("torch.").replace("bfloat16", "bf16").replace("float", "fp")
        case Built():
            return _call_name(value)
        case list():
            return [_plain(item) for item in value]
    return value


def follow_python(file: LaunchFile) -> PythonText:
    """Returns what a Python file builds, with the arguments of its command line that the user gives."""
    text = PythonText(file.text, file.where, options=read_options(file.options.arguments))
    text.follow()
    return text


CHANGED = "changed_by"
"""Name of the setting that says who else changes a recipe."""


def list_changes(text: PythonText, built: Built, where: str) -> dict[str, Stated]:
    """Returns a setting for code of other modules that changes what a file builds."""
    changes = text.find_changes(built)
    if not changes:
        return {}
    names = ", ".join(dict.fromkeys(call.name for call in changes))
    return {CHANGED: Stated(names, changes[0].last_name, f"{where}:{changes[0].line}")}


def ask_about_changes(reading: Reading) -> None:
    """Asks where code that is not in the file changes the recipe."""
    if (stated := reading.take(CHANGED)) is not None:
        why = f"it is given the recipe, and its code, which may change the plan, is not here ({stated.value})"
        reading.ask(stated, why, "--assume-defaults")


RIVALS = "functions"
"""Name of the setting that lists the functions of a module of which each makes a recipe."""

SHOWN_NAMES = 4
"""Functions that a question names."""


def find_function(text: PythonText, name: Value) -> ast.FunctionDef | None:
    """Returns the function of the file that a command line names; None if the file has none of this name."""
    function = text.names.get(name) if isinstance(name, str) else None
    return function if isinstance(function, ast.FunctionDef) else None


def list_functions(text: PythonText, pattern: re.Pattern[str]) -> list[str]:
    """Returns the names of the functions of a module that make recipes."""
    return [name for name, value in text.names.items() if isinstance(value, ast.FunctionDef) and pattern.search(name)]


def list_defaults(function: ast.FunctionDef) -> dict[str, Value]:
    """Returns the constants that the parameters of a function have where a call does not say otherwise."""
    parameters, defaults = function.args.args, function.args.defaults
    pairs = zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)
    return {parameter.arg: usual.value for parameter, usual in pairs if isinstance(usual, ast.Constant)}


def name_functions(option: str, names: Sequence[str], where: str) -> dict[str, Stated]:
    """Returns the setting that lists the functions of a module. option: of the command line, which chooses among
    them."""
    return {RIVALS: Stated(list(names), option, where)}


def ask_for_function(reading: Reading) -> None:
    """Asks which function of a module is meant."""
    if (stated := reading.take(RIVALS)) is None:
        return
    names = list(map(str, stated.value))
    shown = ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
    reading.ask(stated, f"the module has {len(names)} recipes: {shown}", f"--args '{stated.shown} {names[0]}'")


def read_options(words: tuple[str, ...]) -> dict[str, Value]:
    """Arguments of a command line by their names: ``--tp 4``, ``--tp=4``, ``--bf16`` and ``a.b=c``."""
    options: dict[str, Value] = {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word.startswith("-") and not equals:
            following = words[index + 1] if index + 1 < len(words) else "-"
            value = True if following.startswith("-") or "=" in following else following  # type: ignore[assignment]
        elif not equals:
            continue
        options[name.lstrip("-").replace("-", "_")] = value
    return options
