"""Attention to blocks of keys (MiniMax-M3, MoBA, InfLLM v2, NSA): work, memory, gradients, ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import ModelError, PlanError
from meshcast.simulator import simulate
from meshcast.simulator.ir.block_attention_operators import count_block_pairs, count_entry_pairs, count_visits
from meshcast.simulator.models.flops import forward_matmul_flops, palm
from meshcast.simulator.models.load import load_model
from tests.contract.played import Played, play_job

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
    return play_job({"model": model_with(blocks, **more), "cluster": {"gpu": "h100-sxm", "gpus": gpus}, "plan": plan or {}})


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
@pytest.mark.parametrize("tokens", [48, 512])
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
    """What is added is the work of the choice, and of other branches."""
    tokens = KINDS[kind]["size"] * KINDS[kind]["top_k"]
    dense, some = played(None, seq=tokens), played(KINDS[kind], seq=tokens)

    def core(step: Played, name: str) -> list[Any]:
        return [op.work for _, op in step.instances(0) if op.name in (name, f"d{name}")]

    blocks = core(some, "core" if "branches" not in kind else "core")
    teacher = [work for work in blocks if "index" in KINDS[kind] and work.qk_dim == WIDTH // 2]
    assert [work for work in blocks if work not in teacher] == core(dense, "core")
    assert len(teacher) == LAYERS * ("index" in KINDS[kind]) * len(core(dense, "core")) // (2 * LAYERS)
