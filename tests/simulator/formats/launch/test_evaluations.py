"""Evaluations of jobs, written into launch files."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch_files import RUNS, export

FSDP: dict[str, Any] = {"plan": {"fsdp": True}}


@pytest.mark.parametrize(
    ("form", "job", "sequence"),
    [
        ("megatron", {}, None),
        ("megatron-bridge", {}, None),
        ("torchtitan", {"framework": {"name": "torchtitan", "release": "2025-11"}, **FSDP}, 512),
        ("llamafactory", {"framework": "llama-factory", **FSDP}, None),
        ("axolotl", {"framework": "axolotl", **FSDP}, 512),
        ("accelerate", {"framework": "hf-trainer", **FSDP}, None),
    ],
)
def test_evaluations_are_written(form: str, job: dict[str, Any], sequence: int | None) -> None:
    evaluation = {"micro": 3, **({"sequence": sequence} if sequence else {})}
    batch = {"global": 64, "micro": 2, "sequence": 4096}
    fields = {"model": "llama3-8b", "cluster": "dgx-h100:1", "batch": batch, "run": {"evaluation": evaluation}}
    assert not [key for key in export(fields | job, form, RUNS).unsaid if "evaluation" in key]


def test_a_program_that_evaluates_on_the_batches_of_training_is_told_so() -> None:
    batch = {"global": 64, "micro": 2, "sequence": 4096}
    fields = {"model": "llama3-8b", "cluster": "dgx-h100:1", "batch": batch, "run": {"evaluation": {"micro": 3}}}
    assert "run.evaluation.micro" in export(fields, "nemo", RUNS).unsaid
