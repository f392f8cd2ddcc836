"""Progress of ``meshcast search`` on stderr: a bar on a terminal, else a line from time to time."""

from __future__ import annotations

import math
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from meshcast.experiments.render.terminal.say import say
from meshcast.experiments.search.frontier.certificate import Certificate
from meshcast.experiments.search.frontier.objectives import OF_RUNS
from meshcast.simulator.report.formatting import format_seconds

SECONDS_BETWEEN_LINES = 10.0
"""Time between two lines of progress where stderr is no terminal [s]."""


class SearchProgress:
    """Forecasts, the best plan and the gap so far: a bar on a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        self._terminal = sys.stderr.isatty()
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not self._terminal)
        self._began = self._written = time.monotonic()

    def __call__(self, certificate: Certificate) -> None:
        if not self._terminal:
            now = time.monotonic()
            if now - self._written >= SECONDS_BETWEEN_LINES:
                self._written = now
                say(f"meshcast: {now - self._began:,.0f} s: {describe_progress(certificate)}", err=True)
            return
        if not self.bar.task_ids:
            self.bar.start()
            self.bar.add_task("search", total=1.0)
        self.bar.update(
            self.bar.task_ids[0], description=describe_progress(certificate), completed=1.0 - certificate.gap
        )


def describe_progress(certificate: Certificate) -> str:
    if certificate.counting:
        return f"counting the plans: {certificate.plans:,} in {certificate.groups:,} groups"
    best = _describe_incumbent(certificate)
    if certificate.runs is not None:
        count = certificate.runs.simulated * certificate.runs.seeds
        return f"{certificate.exact:,} forecasts, {count:,} simulated runs, best {best}, gap {certificate.gap:.1%}"
    groups = f"{certificate.opened:,} of {certificate.groups:,} groups"
    return f"{groups}, {certificate.exact:,} forecasts, best {best}, gap {certificate.gap:.1%}"


def _describe_incumbent(certificate: Certificate) -> str:
    name = certificate.objectives[0]
    if not math.isfinite(certificate.incumbent if certificate.runs is not None else certificate.step):
        return "none yet"
    if certificate.runs is None or name not in OF_RUNS:
        return format_seconds(certificate.step)
    return f"{certificate.incumbent:,.4g}{' days' if name == 'days' else ''}"
