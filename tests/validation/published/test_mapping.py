"""A published run becomes the job that it describes; unstated fields are listed, widen the interval, or are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from meshcast.hardware.errors import MeshcastError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.job.framework import framework_names
from meshcast.simulator.job.open_settings import list_open_settings, sigma_of_open
from meshcast.validation.published.mapping import MappedJob, map_run
from meshcast.validation.published.open_plans import likely_values
from meshcast.validation.published.rows import PublishedHardware, PublishedPlan, PublishedRun
from meshcast.validation.published.stacks import SIGMA, STACKS, framework

SPEC: dict[str, Any] = {
    "class": "dense",
    "stack": "megatron-core",
    "stack_version": "0.12",
    "gpu": "h100-sxm",
    "gpus": 64,
    "gpus_per_node": 8,
    "scale_up_domain": 8,
    "inter": {"kind": "infiniband", "gbps_per_gpu": 400, "stated": True},
    "precision": "bf16",
    "grad_dtype": "fp32",
    "main_weights": "fp32",
    "optimizer": "adamw",
    "compile": False,
    "cuda_graphs": False,
    "model": {
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "ffn": 14336,
        "gated": True,
        "vocab": 128256,
        "seq": 8192,
        "tied": False,
        "norm": "rmsnorm",
        "positions": "rope",
        "attention": "flash",
        "qk_layernorm": False,
        "mtp": 0,
    },
    "mesh": {"dp": 8, "tp": 4, "pp": 2, "cp": 1, "ep": 1, "etp": None, "vpp": 4},
    "batch": {"micro": 1, "global": 128, "seq": 8192},
    "schedule": "interleaved",
    "pipeline_split": "even",
    "sequence_parallel": True,
    "sharding": "zero1",
    "shard_group": 8,
    "recompute": {"kind": "none", "layers": None, "modules": None},
    "offload": {"kind": "none", "layers": None},
    "overlap": {"dp": True, "tp": False, "pp": True, "ep": None},
    "memory_kind": None,
    "filled": ["overlap.dp:convention"],
}

MOE = {
    "experts": 64,
    "top_k": 4,
    "expert_ffn": 1408,
    "shared_experts": 0,
    "shared_ffn": None,
    "first_dense": 0,
    "dense_ffn": None,
    "every": 1,
    "capacity": None,
    "routing": "balanced",
}


def row(measured: dict[str, Any] | None = None, **changes: Any) -> PublishedRun:
    """The run above with some fields changed; ``mesh__tp=2`` changes one inside."""
    spec = {key: dict(value) if isinstance(value, dict) else value for key, value in SPEC.items()}
    for key, value in changes.items():
        outer, _, inner = key.partition("__")
        name = "class" if outer == "kind" else outer
        if inner:
            spec[name][inner] = value
        else:
            spec[name] = value
    return PublishedRun.model_validate({"id": "test-1", "spec": spec, "measured": measured or {}})


def uses(mapped: MappedJob) -> list[str]:
    return [entry["use"] for entry in mapped.job["plan"]["schemes"]]


def entry(mapped: MappedJob, use: str) -> dict[str, Any]:
    return next(one for one in mapped.job["plan"]["schemes"] if one["use"] == use)


def sigma(mapped: MappedJob) -> float:
    return math.hypot(*mapped.job["framework"]["set"]["sigmas"].values())


# ------------------------------------------------------------------------------------ what is stated


@pytest.mark.parametrize(("name", "routing"), [("DeepSeek-V3", "loss-free"), ("Mixtral", "natural")])
def test_trained_routers_are_evened_by_a_bias_or_by_a_loss(name: str, routing: str) -> None:
    run = row(kind="moe", model__moe={**MOE, "routing": "natural"}, mesh__ep=8, mesh__etp=1)
    mapped = map_run(run.model_copy(update={"model": {"name": name}}))
    assert mapped.job["model"]["moe"]["routing"] == routing


def test_a_fully_stated_run_assumes_nothing() -> None:
    mapped = map_run(row())
    assert mapped.assumed == ()
    assert sigma(mapped) == 0.0 and mapped.job["framework"]["set"]["regime"] == "program"
    job = mapped.job
    assert job["plan"]["mesh"] == {"pp": 2, "dp": 8, "cp": 1, "tp": 4}
    assert list(job["plan"]["mesh"]) == ["pp", "dp", "cp", "tp"]  # the slowest links first
    assert uses(mapped) == ["pipeline/interleaved-1f1b", "data/zero-1", "tensor/megatron-sp"]
    assert entry(mapped, "pipeline/interleaved-1f1b")["chunks"] == 4
    assert job["batch"] == {"global": 128, "micro": 1, "sequence": 8192}
    assert job["cluster"]["inter"] == {"kind": "infiniband", "gbps_per_gpu": 400}
    assert job["framework"]["set"]["attention"] == "flash" and "attention" not in job["model"]
    assert job["precision"] == {"compute": "bf16", "gradients": "fp32", "main_weights": "fp32"}


def test_the_job_is_one_that_meshcast_reads() -> None:
    job = load_job(map_run(row()).job)
    assert job.model.layers == 32 and job.cluster.gpus == 64 and job.framework.attention == "flash"
    assert job.framework.overlap.dp and job.framework.overlap.pp


def test_a_public_launcher_says_what_its_runs_do_not() -> None:
    run = row(overlap__dp=None).model_copy(update={"id": "simumax-b200"})
    assert not load_job(map_run(run).job).framework.overlap.dp and "overlap.dp" not in map_run(run).assumed
    stated = row().model_copy(update={"id": "simumax-b200"})
    assert load_job(map_run(stated).job).framework.overlap.dp


def test_gradients_are_reduced_over_context_parallel_ranks_too() -> None:
    for cp, overlaps in ((1, True), (8, False)):
        run = row(mesh__dp=1, mesh__cp=cp, mesh__tp=1, mesh__pp=64 // cp, shard_group=cp, overlap__dp=False)
        assert load_job(map_run(run).job).framework.overlap.dp is overlaps, cp


@pytest.mark.parametrize(
    ("changes", "use"),
    [
        ({"sharding": "none", "shard_group": None}, "data/ddp"),
        ({"sharding": "zero2"}, "data/fsdp"),  # under a pipeline
        ({"sharding": "zero2", "mesh__pp": 1, "mesh__vpp": 1}, "data/zero-2"),
        ({"sharding": "zero3"}, "data/zero-3"),
        ({"sharding": "fsdp-full"}, "data/fsdp"),
        ({"sharding": "fsdp-grad-op", "mesh__pp": 1, "mesh__vpp": 1}, "data/zero-2"),
        ({"sequence_parallel": False}, "tensor/megatron"),
        ({"schedule": "1f1b", "mesh__vpp": 1}, "pipeline/1f1b"),
        ({"schedule": "zb-v-half", "mesh__vpp": 2}, "pipeline/v-half"),
        ({"schedule": "zb-h1", "mesh__vpp": 1}, "pipeline/zb-h1"),
        ({"schedule": "dualpipe", "mesh__vpp": 1}, "pipeline/dualpipe"),
        ({"recompute": {"kind": "full"}}, "memory/recompute-full"),
        ({"offload": {"kind": "activations", "layers": 4}}, "memory/offload"),
    ],
)
def test_words_that_differ(changes: dict[str, Any], use: str) -> None:
    assert use in uses(map_run(row(**changes)))


def test_schedules_with_a_fixed_number_of_chunks_need_none_stated() -> None:
    for schedule, chunks in (("zb-v", 2), ("zb-v-min", 2), ("zb-h1", 1), ("dualpipe", 1), ("gpipe", 1)):
        for written in (None, 1):
            mapped = map_run(row(schedule=schedule, mesh__vpp=written))
            (found,) = (one for one in mapped.job["plan"]["schemes"] if one["use"].startswith("pipeline/"))
            assert found["chunks"] == chunks and "mesh.vpp" not in mapped.assumed


def test_the_memory_limit_of_zb_auto_is_in_the_name_of_the_run() -> None:
    limits = {name: entry(map_run(row(schedule=name, mesh__vpp=1)), "pipeline/zb-auto") for name in ("zb-1p", "zb-2p")}
    assert {name: one["memory_limit"] for name, one in limits.items()} == {"zb-1p": 2, "zb-2p": 4}


@pytest.mark.parametrize(("sharding", "use"), [("fsdp-hybrid", "data/fsdp"), ("zero1", "data/zero-1")])
def test_sharding_over_groups_of_ranks_has_two_axes(sharding: str, use: str) -> None:
    """A group counts context-parallel ranks, which shard states, too."""
    for cp, shard in ((1, 4), (2, 2)):
        mapped = map_run(row(sharding=sharding, shard_group=4, mesh__cp=cp, mesh__dp=8 // cp))
        assert mapped.job["plan"]["mesh"] == {"pp": 2, "replicate": 2, "shard": shard, "cp": cp, "tp": 4}
        assert entry(mapped, use) == {"use": use, "over": "shard", "replicate": "replicate"}


@pytest.mark.parametrize(
    ("stack", "scheme"), [("megatron-core", "tensor/userbuffers"), ("torchtitan", "tensor/async-tp")]
)
def test_overlap_of_tensor_parallelism_is_that_of_the_program(stack: str, scheme: str) -> None:
    for overlaps in (True, False):
        job = load_job(map_run(row(stack=stack, overlap__tp=overlaps)).job)
        assert (scheme in [entry.use for entry in job.plan.schemes]) == overlaps


def test_recomputed_layers_and_modules() -> None:
    assert entry(map_run(row(recompute={"kind": "full", "layers": 3})), "memory/recompute-full")["layers"] == 3
    mapped = map_run(row(recompute={"kind": "selective", "modules": ["mlp"]}))
    assert entry(mapped, "memory/recompute-selective")["modules"] == ["mlp"]


def test_ends_take_the_place_of_layers() -> None:
    assert map_run(row(model__layers=30, pipeline_split="ends-as-layers")).job["plan"]["partition"] == "ends-as-layers"


def test_a_scheme_of_one_rank_is_left_out() -> None:
    alone = {"gpus": 4, "mesh__pp": 1, "mesh__dp": 4, "mesh__tp": 1, "mesh__vpp": 1, "shard_group": 4}
    mapped = map_run(row(schedule=None, pipeline_split=None, **alone))
    assert uses(mapped) == ["data/zero-1"] and mapped.assumed == ()


@pytest.mark.parametrize(("ep", "etp", "over", "edp"), [(8, 1, "ep", 4), (8, 2, ["ep", "etp"], 2), (1, 1, None, 32)])
def test_experts_have_a_view_of_their_own(ep: int, etp: int, over: Any, edp: int) -> None:
    mapped = map_run(row(kind="moe", model__moe=MOE, mesh__ep=ep, mesh__etp=etp))
    assert mapped.job["plan"]["views"] == {"experts": {"edp": edp, "ep": ep, "etp": etp}}
    assert ("expert/all-to-all" in uses(mapped)) == (over is not None)
    if over is not None:
        assert entry(mapped, "expert/all-to-all")["over"] == over
    assert mapped.job["model"]["moe"] == MOE


@pytest.mark.parametrize(
    ("other", "use"),
    [
        ("cuda_graph_impl=none; moe_flex_dispatcher_backend=hybridep", "expert/hybrid-ep"),
        ("moe_flex_dispatcher_backend=deepep", "expert/deepep"),
        ("moe_flex_dispatcher_backend=another", "expert/all-to-all"),
        ("alltoall dispatcher", "expert/all-to-all"),
        (None, "expert/all-to-all"),
    ],
)
def test_the_token_dispatcher_is_that_of_the_recipe(other: str | None, use: str) -> None:
    run = row(kind="moe", model__moe=MOE, mesh__ep=8, mesh__etp=1)
    mapped = map_run(run.model_copy(update={"plan": PublishedPlan(other=other)}))
    assert [one for one in uses(mapped) if one.startswith("expert/")] == [use]
    resolve_plan(load_job(mapped.job))


@pytest.mark.parametrize(("schedule", "use"), [("dualpipe", "expert/deepep"), ("1f1b", "expert/all-to-all")])
def test_runs_of_dualpipe_dispatch_as_it_was_published(schedule: str, use: str) -> None:
    run = row(
        kind="moe", model__moe=MOE, mesh__ep=2, mesh__etp=1, mesh__pp=2, mesh__vpp=None, schedule=schedule, gpus=16
    )
    mapped = map_run(run)
    assert "dispatch" not in entry(mapped, use) and ("token dispatcher" in mapped.assumed) == (use == "expert/deepep")


@pytest.mark.parametrize(
    ("release", "domain", "use"),
    [
        ("NeMo container 26.02", 72, "expert/hybrid-ep"),
        ("NeMo container 25.09", 72, "expert/all-to-all"),
        ("NeMo container 26.02", 8, "expert/all-to-all"),
        (None, 72, "expert/hybrid-ep"),
    ],
)
def test_recipes_for_large_nvlink_domains_use_hybrid_ep_by_default(release: str | None, domain: int, use: str) -> None:
    changes = {"stack": "megatron-bridge", "stack_version": release, "gpu": "gb200", "scale_up_domain": domain}
    mapped = map_run(row(kind="moe", model__moe=MOE, mesh__ep=8, mesh__etp=1, gpus_per_node=4, **changes))
    assert use in uses(mapped) and ("token dispatcher" in mapped.assumed) == (use == "expert/hybrid-ep")


@pytest.mark.parametrize("pp", [1, 2])
def test_overlap_of_expert_parallelism_is_that_of_two_passes(pp: int) -> None:
    pipeline = {"mesh__pp": pp, "mesh__dp": 16 // pp, "mesh__vpp": 4 if pp > 1 else 1, "shard_group": 16 // pp}
    for overlap in (True, False):
        run = row(kind="moe", model__moe=MOE, mesh__ep=8, mesh__etp=1, overlap__ep=overlap, **pipeline)
        entries = [one for one in map_run(run).job["plan"]["schemes"] if one["use"].startswith("pipeline/")]
        assert [one.get("overlap_passes", False) for one in entries] == ([overlap] if overlap or pp > 1 else [])


def test_a_program_may_have_steps_of_less_overhead() -> None:
    assert map_run(row(stack="mlperf-nemo")).job["framework"]["set"]["step_overhead_s"] < 0.035
    assert "step_overhead_s" not in map_run(row()).job["framework"]["set"]


def test_windows_slide_in_every_second_layer() -> None:
    model = map_run(row(model__window=128)).job["model"]
    assert model["window"] == 128 and model["full_every"] == 2
    assert "full_every" not in map_run(row()).job["model"]


# ----------------------------------------------------------------------------------- what is assumed


@pytest.mark.parametrize(
    ("changes", "field", "use"),
    [
        ({"recompute": {}}, "recompute.kind", ""),
        ({"recompute": {}, "stack": "megatron-deepspeed"}, "recompute.kind", "memory/recompute-full"),
        ({"recompute": {"kind": "selective"}}, "recompute.modules", "memory/recompute-selective"),
        ({"schedule": None}, "schedule", "pipeline/interleaved-1f1b"),
        ({"schedule": None, "mesh__vpp": 1}, "schedule", "pipeline/1f1b"),
        ({"sharding": None}, "sharding", "data/zero-1"),
        ({"sharding": None, "stack": "torchtitan"}, "sharding", "data/fsdp"),
        ({"sharding": None, "shard_group": None, "stack": "megatron-lm-2021"}, "sharding", "data/ddp"),
        ({"shard_group": None}, "shard_group", "data/zero-1"),
        ({"overlap__dp": None}, "overlap.dp", ""),
        ({"sequence_parallel": None}, "sequence_parallel", "tensor/megatron-sp"),
        ({"sequence_parallel": None, "stack": "megatron-lm-2021"}, "sequence_parallel", "tensor/megatron"),
        ({"grad_dtype": None}, "grad_dtype", ""),
        ({"main_weights": None}, "main_weights", ""),
        ({"optimizer": None}, "optimizer", ""),
        ({"optimizer": "muon"}, "optimizer", ""),
        ({"model__attention": None}, "model.attention", ""),
        ({"model__positions": None}, "model.positions", ""),
        ({"stack_version": None}, "stack_version", ""),
        ({"compile": None, "stack": "fms-fsdp", "sequence_parallel": False}, "compile", ""),
        ({"cuda_graphs": None}, "cuda_graphs", ""),
        ({"offload": {}}, "offload.kind", ""),
        ({"model__vocab": 50257}, "model.vocab", ""),
        ({"inter": {}}, "inter.kind", ""),
        ({"inter": {"kind": "roce"}}, "inter.gbps_per_gpu", ""),
        ({"scale_up_domain": None}, "scale_up_domain", ""),
        ({"mesh__vpp": None, "model__layers": 14}, "mesh.vpp", "pipeline/interleaved-1f1b"),
        ({"batch__micro": None, "batch__global": 8, "schedule": "1f1b", "mesh__vpp": 1}, "batch.micro", ""),
        ({"kind": "sft-packed"}, "class", ""),
        ({"kind": "sft-packed", "stack": "nemo"}, "batch.documents", ""),
        ({"stack": "mlperf-nemo"}, "stack", ""),
        ({"mesh__dp": 4, "mesh__cp": 2}, "mesh.cp", "sequence/megatron-cp"),
    ],
)
def test_unstated_fields_are_listed_and_widen_the_interval(changes: dict[str, Any], field: str, use: str) -> None:
    mapped = map_run(row(**changes))
    assert field in mapped.assumed
    assert not use or use in uses(mapped)
    # Its cause is named, or the job leaves it open.
    stated = list_open_settings(load_job(map_run(row(stack=changes.get("stack", "megatron-core"))).job))
    is_open = set(list_open_settings(load_job(mapped.job))) > set(stated)
    assert (sigma(mapped) > 0) != is_open if SIGMA.get(field, 1.0) else field == "stack"


def test_assumptions_add_up_as_independent_ones_do() -> None:
    mapped = map_run(row(recompute={}, grad_dtype=None))
    assert mapped.assumed == ("grad_dtype", "recompute.kind")
    # A quarter of runs differs from the default: half of the standard deviation between the values, 0.10.
    assert mapped.job["framework"]["set"]["sigmas"] == {"recompute.kind": 0.05}
    causes = {name: value for name, value in simulate(mapped.job).sigmas.items() if name.startswith("sigmas.")}
    assert causes.keys() == {"sigmas.recompute.kind", "sigmas.precision.gradients"}
    assert causes["sigmas.recompute.kind"] == 0.05 and 0 < causes["sigmas.precision.gradients"] < 0.01


def test_every_field_that_a_memory_contradicts_has_a_sigma() -> None:
    run = row(gpus=128, mesh__dp=16, shard_group=None, grad_dtype=None, sequence_parallel=None, recompute={})
    fields = {field for field, *_ in likely_values(run.spec, map_run(run).assumed)}
    assert fields == {"grad_dtype", "shard_group", "sequence_parallel", "recompute.kind"} <= SIGMA.keys()
    assert all(field in map_run(run, (field,)).assumed for field in fields)


def test_a_fully_stated_run_leaves_its_job_nothing_open() -> None:
    report = simulate(map_run(row()).job)
    assert not [name for name in report.sigmas if name.startswith("sigmas.")]


def test_irrelevant_fields_are_not_assumed() -> None:
    one_node = {"gpus": 8, "mesh__dp": 1, "mesh__tp": 4, "batch__global": 16, "shard_group": 1}
    assert map_run(row(inter={}, **one_node)).assumed == ()  # no network
    assert "overlap.ep" not in map_run(row()).assumed  # no experts
    assert "memory_kind" not in map_run(row()).assumed  # no memory figure
    assert "memory_kind" in map_run(row(measured={"peak_memory_gib": 40.0})).assumed


@pytest.mark.parametrize(
    ("layers", "mtp", "stages", "split"),
    [
        (61, 1, 16, [3, *[4] * 14, 2]),  # DeepSeek-V3's own layout
        (78, 0, 12, [6, *[7] * 7, *[6] * 3, 5]),
        (61, 1, 32, [1, *[2] * 30, 0]),
        (61, 1, 64, [0, 0, *[1] * 61, 0]),
    ],
)
def test_layers_that_do_not_divide_are_spread_as_evenly_as_can_be(
    layers: int, mtp: int, stages: int, split: list[int]
) -> None:
    chunks = stages // 4
    mapped = map_run(
        row(model__layers=layers, model__mtp=mtp, mesh__pp=4, mesh__vpp=chunks, pipeline_split="uneven", gpus=64)
    )
    assert mapped.job["plan"]["partition"] == split and sum(split) == layers
    assert "pipeline_split" in mapped.assumed


def test_fields_filled_in_by_the_source_are_not_assumed() -> None:
    assert map_run(row(filled=[f"{key}:convention" for key in SIGMA])).assumed == ()


def test_adapters_are_those_of_the_run_or_the_usual_ones() -> None:
    mapped = map_run(row(kind="lora", lora={"rank": 8, "targets": ["qkv", "proj"]}))
    assert mapped.job["train"] == {"mode": "lora", "rank": 8, "targets": ["attn_qkv", "attn_proj"]}
    assert not {"lora.rank", "lora.targets"} & {*mapped.assumed}
    for silent in (map_run(row(kind="lora", lora={"rank": None, "targets": None})), map_run(row(kind="lora"))):
        assert silent.job["train"] == {"mode": "lora", "rank": 16, "targets": ["attn_qkv"]}
        assert {"lora.rank", "lora.targets"} <= {*silent.assumed} and sigma(silent) > sigma(mapped)
    assert load_job(mapped.job).adapters is not None
    assert load_job(map_run(row()).job).adapters is None


def test_experts_make_unknown_graphs_matter() -> None:
    experts = {"kind": "moe", "model__moe": MOE, "mesh__ep": 8, "mesh__etp": 1, "overlap__ep": False}
    jobs = (load_job(map_run(row(cuda_graphs=None, **changes)).job) for changes in ({}, experts))
    dense, sparse = (sigma_of_open(job, "framework.set.cuda_graphs") for job in jobs)
    assert sparse > 2 * dense


def test_every_program_has_a_framework() -> None:
    for name in (*STACKS, "nemo", "internal", "never-heard-of"):
        assert framework(name) in framework_names()
        if name not in framework_names():
            assert "stack" in map_run(row(stack=name)).assumed


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"kind": "lora", "lora": {"rank": 16, "targets": ["router"]}}, "lora.targets", "supported"),
        ({"kind": "other"}, "class", "attention"),
        ({"gpu": None}, "gpu", "not published"),
        ({"gpus": None}, "gpus", "not published"),
        ({"precision": None}, "precision", "not published"),
        ({"model__layers": None}, "model.layers", "not published"),
        ({"model__kv_heads": None}, "model.kv_heads", "not published"),
        ({"mesh__tp": None}, "mesh.tp", "not published"),
        ({"kind": "moe", "model__moe": MOE, "mesh__ep": None}, "mesh.ep", "not published"),
        ({"kind": "moe", "model__moe": MOE, "mesh__ep": 3, "mesh__etp": 1}, "mesh.ep", "must divide"),
        ({"batch__global": None}, "batch.global", "not published"),
        ({"batch__seq": None}, "batch.seq", "not published"),
        ({"batch__micro": None}, "batch.micro", "several"),
        ({"mesh__vpp": None}, "mesh.vpp", "several"),
        ({"sharding": "zero2", "shard_group": 4, "mesh__pp": 1, "mesh__vpp": 1}, "shard_group", "not supported"),
        ({"sharding": "fsdp-hybrid", "shard_group": 3}, "shard_group", "not supported"),
        ({"mesh__pp": 10**6, "gpus": 64 * 10**6, "mesh__vpp": 1, "pipeline_split": "uneven"}, "mesh.pp", "have not"),
    ],
)
def test_missing_decisive_fields_are_refused(changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(MeshcastError) as refused:
        map_run(row(**changes))
    assert refused.value.where == f"spec.{field}" and words in refused.value.rule


def test_recomputation_stops_early_in_programs_that_do_so() -> None:
    recompute = {"kind": "full", "layers": None, "modules": None}

    def stops(stack: str, other: str = "") -> bool:
        run = row(stack=stack, recompute=recompute).model_copy(update={"plan": PublishedPlan(other=other)})
        entries = load_job(map_run(run).job).plan.schemes
        full = next(entry for entry in entries if entry.use == "memory/recompute-full")
        return bool((full.model_extra or {}).get("early_stop"))

    assert stops("llm-foundry", "FSDP mixed_precision=DEFAULT") and stops("jax")
    assert not stops("llm-foundry", "FSDP mixed_precision=PURE")
    assert not stops("megatron-core") and not stops("megatron-deepspeed")


# --------------------------------------------------------------------------------- clusters of the catalog


def at(inter: str, **changes: Any) -> MappedJob:
    run = row(gpu="a100-sxm-80", stack="megatron-deepspeed", **changes)
    return map_run(run.model_copy(update={"hardware": PublishedHardware(inter=inter)}))


def test_a_run_on_a_known_cluster_gets_the_node_of_the_catalog() -> None:
    job = at("4x100Gb Omni-Path per node (Jean-Zay)", gpus=64).job
    assert job["cluster"] == {"node": "jean-zay-a100", "nodes": 8, "gpus": 64}
    assert load_job(job).cluster.scale_up.rate < 1
    assert "node" not in at("8x200Gb HDR InfiniBand per node (Selene)").job["cluster"]


@pytest.mark.parametrize(("gpus", "blocks"), [(64, False), (384, True)])
def test_large_jobs_on_jean_zay_blocked_launches(gpus: int, blocks: bool) -> None:
    job = at("Jean-Zay", gpus=gpus, mesh__dp=gpus // 8, shard_group=gpus // 8)
    framework = load_job(job.job).framework
    assert framework.launch_blocking == blocks
