"""What is wrong where a run that ran is forecast over the memory of its GPUs.

A published run did fit. `open_plans` has tried every field that it leaves open, so a stated field, the profile or the
forecast of memory is wrong.
"""

from __future__ import annotations

from meshcast.hardware.units import GIB
from meshcast.simulator.report.report import Report
from meshcast.validation.published.rows import PublishedRun
from meshcast.validation.published.stacks import framework

MAX_NAMED = 2
"""Contents of the memory that a reason names."""


def explain_misfit(run: PublishedRun, report: Report) -> str:
    """Returns what may be wrong in the forecast of a run that does not fit in memory, as a phrase without a full
    stop."""
    program = run.spec.stack
    wrong = ["a stated field", "the memory model"]
    if (name := framework(program)) != program:
        wrong.insert(1, f"{name} in the place of {program}")
    peak = max(report.play.peaks, key=lambda stage: stage.total)
    largest = sorted(peak.by, key=lambda category: -peak.by[category])[:MAX_NAMED]
    held = ", ".join(f"{category} {peak.by[category] / GIB:,.0f} GiB" for category in largest)
    return f"no assumed field explains it: {', '.join(wrong[:-1])} or {wrong[-1]} is wrong ({held})"
