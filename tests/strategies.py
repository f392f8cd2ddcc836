"""What Hypothesis draws: models, settings and whole jobs, small enough to be lowered and played in milliseconds."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from simulator.models import Model
from simulator.schedule import Shape

ONE = st.just(1)
TENSOR_RANKS = st.sampled_from([1, 2, 4])

SECONDS = st.integers(1, 64).map(lambda n: n / 8)
"""Durations that add up without rounding."""


@st.composite
def models(draw: st.DrawFn, tensor: int = 1, layers: int | None = None) -> Model:
    """A small decoder whose heads, widths, vocabulary and sequence divide by `tensor`; every kind of block occurs."""
    kv_heads = tensor * draw(st.integers(1, 2))
    heads = kv_heads * draw(st.sampled_from([1, 1, 2, 3]))
    head_dim = 2 * draw(st.integers(1, 8))
    gelu = draw(st.booleans())
    return Model(
        layers=layers or draw(st.integers(1, 4)),
        hidden=4 * draw(st.integers(1, 16)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=tensor * draw(st.integers(1, 64)),
        vocab=tensor * draw(st.integers(1, 128)),
        seq=tensor * draw(st.integers(1, 16)),
        gated=not gelu,
        positions=draw(st.sampled_from(["learned", "rope", "none"])),
        tied=draw(st.booleans()),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm", "layernorm1p"])),
        dropout=draw(st.sampled_from([0.0, 0.1])),
    )


@st.composite
def shapes(draw: st.DrawFn, v: st.SearchStrategy[int] = ONE, most_p: int = 8, most_m: int = 24) -> Shape:
    """Devices, micro-batches and chunks of a pipeline; half of them with m a multiple of p."""
    p = draw(st.integers(1, most_p))
    m = draw(st.integers(1, most_m)) if draw(st.booleans()) else p * draw(st.integers(1, max(1, most_m // p)))
    return Shape(p, m, draw(v))


PIPELINES = ("pipeline/1f1b", "pipeline/gpipe", "pipeline/interleaved-1f1b")
TENSORS = ("tensor/megatron", "tensor/megatron-sp")
DATAS = ("data/ddp", "data/zero-1")
MODULES = ("core_attn", "attention", "mlp")


@st.composite
def partitions(draw: st.DrawFn, layers: int, stages: int) -> str | list[int]:
    """Layers of every stage: the same number, or one or two moved to another stage; the ends may have none."""
    each = [layers // stages] * stages
    for _ in range(draw(st.integers(0, 2))):
        giver, taker = draw(st.integers(0, stages - 1)), draw(st.integers(0, stages - 1))
        if each[giver] > (0 if giver in (0, stages - 1) else 1):
            each[giver] -= 1
            each[taker] += 1
    return "even" if len(set(each)) == 1 else each


@st.composite
def jobs(
    draw: st.DrawFn,
    pipelines: tuple[str, ...] = PIPELINES,
    tensors: tuple[str, ...] = TENSORS,
    datas: tuple[str, ...] = DATAS,
    recompute: bool = True,
    tensor: st.SearchStrategy[int] = TENSOR_RANKS,
    launch: tuple[float, ...] = (0.0,),
    passes: int = 0,
) -> dict[str, Any]:
    """A whole job in long form that no rule refuses.

    launch: seconds of the host an op. passes: of micro-batches through layers, up to which there may be more of them.
    """
    t, dp, pp = draw(tensor), draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 4]))
    pipeline = draw(st.sampled_from(pipelines))
    chunks = draw(st.integers(2, 3)) if "interleaved" in pipeline else 1
    stages = pp * chunks
    model = draw(models(t, stages * draw(st.integers(1, 2))))
    most = min(40, passes // model.layers)
    m = pp * draw(st.integers(1, max(3, most // pp))) if chunks > 1 else draw(st.integers(1, max(6, most)))
    micro = draw(st.integers(1, 2))
    schemes: list[dict[str, Any]] = [
        {"use": pipeline, "over": "pp", "chunks": chunks},
        {"use": draw(st.sampled_from(datas)), "over": "dp"},
        {"use": draw(st.sampled_from(tensors)), "over": "tp"},
    ]
    if recompute and draw(st.booleans()):
        modules = draw(st.lists(st.sampled_from(MODULES), min_size=1, max_size=3, unique=True))
        schemes.append({"use": "memory/recompute-selective", "modules": modules})
    elif recompute and draw(st.booleans()):
        schemes.insert(draw(st.integers(1, 3)), {"use": "memory/recompute-full", "layers": draw(st.integers(0, 2))})
    settings = {
        "overlap": {"dp": draw(st.booleans()), "pp": draw(st.booleans())},
        "bucket": {"elements": float(draw(st.sampled_from([1, 500, 40_000_000]))), "elements_per_rank": 0.0},
        "regather": draw(st.booleans()),
        "attention": draw(st.sampled_from(["flash", "unfused"])),
        "launch_s": draw(st.sampled_from(launch)),
    }
    return {
        "model": model,
        "cluster": {"gpu": "h100-sxm", "gpus": math.prod((pp, dp, t))},
        "framework": {"name": "megatron-core", "set": settings},
        "batch": {"global": m * micro * dp, "micro": micro},
        "plan": {
            "mesh": {"pp": pp, "dp": dp, "tp": t},
            "schemes": schemes,
            "partition": draw(partitions(model.layers, stages)),
        },
    }


def changed(job: dict[str, Any], **set_: Any) -> dict[str, Any]:
    """The same job with further habits of the framework set."""
    framework = job["framework"]
    return {**job, "framework": {**framework, "set": {**framework["set"], **set_}}}
