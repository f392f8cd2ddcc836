"""Reads tables of fused attention: prompts in serving programs, and forward and backward passes in training."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd

from meshcast.hardware import load
from meshcast.hardware.gpu import GPU
from meshcast.simulator.ir.ops import Attention, Memory
from meshcast.validation.calibration.kernels.sample import DTYPES, GPUS, KernelSample
from meshcast.validation.calibration.tables.rows import find_name

PROMPTS = frozenset({"gpu", "batch", "seq", "heads", "kv_heads", "head_dim", "dtype", "causal", "time_us", "source"})
PASSES = PROMPTS - {"head_dim"} | {"pass", "qk_head_dim", "v_head_dim"}
COLUMNS = (PROMPTS, PASSES)
"""Columns that identify the two formats."""
OPTIONAL = frozenset({"pass"})

LIBRARIES = (
    (r"trtllm.*encoder|tensorrt.*encoder", "tensorrt-llm-encoder"),
    (r"AIC trtllm|tensorrt-llm", "tensorrt-llm"),
    (r"sglang.*encoder.*(flash_attention_v3|fa3)", "flash-3-sglang-encoder"),
    (r"sglang.*encoder.*(flash_attention_v4|fa4)", "flash-4-sglang-encoder"),
    (r"sglang.*encoder.*triton", "triton-sglang-encoder"),
    (r"sglang.*\((fa3|flash_attention_v3)\)", "flash-3-sglang"),
    (r"sglang.*\((fa4|flash_attention_v4)\)", "flash-4-sglang"),
    (r"sglang.*\((flash_attention|fa2)\)", "flash-2-sglang"),
    (r"sglang.*trtllm_mha", "trtllm-gen-sglang"),
    (r"sglang.*flashinfer", "flashinfer-sglang"),
    (r"sglang.*triton", "triton-sglang"),
    (r"vllm.*fa3", "flash-3-vllm"),
    (r"vllm.*fa4", "flash-4-vllm"),
    (r"vllm.*trtllm", "trtllm-gen-vllm"),
    (r"vllm.*flash_attn", "flash-2-vllm"),
    (r"vllm.*flashinfer", "flashinfer-vllm"),
    (r"SimuMax|[Tt]ransformer.?[Ee]ngine", "transformer-engine"),
    (r"cuDNN", "cudnn"),
    (r"\(FlashAttention-3|, FlashAttention-3|tritonbench FA3", "flash-3"),
    (r"FlashAttention-2", "flash-2"),
)
"""Libraries, by patterns of sources; the first match counts."""

WIDTHS = (
    (r"tensorrt-llm", "hopper", "bf16", (64, 128, 192, 256)),
    (r"tensorrt-llm", "ada", "", (64, 96, 128, 256)),
    (r"tensorrt-llm|trtllm-gen|flashinfer|triton", "", "", (64, 128, 256, 512)),
    (r"flash-", "", "", (64, 96, 128, 192, 256)),
)
"""Head widths that kernels exist for, by library, architecture and format; other heads are padded with zeros. Heads
whose values have another width than their keys have kernels of their own."""

OTHERS = (
    (r"tensorrt-llm-encoder", "blackwell", lambda width: width % 16 != 0, "-older"),
    (r"flashinfer-.*", "", lambda width: width > 128, "-wide"),
    (r"triton-sglang-encoder", "", lambda width: width % 16 != 0, "-unaligned"),
    (r"triton-sglang-encoder", "", lambda width: width & (width - 1) != 0, "-masked"),
)
"""Head widths that a program runs with other kernels, and the suffix of their library: TensorRT-LLM's older kernels,
FlashInfer's blocks of 64 queries instead of 128 (FA2DetermineCtaTileQ in its utils.cuh), and Triton's masked loads,
which are narrow where Triton cannot rely on multiples of 16."""

TOKENS = 8192
"""Tokens of a batch from which on a forward pass is as long as in training."""

TRUTH = {"1": True, "0": False, "true": True, "false": False, "1.0": True, "0.0": False}
MEANINGS = {"qk": "the width of heads", "v": "the width of values"}
"""Columns as errors call them."""
PARTS = {"fwd": (False,), "bwd": (True,), "fwd_bwd": (False, True)}
"""The passes of a row, by the column `pass`: whether each is a backward pass."""


def read(table: pd.DataFrame) -> tuple[list[KernelSample], dict[int, str]]:
    """Returns samples, and the reasons of rows that cannot be priced."""
    rows = table.reset_index(drop=True).rename(columns={"qk_head_dim": "qk", "v_head_dim": "v"})
    if "head_dim" in rows:
        rows = rows.assign(qk=rows["head_dim"], v=rows["head_dim"])
    rows = rows.assign(**{"pass": rows["pass"].replace("", "fwd") if "pass" in rows else "fwd"})
    refused = {at: reason for at, row in enumerate(rows.to_dict("records")) if (reason := _refusal(row))}
    rows = rows.drop(index=list(refused))
    masks = [TRUTH[str(each).lower()] for each in rows["causal"]]
    libraries = [
        library(str(row["source"]), str(row["gpu"]), str(row["dtype"]), int(row["qk"]))
        for row in rows.to_dict("records")
    ]
    keys = ["gpu", "library", "dtype", "causal", "pass"]
    samples = []
    for key, group in rows.assign(causal=masks, library=libraries).groupby(keys, sort=True):
        gpu, name, dtype, causal, passes = (str(each) for each in key)
        samples.append(_sample(group, GPUS[gpu], name, DTYPES[dtype], causal == "True", PARTS[passes]))
    return samples, refused


def library(source: str, gpu: str, dtype: str, width: int) -> str:
    """Returns the library that a source measured, "" if it is unknown."""
    name = find_name(LIBRARIES, source)
    architecture = load("gpus", GPUS[gpu]).architecture
    for pattern, where, concerned, other in OTHERS:
        if re.fullmatch(pattern, name) and where in architecture and concerned(width):
            name += other
            break
    return name + "-fp8" if name and DTYPES[dtype] == "fp8" else name


def _refusal(row: dict[str, Any]) -> str:
    """Returns the reason why a row cannot be priced, "" if it can."""
    gpu, dtype = str(row["gpu"]), DTYPES.get(str(row["dtype"]), "")
    if gpu not in GPUS:
        return f"the GPU {gpu} is not known"
    if dtype not in load("gpus", GPUS[gpu]).peak:
        return f"{gpu} has no peak rate for {row['dtype']}"
    if row["pass"] not in PARTS:
        return f"the pass {row['pass']} is not one of {', '.join(PARTS)}"
    if str(row["causal"]).lower() not in TRUTH:
        return f"causal is {row['causal']}, which is neither 1 nor 0"
    for name in ("batch", "seq", "heads", "kv_heads", "qk", "v", "time_us"):
        value = pd.to_numeric(row[name], errors="coerce")
        if not 0 < value < np.inf:
            return f"{MEANINGS.get(name, name)} is {row[name]}, which is no positive number"
        if name != "time_us" and value != int(value):
            return f"{MEANINGS.get(name, name)} is {row[name]}, which is no whole number"
    if int(row["heads"]) % int(row["kv_heads"]):
        return f"{int(row['heads'])} heads cannot share {int(row['kv_heads'])} heads of keys evenly"
    return ""


def _sample(
    rows: pd.DataFrame, gpu: str, name: str, dtype: str, causal: bool, passes: tuple[bool, ...]
) -> KernelSample:
    """Makes the sample of the rows of a library, format and mask."""
    sizes = {key: rows[key].to_numpy(float) for key in ("batch", "seq", "heads", "kv_heads", "qk", "v")}
    batch, positions, heads, kv_heads, qk, v = sizes.values()
    wide, deep = (np.where(qk == v, _width(name, gpu, dtype, each), each) for each in (qk, v))
    share = 0.5 if causal else 1.0
    parts: list[Attention | Memory] = [
        Attention(batch, positions, positions, heads, kv_heads, wide, deep, share, backward, dtype)  # type: ignore[arg-type]
        for backward in passes
    ]
    written = 1 if dtype == "fp8" else 2
    queries = batch * positions * heads * qk
    if re.fullmatch(r"tensorrt-llm(-fp8)?", name):
        parts.append(Memory("rope", 2 * queries, written * queries))  # type: ignore[arg-type]
    elif name.endswith("-fp8"):
        parts.append(Memory("cast", 2 * queries, written * queries))  # type: ignore[arg-type]
    elif name == "triton-sglang-encoder":
        parts.append(Memory("add", _refetched_bytes(load("gpus", gpu), *sizes.values()), 0))  # type: ignore[arg-type]
    every = np.ones(len(rows), bool)
    classes = {"all": every} | ({"backward": every} if any(passes) else {"forward-8k": batch * positions >= TOKENS})
    kind = "backward" if any(passes) else "fp8" if dtype == "fp8" else "bf16"
    seconds = rows["time_us"].to_numpy(float) * 1e-6
    return KernelSample("attention", gpu, name, rows.index.to_numpy(), seconds, kind, classes, parts=tuple(parts))


def _refetched_bytes(gpu: GPU, batch: Any, positions: Any, heads: Any, kv_heads: Any, qk: Any, v: Any) -> np.ndarray:
    """Returns the bytes of keys and values that Triton's kernel for encoders fetches more than once.

    Its grid runs over sequences first, then heads, then blocks of 64 queries. If keys and values do not all fit into
    the L2, they come from memory for each round of blocks, of which three run on a multiprocessor at a time.
    """
    kept = 2 * batch * kv_heads * positions * (qk + v)
    together = np.maximum(3 * gpu.multiprocessors / (batch * heads), 1)
    return np.where(kept > gpu.l2, kept * positions / 64 / together, 0.0)


def _width(name: str, gpu: str, dtype: str, width: np.ndarray) -> np.ndarray:
    """Returns the head widths as the kernels of a library compute them."""
    architecture = load("gpus", gpu).architecture
    for pattern, where, number, known in WIDTHS:
        if re.match(pattern, name) and where in architecture and number in dtype:
            at = np.searchsorted(known, width)
            return np.where(at < len(known), np.array(known)[np.minimum(at, len(known) - 1)], width).astype(float)
    return width
