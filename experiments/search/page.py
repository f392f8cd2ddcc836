"""``meshcast search``: its progress bar, and the page of the best plans and the certificate."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from experiments.search.result import RankedPlan, SearchResult, rank
from experiments.search.search import Certificate, Search
from hardware.units import GIB
from simulator.report.figures import parts_of_step
from simulator.report.report import Report
from simulator.report.words import describe_value, format_seconds
from validation.published.measured_range.beyond import beyond_envelope
from validation.published.measured_range.envelope import published_envelope


def page(result: SearchResult) -> RenderableType:
    """The best plans, what the search has proven, and how the best one compares with published runs."""
    plans = result.best
    if not plans:
        space = "of the space" if result.certificate.complete else "that was forecast"
        return Group(Text(f"No plan {space} fits in memory."), _certificate(result.certificate))
    return Group(*_plans(plans), Text(), _certificate(result.certificate), *_honesty(plans))


def _plans(plans: Sequence[RankedPlan]) -> list[RenderableType]:
    """What all plans have in common, and a row for each."""
    names = list(dict.fromkeys(name for one in plans for name in one.found.changes))
    values = {name: [describe_value(one.found.changes.get(name)) for one in plans] for name in names}
    varying = [name for name in names if len({*values[name]}) > 1]
    common = ", ".join(f"{name} {values[name][0]}" for name in names if name not in varying)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    interval = "90% interval" if plans[0].distance is None else "widened interval"
    for title in ("", "step", interval, "MFU", "GiB", *(name.split(".")[-1] for name in varying)):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("slower by, and most of it in")
    for i, one in enumerate(plans):
        table.add_row(
            str(i + 1),
            format_seconds(one.report.step_time),
            " to ".join(map(format_seconds, one.interval)),
            f"{one.report.mfu['palm']:.1%}",
            f"{one.report.peak_device / GIB:.1f}",
            *(values[name][i] for name in varying),
            _why_slower(plans[0].report, one.report) if i else "",
        )
    return [*([Text(f"common     {common}")] if common else []), table]


def _why_slower(best: Report, other: Report) -> str:
    """The part of the step by which a plan loses most against the best one."""
    more = {key: other.parts[key] - best.parts[key] for key in best.parts}
    key = max(more, key=lambda one: more[one])
    label = parts_of_step()[key].label
    return f"{other.step_time / best.step_time - 1:+.1%}: {label} {more[key] * 1e3:+,.0f} ms"


def _certificate(found: Certificate) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column()
    has = "may be taken of a GPU" if found.memory_margin else "a GPU has"
    rows: list[tuple[str, str, str]] = [
        ("space", f"{found.plans:,}", _count_groups(found)),
        *_list_excluded(found),
        ("cut", f"{found.invalid:,}", "break a rule"),
        ("", f"{found.memory_bound:,}", f"need more memory than {has}, by their lower bound"),
        ("", f"{found.time_bound:,}", "cannot be faster than the best plan, by their lower bound"),
        (
            "forecast",
            f"{found.exact:,}",
            f"exactly, {found.too_large:,} of them too large; no bound above its forecast",
        ),
        ("proof", *_proof(found)),
        ("effort", f"{found.cpu:.1f} s", "of CPU time"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _list_excluded(found: Certificate) -> list[tuple[str, str, str]]:
    """A row for each limit that excludes plans, and for the memory that stays free."""
    words = {"where": "by --where", "near_measured": "by --near-measured: nobody has run their combination"}
    counts = [(f"{count:,}", words[name]) for name, count in found.excluded.items() if count]
    rows = [("excluded" if i == 0 else "", *row) for i, row in enumerate(counts)]
    if found.memory_margin:
        rows.append(("margin", f"{found.memory_margin:.2%}", "of the memory of every GPU stays free"))
    return rows


def _count_groups(found: Certificate) -> str:
    plans, groups = ("plan" + "s" * (found.plans != 1)), ("group" + "s" * (found.groups != 1))
    return f"{plans} in {found.groups:,} {groups} of equal layers"


def _proof(found: Certificate) -> tuple[str, str]:
    if found.complete and found.exact == found.too_large:
        return "", "no plan of the space fits in the model"
    if found.gap == 0.0:
        return f"{found.gap:.2%}", "gap: no plan of the space is faster in the model"
    words = "gap: share of the step by which a plan that was not forecast may be faster in the model"
    return f"{found.gap:.2%}", words


def _honesty(plans: Sequence[RankedPlan]) -> list[RenderableType]:
    """How certain the order of the plans is, and whether the best one is beyond all that was measured."""
    best = plans[0].report
    within = sum(one.report.step_time <= best.interval_90[1] for one in plans)
    rows: list[RenderableType] = [Text()]
    if plans[0].distance is not None:
        words = (
            "of the plans that were forecast alone, ranked by the upper end of their interval, which is wider by the"
        )
        rows.append(Text(f"robust     {words} distance from measured plans; the proof is of the shortest step"))
        rows.append(Text(f"distance   {plans[0].distance}"))
    elif within > 1:
        words = f"the first {within} lie within the interval of the best one: a real cluster may rank them otherwise"
        rows.append(Text(f"order      {words}"))
    if envelope := published_envelope(best.job):
        rows.append(Text(f"published  best MFU of this GPU, format and class: {envelope}"))
    if beyond := beyond_envelope(best):
        rows.append(Text(f"beyond     {beyond}"))
    return rows


def describe_proof(result: SearchResult) -> str:
    """How the best plan was found, in a line: of how many plans, and how the gap was proven."""
    found = result.certificate
    plan = ", ".join(f"{name} {describe_value(value)}" for name, value in result.best[0].changes.items())
    others = found.plans - found.exact
    return (
        f"search     {plan}: the best of {found.plans:,} plans, gap {found.gap:.2%}, proven by "
        f"{found.exact:,} forecast{'s' * (found.exact != 1)} and by the bounds and broken rules of {others:,} others"
    )


def run_with_progress(search: Search, robust: bool = False) -> SearchResult:
    """Runs a search with its progress bar, and forecasts the best plans whole. robust: see `rank`."""
    watch = SearchProgress()
    try:
        certificate = search.run(watch)
    finally:
        watch.bar.stop()
    return SearchResult(rank(search, robust), certificate, tuple(search.forecasts))


class SearchProgress:
    """Progress on a terminal: forecasts, the best step and the gap that is proven so far."""

    def __init__(self) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        console = Console(stderr=True)
        self.bar = Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())

    def __call__(self, found: Certificate) -> None:
        if not self.bar.task_ids:
            self.bar.start()
            self.bar.add_task("search", total=1.0)
        best = format_seconds(found.incumbent) if found.exact > found.too_large else "none yet"
        text = (
            f"{found.opened:,} of {found.groups:,} groups, {found.exact:,} forecasts, best {best}, gap {found.gap:.1%}"
        )
        self.bar.update(self.bar.task_ids[0], description=text, completed=1.0 - found.gap)
