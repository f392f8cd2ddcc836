"""What is known of a shell script that was followed: its commands, variables, files, and where its reader was lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from meshcast.hardware.records import dataclass


@dataclass(frozen=True)
class LostPlace:
    """A place of a script behind which its reader may have missed something.

    line: of the script.
    why: what was not understood there, as a clause.
    variables: of the environment, each of which would tell it.
    """

    line: int
    why: str
    variables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a text that stands on a line.

    unknown: variables that nothing sets, or the command substitution, that the part stands for.
    unset: whether bash would put nothing here, for nothing sets the variable.
    file: the file of the line, if it is not the script itself.
    """

    text: str
    line: int
    unknown: tuple[str, ...] = ()
    unset: bool = False
    file: str = ""


@dataclass(frozen=True)
class Word:
    """A word of a command after all expansions.

    text: what the program would get; what nothing sets stays as the script writes it.
    line: on which the word stands; 0 for what comes from outside of the script.
    unknown: variables that nothing sets, and command substitutions that are not computed, of which the word has a part.
    file: the file that has the line, where it is not the script but a file that it sources.
    parts: the text by its lines; () where it has a single line.
    """

    text: str
    line: int
    unknown: tuple[str, ...] = ()
    file: str = ""
    parts: tuple[Segment, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Command:
    """A simple command as it would be run.

    words: the program and its arguments.
    environment: exported variables, and assignments in front of the command.
    line: on which the command begins.
    lost: places inside of its words where the reader was lost.
    stdin: a here-document that the command reads.
    file: as that of a word.
    """

    words: tuple[Word, ...]
    environment: Mapping[str, Word]
    line: int
    lost: tuple[LostPlace, ...] = ()
    stdin: Word | None = None
    file: str = ""


@dataclass(frozen=True)
class ScriptRun:
    """A script that was followed from its first line to its last.

    commands: in the order in which they would be run.
    variables: at the end of the script; a plain variable is a single word.
    files: text and first line of the files that here-documents, echo and tee write.
    directives: settings of a resource manager (``#SBATCH --nodes=2``) by their names.
    lost: places that may have hidden a command.
    positional: arguments of the script that it reads and nothing gives, such as ``$3``.
    """

    commands: tuple[Command, ...]
    variables: Mapping[str, tuple[Word, ...]]
    files: Mapping[str, tuple[str, int]]
    directives: Mapping[str, Word]
    lost: tuple[LostPlace, ...]
    positional: tuple[str, ...]
