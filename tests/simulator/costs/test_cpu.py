"""Kernels on cores, and collectives among processes: more work is never faster, peaks are never beaten."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware import load
from meshcast.hardware.errors import CatalogError
from meshcast.hardware.inline import ByGPU, Inter
from meshcast.hardware.topology import reach
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.collectives import collective, p2p
from meshcast.simulator.costs.collectives.links import Links, TierCostModels
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.kernels import cpu
from meshcast.simulator.costs.kernels.sections import SECTIONS, section_of
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Memory

SHIPPED = Calibration.shipped()
CORE = load("gpus", "cpu-core")
SIZE = st.integers(1, 4096)
KINDS = [*cpu.RATE_OF, "residual", "rope", "add", "zero-grad"]


def price(work):
    name = section_of(work, CORE)
    return SECTIONS[name].price(work, CORE, SHIPPED.kernel_model(CORE, name).model, 1.0)


@given(SIZE, SIZE, SIZE, st.sampled_from(["tn", "nn", "nt"]))
def test_products_keep_to_the_peak_and_grow(m: int, n: int, k: int, layout: str) -> None:
    work, more = (Gemm(rows, n, k, 1, "fp32", layout, out_dtype="fp32") for rows in (m, 2 * m))
    assert price(more).seconds >= price(work).seconds >= work.flops / CORE.peak["fp32"]


def test_layouts_of_one_rate_take_one_time() -> None:
    model = replace(SHIPPED.kernel_model(CORE, "cpu-gemm").model, nn_rate=1.0, nt_rate=1.0)
    times = {cpu.gemm_seconds(Gemm(512, 512, 512, 1, "fp32", layout), CORE, model)[0] for layout in ("tn", "nn", "nt")}
    assert len(times) == 1


@given(SIZE, st.integers(1, 16), st.booleans())
def test_attention_keeps_to_the_peak(positions: int, heads: int, backward: bool) -> None:
    work = Attention(1, positions, positions, heads, heads, 64, 64, 0.5, backward, "fp32")
    assert price(work).seconds >= work.flops / CORE.peak["fp32"]


@pytest.mark.parametrize("what", KINDS)
@given(size=st.integers(64, 10**9), backward=st.booleans())
def test_other_kernels_grow_with_their_bytes(what: str, size: int, backward: bool) -> None:
    work, more = Memory(what, size, size, backward), Memory(what, 2 * size, 2 * size, backward)
    assert price(more).seconds > price(work).seconds > 0


def test_cost_models_work_on_arrays() -> None:
    sizes = np.array([64.0, 256.0, 1024.0])
    model = SHIPPED.kernel_model(CORE, "cpu-gemm").model
    many, _ = cpu.gemm_seconds(Gemm(sizes, sizes, sizes, dtype="fp32"), CORE, model)  # type: ignore[arg-type]
    each = [cpu.gemm_seconds(Gemm(n, n, n, dtype="fp32"), CORE, model)[0] for n in (64, 256, 1024)]
    assert many.tolist() == pytest.approx(each)
    found, _ = cpu.memory_seconds(
        Memory("rms-norm", sizes, sizes), CORE, SHIPPED.kernel_model(CORE, "cpu-memory").model
    )  # type: ignore[arg-type]
    assert found.shape == sizes.shape and (np.diff(found) > 0).all()


def test_experts_are_called_one_by_one() -> None:
    model = SHIPPED.kernel_model(CORE, "cpu-gemm").model
    alone = cpu.gemm_seconds(Gemm(64, 64, 64, 8, "fp32"), CORE, model)
    batched = cpu.gemm_seconds(Gemm(64, 64, 64, 8, "fp32", groups=((8, 64),)), CORE, model)
    assert batched[1] == 8 * alone[1] and batched[0] - batched[1] == pytest.approx(alone[0] - alone[1])


def links(members: int) -> tuple[Links, object]:
    by_gpu = ByGPU(gpu=CORE, gpus=members, gpus_per_node=members, scale_up_domain=1, inter=Inter(kind="none"))
    cluster = by_gpu.cluster()
    model = SHIPPED.link_models(cluster.host).model
    return Links(cluster, TierCostModels(model, model, None)), reach(cluster, list(range(members)))  # type: ignore[arg-type]


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
@pytest.mark.parametrize("members", [2, 3, 8])
def test_messages_between_processes_take_longer_the_larger_they_are(operation: str, members: int) -> None:
    tiers, group = links(members)
    times = [collective.price(Collective(operation, n, ("x",)), group, tiers).seconds for n in (10**3, 10**6, 10**8)]  # type: ignore[arg-type]
    assert 0 < times[0] < times[1] < times[2]
    assert collective.use(Collective(operation, 10**6, ("x",)), group, tiers).multiprocessors == 0  # type: ignore[arg-type]


def test_messages_have_a_latency() -> None:
    tiers, group = links(2)
    small, large = (p2p.price(n, group, tiers) for n in (10, 10**8))  # type: ignore[arg-type]
    assert small.latency == large.latency > 0 and large.seconds > 1e3 * small.seconds


def test_a_core_borrows_nothing_from_gpus() -> None:
    cluster = links(2)[0].cluster
    assert Costs(cluster, Mesh({"dp": 2})).assumed == ()
    with pytest.raises(CatalogError, match="no calibration has a section"):
        SHIPPED.kernel_model(CORE, "cpu-gemm", without="cpu-core")
