"""Timeline: every action of every pipeline device as a rectangle, and the busy share of communication below it.

A row is a pipeline device and stands for all of its ranks, which run alike. The rectangles, some hundred thousand of
them, are drawn on a canvas: WebGL would take text that is evaluated as a script, which the policy of the page forbids.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from meshcast.experiments.explain.action_times import UPDATE, ActionTimes, action_times, merge_bins
from meshcast.experiments.explain.sensitivity import Watch
from meshcast.experiments.plots.gantt import LANES
from meshcast.experiments.plots.sheet import time_unit
from meshcast.experiments.report.charts import new_figure
from meshcast.experiments.report.colours import AXES, AXIS_NAMES, action_looks
from meshcast.experiments.report.html import legend, paragraph
from meshcast.experiments.report.page import Drawing, PageSection
from meshcast.simulator.engine.play import ByMatrices
from meshcast.simulator.report.formatting import name_device
from meshcast.simulator.report.report import Report
from meshcast.simulator.report.trace import describe_ranks

MOST_BINS, SHARED_BINS = 1000, 60_000
"""Bins of communication of a device, and of all devices and axes together."""

LANE = 0.1
"""Height of a lane of communication, in rows."""


def make_section(report: Report, watch: Watch = iter) -> PageSection:
    """watch: passes the devices on, as a progress bar does."""
    step = report.play.step
    assert isinstance(step, ByMatrices)
    devices = report.play.program.devices
    lanes = len(LANES)
    bins = max(60, min(MOST_BINS, SHARED_BINS // (devices * lanes)))
    found = [action_times(step, device, bins) for device in watch(range(devices))]
    figure, entries = _draw(report, found)
    count = sum(len(one.begin) for one in found)
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


def _draw(report: Report, found: list[ActionTimes]) -> tuple[Any, list[tuple[str, str]]]:
    """The figure, and names and colours of its legend."""
    from bokeh.models import FixedTicker, HoverTool, NoOverlap, Range1d, WheelZoomTool

    scale, unit = time_unit(report.play.step.span)
    span, rows = report.play.step.span * scale, len(found)
    lanes = [axis for axis in LANES if any(axis in one.busy for one in found)]
    height = min(760, 90 + max(26, 60 - 2 * rows) * rows)
    figure = new_figure(
        height,
        f"time [{unit}]",
        "",
        x_range=Range1d(0, span, bounds=(-0.02 * span, 1.02 * span), min_interval=span * 1e-6),
        y_range=Range1d(rows, 0, bounds=(-0.5, rows + 0.5), min_interval=min(0.5, rows)),
    )
    tall = 0.9 - LANE * len(lanes)
    entries = []
    for (name, colour), columns in _group_actions(report, found, scale, tall).items():
        entries.append((name, colour))
        made = figure.quad(
            "left", "right", "top", "bottom", source=columns, fill_color=colour, line_color=None, name=name
        )  # fmt: skip
        tips = [("", "$name"), ("virtual stage, micro-batch", "@stage, @microbatch")]
        tips += [("from, to", f"@left{{0,0.000}} to @right{{0,0.000}} {unit}")]
        if np.any(columns["again"]):
            tips.append(("of it recomputation", f"@again{{0,0.000}} {unit}"))
        if name == action_looks(UPDATE, 0, 1)[0]:
            tips.pop(1)
        figure.add_tools(HoverTool(renderers=[made], tooltips=tips, visible=False))
    for place, axis in enumerate(lanes):
        columns = _lane(found, axis, scale, tall + 0.02 + LANE * place)
        entries.append((AXIS_NAMES[axis], AXES[axis]))
        made = figure.quad(
            "left", "right", "top", "bottom", source=columns, fill_color=AXES[axis], fill_alpha="share",
            line_color=None, name=AXIS_NAMES[axis],
        )  # fmt: skip
        figure.add_tools(HoverTool(renderers=[made], tooltips=[("", "$name"), ("busy", "@share{0%}")], visible=False))
    wheel = WheelZoomTool(dimensions="width")
    figure.add_tools(wheel, WheelZoomTool(dimensions="height"))
    figure.toolbar.active_scroll = wheel
    names = [name_device(report.play.plan, device) for device in range(rows)]
    ticks = [row + tall / 2 for row in range(rows)]
    figure.yaxis.ticker = FixedTicker(ticks=ticks)
    figure.yaxis.major_label_overrides = dict(zip(ticks, names, strict=True))
    figure.yaxis.major_label_policy = NoOverlap(min_distance=1)
    figure.ygrid.visible = False
    figure.yaxis.major_tick_line_color = None
    return figure, entries


def _group_actions(
    report: Report, found: list[ActionTimes], scale: float, tall: float
) -> dict[tuple[str, str], dict[str, Any]]:
    """Columns of the rectangles by name and colour, in the order of the kinds. tall: height of a row's actions."""
    plan = report.play.plan
    chunks = max(one.shape.v for one in plan.every_pipeline)
    pieces: dict[tuple[str, str], list[dict[str, np.ndarray]]] = defaultdict(list)
    for row, one in enumerate(found):
        pipeline, _ = plan.ranks.pipeline_of(one.device)
        p = plan.every_pipeline[pipeline].shape.p
        first = sum(other.shape.stages for other in plan.every_pipeline[:pipeline])
        chunk = np.maximum(one.stage - first, 0) // p
        kinds = np.array(one.kinds)
        low = row + tall * np.where(one.paired == 2, 0.5, 0.0)
        high = row + tall * np.where(one.paired == 1, 0.5, 1.0)
        for kind, own in sorted({(kind, int(c)) for kind, c in zip(one.kinds, chunk, strict=True)}):
            chosen = (kinds == kind) & (chunk == own)
            pieces[action_looks(kind, min(own, chunks - 1), chunks)].append(
                {
                    "left": one.begin[chosen] * scale,
                    "right": one.end[chosen] * scale,
                    "top": low[chosen],
                    "bottom": high[chosen],
                    "stage": one.stage[chosen] - first,
                    "microbatch": one.microbatch[chosen],
                    "again": one.recomputed[chosen] * scale,
                }
            )
    order = sorted(pieces, key=lambda look: (look[0] == action_looks(UPDATE, 0, 1)[0], look[0]))
    return {look: _join(pieces[look]) for look in order}


def _join(pieces: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Columns of all devices together, in narrow types."""
    kinds = {"stage": np.int16, "microbatch": np.int32}
    found = {name: np.concatenate([one[name] for one in pieces]) for name in pieces[0]}
    return {name: column.astype(kinds.get(name, np.float32)) for name, column in found.items()}


def _lane(found: list[ActionTimes], axis: str, scale: float, top: float) -> dict[str, Any]:
    """Columns of the rectangles of one axis of communication."""
    rows = [
        (begin * scale, end * scale, row + top, row + top + 0.85 * LANE, share)
        for row, one in enumerate(found)
        if axis in one.busy
        for begin, end, share in merge_bins(one.busy[axis], one.edges)
    ]
    columns = np.array(rows, np.float32).reshape(-1, 5).T
    return dict(zip(("left", "right", "top", "bottom", "share"), columns, strict=True))


def list_devices(report: Report) -> list[list[str]]:
    """Name and ranks of every pipeline device."""
    plan = report.play.plan
    return [
        [name_device(plan, device), describe_ranks(plan.ranks.of_device(device).tolist())]
        for device in range(plan.ranks.devices)
    ]
