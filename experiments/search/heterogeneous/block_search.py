"""Best-first search of plans whose stages, or whose replicas, have different degrees.

Blocks of plans are bounded in turn; what may still be among the best waits for its forecast in the order of
the bounds. The search ends when no bound is left that is better than the best plans.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from meshcast.experiments.search.frontier.branch_and_bound import PlanSearch
from meshcast.experiments.search.frontier.certificate import Certificate
from meshcast.experiments.search.frontier.objectives import ClusterUse, Incumbents
from meshcast.experiments.search.heterogeneous.open_fields import HeterogeneousFields
from meshcast.experiments.search.heterogeneous.plan_blocks import BlockMaker, PlanBlock
from meshcast.experiments.search.heterogeneous.stage_units import StageUnits
from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.job import NO_FILE, JobOrigin

TRIED = 3
"""Plans of a block that are forecast at once, as long as no plan is known that fits."""


class HeterogeneousSearch(PlanSearch):
    """A search of heterogeneous plans.

    fields: the job and the values of its open fields.
    runs: most runs of stages of a pipeline; as many as there are kinds of nodes, two at least, by default.
    within, top, objectives, shared, origin: see `Search`.
    Raises PlanError for a job without such plans.
    """

    def __init__(
        self,
        fields: HeterogeneousFields,
        within: float = 0.0,
        top: int = 10,
        objectives: tuple[str, ...] = ("time",),
        shared: SharedWork | None = None,
        origin: JobOrigin = NO_FILE,
        runs: int | None = None,
    ) -> None:
        if len(objectives) > 1:
            rule = "a search of heterogeneous plans has one objective"
            raise PlanError("objective", rule, "Write one of them", ",".join(objectives))
        kinds = len(fields.kinds)
        if runs is not None and runs < kinds:
            rule = f"the runs of a pipeline lie on one kind of nodes each, of which the cluster has {kinds}"
            raise PlanError("runs", rule, f"Write {kinds} or more, or leave it out", runs)
        self.fields = fields
        self.use = ClusterUse.of(fields.loaded, objectives)
        work = shared or SharedWork()
        self.maker = BlockMaker(fields, StageUnits(fields, work), runs or max(2, kinds))
        self.blocks: list[PlanBlock] = [block for block in self.maker.blocks() if block.size]
        certificate = Certificate(
            plans=sum(block.size for block in self.blocks),
            fields=fields.stated_values(),
            groups=len(self.blocks),
            objectives=objectives,
            memory_margin=fields.memory_margin,
            memory_risk=fields.memory_risk,
            grouped="equal micro-batches",
        )
        super().__init__([fields], work, Incumbents(objectives, top, within), certificate, top, origin)
        if not self.blocks:
            rule = (
                "no degrees make a plan: stages of tp x dp GPUs must fill every kind of nodes, their dp divide "
                "batch.micro, and batch.micro the global batch"
            )
            raise PlanError("plan", rule, "Give other values, or write auto")
        self._left: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def run(self, progress: Callable[[Certificate], None] = lambda _: None) -> Certificate:
        """Runs to the end, or until it is interrupted; `best` and the certificate hold what is proven by then. Raises
        PlanError or ModelError if every plan breaks a rule: that of the first."""
        began, certificate = time.process_time(), self.certificate
        certificate.open_bound = 0.0
        waiting: list[tuple[float, int, int]] = []
        least = 0.0
        """Of what was taken up."""
        try:
            for number in range(len(self.blocks)):
                self._enter(number, waiting)
                certificate.cpu = time.process_time() - began
                progress(certificate)
            certificate.open_bound = least = waiting[0][0] if waiting else certificate.incumbent
            while waiting and waiting[0][0] < self.incumbents.limit:
                least = waiting[0][0]
                self._take_next(waiting)
                certificate.open_bound = least
                certificate.cpu = time.process_time() - began
                progress(certificate)
            if certificate.invalid == certificate.plans:
                self.raise_rule(self.blocks[0].job(0))
            certificate.complete = True
            least = waiting[0][0] if waiting else certificate.incumbent
        except KeyboardInterrupt:
            pass
        certificate.open_bound = min(least, certificate.incumbent) if not certificate.complete else least
        certificate.time_bound += sum(self._count_cut(number, at) for _, number, at in waiting)
        certificate.open = certificate.plans - certificate.decided
        certificate.cpu = time.process_time() - began
        return certificate

    @property
    def _limit(self) -> float:
        """The bound from which on a plan never counts, not even for the gap that is proven."""
        return self.incumbents.limit / (1 - self.incumbents.within)

    def _enter(self, number: int, waiting: list[tuple[float, int, int]]) -> None:
        """Bounds a block, and queues those of its plans that may be among the best."""
        block, certificate = self.blocks[number], self.certificate
        bounds = block.bound()
        certificate.opened += 1
        certificate.invalid += int((~bounds.valid).sum())
        certificate.memory_bound += int((bounds.valid & ~bounds.fits).sum())
        values = np.asarray(self.incumbents.bounds(bounds.seconds, bounds.nbytes, self.use)[0])
        left = np.flatnonzero(bounds.valid & bounds.fits & (values < self._limit))
        left = left[np.argsort(values[left], kind="stable")]
        rows = left, bounds.seconds[left], bounds.nbytes[left]
        at, tried = 0, 0
        while at < len(left) and tried < TRIED and values[left[at]] < certificate.incumbent:
            # A good plan that is known early keeps the queue short.
            fits = self._forecast_row(block, *(column[at] for column in rows))
            tried += 1
            at += 1
            if fits:
                break
        keep = values[left] < self._limit
        keep[:at] = False
        certificate.time_bound += int((bounds.valid & bounds.fits).sum()) - at - int(keep.sum())
        if keep.any():
            self._left[number] = left[keep], rows[1][keep], rows[2][keep]
            heapq.heappush(waiting, (float(values[left[keep][0]]), number, 0))
        block.forget()

    def _count_cut(self, number: int, at: int) -> int:
        """Returns how many of the plans of a block that wait cannot be among the best. at: the first of them."""
        _, seconds, nbytes = self._left[number]
        values = self.incumbents.bounds(seconds[at:], nbytes[at:], self.use)[0]
        return int((np.asarray(values) >= self.incumbents.limit).sum())

    def _take_next(self, waiting: list[tuple[float, int, int]]) -> None:
        _, number, at = heapq.heappop(waiting)
        rows = self._left[number]
        self._forecast_row(self.blocks[number], *(column[at] for column in rows))
        if at + 1 < len(rows[0]):
            value = self.incumbents.bounds(float(rows[1][at + 1]), float(rows[2][at + 1]), self.use)[0]
            heapq.heappush(waiting, (value, number, at + 1))

    def _forecast_row(self, block: PlanBlock, row: Any, seconds: Any, nbytes: Any) -> bool:
        """Forecasts a plan of a block; returns whether it fits."""
        outcome = self.forecast_plan(
            block.changes(int(row)), block.job(int(row)), float(seconds), float(nbytes), self.use, self.fields
        )
        if outcome is None or not outcome[0].fits:
            return False
        self.note(outcome[0].values)
        return True
