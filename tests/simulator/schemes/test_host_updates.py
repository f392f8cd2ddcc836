"""SuperOffload and ZenFlow: what hosts update, when, and what goes over their links."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.ir.ops import HostUpdate
from meshcast.validation.contract.played import Ideal, Played, play_job
from tests.draws import drawn_grid
from tests.simulator.schemes.small_jobs import GPT, copied, job_on

SUPER, ZEN, OFFLOAD = "data/super-offload", "data/zenflow", "data/zero-offload"
N = 4


def job(use: str, batches: int = 1, **options: Any) -> dict[str, Any]:
    """A small GPT on 4 ranks, at a host that launches kernels in no time."""
    more = {"framework": {"set": {"launch_s": 0.0, "step_overhead_s": 0.0}}}
    model = {**GPT, "seq": 32}
    return job_on({"dp": N}, {"use": use, "over": "dp", **options}, samples=N * batches, model=model, **more)


def host_updates(found: Played) -> list[int]:
    return [number for number, op in found.instances(0) if isinstance(op.work, HostUpdate) and "adam" in op.name]


def host_bytes(found: Played) -> int:
    works = [op.work for _, op in found.instances(0) if isinstance(op.work, HostUpdate) and "adam" in op.name]
    return sum(work.nbytes for work in works if isinstance(work, HostUpdate))


@pytest.mark.parametrize(("batches", "ratio"), drawn_grid([1, 3], [1.0, 0.4]))
def test_the_host_updates_units_while_others_compute(batches: int, ratio: float) -> None:
    """Once a step, each after its gradients; the weights come back behind the last update."""
    found = play_job(job(SUPER, batches, ratio=ratio))
    steps, times = host_updates(found), found.times
    passes = max(times.end[n] for n, op in found.instances(0) if op.phase in "BW" and op.stream == "compute")
    whole = play_job(job(OFFLOAD, batches))
    assert host_bytes(found) == pytest.approx(ratio * host_bytes(whole), rel=1e-3)
    assert len(steps) > 1 and times.begin[steps[0]] < passes
    (back,) = [n for n, op in found.instances(0) if op.name == "copy weights"]
    assert times.begin[back] >= max(times.end[n] for n in steps)


def test_clipped_gradients_wait_for_their_norm() -> None:
    found = play_job(job(SUPER, clips=True))
    (step,) = host_updates(found)
    assert found.times.begin[step] >= max(found.times.end[n] for n, op in found.instances(0) if op.name == "grad-norm")


def test_an_update_beside_the_backward_pass_shortens_the_step() -> None:
    early, late = (play_job(job(SUPER, clips=clips)) for clips in (False, True))
    assert host_bytes(early) == pytest.approx(host_bytes(late), rel=1e-3)
    assert max(early.times.end) < max(late.times.end)


@pytest.mark.parametrize(("ratio", "interval"), [(0.1, 4), (0.0, 1), (0.25, 10)])
def test_unimportant_columns_are_updated_once_in_an_interval(ratio: float, interval: int) -> None:
    """Gradients go out in every step, weights come back after an update; both without the selected columns."""
    zen, whole = play_job(job(ZEN, topk_ratio=ratio, update_interval=interval)), play_job(job(OFFLOAD))
    assert copied(zen, False) == pytest.approx((1 - ratio) * copied(whole, False), rel=1e-3)
    assert copied(zen, True) == pytest.approx((1 - ratio) / interval * copied(whole, True), rel=1e-2)
    assert host_bytes(zen) == pytest.approx((1 - ratio) / interval * host_bytes(whole), rel=1e-2)
    elements = zen.plan.job.model.parameters
    assert zen.resting(0)["optimizer"] == pytest.approx(12 * ratio * elements / N, rel=1e-3)


@pytest.mark.parametrize("interval", [1, 4])
def test_overlap_hides_what_is_shorter_than_the_passes(interval: int) -> None:
    """The step with overlap takes the longer of the update and of what runs beside it."""
    options = {"topk_ratio": 0.1, "update_interval": interval}
    price = Ideal(links=1e9)
    waits, overlaps = (play_job(job(ZEN, overlap_step=on, **options), price) for on in (False, True))
    (step,) = host_updates(waits)
    update = waits.times.end[step] - waits.times.begin[step]
    before, behind = max(waits.times.end), max(overlaps.times.end)
    assert behind == pytest.approx(max(update, before - update), rel=0.05)
