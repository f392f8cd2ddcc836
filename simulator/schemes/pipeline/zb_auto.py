"""Zero bubble, found by a heuristic: gradients of weights fill the gaps, in as much memory as is given.

In every round a device makes a forward pass, unless that would hold up the one before it, and a pass for the gradients
of inputs; those of weights come where it would wait, or where memory must be freed. Must forward passes leave the first
backward pass its time (ALLOW), may one be put off for a backward pass (PRIO), does a gap take a pass longer than itself
(GREEDY)? All eight answers are tried; the one is kept whose longest span of a device, from begin to end, is least.

With memory for p micro-batches it is the paper's ZB-1p, for 2p its ZB-2p: no device waits then where passes last alike.

longest span m u + (p-1)(t_f+t_b-t_w) [s] in memory for p micro-batches, where t_w <= t_f, t_b and m >= p.

References: Qi et al. 2024, arXiv 2401.10241, section 3.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from math import ceil, inf

from pydantic import Field

from simulator.ir.scheme import ClosedForm, Paper
from simulator.scheduling.list_scheduler import InTurn
from simulator.scheduling.schedule import Durations, PipelineSetting, PipelineShape, Schedule, ScheduleItem

KEPT = 0.4
"""The part of the activations that gradients of weights need, where nothing tells: 32h/(34h + 5as) in the paper's
table 1, which is 0.37 to 0.43 for its models."""


class ZBAuto(Schedule):
    paper = Paper("arXiv:2401.10241", "Zero Bubble Pipeline Parallelism", 2024)
    needs_durations = True

    class Options(Schedule.Options):
        memory_limit: float | None = Field(default=None, ge=1)
        """Micro-batches whose activations a device may hold, a part of them until the gradients of weights are made; p
        where not given."""

    def orders(self, shape: PipelineShape, lasting: Durations | None = None) -> list[list[ScheduleItem]]:
        one = (1.0,) * shape.p
        lasting, limit = lasting or Durations(one, one, one, (0.0,) * shape.p), self.options.memory_limit or shape.p
        # Of those as good as each other, but for rounding, the first count whole activations, and so hold less.
        tried = product(dict.fromkeys((one, lasting.kept or (KEPT,) * shape.p)), *[(True, False)] * 3)
        runs = [_Run(self, shape, lasting, limit, *answers) for answers in tried]
        return min(runs, key=lambda run: [float(f"{lasts:.9g}") for lasts in (max(run.spans), max(run.clock))]).order

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, tf, tb, tw = setting.shape.p, setting.shape.m, setting.tf, setting.tb, setting.tw
        fits = tw <= min(tf, tb)
        if fits and m >= p:
            yield ClosedForm("bubble_span", (p - 1) * (tf + tb - tw), "tables 5 and 6: ZB-1p is as good as ZB-H1")
        if fits and m <= p:
            yield ClosedForm("bubble", (m + p - 1) * (tf + tb) + tw - m * setting.u, "appendix H")


class _Run(InTurn):
    """One way through the rounds, with an answer to each question."""

    def __init__(
        self,
        schedule: Schedule,
        shape: PipelineShape,
        lasting: Durations,
        limit: float,
        kept: Sequence[float],
        *ways: bool,
    ) -> None:
        super().__init__(schedule, shape, lasting, limit, kept)
        self.m, self.idle, devices = shape.m, [0.0] * shape.p, range(shape.p)
        self.allow, self.prio, self.greedy = ways
        for j in devices:
            self.make("F", j)  # waiting counts from here on
        for j in (j for j, more in enumerate(self.warmup()) for _ in range(more)):
            self.fill("F", j)
        for k in range(shape.m):
            for j in self.going_on() if k else ():
                self.make_room(j, 1.0)
                self.fill("F", j)
            for j in reversed(devices):
                # Nobody waits for the first device's last backward passes.
                self.make_room(j, inf if j == 0 and self.made["F"][0] == self.m else kept[j] - 1)
                self.fill("B", j)
        for j in devices:
            self.make_room(j, inf)

    def fill(self, kind: str, j: int) -> None:
        """The next pass of its kind; gradients of weights fill the time until what it needs is there."""
        comes = self.comes(self.next(kind, j))
        while self.owed(j) and self.clock[j] + self.each["W"][j] <= comes:
            self.make("W", j)
        gap = comes - self.clock[j]
        if self.owed(j) and gap > 0 and (self.greedy or gap > max(self.idle) - self.idle[j]):
            self.make("W", j)
        self.idle[j] += max(0.0, comes - self.clock[j])
        self.make(kind, j)

    def warmup(self) -> list[int]:
        """Forward passes of every device between its first one and its first backward pass."""
        more = [0] * len(self.order)
        comes = self.clock[-1] + self.each["B"][-1] + self.hop
        for j in reversed(range(len(more) - 1)):
            clock, lasts = self.clock[j], self.each["F"][j]
            while more[j] + 1 < self.m and self.over(j, more[j] + 1) <= 0:
                if clock + lasts > comes if self.allow else clock >= comes:
                    break
                clock, more[j] = clock + lasts, more[j] + 1
            comes = max(clock, comes) + self.each["B"][j] + self.hop
        for j in range(1, len(more)):
            # One less than the device before, as long as that has some left.
            more[j] = max(0, min(more[j], more[j - 1] - (more[j - 1] + 1 < self.m)))
        return more

    def going_on(self) -> range:
        """The devices that make a forward pass in this round: those from which on all do."""
        first = len(self.order)
        while first and self.made["F"][first - 1] < self.m and not (self.prio and self.puts_off(first - 1)):
            first -= 1
        return range(first, len(self.order))

    def puts_off(self, j: int) -> bool:
        """Whether a device had better wait for its next backward pass than make a forward pass first."""
        if j + 1 == len(self.order) or self.made["F"][j] < self.made["F"][j + 1] + 2:
            return False
        gap = self.clock[j + 1] + self.each["F"][j + 1] + self.each["B"][j + 1] + self.hop - self.clock[j]
        room = min(self.owed(j), ceil(max(0.0, self.over(j, 1.0)) / (self.kept[j] or inf))) * self.each["W"][j]
        return gap <= 0 or (self.each["F"][j] + room > gap and gap <= max(self.idle) - self.idle[j])
