"""A launch file as it lies there: its text, what it holds as data, and the starts of programs in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from meshcast.hardware.documents.input_file import LAUNCH, Unreadable, is_file, parse_toml
from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import read_yaml, read_yaml_documents
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.files import text as read_text
from meshcast.simulator.formats.launch import is_manifest_text
from meshcast.simulator.formats.launch.arguments import read_directives, read_unused
from meshcast.simulator.formats.launch.bash.records import Command, ScriptRun
from meshcast.simulator.formats.launch.bash.script import run_script
from meshcast.simulator.formats.launch.edited import find_edited
from meshcast.simulator.formats.launch.launches import Launch, Launcher, choose_launch, find_launches, list_rivals

REMEDY = "Name a launch script, a TOML, YAML, JSON or Python file of a training program, or a job"


@dataclass(frozen=True)
class LaunchOptions:
    """What a user gives beside a launch file.

    environment: variables of the shell that started it.
    arguments: those of its command line.
    program: the training program, where the file leaves it open.
    start: which of several trainings of a script, counted from 1.
    assume_defaults: whether what is open is assumed instead of asked for.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    program: str | None = None
    start: int | None = None
    assume_defaults: bool = False


_OPTIONS: ContextVar[LaunchOptions | None] = ContextVar("launch_options", default=None)


def current_options() -> LaunchOptions:
    """Returns the options that `reading_launch_files` has set; otherwise none."""
    return _OPTIONS.get() or LaunchOptions()


@contextmanager
def reading_launch_files(options: LaunchOptions) -> Iterator[None]:
    """Reads the launch files inside with these options."""
    token = _OPTIONS.set(options)
    try:
        yield
    finally:
        _OPTIONS.reset(token)


@dataclass(frozen=True)
class LaunchFile:
    """A launch file.

    where: its path, as errors name it.
    text: its content.
    suffix: the end of its name, in small letters.
    folder: of relative paths.
    data: what YAML, JSON or TOML hold; None for scripts and Python.
    launch: the start of a program that counts, of a script.
    rivals: the starts of which each may be meant, where a script has several.
    run: what is known of a script.
    """

    where: str
    text: str
    suffix: str
    folder: Path = Path()
    data: Any = None
    launch: Launch | None = None
    rivals: tuple[Launch, ...] = ()
    run: ScriptRun | None = None
    options: LaunchOptions = field(default_factory=LaunchOptions)

    @property
    def keys(self) -> frozenset[str]:
        """The top-level keys of its data."""
        return frozenset(map(str, self.data)) if isinstance(self.data, Mapping) else frozenset()

    def with_arguments(self, arguments: tuple[str, ...]) -> LaunchFile:
        """Returns the file, not read again, with other arguments."""
        return replace(self, options=replace(self.options, arguments=arguments))

    def writes(self, name: str) -> bool:
        """Returns whether the script writes the file of this name, which may hold variables that nothing sets."""
        return self.run is not None and name in self.run.files

    def find_companion(self, name: str) -> LaunchFile | None:
        """Returns the file that a setting names, if it is there.

        The script writes it, or it lies relative to the folder of this file, to a folder above it, or to the
        current folder; of a path that the script's machine has, the end counts.
        """
        plain = name.strip().strip("'\"")
        base = Path(plain).name
        for written, (text, _) in self.run.files.items() if self.run is not None else ():
            if plain == written or base == Path(written).name:
                return parse_launch_text(text, f"{self.where} ({base})", Path(base).suffix, self.folder, self.options)
        tail = [part for part in Path(plain).parts if part not in ("/", ".", "..") and "$" not in part]
        folders = [self.folder, Path(), *list(self.folder.resolve().parents)[:4]]
        candidates = [self.folder / plain] if plain and "$" not in plain else []
        candidates += [folder.joinpath(*tail[i:]) for i in range(len(tail)) for folder in folders]
        for path in candidates:
            if is_file(path) and path.suffix.lower() in (".json", ".yaml", ".yml", ".toml", ".py", ".sh"):
                return read_launch_file(path, self.options)
            if is_file(path) and path.suffix.lower() in (".conf", ".config", ".txt", ""):
                text = _read(path)
                if text.lstrip().startswith("{"):
                    return parse_launch_text(text, str(path), ".json", path.parent, self.options)
        return None


def read_launch_file(path: Path, options: LaunchOptions | None = None, suffix: str = "") -> LaunchFile:
    """Reads a file. suffix: of its syntax, where its name has none.

    Raises PlanError for a file that cannot be read, or that breaks the syntax of its kind.
    """
    return parse_launch_text(_read(path), str(path), path.suffix.lower() or suffix, path.parent, options)


def _read(path: Path) -> str:
    text = find_edited(path)
    return text if text is not None else read_text(path, REMEDY, LAUNCH)


def parse_launch_text(
    text: str, where: str, suffix: str, folder: Path = Path(), options: LaunchOptions | None = None
) -> LaunchFile:
    """Returns the launch file of a text.

    suffix: the end of its name, which says its syntax: ``.toml``, ``.json``, ``.yaml``, ``.py``; all others are
        scripts of a shell, or lists of arguments.
    Raises PlanError for what breaks the syntax.
    """
    options = options or current_options()
    file = LaunchFile(where, text, suffix, folder, options=options)
    if suffix == ".toml":
        try:
            return replace(file, data=parse_toml(text))
        except Unreadable as error:
            followed = _follow_script(file)
            if followed.launch is not None and any("." in name for name in followed.launch.arguments):
                return followed
            raise error.error(PlanError, where, "Correct this line of the file") from None
    if suffix in (".yaml", ".yml", ".json"):
        if (script := _find_workload_script(text, where)) is not None:
            return replace(parse_launch_text(script, where, ".sh", folder, options), text=text)
        return replace(file, data=read_yaml(text + "\n", where, PlanError).data)
    if suffix == ".py":
        return file
    return _follow_script(file)


def _follow_script(file: LaunchFile) -> LaunchFile:
    """Returns a script with the starts of programs in it, nothing of which is executed."""
    options = file.options
    run = run_script(file.text, file.where, file.folder, options.environment, options.arguments)
    launches = find_launches(run, file.where, file.folder)
    rivals = list_rivals(launches)
    if options.start is not None and not 1 <= options.start <= len(rivals):
        rule = f"the script starts {len(rivals)} trainings"
        raise PlanError("--start", rule, "Name one of them, counted from 1", options.start)
    launch = choose_launch(launches) if options.start is None else rivals[options.start - 1]
    unused = read_unused(run, file.where) if launch is None or not launch.arguments else {}
    if unused:  # arguments in arrays that no command here uses
        launch = replace(launch or Launch((), "", (), {}, {}, Command((), {}, 0), file.where), arguments=unused)
    if launch is not None and run.directives:
        scheduler = Launcher("sbatch", read_directives(run.directives, file.where))
        launch = replace(launch, launchers=(scheduler, *launch.launchers))
    return replace(file, launch=launch, rivals=tuple(rivals) if options.start is None else (), run=run)


def _find_workload_script(text: str, where: str) -> str | None:
    """Returns the commands of the containers in a Kubernetes manifest, or of a task of SkyPilot, as a script; None if
    the text is neither."""
    if is_manifest_text(text):
        return "\n".join(_collect_commands(read_yaml_documents(text, where, PlanError)))
    if not TASK.search(text):
        return None
    documents = read_yaml_documents(text, where, PlanError)
    tasks = [_write_task(data, text) for data in documents if isinstance(data, Mapping) and _is_task(data)]
    return "\n".join(tasks) if tasks else None


TASK = re.compile(r"^run:[ \t]*[|>]", re.MULTILINE)
"""The commands of a task of SkyPilot: a section ``run`` that is a text, where that of a job has keys."""

TASK_SECTIONS = {"resources", "setup", "envs", "num_nodes", "workdir", "file_mounts"}


def _is_task(data: Mapping[str, object]) -> bool:
    return isinstance(data.get("run"), str) and bool(TASK_SECTIONS & data.keys())


def _write_task(task: Mapping[str, object], text: str) -> str:
    """Returns the commands of a task of SkyPilot as a script, on the lines of the file: with the variables of the task,
    which those of its user replace, and with those that SkyPilot sets.

    Source: skypilot-org/skypilot, docs/source/running-jobs/environment-variables.rst.
    """
    given = task.get("envs")
    named = given.items() if isinstance(given, Mapping) else ()
    variables = {str(name): str(value) for name, value in named if value is not None}
    variables["SKYPILOT_NUM_NODES"] = str(task.get("num_nodes") or 1)
    if (gpus := _count_accelerators(task.get("resources"))) is not None:
        variables["SKYPILOT_NUM_GPUS_PER_NODE"] = str(gpus)
    known = {name: value for name, value in variables.items() if re.fullmatch(r"[A-Za-z_]\w*", name)}
    first = "; ".join(f"export {name}=${{{name}:-{_quote(value)}}}" for name, value in known.items())
    match = TASK.search(text)
    above = text.count("\n", 0, match.start()) if match is not None else 0
    return first + "\n" * (above + 1) + str(task["run"])


def _count_accelerators(resources: object) -> int | None:
    """Returns the GPUs of a node (``H200:8``); None where nothing says it, or several numbers do."""
    stated = resources.get("accelerators") if isinstance(resources, Mapping) else None
    if isinstance(stated, Mapping):
        stated = [f"{name}:{count}" for name, count in stated.items()]
    words = [str(word) for word in stated] if isinstance(stated, list | tuple | set) else [str(stated or "")]
    counts = {match[1] or "1" for word in words if (match := re.fullmatch(r"[\w.-]+(?::(\d{1,4}))?", word))}
    return int(counts.pop()) if len(counts) == 1 else None


def _collect_commands(node: Any) -> list[str]:
    """Returns the commands with their arguments of all containers below a node, a line each."""
    if isinstance(node, list):
        return [line for inner in node for line in _collect_commands(inner)]
    if not isinstance(node, Mapping):
        return []
    command = [word for key in ("command", "args") if isinstance(node.get(key), list) for word in node[key]]
    words = [str(word) for word in command]
    exports = _export_variables(node.get("env")) if words else []
    if len(words) >= 3 and words[0].rsplit("/", 1)[-1] in ("bash", "sh") and words[1].startswith("-"):
        return [*exports, words[2]]
    joined = (
        [" ".join(word if re.fullmatch(r"[\w./=:,@%+$-]+", word) else _quote(word) for word in words)] if words else []
    )
    return exports + joined + [line for value in node.values() for line in _collect_commands(value)]


def _export_variables(entries: Any) -> list[str]:
    """Returns the lines of a shell that set the variables of a container."""
    known = [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    return [
        f"export {entry['name']}={_quote(str(entry['value']))}"
        for entry in known
        if re.fullmatch(r"[A-Za-z_]\w*", str(entry.get("name", ""))) and "value" in entry
    ]


def _quote(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"
