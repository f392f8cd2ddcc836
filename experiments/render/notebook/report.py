"""`meshcast.simulate` and its `meshcast.Report`, which shows itself in notebooks: as a page, a table and figures."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from meshcast.experiments.render.matplotlib.style import Width
from meshcast.experiments.views.communication import Grouping
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.engine.play import Engine
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate as simulate_step
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.job.job import Job
from meshcast.simulator.report.breakdown import Breakdown
from meshcast.simulator.report.report import Report

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass
class DrawnBreakdown(Breakdown):
    """The breakdown of the slowest stage: `parts` and `hidden` [s]; called, a figure of them."""

    draw: Callable[[Width], Figure] | None = None

    def __call__(self, width: Width = "page") -> Figure:
        """Draws the parts of the step as bars."""
        assert self.draw is not None
        return self.draw(width)


class ForecastReport(Report):
    """The forecast of a job.

    Figures are matplotlib's; ``report.timeline().savefig("timeline.svg")`` writes a file. Each takes the ``width`` that
    it is made for: ``column`` of a paper (3.33 in), ``page`` (7 in, the default) or ``slide`` (13.33 in).
    """

    calibration: Calibration | None = None
    """Coefficients that the job was forecast with; None: those that ship with meshcast."""

    @classmethod
    def of(cls, report: Report, calibration: Calibration | None = None) -> ForecastReport:
        """Returns the same forecast as `report`."""
        forecast = cls(report.play, report.step_kinds)
        forecast.calibration = calibration
        return forecast

    def _repr_html_(self) -> str:
        """Returns the page of ``meshcast predict``."""
        from meshcast.experiments.render.terminal.forecast import page, to_html

        return to_html(page(self))

    def to_frame(self) -> pandas.DataFrame:
        """Returns the figures as a table of a single row with the columns of a sweep; ``pandas.concat`` joins those of
        many."""
        import pandas

        from meshcast.simulator.report.figures import row_of

        figures = {name: float("nan") if value is None else value for name, value in row_of(self).items()}
        row = {"id": self.job.id, "status": self.fit.verdict, **figures, "limits": self.limits}
        return pandas.DataFrame([row])

    def timeline(self, width: Width = "page") -> Figure:
        """Draws the step as a Gantt chart: a row for each pipeline stage."""
        from meshcast.experiments.render.matplotlib.timeline import timeline

        return _draw(lambda: timeline(self), width)

    def memory(self, width: Width = "page") -> Figure:
        """Draws the memory of each stage at its peak, and of the fullest through the step."""
        from meshcast.experiments.render.matplotlib.memory import memory

        return _draw(lambda: memory(self), width)

    def roofline(self, width: Width = "page") -> Figure:
        """Draws kernels below the roofs of their GPU, and communication below those of the links."""
        from meshcast.experiments.render.matplotlib.roofline import roofline
        from meshcast.experiments.views.roofline import step_roofline

        rooflines = step_roofline(self, calibration=self.calibration)
        return _draw(lambda: roofline(self, rooflines), width)

    def communication(self, by: Grouping | None = None, width: Width = "page") -> Figure:
        """Draws the bytes that ranks, nodes or stages send each other in a step.

        by: what a row is, ``rank``, ``node`` or ``stage``; by default the finest of at most 128 rows.
        """
        from meshcast.experiments.render.matplotlib.communication import CLEAR, communication
        from meshcast.experiments.views.communication import choose_grouping, communication_matrix

        grouping: Grouping = by or choose_grouping(self.job.cluster, CLEAR)
        if grouping not in get_args(Grouping):
            raise PlanError("by", "there is no grouping of this name", nearest(str(by), get_args(Grouping)), by)
        matrix = communication_matrix(self, grouping, self.calibration)
        return _draw(lambda: communication(self, matrix), width)

    @cached_property
    def breakdown(self) -> DrawnBreakdown:
        """The breakdown of the slowest stage; ``report.breakdown()`` draws it."""
        computed = super().breakdown
        return DrawnBreakdown(computed.step, computed.parts, computed.hidden, self._draw_breakdown)

    def _draw_breakdown(self, width: Width) -> Figure:
        from meshcast.experiments.render.matplotlib.breakdown import breakdown

        return _draw(lambda: breakdown([("", self)]), width)


def simulate(
    job: Job | str | Path | Mapping[str, Any],
    engine: Engine = "matrices",
    skip: bool = True,
    shared_work: SharedWork | None = None,
    calibration: Calibration | None = None,
    schemes: Iterable[type[Scheme]] = (),
) -> ForecastReport:
    """Returns the forecast of one training step, or of the step of a forward-only job.

    job: a job, the path of a job file, or its mapping.
    engine: `matrices`, `sweep` and `simpy` give the same answer; `shared` adds contention for links and
    multiprocessors.
    skip: whether the engine may jump over a steady state that is proven to repeat.
    shared_work: lowered units, timetables and prices that many jobs share; a loop over plans of one model is faster.
    calibration: the coefficients of all costs; by default those of `shared_work`, or those that ship with meshcast.
    schemes: classes of the caller that the plan of the job names beside ours, `MySchedule` as `pipeline/my-schedule`;
        later calls know them, too.

    Raises PlanError, ModelError or CatalogError for a wrong job. A job that does not fit in memory is no error.
    """
    used = calibration or (shared_work.calibration if shared_work is not None else None)
    return ForecastReport.of(simulate_step(job, engine, skip, shared_work, calibration, schemes), used)


def _draw(make: Callable[[], Figure], width: Width) -> Figure:
    """Makes a figure in the style of meshcast's plots, which a notebook shows even where pyplot is not in use.

    Raises PlanError for an unknown width.
    """
    from meshcast.experiments.render.matplotlib import style

    if width not in style.WIDTHS:
        raise PlanError("width", "there is no width of this name", nearest(str(width), style.WIDTHS), width)
    with style.drawing(width):
        figure = style.escape_texts(make())
    # IPython asks the object itself for its picture; otherwise pyplot has to be imported before a figure is shown.
    figure.__dict__["_repr_png_"] = partial(_to_png, figure, width)
    figure.__dict__["savefig"] = partial(_save, figure, width)
    return figure


def _save(figure: Figure, width: Width, target: Any, **options: Any) -> None:
    """Writes a figure in the style that it was made with, as `savefig` does.

    target: path or file.
    options: those of `savefig`; ``dpi`` is of the finished figure. SVG and PDF files written with other options keep
        the size of the layout.
    """
    import matplotlib
    from matplotlib.figure import Figure

    from meshcast.experiments.render.matplotlib import style
    from meshcast.experiments.render.matplotlib.sheet import write_figure

    with style.drawing(width):
        if not options and str(target).lower().endswith((".png", ".svg", ".pdf")):
            write_figure(figure, target, width)
            return
        options["dpi"] = options.get("dpi", style.DPI) * style.WIDTHS[width].zoom
        matplotlib.rcParams["text.hinting"] = "none"  # hinted type is wider on coarse screens than its layout
        if not isinstance(target, str | os.PathLike):
            Figure.savefig(figure, target, **options)
            return
        path, image = Path(target), io.BytesIO()
        path = path if path.suffix or "format" in options else path.with_name(f"{path.name}.png")
        Figure.savefig(figure, image, **{"format": path.suffix[1:], **options})
        write_file(path, image.getvalue())


def _to_png(figure: Any, width: Width) -> bytes:
    from matplotlib.figure import Figure

    from meshcast.experiments.render.matplotlib import style

    file = io.BytesIO()
    with style.drawing(width):
        Figure.savefig(figure, file, format="png", dpi=style.DPI)
    return file.getvalue()
