"""Jobs: the short and the long form, changes from the command line, and one clear message for every mistake."""

from __future__ import annotations

import copy
import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.ir.routing import DOCUMENT
from tests.jobs import JOBS, change
from tests.strategies import examples, jobs

MODEL = {"layers": 8, "hidden": 64, "heads": 12, "head_dim": 8, "vocab": 96, "seq": 48}
SHORT: dict[str, Any] = {
    "model": MODEL, "cluster": {"gpu": "h100-sxm", "gpus": 16}, "batch": {"global": 16, "micro": 1, "sequence": 48},
    "plan": {"tp": 2, "pp": 2, "schedule": "interleaved-1f1b", "chunks": 2, "zero": 1, "recompute": "selective"},
}  # fmt: skip
LONG: dict[str, Any] = {
    "model": MODEL,
    "cluster": {"gpu": "h100-sxm", "gpus": 16},
    "framework": {"name": "megatron-core", "release": None, "set": {}},
    "batch": {"global": 16, "micro": 1, "sequence": 48},
    "precision": {"compute": "bf16", "gradients": "fp32", "main_weights": "fp32", "moments": "fp32"},
    "optimizer": "adam",
    "plan": {
        "mesh": {"pp": 2, "dp": 4, "tp": 2},
        "partition": "even",
        "schemes": [
            {"use": "pipeline/interleaved-1f1b", "over": "pp", "chunks": 2},
            {"use": "data/zero-1", "over": "dp"},
            {"use": "tensor/megatron-sp", "over": "tp"},
            {"use": "memory/recompute-selective", "modules": ["core_attn"]},
        ],
    },
    "run": {"tokens": None, "price_per_gpu_hour": None},
}


def report(job: Any, *changes: str) -> dict[str, Any]:
    """The answer to a copy of `job`."""
    return simulate(load_job(copy.deepcopy(job), changes)).to_dict()


def report_as(short: dict[str, Any], long: Any) -> dict[str, Any]:
    """The answer to a long form, with what the short form of answer `short` leaves open and the long one states."""
    sigmas = short["job"]["framework"]["set"]["sigmas"]
    return report(change(long, {"framework": {"set": {"sigmas": sigmas}}}))


def test_the_short_form_is_the_long_form() -> None:
    short = report(SHORT)
    assert report_as(short, LONG) == short
    del short["job"]["framework"]["set"]["sigmas"]
    assert short["job"] == {key: LONG[key] for key in short["job"]}


def test_the_job_of_an_answer_gives_the_same_answer() -> None:
    first = report(SHORT)
    assert report(first["job"]) == first
    assert report(json.loads(json.dumps(first["job"]))) == first


@pytest.mark.parametrize(
    "plan",
    [
        {"stages": [{"tp": 8, "layers": 3}, {"tp": 8, "layers": 5}]},
        {"pp": 2, "dp": 8, "replicas": [{"dp": 2, "microbatches": 3}, {"dp": 6, "microbatches": 5}]},
        {"replicas": [{"microbatches": 3, "stages": [{"tp": 8}]}, {"microbatches": 5, "stages": [{"tp": 4}] * 2}]},
    ],
    ids=["stages", "replicas", "both"],
)
def test_the_long_form_of_a_plan_whose_parts_differ_is_the_same_job(plan: dict[str, Any]) -> None:
    job = load_job({**JOBS["gpt"], "plan": plan})
    again = load_job(job.to_dict())
    assert again.plan == job.plan and again.batch == job.batch and again.to_dict() == job.to_dict()


@examples(10)
@given(job=jobs())
def test_any_jobs_long_form_gives_the_same_answer(job: dict[str, Any]) -> None:
    job = {**job, "model": job["model"].model_dump()}
    first = report(job)
    assert report(first["job"]) == first
    json.dumps(first, allow_nan=False)


@pytest.mark.parametrize(("plan", "uses"), [
    ({}, ["pipeline/1f1b", "data/zero-1", "tensor/megatron-sp"]),
    ({"zero": 0, "sequence_parallel": False}, ["pipeline/1f1b", "data/ddp", "tensor/megatron"]),
    ({"pp": 2, "chunks": 2}, ["pipeline/interleaved-1f1b", "data/zero-1", "tensor/megatron-sp"]),
    ({"schedule": "gpipe"}, ["pipeline/gpipe", "data/zero-1", "tensor/megatron-sp"]),
    ({"recompute": "full"}, ["pipeline/1f1b", "data/zero-1", "tensor/megatron-sp", "memory/recompute-full"]),
    ({"recompute": "full", "recompute_layers": 2}, ["pipeline/1f1b", "data/zero-1", "tensor/megatron-sp",
        "memory/recompute-full"]),
])  # fmt: skip
def test_the_documented_defaults(plan: dict[str, Any], uses: list[str]) -> None:
    job = load_job({**SHORT, "plan": plan})
    assert [entry.use for entry in job.plan.schemes] == uses
    assert job.plan.mesh == {"pp": plan.get("pp", 1), "dp": 16 // plan.get("pp", 1), "tp": 1}


def test_a_job_may_be_a_file_a_path_or_a_mapping(tmp_path: Path) -> None:
    yaml, js = tmp_path / "job.yaml", tmp_path / "job.json"
    js.write_text(json.dumps(SHORT))
    yaml.write_text(
        "model: {layers: 8, hidden: 64, heads: 12, head_dim: 8, vocab: 96, seq: 48}\n"
        "cluster: {gpu: h100-sxm, gpus: 16}\n"
        "batch: {global: 16, micro: 1, sequence: 48}\n"
        "plan: {tp: 2, pp: 2, schedule: interleaved-1f1b, chunks: 2, zero: 1, recompute: selective}\n"
    )
    assert [load_job(job).to_dict() for job in (yaml, str(yaml), js)] == [load_job(SHORT).to_dict()] * 3


def test_defaults_of_the_batch() -> None:
    """One micro-batch a replica without a pipeline, four a stage with one; the model's own sequence."""
    bare = {key: SHORT[key] for key in ("model", "cluster")}
    assert load_job({**bare, "plan": {"tp": 2}}).batch.to_dict() == {"global": 8, "micro": 1, "sequence": 48}
    assert load_job({**bare, "plan": {"tp": 2, "pp": 4}, "batch": {"micro": 2}}).batch.total == 2 * 2 * 16


@pytest.mark.parametrize(("micro", "count"), [(1, 4), (3, 1), (2, 6)])
def test_two_sizes_of_a_batch_give_the_third(micro: int, count: int) -> None:
    """Of four replicas."""
    job = {**SHORT, "plan": {"tp": 2, "pp": 2}}
    sizes = {"global": 4 * micro * count, "micro": micro, "microbatches": count}
    for left_out in sizes:
        batch = load_job({**job, "batch": {key: size for key, size in sizes.items() if key != left_out}}).batch
        assert (batch.total, batch.micro) == (4 * micro * count, micro), left_out


@pytest.mark.parametrize(
    ("model", "trained"), [("deepseek-v3", "loss-free"), ("mixtral-8x7b", "natural"), ("gpt-oss-20b", "natural")]
)
def test_experts_are_loaded_as_the_trained_router_of_the_model_does(model: str, trained: str) -> None:
    """A bias of the router evens loads out, but for models in which all layers have biases. Ranks of experts exchange
    the documents of their own micro-batches."""
    bare = {"model": model, "cluster": "dgx-h100:4", "plan": {"ep": 8}, "batch": {"sequence": 4096}}
    job = load_job(bare, "model.moe.routing=natural")
    (experts,) = (entry for entry in job.plan.schemes if entry.use.startswith("expert/"))
    documents = 8 * job.batch.micro * 4096 / min(DOCUMENT, 4096)
    assert (experts.model_extra or {})["routing"] == {"trained": trained, "documents": documents}


def test_ends_as_layers_and_lists() -> None:
    job = {**SHORT, "model": {**MODEL, "layers": 6}, "plan": {"pp": 4, "partition": "ends-as-layers"}}
    assert simulate(job).play.plan.layers == (1, 2, 2, 1)
    assert simulate({**job, "plan": {"pp": 4, "partition": [3, 1, 1, 1]}}).play.plan.layers == (3, 1, 1, 1)


@pytest.mark.parametrize(("text", "patch"), [
    ("plan.tp=4", {"plan": {"tp": 4}}),
    ("batch.micro=2", {"batch": {"micro": 2}}),
    ("plan.partition=[2,2,2,2]", {"plan": {"partition": [2, 2, 2, 2]}}),
    ("plan.recompute=none", {"plan": {"recompute": "none"}}),
    ("model.tied=false", {"model": {"tied": False}}),
    ("framework.set.overlap.pp=false", {"framework": {"set": {"overlap": {"pp": False}}}}),
    ("run.tokens=1e12", {"run": {"tokens": 1e12}}),
])  # fmt: skip
def test_set_changes_one_field(text: str, patch: dict[str, Any]) -> None:
    """Of a job in short form, whose mapping stays as it was."""
    mine = copy.deepcopy(SHORT)
    changed = load_job(mine, [text])
    assert mine == SHORT and changed == load_job(change(SHORT, patch)) != load_job(SHORT)


@pytest.mark.parametrize(("text", "alike"), [
    ("plan.tp=4, batch.micro=2", ["plan.tp=4", "batch.micro=2"]),
    ("batch.sequence=8k", ["batch.sequence=8192"]),
    ("batch.sequence=0.5M", ["batch.sequence=524288"]),
    ("run.tokens=1.5T", ["run.tokens=1.5e12"]),
    ("run.tokens=300b", ["run.tokens=300e9"]),
])  # fmt: skip
def test_short_ways_to_write_changes(text: str, alike: list[str]) -> None:
    assert load_job(SHORT, text) == load_job(SHORT, alike)


@pytest.mark.parametrize(("section", "key", "text"), [
    ("framework", "name", "framework.set.attention=unfused"),
    ("model", "preset", "model.layers=4"),
    ("precision", "compute", "precision.gradients=bf16"),
])  # fmt: skip
def test_a_word_of_a_section_takes_changes_of_its_fields(section: str, key: str, text: str) -> None:
    words = {"framework": "megatron-core", "model": "gpt2", "precision": "bf16"}
    short, long = {**SHORT, section: words[section]}, {**SHORT, section: {key: words[section]}}
    assert load_job(short, text) == load_job(long, text) != load_job(short)


def test_set_works_in_the_long_form_and_last_wins() -> None:
    changes = ["plan.mesh.tp=4", "plan.mesh.dp=2", "batch.global=99", "batch.global=8"]
    patch = {"plan": {"mesh": {"tp": 4, "dp": 2}}, "batch": {"global": 8}}
    assert load_job(LONG, changes) == load_job(change(LONG, patch))


def test_set_reaches_entries_of_lists_by_their_number() -> None:
    assert load_job(copy.deepcopy(LONG), ["plan.schemes.1.use=data/ddp"]).plan.schemes[1].use == "data/ddp"


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4), st.lists, max_leaves=4),
    st.sampled_from(["model", "cluster", "batch", "framework", "precision", "plan", "run", "plan.tp", "batch.micro"]),
)
def test_nonsense_is_refused_or_understood(value: Any, path: str) -> None:
    """Whatever stands in a field: a forecast or one of our errors, never another exception."""
    try:
        load_job(change(SHORT, reduce(lambda inner, key: {key: inner}, reversed(path.split(".")), value)))
    except MeshcastError as error:
        assert error.where and error.rule and error.remedy


def test_an_answer_has_the_keys_of_the_contract() -> None:
    answer = report({**SHORT, "id": "a", "run": {"tokens": 1e9, "price_per_gpu_hour": 2.5}})
    assert list(answer) == [
        *["id", "meshcast", "status", "job", "step_time_s", "interval_90_s", "tokens_per_s_per_gpu"],
        *["breakdown_s", "hidden_s", "mfu", "hfu", "memory", "limits", "assumed", "warnings", "run", "interval"],
        *["parameters", "active_parameters", "energy"],
    ]
    assert answer["interval"]["regime"] == "program" and len(answer["interval"]["widest"]) == 3
    parts = answer["breakdown_s"]
    assert list(parts) == ["compute", "exposed", "bubble", "optimizer", "host", "idle"]
    assert list(parts["compute"]) == ["gemm", "attention", "memory_bound"]
    assert list(parts["exposed"]) == ["tp", "cp", "ep", "dp", "pp", "copy"]
    flat = [
        *parts["compute"].values(),
        *parts["exposed"].values(),
        *(v for v in parts.values() if isinstance(v, float)),
    ]
    assert sum(flat) == pytest.approx(answer["step_time_s"], rel=1e-9)
    assert answer["interval_90_s"][0] < answer["step_time_s"] < answer["interval_90_s"][1]
    assert answer["tokens_per_s_per_gpu"] == pytest.approx(16 * 48 / answer["step_time_s"] / 16)
    memory = answer["memory"]
    assert memory["peak_allocated_gib"] <= memory["peak_reserved_gib"] <= memory["peak_device_gib"]
    assert [stage["stage"] for stage in memory["stages"]] == [0, 1]
    for stage in memory["stages"]:
        assert sum(stage["by"].values()) == pytest.approx(stage["peak_allocated_gib"])
    assert max(stage["peak_allocated_gib"] for stage in memory["stages"]) == memory["peak_allocated_gib"]
    assert answer["run"]["gpu_hours"] == pytest.approx(answer["run"]["days"] * 24 * 16)
    assert answer["run"]["cost"] == pytest.approx(2.5 * answer["run"]["gpu_hours"])
    assert answer["run"]["days"] == pytest.approx(1e9 / (16 * 48) * answer["step_time_s"] / 86400)


def test_a_plan_that_does_not_fit_is_no_error() -> None:
    answer = report({"model": "gpt3-175b", "cluster": "dgx-h100:1", "plan": {"tp": 8}})
    assert answer["status"] == "does-not-fit"
    assert answer["memory"]["peak_device_gib"] > answer["memory"]["capacity_gib"]
    assert "does not fit" in answer["limits"] and "GiB" in answer["limits"]


def test_the_config_of_a_model_is_no_job(tmp_path: Path) -> None:
    """The error says what a job that names the file looks like, and that job is forecast."""
    config = Path(__file__).parents[3] / "examples" / "llama3-70b" / "config.json"
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    with pytest.raises(PlanError) as refused:
        load_job(tmp_path / "config.json")
    assert refused.value.where.endswith("config.json model_type") and "a job needs `model:`" in str(refused.value)
    lines = re.findall(r"`(\w+: [^`]+)`", refused.value.remedy)
    (tmp_path / "job.yaml").write_text("\n".join(lines))
    assert load_job(tmp_path / "job.yaml").model.parameters == 70_553_706_496
