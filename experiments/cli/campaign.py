"""``meshcast measure campaign``: many measurements, one after the other, each held against its forecast."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshcast.experiments.cli.commands import WRONG
from meshcast.experiments.cli.console import emit
from meshcast.experiments.cli.measured_files import check_writable_folder, quote_command
from meshcast.experiments.cli.measuring import find_measuring
from meshcast.experiments.render.terminal.say import say

if TYPE_CHECKING:
    from meshcast.validation.measurements.campaign import Campaign, Tools

IN_PROCESS = ("kernels", "stages")
"""Kinds that run in the process that measures; others start processes of their own."""

SUMMARY = "comparison.txt"
"""File in the folder of a campaign with steps, stages, and the errors of all classes of rows."""


def run_campaign(file: Path, out: Path, minutes: float | None, as_json: bool, crowded: bool = False) -> None:
    """Runs a campaign, or a slice of it, and prints the errors of each kind of measurement.

    After each run its rows are compared with their forecasts in a page beside its file, ``NAME.txt``, and all errors so
    far in `SUMMARY` in the same folder.
    """
    from meshcast.experiments.render.terminal.forecast import show
    from meshcast.experiments.render.terminal.measurements import page, validate_files, write_page
    from meshcast.validation.measurements import campaign

    planned = campaign.load(file)
    check_writable_folder(out)
    done: dict[str, list[Path]] = {}
    answers: dict[str, dict[str, Any]] = {}
    number, total, failed = 0, len(planned.runs), dict[str, str]()
    measured = campaign.run_all(planned, out, _make_tools(planned, crowded), quote_command(), minutes)
    for number, (run, measurement) in enumerate(measured, 1):
        if isinstance(measurement, campaign.Unmeasured):
            say(f"[{number}/{total}] {run.name}: {measurement.reason}", err=True)
            failed |= {run.name: measurement.reason} if measurement.failed else {}
            continue
        done.setdefault(run.measure, []).append(out / f"{run.name}.json")
        say(f"[{number}/{total}] {run.name}: {len(measurement.rows)} rows in {out / run.name}.json", err=True)
        write_page([validate_files(run.measure, done[run.measure][-1:])], out / f"{run.name}.txt")
        answers[run.measure] = validate_files(run.measure, done[run.measure])
        write_page(answers.values(), out / SUMMARY, brief=True)
    if number < total:
        say(f"{total - number} runs are left: run the same command again", err=True)
    if as_json:
        emit({"campaign": planned.title, "left": total - number, "failed": [*failed], **answers})
    else:
        for answer in answers.values():
            show(page(answer, brief=True))
    if failed:
        last = f"of {[*failed][-1]}: {[*failed.values()][-1]}"
        say(f"meshcast: {out}: {len(failed)} of {total} runs failed: {', '.join(failed)}; {last}", err=True)
        sys.exit(WRONG)


def _make_tools(planned: Campaign, crowded: bool) -> Tools:
    """Returns what a campaign measures and calibrates with; on GPUs in processes of their own. crowded: also start more
    processes than a CPU has cores."""
    from meshcast.validation.calibration.device import calibrate
    from meshcast.validation.measurements.campaign import Tools
    from meshcast.validation.measurements.cuda import Cuda

    on_gpus = planned.device == "cuda"
    call: Callable[..., Any] = _call_in_own_process if on_gpus else operator.call
    return Tools(
        lambda kind: partial(call, _measure_kind, kind) if kind in IN_PROCESS else find_measuring(kind),
        partial(call, _calibrate),
        partial(call, calibrate.refresh),
        lambda folder: calibrate.gpu_name(planned.device, folder),
        Cuda.count() if on_gpus else None if crowded else len(os.sched_getaffinity(0)),
    )


def _call_in_own_process(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls a function in a new process: what that holds of a GPU's memory, its context included, is gone afterwards.

    In the process of the campaign it would be missing in the measurements that follow, and count as theirs.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments, **options).result()


def _measure_kind(kind: str, *arguments: Any, **options: Any) -> Any:
    return find_measuring(kind)(*arguments, **options)


def _calibrate(device: str, folder: Path, processes: int) -> Any:
    from meshcast.experiments.render.terminal.published import progress
    from meshcast.validation.calibration.device.calibrate import calibrate

    return calibrate(device, folder, processes, progress)
