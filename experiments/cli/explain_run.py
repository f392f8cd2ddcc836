"""``meshcast explain``: why a run is slower than its forecast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from meshcast.experiments.cli.best_plan import load_with_plan
from meshcast.experiments.cli.console import AsJson, Changes, emit_or_show
from meshcast.experiments.cli.launch import LaunchFileOptions, tell_launch
from meshcast.experiments.options import argument, option


class ExplainOptions(LaunchFileOptions):
    """Options of ``meshcast explain``."""

    files: Annotated[
        tuple[Path, ...],
        argument(
            "LOG",
            "The log of a training run; traces of its ranks (torch's profiler), output of nccl-tests, samples of "
            "nvidia-smi.",
        ),
    ]
    job: Annotated[Path | None, option("--job", "The launch file or job file that ran.", "JOB")] = None
    change: Changes = ()
    skip: Annotated[int | None, option("--skip", "Lines of the log to leave out as warm-up.", "N", min=0)] = None
    rank: Annotated[int | None, option("--rank", "The traced rank, if a trace does not record it.", "N", min=0)] = None
    as_json: AsJson = False


def explain(options: ExplainOptions) -> None:
    """Says how much slower a run is than its forecast, and which causes the evidence shows."""
    from meshcast.experiments.diagnosis.explain import explain_job
    from meshcast.experiments.diagnosis.page import page

    job = None
    if options.job is not None:
        tell_launch(options.job, options.change)
        job = load_with_plan(options.job, options.change)
    explanation = explain_job(options.files, job, options.job, options.change, skip=options.skip, rank=options.rank)
    emit_or_show(options.as_json, explanation.to_dict, lambda: page(explanation))
