"""Decompositions of GEMMs: the ceilings, limits and claims of Stream-K (Osama et al., arXiv 2301.03598)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware import load
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.kernels.decomposition import Decomposition, longest_block, loop_seconds
from meshcast.simulator.costs.kernels.gemm import GemmCostModel, seconds
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.ir.ops import Gemm

A100 = load("gpus", "a100-sxm-80")
TILE = ((128, 128),)
"""That of the paper's data-parallel and Stream-K kernels in fp16."""


def model() -> GemmCostModel:
    found = Calibration.shipped().kernel_model(A100, "gemm", "").model
    assert isinstance(found, GemmCostModel)
    return found


@pytest.mark.parametrize(("tile", "decomposition", "split", "ceiling"), [
    ((128, 128), "data-parallel", 1, 0.75),
    ((128, 64), "data-parallel", 1, 0.9),
    ((128, 128), "split-k", 2, 0.9),
    ((128, 128), "stream-k", 1, 1.0),
], ids=str)  # fmt: skip
def test_ceilings(tile: tuple[int, int], decomposition: Decomposition, split: int, ceiling: float) -> None:
    """Of m = n = 384, k = 128 on a GPU of four multiprocessors (sections 2 to 4)."""
    tiles = (384 // tile[0]) * (384 // tile[1])
    longest = longest_block(tiles, 128, 4, decomposition, split)
    assert tiles * 128 / (4 * longest) == pytest.approx(ceiling)


@pytest.mark.parametrize(
    ("m", "n", "k", "ceiling"),
    [(8192, 4096, 6144, 0.970), (8192, 4096, 3584, 0.970), (1024, 4096, 3584, 0.848), (1024, 4096, 768, 0.182)],
)
def test_ceilings_of_a_layer_of_llama_on_h100(m: int, n: int, k: int, ceiling: float) -> None:
    """Tiles of 128 x 256 on 132 multiprocessors: [m, n, k] as [tokens, contracted, columns] of its GEMMs."""
    tiles = -(-m // 128) * -(-k // 256)
    assert tiles * n / (132 * longest_block(tiles, n, 132, "data-parallel")) == pytest.approx(ceiling, abs=5e-4)


loops = {
    "tiles": st.integers(1, 5000), "k": st.integers(32, 20_000), "number": st.sampled_from([4, 108, 132, 148]),
    "peer": st.floats(1e-8, 1e-5), "sharing": st.floats(0, 1e-5),
}  # fmt: skip


@given(**loops)
def test_order_of_decompositions(tiles: int, k: int, number: int, peer: float, sharing: float) -> None:
    """Data-parallel is never faster than the best split, nor than Stream-K, and nothing beats an even share."""
    step = 1e-8
    whole, split, stream = (
        loop_seconds(tiles, k, number, which, step, 60.0, sharing, peer)
        for which in ("data-parallel", "split-k", "stream-k")
    )
    assert tiles * k / number * step <= stream * (1 + 1e-9) and stream <= whole and split <= whole


@given(waves=st.integers(1, 20), k=st.integers(32, 20_000))
def test_stream_k_of_whole_waves_is_data_parallel(waves: int, k: int) -> None:
    one, other = (
        loop_seconds(132 * waves, k, 132, which, 1e-8, 60.0, 1e-6, 1e-7) for which in ("stream-k", "data-parallel")
    )
    assert one == other


def test_stream_k_of_one_tile_is_split_k() -> None:
    """Cut into as many parts as pay off, of which split-K takes whole numbers."""
    one, other = (loop_seconds(1, 100_000, 132, which, 1e-8, 60.0, 1e-6, 1e-6) for which in ("stream-k", "split-k"))
    assert one == pytest.approx(other, rel=0.05)
    assert loop_seconds(1, 100_000, 132, "data-parallel", 1e-8, 60.0, 1e-6, 1e-6) > 10 * one


def draw_products(count: int) -> Gemm:
    """Products whose sizes are log-uniform between 128 and 8192, as those of the paper (section 6)."""
    draw = np.random.default_rng(0)
    m, n, k = (np.floor(128 * 2 ** draw.uniform(0, 6, count)) for _ in range(3))
    return Gemm(m, n, k, np.ones(count), dtype="fp16", out_dtype="fp32")  # type: ignore[arg-type]


def test_speed_up_over_32824_products() -> None:
    """At most 14 over data-parallel tiles of the same size, and 6.7 over cuBLAS, on A100 (abstract)."""
    products = draw_products(32_824)

    def taken(*more: Any) -> np.ndarray:
        return np.asarray(seconds(products, A100, model(), 1.0, *more)[0])

    stream = taken("stream-k", TILE)
    over_tiles, over_library = taken("data-parallel", TILE) / stream, taken() / stream
    assert 2 < over_tiles.max() < 14 and over_tiles.min() >= 1
    assert over_library.max() < 6.7
    # Single products are priced as many at once are.
    for at in (0, 1, 2):
        one = replace(products, m=products.m[at], n=products.n[at], k=products.k[at], batch=1)  # type: ignore[index]
        assert seconds(one, A100, model(), 1.0, "stream-k", TILE)[0] == pytest.approx(stream[at])


def test_a_framework_states_it() -> None:
    def step(**traits: str) -> float:
        job = {"model": "gpt2-774m", "cluster": "dgx-h100:1", "framework": {"set": {"cuda_graphs": True, **traits}}}
        return simulate({**job, "batch": {"global": 8}, "plan": {"tp": 2, "dp": 4}}).breakdown.parts["gemm"]

    assert step(gemm_decomposition="stream-k") < step(gemm_decomposition="data-parallel")
    assert step(gemm_decomposition="") == step()
