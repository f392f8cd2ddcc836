"""A published run becomes the job that it describes; unstated fields are listed, widen the interval, or are refused."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import load_job, simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.job.framework import framework_names
from meshcast.simulator.job.open_settings import list_open_settings, sigma_of_open
from meshcast.validation.published.mapping import MappedJob, map_run
from meshcast.validation.published.open_plans import likely_values
from meshcast.validation.published.rows import PublishedHardware, PublishedPlan
from meshcast.validation.published.stacks import SIGMA, STACKS, framework
from tests.validation.published.runs import EXPERTS, LORA, MOE, entry, row, sigma, uses

ONE_STAGE = {"mesh__pp": 1, "mesh__vpp": 1}

# ------------------------------------------------------------------------------------ what is stated


@pytest.mark.parametrize(("name", "routing"), [("DeepSeek-V3", "loss-free"), ("Mixtral", "natural")])
def test_trained_routers_are_evened_by_a_bias_or_by_a_loss(name: str, routing: str) -> None:
    run = row(of={"model": {"name": name}}, **{**EXPERTS, "model__moe": {**MOE, "routing": "natural"}})
    assert map_run(run).job["model"]["moe"]["routing"] == routing


def test_a_fully_stated_run_assumes_nothing() -> None:
    mapped = map_run(row())
    job = mapped.job
    assert mapped.assumed == () and sigma(mapped) == 0.0 and job["framework"]["set"]["regime"] == "program"
    assert [*job["plan"]["mesh"].items()] == [("pp", 2), ("dp", 8), ("cp", 1), ("tp", 4)]  # the slowest links first
    assert uses(mapped) == ["pipeline/interleaved-1f1b", "data/zero-1", "tensor/megatron-sp"]
    assert entry(mapped, "pipeline/interleaved-1f1b")["chunks"] == 4
    assert job["batch"] == {"global": 128, "micro": 1, "sequence": 8192}
    assert job["cluster"]["inter"] == {"kind": "infiniband", "gbps_per_gpu": 400}
    assert job["framework"]["set"]["attention"] == "flash" and "attention" not in job["model"]
    assert job["precision"] == {"compute": "bf16", "gradients": "fp32", "main_weights": "fp32"}
    read = load_job(job)
    assert read.model.layers == 32 and read.cluster.gpus == 64 and read.framework.attention == "flash"
    assert read.framework.overlap.dp and read.framework.overlap.pp
    assert not [name for name in simulate(job).sigmas if name.startswith("sigmas.")]


def test_a_public_launcher_says_what_its_runs_do_not() -> None:
    launched = {"id": "simumax-b200"}
    open_ = map_run(row(of=launched, overlap__dp=None))
    assert not load_job(open_.job).framework.overlap.dp and "overlap.dp" not in open_.assumed
    assert load_job(map_run(row(of=launched)).job).framework.overlap.dp


def test_gradients_are_reduced_over_context_parallel_ranks_too() -> None:
    for cp, overlaps in ((1, True), (8, False)):
        run = row(mesh__dp=1, mesh__cp=cp, mesh__tp=1, mesh__pp=64 // cp, shard_group=cp, overlap__dp=False)
        assert load_job(map_run(run).job).framework.overlap.dp is overlaps, cp


@pytest.mark.parametrize(
    ("changes", "use"),
    [
        ({"sharding": "none", "shard_group": None}, "data/ddp"),
        ({"sharding": "zero2"}, "data/fsdp"),  # under a pipeline
        ({"sharding": "zero2", **ONE_STAGE}, "data/zero-2"),
        ({"sharding": "zero3"}, "data/zero-3"),
        ({"sharding": "fsdp-full"}, "data/fsdp"),
        ({"sharding": "fsdp-grad-op", **ONE_STAGE}, "data/zero-2"),
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
            (use,) = uses(mapped, "pipeline/")
            assert entry(mapped, use)["chunks"] == chunks and "mesh.vpp" not in mapped.assumed


def test_the_memory_limit_of_zb_auto_is_in_the_name_of_the_run() -> None:
    for name, limit in {"zb-1p": 2, "zb-2p": 4}.items():
        assert entry(map_run(row(schedule=name, mesh__vpp=1)), "pipeline/zb-auto")["memory_limit"] == limit


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
        assert (scheme in [chosen.use for chosen in job.plan.schemes]) == overlaps


def test_fields_of_memory_and_split_are_those_of_the_run() -> None:
    assert entry(map_run(row(recompute={"kind": "full", "layers": 3})), "memory/recompute-full")["layers"] == 3
    mapped = map_run(row(recompute={"kind": "selective", "modules": ["mlp"]}))
    assert entry(mapped, "memory/recompute-selective")["modules"] == ["mlp"]
    assert map_run(row(model__layers=30, pipeline_split="ends-as-layers")).job["plan"]["partition"] == "ends-as-layers"
    windows = map_run(row(model__window=128)).job["model"]
    assert windows["window"] == 128 and windows["full_every"] == 2, "windows slide in every second layer"
    assert "full_every" not in map_run(row()).job["model"]


def test_a_scheme_of_one_rank_is_left_out() -> None:
    alone = {"gpus": 4, **ONE_STAGE, "mesh__dp": 4, "mesh__tp": 1, "shard_group": 4}
    mapped = map_run(row(schedule=None, pipeline_split=None, **alone))
    assert uses(mapped) == ["data/zero-1"] and mapped.assumed == ()


@pytest.mark.parametrize(("ep", "etp", "over", "edp"), [(8, 1, "ep", 4), (8, 2, ["ep", "etp"], 2), (1, 1, None, 32)])
def test_experts_have_a_view_of_their_own(ep: int, etp: int, over: Any, edp: int) -> None:
    mapped = map_run(row(**{**EXPERTS, "mesh__ep": ep, "mesh__etp": etp}))
    assert mapped.job["plan"]["views"] == {"experts": {"edp": edp, "ep": ep, "etp": etp}}
    assert [entry(mapped, use)["over"] for use in uses(mapped, "expert/all-to-all")] == ([over] if over else [])
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
    mapped = map_run(row(of={"plan": PublishedPlan(other=other)}, **EXPERTS))
    assert uses(mapped, "expert/") == [use]
    resolve_plan(load_job(mapped.job))


@pytest.mark.parametrize(("schedule", "use"), [("dualpipe", "expert/deepep"), ("1f1b", "expert/all-to-all")])
def test_runs_of_dualpipe_dispatch_as_it_was_published(schedule: str, use: str) -> None:
    mapped = map_run(row(**{**EXPERTS, "mesh__ep": 2}, mesh__vpp=None, schedule=schedule, gpus=16))
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
    mapped = map_run(row(**EXPERTS, gpus_per_node=4, **changes))
    assert use in uses(mapped) and ("token dispatcher" in mapped.assumed) == (use == "expert/hybrid-ep")


@pytest.mark.parametrize("pp", [1, 2])
def test_overlap_of_expert_parallelism_is_that_of_two_passes(pp: int) -> None:
    pipeline = {"mesh__pp": pp, "mesh__dp": 16 // pp, "mesh__vpp": 4 if pp > 1 else 1, "shard_group": 16 // pp}
    for overlap in (True, False):
        mapped = map_run(row(**EXPERTS, overlap__ep=overlap, **pipeline))
        pairs = [entry(mapped, use).get("overlap_passes", False) for use in uses(mapped, "pipeline/")]
        assert pairs == ([overlap] if overlap or pp > 1 else [])


def test_a_program_may_have_steps_of_less_overhead() -> None:
    assert map_run(row(stack="mlperf-nemo")).job["framework"]["set"]["step_overhead_s"] < 0.035
    assert "step_overhead_s" not in map_run(row()).job["framework"]["set"]


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
        ({"optimizer": "lamb"}, "optimizer", ""),
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
    """The cause is named, or the job leaves it open."""
    mapped = map_run(row(**changes))
    assert field in mapped.assumed and (not use or use in uses(mapped))
    stated = list_open_settings(load_job(map_run(row(stack=changes.get("stack", "megatron-core"))).job))
    is_open = set(list_open_settings(load_job(mapped.job))) > set(stated)
    assert (sigma(mapped) > 0) != is_open if SIGMA.get(field, 1.0) else field == "stack"


@pytest.mark.parametrize(("stated", "ours"), [("adam", "adam"), ("adamw", "adam"), ("muon", "muon"), ("lamb", "adam")])
def test_the_optimizer_of_a_run_is_that_of_its_job(stated: str, ours: str) -> None:
    """Of those that are not described it is Adam, and that is assumed."""
    mapped = map_run(row(optimizer=stated))
    assert mapped.job["optimizer"] == ours
    assert ("optimizer" in mapped.assumed) == (stated == "lamb")


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


def test_irrelevant_fields_are_not_assumed() -> None:
    one_node = {"gpus": 8, "mesh__dp": 1, "mesh__tp": 4, "batch__global": 16, "shard_group": 1}
    assert map_run(row(inter={}, **one_node)).assumed == ()  # no network
    assert not {"overlap.ep", "memory_kind"} & {*map_run(row()).assumed}  # no experts, no memory figure
    assert "memory_kind" in map_run(row(measured={"peak_memory_gib": 40.0})).assumed
    assert map_run(row(filled=[f"{key}:convention" for key in SIGMA])).assumed == ()  # the source filled them in


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
    uneven = {"mesh__pp": 4, "mesh__vpp": stages // 4, "pipeline_split": "uneven"}
    mapped = map_run(row(model__layers=layers, model__mtp=mtp, **uneven))
    assert mapped.job["plan"]["partition"] == split and sum(split) == layers
    assert "pipeline_split" in mapped.assumed


def test_adapters_are_those_of_the_run_or_the_usual_ones() -> None:
    mapped = map_run(row(kind="lora", lora={"rank": 8, "targets": ["qkv", "proj"]}))
    assert mapped.job["train"] == {"mode": "lora", "rank": 8, "targets": ["attn_qkv", "attn_proj"]}
    assert not {"lora.rank", "lora.targets"} & {*mapped.assumed}
    for silent in (map_run(row(kind="lora", lora={"rank": None, "targets": None})), map_run(row(kind="lora"))):
        assert silent.job["train"] == {"mode": "lora", "rank": 16, "targets": ["attn_qkv"]}
        assert {"lora.rank", "lora.targets"} <= {*silent.assumed} and sigma(silent) > sigma(mapped)
    for precision in ("bf16", "fp8"):
        kept = map_run(row(**LORA, stack="mlperf-nemo", precision=precision)).job["framework"]["set"]
        assert ("fp8_activation_inputs" in kept) == (precision == "fp8")
    assert load_job(map_run(row(**LORA)).job).adapters is not None and load_job(map_run(row()).job).adapters is None


def test_experts_make_unknown_graphs_matter() -> None:
    experts = {**EXPERTS, "overlap__ep": False}
    jobs = (load_job(map_run(row(cuda_graphs=None, **changes)).job) for changes in ({}, experts))
    dense, sparse = (sigma_of_open(job, "framework.set.cuda_graphs") for job in jobs)
    assert sparse > 2 * dense


def test_every_program_has_a_framework() -> None:
    for name in (*STACKS, "nemo", "internal", "never-heard-of"):
        assert framework(name) in framework_names()
        assert name in framework_names() or "stack" in map_run(row(stack=name)).assumed


def test_recomputation_stops_early_in_programs_that_do_so() -> None:
    def stops(stack: str, other: str = "") -> bool:
        full = {"kind": "full", "layers": None, "modules": None}
        run = row(of={"plan": PublishedPlan(other=other)}, stack=stack, recompute=full)
        schemes = {scheme.use: scheme for scheme in load_job(map_run(run).job).plan.schemes}
        return bool((schemes["memory/recompute-full"].model_extra or {}).get("early_stop"))

    assert stops("llm-foundry", "FSDP mixed_precision=DEFAULT") and stops("jax")
    assert not stops("llm-foundry", "FSDP mixed_precision=PURE")
    assert not stops("megatron-core") and not stops("megatron-deepspeed")


# --------------------------------------------------------------------------------- clusters of the catalog


def at(inter: str, **changes: Any) -> MappedJob:
    hardware = {"hardware": PublishedHardware(inter=inter)}
    return map_run(row(of=hardware, gpu="a100-sxm-80", stack="megatron-deepspeed", **changes))


def test_a_run_on_a_known_cluster_gets_the_node_of_the_catalog() -> None:
    job = at("4x100Gb Omni-Path per node (Jean-Zay)", gpus=64).job
    assert job["cluster"] == {"node": "jean-zay-a100", "nodes": 8, "gpus": 64}
    assert load_job(job).cluster.scale_up.rate < 1
    assert "node" not in at("8x200Gb HDR InfiniBand per node (Selene)").job["cluster"]


@pytest.mark.parametrize(("gpus", "blocks"), [(64, False), (384, True)])
def test_large_jobs_on_jean_zay_blocked_launches(gpus: int, blocks: bool) -> None:
    job = at("Jean-Zay", gpus=gpus, mesh__dp=gpus // 8, shard_group=gpus // 8)
    assert load_job(job.job).framework.launch_blocking == blocks
