"""Features of newer models, by hand: latent attention, multi-token prediction, windows, parallel residuals, quantised
GEMMs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, get_args

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.ir.operators import QUANTISED
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Memory, Op, UnitRun
from meshcast.simulator.job.framework import QuantisedRecipe
from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.measure import params_of, saved_bytes
from meshcast.validation.contract.played import Played
from tests.simulator.models.lowered import play

S, H, A, V = 16, 64, 4, 128
GPT = {"layers": 2, "hidden": H, "heads": A, "vocab": V, "seq": S, "positions": "rope", "norm": "rmsnorm"}
MODEL = {**GPT, "gated": True, "tied": False}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope": 8, "qk_rope": 4, "v": 6}
MOE = {"experts": 4, "top_k": 2, "expert_ffn": 16, "shared_experts": 1}


def run(plan: Any = None, gpus: int = 1, precision: str = "bf16", **fields: Any) -> Played:
    given = {"cluster": {"gpu": "b200-sxm", "gpus": gpus}, "framework": {"set": fields.pop("framework", {})}}
    return play({**MODEL, **fields}, plan, gpus, precision=precision, **given)


def layer(played: Played, name: str = "layer") -> UnitRun:
    """The first unit of a name."""
    return next(unit_run for stage_ops in played.stages for unit_run in stage_ops.unit_runs if unit_run.name == name)


def ops(played: Played, name: str = "layer") -> list[Op]:
    """Its forward ops."""
    return layer(played, name).fragment.forward


def gemms(found: Iterable[Op]) -> dict[str, tuple[int, int, int]]:
    return {op.name: (op.work.m, op.work.n, op.work.k) for op in found if isinstance(op.work, Gemm)}


def flops(found: Iterable[Op]) -> float:
    return sum(op.work.flops for op in found if op.work is not None)


# ------------------------------------------------------------------------------------------ latent attention


@pytest.mark.parametrize("rank", [None, 24])
def test_latent_attention_by_hand(rank: int | None) -> None:
    """Through the latents down and up: arXiv 2405.04434, section 2.1."""
    played = run(mla={**MLA, "q_lora_rank": rank}, ffn=32)
    sizes = gemms(ops(played))
    queries = {"q.latent.down": (S, 24, H), "q.up": (S, A * 12, 24)} if rank else {"q": (S, A * 12, H)}
    assert {name: size for name, size in sizes.items() if name not in ("up", "down")} == {
        **queries,
        "kv.latent.down": (S, 16 + 4, H),
        "kv.up": (S, A * (8 + 6), 16),
        "proj": (S, H, A * 6),
    }
    (core,) = [op.work for op in ops(played) if isinstance(op.work, Attention)]
    assert core == Attention(1, S, S, A, A, 8 + 4, 6, 0.5)
    made = H * 24 + 24 * A * 12 if rank else H * A * 12
    weights = made + H * (16 + 4) + 16 * A * (8 + 6) + A * 6 * H
    assert flops(ops(played)) == 2 * S * (weights + 3 * H * 32) + S * S * A * (12 + 6)
    scales = (24 if rank else 0) + 16
    assert sum(param.size for param in layer(played).fragment.params) == weights + scales + 3 * H * 32 + 2 * H


def test_rope_turns_the_shared_part_of_keys_for_every_head() -> None:
    """It reads queries, keys made from the latent and the one part that all heads share; it writes whole keys."""
    (rope,) = [op.work for op in ops(run(mla=MLA)) if op.name == "rope"]
    assert rope == Memory("rope", 2 * S * (A * 12 + A * 8 + 4), 2 * S * 2 * A * 12)


@pytest.mark.parametrize("parallel", [True, False])
def test_tensor_ranks_hold_whole_latents_and_own_heads(parallel: bool) -> None:
    """Down to the latents on every rank (of its own tokens where the sequence is cut); up to its own heads."""
    played = run({"tp": 2, "sequence_parallel": parallel}, 2, mla=MLA)
    own = S // 2 if parallel else S
    sizes = gemms(ops(played))
    assert sizes["q.latent.down"] == (own, 24, H)
    assert sizes["kv.latent.down"] == (own, 20, H)
    assert sizes["q.up"] == (S, A * 12 // 2, 24)
    assert sizes["kv.up"] == (S, A * 14 // 2, 16)
    sent = {op.name: op.work.nbytes for op in ops(played) if isinstance(op.work, Collective)}
    gathered = {"q.latent.norm": 24, "kv.latent.norm": 16, "k.pe": 4}
    if parallel:
        # Latents are gathered and not the stream, which is wider.
        assert {name: sent[f"all_gather {name}"] for name in gathered} == {
            name: 2 * S * width for name, width in gathered.items()
        }
        assert "all_gather norm1" not in sent
    else:
        assert set(sent) == {"all_reduce proj", "all_reduce down"}
    cut = {param.name: param.total // param.size for param in params_of(played.stages[0])}
    whole = ("wq.latent", "wkv.latent", "wk.pe", "q.latent.scale", "kv.latent.scale")
    assert {cut[name] for name in whole} == {1}
    assert {cut[name] for name in ("wq", "wk.up", "wv", "wo")} == {2}


# ------------------------------------------------------------------------------------------- further tokens


@pytest.mark.parametrize("count", [1, 2])
def test_each_further_token_is_a_layer_a_product_of_the_output_layer_and_a_loss(count: int) -> None:
    played, plain = run(mtp=count), run()
    assert [unit_run.name for unit_run in played.stages[0].unit_runs] == ["embedding", "layer", "ending"]
    ending = ops(played, "ending")
    names = Counter(op.name.rpartition(".")[2] for op in ending if isinstance(op.work, Gemm))
    assert names["head"] == 1 + count and names["join"] == names["qkv"] == count
    assert Counter(op.name.rpartition(".")[2] for op in ending)["embedding"] == count
    more = flops(ending) - flops(ops(plain, "ending"))
    assert more == count * (flops(ops(plain)) + 2 * S * 2 * H * H + 2 * S * H * V)
    model = played.plan.job.model
    assert sum(param.size for param in played.list_held(0)) == model.parameters
    each = plain.plan.job.model.layer_parameters() + 2 * H + 2 * H * H
    assert model.parameters - plain.plan.job.model.parameters == count * each


def test_logits_of_every_loss_wait_for_the_backward_pass() -> None:
    kept = [run(mtp=count).category_peak(0, "logits") for count in (0, 1, 2)]
    assert [kept[1] - kept[0], kept[2] - kept[1]] == [4 * S * V] * 2


@pytest.mark.parametrize(("pp", "tied", "copies"), [(1, False, 0), (2, False, 1), (1, True, 0), (2, True, 1)])
def test_the_last_stage_has_a_copy_of_the_embedding(pp: int, tied: bool, copies: int) -> None:
    """Where the embedding is on another device; its gradients are summed over both ends at the update."""
    played = run({"pp": pp}, pp, mtp=2, tied=tied)
    held = sum(param.size for device in range(pp) for param in played.list_held(device))
    assert held == played.plan.job.model.parameters + copies * V * H
    sums = [op.work for _, op in played.instances() if op.name == "reduce" and isinstance(op.work, Collective)]
    assert sums == [Collective("all_reduce", 4 * V * H, ("pp",), (0, 1))] * 2 * copies


def test_further_layers_have_experts_where_the_last_layer_has() -> None:
    for every, routed in ((1, True), (4, False)):
        ending = ops(run(mtp=1, moe={**MOE, "every": every}), "ending")
        assert any(op.name == "mtp0.router" for op in ending) == routed


def test_experts_have_as_many_slots_as_their_capacity_says() -> None:
    """Of 2000 tokens with two experts each, by a factor in thousandths."""
    played = run(seq=2000, layers=1, moe={**MOE, "capacity": 1.001})
    (rows,) = [op.work.m * op.work.batch for op in ops(played) if op.name == "expert.up" and isinstance(op.work, Gemm)]
    assert rows == 4004


# ------------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize(("window", "pairs"), [(1, 31 / 32), (4, 4 - 0.5), (16, 8), (64, 8), (None, 8)])
def test_a_window_leaves_a_share_of_the_pairs(window: int | None, pairs: float) -> None:
    """Of s s pairs, s w - w w / 2 in a window of w; half of all without one."""
    (core,) = [op.work for op in ops(run(window=window)) if isinstance(op.work, Attention)]
    assert core.share * S == pytest.approx(pairs)
    model = Model(**MODEL, window=window)
    assert 2 * core.flops == pytest.approx(forward_matmul_flops(model, S, S, causal=True)["attention"])


def test_every_so_many_layers_attend_to_all() -> None:
    played = run(layers=6, window=4, full_every=3)
    layers = [unit_run for unit_run in played.stages[0].unit_runs if unit_run.name == "layer"]
    shares = [
        (unit.count, next(op.work.share for op in unit.fragment.forward if isinstance(op.work, Attention)))
        for unit in layers
    ]
    assert shares == [(2, 7 / 32), (1, 0.5), (2, 7 / 32), (1, 0.5)]


def test_scores_in_memory_are_all_computed() -> None:
    whole, window = (gemms(ops(run(window=w, framework={"attention": "unfused"}))) for w in (None, 4))
    assert whole == window


# ------------------------------------------------------------------------------------- residuals and norms


def test_a_parallel_residual_adds_both_branches_at_once() -> None:
    names = [op.name for op in ops(run(parallel_residual=True))]
    assert names == ["norm1", "qkv", "rope", "core", "proj", "norm2", "up", "act", "down", "residual"]
    (work,) = [op.work for op in ops(run(parallel_residual=True)) if op.name == "residual"]
    assert work == Memory("residual", 3 * 2 * S * H, 2 * S * H)
    serial, parallel = (layer(run(parallel_residual=on)) for on in (False, True))
    assert saved_bytes(serial) - saved_bytes(parallel) == 2 * S * H, "no stream between the branches"


def test_norms_of_the_embedding_and_of_queries_and_keys() -> None:
    played = run(embedding_norm=True, qk_layernorm=True)
    assert [op.name for op in ops(played, "embedding")] == ["embedding", "embedding_norm"]
    names = [op.name for op in ops(played)]
    assert names[:4] == ["norm1", "qkv", "qk_norm", "rope"]
    sizes = {param.name: param.size for param in params_of(played.stages[0])}
    assert sizes["q.norm.weight"] == sizes["k.norm.weight"] == H // A
    assert sum(param.size for param in params_of(played.stages[0])) == played.plan.job.model.parameters


# --------------------------------------------------------------------------------------------- fp8 and fp4

WORDS = pytest.mark.parametrize("word", get_args(QuantisedRecipe))


@WORDS
def test_only_linears_multiply_in_fewer_bits(word: str) -> None:
    """Attention, routers and the output layer stay as they are (so do norms and everything between)."""
    dtype = QUANTISED[word].dtype
    played = run(precision=word, moe=MOE, mtp=1, mla=MLA, framework={"attention": "flash"})
    kinds: dict[str, set[str]] = {}
    for _, op in played.instances():
        if isinstance(op.work, Gemm | Attention):
            name = op.name.removeprefix("mtp0.").lstrip("dw").removeprefix("mtp0.")
            kinds.setdefault(op.work.dtype, set()).add(name)
    assert kinds["bf16"] == {"router", "head", "core"}
    linear = {"q.latent.down", "q.up", "kv.latent.down", "kv.up", "proj", "expert.up", "shared.up", "join"}
    assert set(kinds) == {"bf16", dtype}
    assert linear <= kinds[dtype]
    grads = [op.work for _, op in played.instances() if isinstance(op.work, Gemm) and op.phase == "W"]
    assert {work.out_dtype for work in grads} == {"fp32"}


@WORDS
def test_operands_are_cast_once_each(word: str) -> None:
    """The input of a linear layer forward, the gradient of its output backward, from bf16; an input of two linear
    layers is cast once.
    """
    how = QUANTISED[word]
    played = run(precision=word)
    casts = {op.name: op.work for op in ops(played) if isinstance(op.work, Memory) and op.work.what == "cast"}
    ffn = 4 * H
    assert casts == {
        f"cast {name}": Memory("cast", round(how.read * S * width), round(how.write * S * width))
        for name, width in (("norm1", H), ("o", H), ("norm2", H), ("act", ffn))
    }
    backward = layer(played).fragment.backward
    cast = [op.name for op in backward if isinstance(op.work, Memory) and op.work.what == "cast"]
    assert cast == ["ddown", "dup", "dproj", "dqkv"]
    latent = [op.name for op in ops(run(precision=word, mla=MLA)) if op.name.startswith("cast norm1")]
    assert len(latent) == 1, "both latents are made from it"


def test_older_releases_read_operands_in_4_bits_once_more() -> None:
    """A kernel casts the rows, another the rotated columns; in 8 bits nothing changes."""

    def read(word: str, *composed: str) -> list[int]:
        played = run(precision=word, framework={"memory": {"composed": [*composed]}})
        works = [op.work for op in ops(played)]
        return [work.read for work in works if isinstance(work, Memory) and work.what == "cast"]

    assert [3 * size for size in read("nvfp4")] == [2 * size for size in read("nvfp4", "cast")] != []
    assert read("mxfp8") == read("mxfp8", "cast")


def test_fewer_bits_are_kept_and_gathered() -> None:
    """A cut input is cast in front of its gather, which moves half as much; its gradient travels in bf16."""
    sent: dict[str, dict[str, int]] = {}
    for word in ("bf16", "fp8-delayed"):
        fragment = layer(run({"tp": 2}, 2, word)).fragment
        found = [op for op in (*fragment.forward, *fragment.backward) if isinstance(op.work, Collective)]
        sent[word] = {op.name.replace(".fp8", ""): op.work.nbytes for op in found if isinstance(op.work, Collective)}
    assert set(sent["bf16"]) == set(sent["fp8-delayed"])
    for name, nbytes in sent["bf16"].items():
        less = "gather norm" in name
        assert sent["fp8-delayed"][name] == nbytes / (2 if less else 1), name


@pytest.mark.parametrize("word", ["bf16", "fp8-delayed"])
def test_states_do_not_depend_on_the_products(word: str) -> None:
    assert run(precision=word).resting(0) == run().resting(0)


def test_flops_do_not_depend_on_the_products() -> None:
    for kind in ("F", "B", "W"):
        assert run(precision="nvfp4").flops(kind) == run().flops(kind)


def test_fp8_is_faster_where_products_take_longest() -> None:
    model = {**MODEL, "hidden": 4096, "heads": 32, "seq": 4096, "vocab": 1024}
    job = {"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 1}}
    slow, fast = (simulate({**job, "precision": word}).step_time for word in ("bf16", "fp8-delayed"))
    assert 0.5 * slow < fast < slow
