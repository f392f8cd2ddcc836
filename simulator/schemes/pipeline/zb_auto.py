"""Zero Bubble (ZB-1p, ZB-2p): a heuristic search for the shortest order within a limit of activation memory.

In every round a device runs a forward pass and a B (gradients of inputs); a W (gradients of weights) runs where the
device would idle, or where memory must be freed. Three questions are open: may warm-up forward passes delay the first
backward pass (ALLOW), may a forward pass be put off for a backward pass (PRIO), does a W fill a gap shorter than itself
(GREEDY)? Of the eight orders, and ZB-H1 and ZB-H2 if they fit, that of the shortest step is kept: of least makespan
where devices meet to clip gradients, else of the least longest span (first begin to last end on a device), with a
bubble of (p-1)(t_f + t_b - t_w) [s] for t_w <= t_f, t_b, m >= p and memory for p micro-batches: ZB-1p.

References: Qi et al. 2024, arXiv 2401.10241, section 3.
"""

from collections.abc import Iterable
from itertools import product
from math import ceil, inf
from typing import Self

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.list_scheduler import MemoryBoundedSchedule
from meshcast.simulator.scheduling.schedule import Orders, PassDurations, PipelineSetting, PipelineShape, ZeroBubble

KEPT_FOR_WEIGHTS = 0.4
"""Share of the activations that W needs, if not known: 32h/(34h + 5as) of table 1, 0.37 to 0.43 for its models."""


class ZBAuto(ZeroBubble):
    paper = Paper("arXiv:2401.10241", "Zero Bubble Pipeline Parallelism", 2024)
    needs_durations = True

    class Options(ZeroBubble.Options):
        memory_limit: float | None = Field(default=None, ge=1)
        """Micro-batches whose activations a device may hold, a share of them until W; by default p."""

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> Orders:
        whole, limit = (1.0,) * shape.p, self.options.memory_limit or shape.p
        durations = durations or PassDurations(whole, whole, whole, (0.0,) * shape.p)
        # Orders that count whole activations come first: of two equally short orders they hold less.
        kept = dict.fromkeys((whole, durations.kept_for_weights or (KEPT_FOR_WEIGHTS,) * shape.p))
        tried = product(kept, *[(True, False)] * 3)
        runs = [_Search(self, shape, durations, limit, share).search(*choices) for share, *choices in tried]
        fit = (n for n in (1, 2) if n * (shape.p - 1) <= limit - 1)
        runs += [_Search(self, shape, durations, limit, whole).follow_split_1f1b(n) for n in fit]
        return min(runs, key=lambda run: run.step_time(durations.barrier)).orders

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, t_f, t_b, t_w = setting.shape.p, setting.shape.m, setting.t_f, setting.t_b, setting.t_w
        if (short_w := t_w <= min(t_f, t_b)) and m >= p:
            yield ClosedForm("bubble_span", (p - 1) * (t_f + t_b - t_w), "tables 5 and 6: ZB-1p is as good as ZB-H1")
        if short_w and m <= p:
            yield ClosedForm("bubble", (m + p - 1) * (t_f + t_b) + t_w - m * setting.t_total, "appendix H")


class _Search(MemoryBoundedSchedule):
    """The order that a combination of ALLOW, PRIO and GREEDY gives."""

    def search(self, allow: bool, prio: bool, greedy: bool) -> Self:
        devices, self.m = range(self.shape.p), self.shape.m
        self.allow, self.prio, self.greedy = allow, prio, greedy
        for j in devices:
            self.append_next("F", j)  # a device is not idle before its first pass
        for j in (j for j, more in enumerate(self.warmup_passes()) for _ in range(more)):
            self.fill_gap("F", j, self.patience(j))
        for k in range(self.m):
            for j in self.forward_devices() if k else ():
                self.free_memory(j, 1.0)
                self.fill_gap("F", j, self.patience(j))
            for j in reversed(devices):
                # No device waits for the last backward passes of the first: all its W's may run before them.
                drains = j == 0 and self.count["F"][0] == self.m
                self.free_memory(j, inf if drains else self.kept_for_weights[j] - 1)
                self.fill_gap("B", j, self.patience(j))
        for j in devices:
            self.free_memory(j, inf)
        return self

    def patience(self, j: int) -> float:
        """Returns how long device j idles before a pass rather than to run a W that ends behind the gap."""
        return 0.0 if self.greedy else max(self.idle) - self.idle[j]

    def warmup_passes(self) -> list[int]:
        """Counts the forward passes of every device between the first and its first backward pass."""
        more = [0] * len(self.orders)
        arrival = self.free_at[-1] + self.pass_durations["B"][-1] + self.hop
        for j in reversed(range(len(more) - 1)):
            end, duration = self.free_at[j], self.pass_durations["F"][j]
            while more[j] + 1 < self.m and self.excess(j, more[j] + 1) <= 0:
                if end + duration > arrival if self.allow else end >= arrival:
                    break
                end, more[j] = end + duration, more[j] + 1
            arrival = max(end, arrival) + self.pass_durations["B"][j] + self.hop
        for j in range(1, len(more)):
            # 1 less than the device before, as long as that has forward passes left.
            more[j] = max(0, min(more[j], more[j - 1] - (more[j - 1] + 1 < self.m)))
        return more

    def forward_devices(self) -> range:
        """Returns the devices that run a forward pass in this round: the last ones, up to the first that does not."""
        first = len(self.orders)
        while first and self.count["F"][first - 1] < self.m and not (self.prio and self.prefers_backward(first - 1)):
            first -= 1
        return range(first, len(self.orders))

    def prefers_backward(self, j: int) -> bool:
        """Returns whether device j idles less if it waits for its next backward pass than if it runs a forward pass
        first."""
        if j + 1 == len(self.orders) or self.count["F"][j] < self.count["F"][j + 1] + 2:
            return False
        forward, backward, weights = self.pass_durations.values()
        gap = self.free_at[j + 1] + forward[j + 1] + backward[j + 1] + self.hop - self.free_at[j]
        freed = ceil(max(0.0, self.excess(j, 1.0)) / (self.kept_for_weights[j] or inf))
        w_time = min(len(self.pending[j]), freed) * weights[j]
        return gap <= 0 or (forward[j] + w_time > gap and gap <= max(self.idle) - self.idle[j])
