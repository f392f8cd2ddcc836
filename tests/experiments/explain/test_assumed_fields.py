"""What assumed fields are worth: which are listed, hand-computed effects, and forecasts of jobs that state them."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import yaml

from meshcast.experiments.explain.assumed_fields import (
    Alternative,
    AssumedFieldEffect,
    admitted_values,
    assumed_fields,
    forecast_alternatives,
)
from meshcast.hardware.units import GIB
from meshcast.simulator import load_job, simulate
from meshcast.simulator.forecast.shared_work import SharedWork

JOB: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": {"gpu": "h100-sxm", "gpus": 16},
    "batch": {"global": 16, "sequence": 4096},
    "plan": {"tp": 4, "pp": 2},
}


def names(job: dict[str, Any]) -> set[str]:
    return {field.name for field in assumed_fields(simulate(load_job(job)))}


def effect(job: dict[str, Any], name: str) -> AssumedFieldEffect:
    report = simulate(load_job(job))
    (field,) = (field for field in assumed_fields(report) if field.name == name)
    return forecast_alternatives(field, report, SharedWork())


def test_a_field_is_listed_until_the_job_states_it() -> None:
    open_fields = names(JOB)
    stated = {
        "framework.name": "megatron-core",
        "framework.set.overlap.dp": True,
        "framework.set.attention_library": "flash-3",
        "precision.compute": "bf16",
        "batch.micro": 1,
        "plan.recompute": "none",
        "plan.schedule": "1f1b",
        "cluster.inter.gbps_per_gpu": 400,
        "cluster.scale_up_domain": 8,
    }
    assert set(stated) <= open_fields
    changes = [f"{name}={yaml.safe_dump(value).splitlines()[0]}" for name, value in stated.items()]
    after = {field.name for field in assumed_fields(simulate(load_job(JOB, changes)))}
    assert after == open_fields - set(stated)


def test_counts_have_half_and_twice_as_alternatives() -> None:
    others = {field.name: field.others for field in assumed_fields(simulate(load_job(JOB)))}
    assert others["cluster.gpus_per_node"] == others["cluster.scale_up_domain"] == (4, 16)
    assert others["batch.micro"] == (2,)


def test_a_plan_in_long_form_leaves_only_options_open() -> None:
    plan = {"mesh": {"dp": 16}, "schemes": [{"use": "data/fsdp", "over": "dp", "reshard": True}]}
    found = {name for name in names({**JOB, "plan": plan}) if name.startswith("plan.")}
    options = ("backward_prefetch", "across_microbatches", "offload", "double_buffer")
    assert found == {f"plan.schemes.data/fsdp.{option}" for option in options}


def test_who_states_zero_has_stated_that_it_is_not_fsdp() -> None:
    assert "plan.fsdp" in names(JOB)
    assert {"plan.fsdp", "plan.zero"}.isdisjoint(names({**JOB, "plan": {"tp": 4, "pp": 2, "zero": 1}}))


def test_values_of_a_type() -> None:
    assert admitted_values(bool | None) == (False, True)
    assert admitted_values(Literal["a", "b"] | Literal[""]) == ("a", "b", "")
    assert admitted_values(float) == admitted_values(int | None) == ()


@pytest.mark.slow
def test_every_alternative_is_the_forecast_of_the_job_that_states_it() -> None:
    report, shared, of_changed = simulate(load_job(JOB)), SharedWork(), SharedWork()
    compared = 0
    for field in assumed_fields(report):
        if field.name.startswith(("plan.schemes.", "cluster.fabric")):  # the short form does not have them
            continue
        for other in forecast_alternatives(field, report, shared).alternatives:
            changes = [f"{field.name}={yaml.safe_dump(other.value).splitlines()[0]}"]
            changed = simulate(load_job(JOB, changes), shared_work=of_changed)
            assert other.step_time_s == changed.step_time, field.name
            assert (other.peak_device_gib, other.fits) == (changed.peak_device / GIB, changed.fits)
            compared += 1
    assert compared > 40


def test_effects_computed_by_hand() -> None:
    overhead = effect(JOB, "framework.set.step_overhead_s")
    assert [one.value for one in overhead.alternatives] == [0.0175, 0.07]
    assert overhead.step_effect_s == pytest.approx(0.035) and overhead.memory_effect_gib == 0
    context = effect(JOB, "framework.set.memory.context_gib")
    assert context.step_effect_s == 0 and context.memory_effect_gib == pytest.approx(2.0)
    # Two moments of 4 bytes become 2 bytes on one GPU, where nothing is left for blocks that the allocator caches.
    alone = {"model": "llama3-8b", "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 1}}
    parameters = load_job(alone).model.parameters
    moments = effect(alone, "precision.moments")
    assert moments.memory_effect_gib == pytest.approx(2 * 2 * parameters / GIB, rel=1e-3)


def test_what_the_hardware_rules_out_is_no_alternative() -> None:
    found = effect({**JOB, "cluster": {"gpu": "a100-sxm-80", "gpus": 16}}, "precision.compute")
    assert [one.value for one in found.alternatives] == ["fp16"]


def test_half_of_the_bisection_lengthens_what_crosses_it() -> None:
    job = {**JOB, "cluster": {"gpu": "h100-sxm", "gpus": 64}, "plan": {"fsdp": True}, "batch": {"global": 64}}
    (other,) = effect(job, "cluster.fabric.oversubscription").alternatives
    assert other.value == 2.0 and other.step_time_s >= simulate(load_job(job)).step_time
    assert "cluster.fabric.oversubscription" not in names({**JOB, "cluster": "dgx-h100:1", "plan": {"tp": 8}})


def test_a_field_without_an_alternative_has_no_effect() -> None:
    field = assumed_fields(simulate(load_job(JOB)))[0]
    nothing, both = (
        AssumedFieldEffect(field, 2.0, 9.0, others)
        for others in ((), (Alternative(1, 1.5, 12.0, True), Alternative(2, 2.2, 8.0, True)))
    )
    assert nothing.step_effect_s == nothing.memory_effect_gib == 0.0
    assert both.step_effect_s == 0.5 and both.memory_effect_gib == 3.0
