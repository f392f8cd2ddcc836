"""Small models and jobs that tests share: a test names one of them and changes what it is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GPT = {"layers": 8, "hidden": 64, "heads": 8, "vocab": 128, "seq": 64}
_ROPE = {"norm": "rmsnorm", "positions": "rope"}
_EXPERTS = {"experts": 8, "top_k": 2, "expert_ffn": 32}

MODELS: dict[str, dict[str, Any]] = {
    "gpt": _GPT,
    "experts": {**_GPT, "moe": _EXPERTS},
    "latent": {**_GPT, **_ROPE, "mla": {"q_lora_rank": 40, "kv_lora_rank": 64, "qk_nope": 32, "qk_rope": 16, "v": 24}},
    "hybrid": {
        **_GPT, "ffn": 48, "norm": "rmsnorm", "positions": "none", "tied": False,
        "ssm": {"pattern": "MM*-MM*-", "heads": 8, "head_dim": 8, "state": 16, "groups": 2, "chunk": 16},
    },
    "delta": {
        **_GPT, **_ROPE, "full_every": 4,
        "linear_attention": {
            "kind": "gated-delta-net", "heads": 8, "key_heads": 4, "key_dim": 8, "value_dim": 16, "chunk": 32,
        },
    },
    "video": {**_GPT, "frames": 8},
    "branches": {**_GPT, "branches": [{"layers": 2}, {"layers": 2}]},
    "contrastive": {
        **_GPT, "layers": 0, "seq": 24, "contrastive": 32,
        "branches": [
            {"name": "image", "tokens": 16, "layers": 4, "hidden": 48, "heads": 4, "input_width": 20},
            {"name": "text", "layers": 2, "projector": "linear", "projector_bias": False},
        ],
    },
    "encoder-decoder": {
        **_GPT, "positions": "none", "relative_buckets": 8, "cross_attention": True,
        "branches": [{"name": "encoder", "layers": 2, "tokens": 32, "bidirectional": True, "final_norm": True}],
    },
    "diffusion": {"layers": 4, "hidden": 64, "heads": 4, "seq": 64, "diffusion": {"inputs": 16}},
    "streams": {
        "layers": 4, "hidden": 64, "heads": 4, "seq": 64, "diffusion": {"inputs": 16}, "joint_attention": True,
        "branches": [{"name": "text", "layers": 0, "tokens": 16, "input_width": 48}],
    },
    "vision": {
        **_GPT, **_ROPE, "tied": True,
        "branches": [{"name": "vision", "tokens": 16, "layers": 2, "input_width": 12}, {"name": "text", "layers": 0}],
    },
}  # fmt: skip
"""One small model of every kind."""

_SAMPLES = {"distribution": {"kind": "lognormal", "mean": 120, "sigma": 1.2}, "count": 8, "join": "padding"}
_LENGTHS = [{"samples": 32 // 2**power, "sequence": 64 * 2**power} for power in range(5)]


def on_gpus(gpus: int, mesh: dict[str, int], *schemes: str) -> dict[str, Any]:
    """Returns the small GPT on some GPUs, its plan in long form: schemes are written `family/name over axis axis`."""
    entries = [scheme.partition(" over ") for scheme in schemes]
    plan = {"mesh": mesh, "schemes": [{"use": use, "over": over.split()} for use, _, over in entries]}
    return {"model": _GPT, "cluster": {"gpu": "h100-sxm", "gpus": gpus}, "plan": plan}


_1F1B, _ZERO, _TP = "pipeline/1f1b over pp", "data/zero-1 over dp", "tensor/megatron-sp over tp"

_ROUNDS = {"lengths": [{"sequence": 64, "cp": 4}, {"sequence": 64, "cp": 1}], "rounds": [[[0], [1], [1], [1], [1]]]}

JOBS: dict[str, dict[str, Any]] = {
    **{name: {"model": model, "cluster": "dgx-h100:2"} for name, model in MODELS.items()},
    "data parallel": on_gpus(4, {"dp": 4}, "data/ddp over dp"),
    "pipeline": on_gpus(2, {"pp": 2}, _1F1B),
    "context parallel": on_gpus(4, {"cp": 4}, "sequence/ring over cp"),
    "chimera": on_gpus(8, {"pp": 4, "dp": 2}, "pipeline/chimera over pp", _ZERO),
    "overlapped": on_gpus(16, {"pp": 2, "dp": 2, "tp": 4}, "tensor/flux over tp", _1F1B, _ZERO, _TP),
    "annotated": on_gpus(8, {"x": 8}, "tensor/annotated over x"),
    "routed": {
        "model": MODELS["experts"],
        "cluster": "dgx-h100:2",
        "plan": {
            "mesh": {"dp": 4},
            "views": {"experts": {"ep": 4}},
            "schemes": [{"use": "data/ddp", "over": "dp"}, {"use": "expert/all-to-all", "over": ["ep"]}],
        },
    },
    "lengths": {"model": _GPT, "cluster": "dgx-h100:1", "batch": {"lengths": _LENGTHS}},
    "samples": {"model": _GPT, "cluster": "dgx-h100:1", "batch": {"samples": _SAMPLES}},
    "rounds": {"model": _GPT, "cluster": "dgx-h100:1", "batch": _ROUNDS, "plan": {"dp": 4, "cp": 2}},
}
"""Every small model on 16 GPUs, and jobs with plans in long form."""

SPACES: dict[str, dict[str, Any]] = {
    "open": {"model": "gpt2-124m", "cluster": "dgx-h100:1", "batch": {"global": 32}},
}
"""A job to which an entry adds open fields, or none."""

SWEEPS: dict[str, dict[str, Any]] = {
    "job": {"job": {"model": "gpt2-124m", "cluster": "dgx-h100:2", "batch": {"global": 64}}},
}
SWEEPS["two fields"] = {**SWEEPS["job"], "vary": {"plan.tp": [1, 2], "plan.recompute": ["none", "full"]}}
"""A job of which nothing varies, and one of which two fields do."""

_ROW = {"index": 0, "plan.tp": 2, "plan.schedule": "1f1b", "status": "invalid", "reason": "a rule"}
ROWS: dict[str, list[dict[str, Any]]] = {"two": [_ROW, _ROW]}
"""Rows of a file of a sweep."""

CLUSTERS: dict[str, dict[str, Any]] = {
    "nodes": {"node": "dgx-h100", "nodes": 8},
    "gpus": {"gpu": "h100-sxm", "gpus": 16, "gpus_per_node": 8},
}
"""One cluster of nodes of the catalog, and one of GPUs."""


def change(base: Any, patch: Any) -> Any:
    """Returns `base` with the values of `patch`, mapping by mapping; a mapping of numbers changes a list's entries."""
    if isinstance(base, list) and isinstance(patch, Mapping):
        return [change(value, patch[index]) if index in patch else value for index, value in enumerate(base)]
    if not (isinstance(base, Mapping) and isinstance(patch, Mapping)):
        return patch
    return {**base, **{key: change(base.get(key), value) for key, value in patch.items()}}
