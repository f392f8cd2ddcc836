"""`meshcast.Report`: a forecast that shows itself in notebooks, as a page, a table and figures."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from simulator.report.breakdown import Breakdown
from simulator.report.report import Report

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass
class DrawnBreakdown(Breakdown):
    """The breakdown of the slowest stage: `parts` and `hidden` [s]; called, a figure of them."""

    draw: Callable[[], Figure] | None = None

    def __call__(self) -> Figure:
        """Draws the parts of the step as bars."""
        assert self.draw is not None
        return self.draw()


class ForecastReport(Report):
    """The forecast of one job.

    Figures are matplotlib's; ``report.timeline().savefig("timeline.svg")`` writes one.
    """

    @classmethod
    def of(cls, report: Report) -> ForecastReport:
        """The same forecast as `report`."""
        return cls(report.play, report.unlike_steps)

    def _repr_html_(self) -> str:
        """The page of ``meshcast predict``."""
        from experiments.notebook.html import to_html
        from experiments.pages.forecast import page

        return to_html(page(self))

    def to_frame(self) -> pandas.DataFrame:
        """The figures as a table of one row with the columns of a sweep; ``pandas.concat`` joins those of many."""
        import pandas

        from simulator.report.figures import row_of

        answer = self.to_dict()
        row = {"id": answer["id"], "status": answer["status"], **row_of(answer), "limits": answer["limits"]}
        return pandas.DataFrame([row])

    def timeline(self) -> Figure:
        """Draws the step as a Gantt chart: a row for each pipeline stage."""
        from experiments.plots.timeline import timeline

        return _draw(lambda: timeline(self))

    def memory(self) -> Figure:
        """Draws the memory of each stage at its peak, and of the fullest one through the step."""
        from experiments.plots.memory import memory

        return _draw(lambda: memory(self))

    @cached_property
    def breakdown(self) -> DrawnBreakdown:
        """The breakdown of the slowest stage; ``report.breakdown()`` draws it."""
        found = super().breakdown
        return DrawnBreakdown(found.step, found.parts, found.hidden, self._draw_breakdown)

    def _draw_breakdown(self) -> Figure:
        from experiments.plots.breakdown import breakdown

        return _draw(lambda: breakdown([("", self)]))


def _draw(make: Callable[[], Figure]) -> Figure:
    """Makes a figure in the style of meshcast's plots, which a notebook shows even where pyplot is not in use."""
    import matplotlib

    from experiments.plots import style

    with matplotlib.rc_context(style.RC):
        figure = make()
    # IPython asks the object itself for its picture; otherwise pyplot has to be imported before a figure is shown.
    figure.__dict__["_repr_png_"] = partial(_to_png, figure)
    return figure


def _to_png(figure: Any) -> bytes:
    """The picture of a figure."""
    import matplotlib

    from experiments.plots import style

    file = io.BytesIO()
    with matplotlib.rc_context(style.RC):
        figure.savefig(file, format="png", dpi=style.DPI)
    return file.getvalue()
