"""What a reader of a training program's launch files is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from enum import IntEnum

from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.edits.setting_change import SettingChange
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Keys, Stated
from meshcast.simulator.formats.launch.verdicts import Verdicts


class Evidence(IntEnum):
    """How sure it is that a file is of a program."""

    NONE = 0
    POSSIBLE = 1
    """It has keys or flags that several programs have."""
    LIKELY = 2
    """It has keys or flags that only this program has."""
    CERTAIN = 3
    """It starts this program, or its header names it."""


@dataclass(frozen=True)
class DemandedVariable:
    """A variable of the environment that a program checks when it starts.

    value: the only value that it takes; None: it takes any other than `refused`, or none.
    """

    name: str
    value: str | None = None
    refused: str | None = None

    def takes(self, value: str) -> bool:
        """Returns whether the program starts with this value."""
        return value == self.value if self.value is not None else value != self.refused


@dataclass(frozen=True)
class LaunchFormat:
    """A format of launch files.

    name: as commands call it.
    program: as messages call it.
    suffix: of its files.
    recognise: how sure it is that a file is of this program.
    read: the settings of a file by their normalised names.
    interpret: fills a `Reading` with keys.
    write: the text of a launch file from the keys of a job and the lines of a header; None: files are read only.
    verdicts: on settings that `interpret` does not take.
    demand_variables: of the environment, for the keys of a job.
    read_variable: a variable of the environment that a file sets, by its name.
    remark: lines of a header on what a file that is written is, and is not.
    write_suffix: the suffix of a file that is written from the keys of a job, if it is not always `suffix`.
    routing: of its routers on data.
    names_data: whether a file trains on data that it names or leaves to a command; otherwise on random tokens.
    override: the change of a file or of its command line that changes a setting, beside those that the file states.
    """

    name: str
    program: str
    suffix: str
    recognise: Callable[[LaunchFile], Evidence]
    read: Callable[[LaunchFile], dict[str, Stated]]
    interpret: Callable[[Reading], None]
    write: Callable[[Keys, list[str]], str] | None
    verdicts: Verdicts = field(default_factory=dict)
    demand_variables: Callable[[Keys], tuple[DemandedVariable, ...]] = lambda keys: ()
    read_variable: Callable[[LaunchFile, str], Stated | None] = lambda file, name: None
    remark: Callable[[Keys], list[str]] = lambda keys: []
    write_suffix: Callable[[Keys], str] | None = None
    routing: str = "natural"
    names_data: Callable[[Reading], bool] = lambda reading: True
    override: Callable[[SettingChange, LaunchFile, Mapping[str, Stated]], SettingChange] = lambda change, *_: change
