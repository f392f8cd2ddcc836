"""A job written as a launch file and read back is the same job, for all that the file can say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.formats.launch.convert import compare_keys, export_job, import_text
from meshcast.simulator.formats.launch.keys import compose_job, flatten_job
from meshcast.simulator.formats.launch.launch_file import LaunchOptions
from meshcast.simulator.formats.launch.programs.registry import EXPORTS
from meshcast.simulator.formats.launch.programs.torchtitan_configs import FLAVORS, REMOVED
from meshcast.simulator.formats.launch.table import Keys
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.models.load import load_model, presets
from tests.draws import drawn
from tests.strategies import examples


def load(job: dict[str, Any], folder: Path = Path()) -> Job:
    return load_job(job, base=folder)


def accept(job: Job) -> None:
    """Checks nothing: most drawn degrees divide no real model."""


def assert_round_trip(job: Job, form: str) -> None:
    """Nothing is unsaid, and the file read anew is the job."""
    exported = export_job(job, form, load, accept)
    assert exported.unsaid == {}, exported.text
    model = job.as_written["model"] if form in ("torchtitan", "deepspeed") else None
    silent = LaunchOptions(assume_defaults=True)
    back = load(import_text(exported.text, "file", form, job.as_written["cluster"], model, options=silent).job)
    assert compare_keys(flatten_job(job), flatten_job(back)) == {}
    for part in ("cluster", "batch", "precision", "run", "framework"):
        assert getattr(back, part) == getattr(job, part), part
    assert back.model.model_copy(update={"name": ""}) == job.model.model_copy(
        update={"name": "", "seq": back.model.seq, "position_rows": back.model.position_rows}
        if job.model.positions != "learned"
        else {"name": ""}
    )


# ------------------------------------------------------------------------------------------- drawing

TRAITS = ("overlap.dp", "overlap.updated_weights", "overlap.tp", "fused_gradients")


@st.composite
def shapes(draw: st.DrawFn) -> Keys:
    """The keys of a model that Megatron-Core's configuration can describe."""
    heads = draw(st.sampled_from([4, 8, 16]))
    layers = 4 * draw(st.integers(1, 6))
    biased = draw(st.booleans())
    keys: Keys = {
        **{"layers": layers, "heads": heads, "hidden": 64 * heads, "ffn": 64 * draw(st.integers(1, 40))},
        **{"vocab": draw(st.integers(100, 300_000)), "seq": 1024 * draw(st.integers(1, 8))},
        **{"gated": draw(st.booleans()), "tied": draw(st.booleans()), "dropout": draw(st.sampled_from([0.0, 0.1]))},
        "positions": draw(st.sampled_from(["learned", "rope", "none"])),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm", "layernorm1p"])),
        **{"mlp_bias": biased, "proj_bias": biased, "qkv_bias": biased or draw(st.booleans())},
        "qk_layernorm": draw(st.booleans()),
        "mtp": draw(st.sampled_from([0, 0, 1])),
    }
    if draw(st.booleans()):
        keys |= {
            "mla.kv_lora_rank": 128,
            "mla.qk_nope": 32,
            "mla.qk_rope": draw(st.sampled_from([16, 64])),
            "mla.v": 64,
        }
        keys |= {"positions": "rope", "qkv_bias": False}
        if draw(st.booleans()):
            keys["mla.q_lora_rank"] = 96
    else:
        keys |= {"kv_heads": heads // draw(st.sampled_from([1, 2, 4])), "head_dim": draw(st.sampled_from([64, 128]))}
        if draw(st.booleans()):
            keys |= {"window": draw(st.integers(16, 1024)), "full_every": draw(st.sampled_from([0, 2, 4]))}
    if draw(st.booleans()):
        width = 32 * draw(st.integers(1, 16))
        keys |= {"moe.experts": 8, "moe.top_k": draw(st.integers(1, 4)), "moe.expert_ffn": width}
        keys |= {"moe.router_bias": draw(st.booleans()), "moe.capacity": draw(st.sampled_from([None, 1.25]))}
        shared = draw(st.integers(0, 2))
        keys |= {"moe.shared_experts": shared, "moe.shared_ffn": shared * width}
        dense = draw(st.integers(0, layers - 1))
        keys |= {"moe.first_dense": dense, "moe.every": 1 if dense else draw(st.sampled_from([1, 2]))}
    return {f"model.{key}": one for key, one in keys.items()}


@st.composite
def megatron_keys(draw: st.DrawFn, framework: str) -> Keys:
    """The keys of a job that the programs on Megatron-Core can run."""
    keys: Keys = draw(shapes())
    tp, pp, cp = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    dp = draw(st.sampled_from([2, 4]))
    layers, experts = keys["model.layers"], "model.moe.experts" in keys
    keys |= {"plan.tp": tp, "plan.pp": pp, "plan.cp": cp, "plan.dp": dp, "framework.name": framework}
    keys |= {"batch.micro": draw(st.integers(1, 2)), "batch.sequence": 1024 * draw(st.integers(1, 4))}
    keys["batch.global"] = keys["batch.micro"] * dp * 4 * pp
    keys["plan.data"] = draw(st.sampled_from(["ddp", "zero-1", "zero-2", "fsdp"]))
    if keys["plan.data"] in ("zero-1", "fsdp"):
        keys["plan.replicate"] = draw(st.sampled_from([1, 2]))
    if tp > 1:
        keys["plan.tensor"] = draw(st.sampled_from(["megatron-sp", "megatron"]))
    if cp > 1:
        keys |= {
            "plan.sequence": "megatron-cp",
            "plan.sequence.comm": draw(st.sampled_from(["p2p", "all_gather", "a2a"])),
        }
    if pp > 1:
        keys["plan.partition"] = "even"
        if draw(st.booleans()):
            keys |= {"plan.pipeline": "interleaved-1f1b", "plan.pipeline.chunks": draw(st.sampled_from([2, 4]))}
            keys["plan.pipeline.group"] = draw(st.sampled_from([None, 2 * pp]))
        stages = pp * keys.get("plan.pipeline.chunks", 1)
        if layers > stages and draw(st.booleans()):
            keys["plan.partition"] = (*(1 for _ in range(stages - 1)), layers - stages + 1)
        elif draw(st.booleans()):
            keys["plan.partition"] = "ends-as-layers"
    if experts:
        keys |= {"plan.ep": draw(st.sampled_from([1, 2])), "plan.etp": draw(st.sampled_from([1, tp]))}
        if keys["plan.ep"] > 1:
            whole = keys["plan.etp"] == 1
            keys["plan.expert"] = draw(
                st.sampled_from(["all-to-all", *(["all-gather-dispatch", "hybrid-ep", "deepep"] if whole else [])])
            )
            keys["model.moe.routing"] = "forced-balanced"  # scripts have random tokens
            if keys["plan.expert"] in ("deepep", "hybrid-ep"):
                keys["plan.expert.sms"] = draw(st.integers(4, 32))
            if keys["plan.expert"] == "deepep":
                keys |= {"plan.expert.dispatch": "bf16", "plan.expert.most": 1000}
    keys["plan.recompute"] = draw(st.sampled_from(["none", "selective", "full"]))
    if keys["plan.recompute"] == "selective":
        modules = st.lists(
            st.sampled_from(["core_attn", "mlp", "moe_act", "layernorm"]), min_size=1, max_size=3, unique=True
        )
        keys["plan.recompute.modules"] = tuple(draw(modules))
    elif keys["plan.recompute"] == "full" and draw(st.booleans()):
        keys["plan.recompute.layers"] = draw(st.integers(1, 4))
    keys["plan.order"] = draw(st.sampled_from(["pp-dp-cp-tp", "dp-pp-cp-tp"])) if pp > 1 else "pp-dp-cp-tp"
    keys["precision.compute"] = draw(
        st.sampled_from(["bf16", "fp16", "fp32", "fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "mxfp8", "nvfp4"])
        if framework == "megatron-core"
        else st.sampled_from(["bf16", "fp16", "fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "mxfp8", "nvfp4"])
    )
    half = keys["precision.compute"] if keys["precision.compute"] == "fp16" and framework == "megatron-core" else "bf16"
    if keys["precision.compute"] != "fp32":
        keys["precision.gradients"] = draw(st.sampled_from(["fp32", half]))
    keys["precision.moments"] = draw(st.sampled_from(["fp32", "bf16"]))
    keys |= {f"framework.set.{name}": draw(st.booleans()) for name in TRAITS}
    if keys["plan.data"] == "ddp" or not keys["framework.set.overlap.dp"]:  # Megatron-LM does not start otherwise
        keys["framework.set.overlap.updated_weights"] = False
    if keys.get("plan.tensor") != "megatron-sp":
        keys["framework.set.overlap.tp"] = False
    keys["framework.set.attention"] = draw(st.sampled_from(["flash", "unfused"]))
    graphs = ["attn", "moe_router", "moe_preprocess"] if experts else ["attn", "mlp"]
    modules = st.sets(st.sampled_from(graphs), min_size=1).map(lambda drawn: tuple(filter(drawn.__contains__, graphs)))
    keys["framework.set.cuda_graphs"] = draw(st.booleans() | modules)
    if draw(st.booleans()):
        keys["run.steps"] = draw(st.integers(1, 10**6))
    return keys


@st.composite
def torchtitan_keys(draw: st.DrawFn) -> tuple[Keys, Any]:
    """The keys of a job that torchtitan can run, today's or the last release that reads TOML, and its model."""
    toml = draw(st.booleans())
    name = draw(
        st.sampled_from(["llama3-8b", "llama3-70b", "qwen3-32b", "deepseek-v2-lite", "mixtral-8x7b", "llama-7b"])
    )
    shape = load_model(name)
    tp, pp, cp, copies = (draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    dp = copies * draw(st.sampled_from([2, 4]))
    keys: Keys = {"plan.tp": tp, "plan.pp": pp, "plan.cp": cp, "plan.dp": dp, "framework.name": "torchtitan"}
    keys |= {"framework.release": "2026-01"} if toml else {}
    keys |= {"batch.micro": draw(st.integers(1, 2)), "batch.sequence": 2048 * draw(st.integers(1, 4))}
    keys["batch.global"] = keys["batch.micro"] * dp * 2 * pp
    keys["plan.data"] = draw(st.sampled_from(["fsdp", *(["ddp"] if cp == 1 else [])]))
    if keys["plan.data"] == "fsdp":
        keys |= {"plan.replicate": copies, "plan.data.reshard": draw(st.booleans())}
    if tp > 1:
        keys["plan.tensor"] = draw(st.sampled_from(["megatron-sp", "megatron"]))
    if cp > 1 and toml and draw(st.booleans()):
        keys |= {"plan.sequence": "ring", "plan.sequence.merge": "eager"}
    if pp > 1:
        keys["plan.pipeline"] = draw(
            st.sampled_from(["1f1b", "gpipe", "interleaved-1f1b", "breadth-first", "zb-v", "dualpipe-v"])
        )
        chunks = 1 if keys["plan.pipeline"] in ("1f1b", "gpipe") else 2
        if keys["plan.pipeline"] in ("interleaved-1f1b", "breadth-first"):
            chunks = draw(st.sampled_from([2, 4]))
        keys["plan.pipeline.chunks"] = chunks
        each, more = divmod(shape.layers, pp * chunks)
        uneven = (*(each for _ in range(pp * chunks - 1)), each + more)
        keys["plan.partition"] = "even" if not more and draw(st.booleans()) else uneven if more else "even"
    if shape.moe is not None and draw(st.booleans()):
        keys |= {"plan.ep": 2, "plan.etp": draw(st.sampled_from([1, tp] if toml else [1]))}
        keys["model.moe.routing"] = draw(st.sampled_from(["loss-free", "forced-balanced"]))
        keys["plan.expert"] = "all-to-all"
    keys["plan.recompute"] = draw(st.sampled_from(["none", "operators", "full"]))
    if keys["plan.recompute"] == "full" and toml and draw(st.booleans()):
        keys["plan.recompute.layers"] = shape.layers // pp // draw(st.sampled_from([2, 4]))
    formats = ["fp32", "fp8-rowwise", "mxfp8", *(["fp8-tensorwise"] if toml else [])]
    mixed = keys["plan.data"] == "fsdp" or tp == pp == 1
    keys["precision.compute"] = draw(st.sampled_from([*formats, "bf16"] if mixed else formats))
    if draw(st.booleans()):
        keys |= {"precision.main_weights": "bf16", "precision.moments": "bf16"}
    keys["framework.set.compile"] = draw(st.booleans())
    keys["framework.set.overlap.tp"] = (toml or keys["framework.set.compile"]) and draw(st.booleans())
    keys["run.steps"] = draw(st.integers(1, 10**6))
    return keys, name


@st.composite
def deepspeed_keys(draw: st.DrawFn) -> tuple[Keys, Any]:
    """The keys of a job that DeepSpeed can run, and its model."""
    name = draw(st.sampled_from(["llama2-7b", "gpt2-1.5b", "mistral-7b"]))
    tp, cp = (draw(st.sampled_from([1, 2, 4])) for _ in range(2))
    dp = draw(st.sampled_from([8, 16]))
    keys: Keys = {"plan.tp": tp, "plan.cp": cp, "plan.dp": dp, "framework.name": "deepspeed", "plan.pp": 1}
    keys["batch.micro"] = draw(st.integers(1, 4))
    keys["batch.global"] = keys["batch.micro"] * dp * draw(st.integers(1, 8))
    if cp > 1:
        keys["plan.sequence"] = "ulysses"
    schemes = ["ddp", "zero-1", "zero-2", "zero-3", "zero-offload", "zero-infinity"]
    keys["plan.data"] = draw(
        st.sampled_from([*schemes, *(["mics", "zero-plus-plus"] if tp == cp == 1 and dp == 16 else [])])
    )
    if keys["plan.data"] in ("zero-3", "zero-infinity"):
        keys |= {"plan.data.max_live": draw(st.sampled_from([10**9, 5 * 10**8])), "plan.data.prefetch_bucket": 10**7}
    if keys["plan.data"] == "zero-3":
        keys["plan.data.persistence"] = draw(st.integers(0, 10**6))
    if keys["plan.data"] == "zero-infinity":
        keys |= {"plan.data.optimizer": draw(st.sampled_from(["cpu", "nvme"]))}
        keys |= {"plan.data.parameters": draw(st.sampled_from(["gpu", "cpu", "nvme"]))}
    if keys["plan.data"] == "mics":
        keys["plan.replicate"] = draw(st.sampled_from([2, 4]))
    if keys["plan.data"] == "zero-plus-plus":
        keys |= {f"plan.data.{one}": draw(st.booleans()) for one in ("qwz", "qgz")}
    keys["precision.compute"] = draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    if keys["precision.compute"] != "fp32":
        keys["precision.gradients"] = draw(st.sampled_from(["fp32", keys["precision.compute"]]))
    keys["framework.set.overlap.dp"] = draw(st.booleans())
    sharded = keys["plan.data"] in ("zero-3", "zero-infinity", "zero-plus-plus")
    bucket = "plan.data.reduce_bucket" if sharded else "framework.set.bucket.elements"
    keys[bucket] = draw(st.integers(10**6, 10**9))
    return keys, name


@st.composite
def trainer_keys(draw: st.DrawFn, framework: str, form: str) -> tuple[Keys, Any]:
    """The keys of a job that a program on Hugging Face's Trainer can run, and its model."""
    mesh = form != "llamafactory"  # which has no tensor and context parallelism
    tp, cp = (draw(st.sampled_from([1, 2])) if mesh and framework != "deepspeed" else 1 for _ in range(2))
    keys: Keys = {"framework.name": framework, "plan.tp": tp, "plan.cp": cp, "plan.dp": 8, "plan.pp": 1}
    keys |= {"batch.micro": draw(st.integers(1, 4)), "batch.sequence": 1024 * draw(st.integers(1, 4))}
    keys["batch.global"] = keys["batch.micro"] * 8 * draw(st.integers(1, 8))
    keys["plan.recompute"] = draw(st.sampled_from(["none", "full"]))
    keys["precision.compute"] = draw(st.sampled_from(["bf16", "fp16"]))
    if framework == "deepspeed":
        keys["plan.data"] = draw(st.sampled_from(["zero-1", "zero-2", "zero-3", "zero-offload", "zero-infinity"]))
        keys["framework.set.overlap.dp"] = draw(st.booleans())
        if keys["plan.data"] == "zero-3":
            keys["plan.data.persistence"] = draw(st.integers(0, 10**6))
    elif tp * cp == 1 and draw(st.booleans()):
        keys["plan.data"] = "ddp"
        is_pure = form == "axolotl" and keys["precision.compute"] == "bf16"  # weights in 16 bits alone
        formats = ("gradients", "main_weights", "moments") if is_pure else ("gradients",)
        keys |= {f"precision.{name}": "bf16" if is_pure else "fp32" for name in formats}
    else:
        second = tp * cp > 1 or draw(st.booleans())
        keys |= {"plan.data": "fsdp", "framework.set.gathers_apart": second}
        keys["plan.data.backward_prefetch"] = second or draw(st.booleans())
        keys["plan.data.reshard"] = draw(st.booleans()) if second else True
        keys["plan.replicate"] = draw(st.sampled_from([1, 2])) if mesh and second else 1
        keys["framework.set.attention_library"] = draw(st.sampled_from(["sdpa", "flash-2", "flash-3"]))
    if cp > 1:
        keys["plan.sequence"] = draw(st.sampled_from(["ring", "all-gather"]))
    if keys["plan.recompute"] == "full":
        reentrant = draw(st.booleans())
        keys["framework.set.recompute_early_stop"] = not reentrant
        if keys["plan.data"] == "fsdp":
            keys |= {f"framework.set.{name}": reentrant for name in ("reentrant_units", "memory.hooks_hold_inputs")}
    if draw(st.booleans()):
        keys |= {"train.mode": "lora", "train.rank": draw(st.integers(1, 128)), "train.targets": ["attn_qkv", "mlp_up"]}
    elif form == "llamafactory" and framework == "deepspeed" and keys["plan.data"] not in ("zero-3", "zero-infinity"):
        keys["framework.set.memory.loads"] = "fp32"  # whatever its files say
    keys["run.steps"] = draw(st.integers(1, 10**6))
    return keys, draw(st.sampled_from(["llama3-8b", "qwen2.5-7b", "mistral-7b"]))


def compose(keys: Keys, model: Any = None) -> Job:
    """The job of drawn keys, on as many whole nodes as they need."""
    gpus = keys["plan.tp"] * keys["plan.pp"] * keys["plan.cp"] * keys["plan.dp"]
    nodes = -(-gpus // 8)
    job = load(compose_job(keys, {"node": "dgx-h100", "nodes": nodes, "gpus": gpus}, model))
    found = flatten_job(job)
    active = {key: one for key, one in keys.items() if one is not None and (key in found or key.startswith("batch."))}
    assert {key: found.get(key) for key in active if key != "model.seq"} == {
        key: one for key, one in active.items() if key != "model.seq"
    }
    return job


# ------------------------------------------------------------------------------------------- testing


@pytest.mark.parametrize(("form", "framework"), [("megatron", "megatron-core"), ("megatron-bridge", "megatron-bridge")])
@given(st.data())
@examples(400)
def test_jobs_of_megatron_and_nemo(form: str, framework: str, data: st.DataObject) -> None:
    assert_round_trip(compose(data.draw(megatron_keys(framework))), form)


@given(torchtitan_keys())
@examples(400)
def test_jobs_of_torchtitan(drawn: tuple[Keys, Any]) -> None:
    assert_round_trip(compose(*drawn), "torchtitan")


@given(deepspeed_keys())
@examples(400)
def test_jobs_of_deepspeed(drawn: tuple[Keys, Any]) -> None:
    assert_round_trip(compose(*drawn), "deepspeed")


PROFILES = {"accelerate": "hf-trainer", "llamafactory": "llama-factory", "axolotl": "axolotl"}


@pytest.mark.parametrize("framework", ["", "deepspeed"])
@pytest.mark.parametrize("form", ["accelerate", "llamafactory", "axolotl"])
@given(st.data())
@examples(100)
def test_jobs_of_programs_on_the_trainer(form: str, framework: str, data: st.DataObject) -> None:
    assert_round_trip(compose(*data.draw(trainer_keys(framework or PROFILES[form], form))), form)


@pytest.mark.parametrize("name", drawn([one for one in presets() if not load_model(one).branches], keep=3))
def test_presets_keep_their_shape_or_the_header_says_what_is_lost(name: str) -> None:
    job = load({"model": name, "cluster": "dgx-h100:1", "plan": {"dp": 8}})
    exported = export_job(job, "megatron", load, accept)
    lost = {key for key in exported.unsaid if key.startswith("model.")}
    back = load(import_text(exported.text, "file", "megatron", "dgx-h100:1").job).model
    assert all(f"#   {key}: " in exported.text for key in lost)
    if not lost:
        assert back.parameters == job.model.parameters


@pytest.mark.parametrize(
    ("plan", "replicate", "shard", "reshard"),
    [
        ({"zero": 0}, 8, 1, ""),
        ({}, 1, -1, ""),
        ({"zero": 1}, 1, -1, "never"),
        ({"zero": 2}, 1, -1, "never"),
        ({"zero": 3}, 1, -1, "always"),
    ],
)
def test_sharded_states_stay_sharded_in_torchtitan(plan: Any, replicate: int, shard: int, reshard: str) -> None:
    """In both forms of its files."""
    for framework in ("torchtitan", {"name": "torchtitan", "release": "2025-12"}):
        job = load({"model": "llama3-8b", "cluster": "dgx-h100:1", "framework": framework, "plan": plan})
        words = export_job(job, "torchtitan", load, accept).text.replace(" ", "").replace(",", "")
        assert f"data_parallel_replicate_degree={replicate}\ndata_parallel_shard_degree={shard}\n" in words
        assert (f'fsdp_reshard_after_forward="{reshard}"' in words) == bool(reshard)


def test_deepspeed_is_told_of_optimizer_states_on_the_host() -> None:
    job = {"model": "gpt2-1.5b", "cluster": "dgx-h100:1", "framework": "deepspeed"}
    told = export_job(load({**job, "plan": {"zero": 2, "offload": ["optimizer"]}}), "deepspeed", load, accept)
    assert told.unsaid == {} and '"offload_optimizer": {\n      "device": "cpu"' in told.text
    weights = export_job(
        load({**job, "plan": {"zero": 3, "offload": ["optimizer"]}}), "deepspeed", load, lambda job: None
    )
    assert weights.unsaid.keys() == {"plan.data"} and weights.unsaid["plan.data"] == ("zero-3", "zero-infinity")
    none = export_job(load({**job, "plan": {"zero": 2}}), "deepspeed", load, accept)
    assert none.unsaid == {} and "offload_optimizer" not in none.text


@pytest.mark.parametrize("form", EXPORTS)
def test_what_a_program_cannot_run_is_in_the_header(form: str) -> None:
    job = load(
        {
            "model": "mixtral-8x7b",
            "cluster": "dgx-h100:8",
            "plan": {"pp": 4, "ep": 4, "schedule": "zb-h1", "ep_scheme": "tutel", "fsdp": True},
        }
    )
    exported = export_job(job, form, load, accept)
    assert exported.unsaid["plan.pipeline" if form != "deepspeed" else "plan.pp"][0] in ("zb-h1", 4)
    assert exported.unsaid["plan.expert"][0] == "tutel"
    assert "plan.expert: tutel; here" in exported.text


def test_a_job_of_every_flavor_of_torchtitan_names_it() -> None:
    for (name, flavor), model in FLAVORS.items():
        described = {"model": model, "cluster": "dgx-h100:1", "plan": {"fsdp": True}}
        toml, python = (
            export_job(load({**described, "framework": framework}), "torchtitan", load, accept).text
            for framework in ({"name": "torchtitan", "release": "2025-12"}, "torchtitan")
        )
        assert f'name = "{name}"' in toml and f'flavor = "{flavor}"' in toml.lower()
        if name not in REMOVED:
            assert f"torchtitan.models.{name} import" in python and f'model_registry("{flavor}"' in python.lower()
        for text in (toml, *([python] if name not in REMOVED else [])):
            assert import_text(text, "file", "torchtitan", "dgx-h100:1").job["model"] == model
