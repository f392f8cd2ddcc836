"""Kernels bound by memory, and copies: the cost model's shape, its bounds, and measured ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware import load
from meshcast.simulator.costs.coefficients import coefficients
from meshcast.simulator.costs.kernels import memory
from meshcast.simulator.costs.kernels.memory import MemoryBoundCostModel
from meshcast.simulator.ir.ops import Memory
from meshcast.validation.calibration.fit import fit
from meshcast.validation.calibration.kernels import elementwise

KINDS = (
    *("norm", "residual", "activation", "gelu", "rope", "embedding", "softmax", "dropout", "cross-entropy", "add"),
    *("concat", "cast", "router", "permute", "grad-norm", "adam", "zero-grad", "amax"),
)
H100 = load("gpus", "h100-sxm")
MIDDLE = MemoryBoundCostModel(
    **{name: one.start for name, one in coefficients(MemoryBoundCostModel).items()}, sigma=0.1, sigma_short=0.3
)
FUSED = memory.fuse(MIDDLE)

sizes = st.integers(0, 2**36)


@given(st.sampled_from(KINDS), sizes, sizes, st.sampled_from(["a100-sxm-80", "b300-sxm", "mi300x"]), st.floats(0.5, 4))
def test_nothing_beats_memory(what, read, write, gpu, traffic):
    work, on = Memory(what, read, write), load("gpus", gpu)
    for model in (MIDDLE, FUSED, replace(MIDDLE, l2_hits=1.0)):
        assert memory.price(work, on, model, traffic).seconds >= work.bytes / on.memory_bandwidth


@given(st.sampled_from(KINDS), st.integers(1, 2**34), st.floats(1.01, 4))
def test_more_bytes_take_longer(what, nbytes, factor):
    few, many = (memory.seconds(Memory(what, n, n), H100, MIDDLE)[0] for n in (nbytes, int(nbytes * factor) + 1))
    assert many > few


def test_casts_that_load_one_element_at_a_time_do_not_see_the_memory():
    times = [
        memory.seconds(Memory("block-cast", 2e9, 1e9), load("gpus", gpu), MIDDLE)[0] for gpu in ("h100-sxm", "h200-sxm")
    ]
    assert times[0] == times[1]


def test_a_cast_with_a_scale_for_each_row_reads_rows_twice_that_leave_the_l2():
    """Warps hold 64 rows of each multiprocessor: 34 MB of 2,048 elements in 16 bits, 551 MB of 32,768."""
    few, many = (Memory("row-cast", 2 * 10**9, 10**9, rows=10**9 // width) for width in (512, 32768))
    once, twice = (memory.seconds(Memory("cast", reads * 10**9, 10**9), H100, MIDDLE)[0] for reads in (2, 4))
    times = [memory.seconds(work, H100, MIDDLE)[0] for work in (few, many)]
    waves = [work.rows / (64 * H100.multiprocessors) * memory.ROW_CAST_WAVE["warp"] for work in (few, many)]
    assert [time - wait for time, wait in zip(times, waves, strict=True)] == pytest.approx([once, twice], rel=0.01)


def test_a_kernel_of_many_small_blocks_takes_as_long_as_starting_them():
    few, many, most = (memory.seconds(Memory("group-cast", 2e6, 1e6, rows=n), H100, MIDDLE)[0] for n in (1, 1e6, 2e6))
    assert few == memory.seconds(Memory("cast", 2e6, 1e6), H100, MIDDLE)[0] < many
    assert most - many == pytest.approx(1e6 * memory.BLOCK_STARTS["group-cast"] / H100.clock)


def test_many_kernels_as_one():
    rng = np.random.default_rng(0)
    read, write = (np.exp(rng.uniform(0, 24, 300)) for _ in range(2))
    for what in KINDS:
        many, launch = memory.seconds(Memory(what, read, write), H100, MIDDLE)
        one = [memory.seconds(Memory(what, r, w), H100, MIDDLE) for r, w in zip(read, write, strict=True)]
        assert many == pytest.approx([seconds for seconds, _ in one], rel=1e-12)
        assert {launch} == {own for _, own in one}


def test_launch_is_all_that_a_tiny_kernel_takes():
    seconds, launch = memory.seconds(Memory("activation", 64, 32), H100, MIDDLE)
    assert seconds == pytest.approx(launch, rel=0.01) == pytest.approx(MIDDLE.launch)
    estimate = memory.price(Memory("activation", 64, 32), H100, MIDDLE)
    assert estimate.sigma == pytest.approx(MIDDLE.sigma_short, rel=0.02)


@given(st.sampled_from(["norm", "activation", "rope"]), st.integers(2**10, 2**20), st.integers(1, 2**14))
def test_few_rows_take_as_long_as_one(what, row, rows):
    """A block a row: on an idle GPU rows are processed side by side, on a full one they wait for each other."""
    one, some, shared = (
        memory.seconds(Memory(what, n * row, 0, rows=blocks), H100, MIDDLE)[0]
        for n, blocks in ((1, 1), (rows, rows), (rows, 0))
    )
    assert some == pytest.approx(max(one, shared))
    assert one >= MIDDLE.launch + row / (MIDDLE.block_rate * H100.clock)


def test_fused_kernels_are_streams():
    for gpu in ("a100-sxm-80", "h200-sxm", "b200-sxm"):
        on = load("gpus", gpu)
        for what in set(KINDS) - {"amax", "embedding"}:
            seconds, _ = memory.seconds(Memory(what, 2**30, 2**30), on, FUSED)
            stream = (2.0 + FUSED.write_penalty) * 2**30 / (FUSED.stream_share * on.memory_bandwidth)
            launch = FUSED.launch + (FUSED.row_reduction if what in memory.REDUCTIONS else 0.0)
            assert seconds == pytest.approx(stream + launch), (gpu, what)


def test_a_hot_loop_is_faster_until_it_leaves_the_l2():
    hot, cold = (replace(FUSED, l2_hits=share) for share in (1.0, 0.0))

    def ratio(nbytes):
        warm, usual = (memory.seconds(Memory("add", nbytes, 0), H100, model)[0] for model in (hot, cold))
        return warm / usual

    assert ratio(H100.l2 // 3) < 0.9
    assert ratio(8 * H100.l2) == pytest.approx(1.0, abs=0.01)


def test_a_residual_addition_finds_what_was_just_written():
    for sizes in ((2**26, 2**25), (2**28, 2**27)):
        add, residual = (
            memory.seconds(Memory(what, *sizes), H100, replace(FUSED, l2_hits=1.0))[0] for what in ("add", "residual")
        )
        assert 0.8 * add < residual < add
    assert memory.seconds(Memory("residual", 2**26, 0), H100, FUSED) == memory.seconds(
        Memory("add", 2**26, 0), H100, FUSED
    )


def test_traffic_multiplies_work_and_not_launches():
    work = Memory("residual", 2**28, 2**27)
    once, twice = (memory.price(work, H100, FUSED, traffic).seconds for traffic in (1.0, 2.0))
    assert twice - FUSED.launch == pytest.approx(2 * (once - FUSED.launch))


@pytest.mark.parametrize(("link", "rate"), [("pcie5", 55.2e9), ("pcie4", 26.3e9)])
def test_copies_to_the_host_reach_the_payload_of_their_link(link, rate):
    assert load("links", link).payload * load("links", link).bandwidth == pytest.approx(rate, rel=0.03)


KERNEL = {
    "gpu": "h100", "op": "norm", "bytes_read": 2e6, "bytes_written": 2e6, "time_us": 5.0, "source": "vidur mlp.csv",
}  # fmt: skip


def test_reading_a_table():
    assert elementwise.read(pd.DataFrame(columns=sorted(elementwise.KERNELS))) == ([], {})
    changes = [{}, {"op": "gelu", "bytes_read": 2e7}, {"source": "my notes"}, {"gpu": "a100"}]
    samples, refused = elementwise.read(pd.DataFrame([KERNEL | change for change in changes]))
    assert not refused
    assert [(s.gpu, s.kind, s.library, s.index.tolist()) for s in samples] == [
        ("h100-sxm", "norm", "vllm", [0]),
        ("h100-sxm", "gelu", "vllm", [1]),
        ("h100-sxm", "norm", "", [2]),
        ("a100-sxm-80", "norm", "vllm", [3]),
    ]
    assert [s.classes["large"].tolist() for s in samples] == [[False], [True], [False], [False]]
    assert samples[0].seconds == pytest.approx([5e-6])


def test_streams_are_read_by_their_rate():
    rows = [{"op": op, "TBps": rate} for op, rate in (("triad", 4.0), ("nstream", 4.0), ("dot", 0.0))]
    (sample,), refused = elementwise.read(pd.DataFrame(rows).assign(gpu="h200", source="BabelStream"))
    assert sorted(refused) == [1, 2]
    assert sample.library == "babelstream"
    assert sample.seconds == pytest.approx([3 * elementwise.ARRAY / 4e12])


@pytest.mark.parametrize("gpu", ["a100-sxm-80", "h100-sxm", "h200-sxm"])
def test_streams_against_measurements(tables, gpu):
    samples = elementwise.read(tables.read("memory_stream"))[0]
    for sample in samples:
        if sample.gpu == gpu:
            forecast = memory.seconds(sample.parts[0], load("gpus", gpu), FUSED)[0]
            assert forecast == pytest.approx(sample.seconds, rel=0.10)


def test_streams_follow_from_other_kernels(tables):
    """BabelStream on A100 and H100 from the kernels of vLLM and TensorRT-LLM alone."""
    kernels, streams = (elementwise.read(tables.read(name))[0] for name in ("elementwise", "memory_stream"))
    within = 0.06 if tables.whole else 0.08
    for gpu in ("a100-sxm-80", "h100-sxm"):
        on = load("gpus", gpu)
        found = fit(
            MemoryBoundCostModel,
            [s for s in kernels if s.gpu == gpu],
            lambda sample, model, on=on: memory.seconds(sample.parts[0], on, model)[0],
        )
        model = memory.fuse(found.make_model(MemoryBoundCostModel, "vllm"))
        for sample in (s for s in streams if s.gpu == gpu):
            assert memory.seconds(sample.parts[0], on, model)[0] == pytest.approx(sample.seconds, rel=within)


def test_a_selective_scan_is_bound_by_the_elements_of_its_state() -> None:
    """Not by its bytes: twice the state takes twice as long."""
    once, twice = (
        memory.seconds(Memory("selective-scan", 10**8, 10**8, flops=flops), H100, MIDDLE) for flops in (1e12, 2e12)
    )
    computes = 1e12 / (memory.SELECTIVE_SCAN_RATE * H100.multiprocessors * (H100.clock or memory.CLOCK))
    assert twice[0] - once[0] == pytest.approx(computes) == pytest.approx(once[0] - once[1])
