"""What export writes import reads: of jobs of every family, framework and schedule, for every program."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.formats.launch.convert import MODELS_ELSEWHERE, compare_keys, export_job, import_text
from meshcast.simulator.formats.launch.imported_job import OpenQuestions
from meshcast.simulator.formats.launch.keys import flatten_for_export, flatten_job
from meshcast.simulator.formats.launch.launch_file import LaunchOptions
from meshcast.simulator.formats.launch.programs.registry import EXPORTS
from meshcast.simulator.job.job import Job
from tests.launch_files import load
from tests.strategies import EVERY, TENSORS, examples, jobs_of_all

FRAMEWORKS = ("megatron-core", "nemo", "torchtitan", "deepspeed", "hf-trainer", "llm-foundry", "reference")


def import_again(text: str, form: str, job: Job) -> Job:
    """The job of a text, on the cluster of another, and with its model where a file beside the text states that."""
    cluster, model, silent = job.as_written["cluster"], job.as_written["model"], LaunchOptions(assume_defaults=True)
    stated = model if form in MODELS_ELSEWHERE else None
    try:
        return load(import_text(text, "file", form, cluster, stated, options=silent).job)
    except OpenQuestions:
        return load(import_text(text, "file", form, cluster, model, options=silent).job)


def export_and_import(job: Job, form: str) -> Job | None:
    """The job of the exported file; None where export refuses, and names what the program cannot be told.

    The two differ in no key that the header does not name, and if it names none their steps take the same time.
    """
    keys = flatten_for_export(job)
    try:
        exported = export_job(job, form, load, resolve_plan)
    except PlanError as error:
        assert " cannot be told " in error.rule and " does not run (" in error.rule
        assert any(f" {key}: " in error.rule for key in keys)
        return None
    back = import_again(exported.text, form, job)
    resolve_plan(back)
    assert compare_keys(keys, flatten_job(back)).keys() == exported.unsaid.keys()
    assert all(f"  {key}: " in exported.text for key in exported.unsaid)
    if not exported.unsaid:
        assert forecast_step(back).step_time == pytest.approx(forecast_step(job).step_time, rel=1e-9)
    return back


@given(jobs_of_all(pipelines=EVERY, tensors=TENSORS), st.sampled_from(["", *FRAMEWORKS]), st.sampled_from(EXPORTS))
@examples(192, daily=6)
def test_export_writes_what_import_reads(described: dict[str, Any], framework: str, form: str) -> None:
    """framework: whose profile is as it is; empty: the drawn one, with settings that few programs have."""
    export_and_import(load({**described, "framework": framework} if framework else described), form)


def test_keys_of_a_window_are_gathered_by_megatron() -> None:
    """Its ring has no sliding windows: a job with another scheme is written with the messages that have."""
    cluster = {"gpu": "a100-sxm-80", "gpus": 8, "gpus_per_node": 4}
    job = {"model": {"preset": "gpt-oss-20b", "layers": 8}, "cluster": cluster, "framework": "llm-foundry"}
    job |= {"plan": {"cp": 2, "dp": 4, "zero": 0}, "batch": {"global": 8, "micro": 1, "sequence": 1024}}
    for form in ("megatron", "megatron-bridge", "nemo"):
        back = export_and_import(load(job), form)
        assert back is not None and flatten_job(back)["plan.sequence.comm"] == "all_gather"
        assert {axis: back.plan.mesh[axis] for axis in ("cp", "dp")} == {"cp": 2, "dp": 4}
