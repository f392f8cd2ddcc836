"""Shared by all commands: JSON answers, error messages, exit codes, checks of output paths."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

from meshcast.experiments.cli.commands import INTERRUPTED, WRONG
from meshcast.experiments.options import option
from meshcast.experiments.render.matplotlib.style import WIDTHS, Width
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.errors import MeshcastError, PlanError, nearest

IMAGE_SUFFIXES = (".png", ".svg", ".pdf")
"""Formats of figures."""


Changes = Annotated[tuple[str, ...], option("--set", "Change a field of the job, e.g. plan.tp=4.", "FIELD=VALUE")]
AsJson = Annotated[bool, option("--json", "Print the answer as JSON.")]
WidthOption = Annotated[
    str | None,
    option(
        "--width",
        "What the plot is made for: a column of a paper (3.33 in), a page (7 in), a slide (13.33 in).",
        "|".join(WIDTHS),
    ),
]


def track(items: Iterable[Any], label: str) -> Iterable[Any]:
    """Passes items on one by one; on a terminal a bar shows how many of them are done."""
    from rich.console import Console
    from rich.progress import track as track_on

    console = Console(stderr=True)
    return track_on(list(items), label, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def answering(as_json: bool = False) -> Iterator[None]:
    """Turns invalid input into one message, or with --json into one error object, and an exit code."""
    try:
        yield
        sys.stdout.flush()
    except MeshcastError as error:
        _refuse(error, as_json)
    except OSError as error:
        if error.filename is None and error.errno is not None:  # of what is printed: `main` ends the command
            raise
        rule = f"it cannot be read or written ({error.strerror or error})"
        _refuse(PlanError(str(error.filename or "file"), rule, "Name another file or folder"), as_json)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _refuse(error: MeshcastError, as_json: bool) -> NoReturn:
    """Prints an error and ends the command."""
    if as_json:
        emit({"error": error.to_dict()})
    else:
        print(f"meshcast: {error}", file=sys.stderr, flush=True)
    sys.exit(WRONG)


def emit(answer: Any) -> None:
    """Prints an answer as JSON; equal answers give equal bytes."""
    print(to_json(answer, indent=2), flush=True)


def emit_or_show(as_json: bool, answer: Any, *make_pages: Callable[[], Any]) -> None:
    """Prints an answer, or what a function of no argument answers, as JSON; or else the pages that are made of it."""
    if as_json:
        emit(answer() if callable(answer) else answer)
        return
    from meshcast.experiments.render.terminal.forecast import show

    for make_page in make_pages:
        show(make_page())


@contextmanager
def writing_figure(path: Path) -> Iterator[None]:
    """Makes the folder of a figure; turns an OSError into the error for a file that cannot be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield


@contextmanager
def writing(path: Path, option: str = "--plot") -> Iterator[None]:
    """Turns an OSError into the error for a file that cannot be written."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error.strerror or str(error), option) from None


def to_json(answer: Any, indent: int | None = None) -> str:
    """An answer as JSON. Numbers that JSON does not have, NaN and infinity, become null; a message says which."""
    try:
        return json.dumps(answer, indent=indent, allow_nan=False)
    except ValueError:
        places: list[str] = []
        finite = _without_constants(answer, "", places)
        more = f" and {len(places) - 3:,} more" if len(places) > 3 else ""
        rule = f"{', '.join(places[:3])}{more}: no finite number, so null in JSON"
        say(f"meshcast: {rule}. Report it if all inputs are plausible", err=True)
        return json.dumps(finite, indent=indent, allow_nan=False)


def _without_constants(data: Any, place: str, places: list[str]) -> Any:
    """`data` with None in place of NaN and infinity, whose places are added to `places`."""
    if isinstance(data, dict):
        return {key: _without_constants(value, f"{place}.{key}".lstrip("."), places) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without_constants(value, f"{place}[{i}]", places) for i, value in enumerate(data)]
    if isinstance(data, float) and not math.isfinite(data):
        places.append(f"{place} is {data}")
        return None
    return data


DESCRIBE_ARGUMENTS = "_update_set_signature_and_docstring"
"""What matplotlib calls of each class of artists."""


def plot_files(
    plot: str, names: Sequence[str] = ("timeline", "memory", "breakdown"), option: str = "--plot"
) -> dict[str, Path]:
    """Files of the figures: the first figure if `plot` is a file, all of them if it is a folder.

    Raises PlanError, before any work, for a path that cannot be written.
    """
    path, named = Path(plot), plot.endswith(("/", os.sep))
    if not named and (path.suffix.lower() in IMAGE_SUFFIXES or not plot or not path.is_dir()):
        if path.suffix.lower() not in IMAGE_SUFFIXES:
            remedy = f"Write {path.stem or names[0]}.png"
            if len(names) > 1:
                remedy += f", or {path.stem or 'figures'}/ for all figures"
            raise PlanError(option, "a figure is drawn as .png, .svg or .pdf", remedy, plot)
        check_place(path, option)
        _leave_out_docs()
        return {names[0]: path}
    if path.exists() and not path.is_dir():
        raise unwritable(path, "it is not a folder", option)
    files = {name: path / f"{name}.png" for name in names}
    for place in files.values() if path.is_dir() else [path]:
        check_place(place, option)
    _leave_out_docs()
    return files


def _leave_out_docs() -> None:
    """Lets matplotlib describe no properties of its artists, nor the arguments that set them, which it does for people
    who read their documentation in this process: half of the time of its import."""
    from matplotlib import artist

    vars(artist)["kwdoc"] = lambda _: ""
    setattr(artist.Artist, DESCRIBE_ARGUMENTS, lambda: None)


def plan_figures(
    plot: str | None, width: str | None, names: Sequence[str] = ("timeline", "memory", "breakdown")
) -> tuple[dict[str, Path], Width]:
    """Returns the files of the figures of ``--plot`` by name, none without it, and the width that they are made for.

    Raises PlanError, before any work, for what cannot be drawn.
    """
    return plot_files(plot, names) if plot is not None else {}, choose_width(width, plot)


def choose_width(name: str | None, plot: object) -> Width:
    """Returns the width of a plot by its name, that of a page without one.

    plot: what is to be drawn; None if nothing is. Raises PlanError for an unknown width, and for one without a plot.
    """
    if name is None:
        return "page"
    if name not in WIDTHS:
        raise PlanError("--width", "there is no width of this name", nearest(name, WIDTHS), name)
    if plot is None:
        raise PlanError("--width", "it is for a plot", "Name the file with --plot, or leave it out", name)
    return name  # type: ignore[return-value]


def check_suffix(path: Path, suffixes: Sequence[str], what: str, option: str = "--out") -> None:
    """Raises PlanError for a file whose name promises another format than `what` is written in."""
    if path.suffix.lower() not in suffixes:
        rule = f"{what} is written as {' or '.join(suffixes)}"
        raise PlanError(option, rule, f"Write {path.stem or 'out'}{suffixes[0]}", str(path))


def check_place(path: Path, option: str) -> None:
    """Raises PlanError for a file that cannot be written."""
    if not path.parent.is_dir():
        raise unwritable(path, f"there is no folder {path.parent}", option)
    if path.is_dir():
        raise unwritable(path, "it is a folder", option)
    if path.is_symlink():
        rule = f"it is a symbolic link to {os.readlink(path)}, which would be overwritten"
        raise PlanError(option, rule, "Name that file itself, or remove the link", str(path))
    if path.exists() and not (path.is_file() or path.is_char_device()):
        raise unwritable(path, "it is a pipe or a device", option)
    if path.exists() and not os.access(path, os.W_OK):
        raise unwritable(path, "permission denied", option)
    if not path.is_char_device() and not os.access(path.parent, os.W_OK):  # a file is replaced, not overwritten
        raise unwritable(path, f"permission denied in the folder {path.parent}", option)


def check_folder(path: Path, option: str) -> None:
    """Raises PlanError for a folder in which no files can be written; it may be one that is still to be made."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir():
        raise unwritable_folder(path, f"{there} is not a folder", option)
    if not os.access(there, os.W_OK):
        raise unwritable_folder(path, "permission denied", option)


def unwritable_folder(path: Path, reason: str, option: str) -> PlanError:
    """The error for a folder in which files cannot be written."""
    rule = f"no files can be written into this folder ({reason})"
    return PlanError(option, rule, "Name a folder that you may write to", str(path))


def unwritable(path: Path, reason: str, option: str = "--plot") -> PlanError:
    """The error for a file that cannot be written."""
    return PlanError(
        option,
        f"the file cannot be written ({reason})",
        "Name a file in a folder that you may write to and that has room",
        str(path),
    )
