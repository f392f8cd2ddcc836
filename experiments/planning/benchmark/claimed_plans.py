"""Runs of planners for the claims of their papers: ``meshcast validate claims`` reads numbers off the plans."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from meshcast.experiments.planning.planner import Planner, Proposal, find_planner
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.pricing.mixed import open_problem
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.profile import NetworkLevel, ProfileProblem
from meshcast.experiments.planning.stages import PlannedStage
from meshcast.hardware.errors import PlanError, nearest
from meshcast.simulator.report.report import Report
from meshcast.validation.claims.planner_run import PlannerPlan, PlannerRun
from meshcast.validation.claims.relation import Quantity


def find_claimed_plan(run: PlannerRun) -> PlannerPlan:
    """Returns the plan of a run of a planner. Raises PlanError where it finds none, or the run has a mistake."""
    return _find_plan(json.dumps(run.model_dump(mode="json")))


@lru_cache(maxsize=8)
def _find_plan(text: str) -> PlannerPlan:
    """Returns the plan of a run, in JSON; neighbouring claims read several numbers of the same run."""
    run = PlannerRun.model_validate(json.loads(text))
    planner = _make_planner(run.planner, run.traits)
    problem = _make_problem(run)
    if run.stages:
        assert isinstance(problem, JobProblem)
        proposal = _price_stages(problem, run.stages, run.traits.get("recompute", ("none",)))
    else:
        proposal = planner.plan(problem, SearchBudget(seconds=run.seconds, steps=run.steps))

    def forecast() -> Report:
        if proposal.not_executable or not isinstance(problem, JobProblem):
            rule = proposal.not_executable or "it is a plan of a profile, not of a job"
            raise PlanError("measure", rule, "Read a number of the plan itself", run.planner)
        return problem.report(proposal.plan)

    return PlannerPlan(_list_numbers(problem, proposal), proposal.plan, forecast)


def _make_planner(name: str, traits: Mapping[str, Any]) -> Planner:
    """Returns a planner with other attributes. Raises PlanError for an unknown planner or attribute."""
    planner = find_planner(name)
    known = [name for name in vars(planner) if not name.startswith("_") and not callable(getattr(planner, name))]
    known += [name for base in planner.__mro__[1:] for name in vars(base) if not name.startswith("_")]
    for trait in traits:
        if trait not in known:
            raise PlanError("traits", f"{name} has no such attribute", nearest(trait, known), trait)
    changed = {key: tuple(value) if isinstance(value, list) else value for key, value in traits.items()}
    changed_planner: Planner = type(planner.__name__, (planner,), changed)()
    return changed_planner


def _make_problem(run: PlannerRun) -> Problem:
    if run.profile:
        levels = [NetworkLevel(*level) for level in run.levels]
        return ProfileProblem(run.profile, levels, gpus=run.gpus, memory=run.memory, **run.settings)
    problem = open_problem(run.job)
    return problem.with_microbatches(run.microbatches) if run.microbatches else problem


def _price_stages(problem: JobProblem, stages: Sequence[tuple[int, int, int]], recompute: Sequence[str]) -> Proposal:
    """Returns a stated plan at the prices of stages, by Alpa's objective: sum of stages + (m - 1) x the slowest."""
    table, planned, first = problem.stages(), list[PlannedStage](), 0
    for layers, tensor, data in stages:
        wanted = {"tp": tensor, "dp": data, "recompute": recompute[0]}
        options = [
            at for at, option in enumerate(table.options) if option.plan == wanted and option.gpus == tensor * data
        ]
        if not options:
            raise PlanError("stages", "no stage has these degrees", "Correct tp and dp", [layers, tensor, data])
        planned.append(PlannedStage(range(first, first + layers), options[0]))
        first += layers
    seconds = [*map(table.stage_seconds, planned)]
    value = sum(seconds) + (problem.microbatches - 1) * max(seconds)
    return Proposal(problem.stage_plan(table, tuple(planned)), value, 0)


def _list_numbers(problem: Problem, proposal: Proposal) -> dict[str, Quantity]:
    """Returns the numbers of a plan that there are; see `OF_PLAN`."""
    numbers: dict[str, Quantity] = {"value": float(proposal.value), "visited": float(proposal.visited)}
    numbers["proven"] = float(proposal.proof is not None and proposal.proof.optimal)
    stages = _list_stages(problem, proposal.plan)
    if stages:
        numbers["stages"] = float(len(stages))
        columns = {"stage_gpus": "gpus", "stage_nodes": "nodes", "stage_tp": "tp", "stage_dp": "dp"}
        numbers |= {name: [float(stage[key]) for stage in stages] for name, key in columns.items() if key in stages[0]}
    if isinstance(problem, ProfileProblem):
        figures, settings = problem.graph().figures, problem.settings
        if {"forward", "backward"} <= {*figures}:
            samples = settings.get("batch", 1) / settings.get("profile_batch", settings.get("batch", 1))
            numbers["one_device_s"] = float((figures["forward"] + figures["backward"]).sum()) * samples
    return numbers


def _list_stages(problem: Problem, plan: Mapping[str, Any]) -> list[dict[str, int]]:
    """Returns devices, nodes and degrees of the stages of a plan of a job, or of a profile."""
    if isinstance(problem, JobProblem):
        resolved = problem.resolve(plan)
        stated = dict(plan["plan"])
        layers = problem.job.model.layers
        rows = stated.get("stages") or [{"layers": layers // resolved.shape.p, **stated}] * resolved.shape.p
        return [
            {"nodes": int(row["layers"]), "tp": int(row.get("tp", 1)), "dp": int(row.get("dp", 1)),
             "gpus": int(row.get("tp", 1)) * int(row.get("dp", 1))}
            for row in rows
        ]  # fmt: skip
    listed = []
    for stage in plan.get("stages", ()):
        if isinstance(stage, list):  # nodes alone
            listed.append({"nodes": len(stage)})
            continue
        row = {"nodes": len(stage["nodes"])} if "nodes" in stage else {}
        if "replicas" in stage:
            row["gpus"] = math.prod(stage["replicas"])
        elif "gpus" in stage:
            row["gpus"] = len(stage["gpus"])
        elif "tp" in stage:
            row |= {"tp": stage["tp"], "dp": stage["dp"], "gpus": stage["tp"] * stage["dp"]}
        listed.append(row)
    return listed
