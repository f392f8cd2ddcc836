"""Lower bounds of the points of a space, held against forecasts of drawn points."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from meshcast.experiments.search.frontier.bounds import PointBounds
from meshcast.experiments.search.frontier.branch_and_bound import group_by_overlap
from meshcast.experiments.search.frontier.group_bounds import GroupBounds, Known
from meshcast.experiments.search.frontier.plan_search import ROUNDING
from meshcast.experiments.search.space.space import LayerGroup, Pipeline, Space, StepChoice
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.loading.load import load_job
from meshcast.validation.selfcheck.drawn_jobs import draw_job
from tests.draws import drawn

OPEN = {field: "auto" for field in ("overlap.tp", "overlap.dp", "overlap.pp", "overlap.updated_weights")}

JOBS = {
    "dense": {"model": {"preset": "gpt3-175b", "layers": 24}, "cluster": "dgx-a100:16", "batch": {"global": 192}},
    "unfused": {"model": "opt-6.7b", "cluster": "dgx-a100:2", "framework": "torchtitan", "batch": {"global": 64}},
    "cp": {
        "model": {"preset": "llama3-8b", "layers": 8},
        "cluster": "dgx-h100:2",
        "batch": {"global": 32, "sequence": 8192},
    },
    "experts": {"model": {"preset": "mixtral-8x7b", "layers": 8}, "cluster": "dgx-h100:2", "batch": {"global": 64}},
    "adapters": {
        "model": {"preset": "llama3-8b", "layers": 4},
        "cluster": "dgx-h100:1",
        "framework": "hf-trainer",
        "batch": {"global": 64, "sequence": 2048},
        "train": {"mode": "qlora"},
    },
    "buckets": {
        "model": {"preset": "gpt3-175b", "layers": 24},
        "cluster": "dgx-a100:2",
        "framework": "deepspeed",
        "batch": {"global": 64},
    },
}

LARGE_JOBS = {
    "gpt3": {"model": "gpt3-175b", "cluster": "dgx-a100:128", "batch": {"global": 1536, "sequence": 2048}},
    "gpt3-3072": {"model": "gpt3-175b", "cluster": "dgx-a100:384", "batch": {"global": 1536, "sequence": 2048}},
    "llama3": {"model": "llama3-405b", "cluster": "dgx-h100:2048", "batch": {"global": 2048, "sequence": 8192}},
    "mixtral": {"model": "mixtral-8x7b", "cluster": "dgx-h100:256", "batch": {"global": 2048, "sequence": 4096}},
    "deepseek": {"model": "deepseek-v3", "cluster": "hgx-h800:256", "batch": {"global": 15360, "sequence": 4096}},
}
"""Jobs on 1,024 to 16,384 GPUs: bounds of large clusters have had violations that small ones had not."""


def open_space(job: dict[str, Any]) -> Space:
    """The space of all fields of a job."""
    overlap = {field.partition(".")[2]: value for field, value in OPEN.items()}
    framework = {"name": job.get("framework", "megatron-core"), "set": {"overlap": overlap}}
    return Space({**job, "framework": framework, "plan": "auto"}, Path("."))


def space_of(name: str | int) -> Space:
    """The space of a job of this file by its name, or of one that is drawn with a seed."""
    return open_space((JOBS | LARGE_JOBS)[name]) if isinstance(name, str) else next(draw_spaces(name))


def draw_spaces(seed: int) -> Iterator[Space]:
    """Spaces of jobs drawn from all models, clusters, programs and precisions, with numbers of layers of which some
    divide into no stages, some into many chunks, and some with embedding and output layer as two more."""
    rng = random.Random(seed)
    while True:
        job = draw_job(rng)
        job["model"]["layers"] = rng.choice([4, 6, 7, 10, 11, 13, 14, 22, 23, 30])
        job["batch"] = {"global": rng.choice([16, 32, 48, 64, 96, 192]), "sequence": job["model"]["seq"]}
        with suppress(MeshcastError):
            space = open_space(job)
            if space.groups():
                yield space


Point = tuple[LayerGroup, Pipeline, StepChoice]


def hold_bounds(groups: GroupBounds, point: Point) -> tuple[float, float] | None:
    """Holds all bounds of a point against its forecast; the closest ones over it, of time and of memory. None if the
    point breaks a rule."""
    group, pipeline, step = point
    space, bounds = groups.space, groups.bounds
    try:
        forecast = forecast_step(load_job(space.job_of(*point)), bounds.shared)
    except MeshcastError:
        return None
    bound = bounds.bound_points(group, pipeline, [step])
    assert bound is not None, point
    found = bound[0] / forecast.step_time, bound[1] / forecast.peak_device
    assert max(found) <= 1 + ROUNDING, point
    choices = [one for one in space.choices(group, pipeline) if groups.scheme_of(one) == groups.scheme_of(step)]
    (family,) = (some for some in group_by_overlap(choices) if step in some)
    before_states = groups.bound_before_states(group, pipeline, family)
    for together in (before_states, bounds.bound_points(group, pipeline, family)):
        assert together is not None
        assert together[0] <= forecast.step_time * (1 + ROUNDING), point
        assert together[1] <= forecast.peak_device * (1 + ROUNDING), point
    alone = bounds.prices.bound_kernels(group), bounds.bound_chains(group, pipeline)
    assert max(alone) <= forecast.step_time * (1 + ROUNDING), point
    coarse, _ = groups.open(group)
    assert coarse is not None, point
    while coarse is not None:
        own = (at for at in range(len(coarse.places)) if coarse.pipeline(at) == pipeline)
        at = next((at for at in own if step in groups.steps(coarse, at)), None)
        assert at is not None or not forecast.fits, point
        if at is not None:
            assert coarse.seconds[at] <= forecast.step_time * (1 + ROUNDING), point
            assert coarse.nbytes[at] <= forecast.peak_device * (1 + ROUNDING), point
        coarse = groups.refine(coarse) if coarse.known is not Known.PASSES else None
    return found


def draw_points(space: Space, seed: int, keep: Callable[[Pipeline], bool] = lambda _: True) -> Iterator[Point]:
    """Points of a space, drawn without end: up to four of a group one after another. keep: pipelines to draw from."""
    rng, every_group = random.Random(seed), space.groups()
    while True:
        group = rng.choice(every_group)
        pipelines = [one for one in space.pipelines(group) if keep(one)]
        for _ in range(4 if pipelines else 0):
            pipeline = rng.choice(pipelines)
            yield group, pipeline, rng.choice(space.choices(group, pipeline))


def audit(
    name: str | int, seed: int, wanted: int, keep: Callable[[LayerGroup, Pipeline, StepChoice], bool] = lambda *_: True
) -> list[tuple[float, float]]:
    """Bounds over forecasts, of time and of memory, of `wanted` drawn points. keep: which points to draw."""
    space, found = space_of(name), list[tuple[float, float]]()
    groups = GroupBounds(space, PointBounds(space))
    for point in draw_points(space, seed):
        if keep(*point) and (ratios := hold_bounds(groups, point)) is not None:
            found.append(ratios)
        if len(found) == wanted:
            break
    return found


@pytest.mark.parametrize("name", drawn([*JOBS, *range(100)], keep=("unfused", "adapters", "buckets", 1)))
def test_no_bound_is_above_its_forecast(name: str | int) -> None:
    ratios = audit(name, 0, 10 if name in JOBS else 4)
    # Bounds that cut nothing would hold as well.
    least = 0.8 if name in JOBS else 0.5
    assert max(time for time, _ in ratios) > least and max(memory for _, memory in ratios) > least


def test_tensor_ranks_that_do_not_divide_the_sequence_are_no_broken_rule() -> None:
    space = space_of("gpt3-3072")
    group = next(one for one in space.groups() if one.tp == 3 and not one.sequence_parallel)
    assert PointBounds(space).prices.unit_layout(group) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE_JOBS)
def test_no_bound_is_above_its_forecast_on_a_large_cluster(name: str) -> None:
    audit(name, 0, 50)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("seed", range(1, 11))
def test_no_bound_is_above_its_forecast_at_many_points(name: str, seed: int) -> None:
    audit(name, seed, 50)


@pytest.mark.slow
def test_bounds_hold_with_expert_tensor_parallelism() -> None:
    ratios = audit("experts", 0, 12, lambda group, pipeline, step: group.etp is not None)
    assert max(time for time, _ in ratios) > 0.9 and max(memory for _, memory in ratios) > 0.9


@pytest.mark.parametrize("name", drawn(["cp", "experts"], keep=2))
@pytest.mark.slow
def test_bounds_hold_with_copies_of_shards(name: str) -> None:
    ratios = audit(name, 0, 12, lambda group, pipeline, step: step.shard is not None)
    assert max(time for time, _ in ratios) > 0.9 and max(memory for _, memory in ratios) > 0.9


@pytest.mark.parametrize("name", drawn(["dense", "cp", "experts"], keep=3))
@pytest.mark.slow
def test_bounds_hold_with_replicas_on_other_nodes(name: str) -> None:
    ratios = audit(name, 0, 8, lambda group, pipeline, step: pipeline.mesh_order == "dp-pp-cp-tp")
    assert max(time for time, _ in ratios) > 0.9 and max(memory for _, memory in ratios) > 0.9


@pytest.mark.parametrize(("schedule", "tp", "least"), drawn([("dualpipe", 2, 0.88), ("dualpipe-v", 4, 0.92)], keep=2))
def test_a_pair_takes_no_less_than_its_backward_pass(schedule: str, tp: int, least: float) -> None:
    """Token exchanges take as long as kernels: with the kernels of both passes alone, bounds are at 0.8."""
    plan = {"tp": [tp], "ep": [16], "pp": [2], "schedule": [schedule], "chunks": "auto"}
    batch = {"global": 1024, "micro": 1, "sequence": 4096}
    job = {"model": {"preset": "deepseek-v3", "layers": 8}, "cluster": "hgx-h800:8", "batch": batch, "plan": plan}
    space = Space(job, Path("."))
    (group,) = space.groups()
    (pipeline,) = space.pipelines(group)
    (step,) = space.choices(group, pipeline)
    ratios = hold_bounds(GroupBounds(space, PointBounds(space)), (group, pipeline, step))
    assert ratios is not None and ratios[0] > least


@pytest.mark.slow
def test_a_pass_without_kernels_puts_off_nothing() -> None:
    """Gradients of the weights of an embedding that is alone in its stage do not wait for its gradient pass."""
    space = space_of("llama3")
    group = LayerGroup(16, 1, 1, 16, "none", False, False, ("optimizer",))
    pipeline = Pipeline(64, "zb-v", 2, "ends-as-layers", None, "dp-pp-cp-tp")
    ratios = hold_bounds(
        GroupBounds(space, PointBounds(space)), (group, pipeline, StepChoice("zero-1", True, False, True))
    )
    assert ratios is not None and ratios[0] > 0.999


HOSTED = Pipeline(2, "zb-h1", 1, "ends-as-layers")
WHOLE = Pipeline(2, "breadth-first", 5, "ends-as-layers")


@pytest.mark.parametrize(
    ("job", "point"),
    [
        # A host that waits for routers launches fewer collectives without sequence parallelism.
        (
            {"cluster": "dgx-h100:4", "batch": {"global": 64, "sequence": 8192}},
            (
                LayerGroup(16, 1, 4, 1, "selective", False, False, (), 2),
                HOSTED,
                StepChoice("zero-1", True, False, True),
            ),
        ),
        # GEMMs write gradients faster than they add them, and reduced gradients are not added.
        (
            {"cluster": "dgx-h100:2", "batch": {"global": 64}, "framework": "torchtitan"},
            (LayerGroup(4, 1, 1, 32, "none", True, False, (), 1), WHOLE, StepChoice("zero-2", True, False, True)),
        ),
        # Parts of a GEMM in fp32 end before the power limit slows them, and take less than the whole.
        (
            {
                "model": {"preset": "gpt3-175b", "layers": 24},
                "cluster": "dgx-h100:4",
                "batch": {"global": 192, "sequence": 2048},
                "precision": "fp32",
            },
            (
                LayerGroup(8, 1, 1, 1, "none", True, True, ()),
                Pipeline(2, "interleaved-1f1b", 13, "ends-as-layers", None, "pp-dp-cp-tp"),
                StepChoice("zero-2", False, True, True),
            ),
        ),
        # A backward pass does not wait for the reductions of the stage before, which take longer than it.
        (
            {"model": {"preset": "gpt3-175b", "layers": 24}, "cluster": "dgx-a100:16", "batch": {"global": 192}},
            (
                LayerGroup(2, 1, 1, 1, "selective", False, True, ()),
                Pipeline(2, "breadth-first", 13, "ends-as-layers", None, "dp-pp-cp-tp"),
                StepChoice("zero-1", True, True, True, 2),
            ),
        ),
    ],
)
def test_tight_bounds_hold(job: dict[str, Any], point: Point) -> None:
    space = open_space({"model": {"preset": "mixtral-8x7b", "layers": 8}, **job})
    ratios = hold_bounds(GroupBounds(space, PointBounds(space)), point)
    assert ratios is not None and ratios[0] > 0.99


HOST_BOUND = {"layers": 16, "hidden": 512, "heads": 8, "vocab": 1024, "seq": 512}


@pytest.mark.parametrize("launch_s", [1e-5, 5e-5])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zb-h2"])
def test_a_host_that_launches_ahead_of_the_input_bounds_a_stage(schedule: str, launch_s: float) -> None:
    """The host of a later stage launches its first kernels before a micro-batch has come to it."""
    cluster = {"gpu": "h100-sxm", "gpus": 4, "gpus_per_node": 8}
    framework = {"name": "megatron-core", "set": {"launch_s": launch_s}}
    batch = {"global": 4, "micro": 1}
    plan = {"pp": [4], "schedule": schedule}
    job = {"model": HOST_BOUND, "cluster": cluster, "batch": batch, "framework": framework, "plan": plan}
    space = Space(job, Path("."))
    (group,) = space.groups()
    (pipeline,) = space.pipelines(group)
    (step,) = space.choices(group, pipeline)
    ratios = hold_bounds(GroupBounds(space, PointBounds(space)), (group, pipeline, step))
    assert ratios is not None and ratios[0] > 0.98
