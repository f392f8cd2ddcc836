"""nnScaler: constraints of the user on operators and stages; the best plan of what is left, by two searches.

Pipelines: stages of 1, 2, 4 or 8 GPUs of least (m - 1 + stages) x the slowest stage, where m micro-batches share what a
stage does once a step. Stages are at most r / (1 - r) x m + 1, r the share of bubbles, and a stage's forward pass
takes between u and 1 / u times its share of the model's. Operators of a stage have the layouts that a program finds for
its own layers under the constraints (`pricing.stage_layouts`), or Megatron's; models with experts Megatron's alone. One
stage: a layout for every operator, by an integer program within the memory of a rank (Lin et al. 2024, "nnScaler", OSDI
2024; microsoft/nnscaler, `autodist`, whose defaults are these).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np

from meshcast.experiments.planning.cores.ilp import solve_table
from meshcast.experiments.planning.cores.stage_dp import balance_stages
from meshcast.experiments.planning.operator_planner import write_plan
from meshcast.experiments.planning.planner import Planner, PlanProof, Proposal, write_stages
from meshcast.experiments.planning.problem import Dims, Problem, SearchBudget
from meshcast.experiments.planning.stages import StageOption, StageTable
from meshcast.simulator.ir.scheme import Paper

MEGATRON_DIMS = {"a", "f", "v"}


class NnScaler(Planner):
    """The planner with its constraints.

    operators: the dims along which the user lets an operator be split, other operators along any dim; all may be
        replicated.
    degrees: GPUs of a stage.
    bubbles: r, the most share of bubbles.
    imbalance: u, the least share of a stage's forward pass.
    """

    paper = Paper("OSDI 2024", "nnScaler: Constraint-Guided Parallelization Plan Generation for Deep Learning", 2024)
    restrictions = (
        "use more than 8 GPUs in a stage of a pipeline, or replicate a pipeline",
        "split operators over nodes along other dims than samples",
        "run operators in an order of their own",
    )

    def __init__(
        self,
        operators: Mapping[str, Collection[str]] | None = None,
        degrees: Collection[int] = (1, 2, 4, 8),
        bubbles: float = 0.2,
        imbalance: float = 0.5,
    ) -> None:
        self.operators = {name: set(dims) for name, dims in (operators or {}).items()}
        self.degrees, self.bubbles, self.imbalance = tuple(degrees), bubbles, imbalance

    def allows(self, name: str, layout: Dims) -> bool:
        """Returns whether the constraints let an operator have a layout."""
        inner = {dim for _, dim in layout[-1:] if dim}
        outer = {dim for _, dim in layout[:-1] if dim}
        allowed = self.operators.get(name)
        return outer <= {"b"} and (allowed is None or inner | outer <= allowed)

    def allows_stage(self, option: StageOption) -> bool:
        """Returns whether the constraints let a stage use its GPUs this way."""
        data, tensor = int(option.plan.get("dp", 1)), int(option.plan.get("tp", 1))
        fits = all(
            (data == 1 or "b" in dims) and (tensor == 1 or bool(dims & MEGATRON_DIMS))
            for dims in self.operators.values()
        )
        return (fits or "schemes" in option.plan) and option.gpus in self.degrees

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        plans = self._plan_pipeline(problem), self._plan_stage(problem, budget)
        proposals = [proposal for proposal in plans if proposal is not None]
        if not proposals:
            raise self.nothing_fits(problem, "Loosen the constraints, or give more GPUs")
        best = min(proposals, key=lambda proposal: proposal.value)
        bound = min(proposal.proof.bound if proposal.proof else proposal.value for proposal in proposals)
        proof = PlanProof(bound, best.value, "dynamic programming over stages; integer program")
        return best._replace(visited=sum(proposal.visited for proposal in proposals), proof=proof)

    def narrow(self, table: StageTable, gpus: int, microbatches: int) -> StageTable:
        """Returns the stages that constraints and the window of forward passes leave, with their objective."""
        table = table.select(self.allows_stage)
        if not table.options:
            return table
        sizes = np.array([option.gpus for option in table.options])
        work = (table.forward * sizes).min(axis=-1)  # GPU seconds of the forward pass of a range of layers
        share = work[:, :, None] / sizes / (work[0, -1] / gpus)
        inside = (share >= self.imbalance) & (share <= 1 / self.imbalance)
        seconds = np.where(inside, table.seconds + table.once / microbatches, np.inf)
        return table._replace(seconds=seconds)

    def most_stages(self, microbatches: int) -> int:
        """Returns the most stages whose bubbles are at most their share of a step."""
        return math.floor(self.bubbles / (1 - self.bubbles) * microbatches + 1 + 1e-9)

    def _plan_pipeline(self, problem: Problem) -> Proposal | None:
        price_layouts = getattr(problem, "layout_stages", None)
        whole = problem.stages().join(price_layouts(self.allows) if price_layouts else None)
        table = self.narrow(whole, problem.gpus, problem.microbatches)
        most = min(table.layers, problem.gpus, self.most_stages(problem.microbatches))
        division = balance_stages(table, problem.gpus, problem.microbatches, most) if table.options else None
        if division is None:
            return None
        return Proposal(write_stages(problem, table, division.stages), division.value, division.visited)

    def _plan_stage(self, problem: Problem, budget: SearchBudget) -> Proposal | None:
        inner = max((degree for degree in self.degrees if problem.gpus % degree == 0), default=1)
        axes = {"x": problem.gpus // inner, "y": inner} if problem.gpus > inner else {"x": inner}
        table = problem.operators(axes, self.allows)
        solution = solve_table(table, problem.memory)
        if solution is None:
            return None
        proof = PlanProof(solution.bound, solution.value, "integer program")
        return Proposal(
            write_plan(problem, table, solution.assignment, axes), solution.value, solution.visited + 1, proof
        )
