"""Jobs drawn at random: models, GPUs, plans and programs as people combine them, small enough to be played in
milliseconds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.job.framework import framework_names
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job

NODES = ("dgx-a100", "dgx-h100", "hgx-h200", "dgx-b200", "gb200-nvl72", "hgx-h800", "mi300x-8", "l40s-4", "p5")
SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe", "breadth-first", "chimera", "hanayo")
OTHER_SCHEDULES = (
    *("bpipe", "dapple", "dualpipe-v", "dynapipe", "gems", "mpress", "pipedream", "pipedream-2bw", "seq1f1b"),
    *("slimpipe", "terapipe", "v-half", "v-min", "v-zb", "varuna", "zb-auto", "zb-h2"),
)
SCHEMES = {
    "tp_scheme": ("async-tp", "coconet", "domino", "flux", "megatron", "summa-2d", "tesseract", "userbuffers", "3d"),
    "cp_scheme": (
        *("burst-attention", "dist-flash-attn", "megatron-cp", "ring", "rsa", "token-ring", "ulysses", "wallfacer"),
    ),
    "ep_scheme": (
        *("all-gather-dispatch", "comet", "deepep", "deepspeed-moe", "dropless", "fastermoe", "fastmoe", "flexmoe"),
        *("gshard", "hybrid-ep", "janus", "lina", "pipemoe", "prophet", "scattermoe", "schemoe", "smartmoe", "tutel"),
    ),
    "dp_scheme": ("byteps", "horovod", "mics", "zero-infinity", "zero-offload", "zero-plus-plus", "gemini", "diloco"),
}
"""Named schemes by the key of the plan that names them."""
PRECISIONS = ("bf16", "bf16", "fp8-delayed", "fp8-blockwise", "fp16", "fp32")
PARTITIONS = (None, None, "ends-as-layers")
RECOMPUTES = ("none", "none", "full", "selective")
TRIES = 200
"""Draws for a job: a plan whose numbers do not divide, or that a scheme does not admit, is drawn anew."""


def draw_jobs(seed: int) -> Iterator[tuple[dict[str, Any], Job]]:
    """Endless valid jobs, each as a mapping and as it was loaded. Equal seeds give equal jobs."""
    source = random.Random(seed)
    while True:
        for _ in range(TRIES):
            described = draw_job(source)
            try:
                job = load_job(described)
                resolve_plan(job)
            except MeshcastError:
                continue
            yield described, job
            break
        else:
            raise RuntimeError(f"none of {TRIES} drawn jobs is valid")  # pragma: no cover  every tenth draw is


def draw_job(source: random.Random) -> dict[str, Any]:
    """One job, valid or not."""
    pick = source.choice
    tp, pp, cp = pick((1, 1, 2, 4, 8)), pick((1, 1, 2, 4)), pick((1, 1, 1, 2))
    model = _draw_model(source, layers=pp * pick((1, 2, 3)) * pick((1, 2)))
    plan: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "recompute": pick(RECOMPUTES)}
    if "moe" in model:
        plan["ep"] = pick((1, 2, 4, 8))
    if pp > 1:
        plan["schedule"] = pick(SCHEDULES if source.random() < 0.6 else OTHER_SCHEDULES)
        plan["chunks"] = pick((1, 2)) if plan["schedule"] != "interleaved-1f1b" else 2
        if plan["chunks"] == 1:
            del plan["chunks"]
        if partition := pick(PARTITIONS):
            plan["partition"] = partition
    plan |= pick(({}, {"zero": 0}, {"zero": 2}, {"zero": 3}, {"fsdp": True}))
    if source.random() < 0.4:
        keys = [key for key, of in zip(SCHEMES, (tp > 1, cp > 1, "moe" in model, True), strict=True) if of]
        key = pick(keys)
        plan[key] = pick(SCHEMES[key])
        if key == "dp_scheme":
            plan = {name: value for name, value in plan.items() if name not in ("zero", "fsdp")}
    return {
        "model": model,
        "cluster": f"{pick(NODES)}:{pick((1, 2, 4, 8))}",
        "framework": pick([name for name in framework_names() if name != "reference"]),
        "precision": pick(PRECISIONS),
        "batch": {"global": pick((8, 16, 32, 64)), "micro": pick((1, 1, 2)), "sequence": model["seq"]},
        "plan": plan,
    }


def _draw_model(source: random.Random, layers: int) -> dict[str, Any]:
    """A decoder of today's kinds: GPT or Llama, some with experts."""
    pick = source.choice
    heads, gated = pick((16, 32, 64)), pick((True, True, False))
    model: dict[str, Any] = {
        "layers": layers,
        "hidden": heads * pick((64, 128)),
        "heads": heads,
        "kv_heads": pick((heads, 8)),
        "ffn": pick((4096, 8192, 14336)),
        "vocab": pick((32000, 50304, 128256)),
        "seq": pick((1024, 2048, 4096)),
        "gated": gated,
        "norm": "rmsnorm" if gated else "layernorm",
        "positions": "rope" if gated else "learned",
    }
    if source.random() < 0.3:
        experts = pick((8, 16, 64))
        model["moe"] = {"experts": experts, "top_k": pick((1, 2, 4)), "expert_ffn": pick((1024, 4096))}
        model["moe"]["capacity"] = pick((None, 1.0))
    return model
