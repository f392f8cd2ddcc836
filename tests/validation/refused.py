"""Wrong inputs of measurements and their oracles, for tests/test_refusals.py: what reads them, and what they change."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import validate_data
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.ir.ops import Gemm
from meshcast.simulator.loading.load import load_job
from meshcast.validation.claims.claim_file import read_claim_file
from meshcast.validation.kernels.works import work_fields, work_of
from meshcast.validation.measurements import campaign, measurement
from meshcast.validation.pipelines.cases import ScheduleCase, peak_microbatches, replay
from meshcast.validation.published.mapping import map_run
from meshcast.validation.published.rows import PublishedRun
from tests.fuzz.seeds import CLAIMS
from tests.validation.distributed.jobs import EXPERTS, GPT, LLAMA, job
from tests.validation.published.runs import SPEC

JOBS = {
    "gpt": job(),
    "llama": job(model=LLAMA),
    "experts": job(model=EXPERTS),
    "four": job(4),
    "untied": job(4, {**GPT, "tied": False}),
}
CAMPAIGN = {
    "title": "two runs",
    "device": "cpu",
    "jobs": {
        "one": {
            "model": "gpt2-124m",
            "cluster": {"gpu": "cpu-core", "gpus": 1},
            "framework": "reference",
            "precision": "fp32",
        }
    },
    "runs": [
        {"name": "first", "measure": "kernels", "job": "one"},
        {
            "name": "second",
            "measure": "distributed",
            "job": "one",
            "set": {"batch": {"global": 2}},
            "options": {"steps": 3},
        },
    ],
}
MEASUREMENT: dict[str, Any] = {
    "version": 1,
    "kind": "distributed",
    "title": "a model on two cores",
    "machine": {"device": "cpu", "name": "a processor"},
    "versions": {},
    "command": "",
    "forecast_written": "then",
    "rows": [{"name": "step", "samples": [1.0]}],
}


def with_torch(module: str, name: str) -> Any:
    """Returns a function of a module of torch."""
    pytest.importorskip("torch")
    return getattr(import_module(f"meshcast.validation.{module}"), name)


def measure(room: str, name: str = "measure") -> Callable[[dict[str, Any]], object]:
    """Returns what measures a job, on the processor and with its `options`."""

    def measure_job(fields: dict[str, Any]) -> object:
        options = {"device": "cpu", "out": Path("out.json"), **fields.pop("options", {})}
        return with_torch(f"{room}.measure", name)(fields, **options)

    return measure_job


def check_plan(module: str) -> Callable[[dict[str, Any]], object]:
    """Returns the check of the plan of a job."""
    return lambda fields: with_torch(module, "check")(resolve_plan(load_job(fields)))


def compare_layouts(fields: dict[str, Any]) -> object:
    """Compares the layouts of a job with serial training."""
    return with_torch("distributed.layouts.executor", "compare_layouts")(fields)


def from_file(read_path: Callable[[Path], object], name: str) -> Callable[[Any], object]:
    """Returns the reader of a document, from its file or written to one."""

    def read_document(document: Any) -> object:
        if not isinstance(document, str):
            dump = yaml.safe_dump if name.endswith("yaml") else json.dumps
            Path(name).write_text(dump(document), "utf-8")
        return read_path(Path(document if isinstance(document, str) else name))

    return read_document


def play_case(case: dict[str, Any]) -> object:
    """Plays the case of a schedule."""
    checked = validate_data(ScheduleCase, case, "case", PlanError)
    return peak_microbatches(checked, replay(checked))


def map_spec(spec: dict[str, Any]) -> object:
    """Maps a published run, of which these are the fields, to a job."""
    return map_run(PublishedRun.model_validate({"id": "test-1", "spec": spec}))


READERS: dict[str, tuple[Any, ...]] = {
    "trained job": (check_plan("distributed.trainer"), PlanError, JOBS),
    "reference job": (check_plan("reference.model"), PlanError, JOBS),
    "job by layouts": (compare_layouts, PlanError, JOBS),
    "measured steps": (measure("distributed"), PlanError, JOBS),
    "measured collectives": (measure("distributed", "measure_collectives"), PlanError, JOBS),
    "measured stages": (measure("stages"), PlanError, JOBS),
    "measured kernels": (measure("kernels"), PlanError, JOBS),
    "schedule case": (play_case, PlanError, {"1f1b": {"schedule": "1f1b", "p": 2, "m": 4, "t_f": 1, "t_b": 1}}),
    "kernel work": (work_of, PlanError, {"gemm": work_fields(Gemm(96, 192, 320, dtype="fp32"))}),
    "measurement file": (from_file(measurement.read, "m.json"), PlanError, {"steps": MEASUREMENT}, "m.json"),
    "campaign": (from_file(campaign.load, "campaign.yaml"), PlanError, {"two": CAMPAIGN}),
    "claims": (from_file(read_claim_file, "claims.yaml"), PlanError, {"gpipe": CLAIMS}),
    "published run": (map_spec, PlanError, {"dense": SPEC}),
}
