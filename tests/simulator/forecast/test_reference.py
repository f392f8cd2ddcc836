"""A reference that reads every micro-batch, as in DPO: its time, its memory, and which jobs can have one."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.phases import list_phases
from tests.draws import drawn_grid

SHARED = SharedWork()
MODEL = {"layers": 2, "hidden": 512, "heads": 8, "vocab": 4096, "seq": 512}
PLANS: dict[str, dict[str, Any]] = {
    "alone": {},
    "fsdp": {"fsdp": True, "recompute": "full"},
    "pipeline": {"pp": 2, "tp": 2, "zero": 1},
}


def job(plan: str, **train: Any) -> dict[str, Any]:
    gpus = 1 if plan == "alone" else 4
    return {
        "model": MODEL,
        "cluster": {"gpu": "h100-sxm", "gpus": gpus, "gpus_per_node": 8},
        "framework": {"name": "hf-trainer", "set": {"step_overhead_s": 0.01}},
        "batch": {"global": 16, "micro": 2},
        "plan": PLANS[plan],
        **({"train": train} if train else {}),
    }


@pytest.mark.parametrize(("plan", "mode"), drawn_grid(PLANS, ["full", "lora"]))
def test_a_reference_adds_a_forward_pass(plan: str, mode: str) -> None:
    """Its account adds up, and so do its FLOPs; the constant time of a step comes once."""
    train = {} if mode == "full" else {"mode": mode}
    kinds = (train, {"mode": "forward-only"}, train | {"reference": True})
    alone, passes, both = (simulate(job(plan, **fields), shared_work=SHARED) for fields in kinds)
    assert both.step_time == pytest.approx(alone.step_time + passes.step_time - 0.01, rel=1e-9)
    assert sum(both.parts.values()) == pytest.approx(both.step_time, rel=1e-9)
    for figures in ("hfu", "mfu"):
        done = [getattr(report, figures) for report in (alone, passes, both)]
        shares = [share["causal"] if isinstance(share, dict) else share for share in done]
        work = [share * report.step_time for share, report in zip(shares, (alone, passes, both), strict=True)]
        assert work[2] == pytest.approx(work[0] + work[1], rel=1e-9)
    assert both.energy.kwh > alone.energy.kwh


@pytest.mark.parametrize("plan", PLANS)
def test_a_copy_holds_its_weights_and_adapters_that_are_off_none(plan: str) -> None:
    references = ({"reference": name} for name in (None, "adapters-off", "model"))
    kinds = (*({"mode": "lora", **reference} for reference in references), {"mode": "forward-only"})
    alone, off, copy, passes = (simulate(job(plan, **train), shared_work=SHARED) for train in kinds)
    weights = [states["parameters"] for states in passes.play.resting]
    for device, added in enumerate(weights):
        held = [report.play.resting[device]["parameters"] for report in (alone, off, copy)]
        assert held[1] == held[0] and held[2] == pytest.approx(held[0] + added)
    assert off.step_time == copy.step_time
    assert copy.peak_allocated >= off.peak_allocated + min(weights) * 0.99
    assert off.peak_allocated >= alone.peak_allocated
    assert forecast_step(job(plan, mode="lora", reference="model")).peak_allocated == copy.peak_allocated


def test_the_passes_of_a_reference_hold_what_waits_for_the_backward_pass() -> None:
    """And their own logits, as a phase of its own."""
    wide = job("alone", mode="lora", reference=True) | {"model": MODEL | {"layers": 1, "vocab": 200_000}}
    report = simulate(wide)
    totals = {phase.name: phase.total for phase in list_phases(report.play)}
    logits = 2 * 512 * 200_000 * 2
    assert totals["reference"] > sum(report.play.resting[0].values()) + report.play.peaks[0].by["activations"] + logits
    assert totals["reference"] <= max(totals.values()) == report.peak_allocated


def test_what_a_reference_is_without_a_word() -> None:
    assert load_job(job("alone", reference=True)).train.reference == "model"
    assert load_job(job("alone", mode="lora", reference=True)).train.reference == "adapters-off"
    assert load_job(job("alone", reference=False)).train.reference is None
    loaded = load_job(job("alone", mode="lora", reference="model"))
    assert load_job(loaded.to_dict()).train == loaded.train
