"""A detector looks for one cause of a slow run. Every module of `experiments.diagnosis.causes` has one."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import ClassVar

from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.hardware.documents.plain_data import Fields
from meshcast.hardware.records import dataclass

ANY = ""
"""Key of the words on what helps that hold for every program."""


@dataclass(frozen=True)
class Cause:
    """A cause of a slow run.

    Attributes:
        name: of the cause, as its detector has it.
        seconds: that it takes of each step, on average; None: the evidence does not tell.
        evidence: sentences on what was seen, with figures.
        help: what would change it.
        pauses: whether it lengthens single steps, not all of them.
    """

    name: str
    seconds: float | None
    evidence: tuple[str, ...]
    help: str
    pauses: bool = False

    def to_dict(self) -> Fields:
        """Returns the cause in the JSON answer."""
        return {
            "cause": self.name,
            "seconds_per_step": self.seconds,
            "evidence": list(self.evidence),
            "help": self.help,
            "in": "single steps" if self.pauses else "every step",
        }


class Detector(ABC):
    """Looks for a cause.

    Attributes:
        name: of the cause.
        words: what would change it, by the name of a training program (`simulator.formats.launch`); `ANY` for others.
        pauses: whether it lengthens single steps.
    """

    name: ClassVar[str]
    words: ClassVar[Mapping[str, str]]
    pauses: ClassVar[bool] = False

    @abstractmethod
    def find(self, run: RunEvidence) -> Iterable[Cause]:
        """Yields the cause, once or for each place of it, where the evidence shows it."""

    def make(self, run: RunEvidence, seconds: float | None, *evidence: str) -> Cause:
        """Returns the cause with what would change it in the words of the run's program."""
        help = self.words.get(run.program) or self.words[ANY]
        return Cause(self.name, seconds, evidence, help, self.pauses)


@cache
def detectors() -> Mapping[str, Detector]:
    """Returns a detector of every cause, by the name of the cause."""
    from meshcast.experiments.diagnosis import causes

    detectors: dict[str, Detector] = {}
    for module in pkgutil.walk_packages(causes.__path__, f"{causes.__name__}."):
        for item in vars(import_module(module.name)).values():
            is_own = isinstance(item, type) and item.__module__ == module.name
            if is_own and issubclass(item, Detector) and "name" in vars(item):  # a base of several has no name
                detectors[item.name] = item()
    return detectors
