"""The base class of planners, what they find and prove, and their registry.

One planner a file, ``experiments/planning/planners/<name>.py``.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from meshcast.experiments.planning.clock import limiting_time
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.stages import PlannedStage, StageTable
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.plugins import check_runs, find_files, remember_names, with_installed
from meshcast.hardware.python_file import classes_of, import_file
from meshcast.simulator.ir.scheme import Paper

PLANNERS = Path(__file__).parent / "planners"


class PlanProof(NamedTuple):
    """A bound of the objective over the whole space of a planner.

    bound: no plan of the space has a lower objective.
    value: objective of the proposed plan.
    method: how the bound was obtained, for example ``elimination`` or ``branch and bound``.
    """

    bound: float
    value: float
    method: str

    @property
    def gap(self) -> float:
        """Share by which the plan may be worse than the best of the space."""
        if not math.isfinite(self.bound) or self.bound <= 0.0:
            return math.inf if self.value > self.bound else 0.0
        return max(0.0, self.value / self.bound - 1)

    @property
    def optimal(self) -> bool:
        """Whether no plan of the space is better, up to rounding."""
        return self.gap <= 1e-6


class Proposal(NamedTuple):
    """The plan that a planner proposes.

    plan: the plan: the ``plan`` of a job file where it is executable, otherwise in the terms of its paper.
    value: its objective, at the prices of the problem, in `Planner.unit`.
    visited: candidates or table entries that were priced.
    proof: what is proven about it; None: nothing.
    not_executable: why the plan is no job file; empty: it is.
    """

    plan: Mapping[str, Any]
    value: float
    visited: int
    proof: PlanProof | None = None
    not_executable: str = ""


class SpaceOptimum(NamedTuple):
    """The optimum of what the restrictions of a planner leave of all plans.

        value: no plan of the space has a lower objective, in `Planner.unit`; or step, if `forecast` [s].
    method: of the proof.
        forecast: whether plans are compared by the forecasts of their steps, not by the planner's objective.
    """

    value: float
    method: str
    forecast: bool = False


class Planner(ABC):
    """A published planner: its space, its objective and its search.

    Customise by: choose_plan; bound_space where `choose_plan` proves nothing.

    paper: the publication.
    restrictions: what the planner may not do, each a clause that completes "it may not".
    modes: problems that it solves: ``paper``, ``ours``.
    unit: of its objective.
    """

    paper: ClassVar[Paper]
    restrictions: ClassVar[tuple[str, ...]] = ()
    modes: ClassVar[tuple[str, ...]] = ("ours",)
    unit: ClassVar[str] = "s"
    name: ClassVar[str] = ""

    def plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        """Returns the plan for a problem, within the CPU time of a budget. Raises PlanError if no plan of the space
        fits, or the problem lacks what it needs, OutOfTime if there is none by then."""
        with limiting_time(budget.seconds):
            return self.choose_plan(problem, budget)

    def find_space_optimum(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Returns the optimum of the planner's space, with the micro-batches of the problem; None: not known. Raises
        OutOfTime if it is not by the end of a budget.

        proposal: of the planner.
        """
        with limiting_time(budget.seconds):
            return self.bound_space(problem, proposal, budget)

    @abstractmethod
    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        """Proposes a plan: see `plan`."""

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Bounds the space of the planner: see `find_space_optimum`; by default by the proof of the proposal."""
        proof = proposal.proof
        return SpaceOptimum(proof.bound, proof.method) if proof and math.isfinite(proof.bound) else None

    def nothing_fits(self, problem: Problem, remedy: str) -> PlanError:
        """Returns the error of a space without a plan that fits."""
        space = f"no plan of {self.name} fits {problem.gpus} devices of {problem.memory / 2**30:.1f} GiB"
        return PlanError(f"problem {problem.name}", space, remedy)


def write_stages(problem: Problem, table: StageTable, stages: tuple[PlannedStage, ...]) -> dict[str, Any]:
    """Returns ``plan`` and ``batch`` of the job that executes stages of a table. Raises PlanError without a job."""
    write = getattr(problem, "stage_plan", None)
    if write is None:
        raise PlanError(f"problem {problem.name}", "its stages are no plan of a job", "Give the planner a job")
    return dict(write(table, stages))


def planner_names() -> list[str]:
    """Returns the names of all planners, those of plug-ins among them."""
    return sorted((*_list_shipped(), *_find_added()))


@cache
def _list_shipped() -> tuple[str, ...]:
    return tuple(path.stem.replace("_", "-") for path in PLANNERS.glob("*.py") if path.stem != "__init__")


@remember_names
def _find_added() -> Mapping[str, Path]:
    """Returns the files of plug-ins by the names of their planners."""
    return find_files("planners", ".py", _list_shipped())


@with_installed
@cache
def find_planner(name: str) -> type[Planner]:
    """Returns the planner class in the file of `name`. Raises PlanError for a name without a file."""
    if name not in planner_names():
        raise PlanError("--with", "no such planner", nearest(name, planner_names()), name)
    place = f"meshcast.experiments.planning.planners.{name.replace('-', '_')}"
    if (added := _find_added().get(name)) is not None:
        check_runs(added, f"planner {name}")
        module = import_file(added, place)
    else:
        module = importlib.import_module(place)
    classes = classes_of(module, Planner)  # type: ignore[type-abstract]
    if len(classes) != 1:
        raise PlanError(
            "--with", f"its file must define one planner, it defines {len(classes)}", "Keep one a file", name
        )
    classes[0].name = name
    return classes[0]
