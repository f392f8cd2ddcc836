"""``meshcast compare`` and ``meshcast why``: jobs part by part, and what hardware and assumptions are worth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from meshcast.experiments.cli.best_plan import load_with_plan
from meshcast.experiments.cli.console import (
    AsJson,
    Changes,
    WidthOption,
    emit_or_show,
    plan_figures,
    track,
    writing_figure,
)
from meshcast.experiments.cli.launch import LaunchFileOptions
from meshcast.experiments.options import argument, option
from meshcast.hardware.errors import PlanError

if TYPE_CHECKING:
    from meshcast.experiments.explain.assumed_fields import AssumedField
    from meshcast.experiments.explain.fitting_changes import MemoryChanges
    from meshcast.simulator import Report
    from meshcast.validation.selfcheck.replay import Replay


class MoreOfForecast(NamedTuple):
    """What ``predict`` adds to a forecast. None: it was not asked for.

    memory: changes that make a plan fit that is tight or does not, and the one that saves most.
    unstated: fields that the job does not state.
    replays: the forecast held against replays of its step.
    """

    memory: MemoryChanges | None
    unstated: Sequence[AssumedField] | None
    replays: Sequence[Replay] | None

    def to_dict(self) -> dict[str, Any]:
        """The keys of ``predict --json``."""
        answer: dict[str, Any] = {}
        if self.memory is not None:
            answer["fitting_changes"] = [change.to_dict() for change in self.memory.fitting]
            answer["largest_lever"] = self.memory.lever.to_dict() if self.memory.lever else None
        if self.unstated is not None:
            answer["unstated"] = {field.name: field.value for field in self.unstated}
        if self.replays is not None:
            answer["replays"] = [played.to_dict() for played in self.replays]
        return answer


def find_more(report: Report, verbose: bool, replays: Sequence[Replay] | None = None) -> MoreOfForecast:
    """Changes of a plan that is tight or does not fit; with `verbose` the fields that the job does not state."""
    from meshcast.experiments.explain.assumed_fields import assumed_fields
    from meshcast.experiments.explain.fitting_changes import fitting_changes

    memory = None if report.fit.verdict == "fits" else fitting_changes(report)
    return MoreOfForecast(memory, assumed_fields(report) if verbose else None, replays)


class CompareOptions(LaunchFileOptions):
    """Options of ``meshcast compare``."""

    jobs: Annotated[tuple[Path, ...], argument("JOB", "Job files (YAML or JSON), or launch files.")] = ()
    change: Annotated[
        tuple[str, ...],
        option("--set", "Change a field of all jobs but the first; of a single job, compare with that.", "FIELD=VALUE"),
    ] = ()
    as_json: AsJson = False
    plot: Annotated[
        str | None, option("--plot", "Draw the parts of all steps into a .png, .svg or .pdf file.", "PATH")
    ] = None
    width: WidthOption = None


def compare(options: CompareOptions) -> None:
    """Compares forecasts, field by field and part by part."""
    if not options.jobs or (len(options.jobs) == 1 and not options.change):
        remedy = "Name a second job, or change a field of the first: --set plan.tp=4"
        remedy = remedy if options.jobs else "Write meshcast compare a.yaml b.yaml, or compare a.yaml --set plan.tp=4"
        raise PlanError("compare", "it takes two jobs", remedy)
    first, *others = options.jobs
    files, paper = plan_figures(options.plot, options.width, ("comparison",))
    from meshcast.experiments.explain.comparison import check_number
    from meshcast.experiments.explain.comparison import compare as compare_jobs
    from meshcast.experiments.render.terminal.explain import comparison_page

    others = others or [first]
    check_number([first, *others])
    comparison = compare_jobs(load_with_plan(first), *(load_with_plan(job, options.change) for job in others))
    for file in files.values():
        from meshcast.experiments.render.matplotlib.breakdown import breakdown
        from meshcast.experiments.render.matplotlib.sheet import save

        with writing_figure(file):
            save(partial(breakdown, [*zip(comparison.labels, comparison.reports, strict=True)]), file, paper)
    emit_or_show(options.as_json, comparison.to_dict, lambda: comparison_page(comparison))


class WhyOptions(LaunchFileOptions):
    """Options of ``meshcast why``."""

    job: Annotated[Path, argument("JOB", "A job file (YAML or JSON), or a launch file.")]
    change: Changes = ()
    as_json: AsJson = False
    plot: Annotated[str | None, option("--plot", "Draw a tornado plot into a .png, .svg or .pdf file.", "PATH")] = None
    width: WidthOption = None


def why(options: WhyOptions) -> None:
    """Explains a forecast: its critical path, and what better hardware and each assumed field are worth."""
    files, paper = plan_figures(options.plot, options.width, ("tornado",))
    from meshcast.experiments.explain.sensitivity import explain
    from meshcast.experiments.render.terminal.explain import sensitivity_page

    sensitivity = explain(load_with_plan(options.job, options.change), lambda steps: track(steps, "forecasting"))
    for file in files.values():
        from meshcast.experiments.render.matplotlib.sheet import save
        from meshcast.experiments.render.matplotlib.tornado import tornado

        with writing_figure(file):
            save(partial(tornado, sensitivity), file, paper)
    emit_or_show(
        options.as_json,
        sensitivity.to_dict,
        lambda: sensitivity_page(sensitivity, find_more(sensitivity.report, verbose=False).memory),
    )
