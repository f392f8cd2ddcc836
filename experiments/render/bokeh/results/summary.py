"""Summary of many plans: how many fit, the best, why others are invalid, and the certificate of a search."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from meshcast.experiments.render.bokeh.html import Html, KeyFigure, details, key_figures, listing, paragraph, table
from meshcast.experiments.render.bokeh.load import PlanRows
from meshcast.experiments.render.bokeh.page import PageSection
from meshcast.simulator.report.formatting import describe_value

MAX_REASONS = 12
"""Maximum number of reasons of invalid plans that are listed."""


def make_title(plans: PlanRows) -> str:
    """Says what the file holds, and of which job."""
    kind = "Search" if plans.certificate is not None else "Sweep"
    model, cluster = (describe_value(plans.job[key]) if key in plans.job else "" for key in ("model", "cluster"))
    return f"{kind} of plans: {model} on {cluster}" if model and cluster else f"{kind} of plans: {plans.name}"


def make_lead(plans: PlanRows) -> Html:
    """Returns the names the file and what was varied: HTML below the title."""
    names = ", ".join(plans.several or plans.fields)
    return paragraph(f"{len(plans.rows):,} plans of {plans.name} over {names}", "lead")


def make_section(plans: PlanRows) -> PageSection:
    counts = plans.statuses
    tiles = [KeyFigure("plans that fit", f"{counts['fits']:,}", f"of {len(plans.rows):,} in the file")]
    if counts["tight"]:
        tiles.append(KeyFigure("tight", f"{counts['tight']:,}", "they fit with less than 95 %"))
    if counts["does-not-fit"]:
        tiles.append(KeyFigure("too large for the memory", f"{counts['does-not-fit']:,}"))
    if counts["invalid"]:
        tiles.append(KeyFigure("invalid", f"{counts['invalid']:,}", "a rule of the plan is broken"))
    if plans.excluded:
        tiles.append(KeyFigure("left out", f"{plans.excluded:,}", "by the sweep's `where`"))
    html = [key_figures(tiles)]
    if plans.fitting:
        best, tiles = plans.fitting[0], []
        for figure in plans.figures:
            if figure.name in ("step_time_s", "tokens_per_s_per_gpu", "peak_device_gib", "mfu_palm"):
                if (value := best.get(figure.name)) is not None:
                    unit = "" if figure.form.endswith("%}") else f" {figure.unit}"
                    tiles.append(KeyFigure(figure.label, figure.form.format(value) + unit))
        html += [paragraph(f"The best plan by tokens/s of a GPU: {plans.describe(best)}."), key_figures(tiles)]
        if best.get("limits"):
            html.append(paragraph(best["limits"]))
    else:
        html.append(paragraph("No plan of this file fits.", "warning"))
    if plans.certificate is not None:
        html.append(_certificate(plans.certificate))
    if reasons := count_reasons(plans):
        html.append(details("Why plans are invalid", listing(reasons)))
    return PageSection("summary", "Summary", html)


def count_reasons(plans: PlanRows) -> list[str]:
    """Reasons of invalid plans with their number, the most frequent first; differences in numbers do not count."""
    counts, first = Counter[str](), dict[str, str]()
    for row in plans.rows:
        if row["status"] == "invalid" and row.get("reason"):
            same = re.sub(r"\d[\d,.]*", "#", row["reason"])
            counts[same] += 1
            first.setdefault(same, row["reason"])
    return [f"{count:,} plans: {first[same]}" for same, count in counts.most_common(MAX_REASONS)]


def _certificate(certificate: Any) -> Html:
    rows = []
    for key, value in certificate.items():
        if key == "space" and isinstance(value, dict):
            plans = value.get("plans", 0)
            rows.append(["plans in the space", f"{plans:,}" if isinstance(plans, int) else describe_value(plans)])
            fields = value.get("fields")
            if isinstance(fields, dict):
                rows += [[f"values of {name}", describe_value(of)] for name, of in fields.items()]
        elif isinstance(value, dict):
            rows += [[f"{key}: {name.replace('_', ' ')}", describe_value(of)] for name, of in value.items()]
        else:
            rows.append([key.replace("_", " "), describe_value(value)])
    return details("Certificate of the search", table(["", "value"], rows))
