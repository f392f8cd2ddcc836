"""Tables and sentences of an answer, which the terminal and the HTML page show."""

from __future__ import annotations

from collections.abc import Iterator

from meshcast.experiments.sizing.answer import KindAnswer, SizeAnswer
from meshcast.experiments.sizing.sized_cluster import SizedCluster
from meshcast.experiments.views.table import Column, Table, formatted_numbers
from meshcast.simulator.report.formatting import describe_plan, format_count

SHOWN = 8
"""Clusters of a front that a page lists at most: the answer, and others evenly between the ends."""


def make_title(answer: SizeAnswer) -> str:
    """Returns the question in a line."""
    question = answer.question
    limits = []
    if question.days is not None:
        limits.append(f"in {question.days:g} days")
    if question.budget is not None:
        limits.append(f"for {question.budget:,.0f}")
    return f"{question.model.name}, {format_count(question.tokens)} tokens {' and '.join(limits)}"


def make_answers(answer: SizeAnswer) -> Table:
    """Returns a row for each kind of node: the smallest cluster that keeps the limits."""
    counts = formatted_numbers(("nodes", ","), ("GPUs", ","), ("days", ",.1f"), wrap="never")
    more = formatted_numbers(("MWh", ",.0f"), ("MFU", ".1%"), ("goodput", ".1%"), wrap="never")
    money = formatted_numbers(("cost", ",.0f"), wrap="never")
    carbon = formatted_numbers(("t CO2", ",.0f"), wrap="never")
    with_carbon = any(kind.chosen and kind.chosen.to_dict()["co2_t"] is not None for kind in answer.kinds)
    table = Table(
        Column("node", wrap="never"), *counts, Column("(90 %)", wrap="never"), *money, Column("(90 %)", wrap="never"),
        *more, *(carbon if with_carbon else []),
    )  # fmt: skip
    for kind in answer.kinds:
        if kind.chosen is None:
            table.add(kind.kind.name, *([None] * 3), "none")
            continue
        row = kind.chosen.to_dict()
        low, high = row["days_interval_90"]
        interval = row["cost_interval_90"]
        ends = "" if interval is None else f"{format_money(interval[0])} to {format_money(interval[1])}"
        cells = row["nodes"], row["gpus"], row["days"], f"{low:,.0f} to {high:,.0f}", row["cost"], ends
        carbon_cell = [row["co2_t"]] if with_carbon else []
        table.add(kind.kind.name, *cells, row["energy_mwh"], row["mfu"], row["goodput"], *carbon_cell)
    return table


def format_money(value: float) -> str:
    """Formats money with three digits: 1.23 M."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:,.3g} {unit}"
    return f"{value:,.3g}"


def make_front(answer: SizeAnswer, kind: KindAnswer) -> Table:
    """Returns the clusters of a kind of node to which no other is faster and cheaper."""
    figures = ("nodes", ","), ("GPUs", ","), ("days", ",.1f"), ("cost", ",.0f"), ("MWh", ",.0f"), ("MFU", ".1%")
    table = Table(Column("", wrap="never"), *formatted_numbers(*figures, wrap="never"), "plan")
    for cluster in choose_front(kind):
        row = cluster.to_dict()
        cells = row["nodes"], row["gpus"], cluster.sure_days, cluster.sure_cost, row["energy_mwh"], row["mfu"]
        mark = "->" if cluster is kind.chosen else ""
        table.add(mark, *cells, describe_cluster(cluster), style="bold" if mark else "")
    return table


def choose_front(kind: KindAnswer) -> list[SizedCluster]:
    """Returns the clusters of a front that are shown."""
    front = kind.front
    if len(front) <= SHOWN:
        return front
    kept = {round(i * (len(front) - 1) / (SHOWN - 1)) for i in range(SHOWN)}
    return [cluster for i, cluster in enumerate(front) if i in kept or cluster is kind.chosen]


def describe_cluster(cluster: SizedCluster) -> str:
    """Returns the plan and the batch of a cluster."""
    batch = cluster.report.job.batch.total or 0
    return f"{', '.join(describe_plan(cluster.report.play.plan)[:1])}, batch {batch:,}"


def list_notes(answer: SizeAnswer) -> Iterator[tuple[str, str]]:
    """Yields what is said below the table: names and sentences."""
    question, cheapest = answer.question, answer.cheapest
    if cheapest is not None and len(answer.kinds) > 1:
        yield "cheapest", cheapest.kind.name
    for kind in answer.kinds:
        yield from ((kind.kind.name, sentence) for sentence in _list_of_kind(answer, kind))
    yield "batch", f"{question.limits.reason} (batch)"
    yield from (("assumed", sentence) for sentence in question.assumed)
    plans = [kind.chosen.plan for kind in answer.kinds if kind.chosen is not None and kind.chosen.plan is not None]
    for sentence in dict.fromkeys(sentence for plan in plans for sentence in plan.assumed):
        yield "assumed", sentence


def _list_of_kind(answer: SizeAnswer, kind: KindAnswer) -> Iterator[str]:
    """Yields the sentences on a kind of node."""
    question, chosen, nearest, without = answer.question, kind.chosen, kind.nearest, kind.largest_without
    if chosen is None:
        if nearest is None:
            yield "no size has a plan that fits" + (f"; on {without.nodes:,} nodes {without.reason}" if without else "")
        else:
            cost = "" if nearest.sure_cost is None else f" for {format_money(nearest.sure_cost)}"
            yield (
                f"no cluster up to {question.most_gpus:,} GPUs keeps the limits; the fastest that was looked at has "
                f"{nearest.nodes:,} nodes: {nearest.rough_days:,.1f} days{cost}"
            )
    elif question.days is not None:
        share = chosen.find_chance(question.days)
        yield f"real runs meet the deadline with {share:.0%}: the step may be longer than its forecast, too"
    if chosen is not None and answer.keeps_budget(chosen) is False:
        yield f"above the budget: {format_money(chosen.sure_cost or 0.0)} in nine of ten runs"
    if without is not None and chosen is not None:
        yield f"up to {without.nodes:,} nodes {without.reason}"
    price = kind.kind.price
    if price is None:
        yield f"no list price is known; state it: --price {kind.kind.name}=2.50"
    else:
        even = answer.find_even_price(kind)
        words = "" if even is None else f"; the other kinds cost as much at {even:,.2f}"
        if even is not None and len(answer.kinds) > 2:
            words = f"; the cheapest other kind costs as much at {even:,.2f}"
        yield f"{price.value:,.3f} {price.currency} a GPU and hour: {price.source}{words}".replace("  ", " ")
    for entry in kind.sensitivity:
        change = f"{abs(entry.mfu - 1):.0%} {'lower' if entry.mfu < 1 else 'higher'}"
        needed = "no cluster" if entry.smallest is None else f"{entry.smallest.nodes:,} nodes"
        cost = "" if entry.cost is None else f" and {format_money(entry.cost)}"
        yield f"MFU {change}: {needed} needed; on those of the answer {entry.days:,.1f} days{cost}"
