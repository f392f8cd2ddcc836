"""Roofline: kernels of a step beside the roofs of their GPU, and communication beside the roofs of its links."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np

from meshcast.experiments.explain.roofline import KernelPoint, StepRoofline, step_roofline
from meshcast.experiments.plots import style
from meshcast.experiments.report.charts import FONT, new_figure
from meshcast.experiments.report.colours import AXES, AXIS_NAMES, part_colour
from meshcast.experiments.report.html import Html, heading, legend, line_legend, paragraph, swatch, table
from meshcast.experiments.report.page import Drawing, PageSection
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.report.figures import parts_of_step
from meshcast.simulator.report.formatting import format_bytes, format_number, format_seconds
from meshcast.simulator.report.report import Report

LEAST = 1e-6
"""Share of the step for which links are busy with an axis below which it gets no point."""
ROWS = 20
"""Kernels in the table."""
DASHES = ("solid", "dashed", "dotted", "dotdash")
LINKS = {"scale-up": "scale-up links", "host": "link to the host", "network": "network port"}


def make_section(report: Report, calibration: Calibration | None = None) -> PageSection:
    found = step_roofline(report, calibration=calibration)
    network = [one for one in found.network if one.busy_share >= LEAST]
    kernels = [one for one in found.kernels if one.flops]
    words = (
        f"One rank of {found.name} on {found.gpu}. A circle is a kernel: FLOPs per byte of its least memory traffic, "
        "and the rate that the forecast gives it; its area is its share of the step. A diamond is an axis of "
        "communication: FLOPs of the whole step per byte that a rank sends over links of one kind, and the rate of the "
        "whole step. Nothing lies above its roof: the peak of the number format, the bandwidth of the memory for "
        "kernels, the rate of the links for communication. Kernels without FLOPs of their own are in the "
        "table only. Names that begin with d compute gradients of inputs, with w those of weights; re is recomputation."
    )
    kinds = list(dict.fromkeys(one.kind for one in kernels))
    entries = [(parts_of_step()[kind].label, part_colour(kind)) for kind in kinds]
    entries += [(AXIS_NAMES[one], AXES[one]) for one in dict.fromkeys(one.axis for one in network)]
    body: list[Html | Drawing] = [
        paragraph(words),
        Drawing("roofline", _draw(found, kernels)),
        line_legend([(name, dash) for name, _, dash in list_roofs(found)]),
        legend(entries),
        heading(f"The {min(ROWS, len(merge_kernels(found)))} kernels that take longest"),
        _kernel_table(found),
    ]
    if network:
        body += [heading("Communication of a rank"), _network_table(found)]
    return PageSection("roofline", "Roofline", body)


def list_roofs(found: StepRoofline) -> list[tuple[str, float, str]]:
    """Name with its rate, rate [bytes/s] and dash of the roofs of the memory and of the links."""
    rates = [("memory bandwidth", found.memory_bandwidth), *((LINKS[tier], rate) for tier, rate in found.links.items())]
    return [(f"{name} {rate / 1e9:,.0f} GB/s", rate, dash) for (name, rate), dash in zip(rates, DASHES, strict=False)]


def _draw(found: StepRoofline, kernels: list[KernelPoint]) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool

    network = [one for one in found.network if one.busy_share >= LEAST]
    places = [one.intensity for one in kernels] + [one.intensity for one in network]
    top = max(found.peaks.values(), default=1e12)
    ridge = top / found.memory_bandwidth
    low, high = min([*places, ridge / 10]) / 2, max([*places, ridge * 10]) * 2
    rates = [one.attained for one in kernels] + [one.attained for one in network]
    floor = min([*(rate for rate in rates if rate), top / 4]) / 3
    figure = new_figure(
        430,
        "FLOPs per byte of memory traffic (circles), per byte sent (diamonds)",
        "TFLOP/s",
        "pan,wheel_zoom,box_zoom,reset,save",
        x_axis_type="log",
        y_axis_type="log",
        x_range=(low, high),
        y_range=(floor / 1e12, top * 2.2 / 1e12),
        active_scroll=None,
    )
    for name, rate, dash in list_roofs(found):
        start = max(low, floor / rate)
        x = np.array([start, top / rate])
        if x[0] < x[1]:
            made = figure.line(x, x * rate / 1e12, line_color=style.INK, line_dash=dash, line_width=1.5, name=name)
            figure.add_tools(HoverTool(renderers=[made], tooltips="$name", visible=False))
    for dtype, peak in found.peaks.items():
        figure.line([peak / found.memory_bandwidth, high], [peak / 1e12] * 2, line_color=style.INK, line_width=1.5)
        words = f"peak {dtype} {peak / 1e12:,.0f} TFLOP/s"
        figure.text(
            [high / 1.15], [peak / 1e12], [words], text_align="right", text_font={"value": FONT},
            text_font_size="12px", text_color=style.INK, y_offset=-3,
        )  # fmt: skip
    kinds = dict.fromkeys(one.kind for one in kernels)
    longest = max((one.total_seconds for one in kernels), default=1.0)
    for kind in kinds:
        own = [one for one in kernels if one.kind == kind]
        source = ColumnDataSource(
            {
                "x": [one.intensity for one in own],
                "y": [one.attained / 1e12 for one in own],
                "size": [5 + 21 * (one.total_seconds / longest) ** 0.5 for one in own],
                "name": [_title(one) for one in own],
                "share": [one.total_seconds / found.step_seconds for one in own],
                "roof": [one.share_of_roof for one in own],
                "time": [format_seconds(one.seconds) for one in own],
                "count": [one.count for one in own],
            }
        )
        made = figure.scatter(
            "x", "y", size="size", source=source, fill_color=part_colour(kind), line_color="white", fill_alpha=0.75
        )
        tips = [("", "@name"), ("time of one, times a step", "@time, @count{0,0.[0]}")]
        tips += [("share of the step", "@share{0.0%}"), ("attained", "@y{0,0.0} TFLOP/s, @roof{0%} of its roof")]
        figure.add_tools(HoverTool(renderers=[made], tooltips=tips, visible=False))
    if network:
        source = ColumnDataSource(
            {
                "x": [one.intensity for one in network],
                "y": [one.attained / 1e12 for one in network],
                "colour": [AXES[one.axis] for one in network],
                "name": [f"{AXIS_NAMES[one.axis]} over the {LINKS[one.tier]}" for one in network],
                "bytes": [format_bytes(one.nbytes) for one in network],
                "busy": [one.busy_share for one in network],
            }
        )
        made = figure.scatter(
            "x", "y", size=15, marker="diamond", source=source, fill_color="colour", line_color="white"
        )
        tips = [("", "@name"), ("sent in a step", "@bytes"), ("links busy at their rate", "@busy{0.0%} of the step")]
        figure.add_tools(HoverTool(renderers=[made], tooltips=tips, visible=False))
    return figure


def _title(one: KernelPoint) -> str:
    phases = {"F": "forward", "B": "backward, inputs", "W": "backward, weights", "R": "recompute", "U": "update"}
    return f"{one.name} ({phases.get(one.phase, one.phase)})"


def _kernel_table(found: StepRoofline) -> Html:
    rows = []
    for one, total in merge_kernels(found)[:ROWS]:
        rows.append(
            [
                swatch(part_colour(one.kind), _title(one)),
                f"{one.count:,.4g}",
                *_rates(one),
                f"{100 * total / found.step_seconds:.1f}",
            ]
        )
    heads = ["kernel", "times a step", "µs each", "FLOP/byte", "TFLOP/s", "GB/s", "% of its roof", "% of the step"]
    return table(heads, rows)


def merge_kernels(found: StepRoofline) -> list[tuple[KernelPoint, float]]:
    """Kernels with the seconds of all their executions, longest first; those that the table would show alike (of layers
    that differ in what it does not show, such as shapes of equal cost) are one, with the sum of their counts."""
    rows: dict[tuple[str, ...], list[KernelPoint]] = defaultdict(list)
    for one in found.kernels:
        rows[one.kind, _title(one), *_rates(one)].append(one)
    merged = [
        (replace(own[0], count=sum(one.count for one in own)), sum(one.total_seconds for one in own))
        for own in rows.values()
    ]
    return sorted(merged, key=lambda row: -row[1])


def _rates(one: KernelPoint) -> list[str]:
    """Duration and rates of a kernel, as the table shows them."""
    return [
        f"{1e6 * one.seconds:,.1f}",
        f"{one.intensity:,.0f}" if one.flops else "",
        f"{one.attained / 1e12:,.0f}" if one.flops else "",
        f"{one.attained_bandwidth / 1e9:,.0f}",
        f"{100 * one.share_of_roof:.0f}",
    ]


def _network_table(found: StepRoofline) -> Html:
    rows = [
        [
            swatch(AXES[one.axis], AXIS_NAMES[one.axis]),
            LINKS[one.tier],
            format_number(one.nbytes / 1e9),
            f"{one.intensity:,.0f}",
            f"{one.link_rate / 1e9:,.0f}",
            f"{one.attained_rate / 1e9:,.1f}",
            f"{100 * one.busy_share:.1f}",
        ]
        for one in found.network
        if one.busy_share >= LEAST
    ]
    heads = ["axis", "over", "GB a step", "FLOP/byte", "link GB/s", "attained GB/s", "busy at link rate, % of the step"]
    return table(heads, rows)
