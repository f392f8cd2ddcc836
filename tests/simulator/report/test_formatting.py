"""Numbers, plans and forecasts in words."""

from __future__ import annotations

import doctest

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.report import figures, formatting


def test_the_examples_hold() -> None:
    for module in (formatting, figures):
        result = doctest.testmod(module)
        assert result.attempted and not result.failed


@pytest.mark.parametrize(
    ("value", "text"), [(1.0, "1.000 s"), (0.9996, "999.6 ms"), (2e-6, "2.000 us"), (0.0, "0.000 us")]
)
def test_seconds_have_the_unit_that_suits(value: float, text: str) -> None:
    assert formatting.format_seconds(value) == text


def test_a_prompt_shows_the_forecast() -> None:
    report = simulate({"model": "llama3-8b", "cluster": "dgx-h100:1", "plan": {"tp": 8}})
    assert repr(report) == f"<Report: llama3-8b on dgx-h100:1, {report.step_time:.4g} s a step, fits>"
    assert repr(simulate({"model": "llama3-70b", "cluster": "dgx-h100:1"})).endswith("does not fit>")


def test_a_plan_is_its_axes_and_the_schemes_over_them() -> None:
    job = {"model": "llama3-8b", "cluster": "dgx-h100:1", "plan": {"tp": 2, "pp": 2, "chunks": 2}}
    found = formatting.describe_plan(simulate(job).play.plan)
    assert found == ["pp 2 x dp 2 x tp 2 = 8 GPUs", "interleaved-1f1b with 2 chunks", "zero-1", "megatron-sp"]
    alone = {"model": "gpt2", "cluster": {"gpu": "h100-sxm", "gpus": 1, "gpus_per_node": 1}}
    assert formatting.describe_plan(simulate(alone).play.plan) == ["pp 1 x dp 1 x tp 1 = 1 GPU"]


@pytest.mark.parametrize(("total", "words"), [(2, "1 micro-batch of 1"), (8, "4 micro-batches of 1")])
def test_micro_batches_are_those_of_each_replica(total: int, words: str) -> None:
    job = {"model": "gpt2", "cluster": "dgx-h100:1", "batch": {"global": total, "micro": 1}, "plan": {"tp": 4}}
    assert formatting.describe_microbatches(simulate(job).play.plan) == f"{words} in each replica"
