"""``meshcast run``: the page of a simulated run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from meshcast.experiments.pages.tables import list_broken_rules, number_columns, ruled_table
from meshcast.experiments.runs.curves import CurvePoint, RunCurves
from meshcast.simulator.report.formatting import format_count, format_number, format_seconds
from meshcast.simulator.runs.answer import LABELS, RunAnswer
from meshcast.simulator.runs.training import TIMES

BAR = 30
"""Columns of the longest bar."""


def page(answer: RunAnswer, curves: RunCurves | None = None, out: Path | None = None) -> RenderableType:
    """The whole page. curves: those that were asked for. out: the file of the runs."""
    head = [Text(describe_run(answer), "bold"), *_warn_of_misfit(answer)]
    parts: list[RenderableType] = [*head, Text(), headline(answer), Text(), times(answer)]
    if curves is not None:
        parts += [Text(), *curve_tables(answer, curves)]
    assumed = [
        Text(f"assumed    {text}" if i == 0 else f"           {text}") for i, text in enumerate(answer.plan.assumed)
    ]
    parts += [Text(), *list_broken_rules(answer.plan.report), *assumed]
    if out is not None:
        parts.append(Text(f"runs       {out}"))
    return Group(*parts)


def describe_run(answer: RunAnswer) -> str:
    """The model, the cluster and the length, in one line."""
    job, nodes = answer.plan.job, answer.plan.setting.spares
    spares = f" with {nodes} spare node{'s' if nodes != 1 else ''}" if nodes is not None else ""
    return f"{job.model.name} on {job.cluster}{spares}: {count_runs(answer)}"


def count_runs(answer: RunAnswer) -> str:
    """How many simulated runs the figures come from."""
    return "one simulated run" if len(answer.runs) == 1 else f"mean of {len(answer.runs):,} simulated runs"


def headline(answer: RunAnswer) -> Table:
    """The figures of the run, a row each."""
    columns = Column(style="bold", no_wrap=True), Column(justify="right", no_wrap=True), Column()
    table = Table(*columns, box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    plan, found = answer.plan, answer.to_dict()
    low, high = found["days_interval_90"]
    least, most = found["days_interval_90_simulated"]
    unit, scale = ("days", 1.0) if answer.days >= 2 else ("hours", 24.0)
    low, high, least, most = (f"{scale * one:,.4g}" for one in (low, high, least, most))
    words = f"{low} to {high} (90 %); {least} to {most} if steps are as forecast"
    table.add_row(unit, f"{scale * answer.days:,.4g}", "as the job states" if answer.ends_by_time else words)
    low, high = (format_count(round(end)) for end in found["tokens_interval_90"])
    table.add_row("tokens", format_count(round(found["tokens"])), f"{low} to {high} (90 %)" if low != high else "")
    table.add_row("steps", f"{answer.steps:,.0f}", f"of {format_seconds(plan.report.step_time)} each, as forecast")
    low, high = found["goodput_interval_90"]
    table.add_row("goodput", f"{answer.goodput:.2%}", f"of the time is steps that are kept; {low:.2%} to {high:.2%}")
    table.add_row("ETTR", f"{answer.effective_ratio:.2%}", "the same with stragglers: effective training time ratio")
    counts = sorted(answer.failures.items(), key=lambda item: -item[1])
    words = ", ".join(f"{name} {count:,.3g}" for name, count in counts)
    mtbf = f"one in {plan.mtbf / 3600:,.3g} hours: " if counts and found["mtbf_hours"] else ""
    table.add_row("failures", f"{sum(answer.failures.values()):,.3g}", mtbf + words)
    for tier in found["checkpoints"]["tiers"]:
        table.add_row("checkpoint", f"{found['checkpoints']['gb']:,.4g} GB", describe_tier(tier))
    if "daly_s" in found["checkpoints"]:
        each = found["checkpoints"]
        words = f"best interval by Daly; {format_seconds(each['young_s'])} by Young; goodput {each['daly_goodput']:.2%}"
        table.add_row("", format_seconds(each["daly_s"]), words)
    if found["cost"] is not None:
        low, high = found["cost_interval_90"]
        table.add_row("cost", f"{found['cost']:,.0f}", f"{low:,.0f} to {high:,.0f}, spare nodes included")
    carbon = "" if found["co2_t"] is None else f", {format_number(found['co2_t'])} t CO2"
    table.add_row("energy", f"{found['energy_mwh']:,.4g} MWh", f"of nodes and data centre{carbon}")
    return table


def _warn_of_misfit(answer: RunAnswer) -> list[RenderableType]:
    """That the plan does not fit, before all figures."""
    report = answer.plan.report
    if report.fit.verdict == "fits":
        return []
    words = f"{report.fit_in_words}. The run would be as below if it did; meshcast predict says what fits"
    return [Text(words, "bold red")]


def describe_tier(tier: dict[str, float | None]) -> str:
    """How often checkpoints are made, and what they cost."""
    every = "after a failure"
    if tier["every_steps"]:
        every = f"every {tier['every_steps']:,.0f} steps ({format_seconds(tier['every_s'] or 0.0)})"
    costs = (f"{word} {format_seconds(tier[key] or 0.0)}" for word, key in COSTS.items())
    return f"{every}, {', '.join(costs)}"


COSTS = {"stops training": "stall_s", "usable after": "write_s", "loaded in": "load_s"}


def times(answer: RunAnswer) -> Table:
    """Where the time goes, with bars."""
    table = ruled_table("where the time goes", *number_columns("hours", "share"), "")
    for name in TIMES:
        seconds = answer.time_s[name]
        if seconds or name == TIMES[0]:
            share = seconds / answer.seconds
            bar = "█" * round(BAR * max(share, 0.0))
            table.add_row(LABELS[name], f"{seconds / 3600:,.4g}", f"{share:.2%}", bar)
    return table


def curve_tables(answer: RunAnswer, curves: RunCurves) -> list[RenderableType]:
    """The curves as tables, the best interval, and what hardware is worth."""
    step = answer.plan.report.step_time
    parts: list[RenderableType] = []
    if curves.interval:
        parts += _list_points("interval", [(format_seconds(point.value), point) for point in curves.interval])
        if (best := curves.best_interval) is not None:
            parts.append(Text(f"best interval by simulation: {format_seconds(best)}, {best / step:,.0f} steps"))
    if curves.mtbf:
        parts += _list_points("MTBF", [(f"x {point.value:g}", point) for point in curves.mtbf])
    if len(curves.scale) > 1:
        parts += _list_points("GPUs", [(f"{point.value:,.0f}", point) for point in curves.scale])
    for one in curves.worth:
        cost = "" if one.cost is None else f", cost {one.cost:+,.0f}"
        parts.append(Text(f"{one.change}: goodput {one.goodput:+.2%}, days {one.days:+.3g}{cost}"))
    return parts


def _list_points(head: str, rows: list[tuple[str, CurvePoint]]) -> list[RenderableType]:
    """A curve as a table, and below it why points have no runs."""
    table = ruled_table(*number_columns(head, "goodput", "low", "high", "Daly", "days"))
    for label, point in rows:
        if point.reason:
            table.add_row(label, "none", "", "", "", "")
            continue
        formula = "" if point.formula is None else f"{point.formula:.2%}"
        low, high = point.interval
        table.add_row(label, f"{point.goodput:.2%}", f"{low:.2%}", f"{high:.2%}", formula, f"{point.days:,.4g}")
    return [table, *(Text(f"{label}: {point.reason}") for label, point in rows if point.reason)]
