"""Attention block by block: pairs of a step, its messages and memory, and nested schemes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.ir.attention_mask import share_of_tiles
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Op, UnitRun
from meshcast.simulator.ir.routing import slowest_rank
from meshcast.simulator.schemes.sequence.shared.attention_steps import mask_blocks
from meshcast.validation.contract.measure import list_ops, saved_bytes
from tests.simulator.schemes.ring_layers import LLAMA, ORDERS, Entry, attending, layer, sent_by, under
from tests.strategies import examples

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


def same(one: UnitRun, other: UnitRun) -> None:
    """The two do the same, op by op, whatever their axes are called."""

    def plain(ops: Sequence[Op]) -> list[Any]:
        return [
            (name, stream.partition("-")[0], _anywhere(work), *more)
            for name, stream, work, *more in list_ops(ops)
            if work is not None
        ]

    assert plain(one.fragment.forward) == plain(other.fragment.forward)
    assert plain(one.fragment.backward) == plain(other.fragment.backward)
    assert saved_bytes(one) == saved_bytes(other)


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


# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("kv_heads", [24, 8])
@pytest.mark.parametrize(
    "entries", [[("ring", 8, {})], [("dist-flash-attn", 8, {})], [("ring", 2, {}), ("ring", 4, {})]]
)
def test_saved_activations_are_sharded_evenly(entries: list[Entry], kv_heads: int) -> None:
    """All activations are 1/p of those of one rank: buffers live within a pass."""
    unit_run = under(*entries, kv_heads=kv_heads)
    assert saved_bytes(unit_run) == saved_bytes(under(kv_heads=kv_heads)) / 8


def test_ulysses_keeps_the_output_in_both_layouts() -> None:
    """Attention reads it as cut heads, the linear behind it as cut positions."""
    assert saved_bytes(layer("ulysses", 8)) == (saved_bytes(under()) + 48 * 192 * 2) / 8


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


@pytest.mark.parametrize("tile", [(2, 4), (4, 2), (3, 5), (8, 8), (1, 1)])
@pytest.mark.parametrize("n", [8, 12])
def test_a_kernel_computes_every_tile_that_the_mask_leaves_a_pair_of(n: int, tile: tuple[int, int]) -> None:
    queries, keys = tile
    tiles = {(q // queries, k // keys) for q in range(n) for k in range(q + 1)}
    pairs = sum((q // queries, k // keys) in tiles for q in range(n) for k in range(n))
    assert share_of_tiles(n, queries, keys) == Fraction(pairs, n * n)
    own, striped = (mask_blocks("striped", 4, tile=tile)[step].most_loaded(n).computed_share(n) for step in (0, 1))
    assert own == striped == Fraction(pairs, n * n)
    assert mask_blocks("contiguous", 4, tile=tile)[1].most_loaded(n).computed_share(n) == 1
