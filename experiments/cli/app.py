"""The command line: ``meshcast predict``, ``sweep``, ``list``, ``validate`` and the rest.

Answers go to stdout, messages to stderr. Exit codes: 0 answered; 1 a check failed; 2 invalid input,
explained in one message; 3 a plan that does not fit, under ``--strict``; 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from meshcast.experiments.cli.commands import COMMANDS, Commands
from meshcast.experiments.cli.console import INTERRUPTED, WRONG
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.documents.input_file import DESCRIPTION, Unreadable, read_text
from meshcast.hardware.errors import PlanError

app = typer.Typer(
    name="meshcast",
    cls=Commands,
    help="Forecasts the step time and memory of LLM training on a GPU cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The ``meshcast`` command."""
    # meshcast multiplies no matrices, and starting numpy's BLAS threads would take longer than a forecast.
    for library in ("OPENBLAS", "OMP", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    os.environ["MPLBACKEND"] = "agg"  # figures are files; one that a notebook or a file names may not be there
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  the caller may have closed it
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # terminals without block characters print question marks
            stream.reconfigure(errors="replace")
    try:
        _check_matplotlib_settings()
        try:
            app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:  # errors of files have become messages; what is left is of what is printed
        _end_without_output(error)


def _check_matplotlib_settings() -> None:
    """Refuses a file matplotlibrc in this folder that is no text: no plot uses its settings, but matplotlib reads it as
    it is imported, waits for a pipe, and ends at bytes that are no text."""
    settings = Path("matplotlibrc")
    if not os.path.exists(settings) or settings.is_dir():
        return
    try:
        read_text(settings, DESCRIPTION)
    except Unreadable as error:
        remedy = "Rename it or run from another folder: matplotlib reads it for every plot"
        say(f"meshcast: {PlanError(str(settings), error.rule, remedy)}", err=True)
        sys.exit(WRONG)


def _end_without_output(error: OSError) -> NoReturn:
    """Ends a command whose output cannot be written, as on a full disk; where the reader of a pipe is gone, quietly."""
    with suppress(OSError):  # stderr may be the same file
        if error.errno != errno.EPIPE:
            say(f"meshcast: standard output: it cannot be written ({error.strerror}). Send it elsewhere", err=True)
            sys.stderr.flush()
    for stream in (1, 2):  # or the interpreter would write the rest at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.exit(WRONG)


def _version(wanted: bool) -> None:
    if wanted:
        from meshcast.simulator.report.version import describe_version

        say(f"meshcast {describe_version()}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print version and commit, and exit.")
    ] = False,
) -> None:
    """Options of meshcast itself."""


def _name_only() -> None:
    """Stands for a command in the list of all."""


for _name, _entry in COMMANDS.items():
    app.command(_name, help=_entry.help, rich_help_panel=_entry.panel)(_name_only)


if __name__ == "__main__":
    main()
