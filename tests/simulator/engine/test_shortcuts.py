"""Shortcuts of the engines change no answer: skipped rounds, folded ranks, work shared between jobs. Plans of every
schedule, with schemes of all families, at the catalog's prices.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from meshcast.simulator import simulate
from meshcast.simulator.engine.per_rank import Pace, unfold
from meshcast.simulator.forecast.shared_work import SharedWork
from tests.strategies import EVERY, examples, jobs

SHOP = SharedWork()
"""Shared by all plans that are drawn."""


@examples(60, daily=2)
@given(job=jobs(EVERY, launch=(0.0, 2e-6, 1e-4), passes=80))
def test_without_any_shortcut_the_step_and_its_memory_are_the_same(job: dict[str, Any]) -> None:
    """Op by op, every round, nothing shared with other jobs; and every rank by itself, also if all are as slow."""
    quick = simulate(job, shared_work=SHOP)
    plain = simulate(job, engine="sweep", skip=False, shared_work=SharedWork())
    assert quick.step_time == pytest.approx(plain.step_time, rel=1e-9)
    wanted = [pytest.approx(peak.by, rel=1e-9) for peak in plain.play.peaks]
    assert [peak.by for peak in quick.play.peaks] == wanted
    run, span = (plain.play.program, plain.play.plan.ranks.grids), plain.play.step.span
    assert unfold(*run, Pace()).span == pytest.approx(span, rel=1e-9)
    assert span * (1 - 1e-9) <= unfold(*run, Pace(stragglers=1.0, slow=2.0)).span <= 2 * span * (1 + 1e-9)
