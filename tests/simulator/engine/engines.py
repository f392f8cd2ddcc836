"""One job played by every engine, and the check that all give the same answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from meshcast.simulator import simulate
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


def accounts(play: Forecast) -> list[Breakdown]:
    """The breakdown of every device."""
    program, step = play.program, play.step
    return [breakdown(program, step.span, step.occupancy(device), device) for device in range(program.devices)]


def check_alike(ways: list[Forecast]) -> None:
    """All agree with the first on the step, on where each device's time goes, and on memory."""
    first, *others = ways
    span, seconds, wanted = first.step.span, first.seconds, accounts(first)
    for account in wanted:
        assert math.fsum(account.parts.values()) == pytest.approx(span, rel=1e-9)
    for other in others:
        assert (other.step.span, other.seconds) == pytest.approx((span, seconds), rel=1e-9)
        for device, (account, of_first) in enumerate(zip(accounts(other), wanted, strict=True)):
            assert math.fsum(account.parts.values()) == pytest.approx(account.step, rel=1e-9)
            assert account.parts == pytest.approx(of_first.parts, rel=0, abs=1e-9 * span), device
            nothing = dict.fromkeys(account.hidden | of_first.hidden, 0.0)
            assert nothing | account.hidden == pytest.approx(nothing | of_first.hidden, rel=0, abs=1e-9 * span), device
        assert by_category(other) == by_category(first)


def by_category(play: Forecast) -> list[tuple[float, dict[str, float], float]]:
    return [(peak.total, peak.by, peak.left) for peak in play.peaks]


def simulate_by_engines(job: dict[str, Any]) -> list[Report]:
    """The job from file to report by every engine, lowered once."""
    shared = SharedWork()
    return [simulate(job, engine=engine, skip=skip, shared_work=shared) for engine, skip in WAYS]


def check_reports(job: dict[str, Any]) -> None:
    """The whole way from job to report, at the catalog's prices, by every engine."""
    first, *others = simulate_by_engines(job)
    check_alike([report.play for report in (first, *others)])
    for report in (first, *others):
        parts, seconds = report.breakdown.parts, report.play.seconds
        assert sum(parts.values()) == pytest.approx(seconds, rel=1e-9) and min(parts.values()) >= 0
        assert report.step_time == pytest.approx(first.step_time, rel=1e-9)
        assert parts == pytest.approx(first.breakdown.parts, rel=0, abs=2e-9 * seconds)
        assert report.first_steps(4) == pytest.approx(first.first_steps(4), rel=1e-8)
        assert report.device == first.device
        assert report.sigma == pytest.approx(first.sigma, rel=1e-6)


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
