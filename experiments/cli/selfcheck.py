"""``meshcast check`` and ``predict --verify``: an installation, or one forecast, held against itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from meshcast.experiments.cli.best_plan import load_with_plan
from meshcast.experiments.cli.commands import VIOLATED
from meshcast.experiments.cli.console import AsJson, emit_or_show, track
from meshcast.experiments.cli.launch import LaunchFileOptions
from meshcast.experiments.options import argument, option
from meshcast.hardware.errors import PlanError

if TYPE_CHECKING:
    from meshcast.simulator.report.report import Report
    from meshcast.validation.selfcheck.replay import Replay

Verify = Annotated[
    bool,
    option(
        "--verify",
        "Replay the step on SimPy and rank by rank, and draw what SimPy did; exit with code 1 if they differ.",
    ),
]


def check_verify(verify: bool, engine: str) -> None:
    """Raises PlanError for a forecast that a replay cannot be held against."""
    if verify and engine == "shared":
        raise PlanError("--verify", "only SimPy plays contention (--engine shared)", "Leave one of both out")
    if verify and engine == "simpy":
        raise PlanError("--verify", "it holds another engine against SimPy", "Leave out --engine")


def verify_forecast(report: Report, verify: bool) -> tuple[Report, Sequence[Replay] | None]:
    """Returns the report that files are drawn from and the replays; without `verify` the forecast itself and None."""
    if not verify:
        return report, None
    from meshcast.validation.selfcheck.replay import replay

    return replay(report, track)


def end_verify(replays: Sequence[Replay] | None) -> None:
    """Ends the command with an exit code of its own if a replay differs from the forecast."""
    if not all(played.agrees for played in replays or ()):
        sys.exit(VIOLATED)


class CheckOptions(LaunchFileOptions):
    """Options of ``meshcast check``."""

    job: Annotated[
        Path | None, argument("JOB", "A job file (YAML or JSON), or a launch file; drawn jobs if not given.")
    ] = None
    jobs: Annotated[int | None, option("--jobs", "Jobs to draw; 50 if not given.", "N", min=1, max=100_000)] = None
    seed: Annotated[int | None, option("--seed", "Equal seeds draw equal jobs; 0 if not given.", "S")] = None
    plugins: Annotated[
        Path | None, option("--plugins", "Check the files of a folder of your own, whose code is run.", "FOLDER")
    ] = None
    as_json: AsJson = False


def check(options: CheckOptions) -> None:
    """Replays a job on SimPy and rank by rank; without one checks this installation: drawn jobs, complete data."""
    from meshcast.experiments.render.terminal.selfcheck import checks_page
    from meshcast.simulator import simulate
    from meshcast.validation.selfcheck.run import JOBS, check_report, has_violations, run_checks

    replays: Sequence[Replay] = ()
    if options.plugins is not None:
        if (options.job, options.jobs, options.seed) != (None, None, None):
            raise PlanError("check", "--plugins checks a folder, not jobs", "Leave the others out")
        from meshcast.experiments.planning.planner import find_planner
        from meshcast.validation.contract.of_plugins import check_plugin

        rows = check_plugin(options.plugins, {"planners": find_planner}, track)
    elif options.job is None:
        rows = run_checks(options.jobs or JOBS, options.seed or 0, track)
    elif (options.jobs, options.seed) != (None, None):
        raise PlanError("check", "it takes a JOB, or draws jobs with --jobs and --seed", "Leave one of both out")
    else:
        rows, replays = check_report(simulate(load_with_plan(options.job)), track)
    answer = {"checks": rows, "violations": sum(len(row["violations"]) for row in rows)}
    if options.job is not None:
        answer["replays"] = [played.to_dict() for played in replays]
    emit_or_show(options.as_json, answer, lambda: checks_page(rows, replays))
    if has_violations(rows):
        sys.exit(VIOLATED)
