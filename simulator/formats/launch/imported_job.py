"""What a format of launch files is, and what an import and an export give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshcast.simulator.formats.launch.table import Keys, Reading, Stated


@dataclass(frozen=True)
class DemandedVariable:
    """A variable of the environment that a program checks when it starts.

    value: the only one that it takes; None: it takes any other than `refused`, or none.
    """

    name: str
    value: str | None = None
    refused: str | None = None

    def takes(self, value: str) -> bool:
        """Whether the program starts with this value."""
        return value == self.value if self.value is not None else value != self.refused


@dataclass(frozen=True)
class LaunchFormat:
    """A format of launch files.

    name: as commands call it. program: as messages call it. suffix: of its files.
    recognise: whether data of a YAML, JSON or TOML file, or the text of another one, are of this format.
    read: settings of a text by their normalised names, from a text and its place.
    interpret: fills a `Reading` with keys.
    write: the text of a launch file from the keys of a job and the lines of a header; None: files are read only.
    without_influence: pattern of the names of settings that change neither time nor memory.
    reasons: patterns of names that are known and have no place in a job, with the reason.
    demand_variables: of the environment, for the keys of a job.
    read_variable: a variable of the environment that a file sets, from its text, place and the name.
    remark: lines of a header on what a file that is written is, and is not.
    """

    name: str
    program: str
    suffix: str
    recognise: Callable[[Any, str], bool]
    read: Callable[[str, str], dict[str, Stated]]
    interpret: Callable[[Reading], None]
    write: Callable[[Keys, list[str]], str] | None
    without_influence: str
    reasons: Mapping[str, str] = field(default_factory=dict)
    demand_variables: Callable[[Keys], tuple[DemandedVariable, ...]] = lambda keys: ()
    read_variable: Callable[[str, str, str], Stated | None] = lambda text, where, name: None
    remark: Callable[[Keys], list[str]] = lambda keys: []


@dataclass(frozen=True)
class ImportedJob:
    """A launch file as a job.

    job: the keys of a job file. comments: what is behind its dotted keys.
    assumed: keys that the file does not state, with the reason. not_understood: settings with the reason.
    assumed_values: what is assumed of them.
    ignored: settings without influence on time or memory. where: the file. form: name of its format.
    places: file, line and name of the setting behind each key.
    unrecognised: settings of names that nothing knows, which are among those not understood.
    microbatches: of a replica, where the file leaves out the global batch, which then follows from them.
    checkpoints: ``run.checkpoints`` as the file states them. They are no keys of `job`, for a sweep of a job with such
        keys simulates whole runs; ``meshcast run`` alone reads them.
    """

    job: dict[str, Any]
    comments: Mapping[str, str]
    assumed: Mapping[str, str]
    not_understood: Mapping[str, str]
    ignored: tuple[str, ...]
    where: str
    form: str
    places: Mapping[str, str] = field(default_factory=dict)
    microbatches: int | None = None
    checkpoints: Mapping[str, Any] = field(default_factory=dict)
    unrecognised: tuple[str, ...] = ()
    assumed_values: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The answer of ``import --json``."""
        return {
            "job": self.job,
            "assumed": list(self.assumed),
            "not_understood": [{"flag": flag, "why": why} for flag, why in self.not_understood.items()],
            "ignored": list(self.ignored),
        }


@dataclass(frozen=True)
class Exported:
    """A job as a launch file. unsaid: keys that the file cannot say, each with what the job says and what the program
    would run."""

    text: str
    unsaid: Mapping[str, tuple[Any, Any]]
