"""The cost model of GEMMs: properties that hold for all coefficients, and the reader of their tables."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware import load
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.coefficients import coefficients
from meshcast.simulator.costs.kernels.gemm import GemmCostModel, price, seconds
from meshcast.simulator.costs.kernels.roofline import FOUR_BIT_SHARE, combine, count_waves, lower_bound
from meshcast.simulator.ir.ops import Gemm, Memory
from meshcast.validation.calibration.fit import fit
from meshcast.validation.calibration.kernels import gemm as reader

MODEL = GemmCostModel(**{name: c.start for name, c in coefficients(GemmCostModel).items()}, sigma=0.05, sigma_short=0.2)
GPU = load("gpus", "h100-sxm")

size = st.integers(1, 20_000)
products = st.builds(
    Gemm, m=size, n=size, k=size, batch=st.integers(1, 64), dtype=st.sampled_from(["bf16", "fp16", "fp8"]),
    layout=st.sampled_from(["tn", "nn", "nt"]), accumulate=st.booleans(), out_dtype=st.sampled_from(["bf16", "fp32"]),
)  # fmt: skip


@given(work=products)
def test_no_product_beats_the_hardware(work):
    assert price(work, GPU, MODEL, speed=100.0).seconds >= lower_bound(GPU, work.flops, work.dtype, work.bytes)


@given(work=products, dim=st.sampled_from(["m", "n", "k", "batch"]))
def test_twice_the_product_takes_longer(work, dim):
    more = replace(work, **{dim: getattr(work, dim) * 2})
    # A partly filled wave is paid for in part, so the price may fall by that much, and by no more.
    assert seconds(more, GPU, MODEL)[0] >= 0.95 * seconds(work, GPU, MODEL)[0]


def test_many_at_once_are_priced_as_one_by_one():
    draw = np.random.default_rng(0)
    m, n, k = (np.floor(2 ** draw.uniform(0, 15, 100_000)) for _ in range(3))
    many = Gemm(m, n, k, np.ones_like(m), layout="nt", accumulate=True, out_dtype="fp32")
    all_of_them = seconds(many, GPU, MODEL)[0]
    for at in range(200):
        one = replace(many, m=int(m[at]), n=int(n[at]), k=int(k[at]), batch=1)
        assert seconds(one, GPU, MODEL)[0] == pytest.approx(all_of_them[at], rel=1e-12)


@pytest.mark.parametrize(
    ("tiles", "rounding", "busy"),
    [(9, 1.0, 0.75), (18, 1.0, 0.9), (9 * 2, 1.0, 0.9), (9, 0.0, 1.0)],
    ids=["tiles of 128 x 128", "tiles of 128 x 64", "k split in two", "Stream-K"],
)
def test_waves_give_the_ceilings_of_stream_k(tiles, rounding, busy):
    """Osama et al., arXiv 2301.03598: m = n = 384, k = 128 on a GPU of four multiprocessors."""
    assert tiles / 4 / count_waves(tiles, 4, rounding) == busy


def test_a_last_wave_costs_a_whole_one_only_where_rounded():
    full, more = Gemm(132 * 256, 128, 4096), Gemm(133 * 256, 128, 4096)
    stiff, smooth = (replace(MODEL, wave_rounding=r, split_overhead=1.0) for r in (1.0, 0.0))
    assert seconds(more, GPU, stiff)[0] > 1.05 * seconds(full, GPU, stiff)[0]
    assert seconds(more, GPU, smooth)[0] < 1.01 * seconds(full, GPU, smooth)[0]


def test_a_long_k_is_split_where_tiles_are_few():
    long = Gemm(128, 128, 65536)
    assert seconds(long, GPU, MODEL)[0] < 0.2 * seconds(long, GPU, replace(MODEL, split_overhead=1.0))[0]


def test_long_gemms_reach_the_power_limit():
    free = replace(MODEL, power_limited_rate=1.0)
    short, long = Gemm(2048, 2048, 2048), Gemm(32768, 16384, 16384)
    assert seconds(short, GPU, MODEL)[0] == seconds(short, GPU, free)[0]
    slower = seconds(long, GPU, MODEL)[0] / seconds(long, GPU, free)[0]
    assert slower == pytest.approx(1 / MODEL.power_limited_rate, rel=0.02)


def test_a_warm_activation_is_read_from_the_cache():
    thin = Gemm(8192, 32, 1024)
    warm, cold = (seconds(thin, GPU, replace(MODEL, reuse_distance=b))[0] for b in (0.5, 20.0))
    assert warm < 0.9 * cold


@pytest.mark.parametrize("work", [Gemm(8192, 32, 1024), Gemm(32, 8192, 1024), Gemm(512, 512, 512)])
def test_a_cache_as_slow_as_the_memory_makes_no_difference_and_a_faster_one_none_longer(work):
    slow = replace(MODEL, l2_rate=MODEL.read_share)
    warm, cold = (seconds(work, GPU, replace(slow, reuse_distance=b))[0] for b in (0.5, 20.0))
    assert warm == pytest.approx(cold, rel=1e-12) and seconds(work, GPU, replace(slow, l2_rate=5.0))[0] < warm


@pytest.mark.parametrize("name", ["b200-sxm", "gb300"])
def test_long_gemms_in_4_bits_reach_less_of_their_peak(name):
    gpu, model = load("gpus", name), replace(MODEL, power_limited_rate=1.0)
    times = [seconds(Gemm(2**17, 2**15, 2**15, 1, dtype, "tn"), gpu, model)[0] for dtype in ("fp8", "fp4")]
    ratio = float(gpu.peak["fp4"] / gpu.peak["fp8"])
    assert times[0] / times[1] == pytest.approx(FOUR_BIT_SHARE * ratio, rel=0.03)


def test_layouts_differ_by_their_rates():
    forward, inputs, weights = (seconds(Gemm(8192, 8192, 8192, layout=x), GPU, MODEL)[0] for x in ("tn", "nn", "nt"))
    assert forward < inputs < weights


def test_two_limits_add_up_or_hide_each_other():
    assert combine(3.0, 4.0, 1.0) == 7.0 and combine(3.0, 4.0, 50.0) == pytest.approx(4.0, rel=1e-3)


def test_a_result_is_written_to_the_l2_as_long_as_it_fits():
    """4,096 x 5,120 x 32 on an L40S writes 42 MB in 22 us, twice as fast as its memory could."""
    gpu = load("gpus", "l40s")
    model = Calibration.shipped().kernel_model(gpu, "gemm", "sglang").model
    small, large = (Gemm(m, 5120, 32) for m in (4096, 40960))
    rates = [work.m * work.n * 2 / seconds(work, gpu, model)[0] for work in (small, large)]
    assert rates[0] > 1.5 * gpu.memory_bandwidth > 1.5 * rates[1]


PRODUCT = {
    "gpu": "h100", "dtype": "bfloat16", "m": 4096, "n": 2048, "k": 1024, "time_us": 50.0, "source": "AIC sglang 1",
}  # fmt: skip


def table(**columns):
    """Rows of a table; columns that are not given are those of a plain GEMM."""
    rows = max((len(v) for v in columns.values() if isinstance(v, list)), default=1)
    return pd.DataFrame({**PRODUCT, **columns}, index=range(rows))


def test_samples_are_rows_of_one_library_and_format():
    rows = table(dtype=["bfloat16", "float16", "fp8", "fp8_block", "fp8"], source=["AIC trtllm 1"] * 4 + ["a new one"])
    samples, refused = reader.read(rows)
    assert not refused
    assert [(s.library, s.kind, s.parts[-1].dtype) for s in samples] == [
        ("tensorrt-llm", "bf16", "bf16"),
        ("tensorrt-llm", "bf16", "fp16"),
        ("tensorrt-llm-fp8", "fp8", "fp8"),
        ("tensorrt-llm-fp8-block", "fp8-block", "fp8"),
        ("", "fp8", "fp8"),
    ]
    assert all(
        s.seconds == pytest.approx(50e-6) and s.classes["all"].all() and s.classes["large"].all() for s in samples
    )


def test_quantising_is_a_part_of_rows_that_hold_it():
    rows = table(dtype=["fp8"] * 3, source=["AIC trtllm 1", "AIC sglang 1", "Azure cuBLASLt"])
    parts = [sample.parts for sample in reader.read(rows)[0]]
    assert [[getattr(part, "what", "") for part in one] for one in parts] == [
        ["amax", "cast", "gemm"],
        ["row-cast", "gemm"],
        ["gemm"],
    ]
    cast = parts[1][0]
    assert isinstance(cast, Memory)
    assert (cast.read, cast.write, cast.rows) == (2 * 4096 * 1024, 4096 * 1024, 4096)


def test_casts_by_blocks_load_one_element_at_a_time_in_some_libraries():
    """TensorRT-LLM's on Hopper alone, and those of an older sglang; later ones take as many blocks as divide evenly."""
    sources = ["AIC trtllm 1", "AIC trtllm 1", "AIC sglang 0.5.10 (x)", "AIC sglang 0.5.14 (x)"]
    rows = table(gpu=["h100", "b200", "b300", "h100"], m=4097, k=768, dtype="fp8_block", source=sources)
    casts = [sample.parts[0] for sample in reader.read(rows)[0]]
    assert [cast.what for cast in casts] == ["block-cast", "cast", "block-cast", "group-cast"]
    assert casts[-1].rows == 4097 * 6 / 2


def test_scales_of_weights_are_converted_on_blackwell():
    """By four kernels, of which the gather has a block a row where the scales of a row are whole vectors of four."""
    rows = table(gpu=["b200", "gb200", "h100"], k=[1024, 768, 1024], dtype="fp8_block", source="AIC sglang 0.5.14 (x)")
    parts = [sample.parts[1:-1] for sample in reader.read(rows)[0]]
    assert [[part.what for part in each] for each in parts] == [["add", "add", "row-gather", "add"]] * 2 + [[]]
    assert [each[2].rows for each in parts[:2]] == [2048, 0]


def test_layouts_of_training_are_read():
    rows = table(batch=2, layout=["TN", "NT"], accumulate=["False", True], out_dtype=["bf16", "float32"])
    samples, refused = reader.read(rows)
    assert not refused and [s.kind for s in samples] == ["training"] * 2
    products = [s.parts[0] for s in samples]
    assert [(p.layout, p.accumulate, p.out_dtype) for p in products] == [("tn", False, "bf16"), ("nt", True, "fp32")]
    assert products[1].flops == 2 * 2 * 4096 * 2048 * 1024


def test_layouts_of_training_agree_with_a_fit_of_few_coefficients(tables):
    samples, refused = reader.read(tables.read("gemm_train_layouts"))
    assert not refused
    samples = [sample for sample in samples if sample.gpu == "a100-pcie-80"]
    gpu = load("gpus", "a100-pcie-80")
    found = fit(GemmCostModel, samples, lambda sample, model: seconds(sample.parts[0], gpu, model)[0])
    model = found.make_model(GemmCostModel, "transformer-engine")
    errors = np.concatenate(
        [np.abs(seconds(s.parts[0], gpu, model)[0] / s.seconds - 1)[s.classes["large"]] for s in samples]
    )
    assert len(errors) > (100 if tables.whole else 60) and np.median(errors) < 0.03 and np.quantile(errors, 0.9) < 0.1
