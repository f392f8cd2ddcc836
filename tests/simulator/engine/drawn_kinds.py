"""Jobs of every kind that engines play, lower or hold in memory in a way of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.models.model import Model
from tests.simulator.engine.engines import LAUNCH
from tests.simulator.scheduling.schedules import job as pipeline_job
from tests.strategies import EVERY, EVERY_EXAMPLE, FREE, NO_FLUSH, SLICED, TWO_WAYS, changed, jobs

Job = dict[str, Any]

PASSES = 80 if EVERY_EXAMPLE else 32
"""Of micro-batches through layers, up to which a job may have more of them."""


def with_schemes(job: Job, schemes: Sequence[Job], **plan: Any) -> Job:
    return {**job, "plan": {**job["plan"], "schemes": list(schemes), **plan}}


@st.composite
def sliced_jobs(draw: st.DrawFn, schedules: Sequence[str] = SLICED, **how: Any) -> Job:
    """Jobs with sequences in equal or unequal slices."""
    job = draw(jobs(("pipeline/gpipe",), **how))
    weights = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    use = draw(st.sampled_from(schedules))
    equal = draw(st.booleans()) or find_scheme(use).Options.model_fields["slices"].annotation is int
    count = len(weights) if equal else sum(weights)
    entry = {"use": use, "over": "pp", "slices": len(weights) if equal else weights}
    job = changed(job, attention="flash") if use == "pipeline/slimpipe" else job
    cut = with_schemes(job, [entry, *job["plan"]["schemes"][1:]])
    return {**cut, "batch": {**job["batch"], "sequence": job["model"].seq * count}}


def graph_entry(branches: int = 2, trunk: int = 1) -> Job:
    return {"use": "pipeline/graphpipe", "over": "pp", "branches": branches, "trunk": trunk}


@st.composite
def graph_jobs(draw: st.DrawFn, **more: Any) -> Job:
    """A job of a model with equal branches: on a graph of stages, or on one stage."""
    job = draw(jobs(("pipeline/1f1b",), **more).filter(lambda job: job["model"].moe is None))
    branches, d, trunk = draw(st.integers(2, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    pp = draw(st.sampled_from([branches * d + trunk, branches * d + trunk, 1]))  # the first is drawn always
    fields = job["model"].model_dump(exclude_unset=True, exclude={"tied", "mtp", "position_rows", "name"})
    depth, layers = d * draw(st.integers(1, 2)), trunk * draw(st.integers(1, 2))
    fields |= {"branches": [{"layers": depth}] * branches, "layers": layers, "seq": branches * fields["seq"]}
    mesh = {**job["plan"]["mesh"], "pp": pp}
    first = {"use": "pipeline/1f1b", "over": "pp"} if pp == 1 else graph_entry(branches, trunk)
    graph = with_schemes(job, [first, *job["plan"]["schemes"][1:]], mesh=mesh, views={}, partition="even")
    return {**graph, "model": Model(**fields), "cluster": {"gpu": "h100-sxm", "gpus": math.prod(mesh.values())}}


@st.composite
def halved_jobs(draw: st.DrawFn) -> Job:
    """Chimera with two backward passes for every forward pass. Experts have no capacity: two halves of their places, a
    whole number in each pass, may be more than both together."""
    job, option = draw(jobs(("pipeline/chimera",), launch=LAUNCH[:3], passes=40)), draw(st.sampled_from(CONCATENATIONS))
    pipeline, *others = job["plan"]["schemes"]
    pipeline = {**pipeline, "concatenation": option}
    larger = {
        key: job["batch"][key] * (2 if key == "global" or option == "backward-halving" else 1) for key in job["batch"]
    }
    moe = job["model"].moe and job["model"].moe.model_copy(update={"capacity": None})
    model = job["model"].model_copy(update={"moe": moe})
    return {**with_schemes(job, [pipeline, *others]), "batch": larger, "model": model}


CONCATENATIONS = ("forward-doubling", "backward-halving")
"""Options of Chimera under which a forward pass has the samples of two backward passes."""

MODULES = ("core_attn", "attention", "mlp", "moe", "shared_experts", "layernorm", "norm", "moe_act", "mla_up_proj")


@st.composite
def recomputed_jobs(draw: st.DrawFn) -> Job:
    """Selective recompute of any modules."""
    job = draw(jobs(FREE, recompute=False, launch=LAUNCH, passes=PASSES))
    modules = draw(st.lists(st.sampled_from(MODULES), min_size=1, max_size=4, unique=True))
    return with_schemes(job, [*job["plan"]["schemes"], {"use": "memory/recompute-selective", "modules": modules}])


@st.composite
def offloaded_jobs(draw: st.DrawFn) -> Job:
    """Activations of layers or states of the optimizer on the host."""
    job = draw(jobs(tuple(use for use in EVERY if use != "pipeline/varuna"), launch=LAUNCH, passes=PASSES))
    what = draw(st.sampled_from([["activations"], ["optimizer"], ["activations", "optimizer"]]))
    offload = {"use": "memory/offload", "layers": draw(st.sampled_from([None, 1, 2])), "what": what}
    return with_schemes(job, [*job["plan"]["schemes"], offload])


ZERO_BUBBLE = ("zb-h1", "zb-h2", "zb-v", "zb-auto", "v-half", "v-min")


def without_barrier(name: str, pp: int = 4, m: int = 12, **more: Any) -> Job:
    """A job of a zero-bubble schedule with post-validation."""
    job = load_job(pipeline_job(name, pp, m, **more)).to_dict()
    for entry in job["plan"]["schemes"]:
        if entry["use"] == f"pipeline/{name}":
            entry["post_validation"] = True
    return job


KINDS: dict[str, st.SearchStrategy[Job]] = {
    "pipelines": jobs(launch=LAUNCH, passes=PASSES),
    "every schedule": jobs(EVERY, launch=LAUNCH, passes=40),
    "two ways": jobs(TWO_WAYS, launch=LAUNCH, passes=PASSES),
    "no flush": jobs(NO_FLUSH, launch=LAUNCH, passes=24),
    "no barrier": st.builds(without_barrier, st.sampled_from(ZERO_BUBBLE), m=st.integers(8, 12)),
    "slices": sliced_jobs(launch=LAUNCH, passes=40),
    "graphs": graph_jobs(launch=LAUNCH),
    "halves of samples": halved_jobs(),
    "recompute": recomputed_jobs(),
    "offload": offloaded_jobs(),
}
