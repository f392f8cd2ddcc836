"""Tiles of DeepGEMM: what its code weighs on Hopper and on Blackwell."""

import numpy as np
import pytest

from meshcast.hardware import load
from meshcast.simulator.costs.coefficients import ceil_div
from meshcast.simulator.costs.kernels.deepgemm import SPILLED_RATE, _on_blackwell, deepgemm_tile

GPUS = {"hopper": "h100-sxm", "blackwell": "b200-sxm"}


def choose(m: float, n: float, k: float, architecture: str = "hopper") -> tuple[float, ...]:
    tile = deepgemm_tile(*(np.array([float(size)]) for size in (m, n, k)), load("gpus", GPUS[architecture]))
    return tuple(float(np.ravel(part)[0]) for part in tile[:5])


@pytest.mark.parametrize("architecture", GPUS)
def test_a_gemm_has_the_tile_that_it_has_among_many(architecture: str) -> None:
    random = np.random.default_rng(0)
    sizes = [np.floor(np.exp(random.uniform(low, 10, 8))) for low in (0, 5, 5)]
    tile = deepgemm_tile(*sizes, load("gpus", GPUS[architecture]))
    many = np.array(np.broadcast_arrays(*tile[:5])).T
    assert all(choose(*(size[at] for size in sizes), architecture) == tuple(many[at]) for at in range(8))


def test_blackwell_prefers_a_single_wave_and_then_pairs() -> None:
    """Of many waves, tiles are paired wherever their number along a side is even; a single wave needs no pair."""
    blackwell = load("gpus", "b200-sxm")
    for m, n, k in ((8192, 8192, 4096), (8192, 7168, 4096), (256, 2560, 4096), (33, 1024, 8192), (3, 51200, 1024)):
        rows, columns, down, across, rate = choose(m, n, k, "blackwell")
        tiles = ceil_div(m, rows), ceil_div(n, columns)
        assert rate == 1 and not tiles[0] % down and not tiles[1] % across
        assert down * across == 2 or tiles[0] * tiles[1] <= blackwell.multiprocessors
        # Of as many waves the last is as full as it can be.
        for other in _on_blackwell(*(np.array([float(size)]) for size in (m, n, k))):
            count = ceil_div(m, other.rows) * ceil_div(n, other.columns)
            waves = {ceil_div(number, int(blackwell.multiprocessors)) for number in (count, tiles[0] * tiles[1])}
            if other.allowed[0] and other.down * other.across == down * across and len(waves) == 1:
                assert count <= tiles[0] * tiles[1]
    assert choose(8192, 8192, 256, "blackwell")[1] <= 128 < choose(8192, 7168, 4096, "blackwell")[0]


def test_hopper_weighs_waves_against_the_operands_of_a_tile() -> None:
    """128 tiles of 128 x 192 are one wave of 132 multiprocessors; 129 rows more are two, of other tiles."""
    assert choose(4096, 768, 2048) == (128, 192, 1, 1, SPILLED_RATE)
    assert choose(8192, 8192, 8192) == (256, 128, 1, 1, 1)
    assert choose(1, 256, 1024)[:2] == (64, 16)
    rows, columns, *_, rate = choose(4353, 768, 2048)
    assert rate == 1 and ceil_div(4353, rows) * ceil_div(768, columns) > 132
