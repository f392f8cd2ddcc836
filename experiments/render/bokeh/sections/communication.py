"""Communication: bytes that ranks, nodes or stages send each other in a step, an image for every axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshcast.experiments.render.bokeh.charts import new_figure, sequential
from meshcast.experiments.render.bokeh.html import Html, paragraph, table
from meshcast.experiments.render.bokeh.page import Drawing, PageSection
from meshcast.experiments.views import palette
from meshcast.experiments.views.communication import CommunicationMatrix, communication_matrix
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.report.formatting import format_bytes
from meshcast.simulator.report.report import Report

MIN_SHARE = 1e-9
"""Share of all bytes below which an axis gets no image: sums of norms."""

SIDE = 300
"""Side of a matrix [px]: rows and columns are the same, so it is square at any width of the page."""

AROUND = 85
"""Room for the title and the labels of the x axis, and for those of the y axis and the tools [px]."""

DECADES = 5.0
"""Maximum number of decades of the scale of colours; what is less has the palest shade."""


def make_section(report: Report, calibration: Calibration | None = None) -> PageSection:
    if report.job.cluster.gpus == 1:
        return PageSection("communication", "Communication", [paragraph("One GPU: nothing is sent.")])
    sent = communication_matrix(report, calibration=calibration)
    total = float(sent.total.sum())
    noun = sent.grouping
    if not total:
        words = "The ranks of this plan send each other nothing."
        return PageSection("communication", "Communication", [paragraph(words)])
    shown = {axis: sent.by_axis[axis] for axis in sent.by_axis if sent.sums[axis] >= MIN_SHARE * total}
    words = (
        f"Bytes in a step from each {noun} (row) to each other one (column): collectives by the algorithms that the "
        "forecast chose for them, and messages of the pipeline. Payloads only; an all-reduce that a switch adds up "
        "counts as the direct exchange that it stands for. All images have one logarithmic scale; white: nothing."
    )
    if sent.grouping != "rank":
        words += f" What ranks of one {noun} send each other is on the diagonal."
    rows = [
        [palette.AXES[axis].name, format_bytes(sent.sums[axis]), f"{100 * sent.sums[axis] / total:.1f}",
         format_bytes(sent.sums[axis] / report.job.cluster.gpus)]
        for axis in shown
    ]  # fmt: skip
    foot = ["all", format_bytes(total), "100.0", format_bytes(total / report.job.cluster.gpus)]
    low, high = sent.find_scale(DECADES, shown)
    ranges: dict[str, Any] = {}
    panels = {palette.AXES[axis].name: matrix for axis, matrix in shown.items()}
    if len(shown) > 1:
        panels = {"all axes": sent.total, **panels}
    scale = Html('<div class="scale" style="background:linear-gradient(to right,{})"></div>')
    ends = Html('<div class="ends"><span>{} or less</span><span>{}</span></div>')
    body: list[Html | Drawing] = [
        paragraph(words),
        table(["axis", "sent in a step", "%", "of a rank in the mean"], rows, foot=foot),
        scale.format(",".join(_palette()[::7])),
        ends.format(format_bytes(low), format_bytes(high)),
        Html('<div class="grid square">'),
    ]
    for number, (title, matrix) in enumerate(panels.items()):
        drawing = Drawing(f"matrix{number}", _draw(sent, title, matrix, low, high, noun, ranges))
        body += [Html("<div>"), drawing, Html("</div>")]
    body.append(Html("</div>"))
    out, back = sent.host.sum(axis=0)
    if out + back:
        copies = f"Copies between GPUs and hosts in a step: {format_bytes(out)} out, {format_bytes(back)} back."
        body.append(paragraph(copies))
    return PageSection("communication", "Communication", body)


def _palette() -> list[str]:
    return sequential(palette.BLUE)[12:]  # paler shades vanish: most cells are a line of a pixel


def _draw(
    sent: CommunicationMatrix,
    title: str,
    matrix: np.ndarray,
    low: float,
    high: float,
    noun: str,
    ranges: dict[str, Any],
) -> Any:
    """Draws an image. ranges: of its axes, which all images share."""
    from bokeh.models import HoverTool, LinearColorMapper, LogColorMapper, Range1d

    size = len(sent.names)
    if not ranges:
        bounds = (-0.5, size - 0.5)
        ranges["x_range"] = Range1d(*bounds, bounds=bounds)
        ranges["y_range"] = Range1d(size - 0.5, -0.5, bounds=bounds)
    figure = new_figure(
        SIDE + AROUND,
        f"to {noun}",
        f"from {noun}",
        "pan,wheel_zoom,box_zoom,reset,save",
        title=title,
        active_scroll=None,
        sizing_mode="fixed",
        width=SIDE + AROUND,
        frame_width=SIDE,
        frame_height=SIDE,
        **ranges,
    )
    place = {"x": -0.5, "y": -0.5, "dw": size, "dh": size}
    mapper = LogColorMapper(_palette(), low=low, high=max(high, low * 10))
    amounts = figure.image([matrix.astype(np.float32)], color_mapper=mapper, **place)
    white = LinearColorMapper(["#ffffff00", "#ffffffff"], low=0, high=1)
    figure.image([(matrix == 0).astype(np.uint8)], color_mapper=white, **place)
    tips = [(f"from {noun}", "$y{0}"), (f"to {noun}", "$x{0}"), ("sent in a step", "@image{0.[00] d}")]
    figure.add_tools(HoverTool(renderers=[amounts], tooltips=tips, visible=False))
    figure.grid.visible = False
    for axis in (figure.xaxis, figure.yaxis):
        axis.ticker.min_interval = 1
        axis.ticker.num_minor_ticks = 0
    return figure
