"""What public launchers set: filled in where a run does not state it, and never listed as assumed."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import load_job
from meshcast.validation.published.mapping import map_run
from meshcast.validation.published.recipes import fill_launched, launched_settings
from meshcast.validation.published.rows import PublishedPlan
from tests.validation.published.runs import MOE, row

OPEN: dict[str, Any] = {"recompute__kind": None, "grad_dtype": None}


def test_nemo_1_reduces_gradients_of_fine_tuning_in_16_bits() -> None:
    spec = fill_launched(row(kind="sft-packed", stack="nemo", stack_version="24.07", **OPEN)).spec
    assert (spec.grad_dtype, spec.recompute.kind) == ("bf16", "none")


@pytest.mark.parametrize("changes", [{"stack_version": "24.12"}, {"stack_version": None}, {"stack": "megatron-core"}])
def test_another_release_or_program_is_left_open(changes: dict[str, Any]) -> None:
    given = {"stack": "nemo", "stack_version": "24.07"} | changes
    spec = fill_launched(row(kind="sft-packed", **given, **OPEN)).spec
    assert (spec.grad_dtype, spec.recompute.kind) == (None, None)


def test_what_a_run_states_stands() -> None:
    stated = {"grad_dtype": "fp32", "recompute__kind": "full"}
    spec = fill_launched(row(kind="sft-packed", stack="nemo", stack_version="24.07", **stated)).spec
    assert (spec.grad_dtype, spec.recompute.kind) == ("fp32", "full")


def test_a_model_has_settings_of_its_own() -> None:
    run = row(stack="nemo", stack_version="24.07", **OPEN).model_copy(update={"model": {"name": "Nemotron4-340B"}})
    spec = fill_launched(run).spec
    assert (spec.grad_dtype, spec.recompute.kind) == ("bf16", "selective")


def test_paxml_shards_over_sixteen_nodes() -> None:
    changes = {"gpus": 256, "mesh__dp": 256, "mesh__tp": 1, "mesh__pp": 1, "sharding": "fsdp-hybrid"}
    run = row(stack="jax", stack_version="pax-2024-03-04", shard_group=None, **changes)
    mapped = map_run(run.model_copy(update={"model": {"name": "GPT3-175B"}}))
    assert mapped.job["plan"]["mesh"]["shard"] == 128 and "shard_group" not in mapped.assumed


@pytest.mark.parametrize(
    ("gpu", "round_", "use"),
    [
        ("gb200", "v50", "sequence/ulysses"),
        ("b200-sxm", "v41", "sequence/ulysses"),
        ("h200-sxm", "v50", "sequence/megatron-cp"),
    ],
)
def test_mlperf_exchanges_heads_on_blackwell(gpu: str, round_: str, use: str) -> None:
    changes = {"kind": "lora", "stack": "mlperf-nemo", "gpu": gpu, "mesh__cp": 2, "mesh__dp": 4}
    run = row(**changes, lora={"rank": 16, "targets": ["qkv", "proj"]})
    mapped = map_run(run.model_copy(update={"id": f"mlperf-{round_}-lab-llama2-70b-lora"}))
    assert use in [one["use"] for one in mapped.job["plan"]["schemes"]]
    assert ("mesh.cp" in mapped.assumed) == (use == "sequence/megatron-cp")


def test_code_based_on_megatron_does_not_compile_layers() -> None:
    mapped = map_run(row(compile=None))
    assert "compile" not in mapped.assumed and mapped.job["framework"]["set"]["compile"] is False
    assert "compile" in map_run(row(stack="llm-foundry", compile=None)).assumed


def test_a_loss_is_fused_where_a_program_or_a_source_says_so() -> None:
    eager = map_run(row()).job["framework"]["set"]["loss"]
    assert (eager["forward"], eager["backward"]) == (38, 14)  # six and two kernels over logits in fp32
    said = row().model_copy(update={"plan": PublishedPlan(other="no overlap; cross-entropy fusion")})
    assert "loss" not in map_run(said).job["framework"]["set"]
    for version, is_eager in (("24.07", True), ("24.12", False), (None, False)):
        assert ("loss" in map_run(row(stack="nemo", stack_version=version)).job["framework"]["set"]) == is_eager
    assert "loss" not in map_run(row(stack="megatron-bridge")).job["framework"]["set"]


@pytest.mark.parametrize(("table", "products"), [("a100_80gb.csv", "fp32"), ("a100_80gb_liger.csv", "")])
def test_autocast_converts_the_operands_of_adapters(table: str, products: str) -> None:
    lora = {"rank": 16, "targets": ["qkv", "proj"]}
    run = row(kind="lora", stack="hf-trainer", lora=lora)
    cited = run.model_copy(update={"cited": f"scripts/benchmarks/refs/{table} framework_config foak-fast-kernels"})
    assert map_run(cited).job["framework"]["set"].get("adapters", {}).get("products", "") == products


@pytest.mark.parametrize(
    ("table", "kind", "sharding", "weights"),
    [
        ("a100_80gb_liger.csv", "dense", "fsdp-full", "fp32"),
        ("a100_80gb_liger.csv", "dense", "none", "bf16"),
        ("a100_80gb_liger.csv", "lora", "fsdp-full", "bf16"),
        ("a100_80gb.csv", "dense", "fsdp-full", "bf16"),
    ],
)
def test_fsdp_holds_trained_weights_in_fp32_with_mixed_precision(
    table: str, kind: str, sharding: str, weights: str
) -> None:
    lora = {"rank": 16, "targets": ["qkv", "proj"]} if kind == "lora" else None
    run = row(kind=kind, stack="hf-trainer", main_weights="bf16", sharding=sharding, lora=lora)
    cited = run.model_copy(update={"cited": f"scripts/benchmarks/refs/{table} framework_config foak-fast-kernels"})
    assert map_run(cited).job["precision"]["main_weights"] == weights


def test_gpt_3_has_the_dropout_of_its_launcher() -> None:
    run = row(stack="nemo", stack_version="24.07", model__norm="layernorm")
    gpt = map_run(run.model_copy(update={"model": {"name": "GPT3-20B"}}))
    assert gpt.job["model"]["dropout"] == 0.1 and "model.dropout" not in gpt.assumed
    assert "dropout" not in map_run(run.model_copy(update={"model": {"name": "Nemotron3-22B"}})).job["model"]
    usual = map_run(row(model__norm="layernorm"))
    assert usual.job["model"]["dropout"] == 0.1 and "model.dropout" in usual.assumed
    assert "dropout" not in map_run(row(model__norm="rmsnorm")).job["model"]


def test_a_launcher_that_turns_cudnn_off_has_flash_attention() -> None:
    gpt = {"model": {"name": "GPT3-175B"}}
    run = row(stack="nemo", stack_version="nemo:24.05").model_copy(update=gpt | {"id": "dgxc-v24_11_1-nemo-megatron"})
    assert map_run(run).job["framework"]["set"]["attention_library"] == "flash-2"
    for other in (run.model_copy(update={"id": "nemo-24.05"}), row(stack="nemo", stack_version="nemo:24.12")):
        assert "attention_library" not in map_run(other).job["framework"]["set"]


@pytest.mark.parametrize(
    ("name", "gpu", "month", "overlaps"),
    [
        ("Qwen3-30B-A3B", "h100-sxm", "2025-11", True),
        ("Qwen3-30B-A3B", "h100-sxm", "2026-04", False),
        ("Qwen3-235B-A22B", "b200-sxm", "2025-11", True),
        ("GPT-OSS-120B", "h100-sxm", "2026-04", False),
        ("Nemotron_3_Nano", "h100-sxm", "2026-06", False),
        ("Qwen3-235B-A22B", "h100-sxm", "2025-09", False),
        ("DeepSeek-V3", "h100-sxm", "2025-09", True),
    ],
)
def test_recipes_say_which_dispatches_overlap(name: str, gpu: str, month: str, overlaps: bool) -> None:
    changes = {"kind": "moe", "model__moe": MOE, "mesh__ep": 8, "mesh__etp": 1, "overlap__ep": None, "gpu": gpu}
    run = row(**changes, stack="megatron-bridge", stack_version=month).model_copy(update={"model": {"name": name}})
    assert launched_settings(run, "megatron-bridge").overlaps == overlaps
    assert not launched_settings(run, "megatron-core").overlaps  # a substitute has not the recipes of the program


def test_an_overlap_that_a_program_lacks_is_not_assumed() -> None:
    assert "overlap.tp" not in map_run(row(stack="megatron-deepspeed", overlap__tp=None)).assumed
    assert "overlap.tp" in map_run(row(overlap__tp=None)).assumed
    for release, is_assumed in (("0.10", False), ("2026-01", True)):
        run = row(kind="moe", model__moe=MOE, mesh__ep=8, mesh__etp=1, overlap__ep=None, stack_version=release)
        assert ("overlap.ep" in map_run(run).assumed) == is_assumed


def test_a_run_has_what_a_job_takes_from_the_recipes_of_its_program() -> None:
    open_ = {"grad_dtype": None, "overlap__tp": None, "recompute": {}}
    for stack in ("megatron-bridge", "nemo", "torchtitan", "megatron-core"):
        run = load_job(map_run(row(stack=stack, stack_version=None, sequence_parallel=True, **open_)).job)
        plan = {"tp": 4, "pp": 2, "chunks": 4}
        job = load_job({"model": run.as_written["model"], "cluster": "dgx-h100:8", "framework": stack, "plan": plan})
        assert run.framework.gradients == job.framework.gradients, stack
        assert run.framework.overlap.tp == job.framework.overlap.tp, stack
        recomputed = [[one.use for one in each.plan.schemes if "recompute" in one.use] for each in (run, job)]
        assert recomputed[0] == recomputed[1], stack
