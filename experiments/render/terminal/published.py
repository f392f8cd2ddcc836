"""``meshcast validate``: forecasts held against what is known, as tables for people and JSON for programs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.matplotlib.style import Width
from meshcast.experiments.render.terminal.tables import reasons_table, show_table
from meshcast.experiments.views.table import (
    Column,
    Format,
    Table,
    TableCell,
    Words,
    format_percent,
    formatted_numbers,
    numbers,
)
from meshcast.simulator.report.formatting import describe_value
from meshcast.validation.measurements.jsonl import read_lines

Step = TypeVar("Step")

Answer = dict[str, Any]
"""An answer of ``--json``, or an object in it."""

FEW = 40
"""Maximum number of runs that all get a row of the page."""

FITS = {
    "shipped": "shipped",
    "all_in_sample": "all coefficients, in sample",
    "all_source_left_out": "all, source left out",
    "all_family_left_out": "all, family left out",
    "all_model_left_out": "all, model left out",
    "kept_in_sample": "kept ones, in sample",
    "kept_source_left_out": "kept ones, source left out",
    "kept_family_left_out": "kept ones, family left out",
    "kept_model_left_out": "kept ones, model left out",
    "refitted_source_left_out": "shipped ones refitted, source left out",
    "refitted_family_left_out": "shipped ones refitted, family left out",
    "refitted_model_left_out": "shipped ones refitted, model left out",
}
"""Labels of the errors of a refit."""

PLOTS = ("step-time", "memory")
"""Names of the plots of ``validate published``; a file gets the first, a folder all."""


# ----------------------------------------------------------------------------------------- pipelines


def validate_pipeline(paths: Sequence[Path]) -> tuple[Answer, RenderableType]:
    """Plays schedules with stated durations: the answer and its table."""
    from meshcast.validation.pipelines.cases import EXAMPLES, answers

    cases = [stated for path in paths for _, stated in read_lines(path)] if paths else list(EXAMPLES)
    good = iter(answers([case for case in cases if isinstance(case, dict)]))
    rows = [next(good) if isinstance(case, dict) else {"status": "refused", "reason": case} for case in cases]
    described = [{"case": {**UNSTATED, **written}} if isinstance(written, dict) else {} for written in cases]
    return {"rows": [{**case, **row} for case, row in zip(described, rows, strict=True)]}, cases_table(cases, rows)


UNSTATED: Answer = {"v": 1, "t_w": 0, "hop": 0}
"""Inputs of a pipeline case that it need not state."""


def describe_inputs(case: Mapping[str, Any]) -> str:
    """Returns times and options of a pipeline case, as it writes them; the shape has its columns."""
    inputs = {**{key: UNSTATED[key] for key in ("t_w", "hop")}, **case}
    first = [key for key in ("t_f", "t_b", "t_w", "hop") if key in inputs]
    more = [key for key in case if key not in (*first, "schedule", "p", "m", "v", "order")]
    return ", ".join(f"{key} {describe_value(inputs[key])}" for key in (*first, *more))


def cases_table(cases: Sequence[Any], rows: Sequence[Answer]) -> RenderableType:
    """Returns the answers of ``validate pipeline`` as a table."""
    times = formatted_numbers(("makespan", ",.6g"), ("bubble %", ".2p"))
    shape = numbers("p", "m", "v")
    table = Table(Column("schedule", style="bold"), *shape, "times and options", *times, "chunks in flight")
    for case, row in zip(cases, rows, strict=True):
        inputs = case if isinstance(case, dict) else {}
        cells = [str(inputs.get("schedule", "?")), *(str(inputs.get(key, "")) for key in ("p", "m"))]
        cells += [str(inputs.get("v", 1)), describe_inputs(inputs) if inputs else ""]
        if row["status"] == "refused":
            table.add(*cells, "refused", "", str(row["reason"]))
        else:
            table.add(*cells, row["makespan"], row["bubble_rate"], " ".join(map(str, row["in_flight_b"])))
    return show_table(table)


# ------------------------------------------------------------------------------------ published runs


def validate_published(
    paths: Sequence[Path], workers: int | None = None, as_stranger: bool = False
) -> tuple[Answer, int]:
    """Forecasts published runs: the answer, and the number of runs that an interruption has left out.

    as_stranger: as somebody is told whose runs nobody here has seen.
    """
    from meshcast.validation.published.answer import answers
    from meshcast.validation.published.baseline import add_baselines
    from meshcast.validation.published.choice import choose_plans, summarize_choices
    from meshcast.validation.published.fit.as_stranger import forecast_strangers, leave_sources_out
    from meshcast.validation.published.summary import summarize_answers

    runs = read_runs(paths)
    forecasts = (forecast_strangers if as_stranger else answers)(runs, workers)
    rows = keep_until_interrupted(progress(forecasts, len(runs), "runs"))
    if as_stranger:
        rows = leave_sources_out(rows)
    add_baselines(rows)
    choice = summarize_choices(choose_plans(runs, rows))
    summary = {"as_stranger": as_stranger, **summarize_answers(rows), "choice": choice}
    return {"rows": rows, "summary": summary}, len(runs) - len(rows)


def validate_choice(
    paths: Sequence[Path], workers: int | None = None, search: Callable[[Any], Answer] | None = None
) -> tuple[Answer, int]:
    """Chooses among published plans of a task: the answer, and the number of runs that an interruption left out.

    search: searches the plans of a `PlanGroup` and says what that finds, under `search` of the group.
    """
    from meshcast.validation.published.choice import choose_plans, forecast_choices, group_plans, summarize_choices

    runs = read_runs(paths)
    rows = keep_until_interrupted(progress(forecast_choices(runs, workers), len(runs), "runs"))
    groups, plan_groups = choose_plans(runs, rows), group_plans(runs, rows)
    summary, missing = summarize_choices(groups), len(runs) - len(rows)
    if search is not None:
        outcomes = keep_until_interrupted(progress(map(search, plan_groups), len(plan_groups), "groups"))
        answered = [{**group, "search": outcome} for group, outcome in zip(groups, outcomes, strict=False)]
        groups = answered + groups[len(outcomes) :]
        missing += sum(len(group.runs) for group in plan_groups[len(outcomes) :])
        searched = [outcome for outcome in outcomes if outcome["reason"] is None]
        summary["searches"] = {
            "groups": len(outcomes),
            "searched": len(searched),
            "agree": sum(outcome["agrees"] for outcome in searched),
            "defects": sum(outcome["defect"] is not None for outcome in searched),
            "shortest_does_not_fit": sum(not outcome["fits"] for outcome in searched),
            "reasons": dict(Counter(outcome["kind"] for outcome in outcomes if outcome["kind"]).most_common()),
        }
    return {"groups": groups, "summary": summary}, missing


def fit_published(
    paths: Sequence[Path], workers: int | None = None, leave_out: str | None = None
) -> tuple[Answer, int]:
    """Refits coefficients to published runs: the answer, and the number of runs that an interruption has left out.

    leave_out: source, family or model: the page lists the errors of each of them.
    """
    from meshcast.validation.published.fit.by_source import compare_sources
    from meshcast.validation.published.fit.derivatives import forecast_derivatives
    from meshcast.validation.published.fit.refit import list_fitted, refit_class
    from meshcast.validation.published.fit.residuals import measure_residuals
    from meshcast.validation.published.rows import PublishedRun

    runs = [run for run in read_runs(paths) if isinstance(run, PublishedRun) and run.step_time is not None]
    forecasts = keep_until_interrupted(progress(forecast_derivatives(runs, workers), len(runs), "runs"))
    rows = [row for row in forecasts if row["shares"] is not None]
    classes = sorted({row["class"] for row in rows})
    refits = {name: refit_class([row for row in rows if row["class"] == name]) for name in classes}
    return {
        "rows": len(rows),
        "leave_out": leave_out,
        "classes": refits,
        "residuals": measure_residuals(rows),
        "sources": compare_sources(rows),
        "shipped": list_fitted(),
    }, len(runs) - len(forecasts)


def read_runs(paths: Sequence[Path]) -> list[Any]:
    """Returns the runs of some files; without any those that ship with meshcast."""
    from meshcast.validation.published.rows import read_files, read_shipped

    return read_files(paths) if paths else list(read_shipped())


def keep_until_interrupted(steps: Iterable[Step]) -> list[Step]:
    """Returns all of some results, or those before an interruption."""
    results: list[Step] = []
    try:
        for result in steps:
            results.append(result)
    except KeyboardInterrupt:
        pass
    return results


def progress(steps: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """Yields the same steps; on a terminal a progress bar follows them."""
    if not sys.stderr.isatty():
        yield from steps
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield from bar.track(steps, total=total)


def published_page(answer: Answer) -> RenderableType:
    """Returns errors of all runs and of every group, with those of naive forecasts; runs that do not fit; refused
    runs."""
    summary = answer["summary"]
    runs = "run" if summary["rows"] == 1 else "runs"
    whose = ", as strangers are told" if summary["as_stranger"] else ""
    counts = f"{summary['predicted']:,} forecast, {summary['refused']:,} refused"
    head = f"{summary['rows']:,} published {runs}{whose}: {counts}"
    parts: list[RenderableType] = [Text(head, style="bold"), Text()]
    if summary["rows"] <= FEW:
        parts += [runs_table(answer["rows"]), Text()]
    parts.append(errors_table(summary))
    parts.append(
        Text("time: forecast over measured step - 1; timed: both are known; inside: in the 90% interval", "dim")
    )
    parts.append(Text("naive: one efficiency for a GPU and a number format, fitted on these runs", "dim"))
    parts.append(Text("blind: the same, fitted on the runs of all other sources", "dim"))
    if summary["memory"]["compared"]:
        parts += [Text(), memory_table(summary)]
    if summary["does_not_fit"]:
        parts += [Text(), *_misfit_blocks(answer["rows"])]
    if summary["refusals"]:
        parts += [Text(), reasons_table("refused", "because", list(summary["refusals"].items()))]
    if (choice := summary["choice"])["groups"]:
        rho = f", rank correlation {choice['rho']:.2f}" if choice["rho"] is not None else ""
        plans = f"choice among {choice['plans']} plans in {choice['groups']} groups: mean regret"
        regrets = [format_percent(choice[key]) for key in ("regret", "random_regret")]
        parts += [Text(), Text(f"{plans} {regrets[0]} % (random {regrets[1]} %){rho}")]
    for name in summary["faster_than_peak"]:
        parts.append(Text(f"DEFECT: {name} is forecast faster than its GEMMs at peak", "bold red"))
    return Group(*parts)


def choice_page(answer: Answer) -> RenderableType:
    """Returns regret and rank correlation of every group of plans, then the means of all groups and of each source."""
    summary, groups = answer["summary"], answer["groups"]
    if not groups:
        return Text("no three published plans of one training task: nothing to choose from", "bold")
    robust = "robust_regret" in groups[0]
    keys = ("regret", *(("robust_regret",) if robust else ()), "random_regret")
    heads = ("regret %", *(("robust %",) if robust else ()), "random %")
    table = Table(
        Column("group", style="bold", wrap="never"),
        *numbers("plans", format=",", wrap="never"),
        *numbers(*heads, format=".1p", wrap="never"),
        *numbers("rho", format=".2f", wrap="never"),
        Column("chosen", wrap="letters"),
    )

    def add(name: str, of: Answer, chosen: str, style: str = "") -> None:
        table.add(name, of["plans"], *(of[key] for key in keys), of["rho"], chosen, style=style)

    for group in groups:
        better = "" if group["right"] else f", best {group['best']}"
        other = group.get("robust_chosen", group["chosen"])
        robustly = "" if other == group["chosen"] else f", robust {other}"
        add(f"{group['source']}, {group['gpus']} x {group['gpu']}", group, f"{group['chosen']}{better}{robustly}")
    table.add()
    add(f"mean of {summary['groups']}", summary, _share_right(summary), "bold")
    for source, of in summary["by_source"].items():
        add(f"  {source}: {of['groups']}", of, _share_right(of))
    remarks = [
        "chosen: the plan of the shortest forecast; regret: its measured step over that of the best plan - 1",
        "random: mean regret of all plans; rho: Spearman's correlation of measured and forecast steps",
    ]
    if robust:
        remarks.append(
            "robust: regret of the plan with the smallest upper end of its interval, which is wider for what no run "
            "outside of its group has"
        )
    table.notes = remarks
    return Group(show_table(table), *_describe_searches(summary.get("searches")))


def _share_right(of: Answer) -> str:
    robust = f", robust {of['robust_right']:.0%}" if of.get("robust_right") is not None else ""
    return f"{of['right']:.0%} right{robust}"


def _describe_searches(searches: Answer | None) -> list[Text]:
    """Returns how many groups a search of their plans alone answers as the forecasts do, and why others are no
    search."""
    if searches is None:
        return []
    words = (
        f"searches of the plans of a group alone choose the shortest forecast that fits in {searches['agree']} of "
        f"{searches['searched']} groups"
    )
    if left_out := searches["shortest_does_not_fit"]:
        words += f"; in {left_out} of them the shortest forecast of all does not fit"
    if defects := searches["defects"]:
        words += f"; {defects} of them ended with a bound above a forecast, a defect of meshcast"
    texts = [Text(), Text(words)]
    if left := searches["groups"] - searches["searched"]:
        why = ", ".join(f"of {count} the plans {reason}" for reason, count in searches["reasons"].items())
        texts.append(Text(f"{left} group{'s are' if left > 1 else ' is'} no search: {why}"))
    return texts


def _residuals_table(residuals: Sequence[Answer]) -> RenderableType:
    """Returns how the intervals of every regime hold, of all classes and of each, and their residuals."""
    shares = ("inside %", ".1p"), ("half %", ".1p"), ("bias, sigma %", ""), ("shipped %", "")
    table = _table("residual of steps", ("runs", ","), ("sources", ""), ("med / p90 %", ""), *shares)
    for row in residuals:
        if not row["rows"]:
            continue
        of_all = not row["class"]
        name = f"{row['regime']}, {row['level']:.1%} of its runs" if of_all else f"  {row['class']}"
        ends = [
            f"{format_percent(residual['bias'], '+.1p')} {format_percent(residual['sigma'])}" if of_all else ""
            for residual in (row["residual"], row["shipped"])
        ]
        figures = row["rows"], row["sources"], _format_pair(row), row["inside_left_out"], row["half_width"]
        table.add(name, *figures, *ends, style="bold" if of_all else "")
    return show_table(table)


def fit_page(answer: Answer) -> RenderableType:
    """Returns trials of the kinds of work, errors in and out of sample, what is kept, residuals, and what ships."""
    means = [(head, ".2p") for head in ("with %", "without %", "gain %", "+- %")]
    kinds = _table("coefficient", *means, words=("",))
    errors = _table("time error %", *SIZES, ("bias", "+.1p"))
    effects = _table("kept", ("log factor", "+.3f"), ("+-", ".3f"), of=True)
    for name, of in answer["classes"].items():
        head = f"{name}: {of['rows']:,} runs, {of['sources']} sources"
        kinds.add(head, style="bold")
        for trial in of["kinds"]:
            gain = trial["without"] - trial["with_it"]
            figures = trial["with_it"], trial["without"], gain, trial["standard_error"]
            kinds.add(f"  {trial['kind']}", *figures, "kept" if trial["kept"] else "dropped")
        errors.add(head, style="bold")
        for key, label in FITS.items():
            if (fitted := of["errors"].get(key)) is not None:
                errors.add(f"  {label}", *(fitted[part] for part in ("median", "p90", "bias")))
        for effect in of["effects"]:
            member = effect["member"] or f"{effect['family']} (family)"
            effects.add(f"{name}: {effect['kind']}", member, effect["value"], effect["standard_error"])
    constants = _table("source, median / p90 %", ("runs", ","), ("shipped", ""), ("without it", ""), ("constant", ""))
    for source in answer["sources"]:
        pairs = [_format_pair(source[key]) for key in ("shipped", "without", "constant")]
        constants.add(source["source"], source["rows"], *pairs)
    shipped = _table("shipped coefficient", ("value", "g"), words=("fitted to, all runs in view",))
    for coefficient in answer["shipped"]:
        value = coefficient["value"] if isinstance(coefficient["value"], float) else None
        shipped.add(f"{coefficient['coefficient']}: {', '.join(coefficient['of'])}", value, coefficient["fitted_to"])
    parts = [show_table(kinds)]
    parts.append(Text("with, without: mean |error| of left-out sources; +-: standard error of the gain", "dim"))
    parts += [Text(), show_table(errors), Text()]
    none = Text("no coefficient helps sources that it was not fitted to: none kept")
    parts += [show_table(effects) if effects.rows else none, Text(), _residuals_table(answer["residuals"])]
    parts.append(
        Text(
            "inside: of runs of left-out sources; half: of an interval, median; sigma of both sides and as shipped",
            "dim",
        )
    )
    if constants.rows:
        parts += [Text(), show_table(constants)]
        parts.append(Text("constant: one efficiency for a GPU and number format, that of all other sources", "dim"))
    if answer["leave_out"]:
        parts += [Text(), *_left_out_blocks(answer, answer["leave_out"])]
    return Group(*parts, Text(), show_table(shipped))


def _left_out_blocks(answer: Answer, grouping: str) -> list[RenderableType]:
    """Returns errors of every source, family or model, shipped and with coefficients fitted to all others."""
    fits = {"shipped": "shipped", "refitted": f"refitted_{grouping}_left_out", "all": f"all_{grouping}_left_out"}
    heads = [(head, ".1p") for fit in fits for head in (fit, "p90")]
    table = _table(f"{grouping} left out", ("runs", ","), *heads)
    for name, of in answer["classes"].items():
        table.add(name, style="bold")
        for group in of["left_out"][grouping]:
            errors = [group["errors"].get(fit, {}).get(key) for fit in fits.values() for key in ("median", "p90")]
            table.add(f"  {group['group']}", group["rows"], *errors)
    remark = "refitted: coefficients of the kinds of work whose shipped ones were fitted to such runs, without a prior"
    return [show_table(table), Text(f"{remark}; all: all coefficients", "dim")]


def _format_pair(statistics: Answer | None) -> str:
    """Returns median and 90th percentile of an error."""
    return "" if statistics is None else " / ".join(format_percent(statistics[key]) for key in ("median", "p90"))


SIZES = ("median", ".1p"), ("p90", ".1p")
"""Heads and formats of tables of errors."""


def _table(first: str, *columns: tuple[str, Format], words: Sequence[str] = (), of: bool = False) -> Table:
    """Makes a table without rows whose first column is wide.

    columns: heads and formats of those of numbers.
    words: heads of columns of words.
    of: whether the second column says of what.
    """
    named = [Column(first, style="bold", wrap="letters"), *([Column("of")] if of else [])]
    return Table(*named, *formatted_numbers(*columns), *words)


def runs_table(rows: Sequence[Answer]) -> RenderableType:
    """Returns measured and forecast step time of every run."""
    times = ("measured s", ",.2f"), ("forecast s", ",.2f"), ("90% interval", ""), ("error %", "+.1p")
    table = Table(Column("run", style="bold", wrap="never"), "GPU", *formatted_numbers(*times))
    for row in rows:
        measured, forecast = row["measured"].get("step_time_s"), row["predicted"]
        if row["error"] is not None:  # also of a run that publishes tokens/s only
            measured = forecast["step_time_s"] / (1 + row["error"])
        cells = [row["id"] or "?", row["gpu"], measured or None]
        if row["status"] == "refused":
            table.add(*cells, "refused")
            continue
        low, high = forecast["interval_90_s"]
        table.add(*cells, forecast["step_time_s"], f"{low:,.2f} to {high:,.2f}", row["error"])
    return show_table(table)


def errors_table(summary: Answer) -> RenderableType:
    """Returns errors of the step time [%] by group."""
    counts = ("runs", ","), ("timed", ",")
    ours = ("median", ".1p"), ("mean", ".1p"), ("p90", ".1p"), ("bias", "+.1p")
    lines: list[Words] = [("naive", "median"), ("", "p90"), ("blind", "median"), ("", "p90")]
    theirs = [(head, ".1p") for head in lines]
    columns = formatted_numbers(*counts, *ours, ("inside", ".0p"), *theirs, wrap="never", low=True)
    table = Table(Column("time error %", style="bold", wrap="never"), *columns, dense=True)

    def add(name: str, of: Answer, style: str = "") -> None:
        figures = [of[key] for key in ("rows", "compared", "median", "mean", "p90", "bias", "inside_interval")]
        naive = [of[key] for key in ("baseline", "baseline_from_other_sources")]
        table.add(name, *figures, *(errors[key] for errors in naive for key in ("median", "p90")), style=style)

    _add_groups(table, summary, add)
    return show_table(table)


def memory_table(summary: Answer) -> RenderableType:
    """Returns errors of the peak memory [%] by group."""
    sizes = ("median", ".1p"), ("mean", ".1p"), ("p90", ".1p"), ("bias", "+.1p")
    columns = formatted_numbers(("compared", ","), *sizes)
    table = Table(Column("memory error %", style="bold", wrap="never"), *columns, dense=True)

    def add(name: str, of: Answer, style: str = "") -> None:
        if of["memory"]["compared"]:
            figures = [of["memory"][key] for key in ("compared", "median", "mean", "p90", "bias")]
            table.add(name, *figures, style=style)

    _add_groups(table, summary, add)
    return show_table(table)


def _add_groups(table: Table, summary: Answer, add: Any) -> None:
    """Adds a row for all runs, then for every source, GPU, class, stack and regime."""
    from meshcast.validation.published.summary import GROUPS

    add("all", summary, "bold")
    for group in GROUPS:
        if not summary[f"by_{group}"]:
            continue
        table.add()
        table.add(TableCell(f"by {group}", "dim"))
        for name, of in summary[f"by_{group}"].items():
            add(f"  {name}", of)


def _misfit_blocks(rows: Sequence[Answer]) -> list[RenderableType]:
    """Returns the runs whose forecast exceeds the memory of their GPU, the furthest first, and the likely reason."""
    sizes = ("GiB", ",.1f"), ("of", ",.1f"), (("time", "error %"), "+.1p")
    first, last = Column("does not fit", style="bold", wrap="letters"), Column("likely reason", wrap="letters")
    table = Table(first, *formatted_numbers(*sizes, wrap="never"), last)
    misfits = [row for row in rows if row["predicted"] and not row["predicted"]["fits"]]
    for row in sorted(misfits, key=lambda row: -row["predicted"]["peak_device_gib"] / row["predicted"]["capacity_gib"]):
        memory = [row["predicted"][key] for key in ("peak_device_gib", "capacity_gib")]
        table.add(row["id"] or "?", *memory, row["error"], row["misfit"])
    runs = "1 run does" if len(misfits) == 1 else f"{len(misfits)} runs do"
    remark = "They ran: the reasons are the first assumed field with whose other value a run fits."
    return [show_table(table), Text(f"{runs} not fit in the memory of the GPU by its forecast. {remark}", "dim")]


def draw_plots(answer: Answer, files: dict[str, Path], width: Width = "page") -> None:
    """Draws the plots of ``validate published``; that of memory only if a run has a measured peak.

    Raises OSError if a file cannot be written.
    """
    if not files:
        return
    from meshcast.experiments.render.matplotlib.measured import published as plots
    from meshcast.experiments.render.matplotlib.sheet import save

    rows = answer["rows"]
    figures = {
        "step-time": lambda: plots.compare_dots(plots.step_time_dots(rows), "Step time", "s", len(rows)),
        "memory": lambda: plots.compare_dots(plots.memory_dots(rows), "Peak memory of a GPU", "GiB", len(rows)),
    }
    for name, path in files.items():
        if name == "memory" and not answer["summary"]["memory"]["compared"]:
            continue
        path.parent.mkdir(exist_ok=True)
        save(figures[name], path, width)
