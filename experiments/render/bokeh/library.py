"""Bokeh, which draws the page: whether it is installed, its scripts, and figures as data that its scripts draw."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from meshcast.hardware.errors import PlanError


def check_library() -> None:
    """Raises PlanError if Bokeh is not installed."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        rule = "the page is drawn by Bokeh, which is not installed"
        raise PlanError("report", rule, "pip install 'meshcast[report]'") from None


@lru_cache
def read_scripts(tables: bool) -> list[str]:
    """Returns the scripts of Bokeh that the page holds. tables: whether it has tables of Bokeh."""
    from bokeh.resources import Resources

    components = ["bokeh", *(["bokeh-widgets", "bokeh-tables"] if tables else [])]
    return Resources(mode="inline", components=components, log_level="error").js_raw


def describe_figures(figures: Mapping[str, Any]) -> str:
    """Returns figures as JSON: a document of Bokeh, and by figure the id of the element that shows it.

    Ids of models, which Bokeh counts through a process, are numbered anew, so that equal input gives equal bytes. The
    JSON may stand in an element of the page: it has no ``<``.

    Args:
        figures: models of Bokeh by the ids of their elements.
    """
    from bokeh.core.json_encoder import serialize_json
    from bokeh.document import Document

    document, numbers = Document(), dict[str, str]()
    with document.models.freeze():  # or all models would be searched for others after every figure
        for figure in figures.values():
            document.add_root(figure)
    described = _number_models(document.to_json(deferred=False), numbers)
    roots = {numbers[model.id]: element for element, model in figures.items()}
    page = {"documents": {"page": described}, "items": [{"docid": "page", "roots": roots, "root_ids": [*roots]}]}
    return serialize_json(page, pretty=False).replace("<", "\\u003c")


def _number_models(node: object, numbers: dict[str, str]) -> object:
    """Returns the data of a document with numbers for the ids of models, in the order in which they appear.

    Only models have an `id` there: mappings of figures are lists of entries.
    """
    if isinstance(node, dict):
        return {
            key: numbers.setdefault(value, f"m{len(numbers) + 1}") if key == "id" else _number_models(value, numbers)
            for key, value in node.items()
        }
    return [_number_models(value, numbers) for value in node] if isinstance(node, list | tuple) else node
