"""Programs whose files are known and not read: each is refused by its name, never forecast as another one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshcast.simulator.formats.launch.launch_file import LaunchFile


@dataclass(frozen=True)
class RefusedProgram:
    """A program that is not read.

    name: as messages call it.
    entries: pattern of the scripts, modules or commands that start it.
    keys: top-level keys of its files, all of which are there.
    text: pattern of what its Python files import.
    """

    name: str
    entries: str = ""
    keys: frozenset[str] = frozenset()
    text: str = ""

    def is_program_of(self, file: LaunchFile) -> bool:
        """Whether a file is of this program."""
        if file.launch is not None and self.entries and re.search(self.entries, file.launch.entry):
            return True
        if self.keys and self.keys <= file.keys:
            return True
        return bool(self.text and file.suffix == ".py" and re.search(self.text, file.text))


REFUSED: tuple[RefusedProgram, ...] = ()


def find_refused(file: LaunchFile) -> RefusedProgram | None:
    """Returns the program of a file that is known and not read."""
    return next((program for program in REFUSED if program.is_program_of(file)), None)
