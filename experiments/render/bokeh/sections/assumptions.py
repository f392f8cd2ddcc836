"""Assumptions: what the forecast had to assume, where every figure of the hardware comes from, and the whole job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshcast.experiments.render.bokeh.html import Html, details, heading, listing, paragraph, table
from meshcast.experiments.render.bokeh.page import PageSection
from meshcast.experiments.render.bokeh.sections.timeline import list_devices
from meshcast.hardware.documents.document import to_yaml
from meshcast.hardware.load import Fact, Value
from meshcast.hardware.node import Node
from meshcast.hardware.sourced_values import sourced_values
from meshcast.simulator.report.report import Report


def make_section(report: Report) -> PageSection:
    sources = list_sources(report)
    before = ["", *(row[0] for row in sources)]  # the name of a file stands beside its first figure only
    rows = [["" if row[0] == above else row[0], *row[1:]] for row, above in zip(sources, before, strict=False)]
    job = to_yaml(report.state_job(), allow_unicode=True, width=100)
    body = [
        listing(report.assumed),
        heading("Sources of the hardware's figures"),
        paragraph(
            "peak: the maker's figure; measured, fitted or assumed otherwise. Rates of links are of one direction."
        ),
        table(["of", "figure", "value", "kind", "source"], rows, "sources"),
        details("Ranks of every pipeline stage", table(["", "ranks"], list_devices(report))),
        details("The job with all defaults filled", Html("<pre>{}</pre>").format(job)),
    ]
    return PageSection("assumptions", "Assumptions and sources", body)


def list_sources(report: Report) -> list[list[str]]:
    """Lists hardware, figure, value, kind and source of everything that the cluster's files state."""
    cluster = report.job.cluster
    rows, seen = [], set[str]()
    for node in dict.fromkeys([group.node for group in cluster.groups] or [cluster.node]):
        for model in _models(node):
            name = getattr(model, "name", "") or type(model).__name__.lower()
            if name in seen:
                continue
            seen.add(name)
            for path, value in sourced_values(model):
                source = f"{value.source}{f' (read on {value.checked})' if value.checked else ''}"
                rows.append([name, path.replace("_", " ").replace(".", ", "), _text(value), value.kind, source])
    return rows


def _models(node: Node) -> Iterator[Any]:
    """Returns the files of a node: itself, its GPU, and the links of both."""
    yield node.gpu
    if node.scale_up:
        yield node.scale_up.link
    if node.nics:
        yield node.nics.link
    yield node.gpu.host
    yield node


def _text(item: Value | Fact) -> str:
    if isinstance(item, Value):
        return item.text
    return ("no", "yes")[item.value] if isinstance(item.value, bool) else str(item.value)
