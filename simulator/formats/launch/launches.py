"""The training programs that a shell script starts: behind which launchers, with which arguments.

Launchers are taken off in turn, commands inside of quoted strings (``srun bash -c "..."``) and scripts beside this
script are followed, and what is left is the entry of a program with its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.bash.directives import list_slurm_variables, read_directives
from meshcast.simulator.formats.launch.bash.files import read_beside
from meshcast.simulator.formats.launch.bash.records import Command, LostPlace, ScriptRun, Word
from meshcast.simulator.formats.launch.bash.script import run_text
from meshcast.simulator.formats.launch.bash.state import StepLimits
from meshcast.simulator.formats.launch.bash.values import FieldBuilder, Segment, Value, as_word, from_word
from meshcast.simulator.formats.launch.launchers import (
    INTERPRETERS,
    SHELLS,
    SplitCommand,
    find_module,
    is_unset,
    split_command,
)
from meshcast.simulator.formats.launch.table import Stated

DEEPEST = 8
"""Shells inside of each other."""

SUBCOMMANDS: Mapping[str, tuple[str, ...]] = {
    "swift": ("sft", "pt", "rlhf", "dpo", "orpo", "simpo"),
    "megatron": ("sft", "pt", "rlhf"),
    "llamafactory-cli": ("train",),
    "lmf": ("train",),
    "axolotl": ("train",),
    "trl": ("sft", "dpo", "grpo", "kto", "rloo", "reward", "gkd"),
    "xtuner": ("train",),
    "oumi": ("train",),
    "tune": ("run",),
    "litgpt": ("pretrain", "finetune", "finetune_full", "finetune_lora", "finetune_adapter"),
    "nemo": ("llm",),
    "primus-cli": ("direct", "container", "slurm"),
    "autotrain": ("llm",),
    "colossalai": (),
}
"""Programs that train with a word behind them."""

PLACES = re.compile(
    r"(dir|path|file|folder|prefix|name|load|save|data\w*|seed|lr|learning_rate|epochs?|steps|iters|samples|port|rank|url|addr"
    r"|project|group|tags?|run_id|resume\w*|template|report_to|interval)$|^(wandb|log|eval|save|tensorboard|data|valid|test)"
)
"""Names of arguments that two starts of the same training may differ in."""

WITHOUT_TRAINING = re.compile(
    r"(?i).*(preprocess|convert|download|prepare_|prep_|upload|inference|generat|serve|server|merge_|tokenize|evaluat|lm_eval|eval_"
    r"|_eval|plot|visuali|checker|check_|http|notebook|jupyter|export|setup\.py|make_|build|install|format_|split_|count_|clean|"
    r"tools/|json\.tool|^pip$|^venv$|^wandb$|^ray\.|consolidate|zero_to_fp32|collect_env|hostlist|monitor|pytest)"
)
"""Entries that do something else with models and data."""


@dataclass(frozen=True)
class Launcher:
    """A program that starts the training program. settings: its options by their names, with ``_`` for ``-``."""

    name: str
    settings: Mapping[str, Stated]


@dataclass(frozen=True)
class Launch:
    """A start of a program that may train.

    launchers: the outermost first.
    entry: the program: a file (``pretrain_gpt.py``), a module (``torchtitan.train``), or a command (``swift sft``).
    positional: words that belong to no option: configuration files, overrides such as ``a.b=c``.
    arguments: options by their names, with ``_`` for ``-``.
    environment: variables that the program gets.
    command: as the script has it.
    place: where that is.
    lost: places in the shells around it where the reader was lost.
    """

    launchers: tuple[Launcher, ...]
    entry: str
    positional: tuple[Stated, ...]
    arguments: Mapping[str, Stated]
    environment: Mapping[str, Word]
    command: Command
    place: str
    lost: tuple[LostPlace, ...] = ()


@dataclass(frozen=True)
class _Context:
    """What stands around a command. folder: of the script; depth: of shells."""

    where: str
    folder: Path | None
    limits: StepLimits
    launchers: tuple[Launcher, ...] = ()
    lost: tuple[LostPlace, ...] = ()
    depth: int = 0
    followed: frozenset[str] = field(default_factory=frozenset)

    def place(self, word: Word | Command) -> str:
        """Returns file and line of a word."""
        file = word.file or self.where
        return f"{file}:{word.line}" if word.line else file


def find_launches(run: ScriptRun, where: str, folder: Path | None = None) -> tuple[Launch, ...]:
    """Returns all starts of programs that may train.

    where: the file, for messages.
    folder: where it lies, for scripts beside it.
    """
    if run.commands and all(command.words[0].text.startswith("--") for command in run.commands):
        words = tuple(word for command in run.commands for word in command.words)
        lost = tuple(place for command in run.commands for place in command.lost)
        whole = Command(words, {}, run.commands[0].line, lost)
        return (_make_launch(_Context(where, folder, StepLimits(where)), whole, "", words, {}),)
    context = _Context(where, folder, StepLimits(where))
    return tuple(launch for command in run.commands for launch in _follow(context, command, command.words, {}))


def _follow(
    context: _Context, command: Command, words: Sequence[Word], environment: Mapping[str, Word]
) -> Iterator[Launch]:
    """Yields the starts of a command, whose launchers are taken off in turn."""
    environment = {**command.environment, **environment}
    while len(words) > 1 and is_unset(words[0]):  # bash drops it
        words = words[1:]
    for _ in range(DEEPEST):
        parts = split_command(words) if words else None
        if parts is None:
            break
        context = replace(context, launchers=(*context.launchers, _read_launcher(context, parts)))
        environment = {**environment, **parts.assigned, **_read_passed(parts)}
        words = parts.rest
        if parts.form.joined and words:
            yield from _follow_text(context, command, _join(words), environment)
            return
        if parts.is_module and words and not words[0].text.startswith("-"):
            yield _make_launch(context, command, words[0].text, words[1:], environment)
            return
    if words:
        yield from _start(context, command, words, environment)


def _start(
    context: _Context, command: Command, words: Sequence[Word], environment: Mapping[str, Word]
) -> Iterator[Launch]:
    """Yields the starts of a command that is no launcher."""
    name = words[0].text.rpartition("/")[2]
    if name in SHELLS:
        yield from _follow_shell(context, command, words, environment)
    elif name == "sbatch":
        yield from _follow_sbatch(context, command, words, environment)
    elif INTERPRETERS.match(name):
        yield from _start_python(context, command, words, environment)
    elif name.endswith(".py"):
        yield _make_launch(context, command, name, words[1:], environment)
    elif name.endswith((".sh", ".bash", ".slurm", ".sbatch")):
        yield from _follow_file(context, command, words, environment)
    elif len(words) > 1 and words[1].text in SUBCOMMANDS.get(name, ()):
        yield _start_subcommand(context, command, name, words, environment)
    elif name not in SUBCOMMANDS:  # another launcher
        names = [word.text.rpartition("/")[2] for word in words]
        place = next((place for place, name in enumerate(names) if place and _is_known_launcher(name)), 0)
        yield from _follow(context, command, words[place:], environment) if place else ()


def _is_known_launcher(name: str) -> bool:
    return name in ("torchrun", "accelerate", "deepspeed", "mpirun") or INTERPRETERS.match(name) is not None


def _start_subcommand(
    context: _Context, command: Command, name: str, words: Sequence[Word], environment: Mapping[str, Word]
) -> Launch:
    count = 2
    if (name, words[1].text) == ("nemo", "llm") and len(words) > 2:
        count = 3
    elif name == "tune":  # the options of torchrun stand in front of the recipe
        while count < len(words) and words[count].text.startswith("-"):
            count += 1 if "=" in words[count].text or words[count].text == "--standalone" else 2
        settings = _read_arguments(context, words[2:count])[0]
        context = replace(context, launchers=(*context.launchers, Launcher("tune run", settings)))
        count += 1
    recipe = [words[count - 1].text] if 2 < count <= len(words) else []
    return _make_launch(context, command, " ".join([name, words[1].text, *recipe]), words[count:], environment)


def _start_python(
    context: _Context, command: Command, words: Sequence[Word], environment: Mapping[str, Word]
) -> Iterator[Launch]:
    if module := find_module(words):
        yield _make_launch(context, command, words[module].text, words[module + 1 :], environment)
        return
    place = 1
    while place < len(words) and words[place].text.startswith("-") and words[place].text not in ("-", "-c"):
        place += 2 if words[place].text in ("-X", "-W") else 1
    texts = [word.text for word in words]
    end = texts.index("--", place) + 1 if "--" in texts[place:] else len(words)
    if end < len(words) and _is_known_launcher(texts[end].rpartition("/")[2]):  # another launcher in Python
        settings = _read_arguments(context, words[place + 1 : end - 1])[0]
        inner = replace(context, launchers=(*context.launchers, Launcher(texts[place], settings)))
        yield from _follow(inner, command, words[end:], environment)
    elif place < len(words) and words[place].text not in ("-", "-c"):
        yield _make_launch(context, command, words[place].text.rpartition("/")[2], words[place + 1 :], environment)


# ------------------------------------------------------------------------------------------------------ inner shells


def _follow_shell(
    context: _Context, command: Command, words: Sequence[Word], environment: Mapping[str, Word]
) -> Iterator[Launch]:
    """Yields the starts of ``bash -c TEXT``, ``bash FILE``, or of a here-document that a shell reads."""
    place = 1
    while place < len(words) and re.match(r"[-+]", words[place].text):
        text = words[place].text
        place += 1
        if re.fullmatch(r"-[A-Za-z]*c[A-Za-z]*", text) and place < len(words):
            yield from _follow_text(context, command, from_word(words[place]), environment, words[place + 2 :])
            return
        if text == "-o" or text == "-O":
            place += 1
    if place < len(words):
        yield from _follow_file(context, command, words[place:], environment)
    elif command.stdin is not None:
        yield from _follow_text(context, replace(command, stdin=None), from_word(command.stdin), environment)


def _follow_text(
    context: _Context,
    command: Command,
    text: Value,
    environment: Mapping[str, Word],
    arguments: Sequence[Word] = (),
) -> Iterator[Launch]:
    if context.depth >= DEEPEST:
        rule = f"more than {DEEPEST} shells are inside of each other"
        raise PlanError(context.place(command), rule, "Write out the command that starts the training program")
    run = run_text(text, context.where, context.folder, environment, arguments, context.limits)
    inner = replace(context, depth=context.depth + 1, lost=(*context.lost, *command.lost, *run.lost))
    for started in run.commands:
        yield from _follow(inner, started, started.words, {})


def _follow_file(
    context: _Context, command: Command, words: Sequence[Word], environment: Mapping[str, Word]
) -> Iterator[Launch]:
    """Yields the starts of a script beside this script; a script that does not lie there is an entry itself."""
    path = words[0].text
    text = read_beside(context.folder, path) if path not in context.followed and context.depth < DEEPEST else None
    if text is None:
        yield _make_launch(context, command, path.rpartition("/")[2], words[1:], environment)
        return
    value = (Segment(text.replace("\r\n", "\n"), 1, file=path),)
    inner = replace(context, followed=context.followed | {path})
    yield from _follow_text(inner, command, value, environment, words[1:])


def _follow_sbatch(
    context: _Context, command: Command, words: Sequence[Word], environment: Mapping[str, Word]
) -> Iterator[Launch]:
    """Yields the starts of ``sbatch --wrap TEXT`` and ``sbatch FILE``."""
    parts = split_command([replace(words[0], text="srun"), *words[1:]])
    if parts is None:
        return
    options = _read_launcher(context, parts).settings
    script = ""
    if parts.rest:
        script = read_beside(context.folder, parts.rest[0].text) or ""
    elif command.stdin is not None:
        script = command.stdin.text
    settings = {**_read_directives(context, script), **options}
    submitted = {name.replace("_", "-"): Word(str(stated.value), command.line) for name, stated in options.items()}
    environment = {**environment, **list_slurm_variables({**read_directives(script), **submitted})}
    context = replace(context, launchers=(*context.launchers, Launcher("sbatch", settings)))
    wrapped = next((value[0] for _, name, value in parts.options if name == "wrap" and value), None)
    if wrapped is not None:
        yield from _follow_text(context, command, from_word(wrapped), environment)
    elif parts.rest:
        yield from _follow_file(context, command, parts.rest, environment)
    elif command.stdin is not None:
        yield from _follow_text(context, replace(command, stdin=None), from_word(command.stdin), environment)


def _read_directives(context: _Context, script: str) -> dict[str, Stated]:
    """Returns what the comments of a script that sbatch starts say to it."""
    return {
        name.replace("-", "_"): Stated(word.text or True, f"#SBATCH --{name}", context.where)
        for name, word in read_directives(script).items()
    }


def _join(words: Sequence[Word]) -> Value:
    """Returns the text that ssh gives to a shell: its words with spaces between them."""
    segments: list[Segment] = []
    for place, word in enumerate(words):
        segments += [Segment(" ", word.line)] if place else []
        segments += from_word(word)
    return tuple(segments)


def _read_passed(parts: SplitCommand) -> dict[str, Word]:
    """Returns the variables that a launcher passes on: ``docker run -e NAME=value``, ``mpirun -x NAME=value``."""
    passed = {}
    for _, name, value in parts.options:
        if name in ("e", "env", "x", "genv", "export") and value:
            label, sign, rest = value[0].text.partition("=")
            if sign and re.fullmatch(r"[A-Za-z_]\w*", label):
                passed[label] = replace(value[0], text=rest, parts=())
    return passed


# ---------------------------------------------------------------------------------------------------------- arguments


def _read_launcher(context: _Context, parts: SplitCommand) -> Launcher:
    settings = {}
    for word, name, value in parts.options:
        shown = re.split("=", word.text, maxsplit=1)[0]
        texts = [part.text for part in value]
        unknown = tuple(name for part in value for name in part.unknown)
        settings[name] = Stated(_as_setting(texts), shown, context.place(word), unknown)
    return Launcher(parts.form.name, settings)


def _as_setting(texts: Sequence[str]) -> str | bool | list[str]:
    return True if not texts else texts[0] if len(texts) == 1 else list(texts)


def _make_launch(
    context: _Context, command: Command, entry: str, words: Sequence[Word], environment: Mapping[str, Word]
) -> Launch:
    arguments, positional = _read_arguments(context, words)
    return Launch(
        context.launchers, entry, positional, arguments, environment, command, context.place(command), context.lost
    )


_FLAG = re.compile(r"(--?)([A-Za-z][\w.-]*)(?:=(.*))?$", re.DOTALL)
_OVERRIDE = re.compile(r"(\+{0,2}|~)[A-Za-z_][\w.@/-]*(=|$)")
_MORE_ARGUMENTS = re.compile(r"(?i)\W*\w*(args?|opts?|options|flags|extra|params|cmd)\w*\W*$")


class _Arguments:
    """The words of a program while they become arguments. name: of the option that values belong to; "" for none."""

    def __init__(self, context: _Context) -> None:
        self.context = context
        self.arguments: dict[str, Stated] = {}
        self.positional: list[Stated] = []
        self.values: list[Word] = []
        self.name = ""

    def add(self, word: Word) -> None:
        """Adds a word: an option, a value of the last option, or a positional word."""
        flag = _FLAG.match(word.text)
        if flag is not None and (flag[1] == "--" or len(flag[2]) == 1 or not self._takes_value()):
            self._start_option(word, flag)
        elif not self.name or not self._belongs(word):
            self.name = ""
            place = self.context.place(word)
            self.positional.append(Stated(word.text, word.text, place, word.unknown))
        else:
            self.values.append(word)
            self._keep(self.arguments[self.name])

    def _takes_value(self) -> bool:
        return bool(self.name) and not self.values

    def _start_option(self, word: Word, flag: re.Match[str]) -> None:
        self.name = flag[2].replace("-", "_")
        place, shown = self.context.place(word), f"{flag[1]}{flag[2]}"
        repeated = self.arguments.get(self.name) if flag[1] == "-" else None
        self.values = []
        if repeated is not None and repeated.value is not True:
            before = repeated.value if isinstance(repeated.value, list) else [repeated.value]
            self.values = [Word(text, word.line) for text in before]
        if flag[3] is not None:
            self.values.append(Word(flag[3], word.line, word.unknown, word.file))
        self._keep(Stated(True, shown, place))

    def _belongs(self, word: Word) -> bool:
        """Returns whether a word is a value of the last option.

        Overrides and variables that nothing sets behind a value, and variables that may hold more arguments, are not.
        """
        if word.unknown and word.text.startswith("$") and _MORE_ARGUMENTS.match(word.text):
            return False
        if self.values and _is_unset(word) and not _is_unset(self.values[-1]):
            return False
        override = "=" in word.text and _OVERRIDE.match(word.text) is not None
        return not (override and self.values and "=" not in self.values[0].text)

    def _keep(self, stated: Stated) -> None:
        texts = [value.text for value in self.values]
        unknown = tuple(dict.fromkeys(name for value in self.values for name in value.unknown))
        place = self.context.place(self.values[0]) if self.values else stated.place
        apart = place if place != stated.place else ""
        self.arguments[self.name] = replace(stated, value=_as_setting(texts), unknown=unknown, value_place=apart)


def _is_unset(word: Word) -> bool:
    """Returns whether a word is nothing but variables that nothing sets, which bash drops."""
    return bool(word.parts) and all(segment.unset or not segment.text for segment in word.parts) and bool(word.unknown)


def divide_word(word: Word) -> Sequence[Word]:
    """Returns the words of a word that holds an option and its value, as ``"--lr 1"`` does, else the word."""
    if re.match(r"\s*--[A-Za-z][\w.-]*\s", word.text) is None:
        return (word,)
    builder = FieldBuilder()
    builder.add_divided(from_word(word))
    builder.end_field()
    return tuple(as_word(value, word.line) for value in builder.fields)


def _read_arguments(context: _Context, words: Iterable[Word]) -> tuple[dict[str, Stated], tuple[Stated, ...]]:
    """Returns the options of a program by their names, and the words that belong to none."""
    reader = _Arguments(context)
    for word in words:
        for part in divide_word(word):
            reader.add(part)
    return reader.arguments, tuple(reader.positional)


def read_words(words: Iterable[Word], where: str) -> dict[str, Stated]:
    """Returns the options among words that no command has."""
    return _read_arguments(_Context(where, None, StepLimits(where)), words)[0]


def choose_launch(launches: Sequence[Launch]) -> Launch | None:
    """Returns the start with most arguments, of those that may train; None without any."""
    return max(_list_trainings(launches), key=_count_words, default=None)


def list_rivals(launches: Sequence[Launch]) -> list[Launch]:
    """Returns the starts of a script each of which may be meant, in its order.

    A start with less than half of the arguments of the largest is none of them.
    """
    trainings = _list_trainings(launches)
    most = max(map(_count_words, trainings), default=0)
    rivals: dict[str, Launch] = {}
    for launch in trainings:
        if 2 * _count_words(launch) >= most:
            rivals.setdefault(_describe_effect(launch), launch)
    return list(rivals.values())


def _list_trainings(launches: Sequence[Launch]) -> Sequence[Launch]:
    return [launch for launch in launches if not WITHOUT_TRAINING.match(launch.entry)] or launches


def _count_words(launch: Launch) -> int:
    return len(launch.arguments) + len(launch.positional)


def _describe_effect(launch: Launch) -> str:
    """Returns what a start runs, without what only says where files are and how the run is called."""
    settings = {name: stated.value for name, stated in launch.arguments.items() if not PLACES.search(name)}
    words = [str(stated.value) for stated in launch.positional]
    return repr((launch.entry, sorted(settings.items(), key=str), words))
