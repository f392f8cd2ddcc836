"""Forecasts of a source without what it has set: its fits are replaced, and what code and logs state stays."""

from __future__ import annotations

import pytest

from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.framework import framework_names, load_framework
from meshcast.simulator.report.report import Report
from meshcast.validation.published.fit.own_fits import OWN_FITS, forecast_without_fits, has_own_fits
from meshcast.validation.published.open_plans import forecast_run
from meshcast.validation.published.rows import PublishedHardware, PublishedRun
from tests.validation.published.runs import row as published

OPEN = {"shard_group": None, "batch__global": 192, "cuda_graphs": None}
PROFILES = {"bloom": "megatron-deepspeed", "foundry": "llm-foundry"}


def forecast_both(run: PublishedRun) -> tuple[Report, Report]:
    shared = SharedWork()
    return forecast_run(run, shared)[1], forecast_without_fits(run, shared)


def test_facts_of_a_program_and_a_cluster_stay() -> None:
    of = {"id": "bloom-1", "hardware": PublishedHardware(inter="Jean Zay, Omni-Path")}
    on_jean_zay = {"stack": "megatron-deepspeed", "gpu": "a100-sxm-80", "gpus": 192, "mesh__dp": 24}
    whole, without = forecast_both(published(of=of, **on_jean_zay, precision="fp16", **OPEN))
    own, left = whole.job.framework, without.job.framework
    assert left.name == own.name and left.launch_blocking and own.launch_blocking
    changed = {name for name in type(own).model_fields if getattr(own, name) != getattr(left, name)}
    assert changed == {"launch_s", "step_overhead_s", "rates"}
    assert left.rates["memory_bound"] == own.rates["memory_bound"]  # of other sources
    assert left.launch_s == pytest.approx(140e-6) and left.step_overhead_s == pytest.approx(0.035)
    # The rate of NVLink was fitted to the steps of this source; its network was not.
    assert whole.job.cluster.node.name == "jean-zay-a100" != without.job.cluster.node.name


def test_fits_of_one_architecture_stay_on_others() -> None:
    for gpu, is_changed in (("a100-sxm-80", False), ("h100-sxm", True)):
        run = published(stack="llm-foundry", gpu=gpu, sequence_parallel=False).model_copy(update={"id": "foundry-1"})
        whole, without = forecast_both(run)
        assert ("attention" in without.job.framework.rates) == is_changed
        # Bytes of its kernels are counted in its code, so they stay.
        assert without.job.framework.rates["memory_bound"] == whole.job.framework.rates["memory_bound"] == 1.8
        assert without.job.framework.attention_library == "triton"


def test_every_fit_to_one_source_is_replaced() -> None:
    assert set(PROFILES) | {"mlperf"} == set(OWN_FITS) and set(PROFILES.values()) <= set(framework_names())
    for source, name in PROFILES.items():
        replaced = {own.field for own in OWN_FITS[source]}
        assert set(load_framework(name).fitted) - {"memory"} <= replaced


def test_a_source_without_fits_of_its_own_has_nothing_to_forget() -> None:
    assert not has_own_fits(published()) and has_own_fits(published().model_copy(update={"id": "foundry-1"}))
