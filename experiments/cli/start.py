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
from typing import NoReturn

from meshcast.experiments.cli.commands import COMMANDS, INTERRUPTED, VIOLATED, WRONG


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
            _run(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:  # errors of files have become messages; what is left is of what is printed
        _end_without_output(error)


def _run(words: list[str]) -> None:
    """Runs the command of a command line; what is not plain, such as ``--help``, is for typer."""
    if words and words[0] in COMMANDS and "_MESHCAST_COMPLETE" not in os.environ:
        from meshcast.experiments.cli.parameters import run_command
        from meshcast.experiments.cli.plain import read_values

        values = read_values(words[0], words[1:])
        if values is not None:
            return run_command(words[0], values)
    from meshcast.experiments.cli.app import app

    app()


def _check_matplotlib_settings() -> None:
    """Refuses a file matplotlibrc in this folder that is no text: no plot uses its settings, but matplotlib reads it as
    it is imported, waits for a pipe, and ends at bytes that are no text."""
    settings = Path("matplotlibrc")
    if not os.path.exists(settings) or settings.is_dir():
        return
    from meshcast.experiments.render.terminal.say import say
    from meshcast.hardware.documents.input_file import DESCRIPTION, Unreadable, read_text
    from meshcast.hardware.errors import PlanError

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
            from meshcast.experiments.render.terminal.say import say

            say(f"meshcast: standard output: it cannot be written ({error.strerror}). Send it elsewhere", err=True)
            sys.stderr.flush()
    for stream in (1, 2):  # or the interpreter would write the rest at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.exit(VIOLATED if error.errno == errno.EPIPE else WRONG)  # as typer ends a command
