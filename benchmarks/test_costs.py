"""What a price costs: one piece of work, new or known, and a hundred thousand at once. Run by hand: ``pytest benchmarks
--benchmark-only``."""

from itertools import count

import numpy as np
import pytest

from meshcast.hardware import load, load_cluster
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.collectives import dispatch
from meshcast.simulator.costs.collectives.dispatch import Dispatch
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.kernels.sections import SECTIONS
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Memory

WORKS = {
    "gemm": lambda i: Gemm(1024 + i, 2048, 4096),
    "grouped": lambda i: Gemm(64 + i, 2048, 4096, 8, groups=((8, 64 + i),)),
    "attention": lambda i: Attention(1, 1024 + i, 1024 + i, 32, 8, 128, 128),
    "memory": lambda i: Memory("norm", 4096 * (i + 1), 4096 * (i + 1)),
    "collective": lambda i: Collective("all_reduce", 4096 * (i + 1), ("tp",)),
}


@pytest.fixture
def costs():
    return Costs(load_cluster("dgx-h100:1"), Mesh({"tp": 8}))


@pytest.mark.parametrize("kind", WORKS)
def test_new_work(benchmark, costs, kind):
    number = count()
    estimate = benchmark.pedantic(
        costs.estimate, setup=lambda: ((WORKS[kind](next(number)),), {}), rounds=3000, warmup_rounds=20
    )
    assert estimate.seconds > 0


@pytest.mark.parametrize("kind", WORKS)
def test_known_work(benchmark, costs, kind):
    work = WORKS[kind](1)
    assert benchmark(costs.estimate, work).seconds > 0


def test_dispatch(benchmark):
    gpu, link, port = load("gpus", "h100-sxm"), load("links", "nvlink4"), load("links", "infiniband-ndr")
    model, number = Calibration.shipped().kernel_model(gpu, "dispatch").model, count(1)

    def new():
        return (Dispatch("dispatch", next(number), 7168, 8, 256, 64, 8), gpu, link, port, model), {}

    assert benchmark.pedantic(dispatch.price, setup=new, rounds=3000).seconds > 0


@pytest.mark.parametrize("section", ["gemm", "attention"])
def test_many_at_once(benchmark, section):
    draw, gpu = np.random.default_rng(0), load("gpus", "h100-sxm")
    sizes = [np.round(2 ** draw.uniform(6, 14, 100_000)) for _ in range(3)]
    heads = np.full(100_000, 8.0)
    work = Gemm(*sizes) if section == "gemm" else Attention(sizes[0], sizes[1], sizes[1], heads, heads, 128, 128)
    model = Calibration.shipped().kernel_model(gpu, section).model
    seconds, _ = benchmark.pedantic(SECTIONS[section].seconds, args=(work, gpu, model), rounds=5)
    assert (seconds > 0).all()
