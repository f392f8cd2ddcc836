"""Attention block by block in time: what a step of a ring takes, and what hides its messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import COMPUTE, Attention, Collective, Gemm, Memory, Op, UnitRun
from meshcast.simulator.ir.routing import slowest_rank
from meshcast.simulator.models.model import Model
from meshcast.simulator.report.tracing.lanes import THREADS
from meshcast.validation.contract.measure import forward_ops, lowered_stage, make, waits_for
from meshcast.validation.contract.of_experts import span
from meshcast.validation.contract.of_sequence import efficiency, of_family
from tests.draws import drawn_grid
from tests.ideal_costs import IdealCosts
from tests.simulator.schemes.ring_layers import ORDERS, attending, layer, sent_by, under


@pytest.mark.parametrize(("rate", "p", "order"), drawn_grid([0.2, 1.0, 3.0], [2, 4, 6], ORDERS))
def test_a_step_of_a_ring_takes_its_block_or_its_transfer(order: str, p: int, rate: float) -> None:
    """T = sum of max(block, transfer) over all steps but the last, which sends nothing: forward."""
    unit_run = layer("ring", p, balance=order)
    blocks_ = [slowest_rank(op.work).flops for op in attending(unit_run) if isinstance(op.work, Attention)]
    hop = rate * max(blocks_)

    def seconds(op: Op) -> float:
        return hop if isinstance(op.work, Collective) else slowest_rank(op.work).flops

    wanted = sum(max(block, hop) for block in blocks_[:-1]) + blocks_[-1]
    assert span(attending(unit_run), seconds) == pytest.approx(wanted)


@pytest.mark.parametrize(("rate", "p", "order"), drawn_grid([0.2, 0.7, 3.0], [2, 4, 6], ORDERS))
def test_a_step_back_takes_its_block_or_its_message(order: str, p: int, rate: float) -> None:
    """Blocks come in the other order; the last message, the gradients', is waited for."""
    unit_run = layer("ring", p, balance=order)
    ops = [
        op
        for op in unit_run.fragment.backward
        if op in attending(unit_run, backward=True) or op.name.startswith("add d")
    ]
    blocks_ = [slowest_rank(op.work).flops for op in ops if isinstance(op.work, Attention)]
    forward = [slowest_rank(op.work).flops for op in attending(unit_run) if isinstance(op.work, Attention)]
    assert blocks_ == [2.5 * flops for flops in reversed(forward)]
    hop = rate * max(blocks_)
    chunk = 2 * 48 // p * 192 * 2

    def seconds(op: Op) -> float:
        if isinstance(op.work, Collective):
            return hop * op.work.nbytes / chunk
        return slowest_rank(op.work).flops

    messages = [hop, *[2 * hop] * (p - 2), hop]
    wanted = sum(max(block, message) for block, message in zip(blocks_, messages, strict=True))
    assert span(ops, seconds) == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["ring", "dist-flash-attn"])
@pytest.mark.parametrize("backward", [False, True])
def test_arriving_blocks_are_awaited_and_have_a_free_buffer(name: str, backward: bool) -> None:
    """Step i computes with the block sent during the step before, and sends when the buffer of that one is free."""
    ops = attending(layer(name, 9), backward)
    kernels = [op for op in ops if isinstance(op.work, Attention)]
    incoming = [op for op in ops if isinstance(op.work, Collective) and not op.name.startswith("return")]
    for i, kernel in enumerate(kernels[1:], 1):
        assert incoming[i - 1] in waits_for(kernel)
        assert kernels[i] not in waits_for(incoming[i - 1])
        assert i < 2 or kernels[i - 2] in waits_for(incoming[i - 1])


@pytest.mark.parametrize("p", [2, 3, 8])
def test_merges_in_fp32_move_the_bytes_of_their_kernels(p: int) -> None:
    """Of n elements of the output in bf16: a first copy in fp32 (6 n); in each further step a copy (6 n), a difference
    (12 n), a product with the row sums' (8 n) and another difference (12 n), and five kernels on row sums; at the end
    the copy back (6 n). A scripted kernel reads both outputs and writes one in each of these steps (10 n), between the
    same copies. One fused kernel reads two outputs and writes one (8, then 10, at last 8 n). All of it on the slowest
    rank, whose queries are whole in every step.
    """
    moved = {}
    for merge, kernels in (("fused", 0), ("scripted", 1), ("eager", 5)):
        fragment = layer("ring", p, merge=merge).fragment
        ops = [op for op in fragment.forward if op.name.startswith("merge")]
        assert all(isinstance(op.work, Memory) and op.stream == COMPUTE for op in ops)
        moved[merge] = sum(slowest_rank(op.work).bytes for op in ops)
        assert len(ops) == (kernels * (p - 1) + 2 if kernels else p - 1)
    n, rows = 48 // p * 192, 48 // p * 24
    last = 8 * n + 3 * 4 * rows if p > 2 else 0
    fused = last + (p - 3) * (10 * n + 3 * 4 * rows) + 8 * n + 3 * 4 * rows if p > 2 else 6 * n + 3 * 4 * rows
    assert moved["fused"] == pytest.approx(fused, rel=1e-3)
    assert moved["scripted"] == pytest.approx(12 * n + (p - 1) * (10 * n + 3 * 4 * rows), rel=1e-3)
    assert moved["eager"] == pytest.approx(12 * n + (p - 1) * (38 * n + 14 * 4 * rows), rel=1e-3)


@pytest.mark.parametrize("p", [2, 3, 8])
def test_eager_gradients_of_keys_travel_in_fp32_and_come_home(p: int) -> None:
    """zhuzilin/ring-flash-attention: from the rank's own keys on in the direction of the forward pass."""
    fragment = layer("ring", p, merge="eager").fragment
    hops = [op.work for op in of_family(fragment.backward)]
    kv = 2 * 48 // p * 192 * 2
    assert [hop.nbytes for hop in hops] == [kv, *[3 * kv] * (p - 2), 2 * kv, 2 * kv]  # type: ignore[union-attr]
    assert {hop.by for hop in hops} == {1}  # type: ignore[union-attr]
    sums = [op for op in fragment.backward if op.name == "add dq"]
    # In fp32, with a copy before the first sum and one after the last.
    assert sum(slowest_rank(op.work).bytes for op in sums) == pytest.approx((12 + 10 * (p - 1)) * 48 // p * 192)


@pytest.mark.parametrize("p", [4, 5, 8])
def test_helpers_fetch_and_return_in_one_group_of_messages(p: int) -> None:
    """By one port, in the order of the steps: what a rank fetches, then what it returns."""
    fragment = layer("dist-flash-attn", p).fragment
    for issued in (fragment.forward, fragment.backward):
        names = [op.name.split(" ")[0] for op in of_family(issued)]
        assert {op.stream for op in of_family(issued)} == {"sequence"}
        assert names.count("fetch") == p // 2 and "return" in names
        assert names[0] == "fetch" and names[-1] == "return"


def test_helpers_return_their_results_before_the_merge() -> None:
    unit_run = layer("dist-flash-attn", 5)
    returns = [op for op in unit_run.fragment.forward if op.name.startswith("return")]
    merges = [op for op in unit_run.fragment.forward if op.name.startswith("merge")]
    assert [op.work.by for op in returns if isinstance(op.work, Collective)] == [-1, -2]
    assert len(merges) == 4
    assert all(op in waits_for(merges[-1]) for op in (*returns, *merges[:-1]))
    # Backward gradients of keys and values return, too, in every step but the first.
    back = [op for op in unit_run.fragment.backward if op.name.startswith("return")]
    assert [op.work.by for op in back if isinstance(op.work, Collective)] == [-1, -2]


def test_backward_keys_travel_first_and_gradients_last() -> None:
    """Messages: keys and values; p-2 times with the gradients of the step before; the gradients alone."""
    for p in (2, 3, 8):
        unit_run = layer("ring", p)
        shifts = [op.work for op in attending(unit_run, backward=True) if isinstance(op.work, Collective)]
        chunk = 2 * 48 // p * 192 * 2
        assert [work.nbytes for work in shifts] == [chunk, *[2 * chunk] * (p - 2), chunk]
        assert {work.by for work in shifts} == {-1}
        assert len([op for op in attending(unit_run) if isinstance(op.work, Collective)]) == p - 1


@given(rate=st.sampled_from([1e9, 3e12]), peers=st.sampled_from([1e6, 5e9]), kv_heads=st.sampled_from([24, 8, 2]))
def test_transfers_hide_from_n_positions_on(rate: float, peers: float, kv_heads: int) -> None:
    """n = (F/B) (g/a) of full blocks; zigzag computes half a block per step and needs twice as many."""
    costs = IdealCosts(rate, peers)
    for order, factor in (("contiguous", 1), ("zigzag", 2)):
        unit_run = layer_of(order, kv_heads)
        block, hop = (
            next(costs.estimate(op.work).seconds for op in attending(unit_run)[2:] if isinstance(op.work, kind))
            for kind in (Attention, Collective)
        )
        n = 48 / 4
        assert block / hop == pytest.approx(n / (factor * rate / peers * kv_heads / 24))


def layer_of(order: str, kv_heads: int) -> UnitRun:
    return under(("ring", 4, {"balance": order}), kv_heads=kv_heads)


@pytest.mark.parametrize(("outer", "inner"), [(2, 2), (2, 4), (4, 2), (3, 2)])
@pytest.mark.parametrize(("near", "far"), [(0.5, 0.5), (0.5, 3.0), (0.9, 100.0), (1.0, 1.0)])
def test_a_double_ring_hides_far_transfers_behind_a_whole_inner_ring(
    outer: int, inner: int, near: float, far: float
) -> None:
    """T = sum over outer steps of max(w max(block, near), far), the last one without far: if blocks hide the near
    transfers. A plain ring over both pays for the slow hop in every step.
    """
    unit_run = under(("ring", outer, {}), ("ring", inner, {}))
    hops = [op.work for op in attending(unit_run) if isinstance(op.work, Collective)]
    assert sum(work.axes == ("x0",) for work in hops) == outer - 1
    assert sum(work.axes == ("x1",) for work in hops) == outer * (inner - 1)
    assert len({work.nbytes for work in hops}) == 1
    assert {op.stream for op in attending(unit_run)} == {COMPUTE, "sequence", "sequence-inner"} <= set(THREADS)
    (block,) = {slowest_rank(op.work).flops for op in attending(unit_run) if isinstance(op.work, Attention)}

    def seconds(op: Op) -> float:
        if isinstance(op.work, Collective):
            return block * (far if op.work.axes == ("x0",) else near)
        return block

    wanted = (outer - 1) * max(inner, far) + inner
    assert span(attending(unit_run), seconds) == pytest.approx(wanted * block)
    if (outer, inner) != (3, 2):
        one = layer("ring", outer * inner)
        slow = span(attending(one), lambda op: block * (far if isinstance(op.work, Collective) else 1))
        assert slow == pytest.approx(((outer * inner - 1) * max(1, far) + 1) * block)
        assert sent_by(one, outer * inner) == sent_by(unit_run, outer, inner)


@pytest.mark.parametrize("p", range(2, 10))
def test_with_free_links_helpers_take_half_a_block_and_p_over_two(p: int) -> None:
    unit_run = under(("dist-flash-attn", p, {}), seq=48 * p)
    block = 4 * 48 * 48 * 192
    for backward, times in ((False, 1), (True, 2.5)):
        ops = attending(unit_run, backward)
        path = span(ops, lambda op: slowest_rank(op.work).flops if isinstance(op.work, Attention) else 0.0)
        assert path == pytest.approx(times * block * (0.5 + p // 2))
        assert efficiency(ops) == pytest.approx(1 if p % 2 else p / (p + 1))


@pytest.mark.parametrize(("tokens", "times"), [(16384, 1.34), (65536, 1.58), (262144, 1.70)])
def test_stripes_speed_a_7b_model_up_as_published(tokens: int, times: float) -> None:
    """Over contiguous parts on 4 ranks, where attention runs at half the rate of the linears and nothing else costs
    (arXiv 2311.09431, table 2: the theoretical maximum)."""
    model = Model(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000, seq=tokens)

    def taken(balance: str) -> float:
        mesh = Mesh({"cp": 4})
        stage_ops = lowered_stage(
            model, mesh, [make("sequence/ring", mesh, ("cp",), balance=balance)], (True, True), 32
        )
        works = [op.work for op in forward_ops(stage_ops)]
        linears = sum(work.flops for work in works if isinstance(work, Gemm))
        return linears + 2 * sum(slowest_rank(work).flops for work in works if isinstance(work, Attention))

    assert taken("contiguous") / taken("striped") == pytest.approx(times, abs=0.01)
