"""``meshcast validate`` compares forecasts with measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

from meshcast.experiments.cli.console import AsJson, WidthOption, choose_width, emit_or_show, plot_files
from meshcast.experiments.cli.measured_files import (
    MEASURED,
    Calibrations,
    Data,
    More,
    check_calibration_folder,
    list_files,
    require_files,
)
from meshcast.experiments.options import Options, argument, option
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.schemas import model_validator

if TYPE_CHECKING:
    from meshcast.experiments.render.matplotlib.style import Width

FILES = ("stages", "distributed", "trace")
KINDS = {
    "claims": "claims: what papers claim of their systems",
    "pipeline": "pipeline: schedules, by the step times that their papers derive",
    "published": "published: training runs",
    "choice": "choice: the plans that would be chosen among measured ones",
    "fit": "fit: runs that the coefficients were fitted to, and those left out",
    "learning": "learning: published runs of a source, after learning from some of them",
    "kernels": "kernels: a table of measured kernels",
    "collectives": "collectives: a table of measured collectives",
    "stages": "stages: torch work that `measure` timed",
    "distributed": "distributed: the same on several processes",
    "trace": "trace: a profile of torch, kernel by kernel",
}
"""What is compared, by its name."""

DRAWN = ("--plot", "--width")
TRACED = ("--calibration", "--job", "--rank", "--step")
LEFT_OUT = ("source", "family", "model")
OF_CLAIMS = ("--family", "--system", "--claim", "--slow")
TAKEN = {
    "choice": ("--jobs",),
    "claims": ("--jobs", *OF_CLAIMS),
    "collectives": (*DRAWN, "--calibration"),
    "distributed": DRAWN,
    "fit": ("--jobs", "--leave-out"),
    "kernels": (*DRAWN, "--calibration"),
    "learning": ("--jobs",),
    "pipeline": (),
    "published": (*DRAWN, "--jobs", "--as-stranger"),
    "stages": DRAWN,
    "trace": (*DRAWN, *TRACED),
}
"""Options that some kinds take and others do not, by kind; measurement files of kernels and collectives take those of
stages."""

SPECIAL = tuple({flag for flags in TAKEN.values() for flag in flags})


class ValidateOptions(Options):
    """Options of ``meshcast validate``."""

    kind: Annotated[str, argument("KIND", f"{'; '.join(KINDS.values())}.", words=tuple(KINDS))]
    more: More = ()
    data: Data = ()
    as_json: AsJson = False
    plot: Annotated[
        str | None,
        option("--plot", "Draw forecast against measured into a .png, .svg or .pdf file, or FOLDER/.", "PATH"),
    ] = None
    width: WidthOption = None
    workers: Annotated[int | None, option("--jobs", "Number of processes; one per core if not given.", "N", min=1)] = (
        None
    )
    calibration: Calibrations = None
    job: Annotated[Path | None, option("--job", "trace: the job that was traced.", "JOB")] = None
    rank: Annotated[int | None, option("--rank", "trace: rank that was traced.", "N")] = None
    step: Annotated[int | None, option("--step", "trace: which of its marked steps.", "N")] = None
    leave_out: Annotated[
        str | None,
        option("--leave-out", "fit: list the errors of every one of them, fitted to all others.", "|".join(LEFT_OUT)),
    ] = None
    as_stranger: Annotated[
        bool,
        option(
            "--as-stranger", "published: with flags hidden, and without what the source of a run has set by its steps."
        ),
    ] = False
    family: Annotated[str | None, option("--family", "claims: of one family.", "NAME")] = None
    system: Annotated[str | None, option("--system", "claims: of one system.", "NAME")] = None
    claim: Annotated[str | None, option("--claim", "claims: one of them, with its jobs.", "ID")] = None
    slow: Annotated[bool, option("--slow", "claims: also those that take long.")] = False

    @model_validator(mode="after")
    def _check_words(self) -> Self:
        if self.kind not in KINDS:
            raise PlanError("KIND", "there is no kind of this name", nearest(self.kind, tuple(KINDS)), self.kind)
        if self.leave_out is not None and self.kind == "fit" and self.leave_out not in LEFT_OUT:
            rule = f"it is one of {', '.join(LEFT_OUT)}"
            raise PlanError("--leave-out", rule, nearest(self.leave_out, LEFT_OUT), self.leave_out)
        return self


class ValidationRun(NamedTuple):
    """A run of ``meshcast validate``: what is compared, and where it is drawn.

    Attributes:
        options: those of the command.
        paths: all files that are named.
        width: what figures are made for.
    """

    options: ValidateOptions
    paths: Sequence[Path]
    width: Width

    def plan_files(self, names: Sequence[str]) -> dict[str, Path]:
        """Returns the files of figures by their names, none without ``--plot``."""
        return plot_files(self.options.plot, names) if self.options.plot is not None else {}

    def show(self, answer: Any, make_page: Callable[[], Any]) -> None:
        """Prints the answer as JSON or as a page."""
        emit_or_show(self.options.as_json, answer, make_page)

    def end(self, missing: int, what: str) -> None:
        """Ends the command, after its answer, if it was interrupted with some rows left."""
        if missing:
            say(f"meshcast: interrupted, {missing:,} {what}", err=True)
            raise KeyboardInterrupt


def validate(options: ValidateOptions) -> None:
    """Compares forecasts with what is known of a kind: measurements, published runs, schedules, claims."""
    kind, paths = options.kind, list_files(options.data, options.more)
    are_files = kind in ("stages", "distributed") or (kind in MEASURED and _are_measurement_files(paths))
    taken = DRAWN if are_files else TAKEN[kind]
    options.refuse_others(SPECIAL, taken, f"validate {kind}", "Leave it out")
    validation = ValidationRun(options, paths, choose_width(options.width, options.plot))
    if are_files:
        _validate_measurement_files(validation)
    elif kind in MEASURED:
        _validate_tables(validation)
    else:
        VALIDATIONS[kind](validation)


def _are_measurement_files(paths: Sequence[Path]) -> bool:
    """Returns whether these are measurement files and not tables. Raises PlanError for a mixture."""
    are_json = [path.suffix == ".json" for path in paths]
    if any(are_json) and not all(are_json):
        other = paths[are_json.index(False)]
        raise PlanError("--data", "tables and measurement files cannot be mixed", "Name files of one kind", str(other))
    return bool(are_json) and are_json[0]


def _validate_published(validation: ValidationRun) -> None:
    from meshcast.experiments.render.terminal import published as pages

    options = validation.options
    files = validation.plan_files(pages.PLOTS)
    answer, missing = pages.validate_published(validation.paths, options.workers, as_stranger=options.as_stranger)
    pages.draw_plots(answer, files, validation.width)
    validation.show(answer, lambda: pages.published_page(answer))
    validation.end(missing, "runs are not answered")


def _validate_choice(validation: ValidationRun) -> None:
    """Chooses among published plans, by their forecasts and by searches."""
    from meshcast.experiments.render.terminal.published import choice_page, validate_choice
    from meshcast.experiments.search.published_groups import search_group

    answer, missing = validate_choice(validation.paths, validation.options.workers, search_group)
    validation.show(answer, lambda: choice_page(answer))
    validation.end(missing, "runs are not answered")


def _validate_fit(validation: ValidationRun) -> None:
    from meshcast.experiments.render.terminal.published import fit_page, fit_published

    options = validation.options
    answer, missing = fit_published(validation.paths, options.workers, leave_out=options.leave_out)
    validation.show(answer, lambda: fit_page(answer))
    validation.end(missing, "runs are not answered")


def _validate_learning(validation: ValidationRun) -> None:
    """Learns from some runs of every source, and forecasts its others."""
    from meshcast.experiments.render.terminal import learning as pages

    answer, missing = pages.validate_learning(validation.paths, validation.options.workers)
    validation.show(answer, lambda: pages.trials_page(answer))
    validation.end(missing, "runs are not answered")


def _validate_claims(validation: ValidationRun) -> None:
    """Judges the claims of papers."""
    from meshcast.experiments.planning.benchmark.claimed_plans import find_claimed_plan
    from meshcast.experiments.render.terminal import claims as pages

    options = validation.options
    chosen = options.family, options.system, options.claim, options.slow
    answer, missing = pages.validate_claims(validation.paths, options.workers, *chosen, find_claimed_plan)
    validation.show(answer, lambda: pages.claims_page(answer))
    validation.end(missing, "claims are not judged")


def _validate_pipeline(validation: ValidationRun) -> None:
    from meshcast.experiments.render.terminal.published import validate_pipeline

    answer, table = validate_pipeline(validation.paths)
    validation.show(answer, lambda: table)


def _validate_measurement_files(validation: ValidationRun) -> None:
    from meshcast.experiments.render.terminal import measurements as pages

    kind = validation.options.kind
    if not validation.paths:
        remedy = f"Name files of meshcast measure {kind}: --data measured.json"
        raise PlanError("--data", f"{kind} need measurement files", remedy)
    files = validation.plan_files(pages.PLOTS)
    answer = pages.validate_files(kind, validation.paths)
    pages.draw_plots(answer, files, validation.width)
    validation.show(answer, lambda: pages.page(answer))


def _validate_trace(validation: ValidationRun) -> None:
    from meshcast.experiments.render.terminal import traces as pages

    options = validation.options
    folder = check_calibration_folder(options.calibration)
    if len(validation.paths) != 1 or options.job is None:
        rule = "it compares one trace with the job that ran"
        raise PlanError("validate trace", rule, "Write meshcast validate trace TRACE --job JOB")
    files = validation.plan_files(pages.PLOTS)
    comparison = pages.compare_trace(validation.paths[0], options.job, folder, options.rank, options.step)
    pages.draw_plots(comparison, files, validation.width)
    validation.show(comparison.to_dict, lambda: pages.page(comparison))


def _validate_tables(validation: ValidationRun) -> None:
    from meshcast.experiments.render.terminal import calibration as pages

    options = validation.options
    require_files(validation.paths, options.kind)
    files, folder = validation.plan_files(pages.PLOTS), check_calibration_folder(options.calibration)
    answer, held = pages.validate_tables(options.kind, validation.paths, folder)
    pages.draw_plots(options.kind, held, files, validation.width)
    if files and not held:
        say("meshcast: no row is forecast, so nothing is drawn", err=True)
    validation.show(answer, lambda: pages.page(options.kind, answer["summary"]))


VALIDATIONS: dict[str, Callable[[ValidationRun], None]] = {
    "choice": _validate_choice,
    "claims": _validate_claims,
    "fit": _validate_fit,
    "learning": _validate_learning,
    "pipeline": _validate_pipeline,
    "published": _validate_published,
    "trace": _validate_trace,
}
"""Kinds that hold no measurement files and no tables of kernels or collectives."""
