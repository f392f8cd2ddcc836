"""Values of tables and bars, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from meshcast.experiments.views import tornado
from meshcast.experiments.views.heatmap import format_value, sort_values
from meshcast.experiments.views.table import Column, Table, format_percent, join_lines, numbers


def test_shares_are_percent_without_their_sign() -> None:
    assert [format_percent(share) for share in (0.125, 1.0, 0.0, None)] == ["12.5", "100.0", "0.0", ""]
    assert format_percent(0.12345, "+.2p") == "+12.35"


def test_values_are_sorted_none_first_and_written_as_jobs_have_them() -> None:
    assert sort_values(["b", 2, None, "a", 10]) == [None, 2, 10, "a", "b"]
    assert [format_value(value) for value in (None, True, 0.5, 8, "1f1b")] == ["-", "true", "0.5", "8", "1f1b"]


def test_short_rows_are_filled_and_sections_end() -> None:
    table = Table(Column("name"), *numbers("a", "b"))
    table.end_section()
    table.add("x", 1)
    table.end_section()
    table.add("y", 2, 3)
    assert [[cell.text for cell in row.cells] for row in table.rows] == [["x", "1", ""], ["y", "2", "3"]]
    assert [row.ends for row in table.rows] == [True, False]
    assert [column.align for column in table.columns[1:]] == ["right", "right"]
    assert join_lines(("two", "", "lines")) == "two lines" and join_lines("one line") == "one line"


def test_a_tornado_has_bars_of_what_matters() -> None:
    """A bar begins at a share of the step; a field without a shorter alternative ends at the step itself."""

    def figure(label: str, swing: float) -> Any:
        figure = SimpleNamespace(label=label)
        return SimpleNamespace(figure=figure, swing_s=swing, better_s=9.0, worse_s=9.0 + swing, saved_s=0.001)

    def field(name: str, value: object, effect: float, *times: float) -> Any:
        alternatives = [SimpleNamespace(step_time_s=time) for time in times]
        field = SimpleNamespace(name=name, value=value)
        return SimpleNamespace(field=field, step_effect_s=effect, step_time_s=10.0, alternatives=alternatives)

    least = tornado.MIN_FIGURE * 10.0, tornado.MIN_FIELD * 10.0
    sensitivities: Any = SimpleNamespace(
        report=SimpleNamespace(step_time=10.0),
        figures=[figure("clock", least[0]), figure("links", 0.9 * least[0])],
        assumed=[field("a", "x", 2.0, 12.0, 11.0), field("b", None, least[1], 8.0), field("c", 1, 0.9 * least[1], 9.9)],
    )
    drawn = tornado.make_tornado(sensitivities)
    assert (drawn.step, drawn.without_influence) == (10.0, ("links",))
    assert [tuple(bar) for bar in drawn.hardware] == [("clock", 9.0, 9.0 + least[0], "1.000 ms")]
    assert [tuple(bar) for bar in drawn.fields] == [("a", 10.0, 12.0, "x"), ("b", 8.0, 10.0, "follows from others")]
