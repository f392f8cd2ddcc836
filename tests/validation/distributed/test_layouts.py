"""Tables of layouts, executed operator by operator on four gloo ranks, train as the reference model does alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.simulator.schemes.drawn_tables import draw_job
from tests.validation.distributed.jobs import GPT, LLAMA, job
from tests.validation.distributed.processes import run

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

GPT_UNTIED = {**GPT, "tied": False}
LLAMA_WIDE = {**LLAMA, "kv_heads": 4}
SQUARE = {"x": 2, "y": 2}
MATRICES = ("qkv", "proj", "up", "down", "embedding", "head")


def job_of(model: dict[str, Any], mesh: dict[str, int], *schemes: dict[str, Any]) -> dict[str, Any]:
    return {**job(4, model), "batch": {"global": 8, "micro": 4}, "plan": {"mesh": mesh, "schemes": list(schemes)}}


def tables(model: dict[str, Any], *found: dict[str, Any], **stream: str) -> dict[str, Any]:
    return job_of(model, SQUARE, {"use": "tensor/annotated", "over": ["x", "y"], "tables": found, "stream": stream})


MIXED = [
    {"divide": {"all": ["a", "f", "v", "s"]}},
    {"layers": "1-2", "divide": {"core": "b", "up": {"x": "h", "y": "f"}}},
]
HIDDEN = {"all": {"x": "h", "y": "s"}, "core": {"x": "a", "y": "s"}, "act": {"x": "f"}, "loss": {"x": "v", "y": "s"}}
JOBS = {
    "megatron over two axes": tables(GPT_UNTIED, {"divide": {"all": ["a", "f", "v"]}}),
    "megatron-sp and samples": tables(
        LLAMA_WIDE, {"divide": {"all": {"x": ["a", "f", "v", "s"], "y": "b"}}}, x="s", y="b"
    ),
    "2-D, weights at rest": tables(
        LLAMA_WIDE,
        {"divide": {"all": {"x": "b", "y": ["a", "f", "v"]}}, "rest": {name: {"x": "h"} for name in MATRICES}},
        x="b",
    ),
    "hidden and positions": tables(GPT_UNTIED, {"divide": HIDDEN}, x="h"),
    "other tables in some layers": tables(LLAMA_WIDE, *MIXED, x="s", y="s"),
    "ulysses: heads for attention alone": tables(GPT_UNTIED, {"divide": {"all": "s", "core": "a"}}, x="s", y="s"),
    "all weights at rest": tables(
        GPT_UNTIED, {"divide": {"all": {"x": "b", "y": "s"}}, "rest": {"all": {"x": "h", "y": ["a", "f", "v"]}}}, x="b"
    ),
    "a data scheme on an axis": job_of(
        LLAMA_WIDE,
        SQUARE,
        {"use": "data/fsdp", "over": "x"},
        {
            "use": "tensor/annotated",
            "over": ["x", "y"],
            "tables": [{"divide": {"all": {"x": "b", "y": ["a", "f", "v"]}, "norm1": {"x": "s"}}}],
        },
    ),
    "schemes that only shard operators": job_of(
        LLAMA_WIDE,
        {"cp": 2, "tp": 2},
        {"use": "sequence/ulysses", "over": "cp"},
        {"use": "tensor/megatron-sp", "over": "tp"},
    ),
}
SEEDS = range(2)
SLOW = (
    *("megatron over two axes", "2-D, weights at rest", "ulysses: heads for attention alone", "drawn 0", "drawn 1"),
    *("hidden and positions", "schemes that only shard operators"),
)
"""Jobs whose layouts are in others, too."""


def drawn(seed: int) -> dict[str, Any]:
    """A drawn table for a model that the executor has, without its data scheme's formats."""
    sizes = {"layers": 4, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 64, "seq": 16, "tied": False}
    models = [GPT_UNTIED | sizes, LLAMA_WIDE | sizes]
    found = draw_job(seed, models, ranks=4).job
    return {**job(4), **{key: found[key] for key in ("model", "batch", "plan")}}


@pytest.fixture(scope="module")
def check_of(made_once: Any) -> Callable[[str], Any]:
    """The comparison of a job by its name; all of `SLOW` are made together, and so are all others."""

    def make(slow: bool) -> dict[str, Any]:
        every = {**JOBS, **{f"drawn {seed}": drawn(seed) for seed in SEEDS}}
        jobs = {name: one for name, one in every.items() if (name in SLOW) is slow}
        task = {"what": "layouts", "device": "cpu", "jobs": list(jobs.values())}
        return {name: one["layouts"] for name, one in zip(jobs, run(task, 4), strict=True)}

    @cache
    def made(slow: bool) -> dict[str, Any]:
        return made_once(f"layouts-{slow}", lambda: make(slow))  # type: ignore[no-any-return]

    return lambda name: made(name in SLOW)[name]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in (*JOBS, *(f"drawn {seed}" for seed in SEEDS))
    ],
)
@pytest.mark.slow
def test_layouts_train_as_one_rank_does(check_of: Callable[[str], Any], name: str) -> None:
    """In fp64, with gradients relative to the largest of their parameter."""
    found = check_of(name)
    assert found["loss"] < 1e-12 and found["gradient"] < 1e-10, found
    assert found["compared"] >= 39


def test_schemes_that_change_ops_are_refused() -> None:
    from meshcast.hardware.errors import PlanError
    from meshcast.validation.distributed.layouts.executor import compare_layouts

    ring = job_of(GPT_UNTIED, {"cp": 4}, {"use": "sequence/ring", "over": "cp"})
    with pytest.raises(PlanError, match="only shard operators"):
        compare_layouts(ring)
    with pytest.raises(PlanError, match="tied"):
        compare_layouts(tables(GPT))
