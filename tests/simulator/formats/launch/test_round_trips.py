"""A job written as a launch file and read back is the same job, for all that the file can say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.formats.launch.convert import compare_keys, export_job, import_text
from meshcast.simulator.formats.launch.keys import compose_job, flatten_job, flatten_model
from meshcast.simulator.formats.launch.programs.registry import EXPORTS
from meshcast.simulator.formats.launch.programs.torchtitan_configs import FLAVORS, REMOVED
from meshcast.simulator.formats.launch.table import Keys
from meshcast.simulator.job.job import Job
from meshcast.simulator.models.load import load_model, presets
from tests.draws import drawn
from tests.launch_files import export, load, read_launch
from tests.strategies import examples


def assert_round_trip(job: Job, form: str) -> None:
    """Nothing is unsaid, and the file as export reads it back is the job."""
    checked: list[Job] = []
    exported = export_job(job, form, load, checked.append)
    assert exported.unsaid == {}, exported.text
    back = checked[-1]
    assert compare_keys(flatten_job(job), flatten_job(back)) == {}
    for part in ("cluster", "batch", "precision", "run", "framework"):
        assert getattr(back, part) == getattr(job, part), part
    same = {"name": ""}
    rows = {"seq": back.model.seq, "position_rows": back.model.position_rows}
    written = same | (rows if job.model.positions != "learned" else {})
    assert back.model.model_copy(update=same) == job.model.model_copy(update=written)


# ------------------------------------------------------------------------------------------- drawing

TRAITS = ("overlap.dp", "overlap.updated_weights", "overlap.tp", "fused_gradients")
FP8 = ("fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "mxfp8", "nvfp4")


class Drawing:
    """Draws the values of keys."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def of(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def up_to(self, most: int, least: int = 1) -> int:
        return self.draw(st.integers(least, most))

    def flag(self) -> bool:
        return self.draw(st.booleans())


def draw_shape(draw: Drawing) -> Keys:
    """Draws the keys of a model that Megatron-Core's configuration can describe."""
    heads, layers, biased = draw.of(4, 8, 16), 4 * draw.up_to(6), draw.flag()
    keys: Keys = {
        **{"layers": layers, "heads": heads, "hidden": 64 * heads, "ffn": 64 * draw.up_to(40)},
        **{"vocab": draw.up_to(300_000, 100), "seq": 1024 * draw.up_to(8), "mtp": draw.of(0, 0, 1)},
        **{"gated": draw.flag(), "tied": draw.flag(), "dropout": draw.of(0.0, 0.1), "qk_layernorm": draw.flag()},
        **{"positions": draw.of("learned", "rope", "none"), "norm": draw.of("layernorm", "rmsnorm", "layernorm1p")},
        **{"mlp_bias": biased, "proj_bias": biased, "qkv_bias": biased or draw.flag()},
    }
    if draw.flag():
        keys |= {"mla.kv_lora_rank": 128, "mla.qk_nope": 32, "mla.qk_rope": draw.of(16, 64), "mla.v": 64}
        keys |= {"positions": "rope", "qkv_bias": False, **({"mla.q_lora_rank": 96} if draw.flag() else {})}
    else:
        keys |= {"kv_heads": heads // draw.of(1, 2, 4), "head_dim": draw.of(64, 128)}
        if draw.flag():
            keys |= {"window": draw.up_to(1024, 16), "full_every": draw.of(0, 2, 4)}
    if draw.flag():
        width, shared, dense = 32 * draw.up_to(16), draw.up_to(2, 0), draw.up_to(layers - 1, 0)
        keys |= {"moe.experts": 8, "moe.top_k": draw.up_to(4), "moe.expert_ffn": width}
        keys |= {"moe.router_bias": draw.flag(), "moe.capacity": draw.of(None, 1.25)}
        keys |= {"moe.shared_experts": shared, "moe.shared_ffn": shared * width}
        keys |= {"moe.first_dense": dense, "moe.every": 1 if dense else draw.of(1, 2)}
    return {f"model.{key}": value for key, value in keys.items()}


def draw_megatron(draw: Drawing, framework: str) -> Keys:
    """Draws the keys of a job that the programs on Megatron-Core can run."""
    keys = draw_shape(draw)
    tp, pp, cp, dp = draw.of(1, 2, 4), draw.of(1, 2, 4), draw.of(1, 2, 4), draw.of(2, 4)
    layers, experts = keys["model.layers"], "model.moe.experts" in keys
    keys |= {"plan.tp": tp, "plan.pp": pp, "plan.cp": cp, "plan.dp": dp, "framework.name": framework}
    keys |= {"batch.micro": draw.up_to(2), "batch.sequence": 1024 * draw.up_to(4)}
    keys["batch.global"] = keys["batch.micro"] * dp * 4 * pp
    keys["plan.data"] = draw.of("ddp", "zero-1", "zero-2", "fsdp")
    if keys["plan.data"] in ("zero-1", "fsdp"):
        keys["plan.replicate"] = draw.of(1, 2)
    if tp > 1:
        keys["plan.tensor"] = draw.of("megatron-sp", "megatron")
    if cp > 1:
        keys |= {"plan.sequence": "megatron-cp", "plan.sequence.comm": draw.of("p2p", "all_gather", "a2a")}
    if pp > 1:
        keys["plan.partition"] = "even"
        if draw.flag():
            keys |= {"plan.pipeline": "interleaved-1f1b", "plan.pipeline.chunks": draw.of(2, 4)}
            keys["plan.pipeline.group"] = draw.of(None, 2 * pp)
        stages = pp * keys.get("plan.pipeline.chunks", 1)
        if layers > stages and draw.flag():
            keys["plan.partition"] = (*[1] * (stages - 1), layers - stages + 1)
        elif draw.flag():
            keys["plan.partition"] = "ends-as-layers"
    if experts:
        keys |= {"plan.ep": draw.of(1, 2), "plan.etp": draw.of(1, tp)}
        if keys["plan.ep"] > 1:
            whole = ["all-gather-dispatch", "hybrid-ep", "deepep"] if keys["plan.etp"] == 1 else []
            keys["plan.expert"] = draw.of("all-to-all", *whole)
            keys["model.moe.routing"] = "forced-balanced"  # scripts have random tokens
            if keys["plan.expert"] in ("deepep", "hybrid-ep"):
                keys["plan.expert.sms"] = draw.up_to(32, 4)
            if keys["plan.expert"] == "deepep":
                keys |= {"plan.expert.dispatch": "bf16", "plan.expert.most": 1000}
    keys["plan.recompute"] = draw.of("none", "selective", "full")
    if keys["plan.recompute"] == "selective":
        modules = st.sampled_from(["core_attn", "mlp", "moe_act", "layernorm"])
        keys["plan.recompute.modules"] = tuple(draw.draw(st.lists(modules, min_size=1, max_size=3, unique=True)))
    elif keys["plan.recompute"] == "full" and draw.flag():
        keys["plan.recompute.layers"] = draw.up_to(4)
    keys["plan.order"] = draw.of("pp-dp-cp-tp", "dp-pp-cp-tp") if pp > 1 else "pp-dp-cp-tp"
    keys["precision.compute"] = draw.of("bf16", "fp16", *FP8, *(["fp32"] if framework == "megatron-core" else []))
    half = "fp16" if keys["precision.compute"] == "fp16" and framework == "megatron-core" else "bf16"
    if keys["precision.compute"] != "fp32":
        keys["precision.gradients"] = draw.of("fp32", half)
    keys["precision.moments"] = draw.of("fp32", "bf16")
    keys |= {f"framework.set.{name}": draw.flag() for name in TRAITS}
    if keys["plan.data"] == "ddp" or not keys["framework.set.overlap.dp"]:  # Megatron-LM does not start otherwise
        keys["framework.set.overlap.updated_weights"] = False
    if keys.get("plan.tensor") != "megatron-sp":
        keys["framework.set.overlap.tp"] = False
    keys["framework.set.attention"] = draw.of("flash", "unfused")
    graphs = ["attn", "moe_router", "moe_preprocess"] if experts else ["attn", "mlp"]
    modules = st.sets(st.sampled_from(graphs), min_size=1).map(lambda drawn: tuple(filter(drawn.__contains__, graphs)))
    keys["framework.set.cuda_graphs"] = draw.draw(st.booleans() | modules)
    return keys | ({"run.steps": draw.up_to(10**6)} if draw.flag() else {})


def draw_torchtitan(draw: Drawing) -> tuple[Keys, str]:
    """Draws the keys of a job that torchtitan can run, today's or the last release that reads TOML, and its model."""
    toml = draw.flag()
    name = draw.of("llama3-8b", "llama3-70b", "qwen3-32b", "deepseek-v2-lite", "mixtral-8x7b", "llama-7b")
    shape = load_model(name)
    tp, pp, cp, copies = (draw.of(1, 2, 4) for _ in range(4))
    dp = copies * draw.of(2, 4)
    keys: Keys = {"plan.tp": tp, "plan.pp": pp, "plan.cp": cp, "plan.dp": dp, "framework.name": "torchtitan"}
    keys |= {"framework.release": "2026-01"} if toml else {}
    keys |= {"batch.micro": draw.up_to(2), "batch.sequence": 2048 * draw.up_to(4)}
    keys["batch.global"] = keys["batch.micro"] * dp * 2 * pp
    keys["plan.data"] = draw.of("fsdp", *(["ddp"] if cp == 1 else []))
    if keys["plan.data"] == "fsdp":
        keys |= {"plan.replicate": copies, "plan.data.reshard": draw.flag()}
    if tp > 1:
        keys["plan.tensor"] = draw.of("megatron-sp", "megatron")
        keys["framework.set.loss.whole_vocabulary"] = draw.flag()
    if cp > 1 and toml and draw.flag():
        keys |= {"plan.sequence": "ring", "plan.sequence.merge": "eager"}
    if pp > 1:
        looped = ("interleaved-1f1b", "interleaved-zb", "breadth-first")
        schedule = draw.of("1f1b", "gpipe", "zb-v", "dualpipe-v", *looped)
        chunks = draw.of(2, 4) if schedule in looped else 1 if schedule in ("1f1b", "gpipe") else 2
        keys |= {"plan.pipeline": schedule, "plan.pipeline.chunks": chunks}
        if schedule == "breadth-first":
            keys["plan.pipeline.backward_from"] = "last"
        each, more = divmod(shape.layers, pp * chunks)
        keys["plan.partition"] = (*[each] * (pp * chunks - 1), each + more) if more else "even"
    if shape.moe is not None and draw.flag():
        keys |= {"plan.ep": 2, "plan.etp": draw.of(1, tp) if toml else 1, "plan.expert": "all-to-all"}
        keys["model.moe.routing"] = draw.of("loss-free", "forced-balanced")
    keys["plan.recompute"] = draw.of("none", "operators", "full")
    if keys["plan.recompute"] == "full" and toml and draw.flag():
        keys["plan.recompute.layers"] = shape.layers // pp // draw.of(2, 4)
    mixed = keys["plan.data"] == "fsdp" or tp == pp == 1
    toml_only = ["fp8-tensorwise"] if toml else []
    keys["precision.compute"] = draw.of("fp32", "fp8-rowwise", "mxfp8", *toml_only, *(["bf16"] if mixed else []))
    if draw.flag():
        keys |= {"precision.main_weights": "bf16", "precision.moments": "bf16"}
    keys["framework.set.compile"] = draw.flag()
    keys["framework.set.overlap.tp"] = (toml or keys["framework.set.compile"]) and draw.flag()
    return keys | {"run.steps": draw.up_to(10**6)}, name


def draw_deepspeed(draw: Drawing) -> tuple[Keys, str]:
    """Draws the keys of a job that DeepSpeed can run, and its model."""
    tp, cp, dp = draw.of(1, 2, 4), draw.of(1, 2, 4), draw.of(8, 16)
    keys: Keys = {"plan.tp": tp, "plan.cp": cp, "plan.dp": dp, "framework.name": "deepspeed", "plan.pp": 1}
    keys["batch.micro"] = draw.up_to(4)
    keys["batch.global"] = keys["batch.micro"] * dp * draw.up_to(8)
    keys |= {"plan.sequence": "ulysses"} if cp > 1 else {}
    alone = ["mics", "zero-plus-plus"] if tp == cp == 1 and dp == 16 else []
    data = draw.of("ddp", "zero-1", "zero-2", "zero-3", "zero-offload", "zero-infinity", *alone)
    keys["plan.data"] = data
    if data in ("zero-3", "zero-infinity"):
        keys |= {"plan.data.max_live": draw.of(10**9, 5 * 10**8), "plan.data.prefetch_bucket": 10**7}
    if data == "zero-3":
        keys["plan.data.persistence"] = draw.up_to(10**6, 0)
    if data == "zero-infinity":
        keys |= {"plan.data.optimizer": draw.of("cpu", "nvme"), "plan.data.parameters": draw.of("gpu", "cpu", "nvme")}
    if data == "mics":
        keys["plan.replicate"] = draw.of(2, 4)
    if data == "zero-plus-plus":
        keys |= {f"plan.data.{trait}": draw.flag() for trait in ("qwz", "qgz")}
    keys["precision.compute"] = draw.of("bf16", "fp16", "fp32")
    if keys["precision.compute"] != "fp32":
        keys["precision.gradients"] = draw.of("fp32", keys["precision.compute"])
    keys["framework.set.overlap.dp"] = draw.flag()
    sharded = data in ("zero-3", "zero-infinity", "zero-plus-plus")
    keys["plan.data.reduce_bucket" if sharded else "framework.set.bucket.elements"] = draw.up_to(10**9, 10**6)
    return keys, draw.of("llama2-7b", "gpt2-1.5b", "mistral-7b")


def draw_trainer(draw: Drawing, framework: str, form: str) -> tuple[Keys, str]:
    """Draws the keys of a job that a program on Hugging Face's Trainer can run, and its model."""
    mesh = form != "llamafactory"  # which has no tensor and context parallelism
    tp, cp = (draw.of(1, 2) if mesh and framework != "deepspeed" else 1 for _ in range(2))
    keys: Keys = {"framework.name": framework, "plan.tp": tp, "plan.cp": cp, "plan.dp": 8, "plan.pp": 1}
    keys |= {"batch.micro": draw.up_to(4), "batch.sequence": 1024 * draw.up_to(4)}
    keys["batch.global"] = keys["batch.micro"] * 8 * draw.up_to(8)
    keys |= {"plan.recompute": draw.of("none", "full"), "precision.compute": draw.of("bf16", "fp16")}
    if framework == "deepspeed":
        keys["plan.data"] = draw.of("zero-1", "zero-2", "zero-3", "zero-offload", "zero-infinity")
        keys["framework.set.overlap.dp"] = draw.flag()
        keys |= {"plan.data.persistence": draw.up_to(10**6, 0)} if keys["plan.data"] == "zero-3" else {}
    elif tp * cp == 1 and draw.flag():
        keys["plan.data"] = "ddp"
        is_pure = form == "axolotl" and keys["precision.compute"] == "bf16"  # weights in 16 bits alone
        formats = ("gradients", "main_weights", "moments") if is_pure else ("gradients",)
        keys |= {f"precision.{name}": "bf16" if is_pure else "fp32" for name in formats}
    else:
        second = tp * cp > 1 or draw.flag()
        keys |= {"plan.data": "fsdp", "framework.set.gathers_apart": second}
        keys |= {"plan.data.backward_prefetch": second or draw.flag(), "plan.data.reshard": not second or draw.flag()}
        keys["plan.replicate"] = draw.of(1, 2) if mesh and second else 1
        keys["framework.set.attention_library"] = draw.of("sdpa", "flash-2", "flash-3")
    keys |= {"plan.sequence": draw.of("ring", "all-gather")} if cp > 1 else {}
    if keys["plan.recompute"] == "full":
        reentrant = draw.flag()
        keys["framework.set.recompute_early_stop"] = not reentrant
        if keys["plan.data"] == "fsdp":
            keys |= {f"framework.set.{name}": reentrant for name in ("reentrant_units", "memory.hooks_hold_inputs")}
    if draw.flag():
        keys |= {"train.mode": "lora", "train.rank": draw.up_to(128), "train.targets": ["attn_qkv", "mlp_up"]}
    elif form == "llamafactory" and framework == "deepspeed" and keys["plan.data"] not in ("zero-3", "zero-infinity"):
        keys["framework.set.memory.loads"] = "fp32"  # whatever its files say
    return keys | {"run.steps": draw.up_to(10**6)}, draw.of("llama3-8b", "qwen2.5-7b", "mistral-7b")


def compose(keys: Keys, model: Any = None) -> Job:
    """Returns the job of drawn keys, on as many whole nodes as they need."""
    gpus = keys["plan.tp"] * keys["plan.pp"] * keys["plan.cp"] * keys["plan.dp"]
    job = load(compose_job(keys, {"node": "dgx-h100", "nodes": -(-gpus // 8), "gpus": gpus}, model))
    flat = flatten_job(job)
    active = {key: value for key, value in keys.items() if value is not None and key != "model.seq"}
    active = {key: value for key, value in active.items() if key in flat or key.startswith("batch.")}
    assert {key: flat.get(key) for key in active} == active
    return job


# ------------------------------------------------------------------------------------------- testing


@pytest.mark.parametrize(("form", "framework"), [("megatron", "megatron-core"), ("megatron-bridge", "megatron-bridge")])
@given(st.data())
@examples(400, daily=10)
def test_jobs_of_megatron_and_nemo(form: str, framework: str, data: st.DataObject) -> None:
    assert_round_trip(compose(draw_megatron(Drawing(data.draw), framework)), form)


@given(st.data())
@examples(400, daily=10)
def test_jobs_of_torchtitan(data: st.DataObject) -> None:
    assert_round_trip(compose(*draw_torchtitan(Drawing(data.draw))), "torchtitan")


@given(st.data())
@examples(400, daily=10)
def test_jobs_of_deepspeed(data: st.DataObject) -> None:
    assert_round_trip(compose(*draw_deepspeed(Drawing(data.draw))), "deepspeed")


PROFILES = {"accelerate": "hf-trainer", "llamafactory": "llama-factory", "axolotl": "axolotl"}


@pytest.mark.parametrize("framework", ["", "deepspeed"])
@pytest.mark.parametrize("form", PROFILES)
@given(st.data())
@examples(100, daily=5)
def test_jobs_of_programs_on_the_trainer(form: str, framework: str, data: st.DataObject) -> None:
    assert_round_trip(compose(*draw_trainer(Drawing(data.draw), framework or PROFILES[form], form)), form)


LLAMA: dict[str, Any] = {"model": "llama3-8b", "cluster": "dgx-h100:2", "batch": {"global": 64}}


@pytest.mark.parametrize(
    ("form", "described"),
    [
        *[
            ("megatron-bridge", LLAMA | {"framework": "megatron-bridge", "plan": plan})
            for plan in (
                {"tp": 2, "pp": 2, "chunks": 2, "recompute": "full"},
                {"fsdp": True, "tp": 1},
                {"cp": 2, "cp_scheme": "megatron-cp", "zero": 1, "recompute": "selective"},
            )
        ],
        ("megatron", read_launch("megatron", flags="--fp16 --DDP-impl local --checkpoint-activations").job),
        ("nemo", LLAMA | {"framework": "nemo", "plan": {"tp": 2, "fsdp": True, "recompute": "full"}}),
    ],
)
def test_a_described_job_goes_round(form: str, described: dict[str, Any]) -> None:
    exported = export(described, form)
    assert exported.unsaid == {}
    assert form != "nemo" or ("encoder_seq_length" in exported.text and "fsdp: true" in exported.text)


@pytest.mark.parametrize("name", drawn([name for name in presets() if not load_model(name).branches], keep=9))
def test_presets_keep_their_shape_or_the_header_says_what_is_lost(name: str) -> None:
    job = load({"model": name, "cluster": "dgx-h100:1", "plan": {"dp": 8}})
    exported = export(job, "megatron")
    lost = {key for key in exported.unsaid if key.startswith("model.")}
    back = load(import_text(exported.text, "file", "megatron", "dgx-h100:1").job).model
    assert all(f"#   {key}: " in exported.text for key in lost)
    assert lost or back.parameters == job.model.parameters


@pytest.mark.parametrize("name", ["EleutherAI/pythia-1.4b", "mistralai/Codestral-22B-v0.1", "Qwen/Qwen3-32B"])
@pytest.mark.parametrize("form", ["axolotl", "llamafactory"])
def test_files_of_trainers_name_the_id_of_a_model(form: str, name: str) -> None:
    job = load({"model": name, "cluster": "dgx-h100:1", "framework": "deepspeed", "plan": {"dp": 8, "zero": 3}})
    exported = export(job, form)
    assert name in exported.text
    assert load(import_text(exported.text, "file", form, "dgx-h100:1").job).model.parameters == job.model.parameters


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
        text = export(LLAMA | {"cluster": "dgx-h100:1", "framework": framework, "plan": plan}, "torchtitan").text
        words = text.replace(" ", "").replace(",", "")
        assert f"data_parallel_replicate_degree={replicate}\ndata_parallel_shard_degree={shard}\n" in words
        assert (f'fsdp_reshard_after_forward="{reshard}"' in words) == bool(reshard)


def test_torchtitan_is_told_how_many_microbatches_a_pipeline_has() -> None:
    job = LLAMA | {"cluster": "dgx-h100:1", "framework": "torchtitan", "plan": {"pp": 2, "fsdp": True}}
    assert "num_pp_microbatches=16," in export(job, "torchtitan").text  # of 64 sequences on 4 replicas


def test_what_a_model_does_not_have_is_no_key() -> None:
    assert None not in flatten_model(load_model("llama3-8b")).values()


@pytest.mark.parametrize(
    "scheme",
    [
        {"use": "super-offload", "ratio": 0.9},
        {"use": "super-offload", "clips": True},
        {"use": "zenflow", "topk_ratio": 0.05, "overlap_step": True},
        {"use": "zero-infinity", "parameters": "gpu", "ratio": 0.4},
    ],
)
def test_deepspeed_is_told_which_states_the_host_updates_and_when(scheme: dict[str, Any]) -> None:
    job = {"model": "gpt2-1.5b", "cluster": "dgx-h100:1", "framework": "deepspeed", "plan": {"dp_scheme": scheme}}
    assert_round_trip(load(job), "deepspeed")


def test_deepspeed_is_told_of_optimizer_states_on_the_host() -> None:
    job = {"model": "gpt2-1.5b", "cluster": "dgx-h100:1", "framework": "deepspeed"}
    told = export({**job, "plan": {"zero": 2, "offload": ["optimizer"]}}, "deepspeed")
    assert told.unsaid == {} and '"offload_optimizer": {\n      "device": "cpu"' in told.text
    weights = export({**job, "plan": {"zero": 3, "offload": ["optimizer"]}}, "deepspeed")
    assert weights.unsaid == {"plan.data": ("zero-3", "zero-infinity")}
    none = export({**job, "plan": {"zero": 2}}, "deepspeed")
    assert none.unsaid == {} and "offload_optimizer" not in none.text


@pytest.mark.parametrize("form", drawn(EXPORTS, keep=2))
def test_what_a_program_cannot_run_is_in_the_header(form: str) -> None:
    plan = {"pp": 4, "ep": 4, "schedule": "zb-h1", "ep_scheme": "tutel", "fsdp": True}
    exported = export({"model": "mixtral-8x7b", "cluster": "dgx-h100:8", "plan": plan}, form)
    assert exported.unsaid["plan.pipeline" if form != "deepspeed" else "plan.pp"][0] in ("zb-h1", 4)
    assert exported.unsaid["plan.expert"][0] == "tutel"
    assert "plan.expert: tutel; here" in exported.text


@pytest.mark.parametrize(("name", "flavor"), drawn(FLAVORS, keep=4))
def test_a_job_of_a_flavor_of_torchtitan_names_it(name: str, flavor: str) -> None:
    described = {"model": FLAVORS[name, flavor], "cluster": "dgx-h100:1", "plan": {"fsdp": True}}
    releases = ({"name": "torchtitan", "release": "2025-12"}, "torchtitan")
    toml, python = (export({**described, "framework": release}, "torchtitan").text for release in releases)
    assert f'name = "{name}"' in toml and f'flavor = "{flavor}"' in toml.lower()
    if name not in REMOVED:
        assert f"torchtitan.models.{name} import" in python and f'model_registry("{flavor}"' in python.lower()
    for text in (toml, *([python] if name not in REMOVED else [])):
        assert import_text(text, "file", "torchtitan", "dgx-h100:1").job["model"] == described["model"]
