"""The parameters of commands, and how a command is run with their values."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import NamedTuple, get_args, get_origin

from meshcast.experiments.cli.commands import find_function, find_options
from meshcast.experiments.cli.console import answering
from meshcast.experiments.cli.launch import LAUNCH_FILES, LaunchFileOptions
from meshcast.experiments.options import OUTPUT, Flag, Options
from meshcast.hardware.schemas import ModelField

PANELS = (None, "Ranking", "Space", OUTPUT, LAUNCH_FILES)
"""Headings of options in the help of a command, in their order; None: that of those without one."""


class CommandParameter(NamedTuple):
    """An option or argument of a command.

    Attributes:
        name: of the field that it sets.
        flag: how it is written.
        kind: type that its word, or each of its words, is read as; None for the type beside others: ``str | None``.
        is_list: whether it may be repeated.
        required: whether it must be stated.
        default: its value otherwise, before the model of the options reads it.
    """

    name: str
    flag: Flag
    kind: object
    is_list: bool
    required: bool
    default: object


def list_parameters(model: type[Options]) -> list[CommandParameter]:
    """Returns the parameters of a command in the order of its help: by their headings, then its own before those of the
    bases of its options."""
    flags = model.flags()
    order = [name for base in model.__mro__ for name in vars(base).get("__annotations__", ()) if name in flags]
    names = sorted(dict.fromkeys(order), key=lambda name: PANELS.index(flags[name].panel))
    return [_make_parameter(name, model.model_fields[name], flags[name]) for name in names]


def _make_parameter(name: str, field: ModelField, flag: Flag) -> CommandParameter:
    is_list = get_origin(field.annotation) is tuple and flag.written is None
    kind = flag.reads or (get_args(field.annotation)[0] if is_list else field.annotation)
    default = flag.written or (None if is_list else field.default)
    return CommandParameter(name, flag, kind, is_list, field.is_required(), default)


def run_command(name: str, values: Mapping[str, object]) -> None:
    """Runs a command with the values of its parameters; None: not stated."""
    function, model = find_function(name), find_options(name)
    with answering(bool(values.get("as_json"))):
        options = model.read(values, of_command=True)
        with options.apply() if isinstance(options, LaunchFileOptions) else nullcontext():
            function(options)
