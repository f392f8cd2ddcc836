"""Attention to blocks of keys (MiniMax-M3, MoBA, InfLLM v2, NSA): work, memory, gradients, ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware import load
from meshcast.simulator import simulate
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.kernels import attention, memory
from meshcast.simulator.costs.kernels.attention import CHOSEN_SIGMA, without_cache_writes
from meshcast.simulator.ir.block_attention_operators import count_block_pairs, count_entry_pairs, count_visits
from meshcast.simulator.ir.ops import Attention, Gemm, Memory
from meshcast.simulator.models.flops import forward_matmul_flops, palm
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.load import load_model
from meshcast.validation.contract.played import Played, play_job

SEQ, HEADS, KV_HEADS, WIDTH, HIDDEN, LAYERS = 512, 8, 4, 32, 256, 2
SHAPE: dict[str, Any] = {
    **{"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS, "vocab": 512, "seq": SEQ, "ffn": 512},
    **{"norm": "rmsnorm", "positions": "rope", "gated": True, "tied": False, "name": "small"},
}
INDEX = {"heads": 4, "dim": 16}
KINDS: dict[str, dict[str, Any]] = {
    "index": {"size": 16, "top_k": 3, "index": INDEX},
    "means of each head": {"size": 16, "top_k": 3, "each_head": True},
    "normalised means": {"size": 16, "top_k": 4, "length": 8, "stride": 4, "coarse": 4},
    "branches": {"size": 16, "top_k": 3, "length": 8, "stride": 4, "branches": True, "window": 24},
    "own branches": {
        **{"size": 16, "top_k": 3, "length": 8, "stride": 4, "branches": True, "window": 24},
        **{"own_keys": True, "pool": "linear"},
    },
}
of_each_kind = pytest.mark.parametrize("kind", KINDS)


def model_with(blocks: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return SHAPE | ({"blocks": blocks} if blocks else {}) | more


def played(blocks: dict[str, Any] | None, plan: dict[str, Any] | None = None, **more: Any) -> Played:
    gpus = (plan or {}).get("tp", 1) * (plan or {}).get("pp", 1)
    return play_job(
        {"model": model_with(blocks, **more), "cluster": {"gpu": "h100-sxm", "gpus": gpus}, "plan": plan or {}}
    )


def forecast(blocks: dict[str, Any] | None, plan: dict[str, Any] | None = None, gpus: int = 1, **more: Any) -> Any:
    model = model_with(blocks, **more)
    job = {"model": model, "cluster": {"gpu": "h100-sxm", "gpus": gpus}, "batch": {"global": gpus}, "plan": plan or {}}
    return simulate(job)


# ------------------------------------------------------------------------------------ counts, query by query


def visible(query: int, size: int, most: int) -> tuple[int, int]:
    """Keys and blocks that a query attends to, its own included."""
    own = query // size
    earlier = min(own, most - 1)
    return earlier * size + query % size + 1, earlier + 1


@given(st.integers(1, 200), st.integers(1, 24), st.integers(1, 12), st.integers(1, 200))
def test_pairs_are_those_of_a_loop_over_queries(tokens: int, size: int, most: int, document: int) -> None:
    document = min(document, tokens)
    keys, visits = (sum(each) for each in zip(*(visible(query, size, most) for query in range(document)), strict=True))
    times = tokens / document
    assert count_block_pairs(tokens, document, size, most) == pytest.approx(times * (keys - document / 2))
    assert count_visits(tokens, document, size, most) == pytest.approx(times * visits)
    every = sum(query // size + 1 for query in range(tokens))
    assert count_visits(tokens, None, size, None) == every


@given(st.integers(1, 200), st.integers(1, 24), st.integers(1, 24))
def test_entries_are_those_of_a_loop_over_queries(tokens: int, length: int, stride: int) -> None:
    """A query sees the entries that end before it or at it."""
    ends = range(length - 1, tokens, stride)
    seen = sum(end <= query for query in range(tokens) for end in ends)
    assert count_entry_pairs(tokens, None, length, stride) == seen


def loop(kind: dict[str, Any], tokens: int) -> dict[str, float]:
    """FLOPs of a sequence in a layer's attention, in a loop over queries with an own key counted half: those of
    forward and backward passes."""
    counts = dict.fromkeys(("keys", "before", "entries", "coarse", "window"), 0.0)
    length, stride = kind.get("length", kind["size"]), kind.get("stride", kind.get("length", kind["size"]))
    for query in range(tokens):
        counts["keys"] += visible(query, kind["size"], kind["top_k"])[0] - 0.5
        counts["before"] += query + 0.5
        for word, times in (("entries", 1), ("coarse", kind.get("coarse", 0))):
            counts[word] += len(range(length * times - 1, query + 1, stride * times)) if times else 0
        counts["window"] += min(query + 1, kind.get("window", 0))
    counts["window"] -= min(kind.get("window", 0), tokens) / 2
    a = HEADS * WIDTH
    forward, backward = 4 * a * counts["keys"], 10 * a * counts["keys"]
    if index := kind.get("index"):
        scores = 2 * index["heads"] * index["dim"]
        return {
            "forward": forward + scores * counts["before"],
            "backward": backward + (3 * scores + 2 * a) * counts["keys"],
        }
    forward += 2 * a * (counts["entries"] + counts["coarse"])
    if kind.get("branches"):
        forward += 4 * a * (counts["entries"] + counts["window"])
        backward += 10 * a * (counts["entries"] + counts["window"])
    return {"forward": forward, "backward": backward}


@of_each_kind
@pytest.mark.parametrize("tokens", [48, 500])
def test_flops_are_those_of_a_loop_over_queries(kind: str, tokens: int) -> None:
    """By the kernels, and by the counts of the convention `causal`, where a step is thrice a forward pass."""
    counted = loop(KINDS[kind], tokens)
    step = played(KINDS[kind], seq=tokens)
    samples = step.flops("F")["attention"] / (LAYERS * counted["forward"])
    assert samples == pytest.approx(round(samples))
    assert step.flops("B")["attention"] == pytest.approx(samples * LAYERS * counted["backward"])
    parts = forward_matmul_flops(load_model(model_with(KINDS[kind])), tokens, tokens, causal=True)
    assert parts["attention"] == pytest.approx(LAYERS * counted["forward"])


@of_each_kind
def test_a_sequence_of_no_more_keys_than_are_chosen_has_dense_attention(kind: str) -> None:
    """Its kernels are those of dense attention; what is added is the work of the choice, and other branches."""
    blocks = KINDS[kind]
    tokens = blocks["size"] * blocks["top_k"]
    dense, some = (list_kernels(played(each, seq=tokens), "core") for each in (None, blocks))
    teacher = [work for work in some if work.qk_dim == WIDTH // 2]
    assert [work for work in some if work not in teacher] == dense != []
    assert len(teacher) == ("index" in blocks) * len(dense) // 2
    longer = list_kernels(played(blocks, seq=tokens + 1), "core")
    assert {work.chosen for work in longer} == {"blocks"}


def test_a_single_block_is_a_chunk() -> None:
    """A query that attends to its own block alone does the work of chunked attention, and merges nothing."""
    one, chunks = played({"size": 64, "top_k": 1, "each_head": True}), played(None, attention_chunk=64)
    for phase in "FB":
        works = [[op.work for _, op in step.instances(0) if op.phase == phase] for step in (one, chunks)]
        flops = [[work.flops for work in of if isinstance(work, Attention)] for of in works]
        chosen = [work.flops for work in list_kernels(one, "choose")] * (phase == "F")
        assert sum(flops[0]) - sum(chosen) == pytest.approx(sum(flops[1]))
    assert not [op for _, op in one.instances(0) if op.name == "core" and isinstance(op.work, Memory)]


def list_kernels(step: Played, name: str) -> list[Attention]:
    """Returns the attention kernels of an operator, forward and backward, on a device."""
    ops = (op.work for _, op in step.instances(0) if op.name.removeprefix("d") == name)
    return [work for work in ops if isinstance(work, Attention)]


def test_the_published_saving_of_minimax_sparse_attention() -> None:
    """28.4 times fewer FLOPs of attention for a token of a million (arXiv 2606.13392, abstract), whose count gives a
    query all keys of its own block."""
    shape = {"layers": 1, "hidden": 6144, "heads": 64, "kv_heads": 4, "head_dim": 128, "positions": "rope"}
    blocks = {"size": 128, "top_k": 16, "index": {"heads": 4, "dim": 128}}
    million = 2**20
    dense, some = (
        forward_matmul_flops(load_model(model_with(each, **shape, seq=million)), 1, million, causal=True)["attention"]
        for each in (None, blocks)
    )
    assert dense / (some + 4 * 64 * 128 * 128 / 2) == pytest.approx(28.4, abs=0.05)


def test_parameters_of_minimax_m3_are_the_published_ones() -> None:
    """Its card has about 428 billion with the encoder of images (865,567,232), of which about 23 billion are active,
    without the tables of the vocabulary."""
    model = load_model("MiniMaxAI/MiniMax-M3")
    routing, encoder = 57 * 128, model.branches[0].parameters  # routing: a buffer in its code
    assert model.parameters - routing == 426_174_565_632 + encoder and encoder == 865_567_232
    assert model.parameters / 1e9 == pytest.approx(428, abs=1)
    assert (model.active_parameters - 2 * model.vocab * model.hidden) / 1e9 == pytest.approx(23, abs=0.6)
    assert [layer for layer in range(60) if not model.kind(model.encoder_layers + layer).local] == [0, 1, 2]


def test_blocks_of_configs_are_those_of_their_code() -> None:
    """MiniCPM4 chooses 64 blocks beside those of its window; of MiniMax-M3 newer keys have the same meaning."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    sizes |= {"vocab_size": 99, "max_position_embeddings": 512, "num_key_value_heads": 2}
    cpm = from_config({"model_type": "minicpm", **sizes, "sparse_config": {"topk": 64, "dense_len": -1}}).blocks
    assert cpm and (cpm.size, cpm.top_k, cpm.length, cpm.stride, cpm.from_tokens) == (64, 64 + 2048 // 64, 32, 16, 0)
    assert cpm.coarse == 4
    old = {"sparse_attention_freq": [0, 1], "sparse_num_index_heads": 2, "sparse_index_dim": 8, "sparse_block_size": 16}
    new = {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 8}
    kind = {"model_type": "minimax_m3_vl_text", **sizes, "head_dim": 16, "rotary_dim": 8}
    models = from_config(kind | {"sparse_attention_config": old}), from_config(kind | new | {"index_block_size": 16})
    assert models[0] == models[1] and models[0].full_every == (0,) and models[0].blocks
    unused = old | {"use_sparse_attention": False}
    assert from_config(kind | {"sparse_attention_config": unused}).blocks is None


def test_flops_of_palm_count_the_keys_of_a_query() -> None:
    """12 L a d of the tokens that a query attends to at most, entries and a window included; of all, where attention is
    dense."""
    a, tokens = HEADS * WIDTH, 512
    waiting = [KINDS["normalised means"] | {"from_tokens": tokens + more} for more in (0, 1)]
    branches = 48 + (tokens - 8) // 4 + 1 + 24
    for blocks, keys in ((KINDS["index"], 48), (KINDS["branches"], branches), (waiting[0], 64), (waiting[1], tokens)):
        model = load_model(model_with(blocks))
        assert palm(model, tokens) - 6 * model.parameters == pytest.approx(12 * LAYERS * a * keys)


# ---------------------------------------------------------------------------------- time, memory, ranks, packing


@of_each_kind
def test_more_blocks_are_never_faster(kind: str) -> None:
    """Up to as many as there are, where attention is dense."""
    base = KINDS[kind] | {"size": 256} | ({"length": 64, "stride": 32} if "length" in KINDS[kind] else {})
    wide = {"seq": 32768, "heads": 64, "hidden": 1024, "head_dim": 128}
    times = [forecast(base | {"top_k": top_k}, **wide).step_time for top_k in (4, 16, 64)]
    assert times == sorted(times) and times[0] < 0.9 * times[-1]


def test_few_blocks_are_faster_than_dense_attention_of_long_sequences() -> None:
    long = {"seq": 65536, "heads": 64, "hidden": 1024, "head_dim": 128}
    blocks = {"size": 128, "top_k": 16, "index": {"heads": 4, "dim": 128}}
    assert forecast(blocks, **long).step_time < 0.5 * forecast(None, **long).step_time


@of_each_kind
def test_numbers_of_chosen_blocks_stay_for_the_backward_pass(kind: str) -> None:
    """32 bits of each for every group of heads that chooses."""
    blocks = KINDS[kind]
    groups = INDEX["heads"] if "index" in blocks else HEADS if "each_head" in blocks else KV_HEADS
    few, many = (played(blocks | {"top_k": top_k}).most_kept(0) for top_k in (4, 6))
    assert many - few == LAYERS * SEQ * groups * 4 * 2


@pytest.mark.parametrize("kind", ["means of each head", "normalised means", "branches"])
def test_scores_of_entries_and_the_largest_of_each_block_are_written_and_read(kind: str) -> None:
    """In 32 bits for every group of heads that chooses; where entries are blocks, their scores are the largest."""
    blocks, step = KINDS[kind], played(KINDS[kind])
    length, stride = blocks.get("length", 16), blocks.get("stride", 16)
    groups = HEADS if "each_head" in blocks else KV_HEADS
    scores = sum(len(range(length - 1, query + 1, stride)) for query in range(SEQ))
    largest = (stride < 16) * sum(query // 16 + 1 for query in range(SEQ))
    moved, numbers = 4 * groups * (scores + largest), 4 * groups * blocks["top_k"] * SEQ
    works = [op.work for _, op in step.instances(0) if op.name == "choose" and isinstance(op.work, Memory)]
    assert {(work.read, work.write) for work in works if work.what == "softmax"} == {(moved, moved + numbers)}


def test_partial_results_of_blocks_are_in_memory_and_merged() -> None:
    """A result in 16 bits and two numbers in 32 bits for every block that a query attends to, written and read."""
    for tokens, heads in ((SEQ, HEADS), (4096, 64)):
        step = played(KINDS["index"], seq=tokens, heads=heads, head_dim=WIDTH)
        partial = sum(visible(query, 16, 3)[1] for query in range(tokens)) * heads * (2 * WIDTH + 8)
        merges = [op.work for _, op in step.instances(0) if op.name == "core" and isinstance(op.work, Memory)]
        assert {(work.read, work.write) for work in merges} == {(partial, partial)}
    assert partial <= step.category_peak(0, "workspace") < 1.5 * partial


@of_each_kind
def test_inputs_of_products_in_8_bits_are_cast_once(kind: str) -> None:
    job = {"model": model_with(KINDS[kind]), "cluster": {"gpu": "h100-sxm", "gpus": 1}, "precision": "fp8"}
    casts = [op.name for _, op in play_job(job).instances(0) if op.name.startswith("cast ") and op.phase == "F"]
    assert casts.count("cast norm1") == LAYERS


def test_gradients_of_entries_and_of_an_indexer() -> None:
    """A linear layer that makes entries has both gradients; the input of an indexer has none of it."""
    made = [op for _, op in played(KINDS["own branches"]).instances(0) if isinstance(op.work, Gemm)]
    flops = [sum(op.work.flops for op in made if op.name == name) for name in ("entries", "dentries", "wentries")]
    assert flops[0] == flops[1] == flops[2] > 0
    dense, indexed = (played(blocks).flops("B")["gemm"] for blocks in (None, KINDS["index"]))
    assert dense == indexed


@of_each_kind
def test_tensor_ranks_divide_heads_and_repeat_an_indexer(kind: str) -> None:
    """All ranks together do what one does, but for an indexer, which each computes."""
    alone, both = (played(KINDS[kind], {"tp": tp} if tp > 1 else {}) for tp in (1, 2))
    again = both.ranks / 2 * sum(work.flops for work in list_kernels(both, "index.choose"))
    assert both.flops("F", "B")["attention"] - alone.flops("F", "B")["attention"] == pytest.approx(again)
    assert (again > 0) == ("index" in KINDS[kind])
    sizes = {param.name: param.size for param in both.list_held(0)}
    whole = {param.name: param.size for param in alone.list_held(0)}
    assert {name for name, size in sizes.items() if "index" in name and size == whole[name]} == {
        name for name in whole if "index" in name
    }


@of_each_kind
def test_a_sequence_of_documents_is_as_many_short_ones(kind: str) -> None:
    packed, short = (
        play_job({"model": model_with(KINDS[kind]), "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": batch})
        for batch in ({"global": 1, "documents": SEQ // 4}, {"global": 4, "sequence": SEQ // 4})
    )
    assert packed.flops("F", "B")["attention"] == pytest.approx(short.flops("F", "B")["attention"])


def test_a_choice_of_its_own_waits_for_long_sequences() -> None:
    """Shorter ones have dense attention, without a choice."""
    blocks = KINDS["normalised means"] | {"from_tokens": 256}
    assert played(blocks, seq=255).flops("F", "B") == played(None, seq=255).flops("F", "B")
    assert played(blocks, seq=256).flops("F", "B") == played(KINDS["normalised means"], seq=256).flops("F", "B")
    for tokens, like in ((255, None), (256, KINDS["normalised means"])):
        counts = [forward_matmul_flops(load_model(model_with(each)), 1, tokens, causal=True) for each in (blocks, like)]
        assert counts[0] == counts[1]


@of_each_kind
def test_recomputation_repeats_the_forward_pass(kind: str) -> None:
    once, twice = (played(KINDS[kind], {"recompute": how}) for how in ("none", "full"))
    assert twice.flops("R")["attention"] == once.flops("F")["attention"] > 0
    assert twice.most_kept(0) < once.most_kept(0)


def test_the_forecast_says_how_it_is_priced_and_has_a_wide_interval() -> None:
    dense, some = (forecast(blocks, seq=8192) for blocks in (None, KINDS["index"]))
    assert [sum("model.blocks" in text for text in step.assumed) for step in (dense, some)] == [0, 1]
    spread = [step.interval_90[1] / step.interval_90[0] for step in (dense, some)]
    assert spread[1] > spread[0]


PUBLISHED: list[tuple[dict[str, Any], dict[str, Any], str, dict[str, float]]] = [
    # MiniMax Sparse Attention (arXiv 2606.13392, abstract): the attention of a million tokens, forward, on H800
    (
        {"size": 128, "top_k": 16, "index": {"heads": 4, "dim": 128}},
        {"seq": 2**20, "heads": 64, "kv_heads": 4, "head_dim": 128},
        *("h100-sxm", {"F": 14.2}),
    ),
    # MoBA (arXiv 2502.13189, section 3.3): of a Llama 8B with blocks of 4096
    (
        {"size": 4096, "top_k": 12, "each_head": True},
        {"seq": 2**20, "heads": 32, "kv_heads": 8, "head_dim": 128},
        *("h100-sxm", {"F": 6.5}),
    ),
    # NSA (arXiv 2502.11089, section 5.1): beside FlashAttention 2 in Triton on A100
    (
        {"size": 64, "top_k": 16, "length": 32, "stride": 16, "branches": True, "window": 512},
        {"seq": 65536, "heads": 64, "kv_heads": 4, "head_dim": 192, "value_dim": 128},
        *("a100-sxm-80", {"F": 9.0, "B": 6.0}),
    ),
]
"""Blocks, shape of attention, GPU, and how many times faster than dense attention they are, forward or backward."""


@pytest.mark.parametrize(("blocks", "shape", "gpu", "times"), PUBLISHED, ids=["MSA", "MoBA", "NSA"])
def test_published_savings_of_kernels_are_within_the_interval(
    blocks: dict[str, Any], shape: dict[str, Any], gpu: str, times: dict[str, float]
) -> None:
    """Of 90 % of the uncertainty of these kernels."""
    for phase, published in times.items():
        dense, some = (attention_seconds(each, shape, gpu, phase) for each in (None, blocks))
        assert abs(math.log(dense / some / published)) < 1.645 * CHOSEN_SIGMA["blocks"]


def attention_seconds(blocks: dict[str, Any] | None, shape: dict[str, Any], gpu: str, phase: str) -> float:
    """Seconds of what stands between the projections of a layer, without RoPE."""
    model = model_with(blocks, **shape, layers=1)
    step = play_job({"model": model, "cluster": {"gpu": gpu, "gpus": 1}, "batch": {"global": 1}})
    kinds = {"attention": without_cache_writes(fitted("attention", gpu)), "memory": fitted("memory", gpu)}
    names = ("core", "choose", "index.choose", "branches", "entries", "o.entries", "o.window")
    spent = 0.0
    for op, count in step.counts.items():
        if op.phase == phase and op.name.removeprefix("d") in names:
            price = attention.price if isinstance(op.work, Attention) else memory.price
            kind = "attention" if isinstance(op.work, Attention) else "memory"
            spent += count * price(op.work, load("gpus", gpu), kinds[kind]).seconds
    return spent


def fitted(kind: str, gpu: str) -> Any:
    """Returns the cost model of kernels of this kind as it ships."""
    return Calibration.shipped().kernel_model(load("gpus", gpu), kind).model
