"""Summary of many plans: how many fit, the best one, why others are invalid, and the certificate of a search."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from meshcast.experiments.report.html import Html, KeyFigure, details, key_figures, listing, paragraph, table
from meshcast.experiments.report.load import PlanRows
from meshcast.experiments.report.page import PageSection
from meshcast.simulator.report.formatting import describe_value

MOST_REASONS = 12
"""Most reasons of invalid plans that are listed."""


def make_title(found: PlanRows) -> str:
    """What the file holds, and of which job."""
    kind = "Search" if found.certificate is not None else "Sweep"
    model, cluster = (describe_value(found.job[key]) if key in found.job else "" for key in ("model", "cluster"))
    return f"{kind} of plans: {model} on {cluster}" if model and cluster else f"{kind} of plans: {found.name}"


def make_lead(found: PlanRows) -> Html:
    """The file and what was varied: HTML below the title."""
    names = ", ".join(found.several or found.fields)
    return paragraph(f"{len(found.rows):,} plans of {found.name} over {names}", "lead")


def make_section(found: PlanRows) -> PageSection:
    counts = found.statuses
    tiles = [KeyFigure("plans that fit", f"{counts['fits']:,}", f"of {len(found.rows):,} in the file")]
    if counts["tight"]:
        tiles.append(KeyFigure("tight", f"{counts['tight']:,}", "they fit with less than 95 %"))
    if counts["does-not-fit"]:
        tiles.append(KeyFigure("too large for the memory", f"{counts['does-not-fit']:,}"))
    if counts["invalid"]:
        tiles.append(KeyFigure("invalid", f"{counts['invalid']:,}", "a rule of the plan is broken"))
    if found.excluded:
        tiles.append(KeyFigure("left out", f"{found.excluded:,}", "by the sweep's `where`"))
    html = [key_figures(tiles)]
    if found.fitting:
        best, tiles = found.fitting[0], []
        for figure in found.figures:
            if figure.name in ("step_time_s", "tokens_per_s_per_gpu", "peak_device_gib", "mfu_palm"):
                if (value := best.get(figure.name)) is not None:
                    unit = "" if figure.form.endswith("%}") else f" {figure.unit}"
                    tiles.append(KeyFigure(figure.label, figure.form.format(value) + unit))
        html += [paragraph(f"The best plan by tokens/s of a GPU: {found.describe(best)}."), key_figures(tiles)]
        if best.get("limits"):
            html.append(paragraph(best["limits"]))
    else:
        html.append(paragraph("No plan of this file fits.", "warning"))
    if found.certificate is not None:
        html.append(_certificate(found.certificate))
    if reasons := count_reasons(found):
        html.append(details("Why plans are invalid", listing(reasons)))
    return PageSection("summary", "Summary", html)


def count_reasons(found: PlanRows) -> list[str]:
    """Reasons of invalid plans with their number, the most frequent first; differences in numbers do not count."""
    counts, first = Counter[str](), dict[str, str]()
    for row in found.rows:
        if row["status"] == "invalid" and row.get("reason"):
            same = re.sub(r"\d[\d,.]*", "#", row["reason"])
            counts[same] += 1
            first.setdefault(same, row["reason"])
    return [f"{count:,} plans: {first[same]}" for same, count in counts.most_common(MOST_REASONS)]


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
