"""AutoPipe: balanced stages of blocks, moved around the master stage of a simulated pipeline, and sliced micro-batches.

For every number of stages, each with as many replicas: from the partition of least slowest stage on, blocks move to
stages before and behind the master stage, the last one without bubbles (Liu et al. 2022, "AutoPipe", CLUSTER 2022; the
authors' program, `Merak/cpp/autopipe.cpp` of HPDL-Group/Merak, which may leave stages empty: here all have a block).
Then the slicer: the forward passes of the first
micro-batches are done in halves, so that the last stage begins in half of the time; of as few as make the step
shortest. On a profile the blocks are those of its chain, attention and feed-forward blocks in the paper; in a job they
are layers, which its plans do not cut, and micro-batches are not sliced, since schedules of a job have equal ones: the
step is up to half a start-up longer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import is_over
from meshcast.experiments.planning.cores.local_search import NOISE, Shape, StageState
from meshcast.experiments.planning.cores.stage_dp import balance_stages, plan_stages
from meshcast.experiments.planning.planner import Planner, Proposal, SpaceOptimum, write_stages
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.pricing.space_search import search_space
from meshcast.experiments.planning.problem import Problem, SearchBudget, settings_of
from meshcast.experiments.planning.stages import PlannedStage, StageOption, StageSequence, StageTable
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper


class AutoPipe(Planner):
    paper = Paper("CLUSTER 2022", "AutoPipe: A Fast Pipeline Parallelism Approach with Balanced Partitioning", 2022)
    restrictions = (
        "shard tensors",
        "give stages different numbers of replicas",
        "cut a layer or slice micro-batches of a job",
    )
    modes = ("paper", "ours")

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        return self._plan_blocks(problem) if problem.mode == "paper" else self._plan_layers(problem, budget)

    def _plan_blocks(self, problem: Problem) -> Proposal:
        graph = problem.graph()
        if not graph.is_chain or not {"forward", "backward"} <= graph.figures.keys():
            rule = "AutoPipe needs a chain of blocks with the seconds of both passes"
            raise PlanError(f"problem {problem.name}", rule, "Choose a profile of a chain")
        order = graph.order
        table = chain_table(*(graph.figures[name][order] for name in ("forward", "backward")))
        micro = int(settings_of(problem).get("microbatches", problem.microbatches))
        moved = move_blocks(table, problem.gpus, micro)
        if moved is None:
            raise self.nothing_fits(problem, "Give no more devices than blocks")
        stages = [[order[block] for block in stage.layers] for stage in moved.stages]
        cells = [(stage.layers[0], stage.layers[-1], 0) for stage in moved.stages]
        forward = [float(table.forward[cell]) for cell in cells]
        sliced, played = slice_microbatches(forward, [float(table.seconds[cell]) for cell in cells], micro)
        plan = {"stages": stages, "sliced": sliced}
        return Proposal(plan, played.seconds, moved.visited, None, "stages cut layers into blocks")

    def _plan_layers(self, problem: Problem, budget: SearchBudget) -> Proposal:
        table = problem.stages()
        best: Proposal | None = None
        visited = 0
        for number, option in enumerate(table.options):
            if best is not None and is_over():
                break
            if option.plan.get("tp", 1) > 1 or problem.gpus % option.gpus or problem.gpus // option.gpus > table.layers:
                continue
            equal = table.take([number])
            moved = move_blocks(equal, problem.gpus, problem.microbatches)
            if moved is None:
                continue
            once = [float(equal.once[stage.layers[0], stage.layers[-1], 0]) for stage in moved.stages]
            value, visited = moved.value + float(np.max(once)), visited + moved.visited
            if best is None or value < best.value:
                best = Proposal(write_stages(problem, equal, moved.stages), value, visited)
        if best is None:
            raise self.nothing_fits(problem, "Give GPUs of more memory, or smaller micro-batches")
        return best._replace(visited=visited)

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Bounds by forecasts on equal nodes, by the objective without exchanges of gradients on several kinds."""
        if not isinstance(problem, JobProblem):
            return None
        if len(problem.job.cluster.kinds) > 1:
            table = problem.stages()
            whole = [number for number, option in enumerate(table.options) if option.plan.get("tp", 1) == 1]
            planned = [plan_stages(table.take([number]), problem.gpus, problem.microbatches) for number in whole]
            bound = min((stages.bound for stages in planned if stages is not None), default=proposal.value)
            return SpaceOptimum(bound, "dynamic programming over stages")
        plan = {"pp": "auto", "schedule": "1f1b", "partition": "auto", "recompute": ["none", "full"]}
        where = [f"batch.micro * plan.dp == {problem.samples}"]
        return search_space(problem, plan, "auto", problem.forecast(proposal.plan).step_time, where)


class PlayedPipeline(NamedTuple):
    """A simulated step under 1F1B.

    seconds: of the step [s].
    critical: seconds that its critical path spends in each stage [s].
    startup: seconds until the last stage begins [s].
    """

    seconds: float
    critical: tuple[float, ...]
    startup: float = 0.0

    @property
    def master(self) -> int:
        """The stage where the critical path spends most time, the last of equals."""
        return max(range(len(self.critical)), key=lambda stage: (round(self.critical[stage], 12), stage))


def play_1f1b(
    forward: Sequence[float], backward: Sequence[float], microbatches: int, sliced: int = 0
) -> PlayedPipeline:
    """Plays a step of stages under 1F1B by the seconds of their passes; transfers are free.

    sliced: micro-batches, from the first on, whose forward passes are done in halves, each sent on at once.
    """
    stages = len(forward)
    orders = [_order_passes(stages - 1 - stage, microbatches, sliced) for stage in range(stages)]
    total = sum(map(len, orders))
    ends: dict[tuple[int, str, int, int], float] = {}
    cause: dict[tuple[int, str, int, int], tuple[int, str, int, int] | None] = {}
    place = [0] * stages

    def duration(stage: int, kind: str, number: int) -> float:
        return forward[stage] / (2 if number < sliced else 1) if kind == "F" else backward[stage]

    while len(ends) < total:
        for stage in range(stages):
            while place[stage] < len(orders[stage]):
                kind, number, half = orders[stage][place[stage]]
                near = stage - 1 if kind == "F" else stage + 1
                needs = [(stage, *orders[stage][place[stage] - 1])] if place[stage] else []
                needs += [(near, kind, number, half)] if 0 <= near < stages else []
                if any(need not in ends for need in needs):
                    break
                last = max(needs, key=ends.__getitem__, default=None)
                ends[stage, kind, number, half] = (ends[last] if last else 0.0) + duration(stage, kind, number)
                cause[stage, kind, number, half] = last
                place[stage] += 1
    at: tuple[int, str, int, int] | None = max(ends, key=ends.__getitem__)
    seconds, critical = ends[at] if at else 0.0, [0.0] * stages
    while at is not None:
        critical[at[0]] += duration(*at[:3])
        at = cause[at]
    begun = ends[stages - 1, "F", 0, 0] - duration(stages - 1, "F", 0)
    return PlayedPipeline(seconds, tuple(critical), begun)


def _order_passes(warmup: int, microbatches: int, sliced: int) -> list[tuple[str, int, int]]:
    """Lists the passes of a stage in order: `warmup` forward passes, pairs of both, then backward passes; of a sliced
    micro-batch both halves of a forward pass."""

    def forward(number: int) -> list[tuple[str, int, int]]:
        return [("F", number, half) for half in range(2 if number < sliced else 1)]

    ahead = min(warmup, microbatches)
    order = [entry for number in range(ahead) for entry in forward(number)]
    for number in range(microbatches - ahead):
        order += [*forward(ahead + number), ("B", number, 0)]
    return order + [("B", number, 0) for number in range(microbatches - ahead, microbatches)]


def slice_microbatches(
    forward: Sequence[float], both: Sequence[float], microbatches: int
) -> tuple[int, PlayedPipeline]:
    """Returns the smallest number of sliced micro-batches of the shortest step, at most one a stage, with the step.

    forward, both: seconds of the forward pass of each stage, and of both passes [s].
    """
    backward = [whole - ahead for whole, ahead in zip(both, forward, strict=True)]
    played = [
        play_1f1b(forward, backward, microbatches, sliced) for sliced in range(min(len(forward), microbatches) + 1)
    ]
    shortest = min(step.seconds for step in played)
    return next((n, step) for n, step in enumerate(played) if step.seconds <= shortest * (1 + NOISE))


def chain_table(forward: Sequence[float] | np.ndarray, backward: Sequence[float] | np.ndarray) -> StageTable:
    """Returns the table of all stages of a chain of blocks on a GPU each, without limits of memory."""
    ends = [np.concatenate([[0.0], np.cumsum(passes)]) for passes in (forward, backward)]
    first, last = np.indices((len(forward), len(forward)))
    sums = [np.where(first <= last, end[last + 1] - end[first], np.inf)[:, :, None] for end in ends]
    behind = np.where(first <= last, len(forward), -1)[:, :, None]
    return StageTable((StageOption(1, {}),), sums[0] + sums[1], sums[0], 0.0 * behind, behind)


def play_stages(table: StageTable, stages: Sequence[StageState], microbatches: int) -> PlayedPipeline:
    """Plays the step of stages in the first option of a table; infinite if any does not fit."""
    cells = [(stage.first, stage.stop - 1, 0) for stage in stages]
    if any(table.behind[cell] < len(cells) - 1 - place for place, cell in enumerate(cells)):
        return PlayedPipeline(math.inf, (0.0,) * len(cells))
    forward = [float(table.forward[cell]) for cell in cells]
    backward = [float(table.seconds[cell]) - seconds for cell, seconds in zip(cells, forward, strict=True)]
    return play_1f1b(forward, backward, microbatches)


class EstimatedStep(NamedTuple):
    """The seconds of a step, as the authors' program estimates them [s], and its master stage."""

    seconds: float
    master: int


def estimate_step(forward: Sequence[float], backward: Sequence[float], microbatches: int) -> EstimatedStep:
    """Estimates a step under 1F1B: its steady phase, in which the master, the last stage without bubbles, is found, and
    its end behind the master. Takes at least as many micro-batches as stages."""
    depth = len(forward)
    last = [max(microbatches, depth) - depth + stage for stage in range(depth)]
    begun = [[[-math.inf, sum(forward) + sum(backward[stage + 1 :])]] for stage in range(depth)]
    for number in range(1, last[-1] + 1):
        for stage in range(depth):
            if number <= last[stage]:
                arrives = begun[stage - 1][number - 1][0] + forward[stage - 1] if stage else 0.0
                begun[stage].append([max(arrives, begun[stage][number - 1][1] + backward[stage]), 0.0])
        for stage in reversed(range(depth)):
            if number <= last[stage]:
                arrives = begun[stage + 1][number][1] + backward[stage + 1] if stage + 1 < depth else 0.0
                begun[stage][number][1] = max(arrives, begun[stage][number][0] + forward[stage])

    def has_no_bubbles(stage: int) -> bool:
        passes = begun[stage]
        return all(
            passes[k][0] == passes[k - 1][1] + backward[stage] and passes[k][1] == passes[k][0] + forward[stage]
            for k in range(1, last[stage] + 1)
        )

    master = next((stage for stage in reversed(range(depth)) if has_no_bubbles(stage)), None)
    if master is None:
        return EstimatedStep(math.inf, 0)
    end = _begin_last_backward(forward[master:], backward[master:], begun[master][last[master]][0])
    return EstimatedStep(end + sum(backward[: master + 1]), master)


def _begin_last_backward(forward: Sequence[float], backward: Sequence[float], start: float) -> float:
    """Returns when the first of some stages begins its last backward pass, if its last forward pass begins at `start`:
    each has as many backward passes left as stages behind it, which run as soon as those before them allow."""
    size = len(forward)
    begins = [[0.0] * size for _ in range(size)]
    for row in range(size):
        start += forward[row]
        begins[row][size - 1 - row] = start
    for column in range(size - 2, -1, -1):
        for row in range(size - column - 2, -1, -1):
            own, behind = begins[row][column + 1] + backward[row], begins[row + 1][column] + backward[row + 1]
            before = begins[row - 1][column + 1] if row else 0.0
            begins[row][column] = max(own, behind, before)
    return begins[0][0]


Cut = tuple[int, ...]
"""The blocks of every stage."""


class BlockSearch:
    """The authors' search over the cuts of a chain of blocks into stages.

    From a cut on, blocks behind its master stage move towards it, and the master moves: a block of it goes to the
    stages before, or behind if the master does not move on; those before are balanced again.

    forward, backward: of the blocks [s]. microbatches: of the estimate; the authors' program takes twice the stages.
    priced: the estimates of all cuts that were met.
    """

    def __init__(self, forward: Sequence[float], backward: Sequence[float], depth: int, microbatches: int) -> None:
        self.forward, self.backward, self.depth, self.microbatches = forward, backward, depth, microbatches
        self.priced: dict[Cut, EstimatedStep] = {}
        blocks = len(forward)
        ends = [0.0]
        for ahead, back in zip(forward, backward, strict=True):
            ends.append(ends[-1] + ahead + back)
        self.ends = ends
        least = [[math.inf] * (depth + 1) for _ in range(blocks + 1)]
        least[0][0] = 0.0
        for stop in range(1, blocks + 1):
            for stages in range(1, min(stop, depth) + 1):
                least[stop][stages] = min(
                    max(least[first][stages - 1], ends[stop] - ends[first]) for first in range(stop)
                )
        self.least = least

    def balance(self, blocks: int, stages: int) -> Cut:
        """Returns the cut of the first blocks with the least slowest stage, with late stages as long as they may be."""
        cut: list[int] = []
        while stages:
            first = next(
                first
                for first in range(blocks)
                if self.least[blocks][stages]
                == max(self.least[first][stages - 1], self.ends[blocks] - self.ends[first])
            )
            cut.append(blocks - first)
            blocks, stages = first, stages - 1
        return tuple(reversed(cut))

    def stage_seconds(self, cut: Sequence[int]) -> tuple[list[float], list[float]]:
        """Returns the seconds of both passes of all stages."""
        ends = [0, *accumulate(cut)]
        return tuple([sum(blocks[a:b]) for a, b in pairwise(ends)] for blocks in (self.forward, self.backward))  # type: ignore[return-value]

    def price(self, cut: Sequence[int]) -> EstimatedStep:
        if (key := tuple(cut)) not in self.priced:
            self.priced[key] = estimate_step(*self.stage_seconds(key), self.microbatches)
        return self.priced[key]

    def run(self) -> Cut:
        """Returns the cut of the shortest estimate, the first of equals."""
        queue = deque([self.balance(len(self.forward), self.depth)])
        seen: set[Cut] = set()
        best: tuple[float, Cut] = (math.inf, queue[0])
        while queue and not is_over():
            cut = queue.popleft()
            for tried in self._adjust(cut):
                best = min(best, (self.price(tried).seconds, tried), key=lambda pair: pair[0])
            for moved in self._move_master(cut):
                if moved not in seen:
                    seen.add(moved)
                    queue.append(moved)
        return best[1]

    def _adjust(self, cut: Cut) -> Iterator[Cut]:
        """Yields a cut, and those in which blocks behind its master stage have moved towards it."""
        master, blocks, gap = self.price(cut).master, list(cut), 0.0
        yield cut
        stage = master + 1
        while True:
            if stage == self.depth:
                yield tuple(blocks)
                return
            if self.price(blocks).master != master:
                return
            yield tuple(blocks)
            forward, backward = self.stage_seconds(blocks)
            both = [ahead + back for ahead, back in zip(forward, backward, strict=True)]
            if sum(both[master + 1 : stage + 1]) <= (stage - master) * backward[master] + gap:
                stage += 1
                continue
            target = next((t for t in range(master + 1, stage) if self._has_room(blocks, t, master, both)), None)
            if target is None:
                return
            blocks[target], blocks[target + 1] = blocks[target] + 1, blocks[target + 1] - 1
            gap += max(0.0, sum(both[master + 1 : target + 1]) - ((target - master) * backward[master] + gap))
            stage = target + 1

    def _has_room(self, blocks: Sequence[int], stage: int, master: int, both: Sequence[float]) -> bool:
        """Returns whether a stage stays shorter than the master with the first block of the next, which keeps one."""
        first = sum(blocks[: stage + 1])
        return blocks[stage + 1] > 1 and both[master] > both[stage] + self.forward[first] + self.backward[first]

    def _move_master(self, cut: Cut) -> Iterator[Cut]:
        """Yields the cuts in which the master stage has given a block to those before or behind."""
        master, behind = self.price(cut).master, 0
        if not master or cut[master] < 2:
            return
        before = sum(cut[:master])
        yield (*self.balance(before + 1, master), cut[master] - 1, *cut[master + 1 :])
        if master < self.depth - 1:
            behind = before + cut[master] - 1
            moved = (*self.balance(behind, master + 1), cut[master + 1] + 1, *cut[master + 2 :])
            if self.price(moved).master <= master:
                yield moved


def move_blocks(table: StageTable, gpus: int, microbatches: int) -> StageSequence | None:
    """Returns stages of the only option of a table that use all `gpus`, and the seconds of their simulated step; None
    if nothing fits: of the cuts that the search has met, and the balanced one that fits, the best."""
    depth = gpus // table.options[0].gpus
    seed = balance_stages(table, gpus, microbatches)
    if seed is None:
        return None
    alone = np.arange(table.layers)
    forward = table.forward[alone, alone, 0].tolist()
    backward = (table.seconds[alone, alone, 0] - table.forward[alone, alone, 0]).tolist()
    search = BlockSearch(forward, backward, depth, microbatches)
    search.run()
    cuts = [tuple(len(stage.layers) for stage in seed.stages), *search.priced]
    states = [
        tuple(StageState(stop - count, stop, Shape(1, 1, 1)) for count, stop in zip(cut, accumulate(cut), strict=True))
        for cut in cuts
    ]
    played = [play_stages(table, stages, microbatches).seconds for stages in states]
    best = min(range(len(cuts)), key=played.__getitem__)
    planned = tuple(PlannedStage(range(stage.first, stage.stop), 0) for stage in states[best])
    return StageSequence(planned, played[best], seed.visited + len(cuts))
