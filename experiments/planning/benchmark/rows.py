"""The rows of the benchmark table: what named planners propose for a job, and what the engine says to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from meshcast.experiments.planning.benchmark.optimum import CertifiedOptimum, explain_faster
from meshcast.experiments.planning.planner import Planner, Proposal, SpaceOptimum, find_planner, planner_names
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.report.report import Report


@dataclass(frozen=True)
class BenchmarkRow:
    """The proposal of a planner.

    name: of the planner.
    cpu_s: CPU time of its plan, pricing included [s].
    proposal: its plan; None where the planner refused the job.
    refused: why.
    report: the forecast of the plan; None without a plan, and where the engine cannot play it.
    not_executable: why.
    space: the optimum of the planner's space; None: not known.
    regret: how much slower the plan is than the certified optimum, as a share of it; None where either is unknown, or
        the plan does not fit.
    own_regret: the same against the optimum of the planner's space.
    outside: fields of a plan that is faster than the certified optimum, outside of the space of the search.
    least_room: how many times its need by the forecast a GPU must have as memory.
    """

    name: str
    cpu_s: float
    proposal: Proposal | None = None
    report: Report | None = None
    refused: PlanError | None = None
    not_executable: str = ""
    space: SpaceOptimum | None = None
    regret: float | None = None
    own_regret: float | None = None
    outside: tuple[str, ...] = ()
    least_room: float = 1.0

    @property
    def fits(self) -> bool:
        """Whether its plan can be played and fits in memory, with the probability that was asked for."""
        return self.report is not None and self.report.fit.room >= self.least_room

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Fitting plans first, the fastest first of all; refusals last."""
        step = self.report.step_time if self.report else math.inf
        return self.report is None, not self.fits, step


def planners_of_jobs() -> list[str]:
    return [name for name in planner_names() if "ours" in find_planner(name).modes]


def choose_planners(stated: str) -> list[str]:
    """Returns the planners of a list with commas; ``all``: those that propose plans of jobs. Raises PlanError for a
    name without a planner, for none beside a comma, and for planners of profiles alone."""
    names = planners_of_jobs() if stated == "all" else [name.strip() for name in stated.split(",")]
    if not all(names):
        raise PlanError("--with", "a name is missing beside a comma", "Write --with alpa,optcnn, or all", stated)
    for name in names:
        if "ours" not in find_planner(name).modes:
            remedy = f"Choose some of {', '.join(planners_of_jobs())}"
            raise PlanError("--with", "it solves profiles of its paper, not jobs", remedy, name)
    return names


def rank_proposals(
    problem: JobProblem,
    names: Sequence[str],
    budget: SearchBudget,
    optimum: CertifiedOptimum | PlanError | None = None,
    watch: Callable[[Sequence[str]], Iterable[str]] = lambda names: names,
    any_program: bool = False,
) -> list[BenchmarkRow]:
    """Returns the proposals of planners, best first.

    watch: goes through their names, for example with a progress bar. any_program: whether plans count that the program
    which the job names refuses or does not have; otherwise they are not executable.
    Raises PlanError if a plan of the space of the certified optimum is faster than that.
    """
    rows = (_judge(problem, row, budget, optimum) for row in _propose(problem, watch(names), budget, any_program))
    return sorted(rows, key=lambda row: row.rank)


def _propose(
    problem: JobProblem, names: Iterable[str], budget: SearchBudget, any_program: bool
) -> Iterator[BenchmarkRow]:
    for name in names:
        begin = time.process_time()
        planner: Planner = find_planner(name)()
        try:
            proposal = planner.plan(problem, budget)
        except PlanError as error:
            yield BenchmarkRow(name, time.process_time() - begin, refused=error)
            continue
        except ValueError as error:  # of a core: a table that is too large, a solver without a solution in time
            rule, remedy = str(error), "Give it more time with --seconds, or fewer GPUs"
            refused = PlanError(f"planner {name}", rule, remedy)
            yield BenchmarkRow(name, time.process_time() - begin, refused=refused)
            continue
        row = BenchmarkRow(name, time.process_time() - begin, proposal, not_executable=proposal.not_executable)
        try:
            yield row if row.not_executable else _forecast(problem, row, proposal, any_program)
        except PlanError as error:
            yield replace(row, not_executable=str(error))


def _forecast(problem: JobProblem, row: BenchmarkRow, proposal: Proposal, any_program: bool) -> BenchmarkRow:
    """Returns the row with the forecast of its plan, or with the rule of the program that it breaks."""
    report = problem.report(dict(proposal.plan))
    if report.broken_rules and not any_program:
        return replace(row, not_executable=str(report.broken_rules[0]))
    return replace(row, report=report, least_room=problem.least_room)


def _judge(
    problem: JobProblem, row: BenchmarkRow, budget: SearchBudget, optimum: CertifiedOptimum | PlanError | None
) -> BenchmarkRow:
    proposal = row.proposal
    if proposal is None or row.report is None or not row.fits:
        return row
    step = row.report.step_time
    try:
        space = find_planner(row.name)().find_space_optimum(problem, proposal, budget)
    except (PlanError, ValueError):  # as in `_propose`
        space = None
    if space is not None and space.value > 0:
        row = replace(row, space=space, own_regret=(step if space.forecast else proposal.value) / space.value - 1)
    if not isinstance(optimum, CertifiedOptimum) or not math.isfinite(optimum.step_time):
        return row
    outside = explain_faster(problem, dict(proposal.plan), step, optimum)
    return replace(row, regret=step / optimum.step_time - 1, outside=tuple(outside))
