"""``meshcast import failure-log``: rates of failures fitted to a log, as keys of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshcast.experiments.cli.console import check_place, emit, writing
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.documents.document import to_yaml
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import to_line

if TYPE_CHECKING:
    from meshcast.simulator.runs.failure_log import FittedRate, ObservedLog

SIGNIFICANT = 1.92
"""Gain in log-likelihood from which a Weibull distribution is written: half of the 95 % quantile of chi-squared."""


def import_failure_log(file: Path, gpus: int | None, out: Path | None, as_json: bool) -> None:
    """Prints the key `run.failures` of a job, or writes it into a file; with --json also the fits.

    gpus: number of GPUs that the log is of; None: the rates are those of the job as a whole.
    """
    from meshcast.simulator.runs.failure_log import fit_rates, read_failure_log

    log = read_failure_log(file)
    rates = fit_rates(log)
    failures = {"rates": "none", "components": {rate.component: make_component(rate, log, gpus) for rate in rates}}
    fragment = {"run": {"failures": failures}}
    if out is not None:
        check_place(out, "--out")
        with writing(out, "--out"):
            write_file(out, _render(fragment, rates))
    if as_json:
        emit({**fragment, "observed_hours": log.observed / 3600, "fits": [describe_fit(rate) for rate in rates]})
    elif out is None:
        print(_render(fragment, rates), end="", flush=True)
    else:
        say(f"wrote {out}: {len(rates)} components", err=True)


def make_component(rate: FittedRate, log: ObservedLog, gpus: int | None) -> dict[str, Any]:
    """Returns a component of `run.failures.components`. Gaps of many GPUs do not show the shape of one."""
    failures = [failure for failure in log.failures if failure.component == rate.component]
    component: dict[str, Any] = {"per": "gpu" if gpus else "job", "mtbf_hours": rate.mtbf * (gpus or 1) / 3600}
    if gpus is None and rate.gain > SIGNIFICANT:
        component["shape"] = min(max(rate.shape, 0.2), 20.0)
    if sum(bool(failure.nodes) for failure in failures) * 2 < len(failures):
        component["loses"] = "nothing"
    return component


def describe_fit(rate: FittedRate) -> dict[str, Any]:
    """Returns a fit in hours, for ``--json``."""
    return {
        "component": rate.component,
        "failures": rate.failures,
        "mtbf_hours": rate.mtbf / 3600,
        "mtbf_interval_90_hours": [rate.low / 3600, rate.high / 3600],
        "weibull_shape": rate.shape,
        "weibull_scale_hours": rate.scale / 3600,
        "log_likelihood_gain": rate.gain,
    }


def _render(fragment: dict[str, Any], rates: list[FittedRate]) -> str:
    notes = "".join(
        f"# {to_line(rate.component)}: {rate.failures} failures, one in {rate.mtbf / 3600:.4g} hours "
        f"({rate.low / 3600:.4g} to {rate.high / 3600:.4g}); Weibull shape {rate.shape:.3g}, "
        f"log-likelihood {rate.gain:+.2f}\n"
        for rate in rates
    )
    return notes + to_yaml(fragment)
