"""FPDT: what chunks of attention compute, copy, and hold at a time."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.ir.ops import Attention, Fragment, HostCopy
from meshcast.validation.contract.of_sequence import SequenceLayer
from tests.draws import drawn_grid


def fragment_of(tokens: int, chunks: int, use: str = "sequence/fpdt", **options: Any) -> Fragment:
    choice = {"chunks": chunks, **options} if use == "sequence/fpdt" else {}
    setting = SequenceLayer(4, 1, tokens, 8, 192, options=tuple(choice.items()))
    return setting.layer(use)[0].fragment


def held_by_chunks(fragment: Fragment) -> int:
    """Most bytes that are held at once inside the attention core, of copies, sums and parts of chunks."""
    names = ("q.rope@", "k.rope@", "v@", "o@cp0:a", "core", "dcore", "d:o@cp0:a", "d:q.rope", "d:k.rope", "d:v")
    most = 0
    for ops in (fragment.forward, fragment.backward):
        place = {op: i for i, op in enumerate(ops)}
        spans: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        for use in fragment.tensor_uses:
            if use.key.startswith(names) and use.op in place:
                spans.setdefault(use.key, []).append(place[use.op])
                sizes[use.key] = use.nbytes
        held = (
            sum(sizes[key] for key, ends in spans.items() if min(ends) <= at <= max(ends)) for at in range(len(place))
        )
        most = max(most, *held)
    return most


def flops(fragment: Fragment, backward: bool) -> float:
    works = [op.work for op in (*fragment.forward, *fragment.backward)]
    return sum(work.flops for work in works if isinstance(work, Attention) and work.backward == backward)


@pytest.mark.parametrize(("chunks", "offload"), drawn_grid([2, 3, 4, 8], [True, False]))
def test_blocks_have_the_work_of_whole_attention(chunks: int, offload: bool) -> None:
    """n (n + 1) / 2 blocks in each pass, of which only those on the diagonal are masked."""
    chunked, whole = fragment_of(96, chunks, offload=offload), fragment_of(96, 1, "sequence/ulysses")
    for backward in (False, True):
        assert flops(chunked, backward) == pytest.approx(flops(whole, backward))
    blocks = [op.work for op in chunked.forward if isinstance(op.work, Attention)]
    assert len(blocks) == chunks * (chunks + 1) // 2
    assert sum(block.share < 1 for block in blocks) == chunks


def test_what_chunks_hold_depends_on_their_size_alone() -> None:
    """With twice the tokens in twice the chunks as much is held; without copies to the host twice as much."""
    few, many = (held_by_chunks(fragment_of(24 * chunks, chunks)) for chunks in (4, 16))
    assert few == many
    few, many = (held_by_chunks(fragment_of(24 * chunks, chunks, offload=False)) for chunks in (4, 16))
    assert many > 3 * few


@pytest.mark.parametrize("chunks", [2, 3, 5, 8])
def test_what_waits_on_the_host_comes_back(chunks: int) -> None:
    fragment = fragment_of(24 * chunks, chunks)
    works = [op.work for op in (*fragment.forward, *fragment.backward)]
    counted = [work for work in works if isinstance(work, HostCopy) and work.activations]
    assert (
        sum(work.nbytes for work in counted if work.back) == sum(work.nbytes for work in counted if not work.back) > 0
    )


def test_copies_hide_behind_long_chunks() -> None:
    """Of short chunks copies take longer than blocks, which have the square of their tokens as work."""

    def forecast(use: str, **options: Any) -> Any:
        model = {
            "layers": 4,
            "hidden": 4096,
            "heads": 32,
            "kv_heads": 8,
            "vocab": 1024,
            "seq": 131072,
            "positions": "rope",
        }
        schemes = [{"use": "data/zero-3"}, {"use": f"sequence/{use}", "over": ["cp"], **options}]
        plan = {"mesh": {"cp": 4}, "schemes": [*schemes, {"use": "memory/recompute-full"}]}
        cluster = {"gpu": "a100-sxm-80", "gpus": 4, "gpus_per_node": 4}
        return simulate({"model": model, "cluster": cluster, "plan": plan, "batch": {"global": 1, "micro": 1}})

    whole, long, short = forecast("ulysses"), forecast("fpdt", chunks=2), forecast("fpdt", chunks=16)
    assert whole.step_time < long.step_time < 1.05 * whole.step_time
    assert short.step_time > 1.1 * long.step_time
    assert long.peak_allocated < whole.peak_allocated
