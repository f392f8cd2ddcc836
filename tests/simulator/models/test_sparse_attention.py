"""Attention to the keys that an indexer chooses (DeepSeek-V3.2, arXiv 2512.02556): work, memory, gradients, ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.ir.operators import count_pairs
from meshcast.simulator.ir.ops import Attention, Gemm
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.load import load_model
from meshcast.validation.contract.played import Played, play_job

TYPES = [json.loads(line) for line in Path(__file__).with_name("types.jsonl").read_text().splitlines()]
INDEX = {"heads": 4, "dim": 32, "top_k": 64}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 48, "qk_nope": 32, "qk_rope": 16, "v": 32}
SHAPE: dict[str, Any] = {
    **{"layers": 4, "hidden": 256, "heads": 8, "vocab": 512, "seq": 256, "ffn": 512, "norm": "rmsnorm"},
    **{"positions": "rope", "gated": True, "tied": False, "name": "small"},
}


def model_with(index: dict[str, int] | None) -> dict[str, Any]:
    return SHAPE | {"mla": LATENT | ({"index": index} if index else {})}


def played(index: dict[str, int] | None, **plan: Any) -> Played:
    gpus = plan.get("tp", 1) * plan.get("pp", 1)
    return play_job({"model": model_with(index), "cluster": {"gpu": "h100-sxm", "gpus": gpus}, "plan": plan})


@pytest.mark.parametrize(("tokens", "most"), [(8, 3), (8, 8), (8, 20), (5, 1)])
def test_pairs_are_those_of_a_window(tokens: int, most: int) -> None:
    """Twice the pairs of queries and keys, with a query's own counted half."""
    assert count_pairs(3 * tokens, tokens, most) == 3 * count_pairs(tokens, None, most)
    assert count_pairs(tokens, None, most) == sum(min(n, most) for n in range(tokens)) + min(tokens, most) / 2


def test_flops_of_deepseek_v32_by_hand() -> None:
    """Per token and layer: the indexer's projections and its scores of all keys before, attention to 2,048 of them."""
    config = next(config for config in TYPES if config["model_type"] == "deepseek_v32")
    sparse, seq = from_config(config), 32768
    dense = sparse.model_copy(update={"mla": sparse.mla.model_copy(update={"index": None})})  # type: ignore[union-attr]
    more = {
        part: flops - forward_matmul_flops(dense, 1, seq, causal=True)[part]
        for part, flops in forward_matmul_flops(sparse, 1, seq, causal=True).items()
    }
    seen = 2 * 2048 - 2048**2 / seq
    assert more["qkv"] == 61 * 2 * (1536 * 64 * 128 + 7168 * (128 + 64))
    assert more["attention"] == pytest.approx(61 * (128 * (192 + 128) * (seen - seq) + 64 * 128 * seq))
    assert not any(flops for part, flops in more.items() if part not in ("qkv", "attention"))


def test_the_work_of_the_indexer_is_what_it_adds() -> None:
    """With as many chosen keys as tokens, attention is as without; the indexer's gradients are those of its weights and
    three products of the chosen keys, and its inputs get none."""
    everything = INDEX | {"top_k": SHAPE["seq"]}
    model = load_model(model_with(everything))
    assert model.parameters - load_model(model_with(None)).parameters == 4 * (64 * 128 + 256 * (32 + 4) + 2 * 32)
    sparse, dense = (played(index).flops("F", "B", "W") for index in (everything, None))
    scores, linears = 4 * 32 * 256 * 256, 2 * 256 * (64 * 128 + 256 * (32 + 4))
    assert sparse["attention"] - dense["attention"] == pytest.approx(4 * 4 * scores)
    assert sparse["gemm"] - dense["gemm"] == pytest.approx(4 * 2 * linears)


def job_of(index: dict[str, int] | None, **plan: Any) -> dict[str, Any]:
    return {"model": model_with(index), "cluster": {"gpu": "h100-sxm", "gpus": 1}, "plan": plan, "batch": {"global": 1}}


def test_fewer_chosen_keys_are_faster_and_their_numbers_stay_in_memory() -> None:
    long, steps = {"seq": 32768, "heads": 32}, []
    for top_k in (1024, 4096, 16384):
        job = job_of(INDEX | {"top_k": top_k})
        steps.append(simulate(job | {"model": job["model"] | long}).step_time)
    assert steps == sorted(steps) and steps[0] < 0.8 * steps[-1]
    few, many = (played(INDEX | {"top_k": top_k}).most_kept(0) for top_k in (64, 128))
    assert many - few == 4 * 256 * 4 * (128 - 64)


def test_the_forecast_says_how_it_is_priced() -> None:
    told = [sum("model.mla.index" in text for text in simulate(job_of(index)).assumed) for index in (INDEX, None)]
    assert told == [1, 0]


def test_every_rank_of_tensor_parallelism_has_the_whole_indexer() -> None:
    def own(ranks: int) -> float:
        ops = (op for _, op in played(INDEX, tp=ranks).instances(0) if "index." in op.name)
        return sum(op.work.flops for op in ops if isinstance(op.work, Attention | Gemm))

    assert own(2) == own(1) > 0
