"""AdaPipe: every stage keeps what its memory allows, and layers are divided by what is then recomputed.

For all degrees: a knapsack for every range of layers on every stage, and dynamic programming over the stages of 1F1B,
whose first ones have most micro-batches in flight. The knapsack chooses of every layer the units that are recomputed:
norms, functions of activation, attention's core, attention, the MLP or experts, up-projections of latent attention, or
the whole layer; kept bytes are counted in parts of a layer's, rounded up. With the times F and B of each stage, for p
stages and n micro-batches:

    W_s = F_s + max(W_{s+1} + B_{s+1}, (p - s - 1) F_s)      warm-up: until the first gradient has arrived
    E_s = B_s + max(E_{s+1} + F_{s+1}, (p - s - 1) B_s)      ending: from the last forward pass on
    step = W_0 + E_0 + (n - p) max_s (F_s + B_s)

and stages are prepended: for every first layer the suffix of the shortest step is kept (Sun et al. 2024,
https://doi.org/10.1145/3620666.3651359, section 5). All three sums grow with those of the suffix, so that suffixes
which no other beats in all of them give the optimum. The plan is executed by `memory/adapipe`, whose units these are:
the paper's are single matrix products, so it may keep the output of one of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import check_time
from meshcast.experiments.planning.cores.ordered_stages import Partition
from meshcast.experiments.planning.planner import Planner, Proposal, SpaceOptimum
from meshcast.experiments.planning.pricing.job import JobProblem, require_job
from meshcast.experiments.planning.pricing.pipelines import UniformPipeline, uniform_pipelines
from meshcast.experiments.planning.pricing.stage_prices import UnitCosts, range_largest, range_totals
from meshcast.experiments.planning.problem import Changes, Problem, SearchBudget
from meshcast.experiments.planning.stages import StageOption
from meshcast.simulator.ir.scheme import Paper

PARTS = 512
"""Parts of the largest kept bytes of a layer in which the knapsack counts."""

Unit = tuple[str, ...]
"""What is recomputed of a layer, as `memory/adapipe` names it."""


def list_units(has_experts: bool, is_latent: bool) -> list[Unit]:
    """Returns all combinations of parts of a layer that may be recomputed.

    >>> list_units(False, False)[:4], len(list_units(False, False))
    ([(), ('norm',), ('act',), ('act', 'norm')], 19)
    """
    blocks = [("",), ("act",), ("mlp",)] + [("moe",)] * has_experts
    parts = [["", "core_attn", "attention"], [block for (block,) in blocks], ["", "norm"]]
    parts += [["", "mla_up_proj"]] * is_latent
    return [*(tuple(filter(None, names)) for names in product(*parts)), ("layer",)]


class StagePrices(NamedTuple):
    """Prices of a stage with the layers from first to last [layers, layers].

    forward, backward: seconds of its passes, infinite where even full recomputation does not fit [s].
    """

    forward: np.ndarray
    backward: np.ndarray


class UnitChoice(NamedTuple):
    """What recomputing some units of a layer costs.

    units: that are recomputed.
    seconds: of every layer [s].
    kept: bytes that every layer keeps of a micro-batch in flight.
    peak: bytes that a pass needs above that, of the layer that needs most.
    """

    units: Unit
    seconds: np.ndarray
    kept: np.ndarray
    peak: float


class Knapsack:
    """The units of layers that are recomputed for the least seconds within a number of kept bytes.

    choices: what may be recomputed of every layer.
    part: bytes in which it counts.
    """

    def __init__(self, choices: Sequence[UnitChoice], part: float) -> None:
        self.choices, self.part = choices, part
        self.seconds = np.stack([choice.seconds for choice in choices])
        self.parts = np.ceil(np.stack([choice.kept for choice in choices]) / part - 1e-9).astype(int)
        kinds = [*zip(*self.seconds.tolist(), *self.parts.tolist(), strict=True)]
        self.kinds = [kinds.index(kind) for kind in kinds]  # the first layer that is alike
        self._least: dict[tuple[int, ...], np.ndarray] = {(): np.zeros(1)}

    def least_seconds(self, layers: Sequence[int]) -> np.ndarray:
        """Returns the least seconds of recomputation of some layers by the parts that they may keep, the last for more
        [s; parts]; infinite where they must keep more."""
        kinds = tuple(sorted(self.kinds[layer] for layer in layers))
        for count in range(1, len(kinds) + 1):
            if kinds[:count] not in self._least:
                check_time()
                before, kind = self._least[kinds[: count - 1]], kinds[count - 1]
                least = np.full(len(before) + self.parts[:, kind].max(), np.inf)
                for seconds, parts in zip(self.seconds[:, kind], self.parts[:, kind], strict=True):
                    own = least[parts : parts + len(before)]
                    np.minimum(own, before + seconds, out=own)
                    np.minimum(least[parts + len(before) :], before[-1] + seconds, out=least[parts + len(before) :])
                self._least[kinds[:count]] = least
        return self._least[kinds]

    def choose(self, layers: Sequence[int], parts: int) -> list[Unit]:
        """Returns the units of every layer, in order, for the least seconds within so many parts."""
        chosen: dict[int, list[Unit]] = {}
        left = sorted(layers, key=lambda layer: self.kinds[layer])
        while left:
            least, before = self.least_seconds(left), self.least_seconds(left[:-1])
            parts, kind = min(parts, len(least) - 1), self.kinds[left.pop()]
            for place, choice in enumerate(self.choices):
                rest = parts - self.parts[place, kind]
                if rest >= 0 and before[min(rest, len(before) - 1)] + self.seconds[place, kind] == least[parts]:
                    chosen.setdefault(kind, []).append(choice.units)
                    parts = rest
                    break
        # Layers that recompute most come first, so that runs of layers alike are few.
        order = {kind: sorted(units, key=lambda names: (-len(names), names)) for kind, units in chosen.items()}
        return [order[self.kinds[layer]].pop(0) for layer in layers]


class Suffix(NamedTuple):
    """The stages from a place on.

    warm_up, ending: as the stage before sees them [s].
    slowest: seconds of the slowest stage [s].
    layers: of every stage.
    first: seconds of the first of these stages, which are in both sums [s].
    """

    warm_up: float
    ending: float
    slowest: float
    layers: tuple[int, ...]
    first: float = 0.0

    def prepend(self, layers: int, forward: float, backward: float, behind: int) -> Suffix:
        """Returns the suffix with a further stage in front, with `behind` + 1 micro-batches in flight."""
        both = forward + backward
        return Suffix(
            both + max(self.warm_up, behind * forward),
            both + max(self.ending, behind * backward),
            max(both, self.slowest),
            (layers, *self.layers),
            both,
        )

    def step(self, steady: int) -> float:
        """Returns the seconds of a step if no stage is before, with so many micro-batches in the steady state."""
        return self.warm_up + self.ending - self.first + steady * self.slowest


def plan_phases(stages: Sequence[StagePrices], microbatches: int, keep: int = 1) -> Partition | None:
    """Returns the stages of the shortest step that was met; None if nothing fits.

    stages: prices of every stage.
    keep: suffixes kept for a first layer; 1: the paper's search. 0: all that may matter, and the plan is the optimum.
    Raises OutOfTime.
    """
    depth, layers = len(stages), len(stages[0].forward)
    suffixes: list[list[Suffix]] = [[] for _ in range(layers)] + [[Suffix(0.0, 0.0, 0.0, ())]]
    visited = 0
    for stage in range(depth - 1, -1, -1):
        behind = min(microbatches, depth - stage) - 1
        forward, backward = stages[stage].forward.tolist(), stages[stage].backward.tolist()
        longer: list[list[Suffix]] = [[] for _ in range(layers + 1)]
        for first in range(layers):
            check_time()
            for last in range(first, layers):
                seconds = forward[first][last], backward[first][last]
                if not math.isfinite(sum(seconds)):
                    continue
                visited += len(suffixes[last + 1])
                longer[first] += [after.prepend(last - first + 1, *seconds, behind) for after in suffixes[last + 1]]
        steady = max(0, microbatches - (depth - stage))
        # The rank of the first stage depends on its passes: all of its suffixes are compared below.
        suffixes = [_prune(some, steady, keep) for some in longer] if stage else longer
    # The first stage has no stage before: its warm-up ends, and its ending begins, with its passes.
    steps = [suffix.step(max(0, microbatches - depth)) for suffix in suffixes[0]]
    value = min(steps, default=math.inf)
    return Partition(suffixes[0][steps.index(value)].layers, value, visited) if math.isfinite(value) else None


def _prune(suffixes: list[Suffix], steady: int, keep: int) -> list[Suffix]:
    """Returns the suffixes of the shortest steps, or all that no other beats in its three sums."""
    ranked = sorted(suffixes, key=lambda suffix: (suffix.step(steady), suffix.layers))
    if keep:
        return ranked[:keep]
    kept: list[Suffix] = []
    for suffix in ranked:
        if not any(all(a <= b for a, b in zip(better[:3], suffix[:3], strict=True)) for better in kept):
            kept.append(suffix)
    return kept


class StageKnapsacks:
    """The recomputation of the stages of a pipeline whose stages have equal degrees.

    memory: of a GPU [bytes]. microbatches: of a step. depth: number of stages. plain: costs of units that recompute
    nothing. choices: of every layer.
    """

    def __init__(
        self, memory: float, microbatches: int, depth: int, plain: UnitCosts, choices: Sequence[UnitChoice]
    ) -> None:
        self.memory, self.microbatches, self.depth, self.plain = memory, microbatches, depth, plain
        useful = [choice for choice in choices if not any(_beats(other, choice) for other in choices)]
        part = max(float(max(choice.kept.max() for choice in useful)) / PARTS, 1.0)
        # A pass needs memory for what is recomputed at once: less is left for the layers.
        peaks = sorted({choice.peak for choice in useful})
        self.levels = [(peak, Knapsack([choice for choice in useful if choice.peak <= peak], part)) for peak in peaks]
        ends = np.concatenate([plain.kept[:1], np.zeros(len(plain.kept) - 2), plain.kept[-1:]])
        self.states, self.ends = range_totals(plain.states), range_totals(ends)
        self.end_peaks = range_largest(np.where(ends == 0.0, 0.0, plain.peak))

    def parts(self, stage: int, peak: float, part: float) -> np.ndarray:
        """Returns the parts that the layers from first to last may keep on a stage [layers, layers]."""
        flights = min(self.microbatches, self.depth - stage)
        room = self.memory - self.states - np.maximum(self.end_peaks, peak) - flights * self.ends
        return np.floor(room / flights / part + 1e-9)

    def price(self, stage: int) -> StagePrices:
        """Returns the prices of a stage with the least recomputation that fits."""
        layers = len(self.states)
        extra = np.full((layers, layers), np.inf)
        for peak, knapsack in self.levels:
            room = self.parts(stage, peak, knapsack.part)
            for first in range(layers):
                for last in range(first, layers):
                    if room[first, last] < 0:
                        break  # with more layers there is less
                    least = knapsack.least_seconds(range(first, last + 1))
                    seconds = least[min(int(room[first, last]), len(least) - 1)]
                    extra[first, last] = min(extra[first, last], seconds)
        inside = np.where(np.tri(layers, dtype=bool).T, 0.0, np.inf)
        return StagePrices(range_totals(self.plain.forward) + inside, range_totals(self.plain.backward) + extra)

    def choose(self, stage: int, first: int, last: int) -> list[Unit]:
        """Returns what a stage recomputes of each of its layers."""
        layers = range(first, last + 1)
        best: tuple[float, list[Unit]] = (np.inf, [()] * (last - first + 1))
        for peak, knapsack in self.levels:
            room = int(self.parts(stage, peak, knapsack.part)[first, last])
            least = knapsack.least_seconds(layers)
            if room >= 0 and least[min(room, len(least) - 1)] < best[0]:
                best = float(least[min(room, len(least) - 1)]), knapsack.choose(layers, room)
        return best[1]


def _beats(other: UnitChoice, choice: UnitChoice) -> bool:
    """Returns whether another choice is no worse for any layer, and better for some or simpler."""
    pairs = [(other.seconds, choice.seconds), (other.kept, choice.kept), (np.array(other.peak), np.array(choice.peak))]
    if not all(bool(np.all(mine <= its)) for mine, its in pairs):
        return False
    same = all(bool(np.all(mine == its)) for mine, its in pairs)
    return not same or (len(other.units), other.units) < (len(choice.units), choice.units)


class AdaPipePlanner(Planner):
    paper = Paper(
        "https://doi.org/10.1145/3620666.3651359",
        "AdaPipe: Optimizing Pipeline Parallelism with Adaptive Recomputation and Partitioning",
        2024,
    )
    restrictions = (
        "recompute single matrix products of attention or the MLP",
        "use stages of heterogeneous degrees",
        "cut inside a layer",
    )

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        return self._plan(problem, keep=1)

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Returns the optimum by the same search, which keeps all suffixes that may matter."""
        optimum = self._plan(problem, keep=0)
        return SpaceOptimum(optimum.value, "dynamic programming over all suffixes")

    def _plan(self, problem: Problem, keep: int) -> Proposal:
        job = require_job(problem)
        table = job.stages()
        best: Proposal | None = None
        visited = 0
        for plain in uniform_pipelines(job, table):
            if plain.option.plan["recompute"] != "none":
                continue
            knapsacks = self._price_units(job, plain)
            stages = [knapsacks.price(stage) for stage in range(plain.depth)]
            plan = plan_phases(stages, job.microbatches, keep)
            visited += plain.depth * table.layers**2
            if plan is None:
                continue
            visited += plan.visited
            ends = np.cumsum(plan.layers).tolist()
            cells = [(end - count, end - 1) for end, count in zip(ends, plan.layers, strict=True)]
            value = plan.value + max(float(table.once[(*cell, plain.number)]) for cell in cells)
            if best is None or value < best.value:
                units = [knapsacks.choose(stage, *cell) for stage, cell in enumerate(cells)]
                best = Proposal(self._write(job, plain, plan.layers, units), value, visited)
        if best is None:
            raise self.nothing_fits(problem, "Give more GPUs, smaller micro-batches, or GPUs of more memory")
        return best._replace(visited=visited)

    def _price_units(self, job: JobProblem, plain: UniformPipeline) -> StageKnapsacks:
        """Returns the knapsacks of a pipeline: every choice is priced on all layers."""
        model, choices = job.job.model, []
        for units in list_units(model.moe is not None, model.mla is not None):
            again = "full" if units == ("layer",) else units or "none"
            costs = job.units_of(StageOption(plain.option.gpus, {**plain.option.plan, "recompute": again}))
            slower = costs.forward + costs.backward - plain.units.forward - plain.units.backward
            peak = float(costs.peak[1:-1].max())
            choices.append(UnitChoice(units, np.maximum(slower, 0.0)[1:-1], costs.kept[1:-1], peak))
        return StageKnapsacks(job.memory, job.microbatches, plain.depth, plain.units, choices)

    def _write(
        self, job: JobProblem, pipeline: UniformPipeline, layers: tuple[int, ...], units: Sequence[Sequence[Unit]]
    ) -> Changes:
        """Returns the job whose stages recompute these units of their layers."""
        entries = [{**pipeline.option.plan, "layers": held} for held in layers]
        changes = job.entries_plan(entries, {})
        return job.add_schemes(
            changes,
            [
                [{"use": "memory/adapipe", "units": [[*names] for names in stage]}] if any(stage) else []
                for stage in units
            ],
        )
