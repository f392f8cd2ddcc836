"""Memory: the peak of every pipeline stage by category, beside the capacity of its GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshcast.experiments.render.bokeh.charts import new_figure
from meshcast.experiments.render.bokeh.html import details, legend, paragraph, table
from meshcast.experiments.render.bokeh.page import Drawing, PageSection
from meshcast.experiments.views import palette
from meshcast.experiments.views.memory import DeviceMemory, device_memories
from meshcast.hardware.units import GIB
from meshcast.simulator.report.phases import list_phases
from meshcast.simulator.report.report import Report

SEEN = 0.005
"""Largest memory of a category on all stages that is left out [GiB]: the table shows two decimals."""


def make_section(report: Report) -> PageSection:
    devices = device_memories(report)
    bands = [band for band in list_bands(devices) if any(nbytes > SEEN * GIB for nbytes in band[1])]
    words = (
        "Peak memory of a GPU of every pipeline stage, by what holds it at the moment of the peak of its tensors; "
        "above it what the allocator holds beyond tensors, and what nvidia-smi shows besides. The line is the memory "
        "of the GPU."
    )
    peak = max(report.needs)
    words += f" The fullest stage needs {peak / GIB:,.1f} GiB"
    words += f"; the plan {report.fit_in_words}."
    rows = [
        [
            device.name,
            *(f"{band[1][device.device] / GIB:,.2f}" for band in bands),
            f"{device.total / GIB:,.2f}",
            f"{device.free / GIB:,.1f}",
        ]
        for device in devices
    ]
    numbers = table(["", *(looks.name for looks, _ in bands), "total GiB", "free GiB"], rows)
    key = legend([(looks.name, looks.colour) for looks, _ in bands] + [("memory of the GPU (line)", palette.RED)])
    drawing = Drawing("memory", _draw(devices, bands))
    folded = details("The figures as a table [GiB]", numbers)
    lines = [
        [phase.name, f"{phase.total / GIB:,.2f}", devices[phase.device].name, phase.about]
        for phase in list_phases(report.play)
    ]
    phases = details("Phases of the run", table(["", "tensors GiB", "fullest", "what is held"], lines))
    return PageSection("memory", "Memory per stage", [paragraph(words), drawing, key, folded, phases])


Band = tuple[palette.Looks, list[float]]
"""How a kind of memory is drawn, and its size on every device [bytes]."""


def list_bands(devices: Sequence[DeviceMemory]) -> list[Band]:
    """Lists categories, fragmentation and context from below: together what nvidia-smi shows."""
    # Areas of the browser have no hatches: a lighter grey is fragmentation, a darker grey the context.
    fragmentation, context = (
        looks._replace(colour=palette.to_hex(palette.lighten(palette.GREY, white)))
        for looks, white in ((palette.FRAGMENTATION, 0.55), (palette.CONTEXT, 0.3))
    )
    bands = [(looks, [device.by[name] for device in devices]) for name, looks in palette.MEMORY.items()]
    bands.append((fragmentation, [device.fragmentation for device in devices]))
    return [*bands, (context, [device.context for device in devices])]


def _draw(devices: Sequence[DeviceMemory], bands: Sequence[Band]) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool

    places = [device.device for device in devices]
    figure = new_figure(340, "stage", "GiB", "xpan,xwheel_zoom,box_zoom,reset,save", active_scroll=None)
    low = [0.0] * len(devices)
    for looks, sizes in bands:
        gib = [nbytes / GIB for nbytes in sizes]
        high = [below + size for below, size in zip(low, gib, strict=True)]
        names = [device.name for device in devices]
        source = ColumnDataSource({"x": places, "low": low, "high": high, "gib": gib, "device": names})
        columns = figure.vbar("x", 0.8, "high", "low", source=source, color=looks.colour, line_color="white")
        tips = [("", "@device"), (looks.name, "@gib{0,0.00} GiB"), ("up to here", "@high{0,0.00} GiB")]
        figure.add_tools(HoverTool(renderers=[columns], tooltips=tips, visible=False))
        low = high
    ends = [device.capacity / GIB for device in devices]
    left, right = [place - 0.5 for place in places], [place + 0.5 for place in places]
    figure.segment(left, ends, right, ends, line_color=palette.RED, line_width=2)
    figure.y_range.start, figure.y_range.end = 0, 1.08 * max(*low, *ends)
    figure.x_range.start, figure.x_range.end = -0.6, len(devices) - 0.4
    figure.xaxis.ticker.min_interval = 1
    figure.xaxis.ticker.num_minor_ticks = 0
    figure.xgrid.visible = False
    if len(devices) <= 12:
        figure.xaxis.ticker = places
    return figure
