"""What a forecast takes, told from the plan alone before any work on it is done: a plan above the limits is refused,
unless the user has accepted any size (`accepting_any_size`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from meshcast.hardware.errors import PlanError
from meshcast.simulator.plan.plan import Plan

MAX_SECONDS, MAX_BYTES = 20.0, 2e9
"""The largest forecast that is made unasked, on a core of 2020 or newer."""

PASS_SECONDS, PASS_BYTES = 10e-6, 1e3
"""Of an action of the timetable.

With `LAYER_SECONDS` within a factor of 2.5 of the time, and of 1.9 of the memory, of 1f1b on 1, 2, 4, 8 and 16 stages
of 32 layers with 2,000 to 32,000 micro-batches, and of gpipe, interleaved-1f1b, zb-h1 and zb-v on 4 (11 forecasts of
0.3 to 4.2 s of CPU time and 86 to 968 MB, beside other work)."""

PLANNED_SECONDS, PLANNED_BYTES = 200e-6, 4e3
"""The same where durations decide the order: zb-auto (500, 1,000 and 2,000 micro-batches through 4 stages), v-zb and
v-half (500) within a factor of 2.1 of the time, and of 2.8 of the memory."""

PAIRED_SECONDS, PAIRED_BYTES = 310e-6, 12e3
"""The same where passes run in pairs: dualpipe on 4 stages (500, 1,000 and 4,000 micro-batches) within a factor of 1.3;
on 8 stages it takes a third, and dualpipe-v, whose rounds repeat, a thirtieth."""

LAYER_SECONDS, LAYER_BYTES = 5e-6, 3.2e3
"""Of a layer of a stage and a micro-batch, besides its actions."""

EXPERT_SECONDS, EXPERT_BYTES = 2e-6, 500.0
"""Of an expert of a layer: within a factor of 3 of 20,000 and 100,000 experts in each of four layers that are alike,
and of a million (2.3 s and 480 MB), on eight ranks."""

NOISY_PASS_BYTES = 6e3
"""Of the ops of a pass of a micro-batch through a layer, in a step that is played rank by rank."""

MAX_NOISY_STEPS = 4_000_000
"""Most passes of micro-batches through layers in all steps with noise, of up to `VECTOR` ranks a stage: some ten
minutes at 0.15 ms each, with a bar on a terminal."""

VECTOR = 3_000
"""Ranks of a stage that double the time of an op which is played for all of them at once."""

MAX_STAGES = 20_000
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
    steps: number of steps that differ, which are played in turn.
    layers: micro-batches times layers of a stage.
    each: time [s] and memory [bytes] of an action.
    """

    passes: int
    experts: int = 0
    steps: int = 1
    layers: float = 0
    each: tuple[float, float] = (PASS_SECONDS, PASS_BYTES)

    @property
    def seconds(self) -> float:
        """Time of a core [s]."""
        of_step = self.each[0] * self.passes + LAYER_SECONDS * self.layers
        return of_step * self.steps + EXPERT_SECONDS * self.experts

    @property
    def nbytes(self) -> float:
        """Memory [bytes]."""
        return self.each[1] * self.passes + LAYER_BYTES * self.layers + EXPERT_BYTES * self.experts

    @property
    def excess(self) -> float:
        """Over the limits; above 1 it is refused."""
        return max(self.seconds / MAX_SECONDS, self.nbytes / MAX_BYTES)

    def __str__(self) -> str:
        return f"some {self.seconds:,.0f} s and {self.nbytes / 1e9:,.1f} GB"


def measure_size(plan: Plan) -> ForecastSize:
    """Returns what the forecast of a plan takes, as far as its layers do not decide."""
    moe, shapes = plan.job.model.moe, [pipeline.passes.played_shape for pipeline in plan.every_pipeline]
    passes, steps = sum(map(count_passes, plan.every_pipeline)), plan.passes.steps
    layers = sum(shape.m * shape.slices / shape.p for shape in shapes) * len(plan.job.model.every_layer)
    each = PASS_SECONDS, PASS_BYTES
    if any(pipeline.schedule.needs_durations for pipeline in plan.every_pipeline):
        each = PLANNED_SECONDS, PLANNED_BYTES
    if any(pipeline.schedule.pairs_passes for pipeline in plan.every_pipeline):
        each = PAIRED_SECONDS, PAIRED_BYTES
    return ForecastSize(passes, steps * sum(moe.expert_counts) if moe else 0, steps, layers, each)


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
    """Checks that a plan has at most `MAX_STAGES`, and its forecast takes at most `MAX_SECONDS` and `MAX_BYTES`."""
    if (stages := plan.shape.stages) > MAX_STAGES:
        rule = f"{stages:,} stages, and a pipeline has at most {MAX_STAGES:,}"
        raise PlanError(
            "plan.chunks", rule, f"Use no more stages than the {plan.job.model.layers} layers", plan.shape.v
        )
    size = measure_size(plan)
    if size.excess <= 1 or accepts_any_size():
        return
    shape, job, most = plan.passes.played_shape, plan.job, f"{MAX_SECONDS:.0f} s and {MAX_BYTES / 1e9:.0f} GB"
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
    largest = int(MAX_BYTES / NOISY_PASS_BYTES)
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
