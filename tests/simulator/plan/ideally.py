"""Steps at one rate of FLOPs, with messages that take a latency and nothing else: for formulas by hand."""

from __future__ import annotations

from typing import Any

from meshcast.simulator.engine.play import PlayedStep, play
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.ir.ops import Transfer
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.report import Report
from tests.ideal_costs import IdealCosts

HOP = 1e-3
"""Latency of a message between stages [s]."""


def play_ideally(job: dict[str, Any]) -> PlayedStep:
    """Plays a step of a host that takes no time."""
    costs = IdealCosts(1e12)

    def price(work: Any) -> Any:
        return costs.estimate(work)._replace(latency=HOP if isinstance(work, Transfer) else 0.0)

    plain = {"name": "megatron-core", "set": {"launch_s": 0.0}}
    return play(build_program(resolve_plan(load_job({**job, "framework": plain})), price)[1])


def pass_seconds(step: PlayedStep) -> dict[tuple[int, str, int], float]:
    """Returns the seconds of a pass by stage, kind and class of the micro-batch."""
    pairs = zip(step.program.timetable.slots, step.program.tasks, strict=True)
    return {(slot.stage, slot.kind, slot.variant): float(task.sums[:, 0].sum()) for slot, task in pairs}


def answers(job: dict[str, Any] | Report) -> tuple[Any, ...]:
    """Returns what two forecasts of one step have in common, to the bit."""
    report = job if isinstance(job, Report) else simulate(job)
    memory = [peak.by for peak in report.play.peaks]
    parts = report.breakdown
    return report.step_time, report.tokens, report.mfu, report.hfu, parts.parts, parts.hidden, memory
