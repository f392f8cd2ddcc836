"""The words of torchtitan: flavors of models, settings and their keys, schedules, expert schemes, number formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshcast.simulator.formats.launch.table import ON, SettingRow

FLAVORS: Mapping[tuple[str, str], Any] = {
    ("llama3", "8b"): "llama3-8b",
    ("llama3", "70b"): "llama3-70b",
    ("llama3", "405b"): "llama3-405b",
    ("deepseek_v3", "16b"): "deepseek-v2-lite",
    ("deepseek_v3", "236b"): "deepseek-v2",
    ("deepseek_v3", "671b"): {"preset": "deepseek-v3", "mtp": 0},
    ("llama4", "17bx16e"): "llama4-scout",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
    **{("qwen3", size): f"qwen3-{size}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b")},
    ("llama3", "debugmodel"): {
        **{"layers": 6, "hidden": 256, "heads": 16, "ffn": 768, "vocab": 2048, "seq": 2048},
        **{"gated": True, "positions": "rope", "tied": False, "norm": "rmsnorm"},
    },
}
"""Models by torchtitan's name and flavor, which may have a suffix for the kind of attention (``8B_flex``)."""

ROWS = (
    SettingRow("training.seq_len", "batch.sequence"),
    SettingRow("training.max_context_length", "batch.sequence"),
    SettingRow("training.steps", "run.steps"),
    SettingRow("parallelism.tensor_parallel_degree", "plan.tp", silent=1),
    SettingRow("parallelism.pipeline_parallel_degree", "plan.pp", silent=1),
    SettingRow("parallelism.context_parallel_degree", "plan.cp", silent=1),
    SettingRow("parallelism.expert_parallel_degree", "plan.ep", silent=1),
    SettingRow(
        "parallelism.enable_sequence_parallel",
        "plan.tensor",
        "switch",
        {True: "megatron-sp", False: "megatron"},
        silent="megatron-sp",
    ),
    SettingRow("parallelism.enable_async_tensor_parallel", "framework.set.overlap.tp", "switch", ON, silent=False),
    SettingRow("compile.enable_async_tensor_parallel", "framework.set.overlap.tp", "switch", {True: True}),
    SettingRow("compile.enable", "framework.set.compile", "switch", ON, silent=False),
)

SCHEDULES = {
    **{"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved-1f1b", "loopedbfs": "breadth-first"},
    **{"zbvzerobubble": "zb-v", "dualpipev": "dualpipe-v"},
}
"""Schedules by torch's names in small letters, without "Schedule"."""

TORCH_NAMES = {
    **{"1f1b": "1F1B", "gpipe": "GPipe", "interleaved-1f1b": "Interleaved1F1B", "breadth-first": "LoopedBFS"},
    **{"zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV"},
}

EXPERTS = {"standard": "all-to-all", "deepep": "deepep", "hybridep": "hybrid-ep"}

FORMATS = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
