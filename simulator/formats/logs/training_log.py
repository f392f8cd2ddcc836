"""What a training log holds, whichever program wrote it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import field
from datetime import UTC, datetime

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass

REMEDY = "Remove the line, or name another log"

LARGEST = 1e30
"""Largest number that is read: what follows from it is finite."""

NUMBER = r"([-+]?(?:[\d,]++\.?\d*+(?:[eE][-+]?\d++)?|nan|inf))"
"""Repeats are possessive: digits that are not followed by what belongs there are not tried again in parts."""

MOMENT = re.compile(r"\[?(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{3,6}))?\b", re.ASCII)
"""Date and time of a line, as Python's ``logging`` and ``datetime`` write them."""


@dataclass(frozen=True)
class Iteration:
    """The log line of an iteration, or of the iterations since the line before.

    Attributes:
        number: counted from 1.
        where: file and number of the line, for errors.
        seconds: duration of an iteration [s].
        tokens_per_s: throughput of a GPU [tokens/s].
        samples_per_s: throughput of all GPUs [sequences/s].
        samples: global batch size [sequences].
        tokens: global batch size [tokens].
        loss: loss of the iteration.
        tflops: TFLOP/s of a GPU, by the framework's count of FLOPs.
        mfu: model FLOPs utilisation [fraction], by the same count.
        reserved: peak memory that the allocator reserved [bytes].
        reserved_share: the same, of the memory of the GPU.
        total: number of iterations of the run.
        skipped: iterations since the line before whose update was left out.
        moment: when the line was written, since any fixed moment [s].
        resolution: of that moment [s].
    """

    number: int
    where: str
    seconds: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    samples: int | None = None
    tokens: float | None = None
    loss: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    reserved: float | None = None
    reserved_share: float | None = None
    total: int | None = None
    skipped: int = 0
    moment: float | None = None
    resolution: float = 1.0


SAVE, EVALUATION, COLLECTION, RETRIES, SKIP = "save", "evaluation", "garbage collection", "allocator retries", "skip"
"""Kinds of events."""


@dataclass(frozen=True)
class LogEvent:
    """What a log says between the lines of iterations.

    Attributes:
        kind: one of the kinds above.
        before: index of the line of an iteration that follows; the number of lines if none does.
        where: file and number of its line.
        seconds: how long it took, where the log says it [s].
        count: how many of them.
    """

    kind: str
    before: int
    where: str
    seconds: float | None = None
    count: float = 1


@dataclass(frozen=True)
class RankTimes:
    """What a timer shows of several ranks for an iteration.

    Attributes:
        name: of the timer, as the program writes it.
        line: index of the line of an iteration that is before.
        where: file and number of its line.
        least, most: of all ranks [s].
        ranks: seconds of ranks by their number, those of least and most at least, as far as the log names them.
    """

    name: str
    line: int
    where: str
    least: float
    most: float
    ranks: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingLog:
    """A training log.

    Attributes:
        file: its name.
        form: name of its format.
        program: full name of the program.
        iterations: in the order of the file; each number once.
        events: in the order of the file.
        times: of several ranks, in the order of the file.
    """

    file: str
    form: str
    program: str
    iterations: tuple[Iteration, ...]
    events: tuple[LogEvent, ...] = ()
    times: tuple[RankTimes, ...] = ()


class LogFormat(ABC):
    """The lines of iterations of a training program.

    Attributes:
        name: of the format.
        program: full name of the program.
        form: how a line looks, for errors.
        hint: what every line holds: it is looked for before the line is read.
    """

    name: str
    program: str
    form: str
    hint: str

    @abstractmethod
    def read_iteration(self, line: str, where: str) -> Iteration | None:
        """Reads a line; None: it is none of an iteration. Raises PlanError for one that was cut off."""


def parse_number(word: str) -> float | None:
    """Parses a number with or without commas; None if it is not finite, as losses may be, or beyond `LARGEST`."""
    try:
        number = float(word.replace(",", ""))
    except ValueError:
        return None
    return number if abs(number) <= LARGEST else None


def parse_positive(word: str, where: str) -> float:
    """Parses a number above 0. Raises PlanError for anything else."""
    number = parse_number(word)
    if number is None or number <= 0:
        raise PlanError(where, "a number above 0 belongs here", REMEDY, word)
    return number


def parse_count(word: str) -> int:
    """Parses a whole number from 0; 0 for anything else."""
    number = parse_number(word)
    return int(number) if number is not None and number >= 0 else 0


def find_moment(line: str) -> tuple[float | None, float]:
    """Returns when a line was written and the resolution [s]; None: the line does not say."""
    stated = MOMENT.search(line)
    if not stated:
        return None, 1.0
    day, time, fraction = stated[1], stated[2], stated[3] or ""
    try:
        whole = datetime.fromisoformat(f"{day}T{time}").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None, 1.0
    return whole + (int(fraction) / 10 ** len(fraction) if fraction else 0.0), 10.0 ** -len(fraction)
