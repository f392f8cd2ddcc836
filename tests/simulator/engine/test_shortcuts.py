"""Shortcuts of the engines change no answer: skipped rounds, folded ranks, work shared between jobs. Plans of every
schedule, with schemes of all families, at the catalog's prices.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator import simulate
from meshcast.simulator.engine.per_rank import Pace, unfold
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.report.report import Report
from tests.strategies import EVERY, examples, jobs

SHOP = SharedWork()
"""Shared by all plans that are drawn."""


def peaks(report: Report) -> list[dict[str, float]]:
    return [peak.by for peak in report.play.peaks]


@examples(100)
@given(job=jobs(EVERY, launch=(0.0, 2e-6, 1e-4), passes=80))
def test_without_any_shortcut_the_step_and_its_memory_are_the_same(job: dict[str, Any]) -> None:
    """Op by op, every round, nothing shared with other jobs; and every rank by itself."""
    quick = simulate(job, shared_work=SHOP)
    plain = simulate(job, engine="sweep", skip=False, shared_work=SharedWork())
    assert quick.step_time == pytest.approx(plain.step_time, rel=1e-9)
    assert peaks(quick) == [pytest.approx(by, rel=1e-9) for by in peaks(plain)]
    plan = plain.play.plan
    by_rank = unfold(plain.play.program, plan.ranks.grids, Pace())
    assert by_rank.span == pytest.approx(plain.play.step.span, rel=1e-9)


@examples(40)
@given(job=jobs(EVERY, passes=40), engine=st.sampled_from(["simpy", "matrices"]))
def test_every_engine_plays_every_schedule_alike(job: dict[str, Any], engine: Any) -> None:
    one, other = simulate(job, engine="sweep"), simulate(job, engine=engine, skip=False)
    assert other.step_time == pytest.approx(one.step_time, rel=1e-9)
    parts, wanted = other.breakdown.parts, one.breakdown.parts
    assert parts == pytest.approx(wanted, rel=0, abs=1e-9 * one.step_time)
