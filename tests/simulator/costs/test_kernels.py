"""Kernels: never faster than the hardware, near measured times, and cheap to price."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware import gpus, load, load_cluster
from meshcast.hardware.errors import CatalogError
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.estimate import NOTHING
from meshcast.simulator.costs.kernel_prices import RATES, KernelTraits
from meshcast.simulator.costs.kernels.gemm import UNALIGNED_RATE
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Memory, Transfer
from tests.ideal_costs import IdealCosts

RATE = {"dgx-a100": 312e12, "dgx-h100": 989e12}


def costs_of(node="dgx-h100", rates=None):
    cluster = load_cluster(f"{node}:1")
    return Costs(cluster, Mesh({"tp": cluster.gpus}), KernelTraits(rates or {}, alone=True))


COSTS = {node: costs_of(node) for node in RATE}
FAST = {node: costs_of(node, {"kernel": 50.0, "attention": 50.0, "memory_bound": 0.01}) for node in RATE}

size = st.integers(1, 20_000)
gemms = st.builds(
    Gemm, m=size, n=size, k=size, batch=st.integers(1, 64), dtype=st.sampled_from(["bf16", "fp16", "tf32", "fp32"]),
    layout=st.sampled_from(["tn", "nn", "nt"]), accumulate=st.booleans(), out_dtype=st.sampled_from(["bf16", "fp32"]),
)  # fmt: skip
attentions = st.builds(
    Attention, batch=st.integers(1, 64), q=size, kv=size, heads=st.integers(1, 128), kv_heads=st.just(1),
    qk_dim=st.integers(16, 256), v_dim=st.integers(16, 256), share=st.floats(0.01, 1), backward=st.booleans(),
)  # fmt: skip
memories = st.builds(Memory, what=st.just("norm"), read=st.integers(0, 10**11), write=st.integers(0, 10**11))


@pytest.mark.parametrize("pricing", [COSTS, FAST], ids=["calibrated", "with impossible rates"])
@pytest.mark.parametrize("node", RATE)
@given(work=st.one_of(gemms, attentions, memories))
def test_no_kernel_beats_the_hardware(node, pricing, work):
    costs = pricing[node]
    gpu = costs.cluster.gpu
    bound = work.bytes / gpu.memory_bandwidth
    if work.flops:
        bound = max(bound, work.flops / gpu.peak[work.dtype])
    assert costs.estimate(work).seconds >= bound * (1 - 1e-12)


@pytest.mark.parametrize(("node", "low", "high"), [("dgx-a100", 0.7, 0.9), ("dgx-h100", 0.65, 0.9)])
def test_a_large_product_reaches_the_known_share_of_the_peak(node, low, high):
    work = Gemm(8192, 8192, 8192)
    assert low <= work.flops / COSTS[node].estimate(work).seconds / RATE[node] <= high


@pytest.mark.parametrize(("node", "low", "high"), [("dgx-a100", 0.5, 0.68), ("dgx-h100", 0.5, 0.68)])
def test_long_attention_reaches_the_known_share_of_the_peak(node, low, high):
    forward = Attention(1, 8192, 8192, 32, 8, 128, 128)
    rate = forward.flops / COSTS[node].estimate(forward).seconds / RATE[node]
    assert low <= rate <= high
    backward = Attention(1, 8192, 8192, 32, 8, 128, 128, backward=True)
    assert 0.75 <= backward.flops / COSTS[node].estimate(backward).seconds / RATE[node] / rate <= 1.0


def test_fp8_halves_a_large_product():
    """Somewhat more where the power limit slows 16 bits down: 8192 cubed reach 657 of 989 TFLOP/s in bf16."""
    costs = COSTS["dgx-h100"]
    ratio = costs.estimate(Gemm(8192, 8192, 8192)).seconds / costs.estimate(Gemm(8192, 8192, 8192, dtype="fp8")).seconds
    assert 1.5 < ratio < 2.2


@pytest.mark.parametrize(("width", "slower"), [(104, False), (112, False), (108, True), (150, True), (225, True)])
def test_heads_of_misaligned_rows_run_on_the_cuda_cores(width, slower):
    """Attention in kernels of its own: scores, and values by them. BLOOM's tests of 78 layers of 13,824 on 384 A100s
    take 147.4 s with heads of 108 elements and 107.1 s with heads of 144."""
    costs = COSTS["dgx-a100"]
    for work in (Gemm(2048, 2048, width, 64), Gemm(2048, width, 2048, 64)):
        rate = work.flops / costs.estimate(work).seconds
        assert (rate < UNALIGNED_RATE * 19.5e12) == slower and (not slower or rate > 8e12)
        alone = Gemm(64 * work.m, work.n, work.k)
        assert alone.flops / costs.estimate(alone).seconds > UNALIGNED_RATE * 19.5e12, "only batched GEMMs were seen to"


def test_a_format_that_the_gpu_lacks_is_refused():
    with pytest.raises(CatalogError, match="fp8"):
        COSTS["dgx-a100"].estimate(Gemm(128, 128, 128, dtype="fp8"))


@pytest.mark.parametrize("work", [Gemm(0, 8, 8), Attention(0, 8, 8, 1, 1, 64, 64), Memory("add", 0, 0)])
def test_no_work_takes_no_time(work):
    assert COSTS["dgx-h100"].estimate(work) == NOTHING


def test_the_rate_of_unaligned_products_is_that_of_no_other():
    odd, even = (Gemm(2048, n, 2048, batch=8, dtype="fp16") for n in (150, 152))
    plain, slow = COSTS["dgx-a100"], costs_of("dgx-a100", rates=dict(unaligned=0.5))
    assert slow.estimate(odd).seconds / plain.estimate(odd).seconds == pytest.approx(2.0, rel=0.05)
    assert slow.estimate(even) == plain.estimate(even)


def test_rates_of_a_framework():
    work, attention, memory = Gemm(8192, 8192, 8192), Attention(1, 8192, 8192, 32, 8, 128, 128), Memory("add", 10**9, 0)
    plain, slow = COSTS["dgx-h100"], costs_of(rates=dict(kernel=0.8, attention=0.5, memory_bound=2.0))
    assert slow.estimate(work).seconds / plain.estimate(work).seconds == pytest.approx(1 / 0.8, rel=0.02)
    assert slow.estimate(attention).seconds / plain.estimate(attention).seconds == pytest.approx(1 / 0.4, rel=0.02)
    assert slow.estimate(memory).seconds / plain.estimate(memory).seconds == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("name", [name for name in gpus() if load("gpus", name).architecture != "cpu"])
def test_every_gpu_of_the_catalog_can_be_priced(name):
    gpu = load("gpus", name)
    costs = Costs(load_cluster(dict(gpu=name, gpus=1, gpus_per_node=1)), Mesh({"tp": 1}))
    short = "fp16" if "fp16" in gpu.peak else "bf16"
    seconds = costs.estimate(Gemm(8192, 8192, 8192, dtype=short)).seconds
    assert 1 < seconds * gpu.peak[short] / (2 * 8192**3) < 5  # half of the peak on L40S and Blackwell
    if "bf16" not in gpu.peak:
        with pytest.raises(CatalogError, match="Use one of fp32, fp16"):
            costs.estimate(Gemm(64, 64, 64, dtype="bf16"))


def test_a_kernel_slows_down_without_the_multiprocessors_that_it_does_not_leave_to_others():
    prices = costs_of().kernels
    assert [prices.use(Gemm(64, 64, 64, reserved=count)).multiprocessors for count in (0, 33)] == [1, 0.75], "of 132"


def test_equal_work_is_priced_once():
    costs = costs_of()
    assert costs.estimate(Gemm(64, 64, 64)) is costs.estimate(Gemm(64, 64, 64))


def test_ideal_costs():
    works = (Gemm(1, 2, 3), Memory("add", 100, 100), Transfer(8, "pp", 0, 1), Collective("all_reduce", 8, ("dp",)))
    assert [IdealCosts(flops=2.0, communication=4.0).estimate(work).seconds for work in works] == [6, 0, 2, 4]
    assert IdealCosts().estimate(Collective("all_gather", 8, ("dp",))).seconds == 0
    assert set(RATES) == {"kernel", "unaligned", "attention", "memory_bound", "communication"}


@pytest.mark.parametrize(("node", "dtype"), [("dgx-h100", "bf16"), ("dgx-h100", "fp8"), ("dgx-b200", "bf16")])
@pytest.mark.parametrize("layout", ["tn", "nn", "nt"])
def test_groups_cost_time_from_two_on(node: str, dtype: str, layout: str) -> None:
    """One group is a plain GEMM; several in one kernel take the time of theirs, and launched apart more."""
    prices = costs_of(node).kernels
    dense = Gemm(3000, 2048, 4096, dtype=dtype, layout=layout)
    tokens = dense.k if layout == "nt" else dense.m

    def seconds(count: int, **kernel: bool) -> float:
        work = replace(dense, batch=count, groups=((count, tokens),), **kernel)  # type: ignore[arg-type]
        return prices.price(work).seconds / count

    assert seconds(1) == seconds(1, one_kernel=True) == prices.price(dense).seconds
    if (node, dtype) != ("dgx-h100", "bf16"):  # whose grouped kernels are measured
        assert seconds(4) > seconds(4, one_kernel=True) == pytest.approx(seconds(1))
