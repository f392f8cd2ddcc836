"""Limits of a search against brute force: constraints, memory that stays free, measured combinations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.plan_search import has_memory
from meshcast.experiments.search.options import SearchOptions
from meshcast.experiments.search.search_job import open_search
from meshcast.simulator import simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.step import StepAndMemory
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.peak_errors import EVEN, RISK, peak_error_of
from meshcast.validation.published.measured_range.distance import distance_from_measured
from tests.draws import drawn
from tests.experiments.cli.samples import run
from tests.experiments.search.spaces import TINY, every_point, interrupt_if, is_accounted, open_space, points_of

points = cache(lambda: every_point(open_space(TINY), energy=False))
"""All plans of TINY with their forecasts, made once."""


def open_limited(job: dict[str, Any] = TINY, **options: Any) -> Search:
    return open_search(job, limits=SearchOptions(**options).limits)


def dp(point: dict[str, Any]) -> int:
    return 8 // (point["plan.tp"] * point["plan.pp"])


@pytest.mark.parametrize(
    ("where", "admits"),
    drawn(
        [
            (["plan.tp * plan.pp <= 2"], lambda point: point["plan.tp"] * point["plan.pp"] <= 2),
            (["plan.dp == 2", "batch.micro < 2"], lambda point: dp(point) == 2 and point["batch.micro"] < 2),
            (["plan.zero == 0 or plan.tp == 4"], lambda point: point["plan.zero"] == 0 or point["plan.tp"] == 4),
            (["plan.schedule == 'interleaved-1f1b'"], lambda point: point["plan.chunks"] == 2),
            (["plan.schedule == '1f1b'", "plan.chunks == 1"], lambda point: point["plan.chunks"] == 1),
            (["plan.chunks * layers >= 8"], lambda point: point["plan.chunks"] == 2),
            (["model.heads % plan.tp == 0", "gpus == 8"], lambda point: True),
            (["plan.recompute == 'none'", "batch.sequence == 2048", "not plan.fsdp"], lambda point: True),
        ],
        keep=3,
    ),
)
def test_a_constraint_excludes_what_violates_it(where: list[str], admits: Callable[[dict[str, Any]], bool]) -> None:
    kept = [forecast for changes, forecast in points() if admits(changes)]
    certificate = open_limited(where=where).run()
    best = min(forecast.step_time for forecast in kept if forecast is not None and forecast.fits)
    assert certificate.incumbent == pytest.approx(best, rel=1e-12) and certificate.gap == 0
    assert certificate.excluded == {"where": len(points()) - len(kept), "program": 0, "near_measured": 0}
    assert is_accounted(certificate) and certificate.plans == len(points())


def test_constraints_know_defaults_of_experts_orders_and_copies() -> None:
    def limit(where: str, **changes: Any) -> Any:
        return open_limited({**TINY, **changes}, where=[where]).space

    model, batch = {"preset": "mixtral-8x7b", "layers": 2}, {"global": 16, "sequence": 2048}
    space = limit("plan.etp <= 2", model=model, batch=batch, plan={"tp": 4, "ep": [1, 2], "etp": "auto"})
    assert [(group.ep, group.etp) for group in space.groups() if space.size(group)] == [(1, 1), (2, None), (2, 2)]
    space = limit("plan.pp == 1 or plan.order == 'dp-pp-cp-tp'", plan={"tp": 2, "pp": [1, 2], "order": "auto"})
    group = space.groups()[0]
    kept = [(pipeline.pp, pipeline.mesh_order) for pipeline in space.pipelines(group) if space.choices(group, pipeline)]
    assert kept == [(1, "pp-dp-cp-tp"), (2, "dp-pp-cp-tp")] and space.count_excluded(group)["where"] == 1
    plan = {"tp": 2, "pp": [1, 2], "zero": 1, "shard": "auto"}
    space = limit("plan.shard <= 4", cluster="dgx-h100:2", plan=plan)
    group = space.groups()[0]
    shards = [[step.shard for step in space.choices(group, pipeline)] for pipeline in space.pipelines(group)]
    assert shards == [[4], [None]]


@pytest.mark.parametrize(
    ("margin", "risk"), drawn([(0.25, EVEN), (0.6, EVEN), (0.75, 0.001), (0.8, RISK)], keep=lambda row: row[0] != 0.6)
)
def test_memory_stays_free(margin: float, risk: float) -> None:
    """The best of all points whose need, times what a risk asks for, lies within the share."""
    search = open_limited(memory_margin=margin, memory_risk=risk)
    certificate, loaded = search.run(), search.space.loaded
    room = peak_error_of(loaded.framework).ratio(1 - risk)
    capacity = loaded.cluster.gpu.program_memory * (1 - margin)
    steps = [step.step_time for _, step in points() if step is not None and step.held * room <= capacity]
    assert certificate.incumbent == pytest.approx(min(steps, default=math.inf), rel=1e-12)
    assert is_accounted(certificate) and certificate.plans == len(points())
    assert (certificate.memory_margin, certificate.memory_risk) == (margin, risk)


def test_a_plan_is_left_out_unless_its_risk_is_taken() -> None:
    batch = {"global": 1, "micro": 1, "sequence": 2048}
    job = {"model": {"preset": "llama3-8b", "layers": 14}, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": batch}
    risk = 1 - simulate({**job, "plan": {"tp": 1}}).fit.probability
    assert 0 < risk < EVEN
    for share, count in ((0.999, 0), (1.001, 1)):
        search = open_limited({**job, "plan": {"tp": 1, "recompute": ["none"]}}, memory_risk=share * risk)
        search.run()
        assert len(search.best) == count


def test_a_forecast_is_held_against_the_risk_and_the_margin() -> None:
    space = open_limited(memory_margin=0.5).space
    assert space.capacity * space.least_room == pytest.approx(0.5 * space.loaded.cluster.gpu.program_memory)
    for room, held, fits in ((1.001, 0.999, True), (0.999, 0.999, False), (1.001, 1.001, False)):
        forecast = StepAndMemory(1.0, 1.0, 1.0, held * space.capacity, room * space.least_room)
        assert has_memory(space, forecast) is fits


def test_only_measured_combinations_are_kept() -> None:
    space = open_space(TINY)
    plans = [resolve_plan(load_job(space.job_of(*point))) for point in points_of(space)]
    measured = [distance_from_measured(plan).measured for plan in plans]
    assert len(measured) == len(points()) and 0 < sum(measured) < len(measured)
    certificate = open_limited(near_measured=True).run()
    kept = [step.step_time for (_, step), near in zip(points(), measured, strict=True) if near and step and step.fits]
    assert certificate.incumbent == pytest.approx(min(kept), rel=1e-12)
    assert is_accounted(certificate) and certificate.plans == len(points())
    assert 0 < certificate.excluded["near_measured"] <= len(points()) - sum(measured)


def test_counts_of_an_interrupted_search_add_up() -> None:
    search = open_limited(where=["plan.tp < 4"], near_measured=True)
    certificate = search.run(interrupt_if(lambda certificate: certificate.opened == 1))
    assert not certificate.complete and certificate.excluded["where"] > 0 and is_accounted(certificate)


def test_the_page_counts_what_is_excluded(tmp_path: Path) -> None:
    (job := tmp_path / "job.yaml").write_text(yaml.safe_dump(TINY), "utf-8")
    limits = ["--where", "plan.tp < 4", "--where", "plan.pp < 8", "--memory-margin", "10%", "--near-measured"]
    words = " ".join(run("search", job, *limits).stdout.split())
    assert "by --where" in words and "margin 10.00% of the memory of every GPU stays free" in words
    assert "by --near-measured: nobody has run their combination" in words
