"""Memory: the peak of every pipeline stage by category, beside the capacity of its GPU."""

from __future__ import annotations

from typing import Any

from meshcast.experiments.plots import style
from meshcast.experiments.report.charts import new_figure, to_hex
from meshcast.experiments.report.colours import memory_colour, memory_name
from meshcast.experiments.report.html import details, legend, paragraph, table
from meshcast.experiments.report.page import Drawing, PageSection
from meshcast.hardware.units import GIB
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.formatting import name_device
from meshcast.simulator.report.phases import list_phases
from meshcast.simulator.report.report import Report

FRAGMENTATION, CONTEXT = "fragmentation, cached blocks", "CUDA context, libraries"
RED = "#c1121f"


def make_section(report: Report) -> PageSection:
    bars = list_bars(report)
    shown = [name for name in bars[0] if any(one[name] > 0.005 for one in bars)]
    names = [name_device(report.play.plan, device) for device in range(len(bars))]
    words = (
        "Peak memory of a GPU of every pipeline stage, by what holds it at the moment of the peak of its tensors; "
        "above it what the allocator holds beyond tensors, and what nvidia-smi shows besides. The line is the memory "
        "of the GPU."
    )
    peak = max(report.needs)
    words += f" The fullest stage needs {peak / GIB:,.1f} GiB"
    words += f"; the plan {report.fit_in_words}."
    rows = [
        [names[device], *(f"{one[name]:,.2f}" for name in shown), f"{sum(one.values()):,.2f}", f"{-excess / GIB:,.1f}"]
        for device, (one, excess) in enumerate(zip(bars, report.excess, strict=True))
    ]
    numbers = table(["", *map(memory_name, shown), "total GiB", "free GiB"], rows)
    key = legend([(memory_name(name), _colour(name)) for name in shown] + [("memory of the GPU (line)", RED)])
    drawing = Drawing("memory", _draw(report, bars, shown, names))
    folded = details("The figures as a table [GiB]", numbers)
    phases_of_run = list_phases(report.play)
    lines = [[phase.name, f"{phase.total / GIB:,.2f}", names[phase.device], phase.about] for phase in phases_of_run]
    phases = details("Phases of the run", table(["", "tensors GiB", "fullest", "what is held"], lines))
    return PageSection("memory", "Memory per stage", [paragraph(words), drawing, key, folded, phases])


def list_bars(report: Report) -> list[dict[str, float]]:
    """By pipeline device the peak by category, fragmentation and context [GiB]: together what nvidia-smi shows."""
    context = report.job.framework.memory.context_gib
    found = []
    for peak, need in zip(report.play.peaks, report.needs, strict=True):
        own = {name: peak.by.get(name, 0.0) / GIB for name in CATEGORIES}
        own[FRAGMENTATION] = max(0.0, need / GIB - context - peak.total / GIB)
        found.append(own | {CONTEXT: context})
    return found


def _colour(name: str) -> str:
    pale = {FRAGMENTATION: style.lighten(style.GREY, 0.55), CONTEXT: style.lighten(style.GREY, 0.3)}
    return to_hex(pale[name]) if name in pale else memory_colour(name)


def _draw(report: Report, bars: list[dict[str, float]], shown: list[str], names: list[str]) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool

    devices = list(range(len(bars)))
    figure = new_figure(340, "stage", "GiB", "xpan,xwheel_zoom,box_zoom,reset,save", active_scroll=None)
    low = [0.0] * len(bars)
    for name in shown:
        high = [at + one[name] for at, one in zip(low, bars, strict=True)]
        source = ColumnDataSource(
            {"x": devices, "low": low, "high": high, "gib": [one[name] for one in bars], "device": names}
        )
        made = figure.vbar("x", 0.8, "high", "low", source=source, color=_colour(name), line_color="white")
        tips = [("", "@device"), (memory_name(name), "@gib{0,0.00} GiB"), ("up to here", "@high{0,0.00} GiB")]
        figure.add_tools(HoverTool(renderers=[made], tooltips=tips, visible=False))
        low = high
    ends = [capacity / GIB for capacity in report.usable]
    left, right = [device - 0.5 for device in devices], [device + 0.5 for device in devices]
    figure.segment(left, ends, right, ends, line_color=RED, line_width=2)
    figure.y_range.start, figure.y_range.end = 0, 1.08 * max(*low, *ends)
    figure.x_range.start, figure.x_range.end = -0.6, len(bars) - 0.4
    figure.xaxis.ticker.min_interval = 1
    figure.xaxis.ticker.num_minor_ticks = 0
    figure.xgrid.visible = False
    if len(bars) <= 12:
        figure.xaxis.ticker = devices
    return figure
