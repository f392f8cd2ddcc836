"""The cost model of fused attention: its limits, numbers against arrays, and the reader of its tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from meshcast.hardware import load
from meshcast.simulator.costs.coefficients import coefficients
from meshcast.simulator.costs.kernels.attention import AttentionCostModel, price, seconds
from meshcast.simulator.ir.ops import Attention
from meshcast.validation.calibration.kernels.attention import _refetched_bytes, _width, read

H100 = load("gpus", "h100-sxm")
MODEL = AttentionCostModel(**{name: one.start for name, one in coefficients(AttentionCostModel).items()}, sigma=0.1)
CAUSAL = Attention(1, 8192, 8192, 32, 8, 128, 128)


def time(work: Attention, gpu: str = "h100-sxm", **model: float) -> float:
    return price(work, load("gpus", gpu), replace(MODEL, **model)).seconds


def test_long_causal_attention_runs_at_a_usual_rate():
    assert 0.4 < CAUSAL.flops / H100.peak["bf16"] / time(CAUSAL) < 0.75


@pytest.mark.parametrize("share", [1.0, 0.75, 0.5, 0.3, 0.01, 1e-6])
@pytest.mark.parametrize("q, kv", [(8192, 8192), (1, 8192), (2048, 8192), (8192, 2048), (1, 1)])
@pytest.mark.parametrize("backward", [False, True])
def test_every_rectangle_has_a_sensible_time(q, kv, share, backward):
    work = replace(CAUSAL, q=q, kv=kv, share=share, backward=backward)
    assert MODEL.launch < time(work) <= 1.01 * time(replace(work, share=1.0)) + 1e-9
    assert time(work) <= time(replace(work, heads=64)) + 1e-9
    assert time(work) <= time(replace(work, q=2 * q)) + 1e-9


def test_halves_of_a_ring_are_worth_their_share():
    """A chunk of queries against all keys before it: as long as its part of the whole."""
    whole = time(replace(CAUSAL, q=32768, kv=32768))
    chunks = sum(time(replace(CAUSAL, kv=8192 * n, share=1 - 0.5 / n)) for n in (1, 2, 3, 4))
    assert chunks == pytest.approx(whole, rel=0.12)


def test_windows_cost_the_pairs_that_they_cover():
    """Wider ones more, and less than in proportion: whole tiles are computed at both ends."""
    wide, narrow = (time(replace(CAUSAL, q=32768, kv=32768, share=1 / n)) for n in (32, 64))
    assert 1.3 < wide / narrow < 2


def test_one_long_row_cannot_be_divided():
    assert time(replace(CAUSAL, heads=1)) > 3 * time(CAUSAL) / 32


def test_exponentials_weigh_more_in_narrow_heads():
    narrow, wide = (replace(CAUSAL, heads=2048 // d, kv_heads=2048 // d, qk_dim=d, v_dim=d) for d in (64, 128))
    assert narrow.flops == wide.flops
    assert time(narrow) > 1.15 * time(wide)
    assert time(narrow, softmax_cost=0.1) < 1.1 * time(wide, softmax_cost=0.1)


def test_a_faster_number_format_is_held_up_by_the_exponentials():
    assert 1.0 < time(CAUSAL) / time(replace(CAUSAL, dtype="fp8")) < 1.9


def test_caches_cost_copies_of_keys_and_values():
    assert time(CAUSAL, cache_writes=0.0) < time(CAUSAL, cache_writes=2.0)
    backward = replace(CAUSAL, backward=True)
    assert time(backward, cache_writes=0.0) == time(backward, cache_writes=2.0)


def test_speed_is_that_of_the_products():
    fast, slow = (seconds(replace(CAUSAL, q=32768, kv=32768), H100, MODEL, speed)[0] for speed in (1.0, 0.5))
    assert slow == pytest.approx(2 * fast, rel=0.1)


@pytest.mark.parametrize("gpu", ["a100-sxm-80", "h100-sxm", "b200-sxm", "l40s", "mi300x"])
@pytest.mark.parametrize("backward", [False, True])
def test_arrays_are_as_good_as_numbers(gpu, backward):
    sizes = [
        (b, s, h, h // r, d) for b in (1, 7) for s in (1, 100, 3000) for h, r in ((8, 1), (24, 8)) for d in (64, 192)
    ]
    columns = [np.array(column, float) for column in zip(*sizes, strict=True)]
    batch, length, heads, kv_heads, width = columns
    work = Attention(batch, length, length, heads, kv_heads, width, width, 0.5, backward)  # type: ignore[arg-type]
    many, _ = seconds(work, load("gpus", gpu), MODEL)
    one = [
        seconds(Attention(b, s, s, h, k, d, d, 0.5, backward), load("gpus", gpu), MODEL)[0] for b, s, h, k, d in sizes
    ]
    assert many == pytest.approx(np.array(one))


ROW = dict(
    gpu="h100", batch=2, seq=8192, heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", causal=1, time_us=2000.0
)
PASS = {key: value for key, value in ROW.items() if key != "head_dim"} | dict(qk_head_dim=192, v_head_dim=128)


def table(*rows: dict, source: str = "AIC sglang 0.5.14 (fa3)") -> pd.DataFrame:
    return pd.DataFrame([{"source": source} | row for row in rows])


def test_reader_distinguishes_libraries_formats_and_classes():
    samples, refused = read(table(ROW, ROW | {"dtype": "fp8"}, ROW | {"seq": 64}, ROW | {"causal": 0}))
    assert not refused
    assert {(s.library, s.kind) for s in samples} == {("flash-3-sglang", "bf16"), ("flash-3-sglang-fp8", "fp8")}
    assert sorted(at for s in samples for at in s.index) == [0, 1, 2, 3]
    assert sum(s.classes["forward-8k"].sum() for s in samples) == 3
    assert {s.parts[0].share for s in samples} == {0.5, 1.0}


def test_reader_of_passes():
    rows = [PASS | {"pass": each} for each in ("fwd", "bwd", "fwd_bwd")]
    samples, refused = read(table(*rows, source="flash-attention repo figure (FlashAttention-3; 16k tokens)"))
    assert not refused
    by_row = {s.index[0]: s for s in samples}
    assert [[part.backward for part in by_row[at].parts] for at in range(3)] == [[False], [True], [False, True]]
    assert [by_row[at].kind for at in range(3)] == ["bf16", "backward", "backward"]
    assert by_row[0].parts[0].qk_dim[0] == 192 and by_row[0].parts[0].v_dim[0] == 128


def test_unknown_programs_have_no_name():
    assert [s.library for s in read(table(ROW, source="somebody"))[0]] == [""]


def test_padded_heads_are_computed_whole():
    (sample,), _ = read(table(ROW | {"head_dim": 80, "kv_heads": 32}, source="AIC trtllm 9 encoder (torch_flow)"))
    assert sample.parts[0].qk_dim[0] == 128


def test_heads_wider_than_any_kernel_keep_their_width() -> None:
    widths = np.array([32, 64, 65, 256, 300])
    assert _width("flash-attention", "h100-sxm", "bf16", widths).tolist() == [64, 64, 96, 256, 300]


def test_blocks_of_few_sequences_share_what_they_fetch() -> None:
    """Three run on each of 132 multiprocessors: 49.5 of each of eight heads fetch the same keys and values."""
    fetched, alone = (_refetched_bytes(H100, 1, 131072, heads, 8, 128, 128) for heads in (8, 132 * 3))
    once = 2 * 8 * 131072 * 256
    assert (fetched, alone) == (pytest.approx(once * 2048 / 49.5), pytest.approx(once * 2048))
