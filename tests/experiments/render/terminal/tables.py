"""Small tables of measurements, one of each format, for the tests of commands; their times are made up."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROWS: dict[str, list[dict[str, Any]]] = {
    "gemm": [
        {"gpu": "h100", "dtype": dtype, "m": m, "n": 4096, "k": 1024, "time_us": 0.02 * m, "source": "AIC sglang 0.5"}
        for dtype in ("bfloat16", "fp8_block")
        for m in (1, 512, 4096)
    ],
    "training": [
        {
            "gpu": "b200",
            "dtype": "bfloat16",
            "batch": 1,
            "m": 4096,
            "n": 1536,
            "k": 5120,
            "layout": layout,
            "pass": what,
        }
        | {"accumulate": what == "wgrad", "out_dtype": "fp32", "time_us": 60.5, "source": "SimuMax b200.json"}
        for layout, what in (("TN", "fwd"), ("NN", "dgrad"), ("NT", "wgrad"))
    ],
    "grouped": [
        {"gpu": "a100_pcie", "dtype": "bf16", "groups": 8, "m_per_group": 640, "n": 3072, "k": 5120, "pass": what}
        | {"accumulate": what == "wgrad", "out_dtype": "bf16", "time_us": 900.0, "source": "SimuMax a100_pcie.json"}
        for what in ("fwd", "dgrad", "wgrad")
    ],
    "attention": [
        {"gpu": "h100", "batch": 2, "seq": seq, "heads": 16, "kv_heads": 4, "head_dim": 128, "dtype": "bfloat16"}
        | {"causal": causal, "time_us": 0.05 * seq, "source": "AIC sglang 0.5 (fa3)"}
        for seq in (1, 2048)
        for causal in (0, 1)
    ],
    "passes": [
        {"gpu": "h100", "pass": what, "batch": 1, "seq": 4096, "heads": 16, "kv_heads": 16, "qk_head_dim": 192}
        | {"v_head_dim": 128, "dtype": "bfloat16", "causal": 1, "time_us": 700.0, "source": "SimuMax", "tflops": 1.0}
        for what in ("fwd", "bwd", "fwd_bwd")
    ],
    "experts": [
        {"gpu": "h200", "dtype": "bfloat16", "num_tokens": 4096, "hidden": 2048, "inter": 1536, "topk": 8, "tp": 1}
        | {"num_experts": 128, "ep": 4, "distribution": how, "gated": 1, "time_us": 500.0, "source": "AIC trtllm"}
        for how in ("balanced", "power_law_1.2", "zipf_1.0")
    ],
    "calls": [
        {"gpu": "h200", "library": "deepep_normal", "op": op, "gpus": 16, "nodes": 2, "tokens_per_rank": 512, "sms": 20}
        | {"hidden": 7168, "topk": 8, "num_experts": 256, "dtype": "bf16", "time_us": 300.0, "source": "AIC DeepEP"}
        for op in ("dispatch", "combine")
    ],
    "elementwise": [
        {"gpu": "a100", "op": op, "tokens": 64, "bytes_read": 2**22, "bytes_written": 2**22, "time_us": 9.0}
        | {"source": "vidur mlp.csv"}
        for op in ("norm", "gated_act", "residual_add")
    ],
    "streams": [{"gpu": "h100", "op": op, "TBps": 2.9, "source": "BabelStream"} for op in ("copy", "triad", "dot")],
    "collectives": [
        {"gpu": "h100", "interconnect": joined, "op": op, "gpus": 8 * nodes, "nodes": nodes, "bytes": 2**26}
        | {"time_us": 400.0, "algo": "default", "source": "AIC nccl-tests (half)"}
        for op in ("all_reduce", "all_gather", "all_to_all")
        for nodes, joined in ((1, "NVLink4+NVSwitch"), (2, "8x400G NDR InfiniBand per node"))
    ],
}
"""Tables by format."""

KIND = {name: "collectives" if name == "collectives" else "kernels" for name in ROWS}


def put(path: Path, rows: Sequence[dict[str, Any]], columns: Iterable[str] = ()) -> Path:
    """Writes rows as CSV. columns: which, in this order; all of the first row if none."""
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(columns) or list(rows[0]), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path
