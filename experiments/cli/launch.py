"""Launch files on the command line: ``meshcast import``, ``meshcast export``, the options of every command that takes
such a file, and what is said of it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from meshcast.experiments.cli.best_plan import load_with_plan
from meshcast.experiments.cli.commands import VIOLATED
from meshcast.experiments.cli.console import check_place, emit, to_json, writing
from meshcast.experiments.options import Options, option
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import PlanError, cut_middle

if TYPE_CHECKING:
    from meshcast.experiments.explain.bounded_approximations import BoundedApproximation
    from meshcast.simulator.formats.launch.imported_job import ImportedJob
    from meshcast.simulator.job.job import Job

LAUNCH_FILES = "Launch files"
"""Heading of their options in the help of a command."""

KINDS = {
    **{".sh": "a shell script", ".py": "a Python file", ".toml": "a TOML file"},
    **{".yaml": "a YAML file", ".json": "a JSON file"},
}
"""Kinds of launch files by the ends of their names."""


class LaunchFileOptions(Options):
    """Options of every command that takes a job or a launch file."""

    env: Annotated[
        tuple[str, ...],
        option("--env", "A variable of the shell that starts a launch script.", "NAME=VALUE", panel=LAUNCH_FILES),
    ] = ()
    args: Annotated[
        str | None,
        option("--args", "Arguments of a launch script, in quotes: '8 --lr 1e-4'.", "WORDS", panel=LAUNCH_FILES),
    ] = None
    program: Annotated[
        str | None,
        option("--program", "The program of a launch file that may be of several.", "NAME", panel=LAUNCH_FILES),
    ] = None
    start: Annotated[
        int | None, option("--start", "Which of several trainings of a launch script.", "N", min=1, panel=LAUNCH_FILES)
    ] = None
    assume_defaults: Annotated[
        bool,
        option(
            "--assume-defaults", "Go on where a launch file leaves open what decides the answer.", panel=LAUNCH_FILES
        ),
    ] = False
    yes: Annotated[
        bool, option("--yes", "Forecast also what takes long or much memory, which is otherwise refused.")
    ] = False

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Reads launch files, and forecasts jobs of any size, as these options say."""
        with ExitStack() as contexts:
            if self.env or self.args or self.program or self.start or self.assume_defaults:
                from meshcast.simulator.formats.launch.launch_file import LaunchOptions, reading_launch_files

                launch = LaunchOptions(self._variables(), self._words(), self.program, self.start, self.assume_defaults)
                contexts.enter_context(reading_launch_files(launch))
            if self.yes:
                from meshcast.simulator.plan.size import accepting_any_size

                contexts.enter_context(accepting_any_size())
            yield

    def _variables(self) -> dict[str, str]:
        """Returns the variables of `env` by name."""
        variables = {}
        for word in self.env:
            name, equals, value = word.partition("=")
            if not equals or not name.isidentifier():
                raise PlanError("--env", "a variable is written NAME=VALUE", "For example --env TP=4", word)
            variables[name] = value
        return variables

    def _words(self) -> tuple[str, ...]:
        """Returns the words of `args` as a shell splits them."""
        try:
            return tuple(shlex.split(self.args or ""))
        except ValueError as error:
            raise PlanError("--args", f"its quotes are not balanced ({error})", "Close them", self.args) from None


def import_launch(
    form: str | None, file: Path, out: Path | None, changes: Sequence[str], gpus: int | None, as_json: bool
) -> None:
    """Prints or writes the job of a launch file. form: name of its format; None: it is found by what the file holds."""
    from meshcast.simulator.formats.launch.render import render_job
    from meshcast.simulator.loading.load import load_job, read_launch_job

    read = read_launch_job(file, changes, form, gpus)
    imported = read.launch
    assert imported is not None
    load_job(read.data, base=file.parent)  # a job that would be refused is refused here
    if as_json:
        emit(imported.to_dict())
    if out is not None or not as_json:
        in_json = out is not None and out.suffix.lower() == ".json"  # which has no place for comments
        _write(f"{to_json(imported.job, indent=2)}\n" if in_json else render_job(imported), out)


def export_launch(job: Path, program: str, out: Path | None, changes: Sequence[str]) -> None:
    """Prints or writes a job as a launch file."""
    from meshcast.simulator.forecast.planning import resolve_plan
    from meshcast.simulator.formats.launch.convert import export_job
    from meshcast.simulator.loading.load import load_job

    loaded = load_with_plan(job, tuple(changes))
    exported = export_job(loaded, program, lambda data, folder: load_job(data, base=folder), resolve_plan)
    if out is not None and (other := out.suffix.lower().replace(".yml", ".yaml")) in KINDS and other != exported.suffix:
        rule = f"it names {KINDS[other]}, and {program} reads {KINDS[exported.suffix]}"
        raise PlanError("--out", rule, f"Write {out.with_suffix(exported.suffix)}", str(out))
    _write(exported.text, out)
    if exported.unsaid:
        keys = ", ".join(exported.unsaid)
        say(f"meshcast: {program} cannot be told {keys}; the header says what it runs", err=True)


def edit_launch(path: Path, against: Path, changes: Sequence[str], write: bool) -> None:
    """Prints the edits of an existing launch file that make it a job, as a unified diff, and says whether the edited
    file is forecast as the job is; if not, the command ends with an exit code of its own.

    write: whether the file is written.
    """
    from meshcast.experiments.explain.edited_launch import compare_edited, diff_edits, edit_until_same, list_edits
    from meshcast.simulator.formats.launch.bash.script import ARGUMENTS
    from meshcast.simulator.formats.launch.detect import detect_program
    from meshcast.simulator.formats.launch.launch_file import read_launch_file
    from meshcast.simulator.formats.launch.programs.registry import EXPORTS

    file = read_launch_file(against)
    form = detect_program(file).name
    if form not in EXPORTS:
        rule = "its settings cannot be compared: such files are read, not written"
        raise PlanError("--against", rule, f"Name a file of {', '.join(EXPORTS)}", str(against))
    job = load_with_plan(path, tuple(changes))
    edited = edit_until_same(file, form, job)
    texts = list_edits(file, edited.files)
    for line in diff_edits(texts):
        say(line)
    agrees, words = compare_edited(job, edited.job, str(against), form)
    say(f"meshcast: {words}", err=True)
    if not agrees:
        sys.exit(VIOLATED)
    if not texts:
        say(f"{against} says the same already")
    for name, (_, text) in texts.items():
        if name == ARGUMENTS:
            say(f"meshcast: the arguments are others: give --args {shlex.quote(text)}", err=True)
        elif write:
            _replace(Path(name), text)


def _replace(file: Path, text: str) -> None:
    """Writes another content to a file.

    Raises PlanError for a link to a file in another folder: what it points to is not the file that was named.
    """
    target = file.resolve()
    if target.parent != file.parent.resolve():
        rule = "it is a link to a file in another folder, which is not written"
        raise PlanError("--write", rule, f"Name {target} itself", str(file))
    with writing(file, "--write"):
        write_file(file, text)
    say(f"wrote {file}", err=True)


def tell_launch(job: Path, changes: Sequence[str]) -> ImportedJob | None:
    """Says on stderr what a launch file does not state, and what of it the forecast does not follow.

    Returns the launch file as a job; None for a job file.
    """
    from meshcast.simulator.loading.load import read_job

    imported = read_job(job, changes).launch
    if imported is None:
        return None
    from meshcast.simulator.formats.launch.programs.registry import find_format
    from meshcast.simulator.formats.launch.quoting import quote_yaml

    lines = [
        f"assumed {key} {cut_middle(quote_yaml(imported.assumed_values[key]), 80)} "
        f"({why}; change it with --set {_field(key, imported)}=...)"
        for key, why in imported.assumed.items()
    ]
    for entry in imported.findings.approximated:
        lines.append(f"approximated {entry.shown}: {entry.why}{f'; {entry.errs}' if entry.errs else ''}")
    more = f"every setting, and the job it makes: meshcast import {job}"
    for line in (f"{job} is read as a launch file of {find_format(imported.form).program}", *lines, more):
        say(f"meshcast: {line}", err=True)
    return imported


def _field(key: str, imported: ImportedJob) -> str:
    """The field that changes an assumed key: that of the model as a whole, where it is a preset."""
    return "model" if key.startswith("model.") and isinstance(imported.job["model"], str) else key


def show_open_questions(imported: ImportedJob | None) -> None:
    """Prints above a forecast what of a launch file is open, and was assumed."""
    questions = imported.findings.questions if imported is not None else []
    for number, question in enumerate(questions):
        head = "open      " if number == 0 else "          "
        say(f"{head} {question}")
    if questions:
        say("           this forecast goes on without an answer, and its interval is that of the unknown")


def bound_launch(imported: ImportedJob | None, job: Job) -> tuple[Job, list[BoundedApproximation]]:
    """Returns the job of a launch file with an interval that holds the errors of its approximations, and these."""
    if imported is None or not imported.bounding:
        return job, []
    from meshcast.experiments.explain.bounded_approximations import bound_approximations, widen_interval

    bounded = bound_approximations(imported, job)
    return widen_interval(job, bounded), bounded


def describe_launch(imported: ImportedJob | None, bounded: Sequence[BoundedApproximation]) -> dict[str, Any]:
    """The keys of ``predict --json`` on a launch file."""
    if imported is None:
        return {}
    answer = imported.to_dict() | {"program": imported.form, "bounded": [entry.to_dict() for entry in bounded]}
    del answer["job"]
    return {"launch_file": answer}


def show_approximations(imported: ImportedJob | None, bounded: Sequence[BoundedApproximation]) -> None:
    """Prints below a forecast what approximated settings may be worth, and repeats those that nothing knows."""
    for entry in bounded:
        say(f"approx     {entry}")
    approximated = imported.findings.approximated if imported is not None else []
    unknown = [entry.shown for entry in approximated if not entry.is_known]
    if unknown:
        say(f"unknown    {', '.join(unknown)}: not in this forecast")


def add_checkpoints(launch: ImportedJob | None, changes: Sequence[str]) -> list[str]:
    """The changes to a job, and the checkpoints of a launch file where no change states others."""
    if launch is None or not launch.checkpoints or any(change.startswith("run.checkpoints") for change in changes):
        return [*changes]
    return [*changes, f"run.checkpoints={to_json(launch.checkpoints)}"]


def _write(text: str, out: Path | None) -> None:
    """Prints a text, or writes it to a file."""
    if out is None:
        print(text, end="", flush=True)
        return
    check_place(out, "--out")
    with writing(out, "--out"):
        write_file(out, text)
    say(f"wrote {out}", err=True)
