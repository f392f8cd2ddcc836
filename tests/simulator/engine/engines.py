"""One job played by every engine, and the check that all give the same answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.engine.peak_memory import Peak
from meshcast.simulator.engine.play import Engine
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import play_forecast
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.program.block import Price
from meshcast.simulator.report.breakdown import Breakdown, breakdown
from meshcast.simulator.report.report import Forecast, Report

WAYS: tuple[tuple[Engine, bool], ...] = (("simpy", True), ("sweep", True), ("matrices", True), ("matrices", False))
"""Engines, each with or without skipping what repeats itself."""

LAUNCH = (0.0, 2e-6, 1e-4, 5e-3)
"""Seconds of the host an op."""


def accounts(found: Forecast) -> Iterator[Breakdown]:
    """The breakdown of every device."""
    for device in range(found.program.devices):
        yield breakdown(found.program, found.step.span, found.step.occupancy(device), device)


def check_alike(ways: list[Forecast]) -> None:
    """All agree with the first on the step, on where each device's time goes, and on memory."""
    first = ways[0]
    step = first.step.span
    wanted = list(accounts(first))
    for account in wanted:
        assert math.fsum(account.parts.values()) == pytest.approx(step, rel=1e-9)
    for other in ways[1:]:
        assert other.step.span == pytest.approx(step, rel=1e-9)
        for device, (one, account) in enumerate(zip(accounts(other), wanted, strict=True)):
            assert math.fsum(one.parts.values()) == pytest.approx(one.step, rel=1e-9)
            assert one.parts == pytest.approx(account.parts, rel=0, abs=1e-9 * step), device
            hidden = dict.fromkeys(one.hidden | account.hidden, 0.0)
            assert hidden | one.hidden == pytest.approx(hidden | account.hidden, rel=0, abs=1e-9 * step), device
        assert by_category(other.peaks) == by_category(first.peaks)


def by_category(peaks: Any) -> list[tuple[float, dict[str, float], float]]:
    assert all(isinstance(peak, Peak) for peak in peaks)
    return [(peak.total, peak.by, peak.left) for peak in peaks]


def simulate_by_engines(job: dict[str, Any]) -> list[Report]:
    """The job from file to report by every engine, lowered once."""
    shared = SharedWork()
    return [simulate(job, engine=engine, skip=skip, shared_work=shared) for engine, skip in WAYS]


def check_reports(job: dict[str, Any]) -> None:
    """The whole way from job to report, at the catalog's prices, by every engine."""
    found = simulate_by_engines(job)
    check_alike([report.play for report in found])
    for report in found[1:]:
        assert report.step_time == pytest.approx(found[0].step_time, rel=1e-9)
        assert report.device == found[0].device
        assert report.sigma == pytest.approx(found[0].sigma, rel=1e-6)


def play_by_engines(job: dict[str, Any], price: Price, ways: Sequence[tuple[Engine, bool]] = WAYS) -> list[Forecast]:
    """The job at given prices by every engine, lowered once."""
    plan = resolve_plan(load_job(job), price=price)
    stages, program = build_program(plan, price)
    return [play_forecast(plan, stages, program, engine=engine, skip=skip) for engine, skip in ways]


def on_catalog(job: dict[str, Any], node: str) -> dict[str, Any]:
    """The same job with so many times its data-parallel ranks that they fill whole nodes of eight GPUs."""
    mesh, views = job["plan"]["mesh"], job["plan"]["views"]
    gpus = math.prod(mesh.values())
    more = math.lcm(gpus, 8) // gpus
    batch = {**job["batch"], "global": job["batch"]["global"] * more}
    wider = {name: {**view, "edp": view["edp"] * more} for name, view in views.items()}
    plan = {**job["plan"], "mesh": {**mesh, "dp": mesh["dp"] * more}, "views": wider}
    return {**job, "cluster": f"{node}:{gpus * more // 8}", "batch": batch, "plan": plan}
