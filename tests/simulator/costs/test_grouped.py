"""Grouped products and expert blocks: limits of the model, routings by hand, readers of tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from meshcast.hardware import load
from meshcast.simulator.costs.coefficients import coefficients
from meshcast.simulator.costs.kernels.grouped import GroupedGemmCostModel, price, seconds
from meshcast.simulator.ir.ops import Gemm, Memory
from meshcast.validation.calibration.kernels import experts, routing

H100 = load("gpus", "h100-sxm")
MODEL = GroupedGemmCostModel(0.9, 30.0, 0.9, 6e-6, 0.8, 7.0, 1e-7, 1e-9, 0.1, 0.3)


def equal(groups: int, rows: int, n: int = 4096, k: int = 7168, **rest: object) -> Gemm:
    return Gemm(rows, n, k, groups, groups=((groups, rows),), **rest)  # type: ignore[arg-type]


def uneven(sizes: list[int], n: int = 4096, k: int = 7168) -> Gemm:
    return Gemm(sum(sizes) / len(sizes), n, k, len(sizes), groups=tuple((1, size) for size in sizes))


def test_work_of_uneven_groups() -> None:
    work = uneven([100, 300, 800])
    assert work.flops == pytest.approx(2 * 1200 * 4096 * 7168)
    assert work.bytes == pytest.approx(2 * (1200 * (7168 + 4096) + 3 * 7168 * 4096))
    assert hash(work) == hash(uneven([100, 300, 800])) and work != uneven([100, 400, 700])


def test_work_of_uneven_weight_gradients() -> None:
    work = Gemm(
        4096, 7168, 400, 3, layout="nt", accumulate=True, out_dtype="fp32", groups=((1, 100), (1, 300), (1, 800))
    )
    assert work.flops == pytest.approx(2 * 1200 * 4096 * 7168)
    assert work.bytes == pytest.approx(2 * 1200 * (4096 + 7168) + 3 * 4096 * 7168 * 4 * 2)


def test_large_groups_run_at_the_rate() -> None:
    # 8 x 8192 rows: tiles fill all waves but the last one, and rows and parameters move in a fraction of the time.
    work = equal(8, 8192)
    assert price(work, H100, MODEL).seconds == pytest.approx(work.flops / (0.8 * 989e12), rel=0.05)


def test_few_rows_read_all_parameters() -> None:
    work = equal(256, 4)
    floor = 256 * 4096 * 7168 * 2 / 3.35e12
    assert floor / 0.9 < price(work, H100, MODEL).seconds < 1.15 * floor / 0.9
    # Half of the experts without a row: half of the parameters stay where they are.
    half = price(equal(128, 8), H100, MODEL).seconds
    assert half == pytest.approx(price(work, H100, MODEL).seconds / 2, rel=0.1)


def test_uneven_groups_take_longer() -> None:
    even = price(uneven([512] * 16), H100, MODEL).seconds
    # As many rows, but the last tile of each group is nearly empty.
    assert price(uneven([513] * 15 + [497]), H100, MODEL).seconds > 1.1 * even
    assert price(uneven([8192 - 15] + [1] * 15), H100, MODEL).seconds > even


def test_nothing_beats_the_bound() -> None:
    fast = GroupedGemmCostModel(1.0, 0.1, 1.2, 1e-7, 1.0, 200.0, 1e-9, 1e-12)
    for work in (equal(8, 8192), equal(256, 1), equal(8, 8192, dtype="fp8")):
        bound = max(work.flops / H100.peak[work.dtype], work.bytes / H100.memory_bandwidth)  # type: ignore[index]
        assert price(work, H100, fast).seconds >= bound


def test_launches_and_speed() -> None:
    work = equal(64, 16, 64, 64)
    taken, launch = seconds(work, H100, MODEL)
    assert launch == pytest.approx(6e-6 + 64e-7) and launch < taken < 1.3 * launch
    assert price(work, H100, MODEL).sigma == pytest.approx(0.1 + 0.2 * launch / taken)
    big = equal(8, 8192)
    assert seconds(big, H100, MODEL, 0.5)[0] == pytest.approx(2 * seconds(big, H100, MODEL)[0], rel=0.05)
    assert price(equal(8, 0), H100, MODEL).seconds == 0


def test_weight_gradients_are_slower_and_write_all() -> None:
    forward = equal(8, 8192)
    gradient = Gemm(4096, 7168, 8192, 8, layout="nt", groups=((8, 8192),))
    ratio = price(gradient, H100, MODEL).seconds / price(forward, H100, MODEL).seconds
    assert ratio == pytest.approx(1 / 0.9, rel=0.03)
    few = Gemm(4096, 7168, 4, 256, layout="nt", out_dtype="fp32", groups=((256, 4),))
    once = 256 * 4096 * 7168 * 4 / (MODEL.memory_share * 3.35e12)
    written, added = (price(replace(few, accumulate=word), H100, MODEL).seconds for word in (False, True))
    assert written > once and added - written == pytest.approx(once, rel=0.05), "sums are read as well"


@pytest.mark.parametrize("field", list(coefficients(GroupedGemmCostModel)))
def test_every_coefficient_counts(field: str) -> None:
    works = [equal(8, 8192), equal(256, 4), equal(8, 64), Gemm(4096, 7168, 8192, 8, layout="nt", groups=((8, 8192),))]
    other = replace(MODEL, **{field: getattr(MODEL, field) * 1.1})
    assert any(seconds(work, H100, other)[0] != seconds(work, H100, MODEL)[0] for work in works)


def test_many_products_at_once() -> None:
    works = [uneven([100, 300, 800]), uneven([512] * 16), equal(256, 4), uneven([4096, 16])]
    counts, sizes = np.zeros((2, 16, len(works)))
    for at, work in enumerate(works):
        for i, (count, size) in enumerate(work.groups):
            counts[i, at], sizes[i, at] = count, size
    m, batch = (np.array([getattr(work, name) for work in works], float) for name in ("m", "batch"))
    many, launch = seconds(Gemm(m, 4096, 7168, batch, groups=((counts, sizes),)), H100, MODEL)  # type: ignore[arg-type]
    one = [seconds(work, H100, MODEL) for work in works]
    assert many == pytest.approx([taken for taken, _ in one]) and launch == pytest.approx([own for _, own in one])


def test_balanced_routing() -> None:
    assert routing.balanced_loads(4096, 8, 256, 8) == pytest.approx([128.0] * 32)
    # One token goes to experts 0, 16, 32, ...: one of the first rank's 16.
    assert routing.balanced_loads(1, 8, 128, 8).tolist() == [1.0] + [0.0] * 15


@pytest.mark.parametrize("exponent", [1.0, 1.01, 1.2])
def test_power_law_routing(exponent: float) -> None:
    whole = routing.power_law(4096, 8, 128, 1, exponent)
    assert whole.sum() == pytest.approx(4096 * 8, rel=1e-3) and whole[0] <= 4096
    assert (np.diff(whole) <= 0).all() and len(whole) == 128
    fullest = routing.power_law(4096, 8, 128, 16, exponent)
    assert 1.5 * 2048 < fullest.sum() < 8 * 4096 and len(fullest) == 8


@pytest.mark.parametrize("tokens", [1, 4, 48, 640])
def test_power_laws_keep_every_row(tokens: int) -> None:
    """Also where fewer rows than experts round to none each; the rank of one of two has at least half of them."""
    whole = routing.power_law(tokens, 8, 384, 1, 1.2)
    assert whole.sum() == pytest.approx(tokens * 8) and whole[0] <= tokens
    assert tokens * 4 <= routing.power_law(tokens, 8, 384, 2, 1.2).sum() < tokens * 8


def test_power_law_by_hand() -> None:
    # 2 experts of 2: both get every token, however popular they are.
    assert routing.power_law(1000, 2, 2, 1, 1.2) == pytest.approx([1000, 1000], rel=0.01)
    # Steeper laws have a fuller rank.
    loads = [routing.power_law(8192, 8, 256, 32, a).sum() for a in (1.01, 1.2)]
    assert loads[0] < loads[1]


def test_zipf_routing() -> None:
    flat = routing.zipf(4096, 8, 64, 4, 0.0)
    assert flat == pytest.approx([512.0] * 16)
    assert routing.loads("zipf_1.0", 4096, 8, 64, 4).sum() > flat.sum()


def test_routing_is_always_the_same() -> None:
    first = routing.power_law(2048, 8, 64, 4, 1.2)
    routing.power_law.cache_clear()
    assert (routing.power_law(2048, 8, 64, 4, 1.2) == first).all()


def test_histograms_keep_rows() -> None:
    loads = routing.power_law(16384, 8, 256, 8, 1.2)
    found = routing.histogram(loads, 8)
    assert len(found) <= 8 and sum(count for count, _ in found) == (loads >= 0.5).sum()
    assert sum(count * size for count, size in found) == pytest.approx(loads.sum(), rel=1e-3)
    assert routing.histogram(routing.balanced_loads(4096, 8, 256, 8)) == ((32.0, 128.0),)
    assert routing.histogram(np.zeros(4)) == ()


@pytest.mark.parametrize("distribution", ["balanced", "power_law_1.2"])
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_tokens_that_arrive_at_a_rank(distribution: str, ranks: int) -> None:
    """As many as its fullest expert has or more, one for each choice at most, and all where it holds all experts."""
    loads = routing.loads(distribution, 4096, 8, 64, ranks)
    arrived = routing.count_arrived(distribution, loads, 4096)
    assert loads.max() <= arrived * (1 + 1e-9) and arrived <= min(4096, loads.sum()) * (1 + 1e-9)
    assert ranks > 1 or arrived == pytest.approx(4096, rel=0.01)


BLOCK = {
    "gpu": "h100", "dtype": "bfloat16", "num_tokens": 8192, "hidden": 4096, "inter": 1536, "topk": 8,
    "num_experts": 128, "tp": 2, "ep": 4, "distribution": "balanced", "gated": 1, "time_us": 500.0,
    "source": "AIC trtllm 1.3.0rc20 (moe_torch_flow_cutlass)",
}  # fmt: skip


def test_an_expert_block() -> None:
    (sample,), refused = experts.read(pd.DataFrame([BLOCK]))
    assert not refused and (sample.operation, sample.gpu, sample.library) == ("grouped", "h100-sxm", "cutlass")
    assert sample.kind == "experts-bf16" and sample.classes["tuned-4k"].tolist() == [True]
    up, down = (part for part in sample.parts if isinstance(part, Gemm))
    # 8192 x 8 / 4 = 16,384 rows of 32 experts; three matrices of 4096 x 768.
    assert up.flops + down.flops == pytest.approx(2 * 16384 * 3 * 4096 * 768)
    assert (up.batch, up.m, up.n, up.k) == (32, 512, 1536, 4096) and (down.n, down.k) == (4096, 768)
    (alone,), _ = experts.read(pd.DataFrame([BLOCK | {"num_tokens": 64, "num_experts": 1, "topk": 1, "ep": 1}]))
    assert alone.parts[0].m == 64


TRITON = BLOCK | {"source": "AIC sglang 0.5.14 (sglang_fused_moe_triton)"}


def test_the_layer_of_sglang_processes_zeros_of_choices_of_other_ranks_experts() -> None:
    """Of 65,536 choices a quarter are of the rank's experts; all are activated and summed."""
    (triton,), _ = experts.read(pd.DataFrame([TRITON]))
    up, _, summed, *_, activated = triton.parts
    assert isinstance(up, Gemm) and up.flops == pytest.approx(2 * 16384 * 4096 * 1536)
    assert isinstance(summed, Memory) and summed.read == 65536 * 4096 * 2
    assert summed.write == (8192 + 49152) * 4096 * 2  # the zeros are of the GEMM that makes the summed rows
    assert isinstance(activated, Memory) and activated.read == 65536 * 1536 * 2


MIXTRAL = {"hidden": 4096, "inter": 14336, "num_experts": 8, "topk": 2}


@pytest.mark.parametrize(
    ("row", "alone"), [({}, False), (MIXTRAL, True), ({"source": "AIC sglang 0.5.10 (sglang_fused_moe_triton)"}, True)]
)
def test_a_benchmark_of_kernels_alone_is_told_by_release_and_router(row: dict[str, object], alone: bool) -> None:
    assert experts.runs_kernels_alone(pd.DataFrame([TRITON | row])).tolist() == [alone]


NEMOTRON = {"hidden": 2688, "inter": 1856, "num_experts": 128, "topk": 6, "tp": 1}


@pytest.mark.parametrize(
    ("release", "change", "matrices"), [("0.5.14", NEMOTRON, 1), ("0.5.10", NEMOTRON, 2), ("0.5.14", {"tp": 1}, 2)]
)
def test_experts_of_nemotron_have_no_gate_since_the_benchmark_knows_that(
    release: str, change: dict[str, object], matrices: int
) -> None:
    row = BLOCK | change | {"source": f"AIC sglang {release} (sglang_flashinfer_cutlass_moe)"}
    (sample,), _ = experts.read(pd.DataFrame([row]))
    up = sample.parts[0]
    assert isinstance(up, Gemm) and up.n == matrices * row["inter"]  # type: ignore[operator]
    assert up.tile and not sample.tuned  # on Hopper FlashInfer's kernels have their first tile


def test_choices_of_other_ranks_experts_count_where_a_benchmark_gives_them_to_the_first_expert() -> None:
    source = "AIC sglang 0.5.10 (sglang_fused_moe_triton)"
    (triton,), _ = experts.read(pd.DataFrame([TRITON | {"source": source}]))
    up = triton.parts[0]
    assert isinstance(up, Gemm) and up.flops == pytest.approx(2 * 8192 * 8 * 4096 * 1536)
    # Every token arrives, with 2 of 8 choices here; 31 experts have 512 rows, one the rest, tokens times 8.
    assert up.groups[0][1][0] == pytest.approx(512 + 8192 * 6)
    height, loaded, _ = up.tile
    assert loaded / height == pytest.approx(1 - 6 / 8 * 7 / 8)


def test_a_fixed_tile_is_no_faster_than_the_best_and_rows_of_one_token_are_loaded_once() -> None:
    times = [
        seconds(replace(equal(8, 100), tile=tile), H100, MODEL)[0] for tile in ((), (64, 8, (64,)), (64, 64, (64,)))
    ]
    assert times[0] <= times[2] and times[1] < times[2]


def test_an_untuned_kernel_has_small_tiles_for_no_more_tokens_than_the_rank_has_experts() -> None:
    """However few of these get a token."""
    rows = [TRITON | {"num_tokens": tokens, "topk": 1} for tokens in (20, 33)]
    samples = [experts.read(pd.DataFrame([row]))[0][0] for row in rows]
    assert [sample.parts[0].tile[0].item() for sample in samples] == [16, 64]  # type: ignore[union-attr]


def test_kinds_and_classes() -> None:
    rows = [
        BLOCK | {"dtype": "fp8", "num_tokens": 4095},
        BLOCK | {"dtype": "fp8_block", "source": "AIC sglang 0.5.14 (sglang_fused_moe_triton)"},
        BLOCK | {"source": "something new", "gated": 0},
    ]
    samples, refused = experts.read(pd.DataFrame(rows))
    assert not refused
    assert [s.kind for s in samples] == ["experts-fp8", "experts-fp8-block", "experts-bf16"]
    assert [s.library for s in samples] == ["cutlass-fp8", "triton-fp8-block", ""]
    assert [s.classes["tuned-4k"].item() for s in samples] == [False, False, True]
    assert samples[2].parts[0].n == 768  # type: ignore[union-attr]


def test_kernels_tuned_for_another_model() -> None:
    other = BLOCK | {"inter": 768, "num_experts": 64}  # as wide without tp, as many experts a rank with half the ranks
    rows = [BLOCK, other | {"tp": 1, "ep": 2}, BLOCK | {"tp": 1}, BLOCK | {"dtype": "fp8_block"}]
    samples, _ = experts.read(pd.DataFrame(rows))
    assert samples[0].classes["tuned-4k"].all()
    assert samples[0].classes["own-4k"].tolist() == [False, False, True]
    assert samples[1].classes["own-4k"].tolist() == [True]


GROUPED = {
    "gpu": "b200", "dtype": "bf16", "groups": 40, "m_per_group": 616, "n": 3072, "k": 5120, "pass": "fwd",
    "accumulate": False, "out_dtype": "bf16", "time_us": 746.0,
    "source": "SimuMax configs/system/b200_bf16_ceperm.json",
}  # fmt: skip


def test_grouped_products() -> None:
    gradient = GROUPED | {"pass": "wgrad", "accumulate": True}
    samples, refused = experts.read(pd.DataFrame([GROUPED, GROUPED | {"pass": "dgrad"}, gradient, gradient]))
    works = [sample.parts[0] for sample in samples]
    assert not refused and all(isinstance(work, Gemm) and work.groups for work in works)
    assert {work.flops.item() for work in works} == {2.0 * 40 * 616 * 3072 * 5120}  # type: ignore[attr-defined]
    kinds = [(work.layout, work.accumulate, work.out_dtype) for work in works]  # type: ignore[union-attr]
    # The same gradient comes with main gradients in fp32, then in bf16.
    assert kinds == [("tn", False, "bf16"), ("nn", False, "bf16"), ("nt", True, "fp32"), ("nt", True, "bf16")]
    assert {sample.library for sample in samples} == {"transformer-engine"} and {s.kind for s in samples} == {"grouped"}


def test_whole_tables(tables: Any) -> None:
    for name in ("moe_h100", "moe_b200", "grouped_gemm_train"):
        table = tables.read(name)
        samples, refused = experts.read(table)
        assert not refused and sum(len(sample.index) for sample in samples) == len(table)
        assert all(sample.library for sample in samples)
