"""`meshcast check`: relations on drawn jobs, completeness of the data, and what a violation looks like."""

from __future__ import annotations

import json
import random
from itertools import count, islice
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast import hardware
from meshcast.hardware.errors import CatalogError
from meshcast.hardware.load import load
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Memory, Transfer
from meshcast.simulator.job.hardware_figures import hardware_figures
from meshcast.simulator.loading.load import load_job
from meshcast.validation.selfcheck import completeness, relations
from meshcast.validation.selfcheck import run as module
from meshcast.validation.selfcheck.completeness import COMPLETE
from meshcast.validation.selfcheck.drawn_jobs import OTHER_SCHEDULES, SCHEDULES, draw_job, draw_jobs
from meshcast.validation.selfcheck.relations import (
    OTHER_ORDER,
    RELATIONS,
    _turn,
    engines_agree,
    faster_is_not_slower,
    memory_grows_with_the_work,
    order_of_keys_is_nothing,
    takes_its_flops,
)
from meshcast.validation.selfcheck.run import check_job, has_violations, run_checks
from tests.draws import drawn
from tests.experiments.cli.samples import run


@pytest.mark.parametrize("name", COMPLETE)
def test_the_data_is_complete(name: str) -> None:
    assert list(COMPLETE[name]()) == []


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in range(20)])
def test_relations_hold_for_drawn_jobs(seed: int) -> None:
    """Eight of each seed; `test_the_command_prints_a_row_for_every_check` holds them for two."""
    _hold(seed, 8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_relations_hold_for_many_drawn_jobs(seed: int) -> None:
    _hold(seed, 100)


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
    usual, faster = (forecast_step(changed).step_time for changed in (job, clock.change(job, 2.0)))
    assert 0 < faster / usual - 1 < OTHER_ORDER / 10


def test_drawn_jobs_are_the_same_for_a_seed_and_differ_in_what_people_choose() -> None:
    first, again, other = ([next(draw_jobs(seed))[0] for seed in seeds] for seeds in ((1, 2), (1, 2), (3, 4)))
    assert first == again != other
    jobs = [draw_job(random.Random(seed)) for seed in range(1000)]
    plans, models = [job["plan"] for job in jobs], [job["model"] for job in jobs]
    assert {plan.get("schedule") for plan in plans} == {None, *SCHEDULES, *OTHER_SCHEDULES}
    assert {(plan.get("zero"), plan.get("fsdp")) for plan in plans} == {
        (None, None), (0, None), (2, None), (3, None), (None, True),
    }  # fmt: skip
    assert {plan["tp"] for plan in plans} == {1, 2, 4, 8} and len({job["cluster"] for job in jobs}) > 30
    assert {model["vocab"] for model in models} == {32000, 50304, 128256}, "of Llama 2 and 3, and of GPT"
    assert {model["hidden"] // model["heads"] for model in models} == {64, 128}
    assert {bool(model.get("moe")) for model in models} == {True, False}


def test_a_wrong_forecast_is_a_violation() -> None:
    described, _ = next(draw_jobs(3))
    shared = SharedWork()
    report = simulate(described, shared_work=shared)
    assert takes_its_flops(described, report, shared) == ""
    wrong = _Changed(report, step_time=report.step_time * 1e-3)
    assert "at the peak rate" in takes_its_flops(described, wrong, shared)
    assert "SimPy, op by op: 0." in engines_agree(described, wrong, shared)
    heavy = _Changed(report, peak_allocated=1e15)
    assert "twice the micro-batch" in memory_grows_with_the_work(described, heavy, shared)


def test_keys_in_another_order_are_the_same_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, also those in lists; what then comes out otherwise is a violation."""
    job = {"model": {"layers": 2, "hidden": 64}, "plan": {"schemes": [{"use": "data/ddp", "over": "dp"}]}}
    turned = _turn(job)
    assert turned == job and list(turned) == ["plan", "model"] and list(turned["model"]) == ["hidden", "layers"]
    assert list(turned["plan"]["schemes"][0]) == ["over", "use"]
    forecast = SimpleNamespace(step_time=1.0, peak_device=2.0)
    monkeypatch.setattr(relations, "simulate", lambda described, shared_work: forecast)
    for changed, words in (({}, ""), ({"step_time": 1.5}, "1.0 s with keys in reverse, 1.5 s as written")):
        report: Any = SimpleNamespace(**{**vars(forecast), **changed})
        assert order_of_keys_is_nothing(job, report, SharedWork()) == words


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


@pytest.mark.parametrize("micro", drawn([1, 2], keep=2))
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
    """On a clock that moves on by a second whenever it is read: a check of no job takes one, two jobs take two."""

    def crash(*_: Any) -> str:
        raise ZeroDivisionError("a reason")

    clock = count(100.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(module, "RELATIONS", {"every number is finite": crash})
    monkeypatch.setattr(module, "COMPLETE", {"the data": lambda: iter(["a gap"])})
    data, row = run_checks(jobs=2, seed=5)
    assert data == {
        "check": "the data", "jobs": None, "violations": [{"what": "a gap", "job": None}], "seconds": 1.0,
    }  # fmt: skip
    assert (row["jobs"], row["seconds"], len(row["violations"])) == (2, 2.0, 2) and has_violations([row])
    assert row["violations"][0]["what"] == "ZeroDivisionError: a reason" and row["violations"][0]["job"]["plan"]


def test_the_command_prints_a_row_for_every_check() -> None:
    answer = json.loads(run("check", "--jobs", "2", "--json").stdout)
    assert answer["violations"] == 0 and [row["check"] for row in answer["checks"]] == [*COMPLETE, *RELATIONS]
    assert [row["jobs"] for row in answer["checks"]] == [None] * len(COMPLETE) + [2] * len(RELATIONS)


def test_the_command_says_what_is_wrong_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPLETE", {"the catalog loads": lambda: iter(["gpus/h100-sxm: it is not there"])})
    monkeypatch.setattr(module, "RELATIONS", {})
    done = run("check", "--jobs", "1")
    assert done.exit_code == 1 and "the catalog loads: gpus/h100-sxm: it is not there" in done.output


def test_what_is_missing_in_the_data_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the catalog that cannot be read, a usual node that is not there, a price that no kernel has."""

    def load_or_fail(kind: str, name: str) -> Any:
        if name == "a10":
            raise CatalogError("gpus/a10", "it is empty", "Fill it")
        return load(kind, name)

    usual = load("gpus", "h100-sxm").usual_node
    with monkeypatch.context() as patch:
        patch.setattr(completeness, "load", load_or_fail)
        patch.setattr(hardware, "gpus", lambda: ["h100-sxm"])
        patch.setattr(hardware, "nodes", lambda: [])
        assert [*completeness.catalog_loads()] == [
            "gpus/a10: gpus/a10: it is empty. Fill it",
            f"gpus/h100-sxm: its usual node {usual} is not in the catalog",
        ]
    monkeypatch.setattr(hardware, "nodes", lambda: ["dgx-h100"])
    priced = set()

    def estimate(self: Costs, work: Any) -> Any:
        priced.add(type(work))
        return SimpleNamespace(seconds=0.0 if isinstance(work, Attention) else 1.0)

    monkeypatch.setattr(Costs, "estimate", estimate)
    (problem,) = completeness.every_gpu_has_prices()
    assert problem.startswith("nodes/dgx-h100: Attention(") and problem.endswith(" takes 0.0 s")
    monkeypatch.setattr(Costs, "estimate", lambda self, work: priced.add(type(work)) or SimpleNamespace(seconds=1.0))
    assert [*completeness.every_gpu_has_prices()] == []
    assert priced == {Gemm, Memory, Attention, Collective, Transfer}
