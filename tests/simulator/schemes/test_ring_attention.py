"""Attention block by block: pairs of a step, its messages and time, and nested schemes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.costs.costs import IdealCosts
from simulator.ir.mesh import Mesh
from simulator.ir.ops import COMPUTE, Attention, Collective, Gemm, Memory, Op, UnitRun
from simulator.ir.registry import find_scheme
from simulator.ir.routing import slowest_rank
from simulator.lowering.lower import Lowering
from simulator.models.architecture import Architecture
from simulator.models.model import Model
from simulator.report.trace import THREADS
from simulator.schemes.sequence.shared.attention_steps import mask_blocks
from tests.contract.measure import forward_ops, listed, lowered_stage, make, saved, sent, waits_for
from tests.contract.of_sequence import MEASURES, SequenceLayer, efficiency, of_family
from tests.strategies import examples

ORDERS = ("contiguous", "striped", "zigzag")
MIB = 2**20

# ---------------------------------------------------------------------------------------- pairs of tokens


def positions(order: str, rank: int, p: int, s: int) -> list[int]:
    """The tokens of a rank."""
    n = s // p
    if order == "contiguous":
        return list(range(rank * n, (rank + 1) * n))
    if order == "striped":
        return list(range(rank, s, p))
    return [*range(rank * n // 2, (rank + 1) * n // 2), *range(s - (rank + 1) * n // 2, s - rank * n // 2)]


def counted(order: str, p: int, s: int, step: int, rank: int) -> tuple[int, int, int, int]:
    """By looking at every pair: pairs of a query and a key that it sees, pairs of a token with itself, and the queries
    and keys in any of the pairs.
    """
    queries, keys = positions(order, rank, p, s), positions(order, (rank - step) % p, p, s)
    seen = [(q, k) for q in queries for k in keys if k <= q]
    own = sum(q == k for q, k in seen)
    return len(seen), own, len({q for q, _ in seen}), len({k for _, k in seen})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("p", "s"), [(8, 64), (4, 32), (3, 12), (2, 8)])
def test_blocks_have_the_pairs_of_a_count_one_by_one(order: str, p: int, s: int) -> None:
    """A pair of a token with itself counts half, so that all blocks together are the half of s x s."""
    n = s // p
    total = Fraction(0)
    for step, block in enumerate(mask_blocks(order, p)):
        found = [counted(order, p, s, step, rank) for rank in range(p)]
        areas = [Fraction(2 * seen - own, 2 * n * n) for seen, own, _, _ in found]
        assert block.mean_share(n) == sum(areas) / p
        assert block.most_loaded(n).computed_share(n) == max(areas)
        if step and order != "striped":
            # Of a striped block one query and one key may be left out, which kernels do not know.
            for (mean, pace), which in ((block.queries, 2), (block.keys, 3)):
                shares = [Fraction(one[which], n) for one in found]
                assert mean == sum(shares) / p
                assert pace == pytest.approx(float(max(shares) / mean))
        total += p * block.mean_share(n)
    assert total * n * n == Fraction(s * s, 2)


def test_token_pairs_of_64_tokens_on_8_ranks() -> None:
    """Zigzag n(n+1)/2, then n^2/2; striped n(n+1)/2 or n(n-1)/2; contiguous n(n+1)/2, then all or none."""
    p, s, n = 8, 64, 8
    for rank in range(p):
        pairs = {order: [counted(order, p, s, step, rank)[0] for step in range(p)] for order in ORDERS}
        assert pairs["zigzag"] == [n * (n + 1) // 2] + [n * n // 2] * (p - 1)
        assert pairs["striped"] == [n * (n + 1) // 2] * (rank + 1) + [n * (n - 1) // 2] * (p - 1 - rank)
        assert pairs["contiguous"] == [n * (n + 1) // 2] + [n * n] * rank + [0] * (p - 1 - rank)
    for order in ORDERS:
        assert sum(counted(order, p, s, step, rank)[0] for step in range(p) for rank in range(p)) == s * (s + 1) // 2


def helped_pairs(p: int) -> list[list[tuple[int, int] | None]]:
    """The rank of the queries and the rank of the keys by step and rank, by the rules of the helpers."""
    steps: list[list[tuple[int, int] | None]] = [[(rank, rank) for rank in range(p)]]
    for t in range(1, p // 2 + 1):
        row: list[tuple[int, int] | None] = []
        for rank in range(p):
            helper = (rank - t) % p, rank
            row.append((rank, rank - t) if rank >= t else helper if 2 * t < p else None)
        steps.append(row)
    return steps


@pytest.mark.parametrize("p", range(2, 14))
def test_helpers_compute_every_block_of_the_mask_once(p: int) -> None:
    done = [pair for row in helped_pairs(p) for pair in row if pair]
    assert sorted(done) == [(q, k) for q in range(p) for k in range(q + 1)]
    attention = [op.work for op in layer("dist-flash-attn", p).fragment.forward if isinstance(op.work, Attention)]
    shares = [sum(pair is not None for pair in row) / p for row in helped_pairs(p)]
    assert [work.share for work in attention] == [0.5, *shares[1:]]
    assert [work.pace for work in attention] == [1 / (share if share < 1 else 1) for share in shares]


# ---------------------------------------------------------------------------------------------- a layer

LLAMA = {"layers": 1, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 64, "seq": 8192, "gated": True}
"""The shapes of Llama-3-8B at 8192 tokens."""

Entry = tuple[str, int, dict[str, Any]]
"""A scheme by its name, its ranks, its options."""


def under(*entries: Entry, regather: bool = False, attention: str = "flash", **model: Any) -> UnitRun:
    """A layer under sequence schemes, the outermost first, each over an axis of its own."""
    mesh = Mesh({f"x{i}": ranks for i, (_, ranks, _) in enumerate(entries)})
    schemes = [make(f"sequence/{name}", mesh, (f"x{i}",), **options) for i, (name, _, options) in enumerate(entries)]
    shape = Model(**({"layers": 1, "hidden": 192, "heads": 24, "vocab": 64, "seq": 48} | model))
    built = Architecture(shape, 1, shape.seq, 64, attention=attention)
    (unit_run,) = Lowering(mesh, schemes, regather).run(built.stage(range(1), False, False)).unit_runs
    return unit_run


def layer(name: str, ranks: int, **options: Any) -> UnitRun:
    return under((name, ranks, options))


def sent_by(unit_run: UnitRun, *sizes: int) -> tuple[float, float]:
    """Bytes that a rank sends forward and backward."""
    mesh = Mesh({f"x{i}": ranks for i, ranks in enumerate(sizes)})
    return sent(of_family(unit_run.fragment.forward), mesh), sent(of_family(unit_run.fragment.backward), mesh)


def same(one: UnitRun, other: UnitRun) -> None:
    """The two do the same, op by op, whatever their axes are called."""

    def plain(ops: Sequence[Op]) -> list[Any]:
        return [
            (name, stream.partition("-")[0], _anywhere(work), *more)
            for name, stream, work, *more in listed(ops)
            if work is not None
        ]

    assert plain(one.fragment.forward) == plain(other.fragment.forward)
    assert plain(one.fragment.backward) == plain(other.fragment.backward)
    assert saved(one) == saved(other)


def _anywhere(work: Any) -> Any:
    if not isinstance(work, Collective):
        return work
    return work.operation, work.nbytes, work.by, work.pace


@pytest.mark.parametrize(
    ("entries", "there", "back"),
    [
        ([("ulysses", 8, {})], 17.5, 17.5),
        ([("ring", 8, {})], 28, 56),
        ([("ring", 8, {"balance": "contiguous"})], 28, 56),
        ([("ring", 8, {"balance": "striped"})], 28, 56),
        ([("megatron-cp", 8, {})], 28, 56),
        ([("megatron-cp", 8, {"comm": "a2a"})], 17.5, 17.5),
        ([("ring", 4, {}), ("ulysses", 2, {})], 22, 10 + 24),
        ([("ring", 2, {}), ("ulysses", 4, {})], 19, 15 + 8),
        ([("ulysses", 4, {}), ("ring", 2, {})], 19, 15 + 8),
        ([("megatron-cp", 2, {}), ("megatron-cp", 4, {"comm": "a2a"})], 19, 15 + 8),
        ([("ring", 4, {}), ("ring", 2, {})], 28, 56),
    ],
)
def test_a_layer_of_llama_3_8b_on_8_ranks_sends_the_known_bytes(
    entries: list[Entry], there: float, back: float
) -> None:
    """MiB a rank: 17.5 of all-to-alls, 28 and 56 of a ring, whichever way it is composed."""
    unit_run = under(*entries, **LLAMA)
    assert sent_by(unit_run, *(ranks for _, ranks, _ in entries)) == (there * MIB, back * MIB)


def test_gathered_keys_of_the_same_layer_have_equal_bytes() -> None:
    unit_run = under(("megatron-cp", 8, {"comm": "all_gather"}), regather=True, **LLAMA)
    assert sent_by(unit_run, 8) == (28 * MIB, 56 * MIB)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_helpers_send_half_of_a_ring(p: int) -> None:
    """(p-1)/p n h elements forward and twice that backward, for masked blocks are never sent."""
    chunk = (p - 1) / p * 48 * 192 * 2
    assert sent_by(layer("dist-flash-attn", p), p) == pytest.approx((chunk, 2 * chunk))
    assert sent_by(layer("ring", p), p) == pytest.approx((2 * chunk, 4 * chunk))


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_a_message_of_helpers_lasts_as_long_as_a_whole_one(p: int) -> None:
    """On average ranks send less, for not all have something to send in every step."""
    chunk = 48 // p * 192 * 2
    for op in attending(layer("dist-flash-attn", p)):
        if isinstance(op.work, Collective):
            whole = 2 * chunk if op.work.by > 0 else chunk
            assert op.work.nbytes <= slowest_rank(op.work).nbytes == pytest.approx(whole)


@pytest.mark.parametrize("name", ["ring", "ulysses", "megatron-cp", "dist-flash-attn"])
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_compositions_over_an_axis_of_one_rank_are_the_other_scheme(name: str, attention: str) -> None:
    """USP with one group of size one is Ulysses or a ring; a double ring whose window is one or all ranks is a ring."""
    alone = under((name, 4, {}), attention=attention)
    for other in ("ring", "ulysses", "megatron-cp"):
        same(under((name, 4, {}), (other, 1, {}), attention=attention), alone)
        same(under((other, 1, {}), (name, 4, {}), attention=attention), alone)


@pytest.mark.parametrize("attention", ["flash", "unfused"])
@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize(("comm", "use"), [("p2p", "ring"), ("all_gather", "all-gather"), ("a2a", "ulysses")])
def test_each_way_of_megatron_is_the_scheme_of_its_own(comm: str, use: str, regather: bool, attention: str) -> None:
    for ranks in (2, 4, 8):
        for kv_heads in (24, 8):
            setting = {"regather": regather, "attention": attention, "kv_heads": kv_heads}
            one, other = under(("megatron-cp", ranks, {"comm": comm}), **setting), under((use, ranks, {}), **setting)
            same(one, other)
            fields = [(t.key, t.nbytes, t.op.name, t.made, t.category) for t in one.fragment.tensor_uses]
            assert fields == [(t.key, t.nbytes, t.op.name, t.made, t.category) for t in other.fragment.tensor_uses]


@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize(
    ("use", "option", "values"),
    [("sequence/ring", "balance", ORDERS), ("sequence/megatron-cp", "comm", ("p2p", "all_gather", "a2a"))],
)
def test_the_laws_hold_for_every_option(use: str, option: str, values: tuple[str, ...], regather: bool) -> None:
    kind = find_scheme(use)
    for value in values:
        for cp, kv_heads, s in ((2, 6, 48), (3, 6, 48), (8, 24, 96)):
            setting = SequenceLayer(cp, 2, s, kv_heads, regather=regather, options=((option, value),))
            for closed_form in kind(options=kind.Options(**{option: value})).closed_forms(setting):
                assert MEASURES[closed_form.quantity](setting, use) == pytest.approx(closed_form.value, rel=1e-12)


@examples(50)
@given(
    order=st.sampled_from(ORDERS),
    p=st.integers(2, 9),
    n=st.integers(1, 9),
    inner=st.sampled_from([1, 2, 3]),
    attention=st.sampled_from(["flash", "unfused"]),
)
def test_no_order_changes_the_computation(order: str, p: int, n: int, inner: int, attention: str) -> None:
    """Attention of all ranks is the whole of it, of one ring or of two, in every way of dividing it."""
    s = 2 * p * n * inner
    setting = {"attention": attention, "seq": s}

    def attention_work(*entries: Entry) -> tuple[float, float]:
        unit_run = under(*entries, **setting)
        found = []
        for ops in (unit_run.fragment.forward, unit_run.fragment.backward):
            works = [op.work for op in ops if isinstance(op.work, Attention | Gemm) and op.phase != "W"]
            found.append(sum(work.flops for work in works))
            assert all(work.share * work.pace <= 1 + 1e-12 for work in works if isinstance(work, Attention))
        return found[0], found[1]

    whole = tuple(value / p / inner for value in attention_work())
    ring = ("ring", p, {"balance": order})
    assert attention_work(ring, ("ring", inner, {"balance": order})) == pytest.approx(whole)
    assert attention_work(ring, ("all-gather", inner, {})) == pytest.approx(whole)
    if attention == "flash":
        assert attention_work(("all-gather", inner, {}), ("dist-flash-attn", p, {})) == pytest.approx(whole)


# --------------------------------------------------------------------------------------------- timelines


def timeline(ops: Sequence[Op], seconds: Callable[[Op], float]) -> float:
    """When the last kernel ends: in-order streams, data dependencies, nothing shared."""
    free: dict[str, float] = {}
    ends: dict[int, float] = {}

    def end(op: Op) -> float:
        """The end of an issued op; of a mark the end of its predecessors; inputs are there."""
        if op not in ends:
            ends[op] = max((end(other) for other in op.after), default=0.0)
        return ends[op]

    for op in ops:
        begin = max(free.get(op.stream, 0.0), max((end(other) for other in op.after), default=0.0))
        free[op.stream] = ends[op] = begin + seconds(op)
    return free[COMPUTE]


def attending(unit_run: UnitRun, backward: bool = False) -> list[Op]:
    """Attention and its messages."""
    ops = unit_run.fragment.backward if backward else unit_run.fragment.forward
    return [op for op in ops if isinstance(op.work, Attention | Collective)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("p", [2, 4, 6])
@pytest.mark.parametrize("rate", [0.2, 1.0, 3.0])
def test_a_step_of_a_ring_takes_its_block_or_its_transfer(order: str, p: int, rate: float) -> None:
    """T = sum of max(block, transfer) over all steps but the last, which sends nothing: forward."""
    unit_run = layer("ring", p, balance=order)
    blocks_ = [slowest_rank(op.work).flops for op in attending(unit_run) if isinstance(op.work, Attention)]
    hop = rate * max(blocks_)

    def seconds(op: Op) -> float:
        return hop if isinstance(op.work, Collective) else slowest_rank(op.work).flops

    wanted = sum(max(block, hop) for block in blocks_[:-1]) + blocks_[-1]
    assert timeline(attending(unit_run), seconds) == pytest.approx(wanted)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("p", [2, 4, 6])
@pytest.mark.parametrize("rate", [0.2, 0.7, 3.0])
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
    assert timeline(ops, seconds) == pytest.approx(wanted)


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
def test_eager_merges_move_the_bytes_of_every_operation(p: int) -> None:
    """Of n elements of the output in bf16: a first copy in fp32 (6 n); in each further step a copy (6 n), a difference
    (12 n), a product with the row sums' (8 n) and another difference (12 n), and five kernels on row sums; at the end
    the copy back (6 n). One fused kernel reads two outputs and writes one (8, then 10, at last 8 n). All of it on the
    slowest rank, whose queries are whole in every step.
    """
    moved = {}
    for merge in ("fused", "eager"):
        fragment = layer("ring", p, merge=merge).fragment
        ops = [op for op in fragment.forward if op.name.startswith("merge")]
        assert all(isinstance(op.work, Memory) and op.stream == COMPUTE for op in ops)
        moved[merge] = sum(slowest_rank(op.work).bytes for op in ops)
        assert len(ops) == (p - 1 if merge == "fused" else 5 * (p - 1) + 2)
    n, rows = 48 // p * 192, 48 // p * 24
    last = 8 * n + 3 * 4 * rows if p > 2 else 0
    fused = last + (p - 3) * (10 * n + 3 * 4 * rows) + 8 * n + 3 * 4 * rows if p > 2 else 6 * n + 3 * 4 * rows
    assert moved["fused"] == pytest.approx(fused, rel=1e-3)
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
    assert timeline(attending(unit_run), seconds) == pytest.approx(wanted * block)
    if (outer, inner) != (3, 2):
        one = layer("ring", outer * inner)
        slow = timeline(attending(one), lambda op: block * (far if isinstance(op.work, Collective) else 1))
        assert slow == pytest.approx(((outer * inner - 1) * max(1, far) + 1) * block)
        assert sent_by(one, outer * inner) == sent_by(unit_run, outer, inner)


@pytest.mark.parametrize("p", range(2, 10))
def test_with_free_links_helpers_take_half_a_block_and_p_over_two(p: int) -> None:
    unit_run = under(("dist-flash-attn", p, {}), seq=48 * p)
    block = 4 * 48 * 48 * 192
    for backward, times in ((False, 1), (True, 2.5)):
        ops = attending(unit_run, backward)
        path = timeline(ops, lambda op: slowest_rank(op.work).flops if isinstance(op.work, Attention) else 0.0)
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


# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("kv_heads", [24, 8])
@pytest.mark.parametrize(
    "entries", [[("ring", 8, {})], [("dist-flash-attn", 8, {})], [("ring", 2, {}), ("ring", 4, {})]]
)
def test_saved_activations_are_sharded_evenly(entries: list[Entry], kv_heads: int) -> None:
    """All activations are 1/p of those of one rank: buffers live within a pass."""
    unit_run = under(*entries, kv_heads=kv_heads)
    assert saved(unit_run) == saved(under(kv_heads=kv_heads)) / 8


def test_ulysses_keeps_the_output_in_both_layouts() -> None:
    """Attention reads it as cut heads, the linear behind it as cut positions."""
    assert saved(layer("ulysses", 8)) == (saved(under()) + 48 * 192 * 2) / 8


def test_a_ring_holds_two_chunks_of_keys_in_flight() -> None:
    """One received block is in use while the next arrives; backward the same, and for gradients too."""
    fragment = layer("ring", 8).fragment
    place = {op: i for i, op in enumerate([*fragment.forward, *fragment.backward])}
    spans: dict[str, list[int]] = {}
    for tensor_use in fragment.tensor_uses:
        if tensor_use.op in place:
            spans.setdefault(tensor_use.key, []).append(place[tensor_use.op])

    def most(prefix: str) -> int:
        found = [(min(at), max(at)) for key, at in spans.items() if key.startswith(prefix)]
        return max(sum(begin <= i <= end for begin, end in found) for i in place.values())

    assert most("core.kv") == 2
    assert most("core.d:kv") == 2
    assert most("core.d:dkv") == 2
    assert most("core.o") == 2
