"""The page itself: self-contained, safe with hostile names, equal bytes for equal input."""

from __future__ import annotations

import re
import sys

import pytest

pytest.importorskip("bokeh", reason="bokeh is not installed (pip install 'meshcast[report]')")

from meshcast.experiments.render.bokeh.charts import new_figure, sequential
from meshcast.experiments.render.bokeh.html import BarPiece, Html, bar, paragraph, table
from meshcast.experiments.render.bokeh.library import check_library
from meshcast.experiments.render.bokeh.page import Drawing, PageSection, render_page
from meshcast.experiments.views import palette
from meshcast.hardware.errors import PlanError
from meshcast.simulator.report.formatting import format_bytes

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m"


def page(title: str = "a title") -> str:
    from bokeh.models import ColumnDataSource

    figure = new_figure(200, "x", "y")
    figure.scatter("x", "y", source=ColumnDataSource({"x": [1], "y": [2], "name": [HOSTILE]}))
    section = PageSection("one", title, [paragraph(title), Drawing("drawn", figure)])
    return render_page(title, Html(""), [section])


def test_a_page_loads_nothing() -> None:
    made = page()
    assert "default-src 'none'" in made
    # Addresses in the code of Bokeh are those of licences, name spaces and messages; no element loads one.
    own = re.sub(r"<script.*?</script>", "", made, flags=re.DOTALL)
    assert not re.findall(r'(?:src|href)="(?!#|data:)', own)
    assert not re.findall(r"<script[^>]*\ssrc=|<link[^>]*stylesheet|@import", made)


def test_a_page_has_the_scripts_and_the_data_of_its_figures_and_none_without_figures() -> None:
    assert 'id="figure-drawn"' in page() and page().count('<script type="application/json" id="figures">') == 1
    plain = render_page("a title", Html(""), [PageSection("words", "words", [paragraph("words")])])
    assert "<script" not in plain and "script-src 'none'" in plain


def test_names_cannot_leave_their_place() -> None:
    made = page(HOSTILE)
    assert "<img" not in made and "\x1b" not in made
    assert Html.escape(HOSTILE) in made


def test_equal_input_gives_equal_bytes() -> None:
    assert page() == page()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(PlanError, match=r"pip install 'meshcast\[report\]'"):
        check_library()


def test_tables_align_columns_of_numbers() -> None:
    made = table(["name", "value"], [["a", "1.5"], ["b", ""], ["c", "-2"]])
    assert made.count('<td class="number">') == 3 and made.count('<th class="number">') == 1
    assert '<td class="number">a' not in made


def test_bars_leave_out_empty_pieces() -> None:
    made = bar([BarPiece(0.0, 0.5, "#000000", "half"), BarPiece(0.5, 0.5, "#ffffff")], mark=0.25)
    assert made.count("<i ") == 1 and "width:50.000%" in made and "left:25.000%" in made


def test_colours_and_bytes() -> None:
    colours = sequential("#0072b2")
    assert len(colours) == 64 and colours[0] > colours[-1]
    assert palette.to_hex((1.0, 0.0, 0.5)) == "#ff0080"
    sizes = (12, 999, 1500, 2e6, 3e12, 3.14159e15)
    assert [format_bytes(size) for size in sizes] == ["12 B", "999 B", "1.5 kB", "2 MB", "3 TB", "3.14 PB"]
