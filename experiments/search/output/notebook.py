"""The result of a search as a notebook shows it."""

from __future__ import annotations

from meshcast.experiments.search.result import SearchResult


class ShownSearchResult(SearchResult):
    """A `SearchResult` that shows itself in notebooks as the page of ``meshcast search``."""

    def _repr_html_(self) -> str:
        """The page of ``meshcast search``."""
        from meshcast.experiments.pages.forecast import to_html
        from meshcast.experiments.search.output.page import page

        return to_html(page(self))
