"""A setting to change in a launch file."""

from __future__ import annotations

import re
from dataclasses import replace

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.table import Stated

ENVIRONMENT = "environment "
"""Before the name of a setting that is a variable of the environment."""


@dataclass(frozen=True)
class SettingChange:
    """A setting to change in a launch file.

    name: as the file writes it.
    place: where it stands (``run.sh:12``); empty of a setting to add.
    before, after: values; None where the file does not have it, or is to leave it out.
    neighbours: of a setting to add the settings of the file beside which it belongs, the nearest first.
    value_place: where its value stands, if that is elsewhere, as that of a variable.
    flag: its name and value on a command line, where these are others than `name` and `after`.
    """

    name: str
    place: str
    before: object
    after: object
    neighbours: tuple[Stated, ...] = ()
    value_place: str = ""
    flag: tuple[str, object] | None = None

    def __str__(self) -> str:
        if self.after is None:
            words = "leave it out"
        elif self.before is None:
            words = "add" if self.after is True else f"add {_show(self.after)}"
        else:
            words = f"{_show(self.before)} -> {_show(self.after)}"
        return f"{self.place or 'new'}  {self.name}: {words}"

    @property
    def line(self) -> int:
        """The line where it stands; 0 of a setting to add."""
        return line_of_place(self.place)

    @property
    def variable(self) -> str:
        """The variable of the environment that it is; empty if it is none."""
        return self.name.removeprefix(ENVIRONMENT) if self.name.startswith(ENVIRONMENT) else ""

    @property
    def on_command_line(self) -> SettingChange:
        """The change as a flag to add."""
        if self.flag is not None:
            return replace(self, name=self.flag[0], after=self.flag[1])
        if self.name.startswith("-"):
            return self
        return replace(self, name=f"--{self.name}")  # of a file with sections

    def refuse(self) -> PlanError:
        """Returns the error for a setting that is written in a way in which it is not edited."""
        rule = "it stands in another file, or is written in a way that is not edited in place"
        return PlanError(f"{self.place} {self.name}".strip(), rule, f"Edit it by hand: {self}")


def file_of_place(place: str) -> str:
    """Returns the file of a place, as messages name it."""
    return re.sub(r":\d+$", "", place)


def line_of_place(place: str) -> int:
    """Returns the line of a place; 0 if it names none."""
    line = re.search(r":(\d+)$", place)
    return int(line[1]) if line else 0


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
