"""AutoPipe: balanced stages of blocks, moved out of the master stage of a simulated pipeline.

For every number of stages, each with as many replicas: the partition of least slowest stage, then moves of blocks while
the simulated step gets shorter (Liu et al. 2022, "AutoPipe", CLUSTER 2022). On a profile the blocks are those of its
chain, attention and feed-forward blocks in the paper; in a job they are layers, which its plans do not cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import is_over
from meshcast.experiments.planning.cores.local_search import NOISE, LocalSearch, Ranked, Shape, StageState, pass_layers
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
        "cut a layer of a job",
        "slice micro-batches of the warm-up (its slicer)",
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
        return Proposal({"stages": stages}, moved.value, moved.visited, None, "stages cut layers into blocks")

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
    """A simulated step under 1F1B: its seconds, and the seconds that its critical path spends in each stage [s]."""

    seconds: float
    critical: tuple[float, ...]

    @property
    def master(self) -> int:
        """The stage where the critical path spends most time, the last of equals."""
        return max(range(len(self.critical)), key=lambda stage: (round(self.critical[stage], 12), stage))


def play_1f1b(forward: Sequence[float], backward: Sequence[float], microbatches: int) -> PlayedPipeline:
    """Plays a step of stages under 1F1B by the seconds of their passes; transfers are free."""
    stages = len(forward)
    orders = [_order_passes(stages - 1 - stage, microbatches) for stage in range(stages)]
    ends: dict[tuple[int, str, int], float] = {}
    cause: dict[tuple[int, str, int], tuple[int, str, int] | None] = {}
    place = [0] * stages
    while len(ends) < 2 * stages * microbatches:
        for stage in range(stages):
            while place[stage] < len(orders[stage]):
                kind, number = orders[stage][place[stage]]
                near = stage - 1 if kind == "F" else stage + 1
                needs = [(stage, *orders[stage][place[stage] - 1])] if place[stage] else []
                needs += [(near, kind, number)] if 0 <= near < stages else []
                if any(need not in ends for need in needs):
                    break
                last = max(needs, key=ends.__getitem__, default=None)
                seconds = forward[stage] if kind == "F" else backward[stage]
                ends[stage, kind, number] = (ends[last] if last else 0.0) + seconds
                cause[stage, kind, number] = last
                place[stage] += 1
    at: tuple[int, str, int] | None = max(ends, key=ends.__getitem__)
    seconds, critical = ends[at] if at else 0.0, [0.0] * stages
    while at is not None:
        critical[at[0]] += forward[at[0]] if at[1] == "F" else backward[at[0]]
        at = cause[at]
    return PlayedPipeline(seconds, tuple(critical))


def _order_passes(warmup: int, microbatches: int) -> list[tuple[str, int]]:
    """Lists the passes of a stage in order: `warmup` forward passes, pairs of both, then backward passes."""
    ahead = min(warmup, microbatches)
    steady = [entry for number in range(microbatches - ahead) for entry in (("F", ahead + number), ("B", number))]
    ending = [("B", number) for number in range(microbatches - ahead, microbatches)]
    return [("F", number) for number in range(ahead)] + steady + ending


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


def move_blocks(table: StageTable, gpus: int, microbatches: int) -> StageSequence | None:
    """Returns stages of the only option of a table that use all `gpus`, and the seconds of their simulated step; None
    if nothing fits.

    From the least slowest stage on, single blocks move out of the master stage to whichever other stage is best, while
    the step gets shorter; every stage in between passes a block on.
    """
    seed = balance_stages(table, gpus, microbatches)
    if seed is None:
        return None

    def move_from_master(search: LocalSearch[tuple[StageState, ...]]) -> Iterator[Ranked[tuple[StageState, ...]]]:
        present = None
        while present is not search.now:
            present = search.now
            stages, master = present.state, present.rank.master
            can_give = stages[master].stop - stages[master].first > 1
            targets = [target for target in range(len(stages)) if can_give and target != master]
            tried = [search.price(pass_layers(stages, master, target, lambda *_: 1)) for target in targets]
            search.visited += 1
            yield min(tried, key=lambda ranked: ranked.rank.seconds, default=present)

    def is_shorter(tried: Ranked[tuple[StageState, ...]], now: Ranked[tuple[StageState, ...]]) -> bool:
        return bool(tried.rank.seconds < now.rank.seconds * (1 - NOISE))

    search = LocalSearch(lambda stages: play_stages(table, stages, microbatches), move_from_master, is_shorter)
    search.run(tuple(StageState(stage.layers.start, stage.layers.stop, Shape(1, 1, 1)) for stage in seed.stages))
    planned = tuple(PlannedStage(range(stage.first, stage.stop), 0) for stage in search.now.state)
    return StageSequence(planned, search.now.rank.seconds, seed.visited + search.visited - 1)
