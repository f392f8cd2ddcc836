"""What becomes of a setting that a reader does not turn into keys of a job: the classes 2 to 4 of the rule of the door.

A setting that changes the plan or the memory, and was not understood, ends in a question, never in a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.table import SomeKeys, Stated


@dataclass(frozen=True)
class NoInfluence:
    """A setting that changes neither time nor memory. why: the reason, such as ``logging``."""

    why: str


@dataclass(frozen=True)
class Approximation:
    """A setting that the forecast does not follow.

    why: what is forecast instead.
    errs: which way the answer errs.
    """

    why: str
    errs: str = ""


@dataclass(frozen=True)
class Decision:
    """A setting that decides the plan or the memory.

    why: what is open.
    answers: changes of the job that answer it.
    """

    why: str
    answers: tuple[str, ...] = ()


Verdict = NoInfluence | Approximation | Decision
Verdicts = Mapping[str, Verdict]
"""Verdicts by patterns of the names of settings; the first that matches a whole name counts."""


@dataclass(frozen=True)
class TakenSetting:
    """A setting that the forecast follows.

    keys: of the job that it states or changes; none where the file cannot be read without it.
    """

    shown: str
    place: str
    value: Any
    keys: SomeKeys = field(default_factory=dict)


@dataclass(frozen=True)
class IgnoredSetting:
    """A setting without influence on time and memory, with the reason."""

    shown: str
    place: str
    why: str


@dataclass(frozen=True)
class ApproximatedSetting:
    """A setting that the forecast does not follow.

    why: what is forecast instead.
    errs: which way the answer errs.
    other: keys of a job whose forecast bounds the error.
    is_known: whether the program's table has its name.
    """

    shown: str
    place: str
    why: str
    errs: str = ""
    other: SomeKeys = field(default_factory=dict)
    is_known: bool = True


@dataclass(frozen=True)
class Question:
    """What decides the plan or the memory, and was not understood or not stated.

    shown, place: the setting and its line; shown is empty where the file lacks it.
    why: what is open.
    answers: changes of the job, as behind ``--set``, or options such as ``--env TP=...``, each of which answers it.
    """

    shown: str
    place: str
    why: str
    answers: tuple[str, ...] = ()

    def __str__(self) -> str:
        subject = " ".join(dict.fromkeys(word for word in (self.place, self.shown) if word))
        options = (word if word.startswith("--") else f"--set {word}" for word in self.answers)
        listed = " or ".join(options)
        return f"{subject}: {self.why}" + (f" ({listed})" if listed else "")

    def is_answered(self, fields: Mapping[str, str]) -> bool:
        """Returns whether changes of these fields answer it: the field itself, a field inside it, or the mapping around
        it."""
        asked = (word.partition("=")[0] for word in self.answers if not word.startswith("--"))
        return any(
            field == changed or field.startswith(f"{changed}.") or changed.startswith(f"{field}.")
            for field in asked
            for changed in fields
        )


@dataclass
class Findings:
    """The settings of a file in the four classes."""

    taken: list[TakenSetting] = field(default_factory=list)
    ignored: list[IgnoredSetting] = field(default_factory=list)
    approximated: list[ApproximatedSetting] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)

    @property
    def listed(self) -> set[tuple[str, str]]:
        """Name and place of every setting that is in classes 2 to 4."""
        return {(entry.shown, entry.place) for entry in self.ignored} | self.unfollowed

    @property
    def unfollowed(self) -> set[tuple[str, str]]:
        """Name and place of every setting that the forecast does not follow."""
        approximated = {(entry.shown, entry.place) for entry in self.approximated}
        return approximated | {(question.shown, question.place) for question in self.questions}


DECISIVE = re.compile(
    r"parallel|shard|zero|fsdp|deepspeed|offload|recompute|(activation|gradient).*checkpoint|checkpoint.*activation"
    r"|precision|(?<![a-z])(fp|bf|int|float|nf)(4|8|16|32)|quanti[sz]|(?<![a-z])(micro|mini|global|train|local|device)?_?batch"
    r"|seq(uence)?_?len|max_(seq|length|position)|block_size|context_len|cutoff|packing|lora|(?<![a-z])peft|adapter|freeze"
    r"|(?<![a-z])(optim(izer)?(_type|_name)?|num_layers|hidden_size|num_attention_heads|num_experts|top_?k|moe_topk)$"
    r"|expert.*(size|degree|parallel)|pipeline|(?<![a-z])(tp|pp|cp|dp|ep|sp|etp|vpp)(_size|_degree)?$|ulysses|accum|world_size",
    re.IGNORECASE,
)
"""Names that look like settings of the plan, the batch, the precision or the memory."""


def looks_decisive(name: str) -> bool:
    """Returns whether a setting that nothing knows has a name of the plan, the batch, the precision or the memory."""
    return DECISIVE.search(name) is not None


def place_of(stated: Stated | None, where: str) -> tuple[str, str]:
    """Returns the name and the place of a setting; of none, those of the file."""
    return (stated.shown, stated.place or where) if stated is not None else ("", where)
