"""The page: sections with text, tables and Bokeh figures in a single HTML file that loads nothing from anywhere.

The scripts of Bokeh are written into the file, only those of the components that its figures need. What the figures
show is data beside them: no script contains text of a user. A content security policy allows these scripts by their
hashes and no other, and forbids the browser to load or send anything.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from meshcast.experiments.render.bokeh.html import Html, concat
from meshcast.experiments.render.bokeh.library import describe_figures, read_scripts
from meshcast.hardware.records import dataclass
from meshcast.simulator.report.report import product_version

POLICY = (
    "default-src 'none'; script-src {}; script-src-attr 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
"""Content security policy: scripts with the hashes that are filled in, no handlers in attributes, styles of the page,
images that are written in it, no form, no other base of addresses. All else is forbidden: requests, frames, objects,
evaluated text."""

DRAW = (
    "const page = JSON.parse(document.getElementById('figures').textContent);\n"
    "Bokeh.embed.embed_items(page.documents, page.items);"
)
"""Script that draws all figures from the data of the page."""


class Drawing(NamedTuple):
    """A figure in the body of a section.

    Attributes:
        name: unique on the page; letters, digits and dashes.
        model: of Bokeh.
    """

    name: str
    model: object


@dataclass(frozen=True)
class PageSection:
    """A section of the page.

    name: of the anchor; letters and dashes.
    title: heading, and its entry in the contents.
    body: HTML and figures, in their order.
    """

    name: str
    title: str
    body: Sequence[Html | Drawing]

    @property
    def figures(self) -> dict[str, Any]:
        """Bokeh models by name."""
        return {part.name: part.model for part in self.body if isinstance(part, Drawing)}

    @property
    def html(self) -> Html:
        """The body without what draws its figures: an empty element in place of each."""
        return concat(_place(part) if isinstance(part, Drawing) else part for part in self.body)


def render_page(title: str, lead: Html, sections: Sequence[PageSection]) -> str:
    """Returns the HTML of the page. lead: HTML below the title."""
    figures = {_element(name): figure for section in sections for name, figure in section.figures.items()}
    scripts, drawing = _embed(figures) if figures else ([], Html(""))
    policy = POLICY.format(" ".join(map(_hash, scripts)) or "'none'")
    style = (resources.files("meshcast.experiments.render.bokeh") / "page.css").read_text("utf-8")
    link = Html('<a href="#{}">{}</a>')
    body = Html('<section id="{}"><h2>{}</h2>{}</section>')
    page = Html(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,"><title>{title}</title>\n'
        "<style>{style}</style>\n{scripts}</head>\n"
        "<body><header><h1>{title}</h1>{lead}<nav>{contents}</nav></header>\n<main>{bodies}</main>\n"
        "<footer>Made by meshcast {version}. This file loads nothing.</footer>\n"
        "{drawing}</body></html>\n"
    ).format(
        policy=Html(policy),
        title=title,
        style=Html(style),
        scripts=concat(map(_script, scripts[:-1])),
        lead=lead,
        contents=concat(link.format(section.name, section.title) for section in sections),
        bodies=concat(body.format(section.name, section.title, section.html) for section in sections),
        version=product_version(),
        drawing=drawing,
    )
    return str(page)


def _embed(figures: Mapping[str, Any]) -> tuple[list[str], Html]:
    """Returns the scripts of the page, the script that draws last, and HTML with it and the data of the figures."""
    from bokeh.models import DataTable

    tables = any(isinstance(figure, DataTable) for figure in figures.values())
    data = Html('<script type="application/json" id="figures">{}</script>\n')
    return [*read_scripts(tables), DRAW], data.format(Html(describe_figures(figures))) + _script(DRAW)


def _script(text: str) -> Html:
    """Returns an element with a script of Bokeh or of this module. Its text is hashed as it stands."""
    return Html("<script>{}</script>\n").format(Html(text))


def _hash(script: str) -> str:
    """Returns the hash of a script in the words of a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _element(name: str) -> str:
    """Returns the id of the element of a figure."""
    return f"figure-{name}"


def _place(drawing: Drawing) -> Html:
    """Returns the element in which a figure is drawn; it takes no part in the layout, its content does."""
    return Html('<div id="{}" style="display:contents"></div>').format(_element(drawing.name))
