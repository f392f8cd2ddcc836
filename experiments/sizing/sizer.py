"""Finds the smallest cluster of a kind of node that keeps a limit.

Days fall with nodes, nearly: some numbers of nodes divide the layers, the heads or the batch worse than their
neighbours. So the numbers are bisected, each next one where the last one would meet the limit at equal efficiency; then
all smaller ones are looked at, or all where none was found, that would keep the limit at the best efficiency that any
size has shown, and a little more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from meshcast.experiments.search.certificate.result import SearchResult, rank
from meshcast.experiments.search.certificate.smallest_need import find_smallest
from meshcast.experiments.search.remembered_plans import find_remembered, read_remembered, remember
from meshcast.experiments.search.search_job import open_search
from meshcast.experiments.sizing.kinds import SizedNode
from meshcast.experiments.sizing.question import SizeQuestion
from meshcast.experiments.sizing.sized_cluster import Simulate, SizedCluster
from meshcast.hardware.documents.plain_data import Fields
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.runs.answer import DAY
from meshcast.simulator.runs.inputs import make_run

GAP = 0.01
"""Share by which the step of another plan may be shorter: plans are searched to this gap."""

PER_OCTAVE = 16
"""Numbers of nodes between one and its double: those with five binary digits before zeros."""

SLACK = 0.03
"""Share by which an unseen size may need less GPU time for a token than all that were looked at."""

FAR = 1.5
"""Ratio of sizes from which on a larger cluster that takes longer is no matter of what divides what."""

USUAL_MFU = 0.4
"""At which the first size would meet the limit; any value finds the same answer."""

Watch = Callable[[str, int], None]
"""Called with the kind of node and the number of nodes before a size is looked at."""


def list_sizes(most: int) -> list[int]:
    """Returns the numbers of nodes up to `most` that are looked at: all up to 32, then 16 between one and its double,
    which is at most a sixteenth, and at least a thirty-second, from one to the next."""
    sizes = [*range(1, min(2 * PER_OCTAVE, most + 1))]
    step = 2
    while sizes[-1] < most and PER_OCTAVE * step <= most:
        sizes += [number * step for number in range(PER_OCTAVE, 2 * PER_OCTAVE) if number * step <= most]
        step *= 2
    return sizes


class Sizer:
    """Looks at clusters of a kind of node; each number of nodes once.

    simulate: simulates a run. watch: see `Watch`. remembers: whether plans are kept for later questions.
    """

    def __init__(
        self, question: SizeQuestion, kind: SizedNode, simulate: Simulate, watch: Watch, remembers: bool = True
    ) -> None:
        self.question, self.kind = question, kind
        self.sizes = list_sizes(max(1, question.most_gpus // kind.gpus_per_node))
        self.seen: dict[int, SizedCluster] = {}
        self._simulate, self._watch, self._remembers = simulate, watch, remembers
        self._shared = SharedWork()

    # ------------------------------------------------------------------------------------ one size

    def look_at(self, nodes: int) -> SizedCluster:
        """Returns the cluster of so many nodes with its best plan."""
        if nodes not in self.seen:
            self._watch(self.kind.name, nodes)
            self.seen[nodes] = self._plan(nodes)
        return self.seen[nodes]

    def _plan(self, nodes: int) -> SizedCluster:
        lacks_memory = False
        try:
            job, reason = self._find_job(nodes)
            if job is not None:
                report = simulate(load_job(job, base=self.question.base), shared_work=self._shared)
                if report.fits:
                    return SizedCluster(self.kind, nodes, job, make_run(report), "", False, self._simulate)
                reason = report.fit_in_words
            lacks_memory = True
        except MeshcastError as error:
            reason = f"{error.where}: {error.rule}"
        return SizedCluster(self.kind, nodes, None, None, reason, lacks_memory, self._simulate)

    def _find_job(self, nodes: int) -> tuple[Fields | None, str]:
        """Returns the job with its best plan; None, and why, if no plan fits. Raises MeshcastError if there is none."""
        job = self.question.describe_job(self.kind, nodes)
        if not self.question.is_open:
            return job, ""
        kept = find_remembered(job, self.question.base, GAP)
        known = read_remembered(kept)[1] if self._remembers else None
        if known is not None:
            return known, ""
        search = open_search(job, GAP, 1, base=self.question.base, shared=self._shared)
        certificate = search.run()
        if not certificate.complete:
            raise KeyboardInterrupt
        result = SearchResult(rank(search), certificate, tuple(search.forecasts), top=1)
        if not result.best:
            return None, f"no plan fits; the smallest need is {find_smallest(search)}"
        if self._remembers:
            remember(kept, result)
        return result.best[0].job, ""

    # ------------------------------------------------------------------------------------ many sizes

    def find_smallest(self, days: float, slower: float = 1.0) -> SizedCluster | None:
        """Returns the smallest cluster on which nine of ten runs end within so many days; None if none does.

        slower: factor on the duration of steps.
        """
        best = self._bisect(days, slower)
        for at in range(best - 1, -1, -1):
            if self._least_days(self.sizes[at]) * slower > days:
                break
            if self.look_at(self.sizes[at]).keeps(days, slower):
                best = at
        return self.look_at(self.sizes[best]) if best < len(self.sizes) else None

    def _bisect(self, days: float, slower: float) -> int:
        """Returns the position in `sizes` of one that keeps the limit, whose smaller neighbour does not, sizes without
        a plan left out; the number of sizes: none was found.
        """
        low, high, guess = -1, len(self.sizes), self._guess(days)
        without, top = set[int](), high
        while remaining := [at for at in range(low + 1, min(high, top)) if at not in without]:
            at = min(remaining, key=lambda at: abs(at - guess))
            cluster = self.look_at(self.sizes[at])
            if cluster.plan is None and not self._is_too_small(cluster):
                without.add(at)
                guess = remaining[len(remaining) // 2]
                continue
            if cluster.keeps(days, slower, roughly=at - low > 1):
                high = at
            elif self._is_past_fastest(cluster):
                top = at
            else:
                low = at
            guess = self._find_next(cluster, days, slower, low, min(high, top))
        if high < len(self.sizes) and not self.look_at(self.sizes[high]).keeps(days, slower):
            return self._bisect(days, slower)  # it was taken to be far shorter, and is simulated now
        return high

    def _is_past_fastest(self, cluster: SizedCluster) -> bool:
        """Returns whether a cluster takes longer than a far smaller one: more nodes make no run shorter from there."""
        smaller = [other for other in self.planned if FAR * other.nodes <= cluster.nodes]
        return cluster.plan is not None and any(other.rough_days <= cluster.rough_days for other in smaller)

    def _is_too_small(self, cluster: SizedCluster) -> bool:
        """Returns whether a cluster without a plan is smaller than all with one: it lacks memory."""
        planned = [nodes for nodes, other in self.seen.items() if other.plan is not None]
        return cluster.lacks_memory and cluster.nodes < min(planned, default=math.inf)

    def _guess(self, days: float) -> float:
        """Returns the position of the size to begin with: at the efficiency of those that were looked at."""
        known = [cluster for cluster in self.seen.values() if cluster.plan is not None]
        if known:
            nearest = min(known, key=lambda cluster: abs(math.log(cluster.rough_days / days)))
            return self._place(nearest.nodes * nearest.rough_days / days)
        gpu = self.kind.cluster.gpu
        peak = float(gpu.peak.get("bf16") or max(gpu.peak.values()))
        flops = 6 * self.question.parameters * self.question.tokens
        return self._place(flops / (peak * USUAL_MFU * days * DAY) / self.kind.gpus_per_node)

    def find_size(self, nodes: float) -> int:
        """Returns the nearest number of nodes that is looked at."""
        return min(self.sizes, key=lambda size: abs(size - nodes))

    def _place(self, nodes: float) -> float:
        """Returns the position of the first size with so many nodes."""
        return next((at for at, size in enumerate(self.sizes) if size >= nodes), len(self.sizes) - 1)

    def _find_next(self, cluster: SizedCluster, days: float, slower: float, low: int, high: int) -> float:
        """Returns the position to look at next: where the limit is met at equal efficiency, or half-way."""
        if cluster.plan is None:
            return low + PER_OCTAVE / 2
        at = self._place(cluster.nodes * cluster.rough_days * slower / days)
        return min(max(at, low + 1), high - 1)

    @property
    def planned(self) -> Sequence[SizedCluster]:
        """Clusters that were looked at and have a plan, by their size."""
        return [self.seen[nodes] for nodes in sorted(self.seen) if self.seen[nodes].plan is not None]

    def _least_days(self, nodes: int) -> float:
        """Returns the days that a size takes at least: at the best efficiency that any has shown, and `SLACK` more."""
        least = min((cluster.gpu_seconds for cluster in self.planned), default=0.0)
        return least * (1 - SLACK) * self.question.tokens / (nodes * self.kind.gpus_per_node) / DAY

    def find_fastest_within(self, budget: float) -> SizedCluster | None:
        """Returns the cluster of the fewest days of those that keep a budget in nine of ten runs; None if none does.

        Money rises with nodes, nearly, as efficiency falls: it is bisected, and sizes up to half as large again, and
        half as small, as the largest that keeps the budget are looked at, too, and all smaller ones that may be faster.
        """
        low, high = -1, len(self.sizes)
        without: set[int] = set()
        while remaining := [at for at in range(low + 1, high) if at not in without]:
            at = remaining[len(remaining) // 2]
            cluster = self.look_at(self.sizes[at])
            if cluster.plan is None:
                without.add(at)
            elif self._is_within(cluster, budget):
                low = at
            else:
                high = at
        larger = [self.look_at(size) for size in self.sizes[low + 1 : low + 1 + PER_OCTAVE // 2]]
        able = [cluster for cluster in [*self.planned, *larger] if self._is_within(cluster, budget)]
        best = min(able, key=lambda cluster: cluster.sure_days, default=None)
        for at in range(low - 1, -1, -1):
            is_near = at >= low - PER_OCTAVE // 2
            if best is None or (not is_near and self._least_days(self.sizes[at]) >= best.sure_days):
                break
            cluster = self.look_at(self.sizes[at])
            if self._is_within(cluster, budget) and cluster.sure_days < best.sure_days:
                best = cluster
        return best

    def _is_within(self, cluster: SizedCluster, budget: float) -> bool:
        """Returns whether nine of ten runs keep a budget."""
        return cluster.can_end() and cluster.sure_cost is not None and cluster.sure_cost <= budget
