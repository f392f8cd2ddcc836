"""Timeline: every action of every pipeline device as a rectangle, and the busy share of communication below it.

A row is a pipeline device and stands for all of its ranks, which run alike. The rectangles, some hundred thousand of
them, are drawn on a canvas: WebGL would take text that is evaluated as a script, which the policy of the page forbids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshcast.experiments.explain.sensitivity import Watch
from meshcast.experiments.render.bokeh.charts import new_figure
from meshcast.experiments.render.bokeh.html import legend, paragraph
from meshcast.experiments.render.bokeh.page import Drawing, PageSection
from meshcast.experiments.views import palette
from meshcast.experiments.views.matrix_timeline import matrix_timeline
from meshcast.experiments.views.timeline import UPDATE, DeviceTimeline, merge_bins, time_unit
from meshcast.simulator.report.formatting import name_device
from meshcast.simulator.report.report import Report
from meshcast.simulator.report.trace import describe_ranks

MAX_BINS, SHARED_BINS = 1000, 60_000
"""Bins of communication of a device, and of all devices and axes together."""

LANE = 0.1
"""Height of a lane of communication, in rows."""


def make_section(report: Report, watch: Watch = iter) -> PageSection:
    """Makes the section. watch: passes the devices on, as a progress bar does."""
    devices = report.play.program.devices
    lanes = len(palette.AXES)
    bins = max(60, min(MAX_BINS, SHARED_BINS // (devices * lanes)))
    edges = np.linspace(0.0, report.play.step.span, bins + 1)
    rows, busy = [], []
    for device in watch(range(devices)):
        row = matrix_timeline(report, device)
        busy.append(row.bin_lanes(edges))
        rows.append(replace(row, lanes={}))  # which may be millions of intervals
    figure, entries = _draw(report, rows, busy, edges)
    count = sum(len(row.begin) for row in rows)
    ranks = report.job.cluster.gpus
    words = (
        f"{count:,} actions of {devices:,} pipeline stage{'s' if devices > 1 else ''}, which stand for all {ranks:,} "
        "ranks: those of one stage run alike. A rectangle reaches from the first kernel of an action to its last; "
        "white is idle. Below each row: communication by axis, the more opaque the busier. Turn the wheel to zoom in "
        "time, drag to move; with the tools at the right zoom over stages or into a box, or show the whole step "
        "again. Hold the pointer over a rectangle for its virtual stage, micro-batch and times."
    )
    if report.play.window:
        words += " The schedule has no flush: shown is the run that was played, from an empty pipeline on."
    return PageSection("timeline", "Timeline", [paragraph(words), Drawing("timeline", figure), legend(entries)])


def _draw(
    report: Report, rows: Sequence[DeviceTimeline], busy: Sequence[dict[str, np.ndarray]], edges: np.ndarray
) -> tuple[Any, list[tuple[str, str]]]:
    """Draws the figure; returns it with names and colours of its legend.

    busy: by device and axis of communication the busy share of every bin.
    edges: of the bins [s].
    """
    from bokeh.models import FixedTicker, HoverTool, NoOverlap, Range1d, WheelZoomTool

    scale, unit = time_unit(report.play.step.span)
    span, count = report.play.step.span * scale, len(rows)
    lanes = [axis for axis in palette.AXES if any(axis in shares for shares in busy)]
    height = min(760, 90 + max(26, 60 - 2 * count) * count)
    figure = new_figure(
        height,
        f"time [{unit}]",
        "",
        x_range=Range1d(0, span, bounds=(-0.02 * span, 1.02 * span), min_interval=span * 1e-6),
        y_range=Range1d(count, 0, bounds=(-0.5, count + 0.5), min_interval=min(0.5, count)),
    )
    tall = 0.9 - LANE * len(lanes)
    entries = []
    for (name, colour), columns in _group_actions(report, rows, scale, tall).items():
        entries.append((name, colour))
        rectangles = figure.quad(
            "left", "right", "top", "bottom", source=columns, fill_color=colour, line_color=None, name=name
        )  # fmt: skip
        tips = [("", "$name"), ("virtual stage, micro-batch", "@stage, @microbatch")]
        tips += [("from, to", f"@left{{0,0.000}} to @right{{0,0.000}} {unit}")]
        if np.any(columns["again"]):
            tips.append(("of it recomputation", f"@again{{0,0.000}} {unit}"))
        if name == palette.ACTIONS[UPDATE].words:
            tips.pop(1)
        figure.add_tools(HoverTool(renderers=[rectangles], tooltips=tips, visible=False))
    for place, axis in enumerate(lanes):
        columns = _lane([shares.get(axis) for shares in busy], edges, scale, tall + 0.02 + LANE * place)
        looks = palette.AXES[axis]
        entries.append((looks.name, looks.colour))
        rectangles = figure.quad(
            "left", "right", "top", "bottom", source=columns, fill_color=looks.colour, fill_alpha="share",
            line_color=None, name=looks.name,
        )  # fmt: skip
        tips = [("", "$name"), ("busy", "@share{0%}")]
        figure.add_tools(HoverTool(renderers=[rectangles], tooltips=tips, visible=False))
    wheel = WheelZoomTool(dimensions="width")
    figure.add_tools(wheel, WheelZoomTool(dimensions="height"))
    figure.toolbar.active_scroll = wheel
    names = [row.name for row in rows]
    ticks = [device + tall / 2 for device in range(count)]
    figure.yaxis.ticker = FixedTicker(ticks=ticks)
    figure.yaxis.major_label_overrides = dict(zip(ticks, names, strict=True))
    figure.yaxis.major_label_policy = NoOverlap(min_distance=1)
    figure.ygrid.visible = False
    figure.yaxis.major_tick_line_color = None
    return figure, entries


def _group_actions(
    report: Report, rows: Sequence[DeviceTimeline], scale: float, tall: float
) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns columns of the rectangles by name and colour, in the order of the kinds.

    tall: height of a row's actions.
    """
    plan = report.play.plan
    chunks = max(pipeline.shape.v for pipeline in plan.every_pipeline)
    pieces: dict[tuple[str, str], list[dict[str, np.ndarray]]] = defaultdict(list)
    for number, row in enumerate(rows):
        pipeline, _ = plan.ranks.pipeline_of(row.device)
        first = sum(other.shape.stages for other in plan.every_pipeline[:pipeline])
        kinds = np.array(row.kind)
        low, high = (number + tall * row.part[:, end] for end in (0, 1))
        for kind, chunk in sorted(set(zip(row.kind, row.chunk.tolist(), strict=True))):
            chosen = (kinds == kind) & (row.chunk == chunk)
            pieces[action_looks(kind, min(chunk, chunks - 1), chunks)].append(
                {
                    "left": row.begin[chosen] * scale,
                    "right": row.end[chosen] * scale,
                    "top": low[chosen],
                    "bottom": high[chosen],
                    "stage": row.stage[chosen] - first,
                    "microbatch": row.microbatch[chosen],
                    "again": row.recomputed[chosen] * scale,
                }
            )
    order = sorted(pieces, key=lambda look: (look[0] == palette.ACTIONS[UPDATE].words, look[0]))
    return {look: _join(pieces[look]) for look in order}


def action_looks(kind: str, chunk: int, chunks: int) -> tuple[str, str]:
    """Returns name and colour of the actions of a kind and a chunk of the model."""
    looks = palette.ACTIONS[kind]
    if kind == UPDATE or chunks == 1:
        return looks.words, looks.colour
    return f"{looks.words}, chunk {chunk}", palette.to_hex(palette.shades(looks.colour, chunks)[chunk])


def _join(pieces: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Joins columns of all devices, in narrow types."""
    kinds = {"stage": np.int16, "microbatch": np.int32}
    columns = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    return {name: column.astype(kinds.get(name, np.float32)) for name, column in columns.items()}


def _lane(busy: Sequence[np.ndarray | None], edges: np.ndarray, scale: float, top: float) -> dict[str, Any]:
    """Returns columns of the rectangles of an axis of communication. busy: shares of the bins by device."""
    rows = [
        (begin * scale, end * scale, device + top, device + top + 0.85 * LANE, share)
        for device, shares in enumerate(busy)
        if shares is not None
        for begin, end, share in merge_bins(shares, edges)
    ]
    columns = np.array(rows, np.float32).reshape(-1, 5).T
    return dict(zip(("left", "right", "top", "bottom", "share"), columns, strict=True))


def list_devices(report: Report) -> list[list[str]]:
    """Lists name and ranks of every pipeline device."""
    plan = report.play.plan
    return [
        [name_device(plan, device), describe_ranks(plan.ranks.of_device(device).tolist())]
        for device in range(plan.ranks.devices)
    ]
