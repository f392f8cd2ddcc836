"""Work and saved bytes of operators, by laws that hold for every model: products, passes, traffic, slices."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.ir.decoder_operators import CappedAttention
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import LocalShapes, MoE, Operator, UpdateWorkspace, walk
from meshcast.simulator.ir.moe_operators import EXPERTS, ExpertLinear, FusedExpertLinear, Permute
from meshcast.simulator.ir.operators import CoreAttention, Linear, Norm
from meshcast.simulator.ir.ops import Attention, Collective, Exchange, Gemm, Memory
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.routing import slowest_rank
from meshcast.simulator.ir.saved import TURNED, Composition, saved_by
from meshcast.simulator.ir.settings import LayerSetting
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.simulator.schemes.expert.shared.token_gather import fuse_permutations
from tests.strategies import examples

DENSE: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 8, "kv_heads": 4, "vocab": 128, "seq": 32}
MOE = {"experts": 4, "top_k": 2, "expert_ffn": 16, "shared_experts": 1}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "gated": DENSE | {"norm": "rmsnorm", "positions": "rope", "gated": True, "dropout": 0.1},
    "experts": DENSE | {"moe": MOE, "gated": True},
    "capped": DENSE | {"softcaps": ["attention"]},
    "state space": DENSE
    | {"layers": 4, "ssm": {"pattern": "MM*-", "heads": 8, "head_dim": 8, "state": 16, "groups": 2, "chunk": 16}},
}
WHOLE = LocalShapes({}, Mesh({"x": 1}))


def blocks_of(model: str, attention: str = "flash") -> Architecture:
    return Architecture(Model(**MODELS[model]), 2, 32, 128, attention=attention)


def operators_of(model: str, attention: str = "flash") -> list[Operator]:
    """Of all units; of experts those with permutations inside their GEMMs, too."""
    found: list[Operator] = []
    for unit in blocks_of(model, attention).units:
        for module in (unit, *(fuse_permutations(child) for child in unit.children if isinstance(child, MoE))):
            walk(module, found.append)
    return found


def test_scores_of_unfused_attention_have_the_width_of_its_operands() -> None:
    (core,) = {
        type(core): core for core in operators_of("gated", "unfused") if isinstance(core, CoreAttention)
    }.values()
    wide = replace(core, ins=tuple(replace(tensor, dtype="fp32") for tensor in core.ins))
    masks = core.scores(WHOLE)
    for works_of in (CoreAttention.forward, CoreAttention.backward_inputs):
        for narrow, other in zip(works_of(core, WHOLE), works_of(wide, WHOLE), strict=True):
            if isinstance(narrow, Memory):
                assert isinstance(other, Memory)
                mask = masks * (narrow.what == "dropout")
                assert other.read + other.write - mask == 2 * (narrow.read + narrow.write - mask) > 0
    kept, doubled = (dict((name, nbytes) for name, nbytes, _ in of.saved_buffers(WHOLE)) for of in (core, wide))
    assert kept.pop("mask") == doubled.pop("mask") == masks
    assert doubled == {name: 2 * nbytes for name, nbytes in kept.items()}


# ---------------------------------------------------------------------------------------------------- kernels

SIZES = st.integers(1, 64)


@given(m=SIZES, n=SIZES, k=SIZES, batch=SIZES, accumulate=st.booleans())
def test_a_product_moves_its_three_matrices(m: int, n: int, k: int, batch: int, accumulate: bool) -> None:
    gemm = Gemm(m, n, k, batch, accumulate=accumulate, out_dtype="fp32")
    assert gemm.bytes == batch * (2 * m * k + 2 * k * n + 4 * m * n * (1 + accumulate))
    assert gemm.flops == replace(gemm, m=n, n=k, k=m).flops == batch * m * n * k * 2
    assert Memory("add", m, n).bytes == Memory("add", n, m).bytes == m + n


@given(b=SIZES, q=SIZES, kv=SIZES, heads=SIZES, kv_heads=SIZES, d=SIZES, v=SIZES)
def test_attention_is_two_products_forward_and_five_backward(
    b: int, q: int, kv: int, heads: int, kv_heads: int, d: int, v: int
) -> None:
    """Of each head: scores of queries and keys, and their product with values; backward as many as for equal widths.
    Queries, keys, values and results are moved, and backward their gradients too."""
    kernel = Attention(b, q, kv, heads, kv_heads, d, v, share=1.0)
    assert kernel.flops == Gemm(q, kv, d, b * heads).flops + Gemm(q, v, kv, b * heads).flops
    assert replace(kernel, backward=True).flops == pytest.approx(5 / 2 * kernel.flops)
    assert replace(kernel, share=0.5).flops == pytest.approx(kernel.flops / 2)
    elements = b * (q * heads * d + kv * kv_heads * d + kv * kv_heads * v + q * heads * v)
    assert kernel.bytes == 2 * elements and replace(kernel, backward=True).bytes == 4 * elements


WORKS = [
    Gemm(8, 4, 6), Gemm(8, 4, 6, layout="nt"), Attention(1, 8, 8, 2, 2, 4, 4), Memory("add", 8, 4),
    Exchange("dispatch", 8, 4, 1, 8, ("ep",)), Collective("all_gather", 8, ("ep",)),
]  # fmt: skip


@pytest.mark.parametrize("work", WORKS, ids=lambda work: type(work).__name__)
def test_the_slowest_rank_has_its_pace_times_the_mean(work: Any) -> None:
    """Of a weight gradient its tokens are what the product sums over, so it writes no more."""
    slowest = slowest_rank(replace(work, pace=1.5))
    assert slowest.pace == 1 and slowest_rank(work) is work
    assert slowest.flops == pytest.approx(1.5 * work.flops)
    if isinstance(work, Gemm):
        assert (slowest.m * slowest.n == work.m * work.n) == (work.layout == "nt")
    elif not isinstance(work, Attention):
        size = "bytes" if isinstance(work, Memory) else "nbytes"
        assert getattr(slowest, size) == pytest.approx(1.5 * getattr(work, size))


def test_an_exchange_sends_a_copy_of_a_token_with_its_scales_to_each_expert() -> None:
    sent = [Exchange("dispatch", 3, 256, topk, 8, ("ep",)).nbytes for topk in (1, 2)]
    assert sent == [3 * 256 * 2, 2 * 3 * 256 * 2]
    assert 256 * 3 < Exchange("dispatch", 3, 256, 1, 8, ("ep",), "fp8").nbytes < sent[0]


# -------------------------------------------------------------------------------------------------- operators


@pytest.mark.parametrize("attention", ["flash", "unfused"])
@pytest.mark.parametrize("model", MODELS)
def test_kernels_of_a_pass_know_their_pass(model: str, attention: str) -> None:
    """A kind of kernel that has a backward variant anywhere runs it in backward passes alone, and always there."""
    for operator in operators_of(model, attention):
        passes = {False: operator.forward(WHOLE), True: operator.backward_inputs(WHOLE)}
        marked = [
            work.what if isinstance(work, Memory) else "" for work in passes[True] if getattr(work, "backward", 0)
        ]
        assert not any(getattr(work, "backward", False) for work in passes[False])
        assert marked or not any(isinstance(work, Attention) for work in passes[True])
        twins = {work.what for work in passes[False] if isinstance(work, Memory)} & {"rope", "norm", "rms-norm", "gelu"}
        assert twins <= set(marked)
        assert isinstance(operator, Linear) or operator.cast_gradient_bytes(WHOLE) == 0


@pytest.mark.parametrize("model", MODELS)
def test_a_linear_layer_has_three_products_of_its_weights_input_and_output(model: str) -> None:
    """Of equal FLOPs, which read and write every element once, of experts up to a row each."""
    layers = [operator for operator in operators_of(model) if isinstance(operator, Linear)]
    assert layers
    for layer in layers:
        works = layer.forward(WHOLE), layer.backward_inputs(WHOLE), layer.backward_weights(WHOLE)
        (forward,), (back,), (weight,) = ([work for work in each if isinstance(work, Gemm)] for each in works)
        assert forward.flops == back.flops == weight.flops
        assert forward.batch * forward.k * forward.n == WHOLE.size(*layer.matrices)
        if isinstance(layer, FusedExpertLinear):
            tokens = layer.ins[0] if layer.sorts == "ins" else layer.outs[0]
            hidden = WHOLE.dims(tokens)["h"]
            assert (forward.k if layer.sorts == "ins" else forward.n) == hidden
            (added_up,) = (work for work in works[layer.sorts == "ins"] if isinstance(work, Memory))
            assert added_up.read == 2 * forward.batch * forward.m * hidden, "the copies of all tokens"
        elif not isinstance(layer, ExpertLinear):
            assert forward.batch * forward.m * forward.n == WHOLE.size(*layer.outs)
            assert forward.batch * forward.m * forward.k == WHOLE.size(layer.ins[0])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_scores_are_capped_next_to_the_softmax(dropout: float) -> None:
    (capped,) = {
        type(core): core for core in operators_of("capped", "unfused") if isinstance(core, CoreAttention)
    }.values()
    assert isinstance(capped, CappedAttention)
    capped = replace(capped, dropout=bool(dropout))
    plain = CoreAttention(**{each.name: getattr(capped, each.name) for each in fields(CoreAttention)})
    for works, others, at in (
        (capped.forward(WHOLE), plain.forward(WHOLE), -1),
        (capped.backward_inputs(WHOLE), plain.backward_inputs(WHOLE), 1),
    ):
        (place,) = (i for i, work in enumerate(works) if isinstance(work, Memory) and work.what == "gelu")
        assert [*works[:place], *works[place + 1 :]] == others
        beside = works[place - at]
        assert isinstance(beside, Memory) and beside.what == "softmax"
    begins, ends, _ = zip(*capped.temporary_buffers(WHOLE, backward=True), strict=True)
    assert begins[1:] == ends[:-1] and ends[-1] == plain.temporary_buffers(WHOLE, backward=True)[-1][1] + 1


@examples(200)
@given(
    cuts=st.sets(st.sampled_from([4, 8, 12, 16, 20, 24, 28])), of=st.sampled_from(["", "document", "chunk", "window"])
)
def test_slices_of_a_sequence_attend_to_what_the_whole_does(cuts: set[int], of: str) -> None:
    """Also where a slice is just a document or a chunk."""
    model = Model(**DENSE, **({"attention_chunk": 8} if of == "chunk" else {"window": 8} if of == "window" else {}))
    whole = Architecture(model, 2, 32, 128, document=8 if of == "document" else None)
    ends = [0, *sorted(cuts), 32]
    flops = []
    for parts in ([whole], [whole.slice(a, b) for a, b in pairwise(ends)]):
        cores = [
            core
            for part in parts
            for unit in part.units
            for core in unit.operators()
            if isinstance(core, CoreAttention)
        ]
        flops.append(sum(work.flops for core in cores for work in core.forward(WHOLE)))
    assert flops[0] == pytest.approx(flops[1])


def test_the_squares_of_a_grid_have_all_of_its_ranks() -> None:
    for grid in ((2, 2), (2, 2, 2), (4, 3, 3)):
        setting = LayerSetting(t=math.prod(grid), grid=grid)
        assert setting.d * setting.q**2 == setting.t


def test_axes_of_one_rank_shard_nothing() -> None:
    at = LocalShapes({"x": "s", "y": "s", "z": "h"}, Mesh({"x": 1, "y": 2, "z": 3}))
    assert (at.axes_of("s"), at.axes_of("h"), at.axes_of("b")) == (["y"], ["z"], [])


def test_sums_divide_what_they_add_up() -> None:
    """A linear layer its contracted dim as well, a norm what its results have."""
    linear = next(operator for operator in operators_of("dense") if isinstance(operator, Linear))
    norm = next(operator for operator in operators_of("dense") if isinstance(operator, Norm))
    lacking = [dim for dim in linear.dims if not any(out.has(dim) for out in linear.outs)]
    assert lacking and {*lacking} <= {*linear.divisible_dims}
    assert all(out.has(dim) for dim in norm.divisible_dims for out in norm.outs)
    mixed = replace(norm, outs=(*norm.outs, Tensor("sum", {"b": Dim(2)})))
    assert mixed.divisible_dims == ("b",)


# -------------------------------------------------------------------------------------------- saved and updated


def composed(operator: Operator, written: str) -> tuple[float, list[tuple[str, int, str]]]:
    saved = saved_by(replace(operator, marks=frozenset({Composition(written)})), WHOLE)
    return WHOLE.bytes(*saved.tensors), saved.buffers


def test_a_norm_in_parts_saves_its_input_in_fp32_once() -> None:
    norm = next(operator for operator in operators_of("gated") if isinstance(operator, Norm))
    wide = replace(norm, ins=tuple(replace(x, dtype="fp32") for x in norm.ins))
    for each in (norm, wide):
        kept, buffers = composed(each, "norm")
        assert kept + dict((name, nbytes) for name, nbytes, _ in buffers).get("wide", 0) == 4 * WHOLE.size(*norm.ins)


@pytest.mark.parametrize("heads", [4, 8])
def test_unfused_attention_saves_keys_and_values_once_for_every_query_head(heads: int) -> None:
    blocks = Architecture(Model(**DENSE | {"kv_heads": heads}), 2, 32, 128, attention="unfused")
    core = next(core for unit in blocks.units for core in unit.operators() if isinstance(core, CoreAttention))
    kept, buffers = composed(core, TURNED)
    repeated = sum(nbytes for name, nbytes, _ in buffers if name == "repeated")
    assert kept + repeated == 3 * WHOLE.bytes(core.ins[0])


def test_the_order_of_tokens_is_two_indices_a_copy() -> None:
    permute = next(operator for operator in operators_of("experts") if isinstance(operator, Permute))
    _, buffers = composed(permute, "")
    assert sum(nbytes for _, nbytes, _ in buffers) == 2 * 8 * (2 * 32) * MOE["top_k"]


BYTES_EACH = st.integers(0, 8)


@examples(1000)
@given(
    workspace=st.builds(UpdateWorkspace, *[BYTES_EACH] * 6, st.booleans()),
    elements=st.tuples(*[st.integers(0, 100)] * 4),
    name=st.sampled_from(["converted", "copies", "norm", "apart"]),
)
def test_an_update_holds_more_for_more_copies_and_less_for_more_that_is_freed(
    workspace: UpdateWorkspace, elements: tuple[int, int, int, int], name: str
) -> None:
    updated, largest, others, freed = elements
    most = workspace.most(*elements)
    more = replace(workspace, **{name: getattr(workspace, name) + 1}).most(*elements)
    assert more <= most if name == "apart" else more >= most
    assert workspace.most(updated, largest, others + 1, freed) <= most
    assert workspace.most(updated, largest, others, freed + 1) <= most
    assert replace(workspace, shared=False).most(*elements) <= replace(workspace, shared=True).most(*elements)
    at_once = workspace.converted + max(workspace.flat, workspace.copies)
    assert workspace.most(updated, largest, 0, 0) == max(
        largest * workspace.norm, updated * (at_once - workspace.apart)
    )
    assert workspace.most_sharded(updated, updated, largest) >= max(largest * workspace.norm, updated * workspace.scan)


def test_a_scheme_over_an_axis_of_a_view_is_of_that_view() -> None:
    mesh = Mesh({"dp": 2}, {EXPERTS: {"ep": 2}}, ["dp"])
    assert find_scheme("expert/all-to-all")(("ep",), mesh=mesh).view == EXPERTS
    assert (
        find_scheme("data/ddp")(("dp",), mesh=mesh).view == find_scheme("memory/recompute-full")(mesh=mesh).view == ""
    )
