"""The options of a search, checked: its gap, its objectives, the limits of its space."""

from __future__ import annotations

from collections.abc import Sequence

from meshcast.experiments.search.frontier.objectives import OF_RUNS, check_objectives, simulates_runs
from meshcast.experiments.search.space.limits import Limits
from meshcast.experiments.sweeps.expressions import parse_constraint
from meshcast.hardware.errors import PlanError
from meshcast.simulator.report.peak_errors import EVEN, RISK

MAX_PLANS = 1000
"""Maximum number of plans that a search keeps as the best ones."""


def check_options(within: float, top: int, workers: int | None = None, dashes: str = "") -> None:
    """Refuses a gap, a number of plans or of processes out of range. dashes: before their names in messages."""
    if not _is_number(within) or not 0 <= within < 1:
        rule = "a gap is a share of the step from 0 to below 1"
        raise PlanError(f"{dashes}within", rule, "Write 0.01 for 1 %", within)
    if not isinstance(top, int) or isinstance(top, bool) or not 1 <= top <= MAX_PLANS:
        raise PlanError(f"{dashes}top", f"it is a whole number from 1 to {MAX_PLANS:,}", "Write for example 10", top)
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        rule, remedy = "it is a number of processes, 1 or more", "Leave it out for one a core"
        raise PlanError(f"{dashes}workers", rule, remedy, workers)


def read_objectives(objectives: str | Sequence[str], robust: bool = False, place: str = "objective") -> tuple[str, ...]:
    """Returns the objectives by name, or raises PlanError. place: in messages. robust: intervals rank the plans."""
    names = objectives.split(",") if isinstance(objectives, str) else objectives
    if not isinstance(names, list | tuple):
        raise PlanError(place, "it is a word, or a list of two", "Write for example time,memory", objectives)
    checked = check_objectives([name.strip() if isinstance(name, str) else name for name in names], place)
    if robust and (len(checked) > 1 or checked[0] in ("memory", "energy", *OF_RUNS)):
        rule = "with --robust intervals of the step rank the plans, so it takes one objective: time, tokens or cost"
        raise PlanError(place, rule, "Leave out --robust, or write one of these", ",".join(checked))
    return checked


def make_limits(
    where: Sequence[str] = (),
    memory_margin: float = 0.0,
    near_measured: bool = False,
    any_program: bool = False,
    memory_risk: float = RISK,
    place: str = "where",
) -> Limits:
    """Returns the limits of a search, as `search` takes them, or raises PlanError. place: in messages."""
    if isinstance(where, str) or not all(isinstance(text, str) for text in where):
        raise PlanError(place, "constraints are a list of texts", 'Write for example ["plan.tp <= 8"]', where)
    if not _is_number(memory_margin) or not 0 <= memory_margin < 1:
        rule = "it is a share of the memory of a GPU from 0 to below 1"
        raise PlanError("memory_margin", rule, "Write 0.1 for 10 %", memory_margin)
    check_risk(memory_risk)
    constraints = tuple(parse_constraint(text, place) for text in where)
    return Limits(constraints, float(memory_margin), float(memory_risk), bool(near_measured), not any_program)


def check_risk(risk: float, place: str = "memory_risk", written: object = None) -> None:
    """Refuses a risk of lacking memory outside of its range. place, written: of it in error messages."""
    if not _is_number(risk) or not 0 < risk <= EVEN:
        rule = f"it is the most probability of lacking memory that a plan may have, above 0 and up to {EVEN}"
        raise PlanError(place, rule, "Write 0.1 for plans that fit with 90 %", risk if written is None else written)


def check_heterogeneous_options(
    limits: Limits,
    robust: bool,
    compare: Sequence[object],
    runs: int | None,
    objectives: tuple[str, ...],
    dashes: str = "",
) -> None:
    """Refuses options that a search of heterogeneous plans does not have. dashes: before their names in messages."""
    options = {"where": limits.where, "near_measured": limits.near_measured, "robust": robust, "compare": compare}
    for name, stated in options.items():
        if stated:
            place = dashes + (name.replace("_", "-") if dashes else name)
            raise PlanError(place, "a search of heterogeneous plans does not have this option", "Leave it out")
    if simulates_runs(objectives):
        rule = "a search of heterogeneous plans compares steps, and this is an objective of runs"
        raise PlanError(f"{dashes}objective", rule, "Write time, or search plans that are alike", ",".join(objectives))
    if runs is not None and (not isinstance(runs, int) or isinstance(runs, bool) or runs < 1):
        rule, remedy = "it is a number of runs of stages, 1 or more", "Leave it out for the default"
        raise PlanError(f"{dashes}runs", rule, remedy, runs)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
