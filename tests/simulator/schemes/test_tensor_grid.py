"""Tensor ranks in squares and cubes: 2-D (SUMMA), 2.5-D (Tesseract) and 3-D, against each other and their cards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from math import ceil, log2
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.engine.longest_path import longest_path
from meshcast.simulator.ir.layout import required_layout
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import Operator
from meshcast.simulator.ir.operators import Embedding, Head
from meshcast.simulator.ir.ops import COMPUTE, Attention, Collective, Gemm, Memory, Op, StageOps
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.lowering.scope import Scope
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import LayerKind, Model
from meshcast.simulator.program.block import resolve_dependencies
from meshcast.simulator.program.flatten import FlatProgram
from meshcast.simulator.program.memory_profile import memory_events
from meshcast.validation.contract.measure import (
    backward_ops,
    catalog_model,
    forward_ops,
    make,
    params_of,
    sent_bytes,
    waits_for,
)
from meshcast.validation.contract.of_tensor import LoweredLayer
from meshcast.validation.contract.played import Played, play_job
from tests.simulator.schemes.small_jobs import job_on
from tests.strategies import examples

AXES = {"tensor/summa-2d": ("row", "col"), "tensor/tesseract": ("depth", "row", "col"), "tensor/3d": ("i", "j", "l")}
TWOS = {use: (2,) * len(axes) for use, axes in AXES.items()}
every_grid = pytest.mark.parametrize("use", AXES)
MIB = 2**20


def grid(use: str, sides: Iterable[int], **options: object) -> tuple[Mesh, Scheme]:
    mesh = Mesh(dict(zip(AXES[use], sides, strict=True)))
    return mesh, make(use, mesh, AXES[use], **options)


def lowered(
    use: str,
    sides: Iterable[int],
    model: Model,
    samples: int,
    ends: bool = False,
    regather: bool = False,
    **options: object,
) -> tuple[StageOps, Mesh]:
    """A layer, between embedding and loss where `ends`."""
    mesh, scheme = grid(use, sides, **options)
    blocks = Architecture(model, samples, model.seq, model.vocab)
    return Lowering(mesh, [scheme], regather).run(blocks.stage(range(1), ends, ends)), mesh


def of_products(ops: Iterable[Op], mesh: Mesh) -> float:
    """Bytes sent of operands and results: all but the sums of norms."""
    found = [(op, op.work) for op in ops]
    return sent_bytes(
        [op for op, work in found if isinstance(work, Collective) and work.operation != "all_reduce"], mesh
    )


def llama(**more: Any) -> Model:
    """The layer of the golden numbers: 218.1 M parameters, eight sequences of 1024 tokens."""
    sizes = {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000, "seq": 1024, **more}
    return Model(layers=1, positions="rope", norm="rmsnorm", gated=True, tied=False, **sizes)


# ----------------------------------------------------------------------------------------------- volume


@pytest.mark.parametrize(("q", "mib"), [(2, 416), (4, 416), (8, 312)])
def test_a_llama_layer_broadcasts_the_published_bytes_forward(q: int, mib: int) -> None:
    stage_ops, mesh = lowered("tensor/summa-2d", (q, q), llama(), 8)
    assert sum(param.size for param in params_of(stage_ops)) == pytest.approx(218.104e6 / q**2, rel=1e-2)
    assert of_products(forward_ops(stage_ops), mesh) == pytest.approx(mib * MIB, rel=1e-12)
    assert of_products(backward_ops(stage_ops), mesh) == pytest.approx(2 * mib * MIB, rel=1e-12)


@pytest.mark.parametrize("use", ["tensor/summa-2d", "tensor/tesseract"])
def test_without_overlap_the_same_bytes_move_one_after_another_through_half_of_the_buffers(use: str) -> None:
    (usual, mesh), (plain, _) = (lowered(use, TWOS[use], llama(), 8, overlap=overlap) for overlap in (True, False))
    for ops_of in (forward_ops, backward_ops):
        assert of_products(ops_of(plain), mesh) == of_products(ops_of(usual), mesh) > 0
        ops = [op for op in ops_of(plain) if " rows " in op.name or " weight " in op.name or isinstance(op.work, Gemm)]
        products = Counter(op.name.split()[-2] for op in ops)
        for product in products:
            chain = [op for op in ops if op.name.split()[-2] == product and op.phase == ops[0].phase]
            assert all(before in op.after for before, op in pairwise(chain)), product
    held, half = (
        sum({use.key: use.nbytes for use in stage.tensor_uses if use.category == "buffers"}.values())
        for stage in (usual.unit_runs[0].fragment, plain.unit_runs[0].fragment)
    )
    assert half == held / 2 > 0


def test_a_llama_layer_on_a_cube_of_eight_sends_188_mib_each_way() -> None:
    stage_ops, mesh = lowered("tensor/3d", (2, 2, 2), llama(), 8)
    assert of_products(forward_ops(stage_ops), mesh) == 188 * MIB
    assert of_products(backward_ops(stage_ops), mesh) == 188 * MIB
    again, _ = lowered("tensor/3d", (2, 2, 2), llama(), 8, regather=True)
    operands = (8192 * (3 * 4096 + 14336) + 4096 * (4096 + 2048 + 4096 + 3 * 14336)) * 2 / 8
    assert of_products(backward_ops(again), mesh) == 188 * MIB + operands


@st.composite
def layers(draw: st.DrawFn, cut: int) -> tuple[Model, int]:
    """A layer whose heads, widths and samples divide by `cut`, and its samples."""
    kv_heads = cut * draw(st.integers(1, 2))
    model = Model(
        layers=1,
        hidden=cut * draw(st.integers(1, 16)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 4)),
        ffn=cut * draw(st.integers(1, 32)),
        vocab=cut * draw(st.integers(1, 64)),
        seq=draw(st.integers(1, 16)),
        gated=draw(st.booleans()),
        positions=draw(st.sampled_from(["learned", "rope"])),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        tied=draw(st.booleans()),
    )
    return model, cut * draw(st.integers(1, 3))


def sizes(model: Model, samples: int) -> list[tuple[int, int, int]]:
    """T, K and N of the linears of a layer."""
    d, h = model.head_dim, model.hidden
    qkv, ups = d * (model.heads + 2 * model.kv_heads), (1 + model.gated) * model.ffn
    return [(samples * model.seq, k, n) for k, n in ((h, qkv), (d * model.heads, h), (h, ups), (model.ffn, h))]


@examples(25)
@given(data=st.data(), d=st.integers(1, 3), q=st.sampled_from([2, 3, 4]))
def test_broadcasts_of_any_layer_are_the_sum_over_its_gemms(data: st.DataObject, d: int, q: int) -> None:
    """Backward exactly twice the bytes; the depth divides the activations among them."""
    model, samples = data.draw(layers(d * q))
    stage_ops, mesh = lowered("tensor/tesseract", (d, q, q), model, samples)
    wanted = sum(t * k / d + k * n for t, k, n in sizes(model, samples)) * ceil(log2(q)) / q * 2
    assert of_products(forward_ops(stage_ops), mesh) == pytest.approx(wanted)
    assert of_products(backward_ops(stage_ops), mesh) == pytest.approx(2 * wanted)


@examples(25)
@given(data=st.data(), q=st.sampled_from([2, 3]))
def test_every_product_of_a_cube_moves_its_three_matrices_once_each_way(data: st.DataObject, q: int) -> None:
    """(q-1)/q^3 of each: forward X and W are received and Y is sent, backward dY is received and dX and dW are sent. So
    both directions send the same bytes, for any assignment of tokens, input and output to the axes.
    """
    model, samples = data.draw(layers(q * q))
    stage_ops, mesh = lowered("tensor/3d", (q, q, q), model, samples)
    for ops in (forward_ops(stage_ops), backward_ops(stage_ops)):
        wanted = sum(t * k + k * n + t * n for t, k, n in sizes(model, samples))
        assert of_products(ops, mesh) == pytest.approx((q - 1) / q**3 * wanted * 2)
        moved = {"all_gather": 0.0, "reduce_scatter": 0.0}
        for op in ops:
            if isinstance(op.work, Collective) and op.work.operation in moved:
                moved[op.work.operation] += op.work.nbytes
        comes, goes = (
            (lambda t, k, n: t * k + k * n, lambda t, k, n: t * n)
            if ops[0].phase == "F"
            else (lambda t, k, n: t * n, lambda t, k, n: t * k + k * n)
        )
        each = sizes(model, samples)
        assert moved["all_gather"] == pytest.approx(sum(comes(*one) for one in each) * 2 / q**2)
        assert moved["reduce_scatter"] == pytest.approx(sum(goes(*one) for one in each) * 2 / q**2)


@every_grid
@pytest.mark.parametrize(("norm", "values"), [("layernorm", 2), ("rmsnorm", 1)])
def test_norms_join_sums_of_every_token_of_a_rank(use: str, norm: str, values: int) -> None:
    model = Model(layers=1, hidden=48, heads=4, vocab=64, seq=6, norm=norm, qk_layernorm=True)
    stage_ops, mesh = lowered(use, TWOS[use], model, 8)
    tokens = 8 * 6 // (mesh.world // 2)
    joins = [op.work for op in (*forward_ops(stage_ops), *backward_ops(stage_ops)) if isinstance(op.work, Collective)]
    joins = [work for work in joins if work.operation == "all_reduce"]
    # Two norms over h, each way; those over the width of a head have all of it.
    assert joins == [Collective("all_reduce", 4 * values * tokens, (AXES[use][-1],))] * 4


# ------------------------------------------------------------------------------------------ equivalences


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("q", [1, 2, 4])
def test_tesseract_of_one_layer_is_summa(q: int, regather: bool) -> None:
    mesh = Mesh({"depth": 1, "row": q, "col": q})
    model = Model(layers=2, hidden=64, heads=8, vocab=128, seq=8, dropout=0.1)
    found = []
    for use, axes in AXES.items():
        if use != "tensor/3d":
            blocks = Architecture(model, 8, 8, 128)
            stage_ops = Lowering(mesh, [make(use, mesh, axes)], regather).run(blocks.stage(range(2), True, True))
            found.append(catalog_model(stage_ops))
    assert found[0] == found[1]


@pytest.mark.parametrize("d", [1, 2, 4])
def test_tesseract_of_squares_of_one_rank_is_data_parallelism(d: int) -> None:
    """The same work on the same parts, and no broadcasts; the gradients are summed over the depth once a step."""
    model = {"layers": 2, "hidden": 64, "heads": 8, "vocab": 128, "seq": 8}
    job = {"model": model, "cluster": {"gpu": "h100-sxm", "gpus": d}}
    sides = {"depth": d, "row": 1, "col": 1}
    entry = {"use": "tensor/tesseract", "over": list(sides)}
    ours = play_job({**job, "batch": {"global": 8, "micro": 4}, "plan": {"mesh": sides, "schemes": [entry]}})
    each = {"global": 8, "micro": 4 // d}
    theirs = play_job(
        {**job, "batch": each, "plan": {"mesh": {"dp": d}, "schemes": [{"use": "data/ddp", "over": "dp"}]}}
    )

    def reduced_bytes(played: Played) -> list[Any]:
        return [(op.name, op.work) for _, op in played.instances() if op.stream == COMPUTE and op.phase in "FBW"]

    def reduced(played: Played) -> int:
        return sum(op.work.nbytes for _, op in played.instances() if op.name in ("reduce", "reduce grads"))  # type: ignore[union-attr]

    assert reduced_bytes(ours) == reduced_bytes(theirs)
    assert reduced(ours) == reduced(theirs) == (4 * ours.plan.job.model.parameters if d > 1 else 0)
    assert ours.resting(0) == theirs.resting(0)
    assert not any(op.stream == "tensor" for _, op in ours.instances() if op.phase != "U")


@pytest.mark.parametrize(("d", "q"), [(2, 2), (3, 2), (2, 4)])
def test_gradients_of_matrices_are_summed_over_the_depth_once_a_step(d: int, q: int) -> None:
    """12 h^2 / q^2 elements per layer over d ranks; gradients of norms and biases over the rows as well."""
    h, layers_ = 64, 3
    model = {"layers": layers_, "hidden": h, "heads": 8, "vocab": 64, "seq": 4, "tied": False, "positions": "none"}
    sides = {"depth": d, "row": q, "col": q}
    tesseract = {"use": "tensor/tesseract", "over": list(sides)}
    played = play_job(job_on(sides, tesseract, samples=48, model=model, batch={"global": 48, "micro": 24}))
    sums = {op.work.axes: op.work.nbytes for _, op in played.instances() if op.name == "reduce"}  # type: ignore[union-attr]
    matrices = layers_ * 12 * h * h + 2 * played.plan.model_parts.vocab * h
    assert sums == {("depth",): 4 * matrices / q**2, ("depth", "row"): 4 * (layers_ * 13 * h + 2 * h) / q}


@examples(20)
@given(data=st.data(), q=st.sampled_from([2, 3]))
def test_attention_costs_a_rank_of_a_square_as_much_as_one_of_a_row(data: st.DataObject, q: int) -> None:
    """b/q samples of a/q heads have the same scores as b samples of a/q^2 heads."""
    model, samples = data.draw(layers(q * q))
    row = Mesh({"tp": q * q})
    blocks = Architecture(model, samples, model.seq, model.vocab)
    flat = Lowering(row, [make("tensor/megatron", row, ("tp",))]).run(blocks.stage(range(1), False, False))
    square, _ = lowered("tensor/summa-2d", (q, q), model, samples)
    found = [
        sum(op.work.flops for op in (*forward_ops(c), *backward_ops(c)) if isinstance(op.work, Attention))
        for c in (flat, square)
    ]
    assert found[0] == pytest.approx(found[1])


@every_grid
@examples(15)
@given(data=st.data())
def test_ranks_of_a_grid_do_the_products_of_a_layer_and_hold_its_weights_once(use: str, data: st.DataObject) -> None:
    sides = TWOS[use]
    model, samples = data.draw(layers(4))
    stage_ops, mesh = lowered(use, sides, model, samples, ends=True)
    alone = Lowering(Mesh({}), []).run(Architecture(model, samples, model.seq, model.vocab).stage(range(1), True, True))
    for phase in ("F", "B", "W"):
        done = [
            sum(
                op.work.flops for op in (*forward_ops(c), *backward_ops(c)) if op.phase == phase and op.work is not None
            )
            for c in (stage_ops, alone)
        ]
        assert done[0] * mesh.world == pytest.approx(done[1])
    for param in params_of(stage_ops):
        # A cube's axis that a linear contracts neither cuts its bias nor sees other gradients of it.
        again = 2 if use == "tensor/3d" and param.name in ("bq", "bk", "bv", "bup", "bgate") else 1
        assert param.size * mesh.world == param.total * mesh.size(param.partial) * again


# ---------------------------------------------------------------------------------------- steps of SUMMA


def linear(use: str, sides: tuple[int, ...], tokens: int, h: int, f: int) -> tuple[list[Op], list[Op], Mesh]:
    """The forward and backward ops of a linear [h, f] over `tokens` samples of one position."""
    model = Model(layers=1, hidden=h, heads=4, ffn=f, vocab=64, seq=1)
    mesh, scheme = grid(use, sides)
    layer = Architecture(model, tokens, 1, 64).layer(LayerKind(experts=False, local=False))
    (up,) = [operator for operator in layer.operators() if operator.name == "up"]
    fragment = Lowering(mesh, [scheme]).lower(up)
    return fragment.forward, fragment.backward, mesh


def test_blocks_of_the_next_step_are_sent_ahead_of_a_product() -> None:
    """Into two buffers: blocks of step 2 wait for the GEMM of step 0, and for no later one."""
    forward, backward, _ = linear("tensor/summa-2d", (3, 3), 9, 36, 72)
    names = [op.name for op in forward]
    assert names == [
        *("broadcast rows up 0", "broadcast weight up 0", "broadcast rows up 1", "broadcast weight up 1", "up 0"),
        *("broadcast rows up 2", "broadcast weight up 2", "up 1", "up 2"),
    ]
    assert [op.name for op in backward if op.phase == "B"] == [
        *("broadcast weight dup 0", "broadcast weight dup 1", "dup 0", "reduce rows dup 0"),
        *("broadcast weight dup 2", "dup 1", "reduce rows dup 1", "dup 2", "reduce rows dup 2"),
    ]
    assert [op.name for op in backward if op.phase == "W"] == [
        *("broadcast rows wup 0", "broadcast rows wup 1", "wup 0", "reduce weight wup 0"),
        *("broadcast rows wup 2", "wup 1", "reduce weight wup 1", "wup 2", "reduce weight wup 2", "add wup"),
    ]
    by_name = {op.name: op for op in forward}
    waited = waits_for(by_name["broadcast weight up 2"])
    assert by_name["up 0"] in waited and by_name["up 1"] not in waited
    axes = {op.name.split()[1]: op.work.axes for op in forward if isinstance(op.work, Collective)}
    assert axes == {"rows": ("col",), "weight": ("row",)}


@pytest.mark.parametrize("links", [1e4, 3e4, 1e5, 1e7])
@pytest.mark.parametrize("q", [2, 4])
def test_broadcasts_hide_behind_the_product_before(q: int, links: float) -> None:
    """All but the first where products last longer, and all but the last product where they do not."""
    forward, _, mesh = linear("tensor/summa-2d", (q, q), 64, 64, 128)
    flat = FlatProgram()
    for op, after in zip(forward, resolve_dependencies(forward, None, None)[0], strict=True):
        assert op.work is not None
        flat.add(op, sent_bytes([op], mesh) / links + op.work.flops / 1e6, 0.0, 0.0, after, 0)
    product_ = 2 * 64 * 64 * 128 / q**3 / 1e6
    # Rows and columns broadcast at the same time.
    moved = max(64 * 64, 64 * 128) * 2 * log2(q) / q**2 / links
    assert longest_path(flat).span == pytest.approx(moved + (q - 1) * max(moved, product_) + product_)


@pytest.mark.parametrize("q", [2, 4])
def test_two_blocks_of_each_operand_are_there_at_a_time(q: int) -> None:
    """2 (TK + KN) / q^2 elements of the largest linear, whichever two of its matrices are on their way."""
    model = {"layers": 2, "hidden": 64, "heads": 8, "vocab": 128, "seq": 16}
    summa = {"use": "tensor/summa-2d", "over": ["row", "col"]}
    played = play_job(job_on({"row": q, "col": q}, summa, samples=8, model=model, batch={"global": 8, "micro": 4}))
    down = 4 * 16 * 4 * 64 + 4 * 64 * 64
    assert played.category_peak(0, "buffers") == 2 * down * 2 / q**2


def test_products_of_one_result_add_up_and_others_are_summed_on_their_way() -> None:
    """In bf16; a rank adds its block of the weight gradient to the persistent one in fp32."""
    forward, backward, _ = linear("tensor/summa-2d", (2, 2), 8, 32, 64)
    adds = {op.name: op.work.accumulate for op in (*forward, *backward) if isinstance(op.work, Gemm)}
    assert adds == {"up 0": False, "up 1": True, "dup 0": False, "dup 1": False, "wup 0": False, "wup 1": False}
    assert {op.work.out_dtype for op in backward if isinstance(op.work, Gemm)} == {"bf16"}
    block = 32 * 64 // 4
    assert backward[-1].work == Memory("add", (2 + 4) * block, 4 * block)


# ----------------------------------------------------------------------------------------- tables, weights


def operators_of(model: Model, samples: int) -> list[Operator]:
    stage = Architecture(model, samples, model.seq, model.vocab).stage(range(model.layers), True, True)
    return [operator for unit in stage.units for operator in unit.operators()]


@every_grid
def test_a_tied_table_lies_the_same_way_at_both_ends(use: str) -> None:
    model = Model(layers=1, hidden=16, heads=4, vocab=32, seq=4, tied=True)
    mesh, scheme = grid(use, TWOS[use])
    low = Scope(mesh, [scheme])
    first, last = (
        next(operator for operator in operators_of(model, 4) if isinstance(operator, kind))
        for kind in (Embedding, Head)
    )
    assert low.at_rest(first, first.weights[0]) == low.at_rest(last, last.weights[0])
    assert required_layout(first.weights[0], low.division(first)) == required_layout(
        last.weights[0], low.division(last)
    )
    stage_ops, _ = lowered(use, TWOS[use], model, 4, ends=True)
    assert [param.name for param in params_of(stage_ops)].count("embedding") == 1
    assert stage_ops.unit_runs[-1].fragment.shared_weights == ["head"]


def test_a_tied_output_layer_sums_its_logits_and_broadcasts_their_gradients() -> None:
    """C = A B^T forward, with the table as it lies; its gradient C'^T A sends the logits' gradients round."""
    model = Model(layers=1, hidden=16, heads=4, vocab=32, seq=4, tied=True)
    stage_ops, _ = lowered("tensor/summa-2d", (2, 2), model, 4, ends=True)
    ending = stage_ops.unit_runs[-1].fragment
    kinds = Counter(
        (op.phase, op.work.operation, op.work.axes, op.work.nbytes)
        for op in (*ending.forward, *ending.backward)
        if isinstance(op.work, Collective) and "head" in op.name
    )
    rows, logits, table = 16 * 16 // 4 * 2, 16 * 32 // 4 * 2, 32 * 16 // 4 * 2
    assert rows != logits
    assert kinds == {
        ("F", "broadcast", ("row",), table): 2,
        ("F", "reduce", ("col",), logits): 2,
        ("B", "broadcast", ("col",), logits): 2,
        ("B", "broadcast", ("row",), table): 2,
        ("W", "broadcast", ("col",), logits): 2,
        ("W", "reduce", ("row",), table): 2,
    }


def test_an_embedding_on_a_square_broadcasts_its_table_in_blocks() -> None:
    model = Model(layers=1, hidden=16, heads=4, vocab=32, seq=4, positions="none")
    stage_ops, _ = lowered("tensor/summa-2d", (2, 2), model, 4, ends=True)
    embedding = stage_ops.unit_runs[0].fragment
    block = 32 * 16 // 4 * 2
    assert [op.work for op in embedding.forward if op.stream == "tensor-row"] == [
        Collective("broadcast", block, ("row",))
    ] * 2
    assert [op.work for op in embedding.backward if op.stream == "tensor-row"] == [
        Collective("reduce", block, ("row",))
    ] * 2


@pytest.mark.parametrize("use", ["tensor/summa-2d", "tensor/tesseract"])
def test_each_communicator_of_a_square_has_a_stream(use: str) -> None:
    """Broadcasts along rows and columns, reductions and the sums of norms: one stream for each group of ranks."""
    sides = (2,) * len(AXES[use])
    stage_ops, _ = lowered(use, sides, Model(layers=1, hidden=64, heads=4, vocab=64, seq=4), 8, ends=True)
    ops = [op for op in (*forward_ops(stage_ops), *backward_ops(stage_ops)) if isinstance(op.work, Collective)]
    streams = {op.work.axes: {one.stream for one in ops if one.work.axes == op.work.axes} for op in ops}  # type: ignore[union-attr]
    assert streams[("row",)] == {"tensor-row"} and streams[("col",)] == {"tensor"}


@pytest.mark.parametrize("regather", [False, True])
def test_gathered_weights_of_a_cube_live_until_their_last_use(regather: bool) -> None:
    """Kept from the forward to the backward pass, 12 h^2 / q^2 elements a layer; or gathered again for each product."""
    q, h = 2, 64
    setting = LoweredLayer(q**3, 8, 4, h, 4, regather, grid=(q, q, q))
    unit_run, _ = setting.layer("tensor/3d")
    fragment = unit_run.fragment
    events = memory_events(fragment.tensor_uses, fragment.forward, fragment.backward, unit_run)

    def left(ops: list[Op]) -> float:
        return sum(n for op in ops for _, _, n, category in events.get(op, ()) if category == "parameters")

    assert left(fragment.forward) == (0 if regather else 12 * h * h // q**2 * 2)
    assert left(fragment.forward) + left(fragment.backward) == 0
    again = sum(op.name.startswith("regather w") for op in fragment.backward)
    assert again == (4 if regather else 0)


def test_scattered_weight_gradients_of_a_cube_hold_no_kernel_up() -> None:
    stage_ops, _ = lowered("tensor/3d", (2, 2, 2), Model(layers=1, hidden=64, heads=4, vocab=64, seq=4), 8)
    ops = backward_ops(stage_ops)
    scatters = {op for op in ops if op.name.startswith("scatter w")}
    assert len(scatters) == 4
    assert not any(scatters & waits_for(op) for op in ops if op.stream == COMPUTE)
    for param in params_of(stage_ops):
        assert (param.ready in scatters) == (param.name in ("wq", "wk", "wv", "wo", "wup", "wdown"))
