"""Lower bounds of the points of a space, held against forecasts of drawn points."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest

from meshcast.experiments.search.frontier.bounds import PointBounds
from meshcast.experiments.search.frontier.group_bounds import GroupBounds, Known, group_by_overlap
from meshcast.experiments.search.frontier.plan_search import ROUNDING
from meshcast.experiments.search.space.space import LayerGroup, Pipeline, Space, StepChoice
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.loading.load import load_job
from meshcast.validation.selfcheck.drawn_jobs import draw_job
from tests.draws import drawn
from tests.experiments.search.spaces import Point, open_space, points_of
from tests.strategies import EVERY_EXAMPLE

LLAMA = {"preset": "llama3-8b", "layers": 4}
GPT3 = {"model": {"preset": "gpt3-175b", "layers": 24}, "batch": {"global": 192}}
MIXTRAL = {"model": {"preset": "mixtral-8x7b", "layers": 8}, "cluster": "dgx-h100:2", "batch": {"global": 64}}
NAMED: dict[str, Any] = {"model": LLAMA, "cluster": "dgx-h100:2", "batch": {"global": 32, "sequence": 4096}}

JOBS: dict[str, dict[str, Any]] = {
    "dense": {**GPT3, "cluster": "dgx-a100:16"},
    "unfused": {"model": "opt-6.7b", "cluster": "dgx-a100:2", "framework": "torchtitan", "batch": {"global": 64}},
    "cp": {**NAMED, "model": {**LLAMA, "layers": 8}, "batch": {"global": 32, "sequence": 8192}},
    "experts": MIXTRAL,
    "streams": {
        **{"model": "stabilityai/stable-diffusion-3-medium", "cluster": "dgx-h100:2"},
        **{"batch": {"global": 256, "sequence": 4429}},
    },
    "adapters": {
        **NAMED,
        "cluster": "dgx-h100:1",
        "framework": "hf-trainer",
        "batch": {"global": 64, "sequence": 2048},
        "train": {"mode": "qlora"},
    },
    "buckets": {**GPT3, "cluster": "dgx-a100:2", "framework": "deepspeed", "batch": {"global": 64}},
}

LARGE_JOBS: dict[str, dict[str, Any]] = {
    "gpt3": {"model": "gpt3-175b", "cluster": "dgx-a100:128", "batch": {"global": 1536, "sequence": 2048}},
    "gpt3-3072": {"model": "gpt3-175b", "cluster": "dgx-a100:384", "batch": {"global": 1536, "sequence": 2048}},
    "llama3": {"model": "llama3-405b", "cluster": "dgx-h100:2048", "batch": {"global": 2048, "sequence": 8192}},
    "mixtral": {"model": "mixtral-8x7b", "cluster": "dgx-h100:256", "batch": {"global": 2048, "sequence": 4096}},
    "deepseek": {"model": "deepseek-v3", "cluster": "hgx-h800:256", "batch": {"global": 15360, "sequence": 4096}},
}
"""Jobs on 1,024 to 16,384 GPUs: bounds of large clusters have had violations that small ones had not."""

TENSORS = [None, "domino", "flux", "userbuffers", "summa-2d", "tesseract"]
SEQUENCES = ["ulysses", "ring", "burst-attention", "dist-flash-attn", "token-ring", "wallfacer"]
ROUTERS = ["deepep", "tutel", "comet", "gshard", "fastermoe", "schemoe", "janus"]
DATAS = ["mics", "zero-plus-plus", "byteps", "gemini", "cephalo", "diloco", "zero-infinity"]
UNITS = {"zero": 1, "fsdp": True, "reshard": "auto", "unit": [1, 2, 3], "prefetch": [0, 1, 2, 3]}
COMMON = dict.fromkeys(("tp", "pp", "schedule", "chunks", "partition", "recompute", "order"), "auto")

NAMED_JOBS: dict[str, dict[str, Any]] = {
    "tensor schemes": {**NAMED, "plan": {"tp": [2, 4, 8], "tp_scheme": TENSORS}},
    "sequence schemes": {**JOBS["cp"], "model": LLAMA, "plan": {"cp": [2, 4, 8], "cp_scheme": SEQUENCES}},
    "expert schemes": {
        **NAMED,
        "model": {"preset": "mixtral-8x7b", "layers": 4},
        "plan": {"ep": [2, 8], "ep_scheme": ROUTERS},
    },
    "data schemes": {**NAMED, "plan": {"dp_scheme": DATAS}},
    "units": {**NAMED, "plan": UNITS},
}
"""Jobs whose plans name schemes."""


def open_overlap(job: dict[str, Any]) -> Space:
    """Returns the space of a job in which overlap and the size of a micro-batch are open, and all of the plan."""
    keys = ["tp", "dp", "pp", *([] if "plan" in job else ["updated_weights"])]
    framework = {"name": job.get("framework", "megatron-core"), "set": {"overlap": dict.fromkeys(keys, "auto")}}
    if "plan" in job:
        return open_space(
            {**job, "framework": framework, "batch": {**job["batch"], "micro": "auto"}}, **COMMON | job["plan"]
        )
    return open_space({**job, "framework": framework, "plan": "auto"})


def space_of(name: str | int) -> Space:
    """Returns the space of a job of this file by its name, or of one that is drawn with a seed."""
    if isinstance(name, int):
        return next(draw_spaces(name))
    return open_overlap((JOBS | LARGE_JOBS | NAMED_JOBS)[name])


def draw_spaces(seed: int) -> Iterator[Space]:
    """Draws spaces of jobs from all models, clusters, programs and precisions, with numbers of layers of which some
    divide into no stages, some into many chunks, and some with embedding and output layer as two more."""
    rng = random.Random(seed)
    while True:
        job = draw_job(rng)
        job["model"]["layers"] = rng.choice([4, 6, 7, 10, 11, 13, 14, 22, 23, 30])
        job["batch"] = {"global": rng.choice([16, 32, 48, 64, 96, 192]), "sequence": job["model"]["seq"]}
        job.pop("plan", None)
        with suppress(MeshcastError):
            space = open_overlap(job)
            if space.groups():
                yield space


def hold_bounds(groups: GroupBounds, point: Point) -> tuple[float, float] | None:
    """Holds all bounds of a point against its forecast; the closest ones over it, of time and of memory. None if the
    point breaks a rule."""
    group, pipeline, step = point
    space, bounds = groups.space, groups.bounds
    try:
        forecast = forecast_step(load_job(space.job_of(*point)), bounds.shared)
    except MeshcastError:
        return None
    seconds, nbytes = forecast.step_time * (1 + ROUNDING), forecast.peak_device * (1 + ROUNDING)
    choices = [other for other in space.choices(group, pipeline) if groups.scheme_of(other) == groups.scheme_of(step)]
    (family,) = (some for some in group_by_overlap(choices) if step in some)
    closest = bounds.bound_points(group, pipeline, [step])
    together = groups.bound_before_states(group, pipeline, family), bounds.bound_points(group, pipeline, family)
    for bound in (closest, *together):
        assert bound is not None and bound[0] <= seconds and bound[1] <= nbytes, point
    of_group = bounds.prices.bound_kernels(group), groups.bound_operators(group), groups.bound_passes(group)
    assert max(*of_group, bounds.bound_chains(group, pipeline)) <= seconds, point
    fitting = groups.bound_fitting(group) or 0.0
    assert fitting <= seconds or forecast.peak_device > space.capacity, point
    coarse, _ = groups.open(group)
    assert coarse is not None, point
    while coarse is not None:
        places = (at for at in range(len(coarse.places)) if coarse.pipeline(at) == pipeline)
        at = next((at for at in places if step in groups.steps(coarse, at)), None)
        assert at is not None or not forecast.fits, point
        assert at is None or (coarse.seconds[at] <= seconds and coarse.nbytes[at] <= nbytes), point
        coarse = groups.refine(coarse) if coarse.known is not Known.PASSES else None
    assert closest is not None
    return closest[0] / forecast.step_time, closest[1] / forecast.peak_device


def hold_point(space: Space, point: Point | None = None) -> tuple[float, float]:
    """Holds the bounds of a point of a space, or of its only one; returns them over its forecast."""
    (point,) = [point] if point is not None else points_of(space)
    ratios = hold_bounds(GroupBounds(space, PointBounds(space)), point)
    assert ratios is not None
    return ratios


def draw_points(space: Space, seed: int, keep: Callable[[Pipeline], bool] = lambda _: True) -> Iterator[Point]:
    """Draws points of a space without end: up to four of a group one after another. keep: pipelines to draw from."""
    rng, every_group = random.Random(seed), space.groups()
    while True:
        group = rng.choice(every_group)
        pipelines = [pipeline for pipeline in space.pipelines(group) if keep(pipeline)]
        for _ in range(4 if pipelines else 0):
            pipeline = rng.choice(pipelines)
            yield group, pipeline, rng.choice(space.choices(group, pipeline))


def hold_some(
    name: str | int, seed: int, wanted: int, keep: Callable[..., bool] = lambda *_: True
) -> tuple[float, float]:
    """Holds the bounds of `wanted` drawn points; returns the closest of time and of memory. keep: points to draw."""
    space = space_of(name)
    groups = GroupBounds(space, PointBounds(space))
    held = (hold_bounds(groups, point) for point in draw_points(space, seed) if keep(*point))
    times, memories = zip(*islice((ratios for ratios in held if ratios is not None), wanted), strict=True)
    return max(times), max(memories)


DAILY = ("unfused", "adapters", "buckets", 1, "sequence schemes")


@pytest.mark.parametrize("name", drawn([*JOBS, *NAMED_JOBS, *range(100)], keep=DAILY))
def test_no_bound_is_above_its_forecast(name: str | int) -> None:
    """Bounds that cut nothing would hold as well."""
    least = 0.8 if name in JOBS else 0.7 if name in NAMED_JOBS else 0.5
    wanted = 4 if isinstance(name, int) else 10 if EVERY_EXAMPLE else 5
    assert min(hold_some(name, 0, wanted)) > least


@pytest.mark.slow
@pytest.mark.parametrize("name", [*JOBS, *LARGE_JOBS, *NAMED_JOBS])
def test_no_bound_is_above_its_forecast_at_many_points(name: str) -> None:
    for seed in range(1) if name in LARGE_JOBS else range(1, 11 if name in JOBS else 5):
        hold_some(name, seed, 50)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "gpipe", "zb-h1", "hanayo", "dualpipe"])
def test_weights_that_fsdp_keeps_gathered_are_held_by_a_pipeline(schedule: str) -> None:
    """They count with all pipelines of a group at once, where all plans overlap data parallelism."""
    plan = {"tp": [1, 2], "pp": [2, 4], "schedule": [schedule], "chunks": "auto", "zero": 1, "fsdp": True}
    space = open_space({**MIXTRAL, "batch": {"global": 64, "micro": [1, 2], "sequence": 1024}}, **plan)
    groups = GroupBounds(space, PointBounds(space))
    held = [hold_bounds(groups, point) for point in islice(draw_points(space, 0), 6)]
    assert all(ratios is not None for ratios in held)
    opened, _ = groups.open(space.groups()[0])
    assert opened is not None and (kept := groups.bound_memory(opened)) is not None
    space.values["overlap_dp"] = (True, False)
    assert (others := groups.bound_memory(opened)) is not None
    assert (kept >= others).all() and ((kept > others).all() or schedule in ("interleaved-1f1b", "hanayo"))


RARE: dict[str, Callable[[LayerGroup, Pipeline, StepChoice], bool]] = {
    "tensor parallel experts": lambda group, pipeline, step: group.etp is not None,
    "copies of shards": lambda group, pipeline, step: step.shard is not None,
    "replicas on other nodes": lambda group, pipeline, step: pipeline.mesh_order == "dp-pp-cp-tp",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rare", "name"),
    [
        ("tensor parallel experts", "experts"),
        *(("copies of shards", name) for name in ("cp", "experts")),
        *(("replicas on other nodes", name) for name in ("dense", "cp", "experts")),
    ],
)
def test_bounds_hold_with_what_is_rarely_drawn(rare: str, name: str) -> None:
    assert min(hold_some(name, 0, 8 if rare.startswith("replicas") else 12, RARE[rare])) > 0.9


def test_tensor_ranks_that_do_not_divide_the_sequence_are_no_broken_rule() -> None:
    space = space_of("gpt3-3072")
    group = next(group for group in space.groups() if group.tp == 3 and not group.sequence_parallel)
    assert PointBounds(space).prices.unit_layout(group) is not None


@pytest.mark.parametrize(("schedule", "tp", "least"), drawn([("dualpipe", 2, 0.88), ("dualpipe-v", 4, 0.92)], keep=2))
def test_a_pair_takes_no_less_than_its_backward_pass(schedule: str, tp: int, least: float) -> None:
    """Token exchanges take as long as kernels: with the kernels of both passes alone, bounds are at 0.8."""
    job = {"model": {"preset": "deepseek-v3", "layers": 8}, "cluster": "hgx-h800:8"}
    job["batch"] = {"global": 1024, "micro": 1, "sequence": 4096}
    space = open_space(job, tp=[tp], ep=[16], pp=[2], schedule=[schedule], chunks="auto")
    assert hold_point(space)[0] > least


@pytest.mark.slow
def test_a_pass_without_kernels_puts_off_nothing() -> None:
    """Gradients of the weights of an embedding that is alone in its stage do not wait for its gradient pass."""
    group = LayerGroup(16, 1, 1, 16, "none", False, False, ("optimizer",))
    pipeline = Pipeline(64, "zb-v", 2, "ends-as-layers", None, "dp-pp-cp-tp")
    assert hold_point(space_of("llama3"), (group, pipeline, StepChoice("zero-1", True, False, True)))[0] > 0.999


TIGHT: dict[str, tuple[dict[str, Any], Point]] = {
    "a host that waits for routers launches fewer collectives without sequence parallelism": (
        {**MIXTRAL, "cluster": "dgx-h100:4", "batch": {"global": 64, "sequence": 8192}},
        (
            LayerGroup(16, 1, 4, 1, "selective", False, False, (), 2),
            Pipeline(2, "zb-h1", 1, "ends-as-layers"),
            StepChoice("zero-1", True, False, True),
        ),
    ),
    "GEMMs write gradients faster than they add them, and reduced gradients are not added": (
        {**MIXTRAL, "framework": "torchtitan"},
        (
            LayerGroup(4, 1, 1, 32, "none", True, False, (), 1),
            Pipeline(2, "breadth-first", 5, "ends-as-layers"),
            StepChoice("zero-2", True, False, True),
        ),
    ),
    "parts of a GEMM in fp32 end before the power limit slows them, and take less than the whole": (
        {**GPT3, "cluster": "dgx-h100:4", "batch": {"global": 192, "sequence": 2048}, "precision": "fp32"},
        (
            LayerGroup(8, 1, 1, 1, "none", True, True, ()),
            Pipeline(2, "interleaved-1f1b", 13, "ends-as-layers", None, "pp-dp-cp-tp"),
            StepChoice("zero-2", False, True, True),
        ),
    ),
    "a backward pass does not wait for the longer reductions of the stage before": (
        JOBS["dense"],
        (
            LayerGroup(2, 1, 1, 1, "selective", False, True, ()),
            Pipeline(2, "breadth-first", 13, "ends-as-layers", None, "dp-pp-cp-tp"),
            StepChoice("zero-1", True, True, True, 2),
        ),
    ),
}


@pytest.mark.parametrize("why", TIGHT)
def test_tight_bounds_hold(why: str) -> None:
    job, point = TIGHT[why]
    assert hold_point(open_overlap(job), point)[0] > 0.99


@pytest.mark.parametrize("launch_s", [1e-5, 5e-5])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zb-h2"])
def test_a_host_that_launches_ahead_of_the_input_bounds_a_stage(schedule: str, launch_s: float) -> None:
    """The host of a later stage launches its first kernels before a micro-batch has come to it."""
    job = {
        "model": {"layers": 16, "hidden": 512, "heads": 8, "vocab": 1024, "seq": 512},
        "cluster": {"gpu": "h100-sxm", "gpus": 4, "gpus_per_node": 8},
        "framework": {"name": "megatron-core", "set": {"launch_s": launch_s}},
        "batch": {"global": 4, "micro": 1},
    }
    assert hold_point(open_space(job, pp=[4], schedule=schedule))[0] > 0.98
