"""Rows of measured tables that have no price: each is left out with its reason, and the rest are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from meshcast.validation.calibration.kernels import attention, dispatch, elementwise, experts, gemm
from tests.simulator.costs.test_attention import ROW
from tests.simulator.costs.test_dispatch import CALL
from tests.simulator.costs.test_gemm import PRODUCT
from tests.simulator.costs.test_grouped import BLOCK, GROUPED
from tests.simulator.costs.test_memory import KERNEL

TRAINING = PRODUCT | {"batch": 1, "layout": "TN", "accumulate": False, "out_dtype": "bf16"}

TABLES: dict[str, tuple[Callable[[pd.DataFrame], Any], dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "attention": (attention.read, ROW | {"source": "AIC sglang 0.5.14 (fa3)"}, [({"gpu": "h900"}, "not known"),
        ({"gpu": "a100", "dtype": "fp8"}, "no peak rate"), ({"dtype": "int3"}, "no peak rate"), ({"batch": 0},
        "batch is 0"), ({"seq": math.nan}, "seq is nan"), ({"heads": 2.5}, "no whole number"), ({"heads": 30},
        "evenly"), ({"causal": "half"}, "neither"), ({"time_us": -1.0}, "time_us")]),
    "dispatch": (dispatch.read, CALL, [({"gpu": "abacus"}, "GPU abacus"), ({"op": "prayer"}, "operation prayer"),
        ({"dtype": "int3"}, "format int3"), ({"hidden": 0}, "hidden"), ({"tokens_per_rank": 1.5}, "tokens_per_rank"),
        ({"topk": math.inf}, "topk"), ({"time_us": "soon"}, "time_us"), ({"time_us": -1.0}, "time_us"), ({"gpus": 1},
        "go together"), ({"nodes": 3}, "go together"), ({"topk": 512}, "go together")]),
    "elementwise": (elementwise.read, KERNEL, [({"gpu": "abacus"}, "GPU abacus"), ({"gpu": math.nan}, "GPU nan"),
        ({"op": "prayer"}, "operation prayer"), ({"bytes_read": -1}, "bytes"), ({"bytes_read": 0, "bytes_written": 0},
        "bytes"), ({"bytes_written": math.inf}, "bytes"), ({"time_us": 0.0}, "time_us"), ({"time_us": "soon"},
        "time_us")]),
    "experts": (experts.read, BLOCK, [({"gpu": "h999"}, "GPU"), ({"gpu": "a100", "dtype": "fp8"}, "peak"),
        ({"dtype": "nvfp4"}, "format"), ({"num_tokens": "many"}, "num_tokens"), ({"hidden": -1}, "hidden"),
        ({"topk": 129}, "topk"), ({"ep": 3}, "evenly"), ({"gated": 2}, "gated"), ({"distribution": "lumpy"}, "lumpy"),
        ({"time_us": 0}, "time_us"), ({"source": None, "time_us": math.nan}, "time_us")]),
    "gemm": (gemm.read, TRAINING, [({"gpu": "abacus"}, "abacus"), ({"gpu": None}, "not known"), ({"dtype": "int3"},
        "int3"), ({"m": 0}, "m must"), ({"n": 1.5}, "n must"), ({"k": "many"}, "k must"), ({"time_us": -1}, "time"),
        ({"time_us": "inf"}, "time"), ({"layout": "tt"}, "layout"), ({"accumulate": "perhaps"}, "accumulate"),
        ({"out_dtype": "int3"}, "int3"), ({"gpu": "a100", "dtype": "fp8"}, "a100 has no peak rate in fp8")]),
    "grouped": (experts.read, GROUPED, [({"pass": "sideways"}, "sideways"), ({"out_dtype": "int3"}, "int3"),
        ({"groups": 0.5}, "groups")]),
}  # fmt: skip
"""By table: its reader, a row that is read, and changes without a price, each with a word of the reason."""


@pytest.mark.parametrize(
    ("table", "change", "reason"), [(name, *row) for name, (_, _, rows) in TABLES.items() for row in rows]
)
def test_a_row_without_a_price_is_left_out_with_its_reason(table: str, change: dict[str, Any], reason: str) -> None:
    read, row, _ = TABLES[table]
    samples, refused = read(pd.DataFrame([row | change, row], index=[7, 9]))
    assert list(refused) == [0] and reason in refused[0]
    assert [sample.index.tolist() for sample in samples] == [[1]]
