"""Tables of layouts, executed operator by operator among gloo ranks, train as the reference model does alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.simulator.schemes.drawn_tables import draw_job
from tests.validation.distributed.jobs import GPT, LLAMA, job

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

from tests.validation.ranks import run_task  # noqa: E402

GPT_UNTIED = {**GPT, "tied": False}
LLAMA_WIDE = {**LLAMA, "kv_heads": 4}
SQUARE = {"x": 2, "y": 2}
MATRICES = ("qkv", "proj", "up", "down", "embedding", "head")


def job_of(model: dict[str, Any], mesh: dict[str, int], *schemes: dict[str, Any]) -> dict[str, Any]:
    gpus = math.prod(mesh.values())
    return {**job(gpus, model), "batch": {"global": 8, "micro": 4}, "plan": {"mesh": mesh, "schemes": list(schemes)}}


def annotate(over: Any, *tables: dict[str, Any], **stream: str) -> dict[str, Any]:
    return {"use": "tensor/annotated", "over": over, "tables": tables, "stream": stream}


def divide(model: dict[str, Any], *tables: dict[str, Any], **stream: str) -> dict[str, Any]:
    return job_of(model, SQUARE, annotate(["x", "y"], *tables, **stream))


def on_two(model: dict[str, Any], *tables: dict[str, Any], **stream: str) -> dict[str, Any]:
    return job_of({**model, "layers": 2}, {"x": 2}, annotate(["x"], *tables, **stream))


MIXED = [
    {"divide": {"all": ["a", "f", "v", "s"]}},
    {"layers": "1-2", "divide": {"core": "b", "up": {"x": "h", "y": "f"}}},
]
HIDDEN = {"all": {"x": "h", "y": "s"}, "core": {"x": "a", "y": "s"}, "act": {"x": "f"}, "loss": {"x": "v", "y": "s"}}
AT_REST = {"all": {"x": "h", "y": ["a", "f", "v"]}}
DAILY = {
    "hidden": on_two(GPT_UNTIED, {"divide": {"all": "h", "core": "a", "act": "f", "loss": "v"}}, x="h"),
    "megatron-sp": on_two(LLAMA_WIDE, {"divide": {"all": ["a", "f", "v", "s"]}}, x="s"),
    "positions": on_two(LLAMA_WIDE, {"divide": {"all": "s"}, "rest": {name: "h" for name in MATRICES}}, x="s"),
    "samples and a data scheme": job_of(
        {**GPT_UNTIED, "layers": 2},
        {"x": 2},
        {"use": "data/fsdp", "over": "x"},
        annotate(["x"], {"divide": {"all": "b"}}),
    ),
}
FOUR = {
    "megatron over two axes": divide(GPT_UNTIED, {"divide": {"all": ["a", "f", "v"]}}),
    "megatron-sp and samples": divide(
        LLAMA_WIDE, {"divide": {"all": {"x": ["a", "f", "v", "s"], "y": "b"}}}, x="s", y="b"
    ),
    "2-D, weights at rest": divide(
        LLAMA_WIDE,
        {"divide": {"all": {"x": "b", "y": ["a", "f", "v"]}}, "rest": {name: {"x": "h"} for name in MATRICES}},
        x="b",
    ),
    "hidden and positions": divide(GPT_UNTIED, {"divide": HIDDEN}, x="h"),
    "other tables in some layers": divide(LLAMA_WIDE, *MIXED, x="s", y="s"),
    "ulysses: heads for attention alone": divide(GPT_UNTIED, {"divide": {"all": "s", "core": "a"}}, x="s", y="s"),
    "all weights at rest": divide(GPT_UNTIED, {"divide": {"all": {"x": "b", "y": "s"}}, "rest": AT_REST}, x="b"),
    "a data scheme on an axis": job_of(
        LLAMA_WIDE,
        SQUARE,
        {"use": "data/fsdp", "over": "x"},
        annotate(["x", "y"], {"divide": {"all": {"x": "b", "y": ["a", "f", "v"]}, "norm1": {"x": "s"}}}),
    ),
    "schemes that only shard operators": job_of(
        LLAMA_WIDE,
        {"cp": 2, "tp": 2},
        {"use": "sequence/ulysses", "over": "cp"},
        {"use": "tensor/megatron-sp", "over": "tp"},
    ),
}


def draw(seed: int) -> dict[str, Any]:
    """A drawn table for a model that the executor has, without its data scheme's formats."""
    sizes = {"layers": 4, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 64, "seq": 16, "tied": False}
    models = [GPT_UNTIED | sizes, LLAMA_WIDE | sizes]
    fields = draw_job(seed, models, ranks=4).job
    return {**job(4), **{key: fields[key] for key in ("model", "batch", "plan")}}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_layouts_train_as_one_rank_does(world: int) -> None:
    """In fp64, with gradients relative to the largest of their parameter."""
    jobs = DAILY if world == 2 else {**FOUR, **{f"drawn {seed}": draw(seed) for seed in range(2)}}
    results = run_task({"what": "layouts", "device": "cpu", "jobs": list(jobs.values())}, world)
    for name, result in zip(jobs, results, strict=True):
        layouts = result["layouts"]
        assert layouts["loss"] < 1e-12 and layouts["gradient"] < 1e-10, (name, layouts)
        assert layouts["compared"] >= (39 if world == 4 else 21), name
