"""Reads tables of grouped GEMMs, and of whole expert blocks.

A block is one rank's permute, up and gate GEMM, activation, down GEMM and unpermute, in a CUDA graph and without
communication. Its `num_tokens` counts the tokens of all `ep` ranks; routing.py computes the rows of each expert of the
measured rank. Tables do not state which kernels a program fuses; that is known of the programs:

- trtllm-gen gathers rows within the GEMM, and in bf16 computes the activation there as well; with 8-bit operands its
  other kernels process the rows of all tokens, also of those that experts of other ranks get.
- Triton's kernels gather rows within the GEMM, too, and have a single tile where nobody tuned them. The
  benchmark of sglang runs its whole layer with the tokens of all ranks: choices of other ranks' experts have rows of
  zeros, which its other kernels process. Or it runs the kernels alone (`runs_kernels_alone`): a rank then holds the
  tokens that chose any of its experts, and its first expert takes their other choices, too.
- FlashInfer's CUTLASS kernels have a single tile where nobody tuned them, too (`FIRST_TILE`).
- all others permute, activate and unpermute in separate kernels; fp8 operands are quantised on the way.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from meshcast.simulator.ir.ops import BYTES, Gemm, Memory, Work
from meshcast.validation.calibration.kernels import routing
from meshcast.validation.calibration.kernels.sample import DTYPES, GPUS, KernelSample, describe_cell, refuse_format
from meshcast.validation.calibration.tables.rows import find_name

BLOCKS = frozenset({"gpu", "dtype", "num_tokens", "topk", "num_experts", "ep", "distribution", "time_us", "source"})
PRODUCTS = frozenset({"gpu", "dtype", "groups", "m_per_group", "pass", "out_dtype", "time_us", "source"})
COLUMNS = (BLOCKS, PRODUCTS)
"""Columns that identify the two formats."""
OPTIONAL = frozenset({"hidden", "inter", "tp", "gated", "n", "k", "accumulate"})

LIBRARIES = (
    (r"fused_moe_triton", "triton"),
    (r"flashinfer_cutlass", "flashinfer"),
    (r"flashinfer_trtllm|min_latency", "trtllm-gen"),
    (r"DeepGEMM", "deepgemm-kernels"),
    (r"deepgemm", "deepgemm"),
    (r"moe_torch_flow", "cutlass"),
    (r"SimuMax|Transformer ?Engine", "transformer-engine"),
)
"""Libraries, by patterns of sources."""

UNTUNED = "triton"
FIRST_TILE = 128, 128, (16,)
"""Output tile of CUTLASS's grouped kernels on Hopper that nobody tuned, as sglang runs those of FlashInfer: the first
candidate (get_candidate_tiles_sm90 in cutlass_heuristic.cpp of NVIDIA/TensorRT-LLM, which FlashInfer has a copy of)."""
NOT_TUNED = (UNTUNED, "flashinfer")
"""Libraries, by the beginnings of their names, whose kernels were not tuned to the sizes of a table."""
KERNELS_ALONE = r"sglang 0\.5\.10\b"
"""Sources (a regular expression) whose benchmark runs Triton's kernels alone for every model."""
PLAIN_ROUTERS = frozenset({(4096, 14336, 8), (6144, 16384, 8), (2816, 704, 128)})
"""Hidden, inter and experts of models for which later ones do, too: Mixtral 8x7B and 8x22B, and Gemma 4 26B."""
UNGATED = frozenset({(2688, 1856, 128), (2048, 5120, 512), (8192, 5120, 512)})
"""Hidden, inter and experts of the Nemotron-H models, whose experts have two matrices and a squared ReLU.

The column `gated` says so for TensorRT-LLM alone. Benchmarks since sglang 0.5.14 run these experts likewise
(sglang_moe_is_gated in collector/cases/models/NemotronHForCausalLM_cases.yaml of ai-dynamo/aiconfigurator
@095f58a51c4c); three matrices would be read at 1.2 times the memory bandwidth of a B200.
"""
KNOWS_UNGATED = r"sglang 0\.5\.14\b"
"""Sources (a regular expression) whose benchmark knows that."""
MIN_TOKENS = 4096
"""Least tokens of the class "tuned-4k", of all programs but Triton's: those that tune their kernels, and FlashInfer's.

The class "own-4k" has those of them whose kernels were tuned for the model itself. The benchmark of TensorRT-LLM keeps
tuned kernels in files named by number format, hidden, inter / tp and num_experts / ep. Where two models of a table
share a name, the second found no entry of its own and ran an untuned kernel, at a fifth of the rate; the table does
not say which that was (collector/trtllm/collect_moe.py in ai-dynamo/aiconfigurator @095f58a51c4c).
"""
CACHED = r"moe_torch_flow_(?:cutlass|nongated)"
"""Sources that use these files. DeepGEMM (fp8_block) is not tuned."""

SIZES = ("num_tokens", "hidden", "inter", "topk", "num_experts", "tp", "ep", "gated")
SHAPE = ("groups", "m_per_group", "n", "k")
PASSES: dict[str, Any] = {"fwd": "tn", "dgrad": "nn", "wgrad": "nt"}
"""Layouts of the GEMMs, by the column `pass`."""

ROUTED = 16
"""Most experts of a token that TensorRT-LLM selects in a kernel; for more, PyTorch reads the logits once for each
(tensorrt_llm/_torch/modules/fused_moe/routing.py)."""

INDEX = 8
"""Bytes of an expert's index and its weight."""

SIZES_OF_GROUPS = 8
"""Number of group sizes that the experts of a row are sorted into."""


def read(table: pd.DataFrame) -> tuple[list[KernelSample], dict[int, str]]:
    """Returns samples, and the reasons of rows that cannot be priced."""
    table = table.reset_index(drop=True)
    blocks = set(table.columns) >= BLOCKS
    names = SIZES if blocks else SHAPE
    table = table.assign(**{name: _numbers(table, name) for name in (*names, "time_us")})
    refuse = _refuse_block if blocks else _refuse_product
    records = table.to_dict("records")
    refused = {at: reason for at, row in enumerate(records) if (reason := _refuse(row, names) or refuse(row))}
    if not blocks:
        table["out_dtype"] = _results(table)
    groups: dict[tuple[str, ...], list[int]] = {}
    for at, row in enumerate(table.to_dict("records")):
        if at not in refused:
            rest = () if blocks else (row["pass"], row["out_dtype"], str(_true(row.get("accumulate"))))
            key = row["gpu"], row["dtype"], library(str(row["source"]), row["dtype"]), *rest
            groups.setdefault(key, []).append(at)
    if blocks:
        table["shared"] = _tuned_for_another(table.drop(index=list(refused)))
    make = _block if blocks else _product
    return [make(table.iloc[rows], np.array(rows), key[2]) for key, rows in groups.items()], refused


def library(source: str, dtype: str) -> str:
    """Returns the library that a source measured, "" if it is unknown. Kernels of 8-bit operands have another."""
    name = find_name(LIBRARIES, source)
    return name and name + {"fp8": "-fp8", "fp8_block": "-fp8-block"}.get(dtype, "")


def _block(rows: pd.DataFrame, index: np.ndarray, name: str) -> KernelSample:
    """Makes the sample of the expert blocks of a GPU, library and number format."""
    dtype = rows["dtype"].iloc[0]
    form, wide = DTYPES[dtype], BYTES["bf16"]
    operand = BYTES[form]
    tokens, hidden, inter, topk, experts, tp, ep, gated = (rows[name].to_numpy(float) for name in SIZES)
    gated = np.where(_is_of(rows, UNGATED) & _has_source(rows, KNOWS_UNGATED), 0.0, gated)
    inner, outer = inter / tp, (1 + gated) * inter / tp
    fused, gathers = name.startswith("trtllm-gen"), name.startswith(UNTUNED)
    loads = _loads(rows, tokens, kernels_alone=runs_kernels_alone(rows) if gathers else np.zeros(len(rows), bool))
    counts, sizes = loads.counts, loads.sizes
    chosen, number = (counts * sizes).sum(axis=0), counts.sum(axis=0)
    mean = chosen / np.maximum(number, 1)
    tile: Any = ()
    if gathers:
        tokens, tile = loads.arrived, _tile(loads.arrived, experts / ep, operand, loads.distinct)
    elif name == "flashinfer":
        tile = FIRST_TILE
    groups: Any = ((counts, sizes),)
    up = Gemm(mean, outer, hidden, number, form, what="experts", groups=groups, tile=tile)
    down = Gemm(mean, hidden, inner, number, form, what="experts", groups=groups, tile=tile)
    places = tokens * topk if gathers or (fused and operand < wide) else chosen
    zeros = places - chosen if gathers else 0.0  # that the GEMMs write
    parts: list[Work] = [up, down, Memory("permute", places * hidden * wide, (tokens + zeros) * hidden * wide)]
    rounds = np.where(topk > ROUTED, topk, 1) if not fused else 1
    parts.append(Memory("router", rounds * tokens * experts * BYTES["fp32"], tokens * topk * INDEX))
    parts += [Memory("permute", tokens * topk * INDEX, tokens * topk * INDEX)] * (1 if fused else 4)
    if not fused and not gathers:
        parts.append(Memory("permute", tokens * hidden * wide, chosen * hidden * operand))
    elif operand < wide:
        parts.append(Memory("cast", tokens * hidden * wide, tokens * hidden * operand))
    if not fused or operand < wide:
        parts.append(Memory("activation", places * outer * wide, places * inner * operand + zeros * outer * wide))
    kind = "experts-" + ("fp8-block" if dtype == "fp8_block" else form if operand < wide else "bf16")
    return _sample(rows, index, name, tuple(parts), kind, tokens)


class _Loads(NamedTuple):
    """What the experts of the measured rank process, an array of sizes x rows or of rows each.

    Attributes:
        counts: experts with a number of rows.
        sizes: that number.
        arrived: tokens that the rank processes.
        distinct: share of the rows of an expert that are not the same token again.
    """

    counts: np.ndarray
    sizes: np.ndarray
    arrived: np.ndarray
    distinct: np.ndarray


def _tile(tokens: np.ndarray, experts: np.ndarray, operand: float, distinct: np.ndarray) -> tuple[Any, ...]:
    """Returns the output tiles of Triton's kernel where no file was tuned for it: small ones for few tokens.

    get_default_config in sglang, python/sglang/srt/layers/moe/fused_moe_triton/fused_moe_triton_config.py.
    experts: of the rank. distinct: share of the rows of a tile that are not the same token again.
    """
    few = tokens <= experts if operand == BYTES["bf16"] else np.zeros(len(tokens), bool)
    height, width = np.where(few, 16.0, 64.0), np.where(few, 32.0, 64.0 if operand == BYTES["bf16"] else 128.0)
    return height, height * distinct, (width,)


def runs_kernels_alone(rows: pd.DataFrame) -> np.ndarray:
    """Returns whether sglang's benchmark runs its Triton kernels alone, and not its whole layer, by row.

    The rank then holds the tokens alone that chose any of its experts, and indices of other ranks' experts are 0
    (build_rank0_workloads and benchmark_config in collector/sglang/collect_moe.py of ai-dynamo/aiconfigurator
    @095f58a51c4c). Since sglang 0.5.14 models whose router is no plain softmax run in the layer, which knows its own
    experts (use_framework_layer there; the routers are in collector/cases/models).
    """
    return _is_of(rows, PLAIN_ROUTERS) | _has_source(rows, KERNELS_ALONE)


def _is_of(rows: pd.DataFrame, models: Collection[tuple[int, int, int]]) -> np.ndarray:
    """Returns whether the experts of a row are those of some models, by their hidden, inter and number."""
    sizes = zip(rows["hidden"], rows["inter"], rows["num_experts"], strict=True)
    return np.array([size in models for size in sizes], bool)


def _has_source(rows: pd.DataFrame, pattern: str) -> np.ndarray:
    return rows["source"].astype(str).str.contains(pattern).to_numpy(bool)


def _loads(rows: pd.DataFrame, tokens: np.ndarray, kernels_alone: np.ndarray) -> _Loads:
    """Returns what the experts of the measured rank process. kernels_alone: see `runs_kernels_alone`."""
    counts, sizes = np.zeros((2, SIZES_OF_GROUPS, len(rows)))
    arrived, distinct = tokens.copy(), np.ones(len(rows))
    asked = zip(*(rows[name] for name in ("distribution", "num_tokens", "topk", "num_experts", "ep")), strict=True)
    for column, (distribution, sent, topk, experts, ranks) in enumerate(asked):
        loads = routing.loads(distribution, *map(int, (sent, topk, experts, ranks)))
        if kernels_alone[column] and ranks > 1:
            arrived[column] = routing.count_arrived(distribution, loads, sent)
            more = max(arrived[column] * topk - loads.sum(), 0.0)
            distinct[column] = 1 - more / max(loads.sum() + more, 1.0) * (1 - 1 / topk)
            loads = np.sort(np.append(loads[:-1], loads[-1] + more))[::-1]
        for at, (count, size) in enumerate(routing.histogram(loads, SIZES_OF_GROUPS)):
            counts[at, column], sizes[at, column] = count, size
    return _Loads(counts, sizes, arrived, distinct)


def _product(rows: pd.DataFrame, index: np.ndarray, name: str) -> KernelSample:
    """Makes the sample of the grouped GEMMs of a GPU, library, number format and pass."""
    groups, m, n, k = (rows[name].to_numpy(float) for name in SHAPE)
    first = rows.iloc[0]
    form, out, accumulate = DTYPES[first["dtype"]], first["out_dtype"], _true(first.get("accumulate"))
    equal: Any = ((groups, m),)
    sizes: dict[str, Any] = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}
    height, width, depth = sizes[first["pass"]]
    part = Gemm(height, width, depth, groups, form, PASSES[first["pass"]], accumulate, out, "experts", equal)
    return _sample(rows, index, name, (part,), "grouped", groups * m)


def _sample(
    rows: pd.DataFrame, index: np.ndarray, name: str, parts: tuple[Work, ...], kind: str, tokens: np.ndarray
) -> KernelSample:
    tuned = not name.startswith(NOT_TUNED)
    many = (tokens >= MIN_TOKENS) & (not name.startswith(UNTUNED))
    shared = rows["shared"].to_numpy(bool) if "shared" in rows else np.zeros(len(index), bool)
    classes = {"all": np.ones(len(index), bool), "tuned-4k": many, "own-4k": many & ~shared}
    gpu, seconds = GPUS[rows["gpu"].iloc[0]], rows["time_us"].to_numpy(float) * 1e-6
    own = ("tile_edge",) if name.startswith(UNTUNED) else ()
    return KernelSample("grouped", gpu, name, index, seconds, kind, classes, own, parts=parts, tuned=tuned)


def _true(cell: object) -> bool:
    return str(cell).lower() == "true"


def _results(table: pd.DataFrame) -> list[str]:
    """Returns the number format of each result.

    SimuMax states that of outputs, also where a gradient is added to a main gradient in another format: its lists come
    first with main gradients in fp32, then again in bf16.
    """
    formats: list[str] = []
    seen: set[tuple[object, ...]] = set()
    for row in table.to_dict("records"):
        out = DTYPES.get(str(row["out_dtype"]), str(row["out_dtype"]).replace("float32", "fp32"))
        key = tuple(row[name] for name in ("gpu", "dtype", "pass", *SHAPE, "source"))
        if row["pass"] == "wgrad" and str(row["source"]).startswith("SimuMax") and key not in seen:
            out = "fp32"
        seen.add(key)
        formats.append(out)
    return formats


def _tuned_for_another(rows: pd.DataFrame) -> pd.Series:
    """Returns whether the kernels of a row may have been tuned for another model of the table."""
    models: dict[tuple[float, ...], set[tuple[float, float]]] = {}
    split = [(tp, ep) for tp in set(rows["tp"]) for ep in set(rows["ep"])]
    most = (rows["tp"] * rows["ep"]).max()
    for hidden, inter, experts in set(zip(rows["hidden"], rows["inter"], rows["num_experts"], strict=True)):
        for tp, ep in split:
            if tp * ep <= most and not inter % tp and not experts % ep:
                models.setdefault((hidden, inter / tp, experts / ep), set()).add((inter, experts))
    names = zip(rows["hidden"], rows["inter"] / rows["tp"], rows["num_experts"] / rows["ep"], strict=True)
    several = pd.Series([len(models[name]) > 1 for name in names], index=rows.index, dtype=bool)
    return several & _has_source(rows, CACHED) & (rows["dtype"] != "fp8_block")


def _refuse(row: dict[Any, Any], names: tuple[str, ...]) -> str:
    """Returns the reason why a row of either format cannot be priced, "" if it can."""
    if reason := refuse_format(row):
        return reason
    if odd := [n for n in names if n != "gated" and not (row[n] >= 1 and row[n] % 1 == 0)]:
        return f"{', '.join(f'{n} {describe_cell(row[n])}' for n in odd)}: must be whole numbers above 0"
    return "" if 0 < row["time_us"] < np.inf else f"time_us {describe_cell(row['time_us'])}, which is no time"


def _refuse_block(row: dict[Any, Any]) -> str:
    if row["gated"] not in (0, 1):
        return "gated is " + ("not given" if np.isnan(row["gated"]) else f"{row['gated']:g}, which is neither 0 nor 1")
    if row["topk"] > row["num_experts"]:
        return f"topk is {row['topk']:g}, which is more than {row['num_experts']:g} experts"
    if row["num_experts"] % row["ep"] or row["inter"] % row["tp"]:
        shares = f"{row['num_experts']:g} by ep {row['ep']:g}, or inter {row['inter']:g} by tp {row['tp']:g}"
        return f"num_experts cannot be divided evenly: {shares}"
    known = routing.is_supported(row["distribution"])
    return "" if known else f"the distribution {row['distribution']} is not known"


def _refuse_product(row: dict[Any, Any]) -> str:
    if row["pass"] not in PASSES:
        return f"the pass {row['pass']} is not known"
    known = str(row["out_dtype"]) in {*DTYPES, "fp32", "float32"}
    return "" if known else f"the number format {row['out_dtype']} is not known"


def _numbers(table: pd.DataFrame, name: str) -> np.ndarray:
    """Returns a column as numbers, NaN if the table lacks it; blocks are gated unless the table says otherwise."""
    if name not in table:
        return np.full(len(table), 1.0 if name == "gated" else np.nan)
    return pd.to_numeric(table[name], errors="coerce").to_numpy(float)
