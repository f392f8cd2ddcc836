"""TokenRing: bytes that go each way, overlap, and the limits of the mask and of the ring."""

from __future__ import annotations

import pytest

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Attention, Collective, Fragment
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.measure import lowered_stage, make, sent_bytes, waits_for
from meshcast.validation.contract.of_sequence import of_family
from tests.simulator.schemes.ring_layers import LLAMA

MIB = 2**20


def under(use: str, ranks: int, **model: object) -> tuple[Fragment, Mesh]:
    """A layer under one scheme."""
    mesh = Mesh({"cp": ranks})
    fields = {"layers": 1, "hidden": 192, "heads": 24, "vocab": 64, "seq": 96}
    (unit_run,) = lowered_stage(Model(**(fields | model)), mesh, [make(use, mesh, ("cp",))]).unit_runs  # type: ignore[arg-type]
    return unit_run.fragment, mesh


def sent_each_way(ranks: int, **model: object) -> tuple[float, float]:
    """Bytes of queries, and of outputs that return with their row sums."""
    fragment, mesh = under("sequence/token-ring", ranks, **model)
    hops = of_family(fragment.forward)
    ways = (-1,), tuple(range(1, ranks))
    both = [[op for op in hops if isinstance(op.work, Collective) and op.work.by in by] for by in ways]
    assert sum(map(len, both)) == len(hops) == 2 * (ranks - 1)
    return sent_bytes(both[0], mesh), sent_bytes(both[1], mesh)


def test_a_layer_of_llama_3_8b_sends_queries_one_way_and_outputs_the_other() -> None:
    """Seven hops of 8 MiB each way, outputs with row sums of 1/8 MiB; the causal mask leaves three quarters of them."""
    assert sent_each_way(8, **LLAMA, bidirectional=True) == (7 * 8 * MIB, 7 * 8.125 * MIB)
    assert sent_each_way(8, **LLAMA) == (3 / 4 * 7 * 8 * MIB, 3 / 4 * 7 * 8.125 * MIB)


def test_of_masked_queries_half_stay() -> None:
    """In step i the queries of i of the ranks are before half of the keys at hand."""
    fragment, _ = under("sequence/token-ring", 8, **LLAMA)
    works = [op.work for op in of_family(fragment.forward) if isinstance(op.work, Collective)]
    assert [work.nbytes for work in works if work.by == -1] == [8 * MIB * (16 - i) / 16 for i in range(1, 8)]
    assert sorted(work.nbytes for work in works if work.by > 0) == [8.125 * MIB * i / 16 for i in range(9, 16)]


def test_outputs_return_during_the_next_step_and_no_kernel_waits_for_them() -> None:
    fragment, _ = under("sequence/token-ring", 4)
    kernels = [op for op in fragment.forward if isinstance(op.work, Attention)]
    returns = [op for op in fragment.forward if op.stream == "sequence-return"]
    queries = [op for op in fragment.forward if op.stream == "sequence"]
    assert (len(kernels), len(returns), len(queries)) == (4, 3, 3)
    for i, (hop, kernel) in enumerate(zip(returns, kernels[1:], strict=True)):
        assert kernel in waits_for(hop) and not {*kernels[i + 2 :]} & waits_for(hop)
        assert not any(hop in waits_for(later) for later in kernels)
    for i, hop in enumerate(queries):
        assert hop in waits_for(kernels[i + 1]) and kernels[i] not in waits_for(hop)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_work_of_attention_is_that_of_a_ring(bidirectional: bool) -> None:
    layers = [under(f"sequence/{name}", 4, bidirectional=bidirectional)[0] for name in ("token-ring", "ring")]
    token, ring = (
        [sum(op.work.flops for op in ops if isinstance(op.work, Attention)) for ops in (one.forward, one.backward)]
        for one in layers
    )
    assert token == ring
