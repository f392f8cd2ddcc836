"""``meshcast validate`` compares forecasts with measurements; ``meshcast calibrate`` fits coefficients to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from meshcast.experiments.cli.console import (
    AsJson,
    WidthOption,
    answering,
    check_place,
    choose_width,
    emit,
    emit_or_show,
    one_of,
    plot_files,
)
from meshcast.experiments.render.matplotlib.style import Width
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.errors import PlanError, nearest

MEASURED = ("kernels", "collectives")
FILES = ("stages", "distributed", "trace")
KINDS = ("claims", "pipeline", "published", "choice", "fit", *MEASURED, *FILES)
DRAWN = ("--plot", "--width")
TRACED = ("--calibration", "--job", "--rank", "--step")
LEFT_OUT = ("source", "family", "model")
OF_CLAIMS = ("--family", "--system", "--claim", "--slow")

Data = Annotated[
    list[Path] | None,
    typer.Option("--data", metavar="FILE", help="Measurements, or pipeline cases; may be repeated."),
]
More = Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="Further files, as with --data.")]
Calibration = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="FOLDER", help="Calibrations to use before those of meshcast."),
]


def validate(
    kind: Annotated[
        str,
        typer.Argument(metavar="KIND", help=f"{', '.join(KINDS[:-1])} or {KINDS[-1]}.", autocompletion=one_of(*KINDS)),
    ],
    more: More = None,
    data: Data = None,
    as_json: AsJson = False,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot", metavar="PATH", help="Draw forecast against measured into a .png, .svg or .pdf file, or FOLDER/."
        ),
    ] = None,
    width: WidthOption = None,
    workers: Annotated[
        int | None, typer.Option("--jobs", metavar="N", min=1, help="Number of processes; one per core if not given.")
    ] = None,
    calibration: Calibration = None,
    job: Annotated[Path | None, typer.Option("--job", metavar="JOB", help="trace: the job that was traced.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="trace: rank that was traced.")] = None,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="trace: which of its marked steps.")] = None,
    leave_out: Annotated[
        str | None,
        typer.Option(
            "--leave-out",
            metavar="|".join(LEFT_OUT),
            help="fit: list the errors of every one of them, fitted to all others.",
        ),
    ] = None,
    as_stranger: Annotated[
        bool,
        typer.Option(
            "--as-stranger",
            help="published: with flags hidden, and without what the source of a run has set by its steps.",
        ),
    ] = False,
    family: Annotated[str | None, typer.Option("--family", metavar="NAME", help="claims: of one family.")] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="NAME", help="claims: of one system.")] = None,
    claim: Annotated[
        str | None, typer.Option("--claim", metavar="ID", help="claims: one of them, with its jobs.")
    ] = None,
    slow: Annotated[bool, typer.Option("--slow", help="claims: also those that take long.")] = False,
) -> None:
    """Compare forecasts with what is known: schedules, published runs, measured kernels, collectives, steps, traces."""
    with answering(as_json):
        from meshcast.experiments.render.terminal import published as pages

        if kind not in KINDS:
            raise PlanError("KIND", "there is no kind of this name", nearest(kind, KINDS), kind)
        paths = _list_files(data, more)
        options = {
            "--plot": plot, "--width": width, "--jobs": workers, "--calibration": calibration,
            "--job": job, "--rank": rank, "--step": step, "--leave-out": leave_out,
            "--as-stranger": as_stranger or None,
            "--family": family, "--system": system, "--claim": claim, "--slow": slow or None,
        }  # fmt: skip
        is_measurement = kind in ("stages", "distributed") or (kind in MEASURED and _json(paths))
        known = {
            "pipeline": (), "choice": ("--jobs",), "fit": ("--jobs", "--leave-out"),
            "published": (*DRAWN, "--jobs", "--as-stranger"),
            "trace": (*DRAWN, *TRACED), "claims": ("--jobs", *OF_CLAIMS),
        }  # fmt: skip
        taken = DRAWN if is_measurement else known.get(kind, (*DRAWN, "--calibration"))
        for option, given in options.items():
            if given is not None and option not in taken:
                raise PlanError(option, f"validate {kind} takes no such option", "Leave it out", str(given))
        if leave_out is not None and leave_out not in LEFT_OUT:
            rule = f"it is one of {', '.join(LEFT_OUT)}"
            raise PlanError("--leave-out", rule, nearest(leave_out, LEFT_OUT), leave_out)
        paper = choose_width(width, plot)
        if kind == "claims":
            _validate_claims(paths, workers, as_json, (family, system, claim, slow))
            return
        if kind == "pipeline":
            answer, table = pages.validate_pipeline(paths)
            emit_or_show(as_json, answer, lambda: table)
            return
        if is_measurement:
            _validate_measurement_files(kind, paths, as_json, plot, paper)
            return
        if kind == "trace":
            _validate_trace(paths, job, as_json, (plot, paper), (check_calibration_folder(calibration), rank, step))
            return
        if kind in MEASURED:
            _validate_tables(kind, paths, as_json, (plot, paper), calibration)
            return
        files = plot_files(plot, pages.PLOTS) if plot is not None else {}
        pairs: dict[str, tuple[Callable[..., tuple[dict[str, Any], int]], Callable[[dict[str, Any]], Any]]] = {
            "published": (partial(pages.validate_published, as_stranger=as_stranger), pages.published_page),
            "choice": (_validate_choice, pages.choice_page),
            "fit": (partial(pages.fit_published, leave_out=leave_out), pages.fit_page),
        }
        make_answer, make_page = pairs[kind]
        answer, missing = make_answer(paths, workers)
        pages.draw_plots(answer, files, paper)
        emit_or_show(as_json, answer, lambda: make_page(answer))
        if missing:
            say(f"meshcast: interrupted, {missing:,} runs are not answered", err=True)
            raise KeyboardInterrupt


def _validate_choice(paths: Sequence[Path], workers: int | None) -> tuple[dict[str, Any], int]:
    """Chooses among published plans, by their forecasts and by searches."""
    from meshcast.experiments.render.terminal.published import validate_choice
    from meshcast.experiments.search.published_groups import search_group

    return validate_choice(paths, workers, search_group)


def _validate_claims(paths: Sequence[Path], workers: int | None, as_json: bool, chosen: tuple[Any, ...]) -> None:
    """Judges the claims of papers. chosen: family, system, claim, and whether the slow ones run."""
    from meshcast.experiments.planning.benchmark.claimed_plans import find_claimed_plan
    from meshcast.experiments.render.terminal import claims as pages

    family, system, claim, slow = chosen
    answer, missing = pages.validate_claims(paths, workers, family, system, claim, slow, find_claimed_plan)
    emit_or_show(as_json, answer, lambda: pages.claims_page(answer))
    if missing:
        say(f"meshcast: interrupted, {missing:,} claims are not judged", err=True)
        raise KeyboardInterrupt


def _list_files(data: Sequence[Path] | None, more: Sequence[Path] | None) -> list[Path]:
    """All files that are named. Raises PlanError for one that is named twice: its rows would count twice."""
    paths = [*(data or ()), *(more or ())]
    seen: dict[str, Path] = {}
    for path in paths:
        file = os.path.realpath(path)
        if file in seen:
            rule = "it is named twice" if seen[file] == path else f"it is the same file as {seen[file]}"
            raise PlanError("--data", rule, "Name each file once", str(path))
        seen[file] = path
    return paths


def _json(paths: Sequence[Path]) -> bool:
    """Whether these are measurement files and not tables. Raises PlanError for a mixture."""
    found = [path.suffix == ".json" for path in paths]
    if any(found) and not all(found):
        other = paths[found.index(False)]
        raise PlanError("--data", "tables and measurement files cannot be mixed", "Name files of one kind", str(other))
    return bool(found) and found[0]


def _validate_measurement_files(
    kind: str, paths: Sequence[Path], as_json: bool, plot: str | None, width: Width
) -> None:
    from meshcast.experiments.render.terminal import measurements as pages

    if not paths:
        remedy = f"Name files of meshcast measure {kind}: --data measured.json"
        raise PlanError("--data", f"{kind} need measurement files", remedy)
    files = plot_files(plot, pages.PLOTS) if plot is not None else {}
    answer = pages.validate_files(kind, paths)
    pages.draw_plots(answer, files, width)
    emit_or_show(as_json, answer, lambda: pages.page(answer))


def _validate_trace(
    paths: Sequence[Path], job: Path | None, as_json: bool, plot: tuple[str | None, Width], more: tuple[Any, ...]
) -> None:
    from meshcast.experiments.render.terminal import traces as pages

    if len(paths) != 1 or job is None:
        rule = "it compares one trace with the job that ran"
        raise PlanError("validate trace", rule, "Write meshcast validate trace TRACE --job JOB")
    files = plot_files(plot[0], pages.PLOTS) if plot[0] is not None else {}
    found = pages.compare_trace(paths[0], job, *more)
    pages.draw_plots(found, files, plot[1])
    if as_json:
        emit(found.to_dict())
    else:
        from meshcast.experiments.render.terminal.forecast import show

        show(pages.page(found))


def _validate_tables(
    kind: str, paths: Sequence[Path], as_json: bool, plot: tuple[str | None, Width], calibration: Path | None
) -> None:
    from meshcast.experiments.render.terminal import calibration as pages

    require_files(paths, kind)
    files = plot_files(plot[0], pages.PLOTS) if plot[0] is not None else {}
    answer, held = pages.validate_tables(kind, paths, check_calibration_folder(calibration))
    pages.draw_plots(kind, held, files, plot[1])
    if files and not held:
        say("meshcast: no row is forecast, so nothing is drawn", err=True)
    emit_or_show(as_json, answer, lambda: pages.page(kind, answer["summary"]))


def calibrate(
    kind: Annotated[str | None, typer.Argument(metavar="KIND", help="kernels, collectives or campaign.")] = None,
    more: More = None,
    data: Data = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Folder for the files, one per GPU or kind of link.")
    ] = Path("calibration"),
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Fit only this GPU or link; may be repeated.")
    ] = None,
    leave_out: Annotated[
        bool,
        typer.Option(
            "--leave-out/--no-leave-out", help="Also fit without each library in turn, and report its errors."
        ),
    ] = True,
    device: Annotated[
        str | None, typer.Option("--device", metavar="cpu|cuda", help="Measure this machine instead of tables.")
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            "--processes", metavar="N", min=1, help="--device: processes of the collectives; 1: no collectives."
        ),
    ] = 2,
    as_json: AsJson = False,
) -> None:
    """Fit coefficients of GPUs or links to tables or a campaign, or measure this machine, and write them as YAML."""
    with answering(as_json):
        from meshcast.experiments.render.terminal import calibration as pages

        if device is not None:
            if kind is not None or data or more or only:
                rule = "with it this machine is measured, not tables"
                raise PlanError("--device", rule, "Leave out KIND, --data and --only, or --device", device)
            require_torch()
            check_writable_folder(out)
            answer = pages.calibrate_device(device, out, processes)
            emit_or_show(as_json, answer, lambda: pages.device_page(answer, out))
            return
        known = (*MEASURED, "campaign")
        if kind is None:
            raise PlanError("KIND", "it is required without --device", f"Write {' or '.join(known)}")
        if kind not in known:
            raise PlanError("KIND", "there is no kind of this name", nearest(kind, known), kind)
        paths = _list_files(data, more)
        if kind == "campaign":
            _calibrate_campaign(paths, out, as_json)
            return
        require_files(paths, kind)
        check_writable_folder(out)
        answer = pages.calibrate_tables(kind, paths, out, only or (), leave_out)
        emit_or_show(as_json, answer, lambda: pages.calibration_page(answer, out))
        if answer["missing"]:
            say(f"meshcast: interrupted, not fitted: {', '.join(answer['missing'])}", err=True)
            raise KeyboardInterrupt


def _calibrate_campaign(folders: Sequence[Path], out: Path, as_json: bool) -> None:
    from meshcast.experiments.render.terminal import calibration as pages

    require_torch()
    from meshcast.validation.calibration.device.from_campaign import calibrate_from

    if len(folders) != 1:
        raise PlanError("campaign", "one folder is fitted", "Name the --out of meshcast measure campaign", len(folders))
    check_writable_folder(out)
    answer = calibrate_from(folders[0], out)
    emit_or_show(as_json, answer, lambda: pages.device_page(answer, out))


def check_writable_folder(out: Path) -> None:
    """Raises PlanError, before any work, for a folder that cannot be written to."""
    if out.exists() and not out.is_dir():
        raise PlanError("--out", "it is not a folder", "Name a folder; it is made if it does not exist", str(out))
    if not out.exists() and not out.absolute().parent.is_dir():
        raise PlanError("--out", f"there is no folder {out.parent}", "Make it, or name a folder in one", str(out))
    check_place((out if out.is_dir() else out.absolute().parent) / f".meshcast-{os.getpid()}", "--out")


def require_files(paths: Sequence[Path], kind: str) -> None:
    """Raises PlanError if no file is named."""
    if not paths:
        raise PlanError("--data", f"{kind} need tables of measurements", "Name CSV files: --data gemm_h100.csv.gz")


def require_torch() -> None:
    """Raises PlanError if torch is not installed."""
    if find_spec("torch") is None:
        rule = "it is not installed, and measuring needs it"
        raise PlanError("torch", rule, "Install it: pip install 'meshcast[torch]'")


def check_calibration_folder(path: Path | None) -> Path | None:
    """The folder of a calibration, after a check of its files; None stays None."""
    if path is None:
        return None
    if not path.is_dir():
        raise PlanError("--calibration", "there is no such folder", "Name the --out of meshcast calibrate", str(path))
    from meshcast.simulator.costs.calibration.check import check_folder

    check_folder(path)
    return path
