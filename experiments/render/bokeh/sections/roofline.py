"""Roofline: kernels of a step beside the roofs of their GPU, and communication beside the roofs of its links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshcast.experiments.render.bokeh.charts import FONT, new_figure
from meshcast.experiments.render.bokeh.html import Html, heading, legend, line_legend, paragraph, swatch, table
from meshcast.experiments.render.bokeh.page import Drawing, PageSection
from meshcast.experiments.views import palette
from meshcast.experiments.views.roofline import KernelPoint, NetworkPoint, StepRoofline, step_roofline
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.report.figures import parts_of_step
from meshcast.simulator.report.formatting import format_bytes, format_number, format_seconds
from meshcast.simulator.report.report import Report

MIN_SHARE = 1e-6
"""Share of the step for which links are busy with an axis below which it gets no point."""
ROWS = 20
"""Kernels in the table."""
DASHES = ("solid", "dashed", "dotted", "dotdash")
LINKS = {"scale-up": "scale-up links", "host": "link to the host", "network": "network port"}


def make_section(report: Report, calibration: Calibration | None = None) -> PageSection:
    roofs = step_roofline(report, calibration=calibration)
    network, kernels = roofs.links_above(MIN_SHARE), roofs.with_flops
    words = (
        f"One rank of {roofs.name} on {roofs.gpu}. A circle is a kernel: FLOPs per byte of its least memory traffic, "
        "and the rate that the forecast gives it; its area is its share of the step. A diamond is an axis of "
        "communication: FLOPs of the whole step per byte that a rank sends over links of one kind, and the rate of the "
        "whole step. Nothing lies above its roof: the peak of the number format, the bandwidth of the memory for "
        "kernels, the rate of the links for communication. Kernels without FLOPs of their own are in the "
        "table only. Names that begin with d compute gradients of inputs, with w those of weights; re is recomputation."
    )
    kinds = list(dict.fromkeys(kernel.kind for kernel in kernels))
    entries = [(parts_of_step()[kind].label, palette.PARTS[kind].colour) for kind in kinds]
    axes = [palette.AXES[axis] for axis in dict.fromkeys(point.axis for point in network)]
    entries += [(looks.name, looks.colour) for looks in axes]
    body: list[Html | Drawing] = [
        paragraph(words),
        Drawing("roofline", _draw(roofs, kernels)),
        line_legend([(name, dash) for name, _, dash in list_roofs(roofs)]),
        legend(entries),
        heading(f"The {min(ROWS, len(merge_kernels(roofs)))} kernels that take longest"),
        _kernel_table(roofs),
    ]
    if network:
        body += [heading("Communication of a rank"), _network_table(roofs)]
    return PageSection("roofline", "Roofline", body)


def list_roofs(roofs: StepRoofline) -> list[tuple[str, float, str]]:
    """Lists name with its rate, rate [bytes/s] and dash of the roofs of the memory and of the links."""
    rates = [("memory bandwidth", roofs.memory_bandwidth), *((LINKS[tier], rate) for tier, rate in roofs.links.items())]
    return [(f"{name} {rate / 1e9:,.0f} GB/s", rate, dash) for (name, rate), dash in zip(rates, DASHES, strict=False)]


def _draw(roofs: StepRoofline, kernels: list[KernelPoint]) -> Any:
    """Draws the roofs, kernels as circles and axes of communication as diamonds."""
    network = roofs.links_above(MIN_SHARE)
    places = [*(kernel.intensity for kernel in kernels), *(point.intensity for point in network)]
    ridge = roofs.top / roofs.memory_bandwidth
    low, high = min([*places, ridge / 10]) / 2, max([*places, ridge * 10]) * 2
    rates = [*(kernel.attained for kernel in kernels), *(point.attained for point in network)]
    floor = min([*(rate for rate in rates if rate), roofs.top / 4]) / 3
    figure = new_figure(
        430,
        "FLOPs per byte of memory traffic (circles), per byte sent (diamonds)",
        "TFLOP/s",
        "pan,wheel_zoom,box_zoom,reset,save",
        x_axis_type="log",
        y_axis_type="log",
        x_range=(low, high),
        y_range=(floor / 1e12, roofs.top * 2.2 / 1e12),
        active_scroll=None,
    )
    _draw_roofs(figure, roofs, low, high, floor)
    _draw_kernels(figure, roofs, kernels)
    if network:
        _draw_network(figure, network)
    return figure


def _add_tips(figure: Any, drawn: Any, tips: str | list[tuple[str, str]]) -> None:
    """Adds what a pointer over a drawn thing shows."""
    from bokeh.models import HoverTool

    figure.add_tools(HoverTool(renderers=[drawn], tooltips=tips, visible=False))


def _draw_roofs(figure: Any, roofs: StepRoofline, low: float, high: float, floor: float) -> None:
    """Draws the roofs of memory and links up to the highest peak, and those of the number formats.

    low, high: ends of the axis of intensity [FLOP/byte].
    floor: lower end of that of rates [FLOP/s].
    """
    for name, rate, dash in list_roofs(roofs):
        x = np.array([max(low, floor / rate), roofs.top / rate])
        if x[0] < x[1]:
            drawn = figure.line(x, x * rate / 1e12, line_color=palette.INK, line_dash=dash, line_width=1.5, name=name)
            _add_tips(figure, drawn, "$name")
    for dtype, peak in roofs.peaks.items():
        figure.line([peak / roofs.memory_bandwidth, high], [peak / 1e12] * 2, line_color=palette.INK, line_width=1.5)
        words = f"peak {dtype} {peak / 1e12:,.0f} TFLOP/s"
        figure.text(
            [high / 1.15], [peak / 1e12], [words], text_align="right", text_font={"value": FONT},
            text_font_size="12px", text_color=palette.INK, y_offset=-3,
        )  # fmt: skip


def _draw_kernels(figure: Any, roofs: StepRoofline, kernels: list[KernelPoint]) -> None:
    """Draws a circle for each kernel, its area the time of all its executions."""
    from bokeh.models import ColumnDataSource

    longest = max((kernel.total_seconds for kernel in kernels), default=1.0)
    tips = [("", "@name"), ("time of one, times a step", "@time, @count{0,0.[0]}")]
    tips += [("share of the step", "@share{0.0%}"), ("attained", "@y{0,0.0} TFLOP/s, @roof{0%} of its roof")]
    for kind in dict.fromkeys(kernel.kind for kernel in kernels):
        points = [kernel for kernel in kernels if kernel.kind == kind]
        source = ColumnDataSource(
            {
                "x": [kernel.intensity for kernel in points],
                "y": [kernel.attained / 1e12 for kernel in points],
                "size": [5 + 21 * (kernel.total_seconds / longest) ** 0.5 for kernel in points],
                "name": [_title(kernel) for kernel in points],
                "share": [kernel.total_seconds / roofs.step_seconds for kernel in points],
                "roof": [kernel.share_of_roof for kernel in points],
                "time": [format_seconds(kernel.seconds) for kernel in points],
                "count": [kernel.count for kernel in points],
            }
        )
        looks = {"fill_color": palette.PARTS[kind].colour, "line_color": "white", "fill_alpha": 0.75}
        _add_tips(figure, figure.scatter("x", "y", size="size", source=source, **looks), tips)


def _draw_network(figure: Any, network: Sequence[NetworkPoint]) -> None:
    """Draws a diamond for each axis of communication and kind of links."""
    from bokeh.models import ColumnDataSource

    source = ColumnDataSource(
        {
            "x": [point.intensity for point in network],
            "y": [point.attained / 1e12 for point in network],
            "colour": [palette.AXES[point.axis].colour for point in network],
            "name": [f"{palette.AXES[point.axis].name} over the {LINKS[point.tier]}" for point in network],
            "bytes": [format_bytes(point.nbytes) for point in network],
            "busy": [point.busy_share for point in network],
        }
    )
    looks = {"fill_color": "colour", "line_color": "white"}
    tips = [("", "@name"), ("sent in a step", "@bytes"), ("links busy at their rate", "@busy{0.0%} of the step")]
    _add_tips(figure, figure.scatter("x", "y", size=15, marker="diamond", source=source, **looks), tips)


def _title(kernel: KernelPoint) -> str:
    phases = {"F": "forward", "B": "backward, inputs", "W": "backward, weights", "R": "recompute", "U": "update"}
    return f"{kernel.name} ({phases.get(kernel.phase, kernel.phase)})"


def _kernel_table(roofs: StepRoofline) -> Html:
    rows = []
    for kernel, total in merge_kernels(roofs)[:ROWS]:
        rows.append(
            [
                swatch(palette.PARTS[kernel.kind].colour, _title(kernel)),
                f"{kernel.count:,.4g}",
                *_rates(kernel),
                f"{100 * total / roofs.step_seconds:.1f}",
            ]
        )
    heads = ["kernel", "times a step", "µs each", "FLOP/byte", "TFLOP/s", "GB/s", "% of its roof", "% of the step"]
    return table(heads, rows)


def merge_kernels(roofs: StepRoofline) -> list[tuple[KernelPoint, float]]:
    """Merges kernels that the table would show alike, such as those of layers with different shapes of equal cost.

    Returns them with the sums of their counts, and with the seconds of all their executions, longest first.
    """
    rows: dict[tuple[str, ...], list[KernelPoint]] = defaultdict(list)
    for kernel in roofs.kernels:
        rows[kernel.kind, _title(kernel), *_rates(kernel)].append(kernel)
    merged = [
        (replace(equal[0], count=sum(kernel.count for kernel in equal)), sum(kernel.total_seconds for kernel in equal))
        for equal in rows.values()
    ]
    return sorted(merged, key=lambda row: -row[1])


def _rates(kernel: KernelPoint) -> list[str]:
    """Formats duration and rates of a kernel, as the table shows them."""
    return [
        f"{1e6 * kernel.seconds:,.1f}",
        f"{kernel.intensity:,.0f}" if kernel.flops else "",
        f"{kernel.attained / 1e12:,.0f}" if kernel.flops else "",
        f"{kernel.attained_bandwidth / 1e9:,.0f}",
        f"{100 * kernel.share_of_roof:.0f}",
    ]


def _network_table(roofs: StepRoofline) -> Html:
    rows = [
        [
            swatch(palette.AXES[point.axis].colour, palette.AXES[point.axis].name),
            LINKS[point.tier],
            format_number(point.nbytes / 1e9),
            f"{point.intensity:,.0f}",
            f"{point.link_rate / 1e9:,.0f}",
            f"{point.attained_rate / 1e9:,.1f}",
            f"{100 * point.busy_share:.1f}",
        ]
        for point in roofs.links_above(MIN_SHARE)
    ]
    heads = ["axis", "over", "GB a step", "FLOP/byte", "link GB/s", "attained GB/s", "busy at link rate, % of the step"]
    return table(heads, rows)
