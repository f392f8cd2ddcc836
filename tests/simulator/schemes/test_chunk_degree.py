"""Chunks of a layer's tokens: how many a model of their times chooses, and their order with compression."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator import load_job
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.ir.ops import COMPUTE, Collective, Fragment, Gemm, Op
from meshcast.simulator.schemes.expert.shared.chunk_degree import fastest_degree
from meshcast.simulator.schemes.expert.shared.expert_parallel import chunked_round_s
from meshcast.validation.contract.of_experts import span
from tests.simulator.schemes.expert_layers import layer, moved
from tests.simulator.schemes.small_jobs import job_on

SECONDS = st.floats(1e-6, 1e-2)


@given(exchange=SECONDS, computing=SECONDS, start=SECONDS)
def test_the_degree_is_the_closed_form_where_computing_bounds(exchange: float, computing: float, start: float) -> None:
    """T = 2 b n/r + r a + u falls up to r = sqrt(2 b n/a)."""
    best = sqrt(2 * exchange / start)
    chosen = fastest_degree(1, 1, (0.0, exchange), (start, 10 * exchange + computing))
    assert chosen == pytest.approx(min(64, max(1, best)), abs=1)


@given(exchange=SECONDS, computing=SECONDS, start=SECONDS, most=st.integers(1, 64))
def test_no_other_degree_is_faster(exchange: float, computing: float, start: float, most: int) -> None:
    lines = (start, exchange), (start / 2, computing)
    chosen = fastest_degree(1, 1, *lines, most)

    def seconds(n: int) -> float:
        return chunked_round_s(start + exchange / n, start / 2 + computing / n, n)

    assert seconds(chosen) <= min(map(seconds, range(1, most + 1))) * (1 + 1e-9)


def test_one_chunk_where_starts_are_long_and_many_where_they_are_not() -> None:
    assert fastest_degree(1, 1, (1.0, 1.0), (1.0, 1.0)) == 1
    assert fastest_degree(1, 1, (0.0, 1.0), (0.0, 9.0)) == 64
    # Two chunks hide experts as long as an all-to-all, and more hide nothing else.
    assert fastest_degree(1, 1, (0.0, 1.0), (0.0, 1.0)) == 2


def exchanges(schemes: dict[str, Any], gpus: int) -> tuple[Any, float]:
    model = {"preset": "mixtral-8x7b", "layers": 2, "moe": {"experts": 16, "top_k": 2, "expert_ffn": 14336}}
    both = {"use": "data/zero-1", "over": "dp"}, {"use": "expert/pipemoe", "over": "ep", **schemes}
    more = {"cluster": f"dgx-a100:{gpus // 8}", "batch": {"global": gpus, "micro": 1, "sequence": 4096}}
    views = {"experts": {"edp": 1, "ep": gpus}}
    plan = resolve_plan(load_job(job_on({"dp": gpus}, *both, samples=gpus, model=model, views=views, **more)))
    (scheme,) = plan.family("expert")
    return scheme.options, plan.shape.m


def test_models_are_fitted_to_the_cluster_unless_given() -> None:
    slow, fast = (exchanges({}, gpus)[0] for gpus in (16, 8))
    # Between nodes a byte takes longer than within one; the GPUs are the same.
    assert slow.exchange[1] > 3 * fast.exchange[1] > 0
    given_one = exchanges({"exchange": [0.0, 1e-9]}, 8)[0]
    assert given_one.exchange == (0.0, 1e-9)
    assert given_one.compute == fast.compute


def kernels(fragment: Fragment) -> list[str]:
    """Kernels of the forward round: compression, decompression, and the experts of a chunk as one."""
    found: list[str] = []
    for op in fragment.forward:
        words = op.name.split()
        if op.stream == COMPUTE and words[0] in ("compress", "decompress"):
            found.append(f"{words[0]} {words[-1]}")
        elif isinstance(op.work, Gemm) and op.work.groups and op.name.startswith("expert.up"):
            found.append(f"experts {words[-1]}")
    return found


def test_compression_of_all_chunks_precedes_their_experts_and_decompression_follows() -> None:
    first, second = ([f"{word} {i}" for word in ("decompress", "experts", "compress")] for i in range(2))
    ends = ["compress 0", "compress 1"], ["decompress 0", "decompress 1"]
    assert kernels(layer("expert/schemoe", bits=4)) == [*ends[0], *first, *second, *ends[1]]


def test_compressed_tokens_are_fewer_bytes() -> None:
    whole, packed = (sum(work.nbytes for work in moved(layer("expert/schemoe", bits=bits))) for bits in (None, 4))
    assert packed * 4 == whole


@pytest.mark.parametrize(("near", "far"), [(1.0, 1.0), (1.0, 5.0), (3.0, 1.0)])
def test_exchanges_within_nodes_are_beside_those_between_them(near: float, far: float) -> None:
    """Pipe-A2A: max(M t1, (P - M) t2) in place of their sum, without the message of a rank to itself."""
    p, node = 8, 4
    fragment = layer("expert/schemoe", p, degree=1, node=node)
    out = [op for op in fragment.forward if op.stream.startswith("expert") and "sent" in op.name]
    within, between = (next(op.work for op in out if op.name.endswith(word)) for word in ("near", "far"))
    assert isinstance(within, Collective) and isinstance(between, Collective)
    (whole, _) = moved(layer("expert/all-to-all", p), "F")
    each = whole.nbytes / p
    assert within.members == (0, 1, 2, 3) and (node - 1) / node * within.nbytes == (node - 1) * each
    assert between.members == (0, 4) and between.nbytes / 2 == (p - node) * each

    def seconds(op: Op) -> float:
        return {"near": node * near, "far": (p - node) * far}.get(op.name.split()[-1], 0.0)

    assert span(out, seconds) == max(node * near, (p - node) * far)
