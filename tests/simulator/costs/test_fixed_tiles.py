"""Tiles of CUTLASS's GEMMs in 8 bits with one scale a row: tables of libraries, waves of clusters."""

from dataclasses import replace

import numpy as np
import pytest

from meshcast.hardware import load
from meshcast.simulator.costs.coefficients import coefficients
from meshcast.simulator.costs.kernels.fixed_tiles import (
    FixedTile,
    sgl_kernel_tile,
    torch_rowwise_tile,
    with_tile_of_training,
)
from meshcast.simulator.costs.kernels.gemm import ALONE, READ_RATE, Fp8GemmCostModel, seconds
from meshcast.simulator.costs.kernels.memory import VECTOR
from meshcast.simulator.ir.ops import Gemm

MODEL = Fp8GemmCostModel(**{name: known.start for name, known in coefficients(Fp8GemmCostModel).items()})
ADA = load("gpus", "l40s")
GPUS = {"ada": "l40s", "hopper": "h100-sxm", "blackwell": "b200-sxm"}


@pytest.mark.parametrize("architecture", GPUS)
def test_one_gemm_takes_as_long_as_the_same_among_many(architecture: str) -> None:
    gpu, random = load("gpus", GPUS[architecture]), np.random.default_rng(0)
    m, n, k = (random.integers(1, most, 100).astype(float) for most in (600, 20000, 9000))
    many = seconds(Gemm(m, n, k, 1, "fp8", tile=sgl_kernel_tile(m, n, architecture)), gpu, MODEL)[0]
    for at in range(100):
        tile = sgl_kernel_tile(m[at], n[at], architecture)
        assert tile.count_tiles(m[at], n[at]) * tile.rows * tile.columns >= m[at] * n[at]
        work = Gemm(m[at], int(n[at]), k[at], 1, "fp8", tile=tile)
        assert seconds(work, gpu, MODEL)[0] == pytest.approx(many[at], rel=1e-12)


def test_a_cluster_more_than_fit_at_once_takes_a_whole_wave() -> None:
    """132 multiprocessors in eight groups run 66 clusters of two, and 32 of four."""
    gpu, model = load("gpus", "h100-sxm"), replace(MODEL, overlap_sharpness=8.0)
    for tile, down, across in ((FixedTile(128, 128, 2), 6, 11), (FixedTile(128, 128, 2, 2), 4, 8)):
        rows, columns = tile.rows * tile.cluster_rows, tile.columns * tile.cluster_columns
        one, full, more = (
            seconds(Gemm(rows * i, columns * j, 65536, 1, "fp8", tile=tile), gpu, model)[0] - model.launch
            for i, j in ((1, 1), (down, across), (down, across + 1))
        )
        assert one == pytest.approx(full, rel=0.01) and more == pytest.approx(2 * full, rel=0.01)


@pytest.mark.parametrize("sizes", [(64, 4096), (192, 8192), (320, 512), (320, 704), (4096, 8192)], ids=str)
@pytest.mark.parametrize("name", ["h100-sxm", "b200-sxm"])
def test_a_transposed_output_has_the_transposed_tile(name: str, sizes: tuple[int, int]) -> None:
    tile, other = (torch_rowwise_tile(*output, load("gpus", name)) for output in (sizes, sizes[::-1]))
    assert other == FixedTile(tile.columns, tile.rows, tile.cluster_columns, tile.cluster_rows)


def test_tiles_of_training_are_those_of_torch() -> None:
    """Small tiles while all of them fit on the GPU at once; transposed outputs have the cluster on the other side."""
    hopper = load("gpus", "h100-sxm")
    assert torch_rowwise_tile(512, 1024, hopper) == FixedTile(128, 64, 2, 1)
    assert torch_rowwise_tile(8192, 4096, hopper) == FixedTile(128, 128, 2, 1)
    assert torch_rowwise_tile(4096, 8192, hopper) == FixedTile(128, 128, 1, 2)
    assert torch_rowwise_tile(8192, 4096, load("gpus", "b200-sxm")) == FixedTile(64, 128, 2, 1)
    boards = load("gpus", "rtx-pro-6000")
    assert [torch_rowwise_tile(m, 4096, boards) for m in (320, 8192)] == [FixedTile(64, 128), FixedTile(128, 128)]
    work = Gemm(8192, 4096, 4096, 1, "fp8", scaling="row")
    assert with_tile_of_training(work, hopper).tile == FixedTile(128, 128, 2, 1)
    on_ada = FixedTile(*with_tile_of_training(work, load("gpus", "l40s")).tile)
    assert on_ada == sgl_kernel_tile(8192, 4096, "ada")._replace(down_first=False, stream_k=True)
    for other in (replace(work, scaling=""), replace(work, dtype="bf16"), replace(work, groups=((8, 1024),))):
        assert with_tile_of_training(other, hopper) is other
    assert with_tile_of_training(work, load("gpus", "a100-sxm-80")) is work


def test_waves_read_an_activation_anew_that_does_not_fit_the_l2() -> None:
    """142 tiles at a time, in turn: of twice as many rows of tiles each column reads all, of a quarter four do."""
    model = replace(MODEL, overlap_sharpness=1.0)

    def extra(down: float, share_of_l2: float) -> float:
        rows, columns = int(down * 142 * 128), 64 * 128
        k = int(share_of_l2 * ADA.l2 / rows)
        in_turn, swizzled = (
            seconds(Gemm(rows, columns, k, 1, "fp8", tile=FixedTile(128, 128, down_first=first)), ADA, model)[0]
            for first in (True, False)
        )
        return (in_turn - swizzled) * ADA.memory_bandwidth * model.read_share / (rows * k)

    assert extra(2, 5) == pytest.approx(63, rel=0.01)
    assert extra(0.25, 5) == pytest.approx(15, rel=0.05)
    assert extra(2, 0.2) < 0.1


def test_tiles_that_are_few_run_faster() -> None:
    """By the clock (`ALONE`) where they wait for tensor cores, by the L2's bandwidth where for operands."""
    model, k = replace(MODEL, overlap_sharpness=8.0), 65536

    def wave(tile: FixedTile, down: int, across: int) -> float:
        work = Gemm(tile.rows * down, tile.columns * across, k, 1, "fp8", tile=tile)
        return (seconds(work, ADA, model)[0] - model.launch) / (k + model.pipeline_depth)

    wide, narrow = FixedTile(128, 128), FixedTile(16, 64)
    share = ALONE["ada"][0]
    for down, across in ((1, 1), (8, 8)):
        slower = share + (1 - share) * down * across / 142
        assert wave(wide, down, across) == pytest.approx(wave(wide, 11, 12) * slower / (1 - 0.4 * 10 / 142), rel=0.02)
    by_port, by_bandwidth = (80 / rate for rate in (VECTOR * ADA.clock, READ_RATE * ADA.memory_bandwidth / 140))
    assert by_port < wave(narrow, 1, 1) < 0.5 * wave(narrow, 35, 4)
    assert wave(narrow, 35, 4) == pytest.approx(by_bandwidth, rel=0.05)


def test_stream_k_takes_no_whole_waves() -> None:
    """144 tiles on 142 multiprocessors: a wave and some peers instead of two."""
    work, model = Gemm(12 * 128, 12 * 128, 65536, 1, "fp8"), replace(MODEL, overlap_sharpness=8.0)
    whole, shared = (
        seconds(replace(work, tile=FixedTile(128, 128, stream_k=stream_k)), ADA, model)[0] for stream_k in (False, True)
    )
    assert shared == pytest.approx(whole / 2 * 144 / 142, rel=0.05)
