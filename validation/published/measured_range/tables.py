"""Writes the tables of this room from files of published runs.

python -m validation.published.measured_range.tables runs.jsonl
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from validation.published.measured_range.combinations import FILE as COMBINATIONS
from validation.published.measured_range.combinations import condense, write_entry
from validation.published.measured_range.envelope import FILE as ENVELOPE
from validation.published.measured_range.envelope import LARGE
from validation.published.measured_range.sigmas import fit_sigmas, format_sigmas
from validation.published.measured_range.survey import SurveyedRun, survey_runs
from validation.published.rows import PublishedRun, read_files

ENVELOPE_HEAD = """\
# Best published utilisation by GPU, number format of the GEMMs and class of model. Made by `make docs-envelope`; do not
# edit it. mfu (PaLM), causal (half of attention) and hfu are those of docs/figures.md, from the measured time of a step
# and meshcast's FLOP counts; `printed` is what the source prints, in its own convention. `large`: the best of runs on
# {large} GPUs or more; `best_causal`: the best with half of attention; both only where that is another run.
"""

COMBINATIONS_HEAD = """\
# Combinations of schemes that published runs have measured, with the ranges of their numbers. Made by `make
# docs-envelope`; do not edit it. Schemes that a combination does not have, and numbers that are 1, are left out.
"""


def best_runs(runs: Iterable[SurveyedRun]) -> list[dict[str, Any]]:
    """The entries of the envelope. Packed samples do not count: they attend within themselves, and how far is not
    published; neither do runs of low trust."""
    groups: dict[tuple[str, str, str], list[SurveyedRun]] = {}
    for run in runs:
        if run.gpu and not run.packed and run.trust != "low":
            groups.setdefault((run.gpu, run.number, run.kind), []).append(run)
    return [_write_group(*key, groups[key]) for key in sorted(groups)]


def _write_group(gpu: str, number: str, kind: str, runs: Sequence[SurveyedRun]) -> dict[str, Any]:
    best, best_causal = (max(runs, key=lambda run: getattr(run, key)) for key in ("mfu", "causal"))
    large = max((run for run in runs if run.gpus >= LARGE), key=lambda run: run.mfu, default=best)
    entry = {"gpu": gpu, "format": number, "class": kind, "best": _write_run(best)}
    entry |= {"best_causal": _write_run(best_causal)} if best_causal is not best else {}
    entry |= {"large": _write_run(large)} if large not in (best, best_causal) else {}
    return entry | {"runs": len(runs), "sources": sorted({run.plan.source for run in runs})}


def _write_run(run: SurveyedRun) -> dict[str, Any]:
    keys = ("mfu", "hfu", "tflops_per_gpu", "flops_convention")
    printed = {key: getattr(run.measured, key) for key in keys}
    has_figure = any(printed[key] is not None for key in keys[:3])
    return {
        **{key: round(getattr(run, key), 4) for key in ("mfu", "causal", "hfu")},
        **{"run": run.id, "gpus": run.gpus, "model": run.model, "source": run.citation, "trust": run.trust or ""},
        "printed": {key: value for key, value in printed.items() if value is not None} if has_figure else {},
        "job": run.job,
    }


def write_tables(runs: Sequence[SurveyedRun], folder: Path) -> None:
    """Writes both tables into a folder."""
    table = {"envelope": best_runs(runs)}
    combinations = {"combinations": [write_entry(one) for one in condense(run.plan for run in runs)]}
    for name, head, data in (
        (ENVELOPE, ENVELOPE_HEAD.format(large=LARGE), table),
        (COMBINATIONS, COMBINATIONS_HEAD, combinations),
    ):
        text = yaml.dump(data, sort_keys=False, width=120, default_flow_style=None, allow_unicode=True)
        (folder / name).write_text(head + text, "utf-8")


def main(paths: Sequence[str]) -> None:
    """Reads files of published runs, writes both tables, and prints the sigmas of fields outside of what was run."""
    given = read_files([Path(path) for path in paths])
    every = [one for one in given if isinstance(one, PublishedRun)]
    runs = [one for one in survey_runs(every) if one is not None]
    write_tables(runs, Path(__file__).parent)
    print(format_sigmas(fit_sigmas(runs)))


if __name__ == "__main__":
    main(sys.argv[1:])
