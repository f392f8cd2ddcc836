"""Breakdown of a step: the parts that add up to it on the slowest device, and communication that is hidden."""

from __future__ import annotations

from meshcast.experiments.views import palette
from meshcast.hardware.records import dataclass
from meshcast.simulator.program.categories import EXPOSED
from meshcast.simulator.report.figures import parts_of_step
from meshcast.simulator.report.report import Report

STEP_GROUPS = {
    ("gemm",): palette.Looks("GEMMs", palette.BLUE),
    ("attention",): palette.Looks("attention", palette.SKY, "\\\\\\\\"),
    ("memory_bound",): palette.Looks("memory-bound kernels", palette.PINK, "...."),
    EXPOSED: palette.Looks("exposed communication", palette.GREEN, "----"),
    ("bubble",): palette.Looks("pipeline bubble", palette.STONE, "////"),
    ("optimizer", "host", "idle"): palette.Looks("optimizer, host, idle", palette.GREY, "xxxx"),
}
"""Groups of parts of a step by their keys, from the bottom of a curve up."""


@dataclass(frozen=True)
class BreakdownPart:
    """A part of a step [s].

    begin: sum of the parts before it.
    took: its duration.
    hidden: overlapped communication of the same axis.
    """

    begin: float
    took: float
    hidden: float = 0.0

    @property
    def end(self) -> float:
        return self.begin + self.took

    @property
    def is_empty(self) -> bool:
        return not (self.took or self.hidden)


def step_parts(report: Report) -> dict[str, BreakdownPart]:
    """Returns the parts that add up to the step, in the order of the page; rounding errors are set to zero."""
    hidden, least = report.breakdown.hidden, 1e-9 * report.step_time

    def clean(seconds: float) -> float:
        return float(seconds) if seconds > least else 0.0

    parts, begin = {}, 0.0
    for key, figure in parts_of_step().items():
        parts[key] = BreakdownPart(begin, clean(figure.compute(report) or 0.0), clean(hidden.get(key, 0.0)))
        begin = parts[key].end
    return parts


def group_shares(report: Report) -> list[float]:
    """Computes shares of the step by group, in the order of `STEP_GROUPS`; they add up to 1."""
    return [sum(report.parts[key] for key in keys) / report.step_time for keys in STEP_GROUPS]
