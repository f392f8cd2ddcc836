"""Small jobs for the tests of distributed measurements."""

from __future__ import annotations

from typing import Any

GPT = {"layers": 4, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 64, "seq": 16}
LLAMA = {
    **{"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 64, "seq": 16},
    **{"gated": True, "norm": "rmsnorm", "positions": "rope", "tied": False},
}

EXPERTS = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 16}}


def job(gpus: int = 2, model: dict[str, Any] | None = None, precision: str = "fp32", **degrees: Any) -> dict[str, Any]:
    """A job on cores of a processor, whose numbers are all of one format. degrees: of the short plan."""
    return {
        "model": model or GPT,
        "cluster": {"gpu": "cpu-core", "gpus": gpus},
        "framework": "reference",
        "precision": dict.fromkeys(("compute", "gradients", "main_weights", "moments"), precision),
        "batch": {"global": 8, "micro": 2, "sequence": 16},
        "plan": degrees,
    }


def context_job(scheme: str, data: str = "data/zero-1", model: dict[str, Any] | None = None) -> dict[str, Any]:
    """A job on two ranks that share every sequence."""
    schemes = [{"use": data, "over": "dp"}, {"use": scheme, "over": "cp"}]
    return job(model=model) | {"plan": {"mesh": {"dp": 1, "cp": 2}, "schemes": schemes}}
