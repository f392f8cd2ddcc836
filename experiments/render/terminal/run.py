"""``meshcast run``: the page of a simulated run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.terminal.tables import list_broken_rules, show_table
from meshcast.experiments.runs.curves import CurvePoint, RunCurves
from meshcast.experiments.views.table import Column, Table, formatted_numbers, numbers
from meshcast.simulator.report.formatting import format_count, format_number, format_seconds
from meshcast.simulator.runs.answer import LABELS, RunAnswer
from meshcast.simulator.runs.training import TIMES

BAR = 30
"""Columns of the longest bar."""


def page(answer: RunAnswer, curves: RunCurves | None = None, out: Path | None = None) -> RenderableType:
    """Returns the whole page.

    curves: those that were asked for.
    out: the file of the runs.
    """
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
    """Returns the model, the cluster and the length, in a single line."""
    job, nodes = answer.plan.job, answer.plan.setting.spares
    spares = f" with {nodes} spare node{'s' if nodes != 1 else ''}" if nodes is not None else ""
    return f"{job.model.name} on {job.cluster}{spares}: {count_runs(answer)}"


def count_runs(answer: RunAnswer) -> str:
    """Returns how many simulated runs the figures come from."""
    return "one simulated run" if len(answer.runs) == 1 else f"mean of {len(answer.runs):,} simulated runs"


def headline(answer: RunAnswer) -> RenderableType:
    """Returns the figures of the run, a row each."""
    table = Table(Column(style="bold", wrap="never"), *numbers("", wrap="never"), "", ruled=False)
    plan, figures = answer.plan, answer.to_dict()
    low, high = figures["days_interval_90"]
    least, most = figures["days_interval_90_simulated"]
    unit, scale = ("days", 1.0) if answer.days >= 2 else ("hours", 24.0)
    low, high, least, most = (f"{scale * days:,.4g}" for days in (low, high, least, most))
    words = f"{low} to {high} (90 %); {least} to {most} if steps are as forecast"
    table.add(unit, f"{scale * answer.days:,.4g}", "as the job states" if answer.ends_by_time else words)
    low, high = (format_count(round(end)) for end in figures["tokens_interval_90"])
    table.add("tokens", format_count(round(figures["tokens"])), f"{low} to {high} (90 %)" if low != high else "")
    table.add("steps", f"{answer.steps:,.0f}", f"of {format_seconds(plan.report.step_time)} each, as forecast")
    low, high = figures["goodput_interval_90"]
    table.add("goodput", f"{answer.goodput:.2%}", f"of the time is steps that are kept; {low:.2%} to {high:.2%}")
    table.add("ETTR", f"{answer.effective_ratio:.2%}", "the same with stragglers: effective training time ratio")
    counts = sorted(answer.failures.items(), key=lambda item: -item[1])
    words = ", ".join(f"{name} {count:,.3g}" for name, count in counts)
    mtbf = f"one in {plan.mtbf / 3600:,.3g} hours: " if counts and figures["mtbf_hours"] else ""
    table.add("failures", f"{sum(answer.failures.values()):,.3g}", mtbf + words)
    for tier in figures["checkpoints"]["tiers"]:
        table.add("checkpoint", f"{figures['checkpoints']['gb']:,.4g} GB", describe_tier(tier))
    if "daly_s" in figures["checkpoints"]:
        each = figures["checkpoints"]
        words = f"best interval by Daly; {format_seconds(each['young_s'])} by Young; goodput {each['daly_goodput']:.2%}"
        table.add("", format_seconds(each["daly_s"]), words)
    if figures["cost"] is not None:
        low, high = figures["cost_interval_90"]
        table.add("cost", f"{figures['cost']:,.0f}", f"{low:,.0f} to {high:,.0f}, spare nodes included")
    carbon = "" if figures["co2_t"] is None else f", {format_number(figures['co2_t'])} t CO2"
    table.add("energy", f"{figures['energy_mwh']:,.4g} MWh", f"of nodes and data centre{carbon}")
    return show_table(table)


def _warn_of_misfit(answer: RunAnswer) -> list[RenderableType]:
    """Says that the plan does not fit, before all figures."""
    report = answer.plan.report
    if report.fit.verdict == "fits":
        return []
    words = f"{report.fit_in_words}. The run would be as below if it did; meshcast predict says what fits"
    return [Text(words, "bold red")]


def describe_tier(tier: dict[str, float | None]) -> str:
    """Returns how often checkpoints are made, and what they cost."""
    every = "after a failure"
    if tier["every_steps"]:
        every = f"every {tier['every_steps']:,.0f} steps ({format_seconds(tier['every_s'] or 0.0)})"
    costs = (f"{word} {format_seconds(tier[key] or 0.0)}" for word, key in COSTS.items())
    return f"{every}, {', '.join(costs)}"


COSTS = {"stops training": "stall_s", "usable after": "write_s", "loaded in": "load_s"}


def times(answer: RunAnswer) -> RenderableType:
    """Returns where the time goes, with bars."""
    table = Table("where the time goes", *formatted_numbers(("hours", ",.4g"), ("share", ".2%")), "")
    for name in TIMES:
        seconds = answer.time_s[name]
        if seconds or name == TIMES[0]:
            share = seconds / answer.seconds
            bar = "█" * round(BAR * max(share, 0.0))
            table.add(LABELS[name], seconds / 3600, share, bar)
    return show_table(table)


def curve_tables(answer: RunAnswer, curves: RunCurves) -> list[RenderableType]:
    """Returns the curves as tables, the best interval, and what hardware is worth."""
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
    for change in curves.worth:
        cost = "" if change.cost is None else f", cost {change.cost:+,.0f}"
        parts.append(Text(f"{change.change}: goodput {change.goodput:+.2%}, days {change.days:+.3g}{cost}"))
    return parts


def _list_points(head: str, rows: list[tuple[str, CurvePoint]]) -> list[RenderableType]:
    """Returns a curve as a table, and below it why points have no runs."""
    shares = numbers(head, "goodput", "low", "high", "Daly", format=".2%")
    table = Table(*shares, *numbers("days", format=",.4g"))
    for label, point in rows:
        if point.reason:
            table.add(label, "none")
        else:
            table.add(label, point.goodput, *point.interval, point.formula, point.days)
    return [show_table(table), *(Text(f"{label}: {point.reason}") for label, point in rows if point.reason)]
