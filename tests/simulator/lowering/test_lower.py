"""Lowering: the ops of a layer, their order, and their predecessors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import Operator, Update, UpdateWorkspace
from meshcast.simulator.ir.operators import Boundary, CoreAttention
from meshcast.simulator.ir.ops import Attention, Collective, Fragment, Gemm, Memory, Op, Param, StageOps, UnitRun
from meshcast.simulator.ir.scheme import TensorScheme
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.measure import backward_ops, forward_ops, lowered_stage, make, waits_for
from meshcast.validation.contract.played import play_job
from tests.draws import drawn_grid
from tests.strategies import examples, models

T = 4
MODEL = Model(layers=2, hidden=64, heads=8, vocab=128, seq=16, tied=False)
MESH = Mesh({"tp": T})
TOKENS = 16 * 64 * 2
"""Bytes of one activation [b, s, h]."""


def stage(use: str | None, *more: Any, model: Model = MODEL, **how: Any) -> StageOps:
    schemes = [make(name, MESH, (), **options) for name, options in more]
    if use is not None:
        schemes.append(make(use, MESH, ("tp",)))
    return lowered_stage(model, MESH, schemes, **how)


def layer(use: str | None, *more: Any, **how: Any) -> Fragment:
    """One layer in the middle of the model."""
    (unit_run,) = stage(use, *more, **how).unit_runs
    assert (unit_run.name, unit_run.count, unit_run.residual_in, unit_run.residual_out) == ("layer", 1, "x", "y")
    return unit_run.fragment


def both(stage_ops: StageOps) -> list[Op]:
    """The ops of the forward and of the backward pass."""
    return forward_ops(stage_ops) + backward_ops(stage_ops)


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
    fragment = layer("tensor/megatron")
    assert names(fragment.forward) == [
        *["norm1", "qkv", "core", "proj", "all_reduce proj", "residual1"],
        *["norm2", "up", "act", "down", "all_reduce down", "residual2"],
    ]
    assert names(fragment.backward) == [
        *["ddown", "wdown", "dact", "dup", "all_reduce dnorm2", "wup", "dnorm2", "add dmiddle"],
        *["dproj", "wproj", "dcore", "dqkv", "all_reduce dnorm1", "wqkv", "dnorm1", "add dx"],
    ]
    assert collectives(fragment.forward + fragment.backward) == [("all_reduce", TOKENS)] * 4


def test_sequence_parallel_layer_in_megatrons_order() -> None:
    """Gather in front of each column-parallel linear, scatter behind each row-parallel one; backward the reverse, and
    the stored shard gathered once more for the weight gradient (card TP2)."""
    fragment = layer("tensor/megatron-sp", regather=True)
    assert names(fragment.forward) == [
        *["norm1", "all_gather norm1", "qkv", "core", "proj", "reduce_scatter proj", "residual1"],
        *["norm2", "all_gather norm2", "up", "act", "down", "reduce_scatter down", "residual2"],
    ]
    assert names(fragment.backward) == [
        *["all_gather ddown", "ddown", "wdown", "dact"],
        *["regather norm2", "dup", "reduce_scatter dnorm2", "wup", "dnorm2", "add dmiddle"],
        *["all_gather dproj", "dproj", "wproj", "dcore"],
        *["regather norm1", "dqkv", "reduce_scatter dnorm1", "wqkv", "dnorm1", "add dx"],
    ]
    assert {nbytes for _, nbytes in collectives(fragment.forward + fragment.backward)} == {TOKENS}


@pytest.mark.parametrize("use", ["tensor/megatron", "tensor/megatron-sp"])
def test_the_gradient_is_reduced_during_the_weight_gradient(use: str) -> None:
    """The reduction waits for the input gradient and not for the weight gradient, nor the weight gradient for it."""
    fragment = layer(use, regather=True)
    for column, x in (("up", "norm2"), ("qkv", "norm1")):
        (reduction,) = [op for op in fragment.backward if op.name in (f"all_reduce d{x}", f"reduce_scatter d{x}")]
        given_, weights, norm = (named(fragment, name) for name in (f"d{column}", f"w{column}", f"d{x}"))
        place = fragment.backward.index
        assert place(reduction) == place(given_) + 1 == place(weights) - 1
        assert given_ in waits_for(reduction)
        assert weights not in waits_for(reduction) and reduction not in waits_for(weights)
        assert reduction in waits_for(norm) and weights not in waits_for(norm)
        if use == "tensor/megatron-sp":
            # Only the weight gradient waits for the second gather, which waits for the gradient's arrival.
            again, arrives = (
                named(fragment, name) for name in (f"regather {x}", "dact" if column == "up" else "dcore")
            )
            assert again in waits_for(weights) and again not in waits_for(given_)
            assert arrives in waits_for(again) and again.phase == "W"


def test_linears_and_attention_gather_again() -> None:
    """Attention before its own gradients, linear layers during the gradients of their inputs; without `regather`
    neither.
    """

    class GatheredAttention(TensorScheme):
        """Positions divided everywhere but in the core of attention."""

        name = "gathered-attention"

        def layouts(self, module: Operator) -> str | None:
            return None if isinstance(module, CoreAttention) else "s"

    fragment = lowered_stage(MODEL, MESH, [GatheredAttention(("tp",), None, MESH)], regather=True).unit_runs[0].fragment
    assert names(fragment.forward)[2:6] == ["all_gather q", "all_gather k", "all_gather v", "core"]
    again = [op for op in fragment.backward if op.name.startswith("regather")]
    assert [(op.name, op.phase) for op in again] == [(f"regather {name}", "B") for name in "qkv"]
    assert set(again) <= waits_for(named(fragment, "dcore"))
    ends = {"ends": (True, True)}
    stage_ops = stage("tensor/megatron-sp", regather=True, **ends)
    found = [op.name for op in backward_ops(stage_ops) if "regather" in op.name]
    assert found == ["regather norm.out", "regather norm2", "regather norm1"], "output layer, MLP and attention"
    for use, regather in (("tensor/megatron-sp", False), ("tensor/megatron", True)):
        assert not [op for op in backward_ops(stage(use, regather=regather, **ends)) if "regather" in op.name]


# ------------------------------------------------------------------------------------------ ends of the model


def test_vocabulary_parallel_ends() -> None:
    """Embedding: one all-reduce; output layer: one backward; loss: three all-reduces of one fp32 value a token."""
    stage_ops = stage("tensor/megatron", ends=(True, True), layers=0)
    assert [unit_run.name for unit_run in stage_ops.unit_runs] == ["embedding", "ending"]
    forward = forward_ops(stage_ops)
    joins = [op for op in forward if op.name == "loss" and isinstance(op.work, Collective)]
    assert [op.work for op in joins] == [Collective("all_reduce", 16 * 4, ("tp",))] * 3
    assert all(a in waits_for(b) for a, b in pairwise(joins))
    assert collectives(op for op in forward if op not in joins) == [("all_reduce", TOKENS)]
    assert collectives(backward_ops(stage_ops)) == [("all_reduce", TOKENS)]
    head = named(stage_ops.unit_runs[1].fragment, "head").work
    assert isinstance(head, Gemm) and (head.m, head.n, head.k) == (16, 128 // T, 64)
    logits = [op.work for op in forward if isinstance(op.work, Memory) and op.work.what == "cross-entropy"]
    assert [work.read for work in logits] == [7 * 16 * 128 // T] * 2, "one kernel before the sums, one behind them"


@pytest.mark.parametrize("ends", [(True, False), (False, True), (True, True), (False, False)])
@examples(40)
@given(model=models(tensor=T, layers=2), layers=st.integers(1, 2))
def test_reductions_of_a_stage_over_tensor_ranks(ends: tuple[bool, bool], model: Model, layers: int) -> None:
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
    ("positions", "use"), drawn_grid(["learned", "rope"], ["tensor/megatron", "tensor/megatron-sp"])
)
def test_an_embedding_alone_in_its_stage_is_summed_before_it_leaves(positions: str, use: str) -> None:
    """`ends-as-layers` with one place per stage: the next stage receives a residual, not a partial sum."""
    model = {"layers": 2, "hidden": 64, "heads": 8, "vocab": 128, "seq": 16, "positions": positions}
    plan = {"tp": 4, "pp": 4, "partition": "ends-as-layers", "sequence_parallel": use.endswith("-sp")}
    played = play_job({"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 16}, "plan": plan})
    assert [layers for layers in played.plan.layers] == [0, 1, 1, 0]
    whole = TOKENS // (4 if use.endswith("-sp") else 1)
    assert [stage_ops.unit_runs[-1].nbytes for stage_ops in played.stages[:-1]] == [whole] * 3
    assert [stage_ops.unit_runs[0].nbytes for stage_ops in played.stages[1:]] == [whole] * 3
    operation = "reduce_scatter" if use.endswith("-sp") else "all_reduce"
    assert (operation, TOKENS) in collectives(forward_ops(played.stages[0]))


def collectives_of(use: str, model: Model, ends: tuple[bool, bool], layers: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for operation, nbytes in collectives(both(stage(use, model=model, ends=ends, layers=layers))):
        found[operation] += nbytes
    return found


# -------------------------------------------------------------------------------------------------- phases


@given(model=models(tensor=T, layers=2), use=st.sampled_from([None, "tensor/megatron", "tensor/megatron-sp"]))
def test_phases_and_dependencies(model: Model, use: str | None) -> None:
    stage_ops = stage(use, model=model, ends=(True, True), layers=2, regather=True)
    assert [(unit_run.name, unit_run.count) for unit_run in stage_ops.unit_runs] == [
        ("embedding", 1),
        ("layer", 2),
        ("ending", 1),
    ]
    for op in both(stage_ops):
        assert op.stream == ("tensor" if isinstance(op.work, Collective) else "compute")
    for fragment in (unit_run.fragment for unit_run in stage_ops.unit_runs):
        assert {op.phase for op in fragment.forward} == {"F"} and {op.phase for op in fragment.backward} <= {"B", "W"}
        for ops in (fragment.forward, fragment.backward):
            place = {op: i for i, op in enumerate(ops)}
            assert all(place.get(other, -1) < i for i, op in enumerate(ops) for other in waits_for(op))
        for op in fragment.backward:
            if isinstance(op.work, Gemm) and op.work.what == "linear":
                assert op.work.accumulate == (op.work.layout == "nt") == (op.phase == "W")
                assert op.work.out_dtype == ("fp32" if op.phase == "W" else "bf16")
        assert all(op.work.layout == "tn" for op in fragment.forward if isinstance(op.work, Gemm))
        # Splitting off the weight gradients must be possible: no input gradient waits for one.
        weights = {op for op in fragment.backward if op.phase == "W"}
        assert all(not (weights & waits_for(op)) for op in fragment.backward if op.phase == "B")


@given(model=models(tensor=T, layers=2), use=st.sampled_from([None, "tensor/megatron", "tensor/megatron-sp"]))
def test_units_pass_on_the_residual_stream_alone(model: Model, use: str | None) -> None:
    """The output of a unit is the input of the next, with the same layout and size; nothing else joins them."""
    stage_ops = stage(use, model=model, ends=(True, True), layers=2)
    cut = T if use == "tensor/megatron-sp" else 1
    assert {unit_run.nbytes for unit_run in stage_ops.unit_runs} == {model.seq * model.hidden * 2 // cut}
    first, middle, last = stage_ops.unit_runs
    assert (first.residual_in, middle.residual_in, middle.residual_out) == (None, "x", "y")
    assert (last.residual_in, last.residual_out) == ("x", None)
    for one, other in pairwise((first, middle, middle, last)):
        fragment, behind = one.fragment, other.fragment
        assert given_key(one.keys[1]) == given_key(other.keys[0])
        assert set(fragment.exit) >= {one.residual_out} and set(behind.entry) == {other.residual_in}
        assert set(fragment.grad_entry) == {one.residual_out} and set(behind.grad_exit) == {other.residual_in}
    ends = [unit_run for unit_run in stage_ops.unit_runs if unit_run.residual_in]
    for unit_run in ends:
        used = [op for op in unit_run.fragment.forward if unit_run.fragment.entry["x"] in waits_for(op)]
        assert used == unit_run.fragment.forward, "the forward pass begins with what comes in"


def given_key(key: str | None) -> str:
    """How a tensor is cut, whatever it is called."""
    assert key is not None
    return key.partition("@")[2]


def test_equal_units_are_lowered_once() -> None:
    """Stages, and plans that differ in nothing a rank would see, share their units; others do not."""
    known: dict[Any, UnitRun] = {}
    replicas = [Mesh({"tp": T, "dp": n}) for n in (2, 8, 1)]

    def lowered(mesh: Mesh, use: str, layers: int, *more: Any) -> UnitRun:
        schemes = [make("data/ddp", mesh, ("dp",)), *(make(name, mesh, (), **o) for name, o in more)]
        schemes.append(make(use, mesh, ("tp",)))
        blocks = Architecture(MODEL, 1, MODEL.seq, MODEL.vocab, mesh.size("dp"))
        return Lowering(mesh, schemes, True, known).run(blocks.stage(range(layers), False, False)).unit_runs[0]

    first = lowered(replicas[0], "tensor/megatron", 1)
    more, wider = lowered(replicas[0], "tensor/megatron", 3), lowered(replicas[1], "tensor/megatron", 1)
    assert more.fragment is first.fragment is wider.fragment
    assert (first.count, more.count, wider.count) == (1, 3, 1)
    others = [
        lowered(replicas[0], "tensor/megatron-sp", 1),
        lowered(replicas[2], "tensor/megatron", 1),
        lowered(replicas[0], "tensor/megatron", 1, ("memory/recompute-full", {})),
        lowered(replicas[0], "tensor/megatron", 1, ("memory/recompute-selective", {})),
        lowered(Mesh({"tp": 2, "dp": 2}), "tensor/megatron", 1),
    ]
    fragments = [first.fragment, *(unit_run.fragment for unit_run in others)]
    assert len(set(fragments)) == len(fragments)


def test_gradients_of_norms_are_partial_under_sequence_parallelism() -> None:
    """Norm weights and row biases see the tokens of one rank only; matrices and column biases do not care."""
    partial = {param.name for param in layer("tensor/megatron-sp").params if "tp" in param.partial}
    norms = [f"norm{i}.{part}" for i in (1, 2) for part in ("weight", "bias")]
    assert partial == {*norms, "proj.bias", "down.bias"}
    assert not [param for param in layer("tensor/megatron").params if "tp" in param.partial]
    cut = {param.name for param in layer("tensor/megatron").params if param.size * T == param.total}
    assert cut == {"wq", "wk", "wv", "bq", "bk", "bv", "wo", "wup", "bup", "wdown"}


@pytest.mark.parametrize(("parallel", "sums"), [(True, 1), (False, 0)])
def test_they_are_summed_in_the_update(parallel: bool, sums: int) -> None:
    model = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 128, "seq": 16, "norm": "rmsnorm", "positions": "rope"}
    plan = {"tp": 2, "pp": 2, "sequence_parallel": parallel}
    job = {"model": {**model, "tied": False}, "cluster": {"gpu": "h100-sxm", "gpus": 8}, "plan": plan}
    played = play_job(job)
    for device, norms in ((0, 4), (1, 5)):  # two a layer, and the final one
        found = [op.work for _, op in played.instances(device) if op.phase == "U" and op.name == "reduce"]
        assert found == [Collective("all_reduce", 4 * norms * 64, ("tp",))] * sums


def test_copies_of_key_value_heads_sum_their_gradients() -> None:
    """Two key/value heads on eight ranks: four neighbours hold each, and sum the gradients that their queries cause."""
    model = {"layers": 4, "hidden": 64, "heads": 8, "vocab": 128, "seq": 16, "norm": "rmsnorm"}

    def sums(kv_heads: int) -> list[Any]:
        job = {"model": {**model, "kv_heads": kv_heads}, "cluster": {"gpu": "h100-sxm", "gpus": 8}, "plan": {"tp": 8}}
        works = [op.work for _, op in play_job(job).instances(0)]
        return [work for work in works if isinstance(work, Collective) and work.members is not None]

    # Keys and values of four layers, 64 x 8 weights each, gradients of four bytes.
    assert sums(2) == [Collective("all_reduce", 4 * 2 * 64 * 8 * 4, ("tp",), (0, 1, 2, 3))]
    assert not sums(8)


@pytest.mark.parametrize("plan", [{"dp": 2, "zero": 0}, {"tp": 2}], ids=str)
def test_an_update_reads_gradients_and_states_once_and_writes_states_and_weights(plan: dict[str, Any]) -> None:
    """As many bytes as rest on the rank."""
    model = {"layers": 2, "hidden": 64, "heads": 8, "kv_heads": 2, "vocab": 128, "seq": 16, "norm": "rmsnorm"}
    played = play_job({"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 2}, "plan": plan})
    rest = played.resting(0)
    (adam,) = [op.work for _, op in played.instances(0) if op.name == "adam"]
    assert isinstance(adam, Memory)
    assert adam.read == pytest.approx(rest["gradients"] + rest["optimizer"], rel=1e-6)
    assert adam.write == pytest.approx(rest["optimizer"] + rest["parameters"], rel=1e-6)


class CutBetween(TensorScheme):
    """Positions divided between units alone, whose operators make whole tensors."""

    name = "cut-between"

    def layouts(self, module: Operator) -> str | None:
        return "s" if isinstance(module, Boundary) else None


class CutInside(TensorScheme):
    """Positions divided inside of units alone, whose operators take their slices of whole tensors."""

    name = "cut-inside"

    def layouts(self, module: Operator) -> str | None:
        return None if isinstance(module, Boundary) else "s"


@pytest.mark.parametrize(("scheme", "cut"), [(CutBetween, T), (CutInside, 1)])
def test_between_units_the_residual_stream_and_its_gradient_have_the_layout_of_the_border(
    scheme: type[TensorScheme], cut: int
) -> None:
    for unit_run in lowered_stage(MODEL, MESH, [scheme(("tp",), None, MESH)], (True, True)).unit_runs:
        keys = {f"{d}{key}" for d in ("", "d:") for key in unit_run.keys if key}
        nbytes = {use.key: use.nbytes for use in unit_run.fragment.tensor_uses if use.key in keys}
        assert nbytes == dict.fromkeys(keys, TOKENS // cut)


@pytest.mark.parametrize(
    ("use", "accumulated"), [(None, None), ("tensor/megatron", ""), ("tensor/megatron-sp", "fp32"), ("data/fsdp", None)]
)
@given(model=models(tensor=T, layers=2), regather=st.booleans())
@examples(5)
def test_a_buffer_has_one_size_and_is_written_before_it_is_read(
    use: str | None, accumulated: str | None, regather: bool, model: Model
) -> None:
    """But for tensors that come from outside of a unit, of which the last is the gradient of the loss."""
    how: dict[str, Any] = {"ends": (True, True), "layers": 2, "regather": regather, "accumulated": accumulated}
    for unit_run in stage(use, model=model, **how).unit_runs:
        fragment, sizes, first = unit_run.fragment, dict[str, int](), dict[str, tuple[int, bool]]()
        place = {op: number for number, op in enumerate((*fragment.forward, *fragment.backward))}
        for tensor_use in fragment.tensor_uses:
            assert sizes.setdefault(tensor_use.key, tensor_use.nbytes) == tensor_use.nbytes
            begin = place[tensor_use.op], not tensor_use.made
            first[tensor_use.key] = min(first.get(tensor_use.key, begin), begin)
        outside = {unit_run.keys[0], f"d:{unit_run.keys[1]}", *unit_run.allocated_before}
        read = {key for key, (_, reads) in first.items() if reads} - outside
        assert {key.partition("@")[0] for key in read} <= {"ids", "d:loss"}


@pytest.mark.parametrize("sub_group", [0.0, 100.0])
def test_what_an_update_of_sharded_weights_holds_grows_with_them(sub_group: float) -> None:
    """A temporary of four bytes for each element of the largest gradient's shard, or of what is updated at once."""

    def held(layers: int, each: int, workspace: UpdateWorkspace) -> int:
        sizes = ((each, layers), (3 * each, 1))
        params = tuple((Param("w", n, n, ("tp",), Op("ready"), Op("used")), count) for n, count in sizes)
        module = Update("update", params, 2, 12.0, 12.0, workspace=workspace, sub_group=sub_group)
        (use,) = Lowering(MESH, [make("data/fsdp", MESH, ("tp",))]).lower(module).tensor_uses
        return use.nbytes

    for layers in (2, 5):
        assert held(layers, 64, UpdateWorkspace(norm=4)) == 4 * 3 * 64 // T
        at_once = min(sub_group + 3 * 64 / T, (layers + 3) * 64 / T) if sub_group else (layers + 3) * 64 / T
        assert held(layers, 64, UpdateWorkspace(copies=4)) == 4 * at_once


# ------------------------------------------------------------------------------------------------- recompute

INSIDE = {"core_attn": ("core",), "attention": ("qkv", "rope", "core", "proj"), "mlp": ("up", "act", "down")}


def works(ops: Iterable[Op], among: tuple[str, ...] | None = None) -> Counter[Any]:
    kernels = (op for op in ops if not isinstance(op.work, Collective))
    return Counter(op.work for op in kernels if among is None or op.name.split(".")[-1] in among)


@pytest.mark.parametrize(
    ("module", "attention", "use"), drawn_grid(INSIDE, ["flash", "unfused"], ["tensor/megatron", "tensor/megatron-sp"])
)
@given(model=models(tensor=T, layers=2))
@examples(10)
def test_recompute_runs_exactly_the_module_again(use: str, attention: str, module: str, model: Model) -> None:
    how: dict[str, Any] = {"model": model, "ends": (True, True), "layers": 2, "attention": attention}
    bare = stage(use, **how)
    with_it = stage(use, ("memory/recompute-selective", {"modules": (module,)}), **how)
    again = [op for op in backward_ops(with_it) if op.phase == "R"]
    assert works(again) == works(forward_ops(bare), INSIDE[module])
    assert works(forward_ops(with_it)) == works(forward_ops(bare))
    assert works(op for op in backward_ops(with_it) if op.phase != "R") == works(backward_ops(bare))
    assert all(op.name.startswith("re ") for op in again)


@pytest.mark.parametrize("use", ["tensor/megatron", "tensor/megatron-sp"])
def test_full_recompute_repeats_the_layers_and_their_collectives(use: str) -> None:
    """Two more all-reduces (or their halves) a layer, 12 instead of 8 (p-1)/p b s h elements a rank: card TP1."""
    how: dict[str, Any] = {"ends": (True, True), "layers": 2}
    bare, full = stage(use, **how), stage(use, ("memory/recompute-full", {}), **how)
    again = [op for op in backward_ops(full) if op.phase == "R"]
    (layers,) = [unit_run for unit_run in bare.unit_runs if unit_run.name == "layer"]
    assert layers.count == 2
    assert Counter(op.work for op in again) == Counter(op.work for op in layers.fragment.forward * 2)
    one = stage(use, ("memory/recompute-full", {"layers": 1}), **how)
    assert [unit_run.count for unit_run in one.unit_runs] == [1, 1, 1, 1]
    assert [op.name for op in one.unit_runs[1].fragment.backward if op.phase == "R"], "the first layers of a stage"
    assert 2 * [op.phase for op in backward_ops(one)].count("R") == len(again)
    assert "R" not in {op.phase for op in backward_ops(stage(use, ("memory/recompute-full", {"layers": 0}), **how))}


@pytest.mark.parametrize("outer", [True, False])
def test_recompute_in_recompute(outer: bool) -> None:
    """The core of attention inside a layer that is done again: forward, once for the layer, once for the core."""
    entries = [("memory/recompute-full", {}), ("memory/recompute-selective", {"modules": ("core_attn",)})]
    nested = layer("tensor/megatron", *(entries if outer else reversed(entries)))
    bare = layer("tensor/megatron")
    again = [op for op in nested.backward if op.phase == "R"]
    assert works(again) == works(bare.forward) + works(bare.forward, ("core",))
    cores = [op.work for op in again if isinstance(op.work, Attention)]
    assert len(cores) == 2
    assert works(op for op in nested.backward if op.phase != "R") == works(bare.backward)


def test_recompute_waits_for_the_gradient_and_comes_before_its_use() -> None:
    fragment = layer("tensor/megatron", ("memory/recompute-selective", {"modules": ("mlp",)}))
    again = [op for op in fragment.backward if op.phase == "R"]
    first = fragment.backward.index(again[0])
    assert names(fragment.backward[first : first + 4]) == ["re up", "re act", "re down", "ddown"]
    (mark,) = [mark for name, mark in fragment.grad_entry.items() if name == "y"]
    assert all(mark in waits_for(op) for op in again)


def test_the_gradient_of_an_embedding_is_whole_in_the_format_of_its_weights() -> None:
    """Autograd makes it, and a hook adds it to the gradients: it is in memory beside these."""
    stage = lowered_stage(MODEL, Mesh({}), ends=(True, False))
    uses = [use for run in stage.unit_runs for use in run.fragment.tensor_uses if use.key == "w:embedding"]
    assert {use.nbytes for use in uses} == {MODEL.vocab * MODEL.hidden * 2} and len(uses) == 2
