"""What public launchers set: filled in where a run does not state it, and never listed as assumed."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import load_job
from meshcast.validation.published.mapping import map_run
from meshcast.validation.published.recipes import fill_launched, launched_settings
from meshcast.validation.published.rows import PublishedPlan
from tests.validation.published.runs import EXPERTS, LORA, row, uses

OPEN: dict[str, Any] = {"recompute__kind": None, "grad_dtype": None}
NEMO_1 = {"stack": "nemo", "stack_version": "24.07"}
PACKED = {"kind": "sft-packed", **NEMO_1, **OPEN}


def named(model: str) -> dict[str, Any]:
    return {"model": {"name": model}}


@pytest.mark.parametrize(
    ("changes", "of", "gradients", "recompute"),
    [
        (PACKED, {}, "bf16", "none"),  # NeMo 1 reduces gradients of fine-tuning in 16 bits
        ({**PACKED, "stack_version": "24.12"}, {}, None, None),  # another release or program is left open
        ({**PACKED, "stack_version": None}, {}, None, None),
        ({**PACKED, "stack": "megatron-core"}, {}, None, None),
        ({**PACKED, "grad_dtype": "fp32", "recompute__kind": "full"}, {}, "fp32", "full"),  # what is stated stands
        ({**NEMO_1, **OPEN}, named("Nemotron4-340B"), "bf16", "selective"),  # a model has settings of its own
    ],
)
def test_a_launcher_fills_what_a_run_leaves_open(
    changes: dict[str, Any], of: dict[str, Any], gradients: str | None, recompute: str | None
) -> None:
    spec = fill_launched(row(of=of, **changes)).spec
    assert (spec.grad_dtype, spec.recompute.kind) == (gradients, recompute)


def test_paxml_shards_over_sixteen_nodes() -> None:
    changes = {"gpus": 256, "mesh__dp": 256, "mesh__tp": 1, "mesh__pp": 1, "sharding": "fsdp-hybrid"}
    pax = {"stack": "jax", "stack_version": "pax-2024-03-04", "shard_group": None}
    mapped = map_run(row(of=named("GPT3-175B"), **pax, **changes))
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
    of = {"id": f"mlperf-{round_}-lab-llama2-70b-lora"}
    mapped = map_run(row(of=of, **LORA, stack="mlperf-nemo", gpu=gpu, mesh__cp=2, mesh__dp=4))
    assert use in uses(mapped) and ("mesh.cp" in mapped.assumed) == (use == "sequence/megatron-cp")


def test_code_based_on_megatron_does_not_compile_layers() -> None:
    mapped = map_run(row(compile=None))
    assert "compile" not in mapped.assumed and mapped.job["framework"]["set"]["compile"] is False
    assert "compile" in map_run(row(stack="llm-foundry", compile=None)).assumed


def test_a_loss_is_fused_where_a_program_or_a_source_says_so() -> None:
    def settings(of: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        chosen: dict[str, Any] = map_run(row(of=of, **changes)).job["framework"]["set"]
        return chosen

    eager = settings()["loss"]
    assert (eager["forward"], eager["backward"]) == (38, 14)  # six and two kernels over logits in fp32
    assert "loss" not in settings({"plan": PublishedPlan(other="no overlap; cross-entropy fusion")})
    for version, is_eager in (("24.07", True), ("24.12", False), (None, False)):
        assert ("loss" in settings(stack="nemo", stack_version=version)) == is_eager
    assert "loss" not in settings(stack="megatron-bridge")


def cite(table: str) -> dict[str, str]:
    return {"cited": f"scripts/benchmarks/refs/{table} framework_config foak-fast-kernels"}


@pytest.mark.parametrize(("table", "products"), [("a100_80gb.csv", "fp32"), ("a100_80gb_liger.csv", "")])
def test_autocast_converts_the_operands_of_adapters(table: str, products: str) -> None:
    settings = map_run(row(of=cite(table), **LORA, stack="hf-trainer")).job["framework"]["set"]
    assert settings.get("adapters", {}).get("products", "") == products


@pytest.mark.parametrize(
    ("table", "kind", "sharding", "weights"),
    [
        ("a100_80gb_liger.csv", {}, "fsdp-full", "fp32"),
        ("a100_80gb_liger.csv", {}, "none", "bf16"),
        ("a100_80gb_liger.csv", LORA, "fsdp-full", "bf16"),
        ("a100_80gb.csv", {}, "fsdp-full", "bf16"),
    ],
)
def test_fsdp_holds_trained_weights_in_fp32_with_mixed_precision(
    table: str, kind: dict[str, Any], sharding: str, weights: str
) -> None:
    run = row(of=cite(table), **kind, stack="hf-trainer", main_weights="bf16", sharding=sharding)
    assert map_run(run).job["precision"]["main_weights"] == weights


def test_gpt_3_has_the_dropout_of_its_launcher() -> None:
    nemo = {**NEMO_1, "model__norm": "layernorm"}
    gpt = map_run(row(of=named("GPT3-20B"), **nemo))
    assert gpt.job["model"]["dropout"] == 0.1 and "model.dropout" not in gpt.assumed
    assert "dropout" not in map_run(row(of=named("Nemotron3-22B"), **nemo)).job["model"]
    usual = map_run(row(model__norm="layernorm"))
    assert usual.job["model"]["dropout"] == 0.1 and "model.dropout" in usual.assumed
    assert "dropout" not in map_run(row(model__norm="rmsnorm")).job["model"]


def test_a_launcher_that_turns_cudnn_off_has_flash_attention() -> None:
    of = {**named("GPT3-175B"), "id": "dgxc-v24_11_1-nemo-megatron"}
    old = {"stack": "nemo", "stack_version": "nemo:24.05"}
    assert map_run(row(of=of, **old)).job["framework"]["set"]["attention_library"] == "flash-2"
    for other in (row(of=of | {"id": "nemo-24.05"}, **old), row(stack="nemo", stack_version="nemo:24.12")):
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
    """A substitute has not the recipes of the program."""
    bridge = {"stack": "megatron-bridge", "stack_version": month, "gpu": gpu}
    run = row(of=named(name), **EXPERTS, overlap__ep=None, **bridge)
    assert launched_settings(run, "megatron-bridge").overlaps == overlaps
    assert not launched_settings(run, "megatron-core").overlaps


@pytest.mark.parametrize(
    ("overlaps", "dispatcher", "whole"),
    [(True, "hybridep", True), (None, None, True), (True, "deepep", False), (False, "hybridep", False)],
)
def test_a_step_with_experts_is_one_graph_where_dispatches_overlap_but_those_of_deepep(
    overlaps: bool | None, dispatcher: str | None, whole: bool
) -> None:
    bridge = {"stack": "megatron-bridge", "stack_version": "2026-06", "gpu": "gb200", "scale_up_domain": 72}
    of = {"plan": PublishedPlan(other=f"moe_flex_dispatcher_backend={dispatcher}" if dispatcher else None)}
    run = row(of=of, **EXPERTS, **bridge, precision="mxfp8", cuda_graphs=True, overlap__ep=overlaps)
    assert (launched_settings(run, "megatron-bridge").graphs is True) == whole


def test_an_overlap_that_a_program_lacks_is_not_assumed() -> None:
    assert "overlap.tp" not in map_run(row(stack="megatron-deepspeed", overlap__tp=None)).assumed
    assert "overlap.tp" in map_run(row(overlap__tp=None)).assumed
    for release, is_assumed in (("0.10", False), ("2026-01", True)):
        run = row(**EXPERTS, overlap__ep=None, stack_version=release)
        assert ("overlap.ep" in map_run(run).assumed) == is_assumed


def test_a_run_has_what_a_job_takes_from_the_recipes_of_its_program() -> None:
    open_ = {"grad_dtype": None, "overlap__tp": None, "recompute": {}}
    for stack in ("megatron-bridge", "nemo", "torchtitan", "megatron-core"):
        run = load_job(map_run(row(stack=stack, stack_version=None, sequence_parallel=True, **open_)).job)
        plan = {"tp": 4, "pp": 2, "chunks": 4}
        job = load_job({"model": run.as_written["model"], "cluster": "dgx-h100:8", "framework": stack, "plan": plan})
        assert run.framework.gradients == job.framework.gradients, stack
        assert run.framework.overlap.tp == job.framework.overlap.tp, stack
        recomputed = [[scheme.use for scheme in of.plan.schemes if "recompute" in scheme.use] for of in (run, job)]
        assert recomputed[0] == recomputed[1], stack
