"""Libraries of kernels: measured ones, those known by a ratio, and where a GPU has them."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from meshcast.hardware import load_cluster
from meshcast.simulator import simulate
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.estimate import Estimate
from meshcast.simulator.costs.kernel_prices import KernelTraits
from meshcast.simulator.costs.kernels.libraries import RELATIVE_LIBRARIES
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Attention, Gemm
from meshcast.validation.contract.played import play_job

LAYOUTS = ("tn", "nn", "nt")
LONG = Attention(1, 8192, 8192, 32, 32, 128, 128)


def cost(library: str, cluster: str = "dgx-h100:1", backward: bool = False) -> Estimate:
    work = Attention(1, 8192, 8192, 32, 32, 128, 128, backward=backward)
    return Costs(load_cluster(cluster), Mesh({"dp": 8}), KernelTraits(attention=library)).estimate(work)


@pytest.mark.parametrize("backward", [False, True])
def test_hopper_has_a_law_for_each_generation(backward: bool) -> None:
    """FlashAttention-3 is 1.5 to 2.0 times faster than FlashAttention-2 forward, 1.5 to 1.75 times backward (arXiv
    2407.08608, section 4.1)."""
    ratio = cost("flash-2", backward=backward).seconds / cost("flash-3", backward=backward).seconds
    assert 1.35 < ratio < 2.1
    assert cost("", backward=backward) == cost("flash-3", backward=backward)
    assert cost("cudnn", backward=backward).seconds != cost("flash-3", backward=backward).seconds


@pytest.mark.parametrize("cluster", ["dgx-h100:1", "dgx-a100:1"])
@pytest.mark.parametrize(("library", "slowest", "fastest"), [("flash-1", 1.7, 3.0), ("triton", 1.3, 2.5)])
def test_older_kernels_lie_in_the_published_range(library: str, slowest: float, fastest: float, cluster: str) -> None:
    """FlashAttention-2 against them, arXiv 2307.08691, section 4.1."""
    own, known = cost(library, cluster), cost("flash-2", cluster)
    assert slowest < own.seconds / known.seconds < fastest
    assert own.sigma > known.sigma
    assert own.sigma**2 == pytest.approx(known.sigma**2 + RELATIVE_LIBRARIES[library].sigma ** 2)


def test_the_library_of_attention_prices_nothing_else() -> None:
    work = Gemm(4096, 4096, 4096)
    one, other = (
        Costs(load_cluster("dgx-h100:1"), Mesh({"dp": 8}), KernelTraits(attention=name)) for name in ("", "triton")
    )
    assert one.estimate(work) == other.estimate(work) and one.estimate(LONG) != other.estimate(LONG)


def job(cluster: str = "dgx-h100:1", **given: Any) -> dict[str, Any]:
    return {
        "model": "llama3-8b",
        "cluster": cluster,
        "framework": {"name": "megatron-core", "set": given},
        "batch": {"global": 8, "sequence": 8192},
        "plan": {"tp": 2},
    }


def test_a_job_names_the_library() -> None:
    steps = {name: simulate(job(attention_library=name)) for name in ("flash-1", "triton", "flash-2", "flash-3")}
    attention = [step.parts["attention"] for step in steps.values()]
    assert attention == sorted(attention, reverse=True) and len(set(attention)) == 4
    assert simulate(job()).parts["attention"] == attention[-1]


@pytest.mark.parametrize("cluster", ["dgx-h100:1", "hgx-h200:1", "dgx-b200:1"])
def test_gemms_with_a_scale_for_each_row_have_kernels_of_their_own(cluster: str) -> None:
    """CUTLASS for one scale a row, cuBLAS for one scale a tensor (pytorch/pytorch #153555). Nine of ten ratios of
    measured times of equal shapes lie in 0.97 to 1.97."""
    costs = Costs(load_cluster(cluster), Mesh({"dp": 8}))
    ratios = []
    for m, n, k in ((8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (16384, 8192, 8192)):
        tensor = Gemm(m, n, k, 1, "fp8", "tn", what="linear")
        row = replace(tensor, scaling="row")
        assert row.flops == tensor.flops and row != tensor
        ratios.append(costs.estimate(row).seconds / costs.estimate(tensor).seconds)
        for dtype in ("bf16", "fp16"):
            wide = replace(tensor, dtype=dtype)
            assert costs.estimate(replace(wide, scaling="row")) == costs.estimate(wide)
    assert min(ratios) > 0.95 and max(ratios) < 2 and median(ratios) != 1


def test_a_recipe_with_a_scale_for_each_row_reaches_every_gemm_of_linear_layers() -> None:
    def scalings(recipe: str) -> dict[str, set[str]]:
        model = {"layers": 2, "hidden": 256, "heads": 4, "vocab": 512, "seq": 128}
        job = {"model": model, "cluster": "dgx-h100:1", "precision": recipe, "batch": {"global": 8}, "plan": {"tp": 2}}
        works = [op.work for _, op in play_job(job).instances() if isinstance(op.work, Gemm)]
        return {
            layout: {work.scaling for work in works if work.dtype == "fp8" and work.layout == layout}
            for layout in LAYOUTS
        }

    assert scalings("fp8-rowwise") == {layout: {"row"} for layout in LAYOUTS}
    assert scalings("fp8-tensorwise") == {layout: {""} for layout in LAYOUTS}
