"""A published run whose every field is stated, its changes, and questions to its job."""

from __future__ import annotations

import math
from copy import deepcopy
from functools import cache
from typing import Any

from meshcast.validation.published.answer import answers
from meshcast.validation.published.mapping import MappedJob
from meshcast.validation.published.rows import PublishedRun, read_shipped

SPEC: dict[str, Any] = {
    "class": "dense", "stack": "megatron-core", "stack_version": "0.12",
    "gpu": "h100-sxm", "gpus": 64, "gpus_per_node": 8, "scale_up_domain": 8,
    "inter": {"kind": "infiniband", "gbps_per_gpu": 400, "stated": True},
    "precision": "bf16", "grad_dtype": "fp32", "main_weights": "fp32", "optimizer": "adamw",
    "compile": False, "cuda_graphs": False,
    "model": {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336, "gated": True,
        "vocab": 128256, "seq": 8192, "tied": False, "norm": "rmsnorm", "positions": "rope", "attention": "flash",
        "qk_layernorm": False, "mtp": 0,
    },
    "mesh": {"dp": 8, "tp": 4, "pp": 2, "cp": 1, "ep": 1, "etp": None, "vpp": 4},
    "batch": {"micro": 1, "global": 128, "seq": 8192}, "schedule": "interleaved", "pipeline_split": "even",
    "sequence_parallel": True, "sharding": "zero1", "shard_group": 8,
    "recompute": {"kind": "none", "layers": None, "modules": None}, "offload": {"kind": "none", "layers": None},
    "overlap": {"dp": True, "tp": False, "pp": True, "ep": None}, "memory_kind": None,
    "filled": ["overlap.dp:convention"],
}  # fmt: skip

MOE = {
    "experts": 64, "top_k": 4, "expert_ffn": 1408, "shared_experts": 0, "shared_ffn": None, "first_dense": 0,
    "dense_ffn": None, "every": 1, "capacity": None, "routing": "balanced",
}  # fmt: skip
EXPERTS = {"kind": "moe", "model__moe": MOE, "mesh__ep": 8, "mesh__etp": 1}
LORA = {"kind": "lora", "lora": {"rank": 16, "targets": ["qkv", "proj"]}}


@cache
def _answer_shipped() -> list[dict[str, Any]]:
    return list(answers(read_shipped(), workers=1))


def answer_shipped() -> list[dict[str, Any]]:
    """Returns the answers to all shipped runs, made once, as they are before they are compared."""
    return deepcopy(_answer_shipped())


def row(measured: dict[str, Any] | None = None, of: dict[str, Any] | None = None, **changes: Any) -> PublishedRun:
    """The run above with some fields changed; ``mesh__tp=2`` changes one inside, `of` those beside the spec."""
    spec = {key: dict(value) if isinstance(value, dict) else value for key, value in SPEC.items()}
    for key, value in changes.items():
        outer, _, inner = key.partition("__")
        name = "class" if outer == "kind" else outer
        if inner:
            spec[name][inner] = value
        else:
            spec[name] = value
    run = PublishedRun.model_validate({"id": "test-1", "spec": spec, "measured": measured or {}})
    return run.model_copy(update=of or {})


def uses(mapped: MappedJob, family: str = "") -> list[str]:
    """The schemes of a job, or those of a family."""
    return [scheme["use"] for scheme in mapped.job["plan"]["schemes"] if scheme["use"].startswith(family)]


def entry(mapped: MappedJob, use: str) -> dict[str, Any]:
    return next(scheme for scheme in mapped.job["plan"]["schemes"] if scheme["use"] == use)


def sigma(mapped: MappedJob) -> float:
    return math.hypot(*mapped.job["framework"]["set"]["sigmas"].values())
