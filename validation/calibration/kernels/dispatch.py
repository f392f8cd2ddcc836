"""Reads tables of token dispatch and combine among the ranks of experts."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd

from meshcast.hardware import load
from meshcast.hardware.link import Link
from meshcast.simulator.costs.collectives.dispatch import Dispatch
from meshcast.validation.calibration.kernels.sample import GPUS, KernelSample
from meshcast.validation.calibration.tables.rows import find_name

COLUMNS = (frozenset({"gpu", "library", "op", "gpus", "tokens_per_rank", "hidden", "topk", "num_experts", "time_us"}),)
"""Columns that identify the format."""
OPTIONAL = frozenset({"nodes", "sms", "dtype"})

HYBRID_EP = "hybrid-ep"
"""Library whose published figures are of calls of one size, kernels alone: the latency of more ranks and of nodes is
that of libraries measured at many sizes."""

LINK_SHARES = ("nvlink_share", "nic_share")
"""Its copy instructions (TMA) bring links nearer to their rate than the loads and stores of other kernels do."""

LIBRARIES = (
    (r"hybrid.?ep", HYBRID_EP),
    (r"deepep.*(normal|high)", "deepep"),
    (r"deepep.*(ll|low)", "deepep-low-latency"),
    (r"trtllm.*OneSided", "tensorrt-llm-one-sided"),
    (r"trtllm.*TwoSided", "tensorrt-llm-two-sided"),
)
"""Libraries, by patterns of the column `library`."""

OPERATIONS = {"dispatch": "dispatch", "combine": "combine", "combine_low_precision": "combine", "prepare": "prepare"}
DTYPES = {"fp8": "fp8", "bf16": "bf16", "bfloat16": "bf16", "float16": "fp16", "nvfp4": "fp4"}

DEGRADED = re.compile("identical table")
"""A source whose calls over eight nodes move 5 to 17 GB/s per port, less than half of what the same calls reach over
four nodes and low-latency ones over eight: their library is left open, so that nothing is fitted to them."""

PORT = "infiniband-ndr"
"""Network port of every GPU in a table: none states it, and all that span nodes had 400 Gb/s for each GPU."""

WHOLE = ("gpus", "tokens_per_rank", "hidden", "topk", "num_experts")


def read(table: pd.DataFrame) -> tuple[list[KernelSample], dict[int, str]]:
    """Returns samples, and the reasons of rows that cannot be priced."""
    table = table.reset_index(drop=True)
    table = table.assign(**{name: table.get(name) for name in ("nodes", "sms", "dtype", "source")})
    for name in (*WHOLE, "nodes", "sms", "time_us"):
        table[name] = pd.to_numeric(table[name], errors="coerce").astype(float)
    table["nodes"] = table["nodes"].fillna(1.0)
    refused = {at: reason for at, row in enumerate(table.to_dict("records")) if (reason := _refusal(row))}
    kept = table.drop(index=list(refused))
    samples = []
    same = ["gpu", "library", "op", "gpus", "nodes", "dtype"]
    for (gpu, program, op, ranks, nodes, dtype), rows in kept.groupby(same, sort=False, dropna=False):
        work = _work(GPUS[gpu], library(program), op, int(ranks), int(nodes), dtype, rows)
        # Four-bit combination is another kernel: it quantises and adds.
        name = library(program) + ("-fp4" if library(program) and op == "combine_low_precision" else "")
        if name == "deepep" and nodes >= 8 and rows["source"].astype(str).str.contains(DEGRADED).any():
            name = ""
        classes = {"all": np.ones(len(rows), bool), "nodes": np.full(len(rows), nodes > 1)}
        parts: Any = (work,)
        index, seconds, hybrid = rows.index.to_numpy(), rows["time_us"].to_numpy() * 1e-6, name == HYBRID_EP
        rows_of = work.operation, GPUS[gpu], name, index, seconds, op, classes, LINK_SHARES if hybrid else ()
        samples.append(KernelSample(*rows_of, parts=parts, tuned=not hybrid))
    return samples, refused


def library(program: str) -> str:
    """Returns the library that the column `library` names, "" if it is unknown."""
    return find_name(LIBRARIES, program)


def links_of(gpu: str) -> tuple[Link, Link]:
    """Returns the link that joins GPUs of this name within a node, and the port of each to the network."""
    described = load("gpus", gpu)
    return load("links", described.scale_up or described.host.name), load("links", PORT)


def _work(gpu: str, name: str, op: str, ranks: int, nodes: int, dtype: str, rows: pd.DataFrame) -> Dispatch:
    experts = rows["num_experts"].to_numpy()
    all_of_them = load("gpus", gpu).multiprocessors
    sms: Any = np.full(len(rows), float(all_of_them))
    low_latency = name == "deepep-low-latency"
    if low_latency:
        # A multiprocessor has enough warp groups for a single expert (DeepEP, csrc/kernels/internode_ll.cu).
        sms = np.ceil(experts / np.ceil(experts / all_of_them))
    stated: Any = rows["sms"].to_numpy()
    low = DTYPES[dtype]
    return Dispatch(
        OPERATIONS[op],
        rows["tokens_per_rank"].to_numpy(),
        rows["hidden"].to_numpy() * (op != "prepare"),
        rows["topk"].to_numpy(),
        experts,
        ranks,
        nodes,
        # Results come back added up, in 16 bits unless the operation says otherwise.
        "bf16" if op == "combine" and low != "fp16" else low,
        np.where(stated > 0, stated, sms),
        deduplicated=not low_latency,
        balanced=name.startswith("tensorrt"),
    )


def _refusal(row: dict[str, object]) -> str:
    if row["gpu"] not in GPUS:
        return f"the GPU {row['gpu']} is not known"
    if row["op"] not in OPERATIONS:
        return f"the operation {row['op']} is not known"
    if row["dtype"] not in DTYPES:
        return f"the number format {row['dtype']} is not known"
    for name in (*WHOLE, "nodes", "time_us"):
        value = row[name]
        if not (isinstance(value, float) and 0 < value < np.inf and (name == "time_us" or value % 1 == 0)):
            return f"{name} is {value}, which is no positive whole number"
    ranks, nodes, topk, experts = (
        int(str(row[name]).split(".")[0]) for name in ("gpus", "nodes", "topk", "num_experts")
    )
    if ranks % nodes or ranks < 2 or topk > experts:
        return f"{ranks} ranks, {nodes} nodes, {experts} experts and topk {topk} do not go together"
    return ""
