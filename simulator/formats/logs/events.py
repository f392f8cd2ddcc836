"""What training programs print between the lines of iterations: saves, evaluations, garbage collection, retries of the
allocator, skipped steps. A program may print the words of a library below it, so all are looked for in every log.

Sources: ``training/checkpointing.py`` and ``training/training.py`` of Megatron-LM d98e8a64dd; ``tools/utils.py`` and
``components/metrics.py`` of torchtitan b5bcd76c6, and ``components/checkpoint.py`` of 2024 and 2025;
``runtime/checkpoint_engine/torch_checkpoint_engine.py``, ``runtime/zero/stage3.py`` and
``runtime/fp16/loss_scaler.py`` of DeepSpeed edaa72212; ``trainer.py`` of nanotron 2411b022; ``trainer.py`` of
transformers.
"""

from __future__ import annotations

import re

from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.logs.training_log import (
    COLLECTION,
    EVALUATION,
    NUMBER,
    RETRIES,
    SAVE,
    SKIP,
    LogEvent,
    parse_number,
)


@dataclass(frozen=True)
class EventWords:
    """Words of an event.

    Attributes:
        kind: of the event.
        hint: what every such line holds: it is looked for before the pattern.
        words: pattern; its groups ``seconds`` and ``count`` are read, where it has them.
        is_total: whether the count is that since the begin of the run, not since the last time.
    """

    kind: str
    hint: str
    words: re.Pattern[str]
    is_total: bool = False


def _name_number(name: str) -> str:
    return NUMBER.replace("(", f"(?P<{name}>", 1)


EVENTS = (
    EventWords(SAVE, "saving checkpoint", re.compile(r"\bsaving checkpoint at iteration +\d+")),
    EventWords(
        SAVE,
        "Finished saving",
        re.compile(rf"Finished saving the checkpoint.{{0,60}}?in {_name_number('seconds')} seconds"),
    ),
    EventWords(SAVE, "is about to be saved", re.compile(r"\[Torch\] Checkpoint \S+ is about to be saved")),
    EventWords(SAVE, "Saving ", re.compile(r"\bSaving (?:the |model )?checkpoint (?:at |to |\(or staging)")),
    EventWords(EVALUATION, "validation loss", re.compile(r"\bvalidation loss at iteration +\d+")),
    EventWords(EVALUATION, "validate step", re.compile(r"\bvalidate step: +\d+")),
    EventWords(EVALUATION, "eval_runtime", re.compile(rf"'eval_runtime': '?{_name_number('seconds')}")),
    EventWords(
        COLLECTION,
        "[GC]",
        re.compile(rf"\[GC\] Per?forming period\w+ GC collection(?:\.| took) {_name_number('seconds')} seconds"),
    ),
    EventWords(
        RETRIES, "allocation retries", re.compile(r"(?P<count>\d{1,12}) \w+ memory allocation retries"), is_total=True
    ),
    EventWords(
        RETRIES, "cache flushes", re.compile(r"(?P<count>\d{1,12}) pytorch allocator cache flushes since last step")
    ),
    EventWords(
        SKIP, "Skipping step", re.compile(r"OVERFLOW! Rank \d+ Skipping step|Overflow detected\. Skipping step")
    ),
)


class EventReader:
    """Reads the events of a log, line by line. Lines that several ranks print for one event count once."""

    def __init__(self) -> None:
        self.events: list[LogEvent] = []
        self._totals: dict[str, float] = {}
        self._places: dict[tuple[str, int], int] = {}

    def read(self, line: str, where: str, before: int) -> None:
        """Adds the event of a line, if there is one. before: index of the line of an iteration that follows."""
        for words in EVENTS:
            stated = words.words.search(line) if words.hint in line else None
            if not stated:
                continue
            parts = stated.groupdict()
            seconds, count = (parse_number(parts.get(name) or "") for name in ("seconds", "count"))
            count = 1.0 if count is None else count
            if words.is_total:
                count, self._totals[words.kind] = count - self._totals.get(words.kind, 0.0), count
            if count > 0:
                self._add(LogEvent(words.kind, before, where, seconds, count))
            return

    def _add(self, event: LogEvent) -> None:
        place = self._places.get((event.kind, event.before))
        if place is None or event.kind == SKIP:
            self._places[event.kind, event.before] = len(self.events)
            self.events.append(event)
        elif (event.seconds or 0.0) > (self.events[place].seconds or 0.0):
            self.events[place] = event  # that of the slowest rank, or the end of what another line began
