"""Starts of training programs: what a command line runs, without the launchers around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshcast.simulator.formats.launch.shell import read_arguments
from meshcast.simulator.formats.launch.table import Stated


@dataclass(frozen=True)
class Launcher:
    """A program that starts another one. name: such as torchrun. settings: its own arguments."""

    name: str
    settings: Mapping[str, Stated] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """A start of a training program.

    launchers: outermost first.
    entry: the script, the module or the command that is started.
    positional: its arguments without a name.
    arguments: its named arguments, with ``_`` for ``-``.
    place: file and line.
    """

    launchers: tuple[Launcher, ...] = ()
    entry: str = ""
    positional: tuple[Stated, ...] = ()
    arguments: Mapping[str, Stated] = field(default_factory=dict)
    environment: Mapping[str, object] = field(default_factory=dict)
    place: str = ""


def find_text_launches(text: str, where: str) -> tuple[Launch, ...]:
    arguments = read_arguments(text, where)
    return (Launch(arguments=arguments, place=where),) if arguments else ()
