"""``meshcast search``: the page of the best plans and the certificate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.terminal.tables import labelled_line, show_table
from meshcast.experiments.search.certificate.result import RankedPlan, SearchResult, rank
from meshcast.experiments.search.certificate.smallest_need import find_smallest
from meshcast.experiments.search.frontier.certificate import Certificate
from meshcast.experiments.search.frontier.objectives import NEAR, OF_RUNS
from meshcast.experiments.search.frontier.plan_runs import PlanRuns
from meshcast.experiments.search.frontier.plan_search import PlanSearch
from meshcast.experiments.search.frontier.workers import run_search
from meshcast.experiments.search.output.progress import SearchProgress
from meshcast.experiments.views.table import Column, Table, numbers
from meshcast.hardware.units import GIB
from meshcast.simulator.report.figures import parts_of_step
from meshcast.simulator.report.formatting import (
    describe_changes,
    describe_field,
    describe_list,
    describe_order,
    format_need,
    format_probability,
    format_seconds,
)
from meshcast.simulator.report.peak_errors import EVEN
from meshcast.validation.published.measured_range.envelope import published_envelope
from meshcast.validation.published.measured_range.excess import beyond_envelope

WIDTH = 100
"""Columns of a page that is written to a pipe."""
SURE = 0.99
"""Probability that the best plan fits below which the page says how little stays free."""


def page(result: SearchResult) -> RenderableType:
    """Returns the best plans, what the search has proven, and how the best compares with published runs."""
    plans = result.best
    if not plans:
        certificate = result.certificate
        words = f"No plan {'of the space' if certificate.complete else 'that was forecast'} {_fitting(certificate)}."
        if not (certificate.complete or certificate.exact):
            words = "No plan was forecast before the interruption."
        need = result.smallest
        smallest: list[RenderableType] = []
        if need is not None:
            smallest = [line("smallest", str(need)), line("remedy", need.remedy), Text()]
        return Group(Text(words), *smallest, _certificate(certificate))
    rows = [*_plans(result), Text(), _certificate(result.certificate), *_honesty(result)]
    return Group(*rows, *_compare_runs(result))


def _plans(result: SearchResult) -> list[RenderableType]:
    """Returns what all plans have in common, and a row for each; fields too wide for the table are listed below it."""
    plans, by_runs = result.best, result.certificate.runs is not None
    objective = result.certificate.objectives[0] if len(result.certificate.objectives) == 1 else ""
    values = _values_of_plans(result)
    varying, below = _divide_fields(values)
    equal = [name for name in values if name not in varying + below]
    common = describe_changes({name: plans[0].searched.changes.get(name) for name in equal})
    columns = _figure_columns(result)
    padding = 1 if len(varying) > (1 if by_runs else 4) else 2
    wide = columns | {name.split(".")[-1]: values[name] for name in varying}
    width = sum(max(map(len, (title, *cells))) + padding for title, cells in wide.items())
    if width > WIDTH - (ROOM_FOR_REASONS if objective else 0):
        wide, below, varying = columns, [*varying, *below], []
    table = Table(*numbers(*wide, wrap="never"), dense=padding == 1 and bool(varying))
    if objective:
        head = DIFFERENCES.get(objective, "more GPU time by, and most of it in")
        table.columns.append(Column(head, wrap="never" if by_runs else "words"))
    for i, plan in enumerate(plans):
        table.add(*(cells[i] for cells in wide.values()), *([_explain(result, plan)] if objective else []))
    lines = [line(f"plan {i}", _describe_below(plan, below)) for i, plan in enumerate(plans, 1)] if below else []
    return [*([line("common", common)] if common else []), show_table(table), *lines]


def _divide_fields(values: Mapping[str, Sequence[str]]) -> tuple[list[str], list[str]]:
    """Returns the fields that have columns, and those that are listed below the table."""
    varying = [name for name in values if len({*values[name]}) > 1]
    # Stages are too long for a column, and where plans have them others lack their degrees.
    beside = {name for name in varying if name.startswith("plan.")} if OF_STAGES & {*values} else set()
    below = [name for name in values if name in beside | OF_STAGES]
    return [name for name in varying if name not in below], below


def _values_of_plans(result: SearchResult) -> dict[str, list[str]]:
    changes = [plan.searched.changes for plan in result.best]
    names = dict.fromkeys(name for fields in changes for name in fields)
    stated = [name for name in names if any(fields.get(name) is not None for fields in changes)]
    return {name: [describe_field(fields.get(name)) for fields in changes] for name in stated}


def _explain(result: SearchResult, plan: RankedPlan) -> str:
    """Returns why a plan is worse than the best by the only objective; in brackets if runs do not tell them apart."""
    best, (objective, *_) = result.best[0], result.certificate.objectives
    if plan is best:
        return ""
    explain = {"memory": _more_memory, "energy": _more_energy, **dict.fromkeys(OF_RUNS, _longer_run)}
    why = explain.get(objective, _why_worse)(best, plan, objective != "time")
    return f"({why})" if why and not result.is_apart(plan) else why


ROOM_FOR_REASONS = 30
"""Least width of the column that says why a plan is worse than the best."""


def _figure_columns(result: SearchResult) -> dict[str, list[str]]:
    """Returns the columns of the table before those of fields: their titles, and a cell for each plan."""
    plans, objectives = result.best, result.certificate.objectives
    cells = {"": [str(i) for i in range(1, len(plans) + 1)]}
    cells["step"] = [format_seconds(plan.report.step_time) for plan in plans]
    more: list[tuple[str, Callable[[RankedPlan], str]]] = []
    if result.certificate.runs is None:
        interval = "90% interval" if plans[0].distance is None else "widened interval"
        cells |= zip((interval, "MFU", "GiB"), map(list, zip(*map(_describe_step, plans), strict=True)), strict=True)
    else:
        fields = {name for plan in plans for name, value in plan.searched.changes.items() if value is not None}
        open_interval = not {"run.checkpoints.every_s", "run.checkpoints.every_steps"}.isdisjoint(fields)
        priced = any(plan.runs is not None and plan.runs.cost is not None for plan in plans)
        left_out = {*(["saved"] if open_interval else []), *([] if priced else ["cost"])}
        more = [(title, figure) for title, figure in RUN_COLUMNS.items() if title not in left_out]
        if "memory" in objectives:
            more.append(("GiB", lambda plan: format_need(plan.report.peak_device, plan.report.capacity)))
    more += [(title, figure) for name, (title, figure) in MORE_COLUMNS.items() if name in objectives]
    return cells | {title: [figure(plan) for plan in plans] for title, figure in more}


OF_STAGES = {"plan.stages", "plan.replicas"}
"""Fields that hold the stages of a plan."""


def _describe_below(plan: RankedPlan, names: Sequence[str]) -> str:
    """Returns the fields of a plan that the table has no columns for, those without a value left out."""
    changes = {name.removeprefix("plan."): plan.searched.changes.get(name) for name in names if name not in OF_STAGES}
    stated = [(name, plan.searched.changes[name]) for name in OF_STAGES if plan.searched.changes.get(name) is not None]
    words = [f"{'replicas ' if name == 'plan.replicas' else ''}{describe_list(value)}" for name, value in stated]
    return "; ".join([*words, *([fields] if (fields := describe_changes(changes)) else [])])


def _describe_step(plan: RankedPlan) -> tuple[str, str, str]:
    """Returns the interval of a step, its MFU and its memory."""
    report = plan.report
    need = format_need(report.peak_device, report.capacity)
    return " to ".join(map(format_seconds, plan.interval)), f"{report.mfu['palm']:.1%}", need


def _why_worse(best: RankedPlan, other: RankedPlan, of_gpus: bool) -> str:
    """Returns how much worse a plan is than the best, and by which part most. of_gpus: of the time of all GPUs."""
    scale, base = ((plan.report.job.cluster.gpus if of_gpus else 1) for plan in (other, best))
    more = {key: scale * other.report.parts[key] - base * best.report.parts[key] for key in best.report.parts}
    key = max(more, key=lambda part: more[part])
    worse = other.searched.values[0] / best.searched.values[0] - 1
    amount = f"{more[key]:+,.0f} GPU-s" if of_gpus else f"{more[key] * 1e3:+,.0f} ms"
    return f"{worse:+.1%}: {parts_of_step()[key].label} {amount}"


def _more_memory(best: RankedPlan, other: RankedPlan, _: bool) -> str:
    first, two = best.report, other.report
    return f"{(two.peak_device - first.peak_device) / GIB:+.2f} GiB, step {two.step_time / first.step_time - 1:+.1%}"


def _more_energy(best: RankedPlan, other: RankedPlan, _: bool) -> str:
    first, two = best.report, other.report
    more = two.energy.kwh / first.energy.kwh - 1
    watts = two.energy.gpu_watts - first.energy.gpu_watts
    return f"{more:+.1%}: {watts:+,.0f} W a GPU, step {two.step_time / first.step_time - 1:+.1%}"


def _longer_run(best: RankedPlan, other: RankedPlan, _: bool) -> str:
    return f"{other.searched.values[0] / best.searched.values[0] - 1:+.2%}" if best.searched.values[0] else ""


def _of_runs(describe: Callable[[PlanRuns], str]) -> Callable[[RankedPlan], str]:
    return lambda plan: describe(plan.runs) if plan.runs is not None else ""


RUN_COLUMNS: dict[str, Callable[[RankedPlan], str]] = {
    "days": _of_runs(lambda runs: f"{runs.days:,.5g}"),
    "9 of 10 runs": _of_runs(lambda runs: " to ".join(f"{days:,.4g}" for days in runs.days_90)),
    "cost": _of_runs(lambda runs: "" if runs.cost is None else f"{runs.cost:,.{0 if runs.cost >= 1000 else 2}f}"),
    "goodput": _of_runs(lambda runs: f"{runs.goodput:.1%}"),
    "saved": _of_runs(lambda runs: "" if runs.interval_s is None else f"{runs.interval_s:,.0f} s"),
}
"""Columns of a search by runs, in place of the interval of the step, its MFU and its memory."""


def _cost(plan: RankedPlan) -> str:
    """Returns what the run costs if the job states its length and its price, else a step in GPU-hours."""
    return f"{plan.gpu_hours:,.3g} GPU-h/step" if plan.report.cost is None else f"{plan.report.cost:,.0f}"


MORE_COLUMNS: dict[str, tuple[str, Callable[[RankedPlan], str]]] = {
    "tokens": ("tokens/s/GPU", lambda plan: f"{plan.report.tokens_per_s_per_gpu:,.0f}"),
    "cost": ("cost", _cost),
    "energy": ("kWh/step", lambda plan: f"{plan.report.energy.kwh:,.4g}"),
}
"""Columns of objectives that other searches do not show."""

DIFFERENCES = {
    "time": "slower by, and most of it in",
    "memory": "more memory, and time",
    "energy": "more energy by, and power and time",
    "days": "longer",
    "run-cost": "dearer",
}
"""Titles of the column that says why a plan is worse than the best; others are of GPU time."""

WORDS = {
    "time": ("faster", "is faster"),
    "tokens": ("better", "has more tokens/s per GPU"),
    "cost": ("cheaper", "is cheaper"),
    "energy": ("thriftier", "needs less energy"),
    "memory": ("smaller", "needs less memory"),
    "days": ("shorter", "has shorter runs"),
    "run-cost": ("cheaper", "has cheaper runs"),
}
"""What a plan is that is better than another, by objective."""


def _certificate(certificate: Certificate) -> RenderableType:
    has = "a GPU has" if certificate.memory_risk == EVEN and not certificate.memory_margin else "may be taken of a GPU"
    plans, groups = ("plan" + "s" * (certificate.plans != 1)), ("group" + "s" * (certificate.groups != 1))
    exactly = f"exactly, {certificate.too_large:,} of them too large; no bound above its forecast"
    rows: list[tuple[str, str, str]] = [
        ("space", f"{certificate.plans:,}", f"{plans} in {certificate.groups:,} {groups} of {certificate.grouped}"),
        *_list_excluded(certificate),
        ("cut", f"{certificate.invalid:,}", "break a rule"),
        ("", f"{certificate.memory_bound:,}", f"need more memory than {has}, by their lower bound"),
        ("", f"{certificate.time_bound:,}", _cut_by_objective(certificate)),
        ("forecast", f"{certificate.exact:,}", exactly),
        *([("open", f"{certificate.open:,}", "were not decided before the interruption")] if certificate.open else []),
        *_count_simulated(certificate),
        ("proof", *_proof(certificate)),
        ("effort", f"{certificate.cpu:.1f} s", "of CPU time"),
    ]
    return show_table(Table("", *numbers(""), "", rows=rows, ruled=False))


def _count_simulated(certificate: Certificate) -> list[tuple[str, str, str]]:
    if (runs := certificate.runs) is None:
        return []
    each = f" with {runs.choices:,} choices of the run" if runs.choices > 1 else ""
    words = f"of them{each}, {runs.seeds:,} runs each, with the same random numbers"
    left = "were not decided, or " if not certificate.complete else ""
    rows = [("simulated", f"{runs.simulated:,}", words)]
    rows += [("", f"{runs.invalid:,}", "break a rule of runs, or do not end")] if runs.invalid else []
    return [*rows, ("", f"{runs.waiting:,}", f"{left}cannot be better, by the bound of their runs")]


def _list_excluded(certificate: Certificate) -> list[tuple[str, str, str]]:
    words = {
        "where": "by --where",
        "program": "by rules of the program, which does not run them; --any-program keeps them",
        "near_measured": "by --near-measured: nobody has run their combination",
    }
    counts = [(f"{count:,}", words[name]) for name, count in certificate.excluded.items() if count]
    rows = [("excluded" if i == 0 else "", *row) for i, row in enumerate(counts)]
    if certificate.memory_margin:
        rows.append(("margin", f"{certificate.memory_margin:.2%}", "of the memory of every GPU stays free"))
    if certificate.memory_risk < EVEN:
        rows.append(("risk", f"{certificate.memory_risk:.2%}", "of lacking memory, at most (--memory-risk)"))
    return rows


def _fitting(certificate: Certificate) -> str:
    """Says that a plan fits with the probability that was asked for, in words."""
    return (
        f"fits with {format_probability(1 - certificate.memory_risk)}"
        if certificate.memory_risk < EVEN
        else "fits in memory"
    )


def _proof(certificate: Certificate) -> tuple[str, str]:
    if certificate.complete and certificate.exact == certificate.too_large:
        return "", f"no plan of the space {_fitting(certificate)}, by the model"
    if len(certificate.objectives) > 1:
        every = f"no plan of the space that {_fitting(certificate)} is better"
        words = f"{every} in both" if certificate.gap == 0.0 else f"{every} by more than that"
        return f"{certificate.gap:.2%}", f"gap: {words} than every plan of the front in the model"
    better, is_better = WORDS[certificate.objectives[0]]
    if certificate.gap == 0.0:
        return (
            f"{certificate.gap:.2%}",
            f"gap: no plan of the space that {_fitting(certificate)} {is_better} in the model",
        )
    figures = {name: name for name in ("memory", "energy", "days")} | {"run-cost": "cost of a run"}
    figure = figures.get(certificate.objectives[0], "step")
    words = f"gap: share of the {figure} by which a plan that was not forecast may be {better} in the model"
    return f"{certificate.gap:.2%}", words


def _cut_by_objective(certificate: Certificate) -> str:
    if len(certificate.objectives) > 1:
        return "are no better in both than a plan of the front, by their lower bounds"
    better, known = WORDS[certificate.objectives[0]][0], certificate.complete and math.isfinite(certificate.incumbent)
    more = f"more than {certificate.gap:.2%} " if certificate.gap and known else ""
    return f"cannot be {more}{better} than the best plan, by their lower bound"


def _honesty(result: SearchResult) -> list[RenderableType]:
    """Says how certain the order is, what is not shown, how full the best is, and whether it is beyond measurements."""
    plans, objectives, best = result.best, result.certificate.objectives, result.best[0].report
    within = sum(plan.report.step_time <= best.interval_90[1] for plan in plans)
    rows: list[RenderableType] = [Text()]
    if plans[0].distance is not None:
        words = (
            "of the plans that were forecast alone, ranked by the upper end of their interval, which is wider by the"
        )
        rows.append(line("robust", f"{words} distance from measured plans; the proof is of the forecasts"))
        rows.append(line("distance", str(plans[0].distance)))
    elif describe_order(within) and tuple(objectives) == ("time",):
        rows.append(line("order", describe_order(within)))
    rows += [*_list_omitted(result), *_warn_of_full(plans[0])]
    if "cost" in objectives and len({plan.report.job.cluster.gpu.name for plan in plans}) > 1:
        rows.append(line("price", "an hour of every GPU costs the same here, whatever its type"))
    if envelope := published_envelope(best.job):
        rows.append(line("published", f"best MFU of this GPU, format and class: {envelope}"))
    if beyond := beyond_envelope(best):
        rows.append(line("beyond", str(beyond)))
    return rows


def _list_omitted(result: SearchResult) -> list[RenderableType]:
    """Says that plans which are worse by more than `NEAR` are not shown, where fewer plans than asked for are left."""
    certificate, share = result.certificate, f"{NEAR:.0%}".replace("%", " %")
    if (
        len(certificate.objectives) > 1
        or certificate.runs is not None
        or len(result.best) >= result.top
        or not certificate.time_bound
    ):
        return []
    worse = "slower" if certificate.objectives[0] == "time" else "worse"
    words = f"plans more than {share} {worse} than the best one are not forecast; meshcast sweep forecasts every plan"
    return [line("not shown", words)]


def _warn_of_full(best: RankedPlan) -> list[RenderableType]:
    if best.report.fit.probability >= SURE:
        return []
    return [line("memory", f"plan 1 {best.report.fit_in_words}; --memory-risk 1% leaves out plans that are as full")]


line = partial(labelled_line, style="")


def _compare_runs(result: SearchResult) -> list[RenderableType]:
    runs, plans = result.certificate.runs, result.best
    if runs is None or len(result.certificate.objectives) > 1:
        return []
    count = sum(not result.is_apart(plan) for plan in plans[1:])
    words = f"the {count:,} in parentheses cannot be told apart from the first by {runs.seeds:,} runs (at 90 %)"
    return [line("order", words)] if count else []


def describe_proof(result: SearchResult) -> str:
    """Returns a line on the best plan: of how many plans, and how the gap was proven."""
    certificate = result.certificate
    plan = describe_changes(result.best[0].changes)
    others, still = certificate.plans - certificate.exact - certificate.open, ""
    if certificate.open:
        still = f"; {certificate.open:,} were not decided"
    return (
        f"search     {plan}: the best of {certificate.plans:,} plans, gap {certificate.gap:.2%}, proven by "
        f"{certificate.exact:,} forecast{'s' * (certificate.exact != 1)} "
        f"and by the bounds and broken rules of {others:,} others{still}"
    )


def run_with_progress(search: PlanSearch, robust: bool = False, workers: int | None = None) -> SearchResult:
    """Runs a search with its progress on stderr, and forecasts the best plans whole, see `run_search` and `rank`."""
    watch = SearchProgress()
    try:
        certificate = run_search(search, workers, watch)
    finally:
        watch.bar.stop()
    best = rank(search, robust)
    smallest = find_smallest(search) if certificate.complete and not best else None
    return SearchResult(best, certificate, tuple(search.forecasts), top=search.top, smallest=smallest)
