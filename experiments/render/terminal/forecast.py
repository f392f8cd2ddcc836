"""The page of ``meshcast predict``: headline figures, time breakdown, memory and assumptions of a forecast.

It is readable without colours and at 100 columns.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from meshcast.experiments.render.terminal.safe_console import SafeConsole
from meshcast.experiments.render.terminal.tables import labelled_line, show_table
from meshcast.experiments.views import palette
from meshcast.experiments.views.breakdown import STEP_GROUPS
from meshcast.experiments.views.table import Column, Table, TableCell, Words, formatted_numbers, numbers
from meshcast.hardware.units import GIB
from meshcast.simulator.job.framework import load_framework
from meshcast.simulator.job.job import Job
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.figures import FIGURES, name_contribution, parts_of_step
from meshcast.simulator.report.formatting import (
    describe_device,
    describe_microbatches,
    describe_plan,
    format_count,
    format_need,
    format_number,
    format_seconds,
    is_heterogeneous,
    name_device,
)
from meshcast.simulator.report.peak_errors import Verdict
from meshcast.simulator.report.phases import find_deciding_phase, list_phases
from meshcast.simulator.report.report import Report

if TYPE_CHECKING:
    from meshcast.experiments.explain.assumed_fields import AssumedField
    from meshcast.experiments.explain.fitting_changes import MemoryChanges
    from meshcast.validation.selfcheck.replay import Replay

WIDTH = 100
"""Width of a page in a pipe [characters]."""
WIDEST = 110
"""Maximum width of a page [characters]."""

BAR = 26
"""Length of the bar of the whole step [characters]."""

PLAIN = str.maketrans("█▉▊▋▌▍▎▏─·", "######..-.")
"""Replaces bars, lines and dots that the output's encoding does not have."""

HTML_FORMAT = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    "font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace\"><code>{code}</code></pre>"
)

HTML_THEME = TerminalTheme(
    (255, 255, 255),
    (34, 34, 34),
    [(128, 128, 128), (205, 60, 50), (0, 135, 70), (150, 118, 0), (50, 120, 210), (175, 75, 175), (0, 135, 140),
     (128, 128, 128)],
)  # fmt: skip
"""Colours of words, with a contrast of at least 3 to the white of a notebook and to the black of its dark theme."""

SLOWEST = "time of the slowest stage"
"""Head of the breakdown."""

STAGES = 8
"""Maximum number of stages that all get a row of the memory table."""

HEADS = {"parameters": "params", "gradients": "grads"}
COLOURS = {key: looks.colour for keys, looks in STEP_GROUPS.items() for key in keys}
"""By part of the step; those of `palette.PARTS` hold some that vanish on black."""


def show(what: RenderableType) -> None:
    """Prints a page, as wide as the terminal up to `WIDEST`; a pipe gets the text of `render`."""
    if sys.stdout.isatty():
        width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDEST)
        SafeConsole(sys.stdout, max(width, 60)).print_page(what)
        return
    text = render(what)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = text.translate(PLAIN)
    sys.stdout.write(text)


def render(what: RenderableType) -> str:
    """Returns text of a page at `WIDTH` columns, without colours and without spaces at the ends of lines."""
    file = io.StringIO()
    SafeConsole(file, WIDTH).print_page(what)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def to_html(what: RenderableType) -> str:
    """Returns a page as an HTML element with inline styles, the same in any notebook; names in it are escaped."""
    console = SafeConsole(io.StringIO(), WIDTH, record=True)
    console.print_page(what)
    return console.export_html(inline_styles=True, theme=HTML_THEME, code_format=HTML_FORMAT)


def page(
    report: Report,
    plots: Sequence[Path] = (),
    trace: str | None = None,
    snapshot: Path | None = None,
    changes: MemoryChanges | None = None,
    unstated: Sequence[AssumedField] | None = None,
    replays: Sequence[Replay] | None = None,
) -> RenderableType:
    """Returns the whole page.

    plots, trace, snapshot: files that were written.
    changes: that make the plan fit.
    unstated: fields to list that the job does not state.
    replays: the forecast held against replays of its step.
    """
    answer = report.to_dict()
    parts: list[RenderableType] = [
        title(report),
        Text(),
        headline(report),
        Text(),
        times(answer, _name_slowest(report)),
        Text(),
        memory(report, answer),
        Text(),
        *list_memory_changes(changes, report.capacity),
        labelled_line("limits", answer["limits"]),
        labelled_line("interval", _describe_interval(report)),
    ]
    if learnt := answer.get("learnt"):
        parts.append(labelled_line("learnt", _describe_learnt(learnt)))
    if noise := answer.get("noise"):
        parts.append(labelled_line("ranks", _describe_ranks(noise)))
    if steps := answer.get("steps"):
        parts.append(labelled_line("steps", _describe_steps(steps)))
    if batches := answer.get("batches"):
        figures = (batches[key] for key in ("mean_s", "p5_s", "p95_s"))
        parts.append(labelled_line("batches", _describe_batches(len(batches["step_times_s"]), *figures)))
    if published := answer.get("published"):
        parts.append(labelled_line("published", _describe_published(published)))
    parts += [labelled_line("warning", warning, style="bold yellow") for warning in answer["warnings"]]
    parts += [labelled_line("assumed", sentence) for sentence in answer["assumed"]]
    parts += list_unstated(unstated or ())
    parts += [labelled_line("verified" if played.agrees else "differs", str(played)) for played in replays or ()]
    if len(plots) == 1:
        parts.append(labelled_line("timeline", f"written to {plots[0]}"))
    elif plots:
        parts.append(labelled_line("plots", f"{', '.join(path.name for path in plots)} written to {plots[0].parent}"))
    if trace:
        parts.append(labelled_line("trace", f"written to {trace}; open it in ui.perfetto.dev"))
    if snapshot:
        parts.append(labelled_line("snapshot", f"written to {snapshot}; open it in pytorch.org/memory_viz"))
    return Group(*parts)


def list_memory_changes(changes: MemoryChanges | None, capacity: float) -> list[RenderableType]:
    """Returns the changes that make the plan fit, with step time and memory of each, and the change that saves most
    memory.

    capacity: of a GPU [bytes].
    """
    if changes is None:
        return []
    lever = changes.lever
    largest = [labelled_line("lever", f"{lever}: -{lever.saved / GIB:,.1f} GiB")] if lever else []
    fitting = [
        labelled_line(
            "fits with" if number == 0 else "",
            f"{change}: step {format_seconds(change.forecast.step_time)}, "
            f"{_describe_need(change.forecast.peak_device, capacity)}",
        )
        for number, change in enumerate(changes.fitting)
    ]
    return [*largest, *fitting]


def _describe_need(need: float, capacity: float) -> str:
    """Returns memory that a plan needs [bytes]; of a plan that fills a GPU with cached blocks "80 of 80 GiB"."""
    words = format_need(need, capacity)
    return f"{words} GiB" if need < capacity else f"{need / GIB:.4g} of {capacity / GIB:.4g} GiB"


def list_unstated(unstated: Sequence[AssumedField]) -> list[RenderableType]:
    """Returns the fields that a job does not state, with what is assumed of them."""
    return [
        labelled_line(
            "unstated" if i == 0 else "",
            f"{field.name}: {'as other fields say' if field.value is None else field.value}",
        )
        for i, field in enumerate(unstated)
    ]


REGIME_WORDS = {
    "source": "runs of this program with these settings on this machine were forecast before",
    "program": "fitted framework profile, calibrated GPU; runs of this source are not known",
    "family": "framework profile or GPU calibration of a relative",
    "unknown": "no fitted profile of the framework's family, or no calibration of the GPU's architecture",
}
"""Meaning of the regimes of a forecast."""

STATED_REGIME = "as framework.set.regime says, which open questions of a launch file or an untuned recipe set"


def _describe_interval(report: Report) -> str:
    """Returns the regime of a forecast, and what widens its interval most."""
    widest = ", ".join(f"{name_contribution(name)} {sigma:.1%}" for name, sigma in report.widest.items())
    stated = "regime" in report.job.as_written["framework"].get("set", {})
    why = STATED_REGIME if stated else REGIME_WORDS[report.regime]
    return f"{report.regime}: {why}; largest standard deviations: {widest}"


def _describe_learnt(learnt: dict[str, float]) -> str:
    """Returns what measured steps have changed."""
    steps = f"{learnt['steps']:,} measured step{'s' if learnt['steps'] > 1 else ''}"
    if learnt["factor"] == 1.0:
        return f"from {steps}, too little to correct this forecast; its interval follows them"
    change = f"{learnt['factor'] - 1:+.1%} on {learnt['priced_s']:.4g} s as priced"
    return f"from {steps}: {change}, as far as that is certain"


def _describe_ranks(noise: dict[str, Any]) -> str:
    """Returns duration of steps under `noise`, and the slowest rank."""
    steps = len(noise["step_times_s"])
    mean_step, p90, slowest, mean = (
        format_seconds(noise[key]) for key in ("mean_s", "p90_s", "its_kernels_s", "mean_kernels_s")
    )
    times = f"{mean_step} a step"
    if steps > 1:
        times += f" in the mean of {steps} (+- {format_seconds(noise['mean_error_s'])}), {p90} in nine of ten"
    return (
        f"under noise {times}, {100 * (noise['over_equal_ranks'] - 1):+.1f} %; rank {noise['slowest_rank']} runs "
        f"kernels for {slowest}, the mean rank for {mean}"
    )


def _describe_steps(steps: dict[str, Any]) -> str:
    times = steps["step_times_s"]
    mean, least, most = map(format_seconds, (steps["mean_s"], min(times), max(times)))
    return (
        f"{len(times)} steps that differ: {mean} in the mean, {least} to {most}; the slowest is step {steps['slowest']}"
    )


def _describe_batches(count: int, *times: float) -> str:
    """Returns the steps of drawn batches: their number, mean, and quantiles of 5 and 95 %."""
    mean, p5, p95 = map(format_seconds, times)
    return f"{count} drawn batches: {mean} in the mean, nine of ten from {p5} to {p95}"


def _describe_published(beside: dict[str, Any]) -> str:
    """Returns the published figure, the forecast of it, and the error of the step time."""
    names = {"tokens_per_s_per_gpu": "tokens/s per GPU", "tflops_per_gpu": "TFLOP/s per GPU"}
    figure, published, ours = beside["figure"], beside["published"], beside["forecast"]
    if figure == "mfu":
        words = f"an MFU of {published:.1%}, forecast {ours:.1%}"
    elif figure == "step_time_s":
        words = f"{format_seconds(published)} a step, forecast {format_seconds(ours)}"
    else:
        words = f"{format_number(published)} {names[figure]}, forecast {format_number(ours)}"
    return f"{words}: the step is forecast {100 * beside['error']:+.1f} % ({beside['source']})"


# --------------------------------------------------------------------------------------------- parts


def title(report: Report) -> RenderableType:
    """Returns model, cluster, plan, batch and framework."""
    job, plan, batch = report.job, report.play.plan, report.job.batch
    trained = f", {format_count(job.adapters.parameters(job.model))} more are trained" if job.adapters else ""
    trained = ", forward passes only" if job.forward_only else trained
    name = f"{job.model.name} ({format_count(job.model.parameters)} parameters{trained}) on {job.cluster.name}"
    passes = describe_microbatches(plan)
    tokens = f"{batch.sequence:,}"
    if batch.lengths:
        counts = plan.passes.class_counts
        shortest = min(length.sequence for length in batch.lengths)
        tokens = f"{shortest:,} to {batch.longest:,}" if shortest < batch.longest else tokens
        padded = sum(count * length.padded_tokens for count, length in zip(counts, batch.lengths, strict=True))
        real = sum(count * length.real_tokens for count, length in zip(counts, batch.lengths, strict=True))
        passes = f"{sum(counts):,} micro-batches of {len(counts)} classes, {1 - real / padded:.1%} padding"
    return Group(
        Text(name, style="bold"),
        labelled_line("cluster", str(job.cluster), style="dim"),
        labelled_line("plan", ", ".join(describe_plan(plan)), style="dim"),
        *_list_heterogeneous_stages(plan),
        labelled_line(
            "batch",
            f"{batch.total:,} sequences of {tokens} tokens, {passes}; {_describe_framework(job)}",
            style="dim",
        ),
    )


def _list_heterogeneous_stages(plan: Plan) -> list[RenderableType]:
    """Returns the ranks and layers of every stage, where stages differ in their degrees, or replicas differ."""
    if not is_heterogeneous(plan):
        return []
    lines = []
    for device in choose_ends(plan.ranks.devices):
        pipeline, place = plan.ranks.pipeline_of(device)
        replica = plan.every_pipeline[pipeline]
        parts = replica.model_parts
        layers = sum(replica.layers[part] for part in range(parts.count) if place in parts.holders(part))
        name = name_device(plan, device)
        lines.append(f"{name}: {describe_device(plan, device)}, {layers} layer{'' if layers == 1 else 's'}")
    if plan.ranks.devices > STAGES:
        lines.insert(STAGES // 2, f"... {plan.ranks.devices - STAGES} more")
    return [labelled_line("" if i else "stages", line, style="dim") for i, line in enumerate(lines)]


def choose_ends(count: int) -> list[int]:
    """Returns all stages; of many the first and the last."""
    every = list(range(count))
    return every if count <= STAGES else [*every[: STAGES // 2], *every[-STAGES // 2 :]]


def _describe_framework(job: Job) -> str:
    """Returns the name of the framework, with the number format unless it is the framework's default."""
    profile, precision = load_framework(job.framework.name, release=job.release), job.precision.compute
    usual = precision == (profile.quantised or profile.weights)
    return job.framework.name if usual else f"{job.framework.name} in {precision}"


def headline(report: Report) -> RenderableType:
    """Returns rows of the figures with a headline."""
    table = Table(Column(width=9), Column(style="bold", width=9), "", ruled=False)
    for figure in FIGURES.values():
        value = figure.compute(report) if figure.headline else None
        if figure.headline and value:
            table.add(figure.headline.name, figure.headline.form(value), figure.remark(report))
    return show_table(table)


def _name_slowest(report: Report) -> str:
    """Returns the stage whose breakdown is shown."""
    plan = report.play.plan
    return f"{name_device(plan, report.device)}, the slowest" if is_heterogeneous(plan) else SLOWEST


def times(answer: dict[str, Any], head: str = SLOWEST) -> RenderableType:
    """Returns breakdown of the step: parts that add up to it, with the hidden communication of each axis."""
    step, hidden = answer["step_time_s"], answer["hidden_s"]
    rows: list[tuple[str, str, str, float, float]] = []
    for key, figure in parts_of_step().items():
        group = figure.where.split(".")[1]
        beside = hidden.get(key, 0.0) if group == "exposed" else 0.0
        rows.append((key, group, figure.part, figure.read(answer), beside))
    rows = [row for row in rows if row[3] > 0 or row[4] > 0]

    table = Table(
        Column(head, width=37),
        *formatted_numbers(("ms", ",.1f"), ("%", ".1p")),
        Column(width=BAR),
        *numbers("hidden ms", format=",.1f"),
        edges=False,
    )
    table.close("step", step * 1e3, 1.0)
    before = ""
    for key, group, label, took, beside in rows:
        head = f"{group:<9}" if group in ("compute", "exposed") and group != before else " " * 9
        before = group
        name = f"{head} {label}" if group in ("compute", "exposed") else label
        bar = TableCell(draw_bar(took / step, BAR), COLOURS[key])
        table.add(name, took * 1e3, took / step, bar, beside * 1e3 if beside else None)
    return show_table(table)


def draw_bar(share: float, width: int) -> str:
    """Returns a bar in eighths of a character, at least an eighth of a positive `share`. width: of a share of 1
    [characters]."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    full, rest = divmod(eighths, 8)
    return "█" * full + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]


def memory(report: Report, answer: dict[str, Any]) -> RenderableType:
    """Returns whether the plan fits, and the peak memory of every stage by category."""
    held = answer["memory"]
    capacity = held["capacity_gib"]
    low, high = held["interval_90_gib"]
    sums = (
        f"peak: {held['peak_allocated_gib']:.1f} GiB allocated (90% interval {low:.1f} to {high:.1f}), "
        f"{held['peak_reserved_gib']:.1f} reserved "
        f"by the allocator, {format_need(report.peak_device, report.capacity)} on the device"
    )
    lines: list[Words | TableCell] = [TableCell(report.fit_in_words, VERDICT_STYLES[report.fit.verdict]), sums]
    if not (phase := find_deciding_phase(report.play)).is_step:
        step = max(other.total for other in list_phases(report.play) if other.is_step)
        lines.append(f"most in the {phase.name}: {phase.about}; a step has {step / GIB:.1f} GiB")

    stages = held["stages"]
    names = [name for name in CATEGORIES if any(round(stage["by"][name], 2) for stage in stages)]
    named = bool(report.play.plan.pipelines)  # names of replicas leave no room for bars
    table = Table(
        Column("GiB, replica" if named else "GiB", wrap="never"),
        *numbers(*(HEADS.get(name, name) for name in names), format=".2f", wrap="never"),
        *numbers("allocated", format=".2f", style="bold", wrap="never"),
        Column("of GPU" if named else f"of {capacity:.4g} GiB", format=".0%", width=6 if named else 10),
        edges=False,
        dense=True,
    )
    before = -1
    for number in choose_stages(stages):
        if number > before + 1:
            table.add(f"... {number - before - 1} more")
        before = number
        stage = stages[number]
        cells = [stage["by"][name] or None for name in names]
        share = stage["peak_allocated_gib"] / capacity
        bar = TableCell(
            draw_bar(min(share, 1.0), 10) + (">" if share > 1 else ""), palette.GREEN if share <= 1 else palette.RED
        )
        end = stage["peak_allocated_gib"] * GIB / report.usable[number] if named else bar
        name = stage.get("name", f"stage {stage['stage']}")
        if named:
            name = name.removeprefix("replicas ").removeprefix("replica ").replace(" to ", "-")
        table.add(name, *cells, stage["peak_allocated_gib"], end)
    return Group(labelled_line("memory", *lines), Text(), show_table(table))


VERDICT_STYLES: dict[Verdict, str] = {"fits": "bold green", "tight": "bold yellow", "does-not-fit": "bold red"}


def choose_stages(stages: Sequence[dict[str, Any]]) -> list[int]:
    """Returns stages with a row of the memory table: of many the first, the last and the fullest."""
    count = len(stages)
    if count <= STAGES:
        return list(range(count))
    worst = max(range(count), key=lambda n: stages[n]["peak_allocated_gib"])
    return sorted({0, 1, 2, worst, count - 2, count - 1})
