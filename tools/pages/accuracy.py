"""Writes docs/accuracy.md: the errors of forecasts of published runs by class, program, GPU and source.

``python -m tools.pages.accuracy RUNS.jsonl [MORE.jsonl ...] docs/accuracy.md`` (``make docs-accuracy RUNS=...``); the
sections on strangers and on whether runs fit are of all files, the others of the first one.
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from meshcast.experiments.render.markdown import render_table
from meshcast.experiments.render.terminal.published import fit_published, validate_published
from meshcast.experiments.views.table import Table, formatted_numbers, numbers
from meshcast.hardware.documents.output_file import write_file
from meshcast.validation.published.answer import answers
from meshcast.validation.published.clusters import forget_cluster, known_cluster
from meshcast.validation.published.fit.peak_spreads import measure_peaks
from meshcast.validation.published.rows import PublishedRun, read, read_files
from meshcast.validation.published.summary import compute_figures, measured_step, quantile
from tools.pages.memory_verdicts import forecast_reported, list_sections

MIN_RUNS = 5
"""Runs that a group needs for a row of its own."""
WORST = 30

FIGURES = (
    *(("runs", ""), ("median %", ".1p"), ("p90 %", ".1p")),
    *(("bias %", "+.1p"), ("inside %", ".0p"), ("baseline %", ".0p")),
)
"""Columns of figures of a group, with their formats."""

INTRODUCTION = """\
# Accuracy on published runs

Made by `make docs-accuracy` from files of published runs. Every run is forecast from its published configuration
alone, first with all its settings, then [as a stranger would be told](#as-a-stranger-would-be-told); what a run does
not state is assumed, listed, and widens its interval. Errors are forecast / measured - 1 of the
step time; *inside* is the share of measured times in the 90 % interval; the *baseline* is one efficiency for each GPU
and number format, fitted to the other sources.
"""

STRANGERS = """\
## As a stranger would be told

All other sections are in-sample: scripts of these runs were read, and coefficients have seen their steps. Here the
source of every run is left out of all fits, and what a job leaves to its program is hidden
([how](published-runs.md#as-a-stranger)); `meshcast validate published --as-stranger`. *Half* is half of the 90 %
interval, in the median. Median and 90th percentile of the error with all settings, and as a stranger:
"""

NEW_RUNS = """\
{count} of these runs, of five sources, came after all others. Before any cause of their errors was looked for, the
forecasts with all settings were 7.2 / 19.5 % off (dense 9.8 / 16.0, experts 17.2 / 22.5, adapters 3.2 / 17.7; commit
c4ea55c7). Now they are {now} % off, and {strange} % as a stranger would be told.
"""

FITTED = """\
## What is fitted on what

- Kernels (GEMMs, grouped GEMMs, attention, memory-bound ones): tables of measured kernels, see
  [calibration.md](calibration.md).
- Collectives, messages, token dispatch: tables of NCCL and DeepEP.
- `sustained` of Ampere, `memory_bound` of Megatron-Core: 20 steps of GPT models (Megatron-LM of 2021 and 2022, DGX
  Cloud).
- `sustained` and `sustained_fp8` of Hopper: 96 steps in bf16 and 96 in 8 bits on H100 and H200, with equal weight of
  the sources. `sustained` of Blackwell: 50 steps in bf16, 43 of them of one B200 machine (`simumax`); `sustained_fp8`:
  55 steps in 8 bits.
- Step overhead: MLPerf and DGX Cloud for Megatron-Core, 141 MLPerf runs for MLPerf's programs.
- Host time of an op of Megatron-Core: the 117 runs whose forecast depends on it, in three ages of Transformer Engine;
  that of each expert: 69 runs of Megatron-Bridge with experts that no CUDA graph launches, three of them with padded
  experts. Paces of CPUs: 21 of these runs on B200 and B300, 12 on GB200 and GB300. Kernels of routers and of latent
  RoPE that are not fused are counted. That MLPerf's steps are CUDA graphs where a run does not say so is assumed, with
  its LoRA runs in view.
- Grouped GEMMs in 8 and 4 bits, and on Blackwell: one dense GEMM for each expert, times 1.05 to 1.32 by layout, from 82
  measured grouped GEMMs, 75 of them in 16 bits on B200. One expert a rank, and experts in one kernel, have no factor.
- `launch_s` of `megatron-deepspeed`: 74 steps of BLOOM's tests.
- Misaligned batched GEMMs: the steps of BLOOM's tests whose heads are no multiple of 8.
- Triton's attention on Hopper: 40 runs of LLM Foundry.
- Memory and step overhead of `megatron-deepspeed`: 60 readings and logs of BLOOM's tests.
- Sigmas of regimes and of assumed fields: residuals of these runs ([refitting](published-runs.md#refitting)).

Nothing else is fitted: layouts, bytes, overlap, recompute, alignment and schedules are computed. All errors here are
in-sample for what is fitted on published runs.
"""

LEFT_OUT = """\
## What a fit without a model, source or family forecasts

`meshcast validate fit --leave-out model` forgets the coefficients that were fitted to published runs (experts: the host
time of an op; dense models: sustained rates and memory-bound kernels), fits their factors to all other groups without a
prior, and forecasts the group that was left out. A coefficient that no other group determines stays as it ships (the
host time, without the only source of experts that no graph launches). Median and 90th percentile of the error:
"""

CONSTANT = """\
## Every source against a constant

The constant is one efficiency for each GPU and number format, the median of all other sources. *Without it*: the
coefficients of the section above are fitted to all other sources, and those that a source alone has set are what others
say ([which](published-runs.md#refitting)); what code, documents and logs state stays. Median and 90th percentile of the
error, of sources of 10 runs or more; **bold** where the constant is better:
"""

CLUSTERS = """\
## Corrections of clusters

One cluster of the published runs has properties of its own: the node `jean-zay-a100` with the rate of its NVLink
(`scale_up.rate`, fitted to 74 of these runs), and CUDA_LAUNCH_BLOCKING=1 on 160 GPUs and more, as its log says. Its
runs with both, and forecast as on any A100s with this network:
"""

CAUSES = """\
## Known causes of large errors

- Models with experts: releases of Megatron-Bridge within one year differ by up to 1.8 times at the same plan (Qwen3-30B
  on H100, 26.02 and 26.02.01). Before 26.02.01 its micro-batches on H100 and B200 took longer than their kernels and
  hosts explain: forecasts are up to 50 % too short.
- GPT-OSS: 2 to 8 % too short, 24 % with all-to-alls over 64 ranks on 8 nodes. Biases and clamps of its experts are
  kernels of their own, counted in Megatron-Core's code (`eager` of its profile); without them it was 21 to 38 % too
  short.
- Grok-1 in 8 bits: 14 to 15 % too short, and right in 16 bits at the same plan. Its ranks hold one expert each, so no
  factor of grouped GEMMs applies; what its casts and hosts take beyond the forecast is not known.
- Qwen3-235B on H800 (`h800moe`): plans with two tensor ranks on 8 stages are 9 to 20 % too short, those on 32 stages
  up to 18 % too long, four tensor ranks 30 %. Networks are not the cause: all-to-alls and DeepEP over the same 32 ranks
  imply the same rest of a layer, 12.1 ms of 2,048 tokens, where 32 stages imply 10.9, and times of DeepEP on H800 are 5
  to 14 % below its forecast.
- Programs of 2023 on H100 (MLPerf v3.0 and v3.1) ran 8 to 26 % slower than those of 2024 with the same settings.
- The scaling study of Megatron-Core 0.8 (source `megatron`): 6 to 15 % too short. Its open micro-batch and chunks are
  those of the fastest plan. With the only micro-batch that divides all batches of its strong scaling, 1, these eight
  runs would be 12 to 13 % too short, the smallest model 1 % too long, and the one of 32B 47 %. GPT-3 in NeMo 24.05, of
  the same months, is 7 % too short in 16 bits, too. Other rules for open plans were tried on 42 runs that state theirs,
  hidden: the mean error is 4.7 % with the stated plan, 5.6 % with the fastest, 6.4 % with the median of all plans.
- BLOOM's tests without the coefficients that were fitted to them (`bloom` in the table above) keep
  CUDA_LAUNCH_BLOCKING, which their log states, and the slow products of heads that are no multiple of 8, at the peak
  of CUDA cores. Without any price of these products 5.8 / 24 %.
- One B200 machine (`simumax`): two stages without tensor parallelism are 2 to 7 % too long, while two tensor ranks are
  right; 70B over 8 tensor ranks waits for the host, 12 to 20 % too short at the pace of hosts of Blackwell.
- vTrain's runs: Megatron-DeepSpeed overlaps no all-reduce of an input gradient (the code of 2021 has no such option,
  that of July 2023 turns it off), while forecasts of its profile do where launches do not block. Without, these runs
  would be 5 % too long instead of 1 %, for causes that are not known.
- LoRA on Blackwell in MLPerf v5.1: 7 to 18 % too long, while v5.0 is 2 % too short at the same plans. Its code since
  fuses what lies between the GEMMs (`USE_TE_OPS`), which is not modelled. Both rounds compute attention in 8 bits; with
  the kernels of serving that `cudnn-fp8` stands for, B200 would be 4 % too short in v5.0 and 11 % too long in v5.1.
- NVFP4 in Megatron-Bridge: 2 to 14 % too short, the more the older the release; casts with a Hadamard transform have no
  measured rate. MLPerf, which turns the transform off (`NVTE_NVFP4_DISABLE_RHT`), is within 5 % but for LoRA.
- MI300X in LoRA: 30 to 40 % too short on two and four nodes.
- PaxML: 31 to 35 % too short; the profile of MaxText stands for it. MaxText in 8 bits with sequences of 8,192 tokens:
  18 to 23 % too long.
"""


REASONS = {
    r"26\.02-gpt-oss.*b300": "all-to-alls of experts over eight nodes",
    r"mbridge-(25|26\.02-).*qwen3": "releases before 26.02.01",
    r"mbridge-26\.02\.01-qwen3-30b": "releases of one year differ by 1.8 times",
    "nvfp4": "Hadamard transform of NVFP4",
    "paxml": "the profile of MaxText stands for PaxML",
    r"maxtext.*-fp8": "MaxText in 8 bits",
    "mi300x": "MI300X on several nodes",
    r"mlperf-v3": "programs of 2023",
    r"mlperf-v51.*-lora": "fused operations of MLPerf v5.1",
    r"vtrain-multi-00(13|15|20)$": "measured times that look like a broken run: 1.2 to 2 times their neighbours",
    "deepseek-v3-n2048-h800": "hours of a whole training, not of its steps",
    "megatron-h100": "the scaling study of Megatron-Core 0.8",
}
"""Known causes of large errors in words, by ids of runs; regular expressions, the first that matches counts."""


def page(
    rows: Sequence[dict[str, Any]],
    fit: dict[str, Any],
    forgotten: Mapping[str, Sequence[dict[str, Any]]],
    sections: Sequence[str],
) -> str:
    """Returns the page.

    rows: answers, as ``validate published --json`` lists them.
    fit: the answer of ``validate fit``.
    forgotten: answers to the runs of each known cluster, forecast without its properties.
    sections: those on strangers and on whether runs fit.
    """
    timed = [row for row in rows if row["error"] is not None]
    everything = compute_figures(rows)
    parts = [INTRODUCTION]
    parts.append(
        f"{everything['rows']:,} runs, {everything['predicted']:,} forecast, {everything['compared']:,} compared.\n"
    )
    strangers, *verdicts = sections
    parts += [strangers, f"## Step time\n\n{_table('class', rows, ('class',))}"]
    parts += [f"## Dense models\n\n{_table('program', _of(rows, 'dense'), ('stack',))}"]
    parts += [_table("GPU, number format", _of(rows, "dense"), ("gpu", "format"))]
    parts += [_table("source", _of(rows, "dense"), ("source",))]
    parts += [f"## Models with experts\n\n{_table('program, GPU', _of(rows, 'moe'), ('stack', 'gpu'))}"]
    parts += [f"## Peak memory\n\n{_memory(rows)}", *verdicts, _noise_floor(timed), FITTED, _left_out(fit)]
    parts += [_constants(fit), _clusters(rows, forgotten), CAUSES, _worst(timed)]
    return "\n".join(parts)


def _of(rows: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["class"] == kind]


def _groups(
    rows: Sequence[dict[str, Any]], keys: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], list[dict[str, Any]]]]:
    groups = defaultdict[tuple[str, ...], list[dict[str, Any]]](list)
    for row in rows:
        if row["error"] is not None:
            groups[tuple(str(row["peak"] if key == "format" else row[key]) for key in keys)].append(row)
    yield from sorted(groups.items())


def _table(head: str, rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> str:
    table = Table(head, *formatted_numbers(*FIGURES))
    for names, of_group in _groups(rows, keys):
        if len(of_group) >= MIN_RUNS:
            table.add(", ".join(names), *_figures(of_group))
    table.add("all", *_figures([row for row in rows if row["error"] is not None]))
    return render_table(table)


def list_strangers(rows: Sequence[dict[str, Any]], strangers: Sequence[dict[str, Any]], new: int) -> str:
    """Returns the section on forecasts as strangers are told.

    rows: answers to runs with all their settings. strangers: answers to the same runs as a stranger tells them. new:
        number of the runs that came last.
    """
    lines = [STRANGERS]
    for key, head in (("class", "class"), ("stack", "program"), ("regime", "regime")):
        counts = ("runs", ""), ("with all %", ""), ("as a stranger %", ""), ("bias %", "+.1p")
        shares = [(words, ".0p") for words in ("inside %", "half %", "baseline %")]
        table = Table(head, *formatted_numbers(*counts, *shares))
        for name in [*sorted({str(row[key]) for row in strangers if row[key]}), ALL]:
            pairs = [
                (row, strange)
                for row, strange in zip(rows, strangers, strict=True)
                if name in (ALL, strange[key]) and row["error"] is not None and strange["error"] is not None
            ]
            if len(pairs) >= MIN_RUNS:
                table.add(name, *_compare(pairs))
        lines.append(render_table(table))
    if new:
        now, strange = (compute_figures(answers[-new:]) for answers in (rows, strangers))
        lines.append(NEW_RUNS.format(count=f"{new:,}", now=_pair(now), strange=_pair(strange)))
    return "\n".join(lines)


ALL = "all"
"""Row of all runs."""


def _compare(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[Any, ...]:
    """Returns the cells of runs with all settings, and as a stranger tells them."""
    usual, strange = (compute_figures(answers) for answers in zip(*pairs, strict=True))
    halves = [
        (high - low) / 2 / row["predicted"]["step_time_s"]
        for _, row in pairs
        for low, high in [row["predicted"]["interval_90_s"]]
    ]
    naive = strange["baseline_from_other_sources"]["median"]
    shares = strange["bias"], strange["inside_interval"], median(halves), naive
    return len(pairs), _pair(usual), _pair(strange), *shares


def _figures(rows: Sequence[dict[str, Any]]) -> tuple[float | None, ...]:
    figures = compute_figures(rows)
    errors = (figures[key] for key in ("compared", "median", "p90", "bias", "inside_interval"))
    return *errors, figures["baseline_from_other_sources"]["median"]


def _memory(rows: Sequence[dict[str, Any]]) -> str:
    table = Table("program", *formatted_numbers(*FIGURES[:4]))
    named = sorted({str(row["stack"]) for row in rows if row["memory_error"] is not None})
    groups = [(name, [row for row in rows if row["stack"] == name]) for name in named]
    for name, of_group in [*groups, ("all", list(rows))]:
        figures = compute_figures(of_group)["memory"]
        table.add(name, *(figures[key] for key in ("compared", "median", "p90", "bias")))
    return render_table(table)


def _left_out(fit: dict[str, Any]) -> str:
    grouped = ("source", "family", "model")
    table = Table("runs", *numbers("", "shipped %", *(f"{grouping} left out %" for grouping in grouped)))
    keys = ("shipped", *(f"refitted_{grouping}_left_out" for grouping in grouped))
    classes = {name: of for name, of in fit["classes"].items() if keys[-1] in of["errors"]}
    for name, of in classes.items():
        table.add(name, of["rows"], *(_pair(of["errors"][key]) for key in keys))
    for model in classes.get("experts", {"left_out": {"model": []}})["left_out"]["model"]:
        shipped, refitted = (_pair(model["errors"][key]) for key in (keys[0], keys[-1]))
        table.add(f"of them {model['group']}", model["rows"], shipped, "", "", refitted)
    return f"{LEFT_OUT}\n{render_table(table)}"


def _pair(errors: Mapping[str, Any]) -> str:
    return f"{100 * errors['median']:.1f} / {100 * errors['p90']:.1f}"


def _constants(fit: dict[str, Any]) -> str:
    table = Table("source", *numbers("runs", "shipped %", "without it %", "constant %"))
    for source in fit["sources"]:
        constant = source["constant"] and source["constant"]["median"]
        cells = []
        for key in ("shipped", "without"):
            pair = _pair(source[key])
            cells.append(f"**{pair}**" if constant is not None and source[key]["median"] > constant else pair)
        table.add(source["source"], source["rows"], *cells, _pair(source["constant"]) if source["constant"] else "")
    return f"{CONSTANT}\n{render_table(table)}"


def _clusters(rows: Sequence[dict[str, Any]], forgotten: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    table = Table("node", *formatted_numbers(FIGURES[0]), "", *formatted_numbers(*FIGURES[1:5]))
    for name, without in forgotten.items():
        held = {row["id"] for row in without}
        for word, of_node in (("with", [row for row in rows if row["id"] in held]), ("without", without)):
            runs, *figures = _figures([row for row in of_node if row["error"] is not None])
            table.add(f"`{name}`", runs, word, *figures[:4])
    return f"{CLUSTERS}\n{render_table(table)}"


def forecast_forgotten(runs: Iterable[PublishedRun]) -> dict[str, list[dict[str, Any]]]:
    """Returns the answers to the runs of each known cluster, by its node, forecast without its properties."""
    placed = [(run, known_cluster(run)) for run in runs]
    return {
        node: list(answers([forget_cluster(run) for run, known in placed if known and known.node == node]))
        for node in sorted({known.node for _, known in placed if known})
    }


def _noise_floor(rows: Sequence[dict[str, Any]]) -> str:
    """Returns how far measured times of runs with equal jobs lie apart: no forecast of a job can be nearer to all of
    them."""
    table = Table("class", *formatted_numbers(("pairs", ""), ("median %", ".1p"), ("p90 %", ".1p")))
    for (kind,), of_class in _groups(rows, ("class",)):
        equal = defaultdict[tuple[str, float], list[float]](list)
        for row in of_class:
            equal[row["gpu"], row["predicted"]["step_time_s"]].append(measured_step(row))
        apart = sorted(
            abs(math.log(first / second)) for times in equal.values() for first, second in combinations(times, 2)
        )
        if len(apart) >= MIN_RUNS:
            table.add(kind, len(apart), quantile(apart, 0.5), quantile(apart, 0.9))
    words = "Two runs whose jobs are equal, as far as they are published, differ by:"
    return f"## Noise floor\n\n{words}\n\n{render_table(table)}"


def _worst(rows: Sequence[dict[str, Any]]) -> str:
    table = Table("run", *numbers("error %", format="+.1p"), "assumed", "cause")
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[:WORST]:
        cause = next((words for ids, words in REASONS.items() if re.search(ids, row["id"])), "not known")
        table.add(f"`{row['id']}`", row["error"], ", ".join(row["assumed"]), cause)
    return f"## The {WORST} largest errors\n\n{render_table(table)}"


if __name__ == "__main__":
    data, *more = map(Path, sys.argv[1:-1])
    answer, _ = validate_published([data])
    runs = [run for run in read(data) if isinstance(run, PublishedRun)]
    every = [run for run in read_files([data, *more]) if isinstance(run, PublishedRun)]
    others = validate_published(more)[0]["rows"] if more else []
    rows = [*answer["rows"], *others]
    strangers = validate_published([data, *more], as_stranger=True)[0]["rows"]
    verdicts = list_sections(rows, [*measure_peaks(every)], [*forecast_reported()])
    sections = [list_strangers(rows, strangers, len(others)), *verdicts]
    text = page(answer["rows"], fit_published([data])[0], forecast_forgotten(runs), sections)
    write_file(Path(sys.argv[-1]), text)
