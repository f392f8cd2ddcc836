"""Jobs: the short and the long form, changes from the command line, and one clear message for every mistake."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import CatalogError, MeshcastError, ModelError, PlanError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.ir.routing import DOCUMENT
from tests.strategies import examples, jobs

MODEL = {"layers": 8, "hidden": 64, "heads": 12, "head_dim": 8, "vocab": 96, "seq": 48}
SHORT: dict[str, Any] = {
    "model": MODEL,
    "cluster": {"gpu": "h100-sxm", "gpus": 16},
    "batch": {"global": 16, "micro": 1, "sequence": 48},
    "plan": {"tp": 2, "pp": 2, "schedule": "interleaved-1f1b", "chunks": 2, "zero": 1, "recompute": "selective"},
}
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


def with_(job: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `job` with one field set; a number in the path counts in a list."""
    changed = copy.deepcopy(job)
    *keys, last = path.split(".")
    at: Any = changed
    for key in keys:
        at = at[int(key)] if isinstance(at, list) else at.setdefault(key, {})
    if isinstance(at, list):
        at[int(last)] = value
    else:
        at[last] = value
    return changed


def report(job: Any, *changes: str) -> dict[str, Any]:
    """The answer to a copy of `job`."""
    return simulate(load_job(copy.deepcopy(job), changes)).to_dict()


def report_as(short: dict[str, Any], long: Any) -> dict[str, Any]:
    """The answer to a long form, with what the short form of answer `short` leaves open and the long one states."""
    return report(with_(long, "framework.set.sigmas", short["job"]["framework"]["set"]["sigmas"]))


# --------------------------------------------------------------------------------------------- two forms


def test_the_short_form_is_the_long_form() -> None:
    short = report(SHORT)
    assert report_as(short, LONG) == short
    del short["job"]["framework"]["set"]["sigmas"]
    assert short["job"] == {key: LONG[key] for key in short["job"]}


def test_the_job_of_an_answer_gives_the_same_answer() -> None:
    first = report(SHORT)
    assert report(first["job"]) == first
    assert report(json.loads(json.dumps(first["job"]))) == first


@examples(10)
@given(job=jobs())
def test_any_jobs_long_form_gives_the_same_answer(job: dict[str, Any]) -> None:
    job = {**job, "model": job["model"].model_dump()}
    first = report(job)
    assert report(first["job"]) == first
    json.dumps(first, allow_nan=False)


@pytest.mark.parametrize(
    ("plan", "uses"),
    [
        ({}, ["pipeline/1f1b", "data/zero-1", "tensor/megatron-sp"]),
        ({"zero": 0, "sequence_parallel": False}, ["pipeline/1f1b", "data/ddp", "tensor/megatron"]),
        ({"pp": 2, "chunks": 2}, ["pipeline/interleaved-1f1b", "data/zero-1", "tensor/megatron-sp"]),
        ({"schedule": "gpipe"}, ["pipeline/gpipe", "data/zero-1", "tensor/megatron-sp"]),
        ({"recompute": "full"}, ["pipeline/1f1b", "data/zero-1", "tensor/megatron-sp", "memory/recompute-full"]),
        (
            {"recompute": "full", "recompute_layers": 2},
            ["pipeline/1f1b", "data/zero-1", "tensor/megatron-sp", "memory/recompute-full"],
        ),
    ],
)
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
    wanted = report(SHORT)
    assert report(yaml) == report(str(yaml)) == report(js) == wanted


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
    with pytest.raises(PlanError, match="two of them give the third"):
        load_job({**job, "batch": sizes})


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


# ---------------------------------------------------------------------------------------------- changes


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ("plan.tp=4", "plan.tp", 4),
        ("batch.micro=2", "batch.micro", 2),
        ("plan.partition=[2,2,2,2]", "plan.partition", [2, 2, 2, 2]),
        ("plan.recompute=none", "plan.recompute", "none"),
        ("model.tied=false", "model.tied", False),
        ("framework.set.overlap.pp=false", "framework", {"set": {"overlap": {"pp": False}}}),
        ("run.tokens=1e12", "run.tokens", 1e12),
    ],
)
def test_set_changes_one_field(change: str, path: str, value: Any) -> None:
    assert report(SHORT, change) == report(with_(SHORT, path, value))
    assert report(SHORT, change) != report(SHORT)


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        ("plan.tp=4, batch.micro=2", ["plan.tp=4", "batch.micro=2"]),
        ("batch.sequence=8k", ["batch.sequence=8192"]),
        ("batch.sequence=0.5M", ["batch.sequence=524288"]),
        ("run.tokens=1.5T", ["run.tokens=1.5e12"]),
        ("run.tokens=300b", ["run.tokens=300e9"]),
    ],
)
def test_short_ways_to_write_changes(change: str, alike: list[str]) -> None:
    assert load_job(copy.deepcopy(SHORT), change).to_dict() == load_job(copy.deepcopy(SHORT), alike).to_dict()


@pytest.mark.parametrize(
    ("section", "key", "change"),
    [
        ("framework", "name", "framework.set.attention=unfused"),
        ("model", "preset", "model.layers=4"),
        ("precision", "compute", "precision.gradients=bf16"),
    ],
)
def test_a_word_of_a_section_takes_changes_of_its_fields(section: str, key: str, change: str) -> None:
    words = {"framework": "megatron-core", "model": "gpt2", "precision": "bf16"}
    short = {**copy.deepcopy(SHORT), section: words[section]}
    long = {**copy.deepcopy(SHORT), section: {key: words[section]}}
    assert load_job(short, change).to_dict() == load_job(long, change).to_dict() != load_job(short).to_dict()


def test_set_works_in_the_long_form_and_last_wins() -> None:
    changes = ["plan.mesh.tp=4", "plan.mesh.dp=2", "batch.global=99", "batch.global=8"]
    wanted = with_(with_(with_(LONG, "plan.mesh.tp", 4), "plan.mesh.dp", 2), "batch.global", 8)
    assert report(LONG, *changes) == report(wanted)


def test_set_reaches_entries_of_lists_by_their_number() -> None:
    assert load_job(copy.deepcopy(LONG), ["plan.schemes.1.use=data/ddp"]).plan.schemes[1].use == "data/ddp"
    for entry in ("7", "first"):
        with pytest.raises(PlanError, match=rf"list with . entries, of which '{entry}' is none. The first one is plan"):
            load_job(copy.deepcopy(LONG), [f"plan.schemes.{entry}.use=data/ddp"])
    with pytest.raises(PlanError, match=r"plan\.schemes holds no fields"):
        load_job(copy.deepcopy(LONG), ["plan.schemes.1=data/ddp"])


def test_set_leaves_the_callers_mapping_alone() -> None:
    mine = copy.deepcopy(SHORT)
    load_job(mine, ["plan.tp=4", "batch.micro=2"])
    assert mine == SHORT


# --------------------------------------------------------------------------------------------- mistakes

P, M, C = PlanError, ModelError, CatalogError
NAN = math.nan

SHORT_MISTAKES: dict[str, tuple[str, Any, type[MeshcastError], str, list[str]]] = {
    # id: (field, value, kind, where, words of the rule and the remedy)
    "heads do not divide": ("plan", {"tp": 8}, P, "plan.tp", ["heads", "= 12", "tp = 6 or 12 would work"]),
    "layers do not divide": ("plan", {"pp": 16}, P, "plan.partition", ["8 layers", "16 stages", "8 stages would work"]),
    "batch does not divide": ("batch.global", 18, P, "batch.global", ["multiple", "1 x 4 = 4", "would work"]),
    "micro-batch too large": ("batch.micro", 3, P, "batch.global", ["3 x 4 = 12", "12 would work"]),
    "mesh is not the cluster": ("plan", {"tp": 2, "dp": 4}, P, "plan.mesh", ["tp 2", "= 8", "16 GPUs"]),
    "tp x pp does not divide": ("plan", {"tp": 3}, P, "plan.tp", ["16 GPUs", "tp = 2 would work"]),
    "pp alone too large": ("plan", {"pp": 32}, P, "plan.pp", ["1 x 32 = 32", "16 GPUs"]),
    "sequence does not divide": ("batch.sequence", 47, P, "plan.tp", ["batch.sequence = 47", "tp"]),
    "micro-batches do not interleave": ("batch.global", 12, P, "", ["multiples of pp = 2", "4 would work"]),
    "chunks without interleaving": ("plan.schedule", "1f1b", P, "plan.chunks", ["one chunk", "interleaved-1f1b"]),
    "interleaving without chunks": ("plan.chunks", 1, P, "plan.chunks", ["at least 2 chunks", "chunks: 2"]),
    "interleaving, chunks unstated": (
        "plan",
        {"pp": 2, "schedule": "interleaved-1f1b"},
        P,
        "plan.schedule",
        ["plan.chunks is not stated", "Add chunks: 2 to the plan", "8 layers / pp 2 admit 2, 4"],
    ),
    "unknown schedule": ("plan.schedule", "1f1bb", P, "plan.schedule", ["no such schedule", "'1f1b'"]),
    "a path for a schedule": ("plan.schedule", "../data/ddp", P, "plan.schedule", ["no such schedule"]),
    "partition of too few": ("plan.partition", [4, 4], P, "plan.partition", ["4 stages", "2 entries"]),
    "partition word": ("plan.partition", "evenly", P, "plan.partition", ["no such partition", "even"]),
    "partition negative": ("plan.partition", [9, -1, 0, 0], P, "plan.partition", ["list"]),
    "recompute layers alone": (
        "plan.recompute_layers",
        2,
        P,
        "plan.recompute_layers",
        ["recompute: full", "selective"],
    ),
    "shards do not divide": ("plan", {"tp": 4, "shard": 3}, P, "plan.shard", ["dp = 4", "shard = 2 would work"]),
    "shards without copies": ("plan", {"zero": 2, "shard": 2}, P, "plan.shard", ["data/zero-2", "fsdp: true"]),
    "no such order": ("plan", {"order": "tp-pp-dp"}, P, "plan.order", ["Valid: dp-pp-cp-tp, pp-dp-cp-tp"]),
    "order of stages": (
        "plan",
        {"order": "dp-pp-cp-tp", "stages": [{"tp": 8}, {"tp": 8}]},
        P,
        "plan.order",
        ["follow those of the stage before"],
    ),
    "no shards": ("plan", {"shard": 0}, P, "plan.shard", ["above 0"]),
    "recompute word": ("plan.recompute", "selectiv", P, "plan.recompute", ["'selective'"]),
    "tp is zero": ("plan.tp", 0, P, "plan.tp", ["above 0"]),
    "tp is negative": ("plan.tp", -2, P, "plan.tp", ["above 0"]),
    "tp is a fraction": ("plan.tp", 1.5, P, "plan.tp", ["whole number"]),
    "tp is text": ("plan.tp", "eight", P, "plan.tp", ["whole number"]),
    "tp is nothing": ("plan.tp", None, P, "plan.tp", ["whole number"]),
    "tp is NaN": ("plan.tp", NAN, P, "plan.tp", []),
    "unknown key of the plan": ("plan.tpp", 2, P, "plan.tpp", ["'tp'"]),
    "unknown key of the job": ("bach", {}, P, "job.bach", ["'batch'"]),
    "unknown key of the batch": ("batch.globl", 2, P, "job.batch.globl", ["'global'"]),
    "batch is a list": ("batch", [1], P, "job.batch", ["mapping"]),
    "plan is text": ("plan", "tp8", P, "job.plan", ["mapping"]),
    "tokens are NaN": ("run.tokens", NAN, P, "job.run.tokens", ["finite"]),
    "price is infinite": ("run.price_per_gpu_hour", math.inf, P, "job.run.price_per_gpu_hour", ["finite"]),
    "unknown framework": ("framework", "megatron", P, "framework.name", ["'megatron-core'"]),
    "unknown setting": (
        "framework",
        {"set": {"overlapp": 1}},
        P,
        "framework.set.overlapp",
        ["'overlap'"],
    ),
    "unknown inner setting": (
        "framework.set",
        {"overlap": {"ddp": True}},
        P,
        "framework.set.overlap.ddp",
        ["'dp'"],
    ),
    "setting of a wrong type": ("framework.set", {"regather": "maybe"}, P, "framework.set.regather", []),
    "setting is NaN": ("framework.set", {"bucket": {"elements": NAN}}, P, "framework.set.bucket.elements", ["finite"]),
    "unknown rate": ("framework.set", {"rates": {"kernels": 1.0}}, P, "rates", ["kernel"]),
    "precision": ("precision", "bf17", P, "job.precision", ["'bf16'"]),
    "optimizer": ("optimizer", "sgdx", P, "job.optimizer", ["adam"]),
    "unknown model": ("model", "llama3-9b", M, "model", ["'llama3-8b'"]),
    "unknown key of the model": ("model.layer", 4, M, "model.layer", ["'layers'"]),
    "a shape that cannot be": ("model.kv_heads", 5, M, "model.kv_heads", ["heads (12)"]),
    "unknown cluster": ("cluster", "dgx-h10:1", C, "cluster", ["'dgx-h100'"]),
    "no nodes": ("cluster", "dgx-h100:0", C, "cluster", ["above 0"]),
    "unknown GPU": ("cluster.gpu", "h100", C, "cluster.gpu", ["h100-sxm"]),
}

LONG_MISTAKES: dict[str, tuple[str, Any, type[MeshcastError], str, list[str]]] = {
    "axis nobody claims": ("plan.schemes.1.over", [], P, "plan.mesh.dp", ["no scheme", "over: dp"]),
    "axis that is not there": ("plan.schemes.1.over", "ddp", P, "plan.schemes[1].over", ["no such axis", "'dp'"]),
    "axis claimed twice": ("plan.schemes.1.over", "tp", P, "plan.schemes", ["both have the axis", "'tp'"]),
    "two pipelines": (
        "plan.schemes.1",
        {"use": "pipeline/gpipe", "over": "dp"},
        P,
        "plan.schemes",
        ["one pipeline schedule", "pipeline/gpipe"],
    ),
    "unknown scheme": ("plan.schemes.2.use", "tensor/megatron-spp", P, "plan.schemes[2].use", ["'tensor/megatron-sp'"]),
    "unknown family": ("plan.schemes.2.use", "tensors/megatron", P, "plan.schemes[2].use", ["'tensor/megatron'"]),
    "no scheme named": ("plan.schemes.2", {"over": "tp"}, P, "plan.schemes", ["use", "missing"]),
    "unknown option": ("plan.schemes.0.chunk", 2, P, "plan.schemes[0].chunk", ["'chunks'"]),
    "option of another scheme": ("plan.schemes.1.modules", ["mlp"], P, "plan.schemes[1].modules", ["no such key"]),
    "unknown module": ("plan.schemes.3.modules", ["cor_attn"], P, "plan.schemes[3].modules", ["'core_attn'"]),
    "modules are text": ("plan.schemes.3.modules", "mlp", P, "plan.schemes[3].modules", ["list"]),
    "schemes are text": ("plan.schemes", "ddp", P, "plan.schemes", ["list"]),
    "mesh is a list": ("plan.mesh", [2, 4, 2], P, "plan.mesh", ["mapping"]),
    "an axis of zero": ("plan.mesh.pp", 0, P, "plan.mesh.pp", ["above 0"]),
    "mesh is not the cluster": ("plan.mesh.dp", 8, P, "plan.mesh", ["pp 2 x dp 8 x tp 2 = 32", "16 GPUs"]),
    "both forms at once": ("plan.tp", 2, P, "plan.tp", ["no such key", "mesh"]),
}


def check_mistake(job: dict[str, Any], kind: type[MeshcastError], where: str, words: list[str]) -> None:
    with pytest.raises(MeshcastError) as refused:
        simulate(job)
    error = refused.value
    assert type(error) is kind
    assert where in error.where, error
    assert error.rule and error.remedy
    text = str(error)
    for word in words:
        assert word in text, text
    assert "\n" not in text and len(text) < 600
    assert "validation error" not in text and "pydantic" not in text
    answer = json.loads(json.dumps(error.to_dict()))
    assert set(answer) == {"kind", "where", "value", "rule", "remedy"} and answer["kind"] == kind.__name__


@pytest.mark.parametrize(
    ("path", "value", "kind", "where", "words"), SHORT_MISTAKES.values(), ids=SHORT_MISTAKES.keys()
)
def test_a_mistake_is_one_clear_message(
    path: str, value: Any, kind: type[MeshcastError], where: str, words: list[str]
) -> None:
    base = SHORT
    if path.startswith("framework."):
        base = {**SHORT, "framework": {"name": "megatron-core"}}
    check_mistake(with_(base, path, value), kind, where, words)


@pytest.mark.parametrize(("path", "value", "kind", "where", "words"), LONG_MISTAKES.values(), ids=LONG_MISTAKES.keys())
def test_a_mistake_in_the_long_form_is_one_clear_message(
    path: str, value: Any, kind: type[MeshcastError], where: str, words: list[str]
) -> None:
    check_mistake(with_(LONG, path, value), kind, where, words)


@pytest.mark.parametrize("missing", ["model", "cluster"])
def test_missing_keys_are_named(missing: str) -> None:
    check_mistake({k: v for k, v in SHORT.items() if k != missing}, PlanError, f"job.{missing}", ["missing", missing])


def test_a_mistake_in_a_file_is_reported_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: gpt2-124m\ncluster: dgx-h100:1\nbatch:\n  micro: 0\n")
    with pytest.raises(PlanError) as refused:
        load_job(file)
    assert "job.yaml:4" in refused.value.where and "batch.micro" in refused.value.where
    file.write_text("model: [gpt2\n")
    with pytest.raises(PlanError, match="not valid YAML"):
        load_job(file)
    file.write_text("- model\n")
    with pytest.raises(PlanError, match="mapping"):
        load_job(file)
    with pytest.raises(PlanError, match="no such file"):
        load_job(tmp_path / "none.yaml")
    with pytest.raises(PlanError, match="a preset of a model"):
        load_job("llama3-8b")


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4), st.lists, max_leaves=4),
    st.sampled_from(["model", "cluster", "batch", "framework", "precision", "plan", "run", "plan.tp", "batch.micro"]),
)
def test_nonsense_is_refused_or_understood(value: Any, path: str) -> None:
    """Whatever stands in a field: a forecast or one of our errors, never another exception."""
    try:
        load_job(with_(SHORT, path, value))
    except MeshcastError as error:
        assert error.where and error.rule and error.remedy


# -------------------------------------------------------------------------------------------- the answer


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


def test_the_contracts_first_job() -> None:
    """The short and the long form of the contract: Llama 3 70B on 64 DGX H100."""
    short = {
        "model": "llama3-70b",
        "cluster": "dgx-h100:64",
        "batch": {"global": 1024, "micro": 1, "sequence": 8192},
        "plan": {"tp": 8, "pp": 4, "schedule": "interleaved-1f1b", "chunks": 5, "zero": 1, "recompute": "selective"},
    }
    long = {
        **{key: short[key] for key in ("model", "cluster", "batch")},
        "framework": {"name": "megatron-core", "release": None, "set": {}},
        "precision": {"compute": "bf16", "gradients": "fp32", "main_weights": "fp32", "moments": "fp32"},
        "optimizer": "adam",
        "plan": {
            "mesh": {"pp": 4, "dp": 16, "tp": 8},
            "partition": "even",
            "schemes": [
                {"use": "pipeline/interleaved-1f1b", "over": "pp", "chunks": 5},
                {"use": "data/zero-1", "over": "dp"},
                {"use": "tensor/megatron-sp", "over": "tp"},
                {"use": "memory/recompute-selective", "modules": ["core_attn"]},
            ],
        },
        "run": {"tokens": None, "price_per_gpu_hour": None},
    }
    one, other = load_job(short), load_job(long)
    assert one.to_dict() == other.to_dict() == long
    assert one == other


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


@pytest.mark.parametrize(
    ("text", "words"), [("- 1\n", "a job is a mapping of keys"), ("batch: {global: 8}\n", "model")]
)
def test_a_file_that_holds_no_job_says_what_is_missing(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text, "utf-8")
    with pytest.raises(PlanError, match=words):
        load_job(tmp_path / "job.yaml")


def test_a_wrong_key_of_odd_digits_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model:\n  preset: gpt2-124m\n  ²: 8\ncluster: dgx-h100:1\nbatch: {global: 8}\n", "utf-8")
    with pytest.raises(MeshcastError, match=r"job\.yaml:3 model\.²: no such key"):
        load_job(path)
