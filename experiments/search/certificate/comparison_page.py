"""The page of ``meshcast search --compare``: a stated plan beside the best plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.terminal.tables import show_table
from meshcast.experiments.search.certificate.comparison import ComparedPlan
from meshcast.experiments.search.space.membership import state_value
from meshcast.experiments.views.table import Column, Table, numbers
from meshcast.hardware.units import GIB
from meshcast.simulator.report.figures import parts_of_step
from meshcast.simulator.report.formatting import describe_list, format_need, format_seconds

MIN_SHARE = 0.02
"""Share of all differences between the parts of two steps from which a part has a row."""


def comparison_page(compared: Sequence[ComparedPlan]) -> RenderableType:
    """Returns what distinguishes stated plans from the best plan, each below the other."""
    return Group(*(part for plan in compared for part in _describe_plan(plan)))


def _describe_plan(plan: ComparedPlan) -> Iterator[RenderableType]:
    yield Text()
    yield show_table(Table("", Column(wrap="letters"), rows=_head(plan), ruled=False))
    if plan.differences:
        stated = [(name, *map(_shorten, reversed(values)), "") for name, values in plan.differences.items()]
        yield _compare("field that differs", stated)
    if plan.forecasts is not None and (parts := _differing_parts(plan)):
        yield _compare("part of the step", parts)


def _head(plan: ComparedPlan) -> Iterator[tuple[str, str]]:
    yield "compared", plan.name
    yield "step", _describe_step(plan)
    memory = f"{format_need(plan.report.peak_device, plan.report.capacity)} GiB"
    yield "memory", memory + (f", the best plan {plan.best.peak_device / GIB:.1f} GiB" if plan.best else "")
    if not plan.fits:
        yield "", "it does not fit in the memory that plans of the search may take"
    if plan.inside:
        yield "space", "the search had this plan among its own"
    for i, field in enumerate(plan.outside):
        value = state_value(field.value)
        yield "" if i else "space", f"{'not in it: ' if not i else ''}{field.field} is {value}; {field.why}"
    if (again := plan.restated) is not None:
        factor = f", {again.step_time / plan.best.step_time:.3f} times that of the best plan" if plan.best else ""
        fits = "" if again.fits else "; it does not fit"
        yield "restated", f"{format_seconds(again.step_time)}{factor}{fits}: without what no search varies"


def _describe_step(plan: ComparedPlan) -> str:
    step = format_seconds(plan.report.step_time)
    if plan.best is None or plan.factor is None or plan.factor_at_most is None:
        return f"{step}; the search found no plan that fits"
    words = f"{step}, {plan.factor:.3f} times the {format_seconds(plan.best.step_time)} of the best plan"
    if plan.factor_at_most > plan.factor * (1 + 5e-4):
        return f"{words}; at most {plan.factor_at_most:.3f} times the shortest step of the space"
    return words


def _differing_parts(plan: ComparedPlan) -> list[tuple[str, str, str, str]]:
    assert plan.forecasts is not None
    parts = plan.forecasts.parts
    most = sum(abs(theirs - best) for best, theirs in parts.values())
    order = sorted(parts.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    return [
        (parts_of_step()[key].label, format_seconds(theirs), format_seconds(best), f"{(theirs - best) * 1e3:+,.0f} ms")
        for key, (best, theirs) in order
        if abs(theirs - best) > MIN_SHARE * most
    ]


def _compare(title: str, rows: Sequence[tuple[str, ...]]) -> RenderableType:
    return show_table(Table(title, *numbers("this plan", "best plan", ""), rows=rows))


def _shorten(value: Any) -> str:
    """Returns a value in words; a dash where a plan has no such field."""
    if value is None:
        return "-"
    return describe_list(value) if isinstance(value, list | tuple) and len(value) > 6 else state_value(value)
