"""`meshcast check`: relations on drawn jobs, completeness of the data, and what a violation looks like."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.job.hardware_figures import hardware_figures
from meshcast.simulator.loading.load import load_job
from meshcast.validation.selfcheck import run as module
from meshcast.validation.selfcheck.completeness import COMPLETE
from meshcast.validation.selfcheck.drawn_jobs import draw_jobs
from meshcast.validation.selfcheck.relations import (
    OTHER_ORDER,
    RELATIONS,
    engines_agree,
    faster_is_not_slower,
    memory_grows_with_the_work,
    takes_its_flops,
)
from meshcast.validation.selfcheck.run import check_job, has_violations, run_checks
from tests.experiments.cli.samples import run


@pytest.mark.parametrize("name", COMPLETE)
def test_the_data_is_complete(name: str) -> None:
    assert list(COMPLETE[name]()) == []


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_relations_hold_for_drawn_jobs(seed: int) -> None:
    _hold(seed, 8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_relations_hold_for_many_drawn_jobs(seed: int) -> None:
    _hold(seed, 100)


@settings(max_examples=10 * settings.default.max_examples)
@given(st.integers(0, 2**32 - 1))
def test_twice_as_good_a_figure_of_the_hardware_is_never_slower(seed: int) -> None:
    described, job = next(draw_jobs(seed))
    shared = SharedWork()
    assert faster_is_not_slower(described, simulate(job, shared_work=shared), shared) == "", json.dumps(described)


def _hold(seed: int, jobs: int) -> None:
    shared = SharedWork()
    for described, _ in islice(draw_jobs(seed), jobs):
        for name, what, _ in check_job(described, shared):
            assert not what, f"{name}: {what}: {json.dumps(described)}"


def test_the_order_of_kernels_in_pairs_of_passes_depends_on_their_durations() -> None:
    """Twice the clock makes this step 0.019 % longer: its pairs are list-scheduled in another order."""
    network = {"kind": "infiniband", "gbps_per_gpu": 400}
    job = load_job(
        {
            "model": {"preset": "llama3-8b", "layers": 16},
            "cluster": {"gpu": "b200-sxm", "gpus": 64, "inter": network, "gpus_per_node": 8},
            "framework": {"name": "llm-foundry", "recipe": False},
            "batch": {"global": 32, "micro": 1, "sequence": 1024},
            "plan": {"tp": 4, "pp": 4, "dp": 4, "recompute": "selective", "zero": 1, "schedule": "dualpipe"},
        }
    )
    (clock,) = (figure for figure in hardware_figures(job) if figure.name == "clock")
    usual, faster = (forecast_step(one).step_time for one in (job, clock.change(job, 2.0)))
    assert 0 < faster / usual - 1 < OTHER_ORDER / 10


def test_drawn_jobs_are_the_same_for_a_seed_and_differ_in_what_people_choose() -> None:
    first, again, other = ([job for job, _ in islice(draw_jobs(seed), 100)] for seed in (1, 1, 2))
    assert first == again != other
    assert {job["plan"].get("schedule") for job in first} > {None, "1f1b"}
    assert {bool(job["model"].get("moe")) for job in first} == {True, False}
    assert {job["plan"]["tp"] for job in first} >= {1, 2, 4} and len({job["cluster"] for job in first}) > 10


def test_a_wrong_forecast_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    described, _ = next(draw_jobs(3))
    shared = SharedWork()
    report = simulate(described, shared_work=shared)
    assert takes_its_flops(described, report, shared) == ""
    wrong = _Changed(report, step_time=report.step_time * 1e-3)
    assert "at the peak rate" in takes_its_flops(described, wrong, shared)
    assert "SimPy, op by op: 0." in engines_agree(described, wrong, shared)
    assert "twice the micro-batch" in memory_grows_with_the_work(
        described, _Changed(report, peak_allocated=1e15), shared
    )


LLAMA = {"gated": True, "norm": "rmsnorm", "positions": "rope", "heads": 32, "hidden": 4096}


def test_other_orders_of_longer_passes_may_hold_less() -> None:
    described = {
        "model": LLAMA | {"layers": 4, "kv_heads": 32, "ffn": 8192, "vocab": 50304, "seq": 2048},
        "cluster": "hgx-h200:2",
        "framework": "torchtitan",
        "batch": {"global": 32, "micro": 2, "sequence": 2048},
        "plan": {"tp": 1, "pp": 2, "cp": 2, "recompute": "full", "schedule": "v-zb", "chunks": 2, "zero": 3},
    }
    shared = SharedWork()
    report = simulate(described, shared_work=shared)
    larger = described | {"batch": {"global": 64, "micro": 4, "sequence": 2048}}
    assert simulate(larger, shared_work=shared).peak_allocated < 0.97 * report.peak_allocated
    assert memory_grows_with_the_work(described, report, shared) == ""


@pytest.mark.parametrize("micro", [1, 2])
def test_paired_passes_copy_a_bucket_at_a_time_however_slow_the_network_is(micro: int) -> None:
    """The host of DeepSpeed's stage 3 makes the copy in which a bucket is reduced, and frees it, before it issues what
    is behind (`reduce_scatter_coalesced` of runtime/comm/coalesced_collectives.py)."""
    described = {
        "model": LLAMA | {"layers": 16, "kv_heads": 32, "ffn": 4096, "vocab": 50304, "seq": 1024},
        "cluster": "hgx-h800:2",
        "framework": "deepspeed",
        "precision": "fp8-delayed",
        "batch": {"global": 16 * micro, "micro": micro, "sequence": 1024},
        "plan": {"tp": 2, "pp": 4, "recompute": "full", "schedule": "dualpipe", "dp_scheme": "zero-infinity"},
    }
    report = simulate(described)
    gradients = (16 / 4 * 7 * 4096**2 + 50304 * 4096) / 2  # of a stage
    assert max(peak.by["buffers"] for peak in report.play.peaks) == pytest.approx(2 * (5e8 + gradients), rel=1e-3)
    assert memory_grows_with_the_work(described, report, SharedWork()) == ""


class _Changed:
    """A report with other figures."""

    def __init__(self, report: Any, **figures: Any) -> None:
        self.__dict__.update(figures)
        self._report = report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._report, name)


def test_a_crash_of_a_relation_is_a_row_with_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> str:
        raise ZeroDivisionError("a reason")

    monkeypatch.setitem(RELATIONS, "every number is finite", crash)
    row = next(row for row in run_checks(jobs=2, seed=5) if row["check"] == "every number is finite")
    assert len(row["violations"]) == 2 and has_violations([row])
    assert row["violations"][0]["what"] == "ZeroDivisionError: a reason"
    assert row["violations"][0]["job"]["plan"]


def test_the_command_prints_a_row_for_every_check() -> None:
    done = run("check", "--jobs", "3")
    assert done.exit_code == 0, done.output
    assert all(name in done.output for name in (*COMPLETE, *RELATIONS))
    answer = json.loads(run("check", "--jobs", "2", "--json").stdout)
    assert answer["violations"] == 0 and len(answer["checks"]) == len(COMPLETE) + len(RELATIONS)


def test_the_command_says_what_is_wrong_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Iterator[str]:
        yield "gpus/h100-sxm: it is not there"

    monkeypatch.setitem(COMPLETE, "the catalog loads", missing)
    monkeypatch.setattr(module, "RELATIONS", {})
    done = run("check", "--jobs", "1")
    assert done.exit_code == 1 and "the catalog loads: gpus/h100-sxm: it is not there" in done.output
