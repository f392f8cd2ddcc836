"""The page of ``meshcast search --compare``: a given plan beside the best one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.terminal.tables import show_table
from meshcast.experiments.search.comparison.compare import ComparedPlan
from meshcast.experiments.search.comparison.membership import state_value
from meshcast.experiments.views.table import Column, Table, numbers
from meshcast.hardware.units import GIB
from meshcast.simulator.report.figures import parts_of_step
from meshcast.simulator.report.words import describe_list, format_need, format_seconds

LEAST_SHARE = 0.02
"""Share of all differences between the parts of two steps from which a part has a row."""


def comparison_page(compared: Sequence[ComparedPlan]) -> RenderableType:
    """What distinguishes given plans from the best one, each below the other."""
    return Group(*(part for one in compared for part in _describe_plan(one)))


def _describe_plan(one: ComparedPlan) -> Iterator[RenderableType]:
    yield Text()
    yield show_table(Table("", Column(wrap="letters"), rows=_head(one), ruled=False))
    if one.differences:
        stated = [(name, *map(_shorten, reversed(values)), "") for name, values in one.differences.items()]
        yield _compare("field that differs", stated)
    if one.forecasts is not None and (parts := _differing_parts(one)):
        yield _compare("part of the step", parts)


def _head(one: ComparedPlan) -> Iterator[tuple[str, str]]:
    yield "compared", one.name
    yield "step", _describe_step(one)
    memory = f"{format_need(one.report.peak_device, one.report.capacity)} GiB"
    yield "memory", memory + (f", the best plan {one.best.peak_device / GIB:.1f} GiB" if one.best else "")
    if not one.fits:
        yield "", "it does not fit in the memory that plans of the search may take"
    if one.inside:
        yield "space", "the search had this plan among its own"
    for i, field in enumerate(one.outside):
        value = state_value(field.value)
        yield "" if i else "space", f"{'not in it: ' if not i else ''}{field.field} is {value}; {field.why}"
    if (again := one.restated) is not None:
        factor = f", {again.step_time / one.best.step_time:.3f} times that of the best plan" if one.best else ""
        fits = "" if again.fits else "; it does not fit"
        yield "restated", f"{format_seconds(again.step_time)}{factor}{fits}: without what no search varies"


def _describe_step(one: ComparedPlan) -> str:
    step = format_seconds(one.report.step_time)
    if one.best is None or one.factor is None or one.factor_at_most is None:
        return f"{step}; the search found no plan that fits"
    words = f"{step}, {one.factor:.3f} times the {format_seconds(one.best.step_time)} of the best plan"
    if one.factor_at_most > one.factor * (1 + 5e-4):
        return f"{words}; at most {one.factor_at_most:.3f} times the shortest step of the space"
    return words


def _differing_parts(one: ComparedPlan) -> list[tuple[str, str, str, str]]:
    assert one.forecasts is not None
    parts = one.forecasts.parts
    most = sum(abs(own - best) for best, own in parts.values())
    order = sorted(parts.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    return [
        (parts_of_step()[key].label, format_seconds(own), format_seconds(best), f"{(own - best) * 1e3:+,.0f} ms")
        for key, (best, own) in order
        if abs(own - best) > LEAST_SHARE * most
    ]


def _compare(title: str, rows: Sequence[tuple[str, ...]]) -> RenderableType:
    return show_table(Table(title, *numbers("this plan", "best plan", ""), rows=rows))


def _shorten(value: Any) -> str:
    """A value in words; a dash where a plan has no such field."""
    if value is None:
        return "-"
    return describe_list(value) if isinstance(value, list | tuple) and len(value) > 6 else state_value(value)
