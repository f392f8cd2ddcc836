"""V-ZB: an order along a V of stages built pass by pass, for the durations of passes and within a limit of memory.

Warm-up runs forward passes until backward passes can begin, then every round gives each device a B and a forward pass.
W's run where a device would idle for as long, in shorter gaps of devices that have idled most, and where memory must be
freed. Of four orders (does a W fill a short gap before F, before a B of the way up?), built again while granting all
the most idle time helps, that of the shortest step is kept. Stages may differ; the authors' code takes their median
times.

    p = 2, m = 4 (upper case: down, lower case: up)
    device 0   F0 F1 F2 f0 b0 w0 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 .. b3 B2 w3 B3 W2 W3
    device 1   .. F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 F3 B1 W1 f3 b2 B2 b3 B3 w2 W2 w3 W3

No bubble in the longest span for t_f = t_b = t_w and m >= 2 p - 1, at 1F1B's memory: 2 p chunks are held until W.

References: Qi et al. 2024, arXiv 2405.15362; sail-sg/zero-bubble-pipeline-parallelism, scheduler/zbv.py.
"""

from collections.abc import Iterable, Sequence
from itertools import cycle, product
from math import inf
from typing import Self

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.activation_transfer import equal_durations
from meshcast.simulator.scheduling.list_scheduler import MemoryBoundedSchedule
from meshcast.simulator.scheduling.schedule import (
    Orders,
    PassDurations,
    PipelineSetting,
    PipelineShape,
    PostValidation,
    VShape,
)


class VZB(VShape):
    paper = Paper("arXiv:2405.15362", "Pipeline Parallelism with Controllable Memory", 2024)
    needs_durations = True

    class Options(VShape.Options, PostValidation):
        memory_limit: float | None = Field(default=None, ge=1)
        """Micro-batches whose activations a device may hold, a share of them until W; by default p."""

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        limit, least = self.options.memory_limit, min(shape.p, shape.m)
        if limit is not None and limit < least:
            remedy = "Raise it, or use pipeline/v-half or pipeline/v-min"
            raise PlanError("memory_limit", f"{self.use} holds {least} before the first is back", remedy, limit)

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> Orders:
        durations, runs = durations or equal_durations(shape), []
        kept, limit = durations.kept_for_weights or (1.0,) * shape.stages, 2 * (self.options.memory_limit or shape.p)
        for choices in product((True, False), repeat=2):
            idle, granted = inf, [0.0] * shape.p
            while max((run := _GapFiller(self, shape, durations, limit, kept).search(granted, *choices)).idle) < idle:
                runs.append(run)
                idle, granted = max(run.idle), [max(run.idle) - seconds for seconds in run.idle]
        return min(runs, key=lambda run: run.step_time(durations.barrier)).orders

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("most_in_flight_w", 2 * min(p, m), "table 1: the memory of 1F1B")
        if m >= 2 * p - 1 and setting.t_f == setting.t_b == setting.t_w:
            yield ClosedForm("bubble_span", 0, "table 1")


class _GapFiller(MemoryBoundedSchedule):
    """The order that a choice of the gaps to fill gives."""

    def search(self, granted: Sequence[float], before_forward: bool, before_up: bool) -> Self:
        """Builds the order. granted: idle time that each device may have as long as others have less."""
        devices, last, m = range(self.shape.p), self.shape.stages - 1, self.shape.m
        self.warm_up()

        def run(kind: str, stage: int, fills: bool) -> None:
            j = self.device[stage]
            self.fill_gap(kind, stage, max(*self.idle, granted[j]) - self.idle[j] if fills else inf)

        while self.count["B"][0] < m:
            down = [j for j in devices if self.backward_goes_down(j)]
            for stage in [*reversed(down), *(last - j for j in devices if j not in down)]:
                if self.is_ready("B", stage):
                    run("B", stage, before_up or stage in down)
            for j in devices:
                choices = (last - j, j) if self.count["F"][last - j] < self.count["F"][j] else (j,)
                forward = next((stage for stage in choices if self.is_ready("F", stage)), None)
                if forward is not None and self.fits(forward):
                    run("F", forward, before_forward)
        for j in devices:
            self.free_memory(j, inf)
        return self

    def fits(self, stage: int) -> bool:
        """Returns whether a forward pass fits, once W's have freed memory; also that up, if backward passes wait for
        it."""
        j, up, backward = self.device[stage], self.shape.stages - 1 - stage, self.count["B"]
        more = 1.0 + (stage == j and self.count["F"][up] == backward[up] == backward[j])
        self.free_memory(j, more)
        return self.excess(j, more) <= 0

    def backward_goes_down(self, j: int) -> bool:
        """Returns whether the next B of device j is of its stage on the way down, where backward passes end."""
        backward, up = self.count["B"], self.shape.stages - 1 - j
        return backward[j] < backward[up] and (backward[up] == self.shape.m or self.is_ready("B", j))

    def warm_up(self) -> None:
        """Runs forward passes: down and up again, more while the first comes back, and then as many on all devices."""
        p, m, last, forward = self.shape.p, self.shape.m, self.shape.stages - 1, self.count["F"]
        for j in range(p):
            self.append_next("F", j)  # a device is not idle before its first pass
        for j in reversed(range(p)):
            latest = self.arrival(self.next_pass("F", last - j)) - self.pass_durations["F"][j]
            while j + 1 < p and forward[j] < m and self.excess(j, 2 + 2 * j) <= 0 and self.free_at[j] <= latest:
                for i in range(j + 1):
                    self.fill_gap("F", i, inf)
            self.fill_gap("F", last - j, inf)
        turns = cycle((0, 1))
        for j in range(1, p):
            sides, up, above = (range(p - 1, j - 1, -1), range(p, last - j + 1)), last - j, last - j + 1
            while forward[j] + forward[up] < forward[j - 1] + forward[above] or forward[up] <= forward[above] < m:
                if not any(self.is_ready("F", stage) and self.fits(stage) for side in sides for stage in side):
                    break
                for stage in sides[next(turns)]:
                    if self.is_ready("F", stage) and self.fits(stage):
                        self.fill_gap("F", stage, inf)
