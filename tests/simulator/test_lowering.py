"""Lowering: which ops a layer becomes, in which order, and what each waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.mesh import Mesh
from simulator.models import Model
from simulator.ops import Attention, Collective, Fragment, Gemm, Memory, Op
from simulator.scheme import TensorScheme
from simulator.sites import CoreAttention, Leaf
from tests.contract.measure import lowered_stage, make, play_job, waits_for
from tests.strategies import MODULES, models

T = 4
MODEL = Model(layers=2, hidden=64, heads=8, vocab=128, seq=16, tied=False)
MESH = Mesh({"tp": T})
TOKENS = 16 * 64 * 2
"""Bytes of one activation [b, s, h]."""


def stage(use: str | None, *more: Any, model: Model = MODEL, **how: Any) -> Fragment:
    schemes = [make(name, MESH, (), **options) for name, options in more]
    if use is not None:
        schemes.append(make(use, MESH, ("tp",)))
    return lowered_stage(model, MESH, schemes, **how)


def names(ops: Iterable[Op]) -> list[str]:
    return [op.name for op in ops]


def named(fragment: Fragment, name: str) -> Op:
    (found,) = [op for op in (*fragment.forward, *fragment.backward) if op.name == name]
    return found


def collectives(ops: Iterable[Op]) -> list[tuple[str, int]]:
    return [(op.work.operation, op.work.nbytes) for op in ops if isinstance(op.work, Collective)]


# ------------------------------------------------------------------------------------------ Megatron's order


def test_tensor_parallel_layer_in_megatrons_order() -> None:
    """An all-reduce behind each row-parallel linear forward and behind each column-parallel one backward (card TP1)."""
    fragment = stage("tensor/megatron")
    assert names(fragment.forward) == [
        *["l0.norm1", "l0.qkv", "l0.core", "l0.proj", "all_reduce l0.proj", "l0.residual1"],
        *["l0.norm2", "l0.up", "l0.act", "l0.down", "all_reduce l0.down", "l0.residual2"],
    ]
    assert names(fragment.backward) == [
        *["dl0.down", "wl0.down", "dl0.act", "dl0.up", "all_reduce dl0.norm2", "wl0.up", "dl0.norm2", "add dl0.x"],
        *["dl0.proj", "wl0.proj", "dl0.core", "dl0.qkv", "all_reduce dl0.norm1", "wl0.qkv", "dl0.norm1", "add dx0"],
    ]
    assert collectives(fragment.forward + fragment.backward) == [("all_reduce", TOKENS)] * 4


def test_sequence_parallel_layer_in_megatrons_order() -> None:
    """Gather in front of each column-parallel linear, scatter behind each row-parallel one; backward the reverse, and
    the stored shard gathered once more for the weight gradient (card TP2)."""
    fragment = stage("tensor/megatron-sp", regather=True)
    assert names(fragment.forward) == [
        *["l0.norm1", "all_gather l0.norm1", "l0.qkv", "l0.core", "l0.proj", "reduce_scatter l0.proj", "l0.residual1"],
        *["l0.norm2", "all_gather l0.norm2", "l0.up", "l0.act", "l0.down", "reduce_scatter l0.down", "l0.residual2"],
    ]
    assert names(fragment.backward) == [
        *["all_gather dl0.down", "dl0.down", "wl0.down", "dl0.act"],
        *["regather l0.norm2", "dl0.up", "reduce_scatter dl0.norm2", "wl0.up", "dl0.norm2", "add dl0.x"],
        *["all_gather dl0.proj", "dl0.proj", "wl0.proj", "dl0.core"],
        *["regather l0.norm1", "dl0.qkv", "reduce_scatter dl0.norm1", "wl0.qkv", "dl0.norm1", "add dx0"],
    ]
    assert {nbytes for _, nbytes in collectives(fragment.forward + fragment.backward)} == {TOKENS}


@pytest.mark.parametrize("use", ["tensor/megatron", "tensor/megatron-sp"])
def test_the_gradient_is_reduced_beside_the_weight_gradient(use: str) -> None:
    """The reduction waits for the input gradient and not for the weight gradient, nor the weight gradient for it."""
    fragment = stage(use, regather=True)
    for column, x in (("l0.up", "l0.norm2"), ("l0.qkv", "l0.norm1")):
        (reduction,) = [op for op in fragment.backward if op.name in (f"all_reduce d{x}", f"reduce_scatter d{x}")]
        given_, weights, norm = (named(fragment, name) for name in (f"d{column}", f"w{column}", f"d{x}"))
        place = fragment.backward.index
        assert place(reduction) == place(given_) + 1 == place(weights) - 1
        assert id(given_) in waits_for(reduction)
        assert id(weights) not in waits_for(reduction) and id(reduction) not in waits_for(weights)
        assert id(reduction) in waits_for(norm) and id(weights) not in waits_for(norm)


def test_the_stored_shard_is_gathered_beside_the_input_gradient() -> None:
    """Only the weight gradient waits for the second gather, which waits for the gradient's arrival."""
    fragment = stage("tensor/megatron-sp", regather=True)
    again, given_, weights = (named(fragment, name) for name in ("regather l0.norm2", "dl0.up", "wl0.up"))
    assert id(again) in waits_for(weights) and id(again) not in waits_for(given_)
    assert id(named(fragment, "dl0.act")) in waits_for(again)
    assert again.phase == "W"


def test_only_linears_gather_again() -> None:
    """Attention needs its gathered keys for both gradients: it keeps them. Without the habit nobody gathers again."""

    class GatheredAttention(TensorScheme):
        """Positions divided everywhere but in the core of attention."""

        def layouts(self, site: Leaf) -> str | None:
            return None if isinstance(site, CoreAttention) else "s"

    fragment = lowered_stage(MODEL, MESH, [GatheredAttention(("tp",), None, MESH)], regather=True)
    assert names(fragment.forward)[2:6] == ["all_gather l0.q", "all_gather l0.k", "all_gather l0.v", "l0.core"]
    assert not [op for op in fragment.backward if op.name.startswith("regather")]
    ends = {"ends": (True, True)}
    again = [op.name for op in stage("tensor/megatron-sp", regather=True, **ends).backward if "regather" in op.name]
    assert again == ["regather norm.out", "regather l0.norm2", "regather l0.norm1"], "output layer, MLP and attention"
    for use, regather in (("tensor/megatron-sp", False), ("tensor/megatron", True)):
        assert not [op for op in stage(use, regather=regather, **ends).backward if op.name.startswith("regather")]


# ------------------------------------------------------------------------------------------ ends of the model


def test_vocabulary_parallel_ends() -> None:
    """Embedding: one all-reduce; output layer: one backward; loss: three all-reduces of one fp32 value a token."""
    fragment = stage("tensor/megatron", ends=(True, True), layers=0)
    joins = [op for op in fragment.forward if op.name == "loss" and isinstance(op.work, Collective)]
    assert [op.work for op in joins] == [Collective("all_reduce", 16 * 4, ("tp",))] * 3
    assert all(id(a) in waits_for(b) for a, b in pairwise(joins))
    assert collectives(op for op in fragment.forward if op not in joins) == [("all_reduce", TOKENS)]
    assert collectives(fragment.backward) == [("all_reduce", TOKENS)]
    head = named(fragment, "head").work
    assert isinstance(head, Gemm) and (head.m, head.n, head.k) == (16, 128 // T, 64)
    logits = [op.work for op in fragment.forward if isinstance(op.work, Memory) and op.work.what == "cross-entropy"]
    assert [work.read for work in logits] == [7 * 16 * 128 // T] * 2, "one kernel before the sums, one behind them"


@pytest.mark.parametrize("ends", [(True, False), (False, True), (True, True), (False, False)])
@given(model=models(tensor=T, layers=2), layers=st.integers(1, 2))
def test_what_a_stage_reduces_over_tensor_ranks(ends: tuple[bool, bool], model: Model, layers: int) -> None:
    """Bytes of all-reduces equal bytes of reduce-scatters, and of gathers, of the sequence-parallel form."""
    one = collectives_of("tensor/megatron", model, ends, layers)
    other = collectives_of("tensor/megatron-sp", model, ends, layers)
    whole = model.seq * model.hidden * 2
    joins = 3 * model.seq * 4 * ends[1]
    # The embedding forward; two blocks a layer each way; the output layer backward.
    assert one == {"all_reduce": (ends[0] + 4 * layers + ends[1]) * whole + joins}
    assert other["all_reduce"] == joins
    assert other["reduce_scatter"] == other["all_gather"] == one["all_reduce"] - joins


@pytest.mark.parametrize(
    ("positions", "use"),
    [
        ("learned", "tensor/megatron"),
        ("learned", "tensor/megatron-sp"),
        ("rope", "tensor/megatron"),
        ("rope", "tensor/megatron-sp"),
    ],
)
def test_an_embedding_alone_in_its_stage_is_summed_before_it_leaves(positions: str, use: str) -> None:
    """`ends-as-layers` with one place a stage: what the next stage receives is a residual, not a partial sum."""
    model = {"layers": 2, "hidden": 64, "heads": 8, "vocab": 128, "seq": 16, "positions": positions}
    plan = {"tp": 4, "pp": 4, "partition": "ends-as-layers", "sequence_parallel": use.endswith("-sp")}
    played = play_job({"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 16}, "plan": plan})
    assert [layers for layers in played.plan.layers] == [0, 1, 1, 0]
    whole = TOKENS // (4 if use.endswith("-sp") else 1)
    assert [stage.message for stage in played.stages[:-1]] == [whole] * 3
    operation = "reduce_scatter" if use.endswith("-sp") else "all_reduce"
    assert (operation, TOKENS) in collectives(played.stages[0].fragment.forward)


def collectives_of(use: str, model: Model, ends: tuple[bool, bool], layers: int) -> Counter[str]:
    found: Counter[str] = Counter()
    fragment = stage(use, model=model, ends=ends, layers=layers)
    for operation, nbytes in collectives(fragment.forward + fragment.backward):
        found[operation] += nbytes
    return found


# -------------------------------------------------------------------------------------------------- phases


@given(model=models(tensor=T, layers=2), use=st.sampled_from([None, "tensor/megatron", "tensor/megatron-sp"]))
def test_phases_and_dependencies(model: Model, use: str | None) -> None:
    fragment = stage(use, model=model, ends=(True, True), layers=2, regather=True)
    assert {op.phase for op in fragment.forward} == {"F"}
    assert {op.phase for op in fragment.backward} == {"B", "W"}
    for ops in (fragment.forward, fragment.backward):
        place = {id(op): i for i, op in enumerate(ops)}
        for i, op in enumerate(ops):
            assert all(place.get(other, -1) < i for other in waits_for(op)), (
                "every dependency is issued before its user"
            )
    for op in fragment.backward:
        if isinstance(op.work, Gemm) and op.work.what == "linear":
            assert op.work.accumulate == (op.work.layout == "nt") == (op.phase == "W")
            assert op.work.out_dtype == ("fp32" if op.phase == "W" else "bf16")
    assert all(op.work.layout == "tn" for op in fragment.forward if isinstance(op.work, Gemm))
    # Splitting off the weight gradients must be possible: no input gradient waits for one.
    weights = {id(op) for op in fragment.backward if op.phase == "W"}
    assert all(not (weights & waits_for(op)) for op in fragment.backward if op.phase == "B")


def test_streams() -> None:
    fragment = stage("tensor/megatron-sp", ends=(True, True))
    for op in (*fragment.forward, *fragment.backward):
        assert op.stream == ("tensor" if isinstance(op.work, Collective) else "compute")


def test_gradients_of_norms_are_partial_under_sequence_parallelism() -> None:
    """Norm weights and row biases see the tokens of one rank only; matrices and column biases do not care."""
    partial = {param.name for param in stage("tensor/megatron-sp").params if "tp" in param.partial}
    norms = [f"l0.norm{i}.{part}" for i in (1, 2) for part in ("weight", "bias")]
    assert partial == {*norms, "l0.proj.bias", "l0.down.bias"}
    assert not [param for param in stage("tensor/megatron").params if "tp" in param.partial]
    cut = {param.name for param in stage("tensor/megatron").params if param.size * T == param.total}
    assert cut == {f"l0.{w}" for w in ("wq", "wk", "wv", "bq", "bk", "bv", "wo", "wup", "bup", "wdown")}


@pytest.mark.parametrize(("parallel", "sums"), [(True, 1), (False, 0)])
def test_they_are_summed_in_the_update(parallel: bool, sums: int) -> None:
    model = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 128, "seq": 16, "norm": "rmsnorm", "positions": "rope"}
    plan = {"tp": 2, "pp": 2, "sequence_parallel": parallel}
    job = {"model": {**model, "tied": False}, "cluster": {"gpu": "h100-sxm", "gpus": 8}, "plan": plan}
    played = play_job(job)
    for device, norms in ((0, 4), (1, 5)):  # two a layer, and the final one
        found = [op.work for _, op in played.instances(device) if op.phase == "U" and op.name == "reduce"]
        assert found == [Collective("all_reduce", 4 * norms * 64, ("tp",))] * sums


# ------------------------------------------------------------------------------------------------- recompute

INSIDE = {
    "core_attn": ("core",),
    "attention": ("qkv", "rope", "core", "proj"),
    "mlp": ("up", "act", "down"),
}


def works(ops: Iterable[Op], among: tuple[str, ...] | None = None) -> Counter[Any]:
    return Counter(
        op.work
        for op in ops
        if not isinstance(op.work, Collective) and (among is None or op.name.split(".")[-1] in among)
    )


@pytest.mark.parametrize("use", ["tensor/megatron", "tensor/megatron-sp"])
@pytest.mark.parametrize("attention", ["flash", "unfused"])
@pytest.mark.parametrize("module", MODULES)
@given(model=models(tensor=T, layers=2))
@settings(max_examples=10)
def test_recompute_runs_exactly_the_module_again(use: str, attention: str, module: str, model: Model) -> None:
    how: dict[str, Any] = {"model": model, "ends": (True, True), "layers": 2, "attention": attention}
    bare = stage(use, **how)
    with_it = stage(use, ("memory/recompute-selective", {"modules": (module,)}), **how)
    again = [op for op in with_it.backward if op.phase == "R"]
    assert works(again) == works(bare.forward, INSIDE[module])
    assert works(with_it.forward) == works(bare.forward)
    assert works(op for op in with_it.backward if op.phase != "R") == works(bare.backward)
    assert all(op.name.startswith("re ") for op in again)


@pytest.mark.parametrize("use", ["tensor/megatron", "tensor/megatron-sp"])
def test_full_recompute_repeats_the_layers_and_their_collectives(use: str) -> None:
    """Two more all-reduces (or their halves) a layer, 12 instead of 8 (p-1)/p b s h elements a rank: card TP1."""
    how: dict[str, Any] = {"ends": (True, True), "layers": 2}
    bare, full = stage(use, **how), stage(use, ("memory/recompute-full", {}), **how)
    again = [op for op in full.backward if op.phase == "R"]
    layers = [op for op in bare.forward if op.name.split()[-1].startswith(("l0.", "l1."))]
    assert works(again) == works(layers)
    one = stage(use, ("memory/recompute-full", {"layers": 1}), **how)
    assert 2 * works(op for op in one.backward if op.phase == "R").total() == works(again).total()
    assert [op.phase for op in stage(use, ("memory/recompute-full", {"layers": 0}), **how).backward].count("R") == 0


@pytest.mark.parametrize("outer", [True, False])
def test_recompute_in_recompute(outer: bool) -> None:
    """The core of attention inside a layer that is done again: forward, once for the layer, once for the core."""
    entries = [("memory/recompute-full", {}), ("memory/recompute-selective", {"modules": ("core_attn",)})]
    nested = stage("tensor/megatron", *(entries if outer else reversed(entries)))
    bare = stage("tensor/megatron")
    again = [op for op in nested.backward if op.phase == "R"]
    assert works(again) == works(bare.forward) + works(bare.forward, ("core",))
    cores = [op.work for op in again if isinstance(op.work, Attention)]
    assert len(cores) == 2
    assert works(op for op in nested.backward if op.phase != "R") == works(bare.backward)


def test_recompute_waits_for_the_gradient_and_comes_before_its_use() -> None:
    fragment = stage("tensor/megatron", ("memory/recompute-selective", {"modules": ("mlp",)}))
    again = [op for op in fragment.backward if op.phase == "R"]
    first = fragment.backward.index(again[0])
    assert names(fragment.backward[first : first + 4]) == ["re l0.up", "re l0.act", "re l0.down", "dl0.down"]
    (mark,) = [mark for name, mark in fragment.grad_entry.items() if name in ("x1", "sent")]
    assert all(id(mark) in waits_for(op) for op in again)
