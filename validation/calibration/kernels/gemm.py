"""Reads tables of measured dense GEMMs into samples for calibration, in two formats.

Tables of inference have m tokens times a weight of n x k; tables of training have also the transposition (``layout``
tn, nn, nt: forward, gradient of inputs, gradient of weights), accumulation and the output format. A measured time of an
8-bit GEMM of inference includes the kernels that quantise the activation, so a sample prices them with the GEMM, unless
its source measured the GEMM alone (`ALONE`), and those that convert scales, where a call starts them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from meshcast.hardware import load
from meshcast.hardware.gpu import GPU
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.kernels.deepgemm import deepgemm_tile
from meshcast.simulator.costs.kernels.fixed_tiles import TENSORRT_LLM_ON_ADA, sgl_kernel_tile
from meshcast.simulator.costs.kernels.sections import section_of
from meshcast.simulator.ir.ops import BYTES, Gemm, Memory, Work
from meshcast.validation.calibration.kernels.sample import DTYPES, GPUS, KernelSample, refuse_format
from meshcast.validation.calibration.tables.rows import find_name

PRODUCTS = frozenset({"gpu", "dtype", "m", "n", "k", "time_us", "source"})
LAYOUTS = PRODUCTS | {"batch", "layout", "accumulate", "out_dtype"}
COLUMNS = (PRODUCTS, LAYOUTS)
"""Columns that identify the two formats."""

LIBRARIES = (
    (r"trtllm|TensorRT", "tensorrt-llm"),
    (r"sglang", "sglang"),
    (r"vidur|vllm", "vllm"),
    (r"SimuMax|TransformerEngine|Transformer Engine", "transformer-engine"),
    (r"DeepGEMM", "deepgemm"),
    (r"Aceso", "megatron"),
    (r"cuBLAS", "cublas"),
    (r"ThunderKittens", "thunderkittens"),
    (r"aiter", "aiter"),
)
"""Library of the kernels by regular expression of a row's `source`."""
ALONE = r"DeepGEMM README|cuBLASLt|MAMF|ThunderKittens|aiter"
"""Sources (a regular expression) whose times of 8-bit GEMMs do not include quantisation."""
BY_ELEMENT = r"sglang 0\.5\.10\b"
"""Sources (a regular expression) whose casts with a scale for each 128 elements load single elements, as those of
TensorRT-LLM do until Hopper (fp8_quantize_1x128; later GPUs run another kernel)."""
SGL_KERNEL = "sglang-fp8"
"""Library of GEMMs with a scale for each token, whose tiles are known (`simulator.costs.kernels.fixed_tiles`)."""
DEEP_GEMM = "sglang-fp8-block"
"""Library of GEMMs with block scales, whose tiles are known, too (`simulator.costs.kernels.deepgemm`)."""
BLOCK_SCALES = "tensorrt-llm-fp8-block"
"""Library of GEMMs with block scales that has a single tile on Ada; elsewhere its tiles are not known."""
BY_ELEMENT_ON = ("ada", "hopper")
"""Architectures on which the casts of TensorRT-LLM with a scale for each 128 elements load single elements."""
OWN = ("pipeline_depth", "tile_overhead")
"""Coefficients of the GPU that libraries with known tiles have of their own, as they belong to a kernel. DeepGEMM adds
up in fp32 beside the tensor cores after every step, which small tiles wait for."""
GROUP, GROUPS_OF_A_BLOCK = 128, (1, 2, 4, 8, 16)
"""Elements with a scale, and how many groups of them a block of the cast may take: the most that divide their number
(`sgl_per_token_group_quant_8bit` of sgl-kernel/csrc/gemm/per_token_group_quant_8bit.cu, sgl-project/sglang)."""
INDEX, VECTOR = 8, 4
"""Bytes of an index of PyTorch's; elements of a vector in fp32."""
KINDS = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "fp8_block": "fp8-block"}
LARGE = 1024
"""Minimum m, n and k of the class "large"."""


@dataclass(frozen=True)
class _Same:
    """The fields in which the rows of a sample agree.

    Attributes:
        gpu, dtype: as the table names them.
        library: library of the kernels.
        alone: whether the times do not include quantisation of the activation.
        by_element: whether its source is among `BY_ELEMENT`.
        how: layout, accumulate and out_dtype of GEMMs of training; None for inference.
    """

    gpu: str
    dtype: str
    library: str
    alone: bool
    by_element: bool
    how: tuple[str, bool, str] | None


def read(table: pd.DataFrame) -> tuple[list[KernelSample], dict[int, str]]:
    """Returns samples, and by row the reason why no cost model can price it."""
    table = table.reset_index(drop=True)
    layouts = set(table.columns) >= LAYOUTS
    sizes = ("batch", "m", "n", "k") if layouts else ("m", "n", "k")
    table = table.assign(**{name: pd.to_numeric(table[name], errors="coerce") for name in (*sizes, "time_us")})
    refused: dict[int, str] = {}
    rows: dict[_Same, list[int]] = {}
    for at, row in enumerate(table.to_dict("records")):
        if reason := _odd(row, sizes, layouts):
            refused[at] = reason
        else:
            rows.setdefault(_same(row, layouts), []).append(at)
    return [_sample(same, table, np.array(index)) for same, index in rows.items()], refused


def _same(row: dict[Any, Any], layouts: bool) -> _Same:
    source = str(row["source"])
    how = None
    if layouts:
        how = str(row["layout"]).lower(), str(row["accumulate"]).lower() == "true", _format(row["out_dtype"])
    alone, by_element = (bool(re.search(pattern, source)) for pattern in (ALONE, BY_ELEMENT))
    return _Same(row["gpu"], row["dtype"], library(source, row["dtype"]), alone, by_element, how)


def _sample(same: _Same, table: pd.DataFrame, index: np.ndarray) -> KernelSample:
    m, n, k, micro = (table[name].to_numpy(float)[index] for name in ("m", "n", "k", "time_us"))
    form: Any = DTYPES[same.dtype]
    gpu = load("gpus", GPUS[same.gpu])
    parts: list[Work] = []
    if same.how:
        batch, (layout, accumulate, out) = table["batch"].to_numpy(float)[index], same.how
        product, kind = Gemm(m, n, k, batch, form, layout, accumulate, out), "training"  # type: ignore[arg-type]
    else:
        product, kind = Gemm(m, n, k, dtype=form), KINDS.get(same.dtype, "bf16")  # type: ignore[arg-type]
        if BYTES[form] == 1 and not same.alone:
            by_element = same.by_element or (
                gpu.architecture in BY_ELEMENT_ON and same.library.startswith("tensorrt-llm")
            )
            parts += _quantise(m, k, same.library, by_element)
            if same.library == DEEP_GEMM and gpu.architecture == "blackwell":
                parts += _convert_scales(n, k)
    classes = {"all": np.ones(len(index), bool), "large": (m >= LARGE) & (n >= LARGE) & (k >= LARGE)}
    tile = _known_tile(same.library, m, n, k, gpu)
    product, own = replace(product, tile=tile), OWN if tile else ()
    rows_of = section_of(product, gpu), GPUS[same.gpu], same.library, index, micro * 1e-6, kind, classes, own
    return KernelSample(*rows_of, parts=(*parts, product), tuned=not own)


def _known_tile(name: str, m: np.ndarray, n: np.ndarray, k: np.ndarray, gpu: GPU) -> tuple[Any, ...]:
    """Returns the fields of the tiles of a library's GEMMs, () where it has a kernel for every size."""
    if name == SGL_KERNEL:
        return sgl_kernel_tile(m, n, gpu.architecture)
    if name == DEEP_GEMM:
        return deepgemm_tile(m, n, k, gpu)
    return TENSORRT_LLM_ON_ADA if name == BLOCK_SCALES and gpu.architecture == "ada" else ()


def library(source: str, dtype: str) -> str:
    """Returns the library that a source measured in a number format of the tables, "" if it is unknown."""
    name = find_name(LIBRARIES, source)
    return name and name + ("-" + KINDS[dtype] if KINDS.get(dtype, "").startswith("fp8") else "")


def _quantise(tokens: Any, width: Any, name: str, by_element: bool) -> list[Work]:
    """Returns the kernels that quantise an activation [tokens, width] from 16 to 8 bits.

    by_element: whether casts with a scale for each 128 elements load a single element at a time.
    A scale for the whole tensor needs its maximum first, in a kernel of its own; sgl-kernel has one for each token.
    """
    wide, narrow = tokens * width * BYTES["bf16"], tokens * width * BYTES["fp8"]
    if name == SGL_KERNEL:
        return [Memory("row-cast", wide, narrow, rows=tokens)]
    largest: list[Work] = [Memory("amax", wide, 0 * narrow)] if name == "tensorrt-llm-fp8" else []
    if name == DEEP_GEMM and not by_element:
        return [Memory("group-cast", wide, narrow, rows=_count_cast_blocks(tokens, width))]  # type: ignore[arg-type]
    cast = "block-cast" if by_element and name.endswith("-block") else "cast"
    return [*largest, Memory(cast, wide, narrow)]


def _convert_scales(n: np.ndarray, k: np.ndarray) -> list[Work]:
    """Returns the kernels that convert the scales of a weight [n, k] from the fp32 of the benchmark, at each call.

    Two make an index of rows, one gathers the scales of each row, one packs them (transform_sf_into_required_layout in
    csrc/apis/layout.hpp, deepseek-ai/DeepGEMM @54e2261). PyTorch gathers rows of whole vectors by a block each.
    """
    index, scales = n * INDEX, n * k / GROUP * BYTES["fp32"]
    blocks = n * (k % (VECTOR * GROUP) == 0)
    moved = ("add", 0 * index, index), ("add", index, index), ("row-gather", index, scales), ("add", scales, scales / 4)
    return [
        Memory(what, read, write, rows=blocks if what == "row-gather" else 0)  # type: ignore[arg-type]
        for what, read, write in moved
    ]


def _count_cast_blocks(tokens: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Counts the blocks of a cast of [tokens, width] with a scale for each 128 elements, as sgl-kernel starts them."""
    groups = tokens * width / GROUP
    return groups / np.max([size * (groups % size == 0) for size in GROUPS_OF_A_BLOCK], axis=0)


def _format(dtype: Any) -> str:
    return DTYPES.get(str(dtype), str(dtype).replace("float32", "fp32"))


def _odd(row: dict[Any, Any], sizes: tuple[str, ...], layouts: bool) -> str:
    """Returns the reason why a row cannot be priced, "" if it can."""
    if reason := refuse_format(row):
        return reason
    if odd := [name for name in sizes if not (1 <= row[name] < np.inf and row[name] % 1 == 0)]:
        return f"{', '.join(odd)} must be whole numbers above 0"
    if not 0 < row["time_us"] < np.inf:
        return "time_us is no time"
    if layouts and str(row["layout"]).lower() not in ("tn", "nn", "nt"):
        return f"the layout {row['layout']} is not known"
    if layouts and str(row["accumulate"]).lower() not in ("true", "false"):
        return "accumulate is neither true nor false"
    if layouts and _format(row["out_dtype"]) not in BYTES:
        return f"the number format {row['out_dtype']} is not known"
    return ""
