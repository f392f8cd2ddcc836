"""Writes the tables of validation/published/measured_range from files of published runs.

python -m tools.data.measured_range runs.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshcast.hardware.documents.output_file import write_file
from meshcast.validation.published.measured_range.combinations import FILE as COMBINATIONS
from meshcast.validation.published.measured_range.combinations import condense, write_entry
from meshcast.validation.published.measured_range.envelope import FILE as ENVELOPE
from meshcast.validation.published.measured_range.envelope import JOBS, LARGE, PLACES, ROOM
from meshcast.validation.published.measured_range.survey import SurveyedRun, survey_runs
from meshcast.validation.published.rows import PublishedFigures, PublishedRun, read_files
from tools.data.sigmas import format_fit, hold_runs

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
    """Returns the entries of the envelope. Packed samples do not count: they attend within themselves, and how far is
    not published; neither do runs of low trust."""
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
    figures = {key: round(getattr(run, key), 4) for key in ("mfu", "causal", "hfu")}
    return {
        **figures,
        **{
            "run": run.id,
            "gpus": run.gpus,
            "model": f"{run.model}, {run.job['model']['layers']} layers",
            "source": run.citation,
            "trust": run.trust or "",
        },
        "printed": _describe_printed(run.measured),
    }


def _describe_printed(measured: PublishedFigures) -> str:
    figures = (
        f"{measured.tflops_per_gpu:g} TFLOP/s a GPU" if measured.tflops_per_gpu else "",
        f"MFU {measured.mfu:.1%}" if measured.mfu else "",
        f"HFU {measured.hfu:.1%}" if measured.hfu else "",
    )
    return ", ".join(word for word in figures if word)


def write_tables(runs: Sequence[SurveyedRun], folder: Path) -> None:
    """Writes both tables, and the jobs of the runs of the envelope, into a folder."""
    entries = best_runs(runs)
    combinations = [write_entry(combination) for combination in condense(run.plan for run in runs)]
    _write_list(folder / ENVELOPE, ENVELOPE_HEAD.format(large=LARGE), entries, flow=None)
    _write_list(folder / COMBINATIONS, COMBINATIONS_HEAD, combinations, flow=True)
    named = {entry[key]["run"] for entry in entries for key in PLACES if key in entry}
    jobs = [json.dumps(run.job) for run in sorted(runs, key=lambda run: run.id) if run.id in named]
    write_file(folder / JOBS, "".join(f"{job}\n" for job in jobs))


def _write_list(file: Path, head: str, entries: Sequence[dict[str, Any]], flow: bool | None) -> None:
    """Writes a list as YAML. flow: whether an entry is a flow mapping; None: each of its inner mappings is."""
    text = yaml.dump(entries, sort_keys=False, width=116, default_flow_style=None, allow_unicode=True)
    if flow:
        texts = (yaml.dump(entry, sort_keys=False, width=116, default_flow_style=True) for entry in entries)
        text = "".join(f"- {text.rstrip()}\n".replace("\n  ", "\n    ") for text in texts)
    write_file(file, head + text)


def main(paths: Sequence[str]) -> None:
    """Reads files of published runs, writes both tables, and prints the sigmas of fields outside of what was run."""
    rows = read_files([Path(path) for path in paths])
    measured = [row for row in rows if isinstance(row, PublishedRun)]
    runs = [run for run in survey_runs(measured) if run is not None]
    write_tables(runs, Path(str(ROOM)))
    print(format_fit(hold_runs(runs)))


if __name__ == "__main__":
    main(sys.argv[1:])
