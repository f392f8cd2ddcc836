"""DAPPLE: stages of a synchronous pipeline with replicas, by the latency of warm-up, steady phase and ending.

With the pivot stage Q, a step of m micro-batches takes the sum of F_s up to Q + (m - 1) (F_Q + B_Q) + the largest, over
stages, of its gradient sum and the backward passes that it still waits for. Of all prefixes of as many layers and GPUs
that of least latency stays, with all other layers as a stage (Fan et al. 2021, arXiv 2007.01045). In a job,
stages are on the next free GPUs.

On a profile the planner is as its authors released it, with replicated stages on named GPUs of machines. Times are
those of a whole batch on a device; a step of m micro-batches of each of the r copies of a pipeline takes

    (m - 1) T / m + W / (r m) + sum of the transfers of a micro-batch
        + largest, over stages s, of its sum of gradients - s T / m, but not less than 0

with T the slowest stage or transfer and W the whole model. Of a stage but the last the sum of gradients counts the
first layer of the next stage, too. Candidates: every pair of stages on all GPUs, of the least step; straight pipelines
(a GPU for a stage and copy) of two and of all GPUs, of the least T; and a single stage on every multiple of copies.
GPUs are chosen by three policies: machines that are empty, machines in use, or spread over all (AlibabaPAI/DAPPLE,
`src/orchestration`, `src/parallelism/sync_pipeline.rs`, `src/environment/device.rs`; section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import check_time
from meshcast.experiments.planning.graph import antichain_states, find_contained, output_bytes
from meshcast.experiments.planning.planner import Planner, Proposal, SpaceOptimum, write_stages
from meshcast.experiments.planning.problem import Problem, SearchBudget, settings_of
from meshcast.experiments.planning.profile import NetworkLevel
from meshcast.experiments.planning.stages import PlannedStage, StageTable
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper

MAX_INTERVALS = 2_000
"""Intervals of pivots that are bounded before the bound so far counts."""


class DapplePlanner(Planner):
    paper = Paper("arXiv:2007.01045", "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", 2021)
    restrictions = ("shard tensors", "recompute", "place a stage of a job elsewhere than on the next free GPUs")
    modes = ("paper", "ours")

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        return self._plan_graph(problem) if problem.mode == "paper" else self._plan_layers(problem)

    def _plan_graph(self, problem: Problem) -> Proposal:
        levels: tuple[NetworkLevel, ...] = tuple(getattr(problem, "levels", ()))
        settings = settings_of(problem)
        if len(levels) not in (1, 2) or "batch" not in settings:
            rule = "DAPPLE needs one or two levels of the network (GPUs of a machine, machines), and a batch"
            raise PlanError(f"problem {problem.name}", rule, "Give levels, the innermost first, and batch=samples")
        inner, outer = (*levels, NetworkLevel(1, levels[0].bandwidth))[:2]
        message = float(settings.get("message_bandwidth", outer.bandwidth))
        network = MachineNetwork(outer.width, inner.width, inner.bandwidth, outer.bandwidth, message)
        graph = problem.graph()
        states = antichain_states(graph)
        states = states[np.argsort(states.sum(axis=1), kind="stable")]
        times = settings["batch"] / settings.get("profile_batch", 1)
        pipelines = PlacedPipelines(
            network,
            times * (states @ (graph.figures["forward"] + graph.figures["backward"])),
            states @ graph.figures["parameters"],
            times * output_bytes(graph, states),
            find_contained(states),
            int(settings["batch"]),
            int(settings.get("micro_batch", 1)),
        )
        plans = [*pipelines.pairs(), *pipelines.straight(), *pipelines.replicas()]
        best = min(plans, key=lambda plan: plan.seconds)
        stages = [
            {"nodes": np.flatnonzero(states[end] & ~states[begin]).tolist(), "gpus": sorted(devices)}
            for begin, end, devices in best.stages
        ]
        reason = "its stages are on GPUs by number, and cut graphs between any two layers"
        return Proposal({"stages": stages, "copies": best.copies}, best.seconds, len(plans), None, reason)

    def _plan_layers(self, problem: Problem) -> Proposal:
        table = self._choose_options(problem)
        search = PrefixSearch(table, problem.gpus, problem.microbatches)
        stages, value = search.run()
        if not math.isfinite(value):
            raise self.nothing_fits(problem, "Give GPUs of more memory, or smaller micro-batches")
        return Proposal(write_stages(problem, table, stages), value, search.visited)

    def _choose_options(self, problem: Problem) -> StageTable:
        """Returns the table of stages with replicas alone."""
        table = problem.stages().select(
            lambda option: option.plan.get("tp", 1) == 1 and option.plan.get("recompute", "none") == "none"
        )
        if not table.options:
            raise self.nothing_fits(problem, "Give micro-batches of more sequences, so that replicas divide them")
        return table

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        if problem.mode == "paper" or problem.microbatches == 1:
            return None
        bound = LatencyBound(self._choose_options(problem), problem.gpus, problem.microbatches)
        return SpaceOptimum(bound.bound(proposal.value), "bound of the latency")


def pipeline_latency(table: StageTable, stages: Sequence[PlannedStage], microbatches: int) -> float:
    """Returns DAPPLE's latency of a step [s]; infinite if a stage does not fit with the micro-batches in flight."""
    cells = [(stage.layers[0], stage.layers[-1], stage.option) for stage in stages]
    if any(table.behind[cell] < len(cells) - 1 - place for place, cell in enumerate(cells)):
        return math.inf
    both, forward = [float(table.seconds[cell]) for cell in cells], [float(table.forward[cell]) for cell in cells]
    backward = [seconds - ahead for seconds, ahead in zip(both, forward, strict=True)]
    pivot = len(cells) - 1
    for place in range(len(cells) - 2, -1, -1):
        if (microbatches - 1) * (both[place] - both[pivot]) > sum(both[place + 1 : pivot]):
            pivot = place
    ending = max(
        float(table.once[cell]) + (sum(backward[place : pivot + 1]) if place <= pivot else -sum(backward[pivot:place]))
        for place, cell in enumerate(cells)
    )
    return sum(forward[: pivot + 1]) + (microbatches - 1) * both[pivot] + ending


Prefix = tuple[PlannedStage, ...]


class PrefixSearch:
    """The search over prefixes of stages from a table."""

    def __init__(self, table: StageTable, gpus: int, microbatches: int) -> None:
        self.table, self.gpus, self.microbatches, self.visited = table, gpus, microbatches, 0

    def run(self) -> tuple[Prefix, float]:
        """Returns the best stages that were met, and their latency [s]; infinite if nothing fits."""
        best, value, complete = self._complete(())
        best, value = (best, value) if complete else ((), math.inf)
        kept: dict[tuple[int, int], Prefix] = {(0, 0): ()}
        for layer in range(1, self.table.layers):
            shortest: dict[int, tuple[float, Prefix]] = {}
            for (first, used), before in kept.items():
                for number, option in enumerate(self.table.options):
                    gpus = used + option.gpus
                    if gpus >= self.gpus:
                        continue
                    prefix = (*before, PlannedStage(range(first, layer), number))
                    stages, latency, complete = self._complete(prefix)
                    if latency < shortest.get(gpus, (math.inf, ()))[0]:
                        shortest[gpus] = latency, prefix
                    if complete and latency < value:
                        best, value = stages, latency
            kept |= {(layer, gpus): prefix for gpus, (_, prefix) in shortest.items()}
        return best, value if best else math.inf

    def _complete(self, prefix: Prefix) -> tuple[Prefix, float, bool]:
        """Returns a prefix with all other layers as the best last stage on all other GPUs, or on as many as an option
        has; the latency [s], and whether all GPUs are used."""
        first = prefix[-1].layers.stop if prefix else 0
        left = self.gpus - sum(self.table.options[stage.option].gpus for stage in prefix)
        size = max((option.gpus for option in self.table.options if option.gpus <= left), default=0)
        best: tuple[Prefix, float, bool] = ((), math.inf, False)
        for number, option in enumerate(self.table.options):
            if option.gpus == size:
                check_time()
                stages = (*prefix, PlannedStage(range(first, self.table.layers), number))
                self.visited += 1
                latency = pipeline_latency(self.table, stages, self.microbatches)
                if latency < best[1]:
                    best = stages, latency, size == left
        return best


class LatencyBound:
    """Bounds of the latency of m micro-batches on exactly `gpus` GPUs, over all sequences of stages.

    With T = F + B of the pivot, the rule that chooses it says that no stage behind it takes longer than T, and that a
    stage before it is longer by (the seconds of the stages between) / (m - 1) at most. The latency is at least m T, the
    seconds of the stages before the pivot, and what the first stage costs once a step. For an interval of T both limits
    and the latency are relaxed to its ends, and what is left is a shortest path. Intervals whose bound is below the
    best latency known are halved until they hold a single T.
    """

    def __init__(self, table: StageTable, gpus: int, microbatches: int) -> None:
        self.table, self.gpus, self.microbatches, self.intervals = table, gpus, microbatches, 0
        self.sizes = [option.gpus for option in table.options]
        self.usable = [number for number, size in enumerate(self.sizes) if size <= gpus]
        self.seconds = np.where(np.isfinite(table.seconds) & (table.behind >= 0), table.seconds, np.inf)
        once = np.where(np.isfinite(table.once[0]), table.once[0], 0.0)
        self.costs = np.concatenate([self.seconds[:1] + once, self.seconds[1:]])

    def bound(self, known: float) -> float:
        """Returns the least latency that stages may have, at most that of known ones [s]."""
        if self.microbatches == 1:
            return -math.inf  # any stage may be the pivot
        pivots = np.unique(self.seconds[np.isfinite(self.seconds)])
        pivots = pivots[pivots <= known / self.microbatches]
        open_intervals = [(0, len(pivots))] if len(pivots) else []
        least = known
        while open_intervals:
            first, end = open_intervals.pop()
            value = self._bound_interval(float(pivots[first]), float(pivots[end - 1]), known)
            if value >= known:
                continue
            if end - first == 1 or self.intervals >= MAX_INTERVALS:
                least = min(least, value)
                continue
            middle = (first + end) // 2
            open_intervals += [(first, middle), (middle, end)]
        return least

    def _bound_interval(self, low: float, high: float, known: float) -> float:
        """Returns the bound of plans with a pivot of `low` to `high` and a latency of at most `known` seconds [s]."""
        self.intervals += 1
        prefixes = self._shorten_prefixes(self._limit_stages(low, high, known))
        covered = self._cover_rests(high)
        pivots = (self.seconds >= low) & (self.seconds <= high)
        best = math.inf
        for number in self.usable:
            left = self.gpus - self.sizes[number]
            for first, last in np.argwhere(pivots[:, :, number]).tolist():
                feasible = covered[last + 1, left::-1] if left else covered[last + 1, :1]
                before = np.where(feasible, prefixes[first, : left + 1], np.inf).min()
                pivot = self.microbatches * self.table.seconds[first, last, number]
                once = self.table.once[first, last, number] if first == 0 else 0.0
                best = min(best, float(before + pivot + once))
        return best

    def _limit_stages(self, low: float, high: float, known: float) -> list[float]:
        """Returns the most seconds of the first, second ... stage before the pivot, and last of all further ones."""
        most = (known - low) / self.microbatches
        limits = [min(high, most)]
        while limits[-1] < most and len(limits) < self.table.layers:
            limits.append(min(high + sum(limits) / (self.microbatches - 1), most))
        return limits

    def _shorten_prefixes(self, limits: list[float]) -> np.ndarray:
        """Returns the least sum of seconds of stages before the pivot, by layers and GPUs [layers + 1, gpus + 1]."""
        totals: np.ndarray | None = None
        for place in range(len(limits), 0, -1):
            allowed = (self.seconds <= limits[place - 1]) & (self.table.behind >= place)
            totals = self._lengthen(np.where(allowed, self.costs, np.inf), totals)
        assert totals is not None
        return totals

    def _lengthen(self, costs: np.ndarray, before: np.ndarray | None = None) -> np.ndarray:
        """Returns the least costs of stages that hold the layers up to a place, on exactly so many GPUs [layers + 1,
        gpus + 1]: of a stage behind those before, or of any number."""
        layers = self.table.layers
        totals = np.full((layers + 1, self.gpus + 1), np.inf)
        totals[0, 0] = 0.0
        before = totals if before is None else before
        finite = np.isfinite(costs)
        usable, firsts = finite.any(axis=0), finite.argmax(axis=0)
        for end in range(1, layers + 1):
            for number in np.flatnonzero(usable[end - 1]).tolist():
                check_time()
                if (left := self.gpus + 1 - self.sizes[number]) > 0:
                    rows = slice(firsts[end - 1, number], end)
                    sums = costs[rows, end - 1, number, None] + before[rows, :left]
                    part = totals[end, self.sizes[number] :]
                    np.minimum(part, sums.min(axis=0), out=part)
        return totals

    def _cover_rests(self, limit: float) -> np.ndarray:
        """Returns whether stages of at most `limit` seconds hold the layers from a place on [layers + 1, gpus + 1]."""
        backwards = self.seconds[::-1, ::-1].transpose(1, 0, 2)
        return np.isfinite(self._lengthen(np.where(backwards <= limit, 0.0, np.inf)))[::-1]


Devices = frozenset[int]

NOBODY: Devices = frozenset()


class MachineNetwork(NamedTuple):
    """Machines of equally many GPUs.

    inside: bandwidth between GPUs of a machine [bytes/s].
    between: bandwidth of collectives over machines [bytes/s].
    message: bandwidth into a machine from others [bytes/s].
    """

    machines: int
    per_machine: int
    inside: float
    between: float
    message: float

    @property
    def gpus(self) -> int:
        return self.machines * self.per_machine

    def spans(self, devices: Devices) -> bool:
        """Returns whether GPUs are of several machines."""
        return min(devices) // self.per_machine != max(devices) // self.per_machine

    def gradient_seconds(self, devices: Devices, nbytes: float) -> float:
        """Returns the time of an all-reduce of gradients [s]: over the network if the devices span machines, otherwise
        over the links of a machine, one for every two devices."""
        count = len(devices)
        if count == 1:
            return 0.0
        sent = 2 * nbytes * (count - 1) / count
        return sent / self.between if self.spans(devices) else sent / self.inside / (count // 2)

    def transfer_seconds(self, source: Devices, target: Devices, nbytes: float) -> float:
        """Returns the seconds from all GPUs of a stage to all of the next; into a machine, the share from others."""
        if self.spans(target):
            return nbytes / self.between
        others = sum(1 for device in source if self.spans(target | {device}))
        return nbytes * others / len(source) / self.message if others else nbytes / self.inside

    def place(self, used: Devices, need: int) -> list[Devices]:
        """Returns the GPUs that the three policies choose, equal choices once."""
        machines = [range(first, first + self.per_machine) for first in range(0, self.gpus, self.per_machine)]
        free = [[device for device in machine if device not in used] for machine in machines]
        empty = [device for devices in free if len(devices) == self.per_machine for device in devices]
        begun = [device for devices in free if len(devices) < self.per_machine for device in devices]
        rounds = [devices[turn] for turn in range(self.per_machine) for devices in free if turn < len(devices)]
        return [*dict.fromkeys(frozenset(order[:need]) for order in (empty, begun, rounds) if len(order) >= need)]

    def place_copies(self, used: Devices, copies: int) -> list[Devices]:
        """Returns the GPUs of a stage with a GPU in each of several copies, placed in turn."""
        placed: dict[Devices, None] = {NOBODY: None}
        for _ in range(copies):
            placed = {before | devices: None for before in placed for devices in self.place(used | before, 1)}
        return [*placed]


class PlacedStage(NamedTuple):
    """The states that a stage begins and ends with, and its GPUs."""

    begin: int
    end: int
    devices: Devices


class PlacedPlan(NamedTuple):
    """Stages, copies of the pipeline that they are of, and seconds of a step."""

    stages: tuple[PlacedStage, ...]
    copies: int
    seconds: float


class PlacedPipelines(NamedTuple):
    """The candidates of a model on a network.

    seconds: of the layers up to every state, of a batch on a device; 0 for the first [states].
    weights: bytes of their parameters [states].
    sent: bytes of a batch that leave every state [states].
    follows: whether a state holds all layers of another [states, states].
    batch, micro: samples of a batch and of a micro-batch.
    """

    network: MachineNetwork
    seconds: np.ndarray
    weights: np.ndarray
    sent: np.ndarray
    follows: np.ndarray
    batch: int
    micro: int

    @property
    def last(self) -> int:
        return len(self.seconds) - 1

    def price(self, stages: Sequence[PlacedStage], copies: int, slowest: float) -> PlacedPlan:
        micro = self.batch // copies // self.micro
        if not micro:
            return PlacedPlan(tuple(stages), copies, math.inf)
        block = slowest / micro
        length = block * (micro - 1) + float(self.seconds[-1]) / copies / micro
        for stage, following in pairwise(stages):
            nbytes = float(self.sent[stage.end]) / copies / micro
            length += self.network.transfer_seconds(stage.devices, following.devices, nbytes)
        ending = 0.0
        for place, (begin, end, devices) in enumerate(stages):
            counted = float(self.weights[min(end + 1, self.last)] - self.weights[begin])
            ending = max(ending, self.network.gradient_seconds(devices, counted) - place * block)
        return PlacedPlan(tuple(stages), copies, length + ending)

    def pairs(self) -> Iterator[PlacedPlan]:
        """Yields every pair of stages on all GPUs."""
        gpus = self.network.gpus
        places = [
            (first, second)
            for count in range(1, gpus)
            for first in self.network.place(NOBODY, count)
            for second in self.network.place(first, gpus - count)
        ]
        for cut in range(1, self.last):
            before, behind = float(self.seconds[cut]), float(self.seconds[-1] - self.seconds[cut])
            for first, second in places:
                message = self.network.transfer_seconds(first, second, float(self.sent[cut]))
                slowest = max(before / len(first), behind / len(second), message)
                yield self.price((PlacedStage(0, cut, first), PlacedStage(cut, self.last, second)), 1, slowest)

    def replicas(self) -> Iterator[PlacedPlan]:
        """Yields a single stage on every multiple of copies: each copy of the pipeline has as many GPUs."""
        for depth in range(2, self.network.gpus + 1):
            copies = self.network.gpus // depth
            devices = self.network.place(NOBODY, depth * copies)[0]
            slowest = float(self.seconds[-1]) / depth / copies
            yield self.price((PlacedStage(0, self.last, devices),), copies, slowest)

    def straight(self) -> Iterator[PlacedPlan]:
        """Yields pipelines of two stages and of as many as GPUs, with a GPU for a stage of every copy."""
        for depth in sorted({2, self.network.gpus} if self.network.gpus % 2 == 0 else {self.network.gpus}):
            plan = self._least_bottleneck(depth, self.network.gpus // depth)
            if plan is not None:
                yield plan

    def _least_bottleneck(self, depth: int, copies: int) -> PlacedPlan | None:
        """Returns the stages of the least slowest stage or transfer, by the best up to every state and GPUs in use."""
        start = self.network.place(NOBODY, copies)[0]
        ends = range(1, self.last + 1)
        best = {(end, start): (float(self.seconds[end]) / copies, (PlacedStage(0, end, start),)) for end in ends}
        for _ in range(1, depth):
            longer: dict[tuple[int, Devices], tuple[float, tuple[PlacedStage, ...]]] = {}
            for (begin, used), (slowest, stages) in best.items():
                for devices in self.network.place_copies(used, copies):
                    message = self.network.transfer_seconds(stages[-1].devices, devices, 2 * float(self.sent[begin]))
                    for end in np.flatnonzero(self.follows[begin]).tolist():
                        seconds = float(self.seconds[end] - self.seconds[begin]) / copies
                        value, key = max(slowest, seconds, message), (end, used | devices)
                        if value < longer.get(key, (math.inf, ()))[0]:
                            longer[key] = value, (*stages, PlacedStage(begin, end, devices))
            best = longer  # type: ignore[assignment]
        whole = [value for (end, _), value in best.items() if end == self.last]
        if not whole:
            return None
        slowest, stages = min(whole, key=lambda value: value[0])
        return self.price(stages, copies, slowest)
