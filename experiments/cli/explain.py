"""``meshcast compare`` and ``meshcast why``: two jobs part by part, and what hardware and assumptions are worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from meshcast.experiments.cli.console import (
    AsJson,
    Changes,
    WidthOption,
    answering,
    choose_width,
    emit,
    plot_files,
    track,
)
from meshcast.experiments.cli.launch import takes_launch_files

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
        found: dict[str, Any] = {}
        if self.memory is not None:
            found["fitting_changes"] = [change.to_dict() for change in self.memory.fitting]
            found["largest_lever"] = self.memory.lever.to_dict() if self.memory.lever else None
        if self.unstated is not None:
            found["unstated"] = {one.name: one.value for one in self.unstated}
        if self.replays is not None:
            found["replays"] = [played.to_dict() for played in self.replays]
        return found


def find_more(report: Report, verbose: bool, replays: Sequence[Replay] | None = None) -> MoreOfForecast:
    """Changes of a plan that is tight or does not fit; with `verbose` the fields that the job does not state."""
    from meshcast.experiments.explain.assumed_fields import assumed_fields
    from meshcast.experiments.explain.fitting_changes import fitting_changes

    memory = None if report.fit.verdict == "fits" else fitting_changes(report)
    return MoreOfForecast(memory, assumed_fields(report) if verbose else None, replays)


@takes_launch_files
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A job file, YAML or JSON.")],
    second: Annotated[
        Path | None, typer.Argument(metavar="B", help="Another one; A itself, changed by --set, if not given.")
    ] = None,
    change: Changes = None,
    as_json: AsJson = False,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="PATH", help="Draw the parts of both steps into a .png, .svg or .pdf file."),
    ] = None,
    width: WidthOption = None,
) -> None:
    """Compare two forecasts, field by field and part by part."""
    with answering(as_json):
        from meshcast.hardware.errors import PlanError

        if second is None and not change:
            remedy = "Name a second job, or change a field of the first: --set plan.tp=4"
            raise PlanError("compare", "it takes two jobs", remedy)
        files, paper = plot_files(plot, ("comparison",)) if plot is not None else {}, choose_width(width, plot)
        from meshcast.experiments.explain.comparison import compare as compare_jobs
        from meshcast.simulator import load_job

        found = compare_jobs(load_job(first), load_job(second or first, change or ()))
        for place in files.values():
            from meshcast.experiments.render.matplotlib import breakdown
            from meshcast.simulator.report.formatting import describe_plan

            place.parent.mkdir(parents=True, exist_ok=True)
            plans = [", ".join(describe_plan(report.play.plan)) for report in (found.first, found.second)]
            named = [(f"A: {plans[0]}", found.first), (f"B: {plans[1]}", found.second)]
            breakdown.draw(named, place, paper)
        if as_json:
            emit(found.to_dict())
        else:
            from meshcast.experiments.render.terminal.explain import comparison_page
            from meshcast.experiments.render.terminal.forecast import show

            show(comparison_page(found))


@takes_launch_files
def why(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file, YAML or JSON.")],
    change: Changes = None,
    as_json: AsJson = False,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="PATH", help="Draw a tornado plot into a .png, .svg or .pdf file.")
    ] = None,
    width: WidthOption = None,
) -> None:
    """Explain a forecast: its critical path, and what better hardware and each assumed field are worth."""
    with answering(as_json):
        files, paper = plot_files(plot, ("tornado",)) if plot is not None else {}, choose_width(width, plot)
        from meshcast.experiments.explain.sensitivity import explain
        from meshcast.simulator import load_job

        found = explain(load_job(job, change or ()), lambda steps: track(steps, "forecasting"))
        for place in files.values():
            from meshcast.experiments.render.matplotlib import tornado

            place.parent.mkdir(parents=True, exist_ok=True)
            tornado.draw(found, place, paper)
        if as_json:
            emit(found.to_dict())
        else:
            from meshcast.experiments.render.terminal.explain import sensitivity_page
            from meshcast.experiments.render.terminal.forecast import show

            show(sensitivity_page(found, find_more(found.report, verbose=False).memory))
