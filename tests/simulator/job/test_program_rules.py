"""What the program of a framework refuses or does not have: every rule has a job that breaks it, and is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator import simulate
from meshcast.simulator.job.framework import framework_names
from meshcast.simulator.job.program_rules import CONDITIONS, NAMES, broken_rules, facts_of_job, find_rules
from meshcast.simulator.loading.load import load_job

TIED = {"preset": "llama3-8b", "layers": 4, "tied": True}
SMALL = {"preset": "llama3-8b", "layers": 8}
TWO_KEY_HEADS = {"preset": "llama3-8b", "layers": 8, "kv_heads": 2}
TWELVE_HEADS = {"preset": "llama3-8b", "layers": 8, "heads": 12, "kv_heads": 12, "hidden": 1536, "head_dim": 128}
SIX_KEY_HEADS = TWELVE_HEADS | {"kv_heads": 6}
EXPERTS = {"preset": "mixtral-8x7b", "layers": 4}
GRAPHS = {"cuda_graphs": ("attn", "moe_router")}
LAYERS_OFFLOADED = [
    {"use": "pipeline/1f1b", "over": "pp"},
    {"use": "data/zero-1", "over": "dp"},
    {"use": "memory/offload", "what": ["activations"], "layers": 1},
]
PART_RECOMPUTED = {"recompute": "full", "recompute_layers": 4}
ADAPTED = [*LAYERS_OFFLOADED[:2], {"use": "memory/adapipe"}]
OVERLAPPED = {"use": "interleaved-1f1b", "overlap_passes": True}

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "key-heads-by-tensor-ranks": ({"model": TWO_KEY_HEADS, "plan": {"tp": 4, "fsdp": True}},
        "4 tensor ranks do not divide 2 key/value heads"),
    "key-heads-divide-tensor-ranks": ({"model": SIX_KEY_HEADS, "plan": {"tp": 4}},
        "4 tensor ranks are neither a divisor nor a multiple of 6 key/value heads"),
    "heads-by-sequence-ranks": ({"model": SIX_KEY_HEADS, "plan": {"cp": 4, "cp_scheme": "ulysses", "zero": 3}},
        "4 sequence ranks are neither a divisor nor a multiple of 6 key/value heads"),
    "sequence-by-context-ranks": ({"batch": {"global": 8, "sequence": 4100},
        "plan": {"cp": 4, "cp_scheme": {"use": "megatron-cp", "comm": "a2a"}}},
        "a sequence of 4,100 tokens is no multiple of 2 x 4 context ranks"),
    "sequence-by-tensor-and-context-ranks": ({"batch": {"global": 8, "sequence": 4100},
        "plan": {"tp": 4, "fsdp": True}},
        "a sequence of 4,100 tokens is no multiple of 2 x 4 tensor ranks x 1 context ranks"),
    "groups-of-microbatches": ({"batch": {"global": 20, "sequence": 4096}, "plan": {"pp": 4, "chunks": 2, "dp": 2}},
        "interleaved chunks run groups of 4: of 10 micro-batches the last 2 miss pp 4"),
    "interleaving-without-overlap": ({"plan": {"pp": 2, "chunks": 2}, "set": {"overlap": {"pp": False}}},
        "interleaving over 2 stages needs messages that overlap"),
    "microbatches-of-1f1b": ({"batch": {"global": 4, "sequence": 4096}, "plan": {"pp": 4, "fsdp": True}},
        "1F1B over 4 stages needs as many micro-batches, and a replica has 2"),
    "microbatches-of-dualpipe-v": ({"batch": {"global": 12, "sequence": 4096},
        "plan": {"pp": 4, "schedule": "dualpipe-v", "fsdp": True}},
        "DualPipeV over 4 ranks needs 8 micro-batches, and a replica has 6"),
    "whole-rounds": ({"batch": {"global": 22, "sequence": 4096}, "plan": {"pp": 4, "chunks": 2, "fsdp": True}},
        "interleaved-1f1b over 4 stages has 2 rounds, which do not divide 11 micro-batches"),
    "tied-embedding-with-pipeline": ({"model": TIED, "plan": {"pp": 2, "fsdp": True}},
        "tied embedding and output layer do not go with pipeline parallelism"),
    "zb-h1-without-sequence-parallel": ({"plan": {"tp": 2, "pp": 2, "schedule": "zb-h1", "sequence_parallel": True}},
        "zb-h1 does not go with sequence parallelism"),
    "sharded-gradients-with-pipeline": ({"plan": {"pp": 2, "zero": 3}},
        "zero-3 shards gradients or weights, which does not go with pipeline parallelism"),
    "sharded-weights-with-experts": ({"model": EXPERTS, "plan": {"tp": 2, "ep": 2, "zero": 3}},
        "zero-3 with expert parallelism goes with neither tensor nor sequence parallelism"),
    "whole-states-alone": ({"plan": {"pp": 2, "zero": 0}},
        "states that are not sharded (DDP) go with no tensor, context or pipeline parallelism"),
    "whole-states-without-shards": ({"plan": {"tp": 2, "zero": 0}},
        "states that are not sharded (DDP) go with neither tensor nor context parallelism"),
    "offload-of-shards": ({"plan": {"zero": 0, "offload": ["optimizer"]}},
        "only sharded states are offloaded, and ddp shards none"),
    "experts-in-one-copy": ({"model": EXPERTS, "plan": {"fsdp": True, "shard": 2, "ep": 4}},
        "ep 4 x etp 1 do not divide the 2 ranks that share one copy of the states"),
    "copies-of-experts": ({"model": EXPERTS, "plan": {"shard": 2, "ep": 4}},
        "4 copies of the states do not divide the 2 data-parallel ranks of the experts"),
    "expert-tensor-ranks": ({"model": EXPERTS, "plan": {"tp": 4, "ep": 2, "etp": 2, "fsdp": True}},
        "experts are whole, or sharded over all 4 tensor ranks"),
    "experts-with-sequence-parallel": ({"model": EXPERTS, "plan": {"tp": 2, "sequence_parallel": False}},
        "experts with tensor parallelism need sequence parallelism"),
    "overlap-with-sequence-parallel": ({"plan": {"tp": 2, "sequence_parallel": False},
        "set": {"overlap": {"tp": True}}}, "overlapped tensor parallelism needs sequence parallelism"),
    "overlap-with-compile": ({"plan": {"tp": 2, "fsdp": True}, "set": {"overlap": {"tp": True}, "compile": False}},
        "overlapped tensor parallelism needs compiled layers"),
    "fsdp-in-rank-order": ({"plan": {"pp": 2, "fsdp": True, "order": "dp-pp-cp-tp"}},
        "FSDP needs the usual order of the ranks"),
    "overlapped-passes": ({"model": EXPERTS, "plan": {"pp": 2, "chunks": 2, "schedule": OVERLAPPED}},
        "passes overlap with expert parallelism only"),
    "every-nth-layer": ({"release": "2026-03", "plan": {"fsdp": True, "recompute": "full", "recompute_layers": 5}},
        "every n-th layer is recomputed: no n gives 5 of 8"),
    "every-layer": ({"release": {"megatron-lm-2021": "2021-08"}, "plan": PART_RECOMPUTED},
        "all layers are recomputed or none, not 4 of 8"),
    "full-recompute-with-graphs": ({"model": EXPERTS, "plan": {"recompute": "full"}, "set": GRAPHS},
        "full recomputation does not go with CUDA graphs of parts of a layer"),
    "fsdp-with-graphs": ({"model": EXPERTS, "plan": {"fsdp": True}, "set": GRAPHS},
        "FSDP does not go with CUDA graphs of parts of a layer"),
    "graphs-of-padded-experts": ({"model": EXPERTS, "set": {"cuda_graphs": ("attn", "moe")}},
        "experts that drop no tokens are in no CUDA graph of a layer"),
    "graphs-without-pipeline": ({"plan": {"pp": 2, "fsdp": True}, "set": {"cuda_graphs": True}},
        "CUDA graphs do not go with pipeline parallelism"),
    "offloaded-layers-alone": ({"plan": {"mesh": {"pp": 2, "dp": 4}, "schemes": LAYERS_OFFLOADED}},
        "layers whose activations are offloaded do not go with pipeline parallelism"),
    "delayed-scaling-with-modules": ({"plan": {"recompute": ["layernorm"]}, "precision": "fp8-delayed"},
        "delayed scaling does not go with recomputation of layernorm"),
}  # fmt: skip
"""By rule: a job beside its framework, and the words that name what is wrong."""

MISSING: dict[str, tuple[dict[str, Any], str]] = {
    "schedule": ({"plan": {"pp": 2, "schedule": "hanayo", "chunks": 2}}, "has no pipeline"),
    "rank_order": ({"plan": {"pp": 2, "order": "dp-pp-cp-tp"}}, "dp-pp-cp-tp"),
    "data": ({"plan": {"dp_scheme": "horovod"}}, "horovod"),
    "sequence": ({"plan": {"cp": 2, "cp_scheme": "burst-attention"}}, "burst-attention"),
    "tensor": ({"cluster": "dgx-h100:1", "plan": {"tp": 4, "tp_scheme": "summa-2d"}}, "summa-2d"),
    "tensor_overlap": ({"plan": {"tp": 2, "tp_scheme": "flux"}}, "flux"),
    "expert": ({"model": EXPERTS, "plan": {"ep": 2, "ep_scheme": "tutel"}}, "tutel"),
    "recomputation": ({"plan": {"mesh": {"pp": 2, "dp": 4}, "schemes": ADAPTED}}, "adapipe"),
    "modules": ({"plan": {"recompute": ["norm"]}}, "norm"),
    "offloaded": ({"plan": {"fsdp": True, "offload": ["activations"]}}, "activations"),
    "padding": ({"model": TWELVE_HEADS, "plan": {"tp": 8, "pad_heads": True}}, "has no padding of heads"),
    "compute": ({"precision": "fp8"}, "fp8"),
}


DENSE: Any = SimpleNamespace(layers=16, heads=12, kv_heads=6, mla=None, moe=None, tied=True)
SPARSE: Any = SimpleNamespace(moe=object())
DROPLESS: Any = SimpleNamespace(moe=SimpleNamespace(capacity=None))
PADDED: Any = SimpleNamespace(moe=SimpleNamespace(capacity=1.0))
ROUNDS = {"schedule": "interleaved-1f1b", "pp": 4}
PASSES = {"overlap_passes": True, "pp": 2, "virtual_stages": 2, "ep": 2, "recomputation": "none"}
ALONE = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": 1}

LIMITS: list[tuple[str, dict[str, Any], str, Any, Any]] = [
    ("key-heads-by-tensor-ranks", {"model": DENSE}, "tp", 6, 12),
    ("key-heads-by-tensor-ranks", {"model": DENSE}, "tp", 8, 4),
    ("key-heads-divide-tensor-ranks", {"model": DENSE}, "tp", 12, 4),
    ("heads-by-sequence-ranks", {"model": DENSE, "sequence": "ulysses"}, "cp", 12, 4),
    ("heads-by-sequence-ranks", {"model": DENSE, "sequence": "ulysses"}, "cp", 6, 24),
    ("sequence-by-context-ranks", {"sequence_length": 4098}, "cp", 1, 2),
    ("sequence-by-tensor-and-context-ranks", {"sequence_length": 4098}, "cp", 1, 2),
    ("sequence-by-tensor-and-context-ranks", {"sequence_length": 4098}, "tp", 1, 2),
    ("groups-of-microbatches", {**ROUNDS, "microbatches": 16}, "group", 4, 3),
    ("groups-of-microbatches", {**ROUNDS, "group": 8}, "microbatches", 8, 7),
    ("groups-of-microbatches", {**ROUNDS, "group": 8}, "microbatches", 12, 11),
    ("interleaving-without-overlap", {**ROUNDS, "overlap_pp": False}, "pp", 3, 2),
    ("microbatches-of-1f1b", {"schedule": "1f1b", "pp": 4}, "microbatches", 4, 3),
    ("microbatches-of-dualpipe-v", {"schedule": "dualpipe-v", "pp": 4}, "microbatches", 8, 7),
    ("whole-rounds", ROUNDS, "microbatches", 7, 9), ("tied-embedding-with-pipeline", {"model": DENSE}, "pp", 1, 2),
    ("sharded-gradients-with-pipeline", {"data": "zero-2"}, "pp", 1, 2),
    ("sharded-weights-with-experts", {"data": "zero-3", "ep": 2}, "cp", 1, 2),
    ("sharded-weights-with-experts", {"data": "zero-3", "tp": 2}, "ep", 1, 2),
    *[("whole-states-alone", {"data": "ddp"}, axis, 1, 2) for axis in ("tp", "pp", "cp")],
    *[("whole-states-without-shards", {"data": "ddp"}, axis, 1, 2) for axis in ("tp", "cp")],
    ("experts-in-one-copy", {"ep": 4, "copies": 2}, "dp", 8, 4),
    ("experts-in-one-copy", {"copies": 8, "dp": 8}, "ep", 1, 2),
    ("copies-of-experts", {"ep": 4, "dp": 8, "model": SPARSE}, "copies", 2, 4),
    ("expert-tensor-ranks", {"ep": 2, "tp": 4}, "etp", 4, 2), ("expert-tensor-ranks", {"tp": 4}, "etp", 4, 1),
    ("overlapped-passes", PASSES, "ep", 2, 1), ("overlapped-passes", PASSES, "virtual_stages", 2, 1),
    ("overlapped-passes", {**PASSES, "virtual_stages": 1}, "pp", 1, 2),
    ("overlapped-passes", PASSES, "recomputation", "selective", "full"),
    ("every-nth-layer", {"pp": 2, "model": DENSE}, "recomputed_layers", 4, 5),
    ("every-layer", {"pp": 2, "model": DENSE}, "recomputed_layers", 8, 7),
    ("graphs-of-padded-experts", {"cuda_graphs": ("moe",)}, "model", PADDED, DROPLESS),
    ("graphs-of-padded-experts", {"model": DROPLESS}, "cuda_graphs", ("moe_router",), ("moe",)),
    ("graphs-without-pipeline", {"cuda_graphs": True}, "pp", 1, 2),
    ("offloaded-layers-alone", {"offloaded_layers": 1}, "recomputation", "none", "full"),
]  # fmt: skip
"""Name of the rule, facts, the fact that decides, a value with which the program starts, one with which it stops."""


def make(framework: str, stated: dict[str, Any]) -> Any:
    changes = {name: stated[name] for name in ("set", "release") if name in stated}
    stated = {name: value for name, value in stated.items() if name not in changes}
    if isinstance(changes.get("release"), dict):  # of some programs
        changes["release"] = changes["release"].get(framework)
    batch = {"global": 32, "sequence": 4096}
    job = {"model": SMALL, "cluster": "dgx-h100:1", "batch": batch, "framework": {"name": framework, **changes}}
    return load_job(job | stated)


RULES = {name: rules for name in framework_names() if (rules := find_rules(name)) is not None}
"""The rules of every program that has some, of its newest release."""

OLDEST = "2021-01"
ON_THE_TRAINER = ("hf-trainer", "axolotl", "llama-factory")
REFUSED = {
    (name, refused.rule)
    for name in RULES
    for release in (None, OLDEST)
    for refused in getattr(find_rules(name, release), "refuses", ())
}


def test_the_programs_with_rules_are_those_of_the_docs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "framework.md").read_text("utf-8").partition("## Rules of programs")[2]
    programs = {
        "axolotl",
        "llama-factory",
        "deepspeed",
        "hf-trainer",
        "megatron-bridge",
        "megatron-core",
        "megatron-deepspeed",
        "megatron-lm-2021",
        "nemo",
        "torchtitan",
    }
    assert RULES.keys() == programs
    assert all(f"`{name}`" in text.partition("\n## ")[0] for name in RULES)


@pytest.mark.parametrize(("program", "rule"), sorted(REFUSED))
def test_every_rule_of_a_program_has_a_job_that_breaks_it(program: str, rule: str) -> None:
    stated, words = BROKEN[rule]
    broken = broken_rules(make(program, stated))
    assert any(words in one.words and one.stops and "@" in one.source for one in broken), broken
    sound = make(program, {"plan": {"fsdp": True} if program in ("torchtitan", *ON_THE_TRAINER) else {}})
    assert broken_rules(sound) == []


@pytest.mark.parametrize(("program", "fact"), [(name, fact) for name, rules in RULES.items() for fact in rules.has])
def test_what_a_program_does_not_have_is_named(program: str, fact: str) -> None:
    stated, word = MISSING[fact]
    broken = broken_rules(make(program, stated))
    assert any(not one.stops and word in one.words for one in broken), broken


def test_every_condition_is_a_rule_of_a_program() -> None:
    used = {rule for _, rule in REFUSED}
    assert used == {*CONDITIONS} == {*BROKEN}
    facts = facts_of_job(make("torchtitan", {}))
    assert {fact for condition in CONDITIONS.values() for fact in condition.facts} <= facts.keys() >= NAMES.keys()


@pytest.mark.parametrize(("rule", "facts", "fact", "starts", "stops"), LIMITS)
def test_a_program_stops_beyond_the_limit(rule: str, facts: dict[str, Any], fact: str, starts: Any, stops: Any) -> None:
    said = [CONDITIONS[rule].check({**ALONE, **facts, fact: value}) for value in (starts, stops)]
    assert not said[0] and said[1]


@pytest.mark.parametrize(("program", "release", "layers", "broken"), [
    ("torchtitan", None, 4, ["every-layer"]), ("torchtitan", "2026-04", 8, []), ("torchtitan", "2026-03", 4, []),
    ("torchtitan", "2026-03", 5, ["every-nth-layer"]), ("megatron-lm-2021", None, 5, []),
    ("megatron-lm-2021", "2021-09", 5, []), ("megatron-lm-2021", "2021-08", 4, ["every-layer"]),
    ("megatron-lm-2021", "2021-08", 8, []),
])  # fmt: skip
def test_rules_are_those_of_the_release(program: str, release: str | None, layers: int, broken: list[str]) -> None:
    plan = {"recompute": "full", "recompute_layers": layers} | (
        {"fsdp": True} if program == "torchtitan" else {"zero": 0}
    )
    words = [BROKEN[rule][1].partition(" not ")[0].partition(": ")[0] for rule in broken]
    told = broken_rules(make(program, {"plan": plan, "release": release}))
    assert [rule.words.partition(" not ")[0].partition(": ")[0] for rule in told] == words


def test_a_forecast_stands_and_names_what_the_program_would_refuse() -> None:
    job = {"model": TWO_KEY_HEADS, "cluster": "dgx-h100:1", "batch": {"global": 8}, "plan": {"tp": 4, "fsdp": True}}
    report = simulate(job | {"framework": "torchtitan"}).to_dict()
    (told,) = report["broken_rules"]
    assert (
        told["key"] == "plan.tp" and told["stops"] and told["rule"] == "4 tensor ranks do not divide 2 key/value heads"
    )
    assert f"torchtitan would refuse this: {told['rule']} ({told['source']})" in report["warnings"]
    for framework in ({"set": {"cuda_graphs": False}}, {"name": "torchtitan", "rules": False}):
        assert "broken_rules" not in simulate(job | {"framework": framework}).to_dict(), "no program is meant"
    assert "broken_rules" not in simulate(job | {"framework": "megatron-core"}).to_dict(), "Megatron-Core copies heads"


TITAN = """
[model]
name = "qwen3"
flavor = "3B"
[training]
local_batch_size = 1
seq_len = 4096
[parallelism]
tensor_parallel_degree = 4
"""


def test_a_launch_file_that_its_program_would_refuse_is_an_error_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(TITAN)
    changes = ["model=qwen2.5-3b", "cluster=dgx-h100:1"]
    with pytest.raises(PlanError) as raised:
        load_job(file, changes)
    assert raised.value.where == f"{file}:9 parallelism.tensor_parallel_degree (plan.tp)"
    assert "4 tensor ranks do not divide 2 key/value heads" in raised.value.rule
    assert "meshcast import " in raised.value.remedy
    assert [one.key for one in broken_rules(load_job(file, [*changes, "plan.tp=8"]))] == ["plan.tp"], (
        "a change is tried"
    )
    assert broken_rules(load_job(file, [*changes, "plan.tp=2"])) == []
