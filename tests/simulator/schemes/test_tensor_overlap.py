"""Collectives of tensor parallelism that overlap GEMMs: async-TP and FLUX over any scheme that makes the pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware import load_cluster
from meshcast.simulator import simulate
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.kernel_prices import KernelTraits
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective, Gemm
from meshcast.simulator.lowering.rewrite import wave_count
from meshcast.validation.contract.measure import list_ops, make, sent_bytes
from meshcast.validation.contract.of_overlap import GemmPair, gather_seconds, overlapped_ops, scatter_seconds, seconds
from tests.simulator.schemes.overlap_schemes import ALL, ASYNC, FLUX, USERBUFFERS, every

SECONDS = {True: gather_seconds, False: scatter_seconds}
either = pytest.mark.parametrize("gathers", [True, False])

PAIRS = st.builds(
    GemmPair,
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 400).map(lambda n: 24 * n),
    st.integers(1, 64),
    st.integers(1, 4000),
    st.sampled_from([1e9, 1e11]),
    st.sampled_from([1e4, 1e6, 1e8, 1e10]),
)


# ------------------------------------------------------------------------------------------------ one pair


def moved(setting: GemmPair, gathers: bool) -> float:
    """Seconds of the collective alone."""
    return (setting.p - 1) / setting.p * (setting.input_s if gathers else setting.output_s)


@either
@given(setting=PAIRS)
def test_async_tp_takes_the_longer_of_both_for_all_shards_but_one(gathers: bool, setting: GemmPair) -> None:
    p, e = setting.p, setting.gemm_s / setting.p
    c = (setting.input_s if gathers else setting.output_s) / p
    assert SECONDS[gathers](setting, ASYNC) == pytest.approx((p - 1) * max(c, e) + e)


@either
@given(setting=PAIRS)
def test_async_tp_in_both_directions_keeps_work_and_bytes_and_reaches_its_closed_form(
    gathers: bool, setting: GemmPair
) -> None:
    """Two shards at a time: pulls and GEMMs form a pipeline of half as many steps, whose ends fill and drain it."""
    mesh, scheme = Mesh({"tp": setting.p}), make(ASYNC, Mesh({"tp": setting.p}), directions=2)
    ops, plain = overlapped_ops(setting, ASYNC, gathers, directions=2), setting.pair(gathers).forward
    assert sum(op.work.flops for op in ops if op.work) == pytest.approx(setting.gemm.flops)
    assert sent_bytes(ops, mesh) == pytest.approx(sent_bytes(plain, mesh))
    if setting.p == 1:
        assert list_ops(ops) == list_ops(plain)
        return
    shifts = [op.work for op in ops if isinstance(op.work, Collective)]
    assert [(work.by, work.both_ways) for work in shifts] == [
        (i, 2 * i < setting.p) for i in range(1, setting.p // 2 + 1)
    ]
    (form,) = (
        one for one in scheme.closed_forms(setting) if one.quantity == f"{'gather' if gathers else 'scatter'}_seconds"
    )
    assert seconds(ops, setting) == pytest.approx(form.value)
    e, moving = setting.gemm_s / setting.p, moved(setting, gathers)
    assert max(setting.gemm_s, moving) * (1 - 1e-9) <= form.value <= max(setting.gemm_s, moving + e) * 2


def test_links_between_pairs_of_gpus_serve_both_directions_and_a_switch_port_is_shared() -> None:
    """Eight MI300X have a link to each other one; eight H100 have one port each to the switches."""
    far = Collective("shift", 2**30, ("tp",), by=3)
    near, both = replace(far, by=1), replace(far, by=1, both_ways=True)
    for node, doubled in (("dgx-h100:1", True), ("mi300x-8:1", False), ("pcie-8xa100:1", True)):
        costs = Costs(load_cluster(node), Mesh({"tp": 8}), KernelTraits(alone=True))
        one, two = costs.estimate(near), costs.estimate(both)
        wanted = costs.estimate(replace(near, nbytes=2 * near.nbytes)) if doubled else one
        assert two.seconds == pytest.approx(wanted.seconds) and two.latency == pytest.approx(one.latency)
        shares = [costs.use(work).links[0] for work in (near, both)]
        assert shares == ([pytest.approx(1 / 7), pytest.approx(2 / 7)] if not doubled else [shares[0]] * 2)


def test_userbuffers_pipeline_a_sum_and_exchange_rows_in_a_ring() -> None:
    """Four ranks, a GEMM of 2 x 96 x 64 x 48 FLOPs at 589,824 FLOP/s: 1 s, a quarter of a second for 12 columns or
    24 rows. Sums of 9216 bytes send 6912, a quarter 1728; shards of the 12,288 bytes of all-gathered rows have 3072.
    """
    for bytes_per_s, gather_s, scatter_s in ((6912.0, 0.25 + 3 * 3072 / 6912, 1.25), (13824.0, 1.0, 1.125)):
        setting = GemmPair(4, 96, 64, 48, 589_824.0, bytes_per_s)
        assert SECONDS[True](setting, USERBUFFERS) == pytest.approx(gather_s)
        assert SECONDS[False](setting, USERBUFFERS) == pytest.approx(scatter_s)
    ops = overlapped_ops(setting, USERBUFFERS, False, splits=3, sms=24)
    products, sums = ops[:3], ops[3:]
    assert [(one.work.m, one.work.n) for one in products if isinstance(one.work, Gemm)] == [(96, 16)] * 3
    assert [one.work for one in sums] == [Collective("reduce_scatter", 3072, ("tp",), sms=24)] * 3
    # Columns that the parts do not divide stay whole.
    assert list_ops(overlapped_ops(setting, USERBUFFERS, False, splits=5)) == list_ops(setting.pair(False).forward)


@either
@given(setting=PAIRS, wave=st.sampled_from([1, 4, 132]))
def test_flux_takes_no_less_than_either_and_no_more_than_both(gathers: bool, setting: GemmPair, wave: int) -> None:
    taken = seconds(overlapped_ops(setting, FLUX, gathers, wave=wave), setting)
    product, collective = setting.gemm_s, moved(setting, gathers)
    assert max(product, collective) * (1 - 1e-9) <= taken <= (product + collective) * (1 + 1e-9)
    if setting.p == 1:
        assert taken == pytest.approx(product)
    elif gathers:
        # The kernel computes the rows of the shard that arrives last once they are there.
        assert taken == pytest.approx(max(product, collective + product / setting.p))
    else:
        # Nothing is sent before the first wave of tiles has finished. Bytes of the last wave are whole ones.
        n, rounding = wave_count(setting.gemm, wave), 2 / setting.bytes_per_s
        wanted = max(product + collective / n, product / n + collective)
        assert taken == pytest.approx(wanted, abs=rounding)


@either
def test_a_kernel_of_flux_takes_no_longer_in_parts(gathers: bool) -> None:
    """Its tiles wait for rows, or are sent, within one kernel: no tiles are cut and no wave is emptier."""
    setting, costs = GemmPair(8, 4096, 4096, 3584), Costs(load_cluster("dgx-h100:1"), Mesh({"tp": 8}), launch=1e-5)
    products = [op.work for op in overlapped_ops(setting, FLUX, gathers) if isinstance(op.work, Gemm)]
    assert [one.part for one in products] == ([7 / 8, 1 / 8] if gathers else [1 / 4, 3 / 4])
    whole = costs.estimate(setting.gemm).seconds
    assert sum(costs.estimate(one).seconds for one in products) == pytest.approx(whole)


@every
@either
@given(setting=PAIRS)
def test_work_and_bytes_stay(use: str, gathers: bool, setting: GemmPair) -> None:
    ops, plain, mesh = overlapped_ops(setting, use, gathers), setting.pair(gathers).forward, Mesh({"tp": setting.p})
    assert sum(op.work.flops for op in ops if op.work) == pytest.approx(setting.gemm.flops)
    assert sent_bytes(ops, mesh) == pytest.approx(sent_bytes(plain, mesh))
    if setting.p == 1:
        assert list_ops(ops) == list_ops(plain)


def test_waves_count_tiles_that_hang_over_and_every_expert() -> None:
    assert wave_count(Gemm(8192, 3584, 4096), 132) == 7  # 64 x 14 tiles
    assert wave_count(Gemm(1, 1, 8), 132) == 1
    assert wave_count(Gemm(129, 257, 8, batch=33), 132) == 1
    assert wave_count(Gemm(129, 257, 8, batch=34), 132) == 2


# --------------------------------------------------------------------------------------------- at real prices


@pytest.mark.parametrize("regather", [True, False])
def test_on_h100s_both_are_faster_than_none_where_much_is_sent(regather: bool) -> None:
    """Layers of Llama 3 70B, 8 tensor ranks of a node, 4096 tokens a micro-batch."""
    steps = {}
    for use in (None, *ALL):
        schemes = [{"use": "data/zero-1", "over": "dp"}, {"use": "tensor/megatron-sp", "over": "tp"}]
        steps[use] = simulate(
            {
                "model": {"preset": "llama3-70b", "layers": 8},
                "cluster": "dgx-h100:32",
                "framework": {"name": "megatron-core", "set": {"regather": regather, "launch_s": 1e-5}},
                "batch": {"global": 128, "micro": 1, "sequence": 4096},
                "plan": {"mesh": {"dp": 32, "tp": 8}, "schemes": [*([{"use": use}] if use else []), *schemes]},
            }
        )
    for use in ALL:
        assert steps[use].step_time < steps[None].step_time
        # No more than all that tensor communication took.
        assert steps[use].step_time > steps[None].step_time - steps[None].breakdown.parts["tp"]


PUBLISHED = [
    ("llama3-70b", 32, 16, {"use": "memory/recompute-full"}, "bf16", 1.092, 0.08),
    ("llama3-8b", 8, 12, {"use": "memory/recompute-selective"}, "bf16", 1.099, 0.05),
    ("llama3-70b", 32, 16, {"use": "memory/recompute-full"}, "fp8-tensorwise", 1.057, 0.08),
]
"""Model, replicas, micro-batch, recompute, number format, tokens per second with async-TP over those without, and what
is allowed. FSDP x 8 tensor ranks, sequences of 8192, 500 W H100s of 96 GB. From pytorch/torchtitan, benchmarks:
asyncTP_llama3_h100_2025-06_torchtitan.md and llama3_h100_202412_torchtitan.md. The gains of the large model are
forecast 0.06 to 0.07 too high: products of a shard escape the power limit that whole ones run into."""


@pytest.mark.parametrize(("model", "dp", "micro", "again", "number", "gain", "off"), PUBLISHED)
def test_async_tp_gains_the_speedup_measured_by_torchtitan(
    model: str, dp: int, micro: int, again: dict[str, Any], number: str, gain: float, off: float
) -> None:
    steps = []
    for others in ([], [{"use": ASYNC}]):
        schemes = [{"use": "data/fsdp", "over": "dp"}, *others, {"use": "tensor/megatron-sp", "over": "tp"}, again]
        job = {
            "model": model,
            "cluster": {"gpu": "h100-sxm-96-hbm2e", "gpus": 8 * dp, "inter": {"gbps_per_gpu": 400}},
            "framework": "torchtitan",
            "precision": number,
            "batch": {"global": dp * micro, "micro": micro, "sequence": 8192},
            "plan": {"mesh": {"dp": dp, "tp": 8}, "schemes": schemes},
        }
        steps.append(simulate(job).step_time)
    assert steps[0] / steps[1] == pytest.approx(gain, abs=off)
