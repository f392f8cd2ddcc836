"""Steps rank by rank: equal ranks are the folded step; different ones wait for each other where they meet."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator import simulate
from meshcast.simulator.engine.per_rank import Pace, unfold
from meshcast.simulator.scheduling import list_scheduler
from meshcast.simulator.scheduling.list_scheduler import reorder_at_run_time
from meshcast.validation.contract.played import Ideal, Played, play_job
from tests.draws import drawn_grid
from tests.simulator.engine.test_heterogeneous_ranks import by_hand
from tests.strategies import EVERY_EXAMPLE, examples

PRICE = Ideal(flops=1e9, memory=1e10, links=1e7, latency=1e-5)


def plan(pp: int = 1, dp: int = 1, tp: int = 1, data: str = "zero-1", **noise: Any) -> dict[str, Any]:
    schemes = [("pipeline/1f1b", "pp"), (f"data/{data}", "dp"), ("tensor/megatron-sp", "tp")]
    entries = [{"use": use, "over": over} for use, over in schemes]
    return {
        "model": {"layers": 4, "hidden": 32, "heads": 4, "vocab": 64, "seq": 16},
        "cluster": {"gpu": "h100-sxm", "gpus": pp * dp * tp},
        "framework": {"set": {"launch_s": 0.0}},
        "batch": {"global": 4 * dp},
        "plan": {"mesh": {"pp": pp, "dp": dp, "tp": tp}, "schemes": entries},
        **({"noise": noise} if noise else {}),
    }


def varuna(pp: int, **job: Any) -> dict[str, Any]:
    """A job whose devices decide at run time."""
    schemes = [{"use": "pipeline/varuna", "over": "pp"}, {"use": "memory/recompute-full"}]
    return plan(pp) | {"plan": {"mesh": {"pp": pp}, "schemes": schemes}} | job


def spans(played: Played, pace: Pace, steps: int = 1) -> list[float]:
    plan = played.plan
    return [unfold(played.program, plan.ranks.grids, pace, step).span for step in range(steps)]


@pytest.mark.parametrize(
    ("degrees", "data"),
    drawn_grid([(2, 2, 2), (1, 3, 2), (4, 1, 2), (2, 3, 1)], ["zero-1", "fsdp", "ddp"])[:: 1 if EVERY_EXAMPLE else 2],
)
def test_ranks_synchronise_in_collectives_and_messages(degrees: tuple[int, int, int], data: str) -> None:
    played = play_job(plan(*degrees, data=data), PRICE)
    for pace in (Pace(jitter=0.3, seed=7), Pace(0.2, 0.5, 3.0, 11, 0.3)):
        by_rank, _ = by_hand(played.plan, played.program, played.flat, pace)
        assert spans(played, pace) == [pytest.approx(by_rank, rel=1e-12)]


def test_draws_depend_on_the_seed_and_the_step_alone() -> None:
    """Stragglers are drawn for each step, or once."""
    played = play_job(plan(2, 2, 2), PRICE)
    first, same, other = (spans(played, Pace(jitter=0.1, seed=seed), 3) for seed in (1, 1, 2))
    assert first == same and first != other and len(set(first)) == 3
    for persistent in (False, True):
        pace = Pace(stragglers=0.3, slow=2.0, seed=4, persistent=persistent)
        factors, *others = (np.array(pace.always([(8, 8)] * 2, step)) for step in range(4))
        assert [bool((factors == other).all()) for other in others] == [persistent] * 3
        assert ((factors == 2.0) | (factors == 1.0)).all() and 0.1 < (factors == 2.0).mean() < 0.5


def test_collectives_have_a_jitter_of_their_own() -> None:
    """By default as much as kernels; it lengthens a step of which communication is exposed."""
    job = plan(1, 4, 1, data="ddp")
    job["framework"]["set"]["overlap"] = {"dp": False}

    def times(**noise: Any) -> list[float]:
        return simulate(job | {"noise": {"steps": 4, **noise}}).step_times

    none, only, both = times(), times(communication_jitter=0.5), times(jitter=0.5)
    assert len(set(none)) == 1 and len(set(only)) == 4
    assert times(jitter=0.5, communication_jitter=0.5) == both != times(jitter=0.5, communication_jitter=0.0)


def test_a_straggler_slows_all_but_only_where_they_wait_for_it() -> None:
    """Of two replicas the other one waits at the gradients; its own kernels take as long as before."""
    played = play_job(plan(1, 2, 1, data="ddp"), PRICE)
    seed = next(seed for seed in range(50) if Pace(stragglers=0.5, slow=2.0, seed=seed).always([(2, 1)])[0].sum() == 3)
    step = unfold(played.program, played.plan.ranks.grids, Pace(stragglers=0.5, slow=2.0, seed=seed))
    quick, slow = sorted(step.busy[0].ravel().tolist())
    assert slow == pytest.approx(2 * quick)
    waits = step.waited[0].ravel()[np.argsort(step.busy[0].ravel())]
    assert waits[0] > 0.4 * slow and waits[1] == 0
    assert step.span == pytest.approx(played.times.span + slow - quick, rel=0.02)


@examples(20)
@given(jitter=st.floats(0.01, 0.5), seed=st.integers(0, 1000))
def test_a_step_lasts_as_long_as_the_busiest_rank_computes_or_longer(jitter: float, seed: int) -> None:
    played = play_job(plan(2, 2, 1), PRICE)
    step = unfold(played.program, played.plan.ranks.grids, Pace(jitter=jitter, seed=seed))
    assert step.span >= max(busy.max() for busy in step.busy) * (1 - 1e-12)
    assert all((waited >= 0).all() for waited in step.waited)


def test_a_report_states_the_cost_of_unequal_ranks() -> None:
    report, plain = simulate(plan(2, 2, 2, jitter=0.1, steps=5, seed=3)), simulate(plan(2, 2, 2))
    assert report.step_time == plain.step_time and not plain.steps
    noise, times = report.to_dict()["noise"], np.array(report.step_times)
    assert noise["step_times_s"] == times.tolist() and len(times) == 5
    assert (noise["median_s"], noise["mean_s"]) == pytest.approx((np.median(times), times.mean()))
    assert noise["mean_error_s"] == pytest.approx(times.std(ddof=1) / math.sqrt(5))
    assert noise["over_equal_ranks"] > 1 and 0 <= noise["slowest_rank"] < 8
    assert noise["its_kernels_s"] > noise["mean_kernels_s"] > 0
    assert report.to_dict()["job"]["noise"]["steps"] == 5
    assert "noise" not in plain.to_dict() and "noise" not in plain.to_dict()["job"]
    assert simulate(plan(2, 2, 2, jitter=0.2)).to_dict()["noise"]["mean_error_s"] is None


def test_the_slowest_rank_has_the_number_of_the_mesh() -> None:
    """Rank numbers are row-major over the axes of the plan, wherever the pipeline stands among them."""
    job = plan(2, 2, 2, stragglers=0.2, slow=4.0, seed=1)
    for mesh in ({"pp": 2, "dp": 2, "tp": 2}, {"dp": 2, "pp": 2, "tp": 2}):
        job["plan"]["mesh"] = mesh
        report = simulate(job)
        rank, sizes = report.to_dict()["noise"]["slowest_rank"], list(mesh.values())
        place = dict(zip(mesh, np.unravel_index(rank, sizes), strict=True))
        busy = np.array(report.steps[0].busy)
        assert busy[place["pp"], place["dp"], place["tp"]] == busy.max()
        assert math.prod(sizes) == busy.size


@pytest.mark.slow
def test_devices_that_decide_at_run_time_lose_less_to_noise() -> None:
    """Varuna goes on with forward passes where the order would have it wait."""
    job = varuna(4, batch={"global": 24})
    report = simulate(job | {"noise": {"jitter": 0.4, "steps": 12}})
    run = report.play.program, report.play.plan.ranks.grids, Pace(jitter=0.4)
    fixed = np.array([unfold(*run, step).span for step in range(12)])
    free = np.array([step.span for step in report.steps])
    assert free.mean() < fixed.mean() and (free < fixed * (1 - 1e-9)).sum() > 6
    still = simulate(job | {"noise": {"steps": 1}})
    assert still.step_times[0] <= still.step_time, "passes do not last whole slots, so some waits are filled even so"


def test_devices_that_decide_at_run_time_know_how_long_messages_last(monkeypatch: pytest.MonkeyPatch) -> None:
    hops: list[float] = []

    def note_hop(*of: Any) -> Any:
        hops.append(of[-1])
        return reorder_at_run_time(*of)

    monkeypatch.setattr(list_scheduler, "reorder_at_run_time", note_hop)
    report = simulate(varuna(2, noise={"steps": 1}))
    flat, times = report.play.step.flat, report.play.step.times
    lasting = max(times.arrival[n] - times.begin[n] for n, _, _ in flat.sent)
    assert len(report.step_times) == len(hops) == 1 and hops == pytest.approx([lasting])
