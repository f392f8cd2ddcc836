"""A run as a stranger would tell it: nothing that is hidden, and nothing that its own source has set, is in its job."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.validation.published.fit.as_stranger import forecast_strangers, leave_sources_out
from meshcast.validation.published.fit.own_fits import forecast_stranger, forget_fits
from meshcast.validation.published.fit.refit import corrections_without_source
from meshcast.validation.published.mapping import map_run
from meshcast.validation.published.rows import PublishedHardware, PublishedPlan, PublishedRun
from meshcast.validation.published.stacks import FLAGS, UNPRINTED
from meshcast.validation.published.stranger import as_stranger, hidden_fields
from tests.validation.published.runs import MOE, row
from tests.validation.published.test_refit import row as derived

OTHER: dict[str, tuple[Any, Any]] = {
    "grad_dtype": ("fp32", "bf16"),
    "sequence_parallel": (True, False),
    "shard_group": (8, 4),
    "cuda_graphs": (True, False),
    "recompute.modules": (["core_attn"], ["mlp"]),
    **{f"overlap.{axis}": (True, False) for axis in ("dp", "tp", "pp", "ep")},
    "recompute.kind": ("selective", "full"),
    "recompute.layers": (1, 2),
    "sharding": ("zero1", "none"),
    "schedule": ("interleaved", "1f1b"),
    "optimizer": ("adam", "lamb"),
    "compile": (True, False),
    "pipeline_split": ("even", "uneven"),
}
"""Two values of every field that may be hidden."""


def told(run: PublishedRun) -> dict[str, Any]:
    """The job of a run as a stranger tells it."""
    return map_run(as_stranger(run)).job


def run_with(field: str, value: Any, **changes: Any) -> PublishedRun:
    """A run in which a field was read off a script."""
    model = {"kind": "moe", "model__moe": MOE, "mesh__ep": 4, "mesh__etp": 1} if field == "overlap.ep" else {}
    return row(**{field.replace(".", "__"): value}, filled=[f"{field}:script"], **model, **changes)


@pytest.mark.parametrize("field", [*FLAGS, *UNPRINTED])
def test_hidden_fields_are_not_in_the_job(field: str) -> None:
    first, second = (run_with(field, value) for value in OTHER[field])
    assert field in hidden_fields(first.spec) and field in hidden_fields(second.spec)
    assert told(first) == told(second)


def test_what_the_source_prints_is_stated_but_flags() -> None:
    run = row(recompute__kind="full", sharding="zero2")
    assert set(hidden_fields(run.spec)) <= set(FLAGS)
    uses = [scheme["use"] for scheme in told(run)["plan"]["schemes"]]
    assert "memory/recompute-full" in uses and "data/fsdp" in uses


def test_words_of_the_source_change_nothing() -> None:
    """The names of the source, of its model and of its machine, the recipe, the citation, and what was measured."""
    run = row(stack="nemo", stack_version="24.07")
    words = {
        "id": "dgxc-gpt3", "model": {"name": "GPT3-175B"}, "cited": "somewhere", "trust": "high",
        "hardware": PublishedHardware(inter="Jean Zay"), "plan": PublishedPlan(other="cross-entropy fusion"),
    }  # fmt: skip
    assert told(run.model_copy(update=words)) == told(run)
    assert told(row(stack="nemo", stack_version="24.07", measured={"step_time_s": 3.0})) == told(run)
    assert map_run(run.model_copy(update=words)).job["cluster"] != map_run(run).job["cluster"]


def test_a_stranger_knows_the_release_of_a_round_of_mlperf() -> None:
    run = row(of={"id": "mlperf-v50-lab"}, stack="mlperf-nemo")
    assert told(run)["framework"]["release"] == map_run(run).job["framework"]["release"] == "2025-05"


@pytest.mark.parametrize(
    ("source", "stack", "field"),
    [
        ("bloom", "megatron-deepspeed", "launch_s"),
        ("foundry", "llm-foundry", "rates"),
        ("mlperf", "mlperf-nemo", "step_overhead_s"),
    ],
)
def test_fits_of_the_own_source_alone_are_forgotten(source: str, stack: str, field: str) -> None:
    run = row(of={"id": f"{source}-1"}, stack=stack, precision="fp16" if source == "bloom" else "bf16")
    job = told(run)
    assert job["framework"]["set"].get(field) != forget_fits(run, job)["framework"]["set"][field]
    other = run.model_copy(update={"id": "another-1"})
    assert forget_fits(other, job) == job
    shared = SharedWork()
    assert forecast_stranger(run, shared)[1].step_time != forecast_stranger(other, shared)[1].step_time


def test_a_correction_never_uses_the_own_source() -> None:
    rows = [derived(0.1, name, gemm=0.5) for name in ("dgxc", "mlperf", "nemo") for _ in range(5)]
    first = corrections_without_source(rows)
    for of_dgxc in rows[:5]:
        of_dgxc["log_ratio"] = 0.7
    second = corrections_without_source(rows)
    assert first[:5] == second[:5] and first[5:] != second[5:]
    assert first[0] == pytest.approx(0.1, abs=0.01)


def test_answers_of_strangers_are_told_from_other_sources() -> None:
    """Nothing was fitted to the source of this run: the forecast of the stranger's job, and its hidden fields."""
    run = row(measured={"step_time_s": 10.0})
    (found,) = leave_sources_out([*forecast_strangers([run], 1)])
    report = forecast_stranger(run)[1]
    assert (found["id"], found["source"], found["regime"]) == ("test-1", "test", "program")
    assert found["predicted"]["step_time_s"] == report.step_time and found["hidden"] == list(hidden_fields(run.spec))
    assert found["error"] == pytest.approx(report.step_time / 10 - 1)
