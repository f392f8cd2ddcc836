"""The page: sections with text, tables and Bokeh figures in one HTML file that loads nothing from anywhere.

The scripts of Bokeh are written into the file, only those of the components that its figures need, and a content
security policy forbids the browser to load or send anything. Equal input gives equal bytes: the ids that Bokeh draws at
random, and counts through a process, are numbered anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from meshcast.experiments.report.html import escape
from meshcast.hardware.errors import PlanError
from meshcast.simulator.report.report import product_version

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)
"""Content security policy: scripts and styles of the page itself, images that it makes. Bokeh compiles shaders and
callbacks at run time, hence `unsafe-eval`."""

FIGURE = re.compile(r"\{\{(\w+)\}\}")
"""Place of a figure in the HTML of a section."""


@dataclass(frozen=True)
class PageSection:
    """A section of the page.

    name: of the anchor; letters and dashes.
    title: heading, and its entry in the contents.
    html: the body; ``{{name}}`` is the place of a figure.
    figures: Bokeh models by name, unique on the page.
    """

    name: str
    title: str
    html: str
    figures: Mapping[str, Any] = field(default_factory=dict)


def check_library() -> None:
    """Raises PlanError if Bokeh is not installed."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        rule = "the page is drawn by Bokeh, which is not installed"
        raise PlanError("report", rule, "pip install 'meshcast[report]'") from None


def render_page(title: str, lead: str, sections: Sequence[PageSection]) -> str:
    """The HTML of the page. lead: HTML below the title."""
    figures = {name: figure for section in sections for name, figure in section.figures.items()}
    bundle, script, divs = _embed(figures) if figures else ("", "", {})
    contents = "".join(f'<a href="#{one.name}">{escape(one.title)}</a>' for one in sections)
    bodies = "".join(
        f'<section id="{one.name}"><h2>{escape(one.title)}</h2>{FIGURE.sub(lambda at: divs[at[1]], one.html)}</section>'
        for one in sections
    )
    style = (resources.files("meshcast.experiments.report") / "page.css").read_text("utf-8")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>\n'
        f"<style>{style}</style>\n{bundle}</head>\n"
        f"<body><header><h1>{escape(title)}</h1>{lead}<nav>{contents}</nav></header>\n<main>{bodies}</main>\n"
        f"<footer>Made by meshcast {escape(product_version())}. This file loads nothing.</footer>\n"
        f"{script}</body></html>\n"
    )


def _embed(figures: dict[str, Any]) -> tuple[str, str, dict[str, str]]:
    """The scripts of Bokeh, the script that draws the figures, and the element of every figure."""
    from bokeh.embed import components
    from bokeh.models import DataTable
    from bokeh.resources import Resources

    parts = ["bokeh", "bokeh-gl"]
    if any(isinstance(figure, DataTable) for figure in figures.values()):
        parts += ["bokeh-widgets", "bokeh-tables"]
    script, divs = components(figures)
    bundle = Resources(mode="inline", components=parts, log_level="error").render_js()
    script, *found = _number_ids([script, *divs.values()])
    return bundle, script, dict(zip(divs, found, strict=True))


def _number_ids(texts: Sequence[str]) -> list[str]:
    """Replaces the ids of Bokeh's models and elements by numbers in the order in which they appear."""
    known: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        return known.setdefault(found[0], f"{found[0][0] if found[0][0] == 'p' else 'e'}{len(known) + 1}")

    models = r"(?<=&quot;)p\d{4,}(?=&quot;)|(?<=[\"'])p\d{4,}(?=[\"'])"
    elements = r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"
    return [re.sub(f"{models}|{elements}", number, text) for text in texts]
