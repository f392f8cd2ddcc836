"""What a shell knows while a script is followed: variables, functions, arguments, files, and what may still be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.bash.records import Command, LostPlace, Word
from meshcast.simulator.formats.launch.bash.values import (
    COST_OF_A_SEGMENT,
    Segment,
    Value,
    as_word,
    measure,
    merge_segments,
    read_text,
)

if TYPE_CHECKING:
    from tree_sitter import Node

    from meshcast.simulator.formats.launch.bash.grammar import Source

LONGEST = 1_000_000
"""Letters of the longest variable: scripts may double a variable again and again."""

MAX_STEPS = 50_000
"""Nodes of the syntax tree that are followed, loops counted anew in each round."""

MAX_LETTERS = 10_000_000
"""Letters that all expansions together may make."""

MAX_ROUNDS = 2_000
"""Rounds of a loop, and words of a range such as {1..8}."""

DEEPEST = 60
"""Statements, functions and files inside of each other."""

MAX_WORDS = 20_000
"""Words that a word of a command may stand for."""

COPY_COST = 4
"""Letters of a variable that are as quickly copied, when it is set anew, as a letter is appended."""

REMEDY = "Write out the command that starts the training program"


@dataclass
class StepLimits:
    """How much of a script may still be followed, so that every script ends.

    where: the script, for messages.
    line: the last that was looked at.
    """

    where: str
    line: int = 1
    steps: int = 0
    letters: int = 0
    depth: int = 0

    def step(self, line: int) -> None:
        """Counts a node. Raises PlanError behind `MAX_STEPS`."""
        self.line = line
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise self.refuse(f"following the script takes more than {MAX_STEPS:,} steps")

    def spend(self, letters: int) -> None:
        """Counts letters that an expansion makes. Raises PlanError behind `MAX_LETTERS`."""
        self.letters += letters
        if self.letters > MAX_LETTERS:
            raise self.refuse(f"the variables of the script make more than {MAX_LETTERS:,} letters")

    def enter(self) -> None:
        """Counts a level of nesting. Raises PlanError behind `DEEPEST`."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.refuse(f"more than {DEEPEST} statements, functions or files are inside of each other")

    def leave(self) -> None:
        """Ends a level of nesting."""
        self.depth -= 1

    def refuse(self, rule: str, remedy: str = REMEDY) -> PlanError:
        """Returns the error for a limit that is reached at the current line."""
        return PlanError(f"{self.where}:{self.line}", rule, remedy)


@dataclass(frozen=True)
class Variable:
    """A variable; none of its parts is changed in place.

    elements: of an array by their indices; a plain variable has a single element, of the index 0.
    is_array: whether it was assigned as an array.
    is_map: whether its indices are texts.
    exported: whether programs get it.
    lost: places on which it depends although none of its elements shows it.
    """

    elements: Mapping[int | str, Value] = field(default_factory=dict)
    is_array: bool = False
    is_map: bool = False
    exported: bool = False
    lost: tuple[LostPlace, ...] = ()


@dataclass
class Frame:
    """A call of a function, or the script itself.

    arguments: ``$1`` and those behind it.
    is_given: whether these are known; those of the script are not, where nobody gives any.
    hidden: variables outside that local ones hide; None where there is none.
    """

    arguments: list[Value]
    is_given: bool = True
    hidden: dict[str, Variable | None] = field(default_factory=dict)


@dataclass
class CapturedOutput:
    """What a command prints. is_opaque: whether a program printed, of which nothing is known."""

    values: list[Value] = field(default_factory=list)
    is_opaque: bool = False

    def read(self) -> Value:
        """Returns all that was printed."""
        return tuple(segment for value in self.values for segment in value)


@dataclass
class Shell:
    """A shell while a script is followed.

    where: the script, for messages.
    folder: of the script, for files beside it.
    functions: bodies of functions with the text that they stand in.
    commands, files, lost, positional: as those of `ScriptRun`.
    stdin: what the current command reads; None if nothing is known of it.
    output: where what is printed goes; None: it is not kept.
    """

    where: str
    folder: Path | None
    limits: StepLimits
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, tuple[Source, Node]] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    files: dict[str, tuple[str, int]] = field(default_factory=dict)
    lost: list[LostPlace] = field(default_factory=list)
    positional: dict[str, None] = field(default_factory=dict)
    stdin: Value | None = None
    output: CapturedOutput | None = None

    @property
    def frame(self) -> Frame:
        """The call that is under way."""
        return self.frames[-1]

    def assign(self, name: str, variable: Variable) -> None:
        """Sets a variable. Raises PlanError for a variable that is too long."""
        size = sum(measure(value) for value in variable.elements.values())
        self.limits.spend(size // COPY_COST)
        letters = sum(len(segment.text) for value in variable.elements.values() for segment in value)
        if letters > LONGEST or size > LONGEST * COST_OF_A_SEGMENT:
            raise self.limits.refuse(
                f"the variable {name} grows beyond {LONGEST:,} letters", "Write out the arguments of the program"
            )
        before = self.variables.get(name)
        if before is not None and before.exported:
            variable = replace(variable, exported=True)
        self.variables[name] = variable

    def assign_text(self, name: str, value: Value) -> None:
        """Sets a plain variable."""
        self.assign(name, Variable({0: merge_segments(value)}))

    def restore(self, name: str, variable: Variable | None) -> None:
        """Makes a variable what it was before; None: it was not set."""
        if variable is None:
            self.variables.pop(name, None)
        else:
            self.variables[name] = variable

    def assign_number(self, name: str, number: int) -> None:
        """Sets a plain variable to a number that the current line computes."""
        self.assign_text(name, (Segment(str(number), self.limits.line),))

    def print(self, value: Value) -> None:
        """Adds to what the current command prints."""
        if self.output is not None:
            self.limits.spend(measure(value))
            self.output.values.append(value)

    def print_opaque(self) -> None:
        """Notes that a program prints what nobody knows."""
        if self.output is not None:
            self.output.is_opaque = True

    def exported_words(self) -> dict[str, Word]:
        """Returns the variables that programs get."""
        exported = {}
        for name, variable in self.variables.items():
            if variable.exported and 0 in variable.elements:
                exported[name] = as_word(variable.elements[0], self.limits.line)
        self.limits.spend(COST_OF_A_SEGMENT * len(self.variables) + sum(len(word.text) for word in exported.values()))
        return exported

    def write_file(self, name: str, value: Value, append: bool) -> None:
        """Keeps what a script writes into a file."""
        text, line = read_text(value), value[0].line if value else self.limits.line
        if append and name in self.files:
            before, line = self.files[name]
            text = before + text
        self.limits.spend(len(text))
        self.files[name] = (text, line)
