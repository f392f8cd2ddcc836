"""What a forecast takes, told from the plan alone before any work on it is done: a plan above the limits is refused,
unless the user has accepted any size (`accepting_any_size`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from meshcast.hardware.errors import PlanError
from meshcast.simulator.plan.plan import Plan

MOST_SECONDS, MOST_BYTES = 20.0, 2e9
"""The largest forecast that is made unasked, on one core of 2020 or newer."""

PASS_SECONDS, PASS_BYTES = 20e-6, 3.2e3
"""Of an action of the timetable: `predict` on 64,000 micro-batches through 4 stages (1f1b: 512,000 actions, 10.4 s and
1.6 GB) and 32,000 (interleaved-1f1b with two chunks: 9.9 s and 1.0 GB; zb-h1: 384,000 actions, 5.8 s and 0.9 GB)."""

EXPERT_SECONDS, EXPERT_BYTES = 2e-6, 500.0
"""Of an expert of a layer: `predict` on a million experts on eight ranks takes 2.3 s and 480 MB."""

NOISY_PASS_BYTES = 6e3
"""Of the ops of a pass of a micro-batch through a layer, in a step that is played rank by rank."""

MAX_NOISY_STEPS = 4_000_000
"""Most passes of micro-batches through layers in all steps with noise, of up to `VECTOR` ranks a stage: some ten
minutes at 0.15 ms each, with a bar on a terminal."""

VECTOR = 3_000
"""Ranks of a stage that double the time of an op which is played for all of them at once."""

MOST_STAGES = 20_000
"""Most stages of a pipeline, those of all chunks: twice the layers that a model may have."""

YES = "--yes forecasts it all the same"
"""End of the remedy of every refusal for its size."""

_ACCEPTS: ContextVar[bool] = ContextVar("accepts_any_size", default=False)


def accepts_any_size() -> bool:
    """Returns whether forecasts of any size are made."""
    return _ACCEPTS.get()


@contextmanager
def accepting_any_size() -> Iterator[None]:
    """Makes the forecasts inside whatever time and memory they take."""
    token = _ACCEPTS.set(True)
    try:
        yield
    finally:
        _ACCEPTS.reset(token)


class ForecastSize(NamedTuple):
    """What a forecast takes.

    passes: actions of the timetable of a step.
    experts: numbers of experts of all kinds of layers, over all steps that differ.
    steps: number of steps that differ, which are played one after another.
    """

    passes: int
    experts: int = 0
    steps: int = 1

    @property
    def seconds(self) -> float:
        """Time of one core [s]."""
        return PASS_SECONDS * self.passes * self.steps + EXPERT_SECONDS * self.experts

    @property
    def nbytes(self) -> float:
        """Memory [bytes]."""
        return PASS_BYTES * self.passes + EXPERT_BYTES * self.experts

    @property
    def excess(self) -> float:
        """Over the limits; above 1 it is refused."""
        return max(self.seconds / MOST_SECONDS, self.nbytes / MOST_BYTES)

    def __str__(self) -> str:
        return f"some {self.seconds:,.0f} s and {self.nbytes / 1e9:,.1f} GB"


def measure_size(plan: Plan) -> ForecastSize:
    """Returns what the forecast of a plan takes, as far as its layers do not decide."""
    moe = plan.job.model.moe
    passes, steps = sum(map(count_passes, plan.every_pipeline)), plan.passes.steps
    return ForecastSize(passes, steps * sum(moe.expert_counts) if moe else 0, steps)


def count_passes(plan: Plan) -> int:
    """Returns the number of actions of the timetable of a plan, of updates and of passes; those of an overlapped pair
    are two, and a split backward pass is two. Transfers of activations and sums of gradients are not counted."""
    shape, schedule = plan.passes.played_shape, plan.schedule
    halves = min(2, len(schedule.backward_kinds))
    each = shape.slices * (1 if shape.forward_only else 1 + schedule.backwards_per_forward * halves)
    passed = sum(len(schedule.microbatches(shape, stage)) for stage in range(shape.stages))
    interval = plan.passes.update_interval
    return passed * each + (shape.p * shape.m // interval if interval else 0)


def check_size(plan: Plan) -> None:
    """A plan has at most `MOST_STAGES`, and its forecast takes at most `MOST_SECONDS` and `MOST_BYTES`."""
    if (stages := plan.shape.stages) > MOST_STAGES:
        rule = f"{stages:,} stages, and a pipeline has at most {MOST_STAGES:,}"
        raise PlanError(
            "plan.chunks", rule, f"Use no more stages than the {plan.job.model.layers} layers", plan.shape.v
        )
    size = measure_size(plan)
    if size.excess <= 1 or accepts_any_size():
        return
    shape, job, most = plan.passes.played_shape, plan.job, f"{MOST_SECONDS:.0f} s and {MOST_BYTES / 1e9:.0f} GB"
    limit = f"a forecast of {size}, and at most {most} are taken unasked"
    if size.experts * EXPERT_BYTES > size.passes * PASS_BYTES:
        rule = f"{job.model.name} has more experts than are forecast in seconds: {limit}"
        fits = int(size.experts / size.excess / 2) // plan.passes.steps
        raise PlanError("model.moe.experts", rule, f"At most {fits:,} in all layers that differ, or {YES}")
    sliced = f" in {shape.slices} slices" if shape.slices > 1 else ""
    each = f" in each of {size.steps} steps" if size.steps > 1 else ""
    rule = f"{shape.m:,} micro-batches{sliced} through {shape.stages} stages are {size.passes:,} passes{each}, {limit}"
    if shape.classes:
        raise PlanError("batch.order", rule, f"Use fewer, larger micro-batches, or {YES}")
    # A quarter of what is taken, in whole rounds of the pipeline: seconds.
    rounds = max(1, int(plan.shape.m / size.excess / 4) // (2 * shape.p)) * 2 * shape.p
    fits = rounds * job.batch.micro * plan.ranks.replicas * plan.schedule.microbatches_per_forward
    remedy = f"{fits:,} would take seconds, as would a larger batch.micro; {YES}"
    raise PlanError("batch.global", rule, remedy, job.batch.total)


def check_noisy_steps(plan: Plan) -> None:
    """Steps with noise, which are played op by op, are not too many, and none of them is too large."""
    noise, shape = plan.job.noise, plan.shape
    if noise is None or accepts_any_size():
        return
    directions = 1 if shape.forward_only else 1 + plan.schedule.backwards_per_forward
    counted = sum(pipeline.shape.m for pipeline in plan.every_pipeline) * shape.slices
    passes = directions * counted * len(plan.job.model.every_layer)
    largest = int(MOST_BYTES / NOISY_PASS_BYTES)
    if passes > largest:
        rule = f"a step with noise has at most {largest:,} passes of micro-batches through layers"
        remedy = f"Use a smaller batch.global or a larger batch.micro, or leave noise out; {YES}"
        raise PlanError("noise", f"{rule}, and this one {passes:,}", remedy)
    ranks = max(len(plan.ranks.of_device(device)) for device in range(plan.ranks.devices))
    most = max(1, int(MAX_NOISY_STEPS / passes / (1 + ranks / VECTOR)))
    if noise.steps > most:
        rule = f"a step has {passes:,} passes of micro-batches through layers, on {ranks:,} ranks a stage"
        fits = max(1, most // 60)
        remedy = f"{fits:,} would take some ten seconds, {most:,} ten minutes; {YES}"
        raise PlanError("noise.steps", rule, remedy, noise.steps)
