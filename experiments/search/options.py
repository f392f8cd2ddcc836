"""The options of a search: of `meshcast.search`, and of ``meshcast search``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from meshcast.experiments.options import Options, option, place_of, read_number
from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import (
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

if TYPE_CHECKING:
    from meshcast.experiments.search.space.limits import Limits

MAX_PLANS = 1000
"""Maximum number of plans that a search keeps as the best ones."""

RANKING, SPACE = "Ranking", "Space"
"""Headings of options in the help: what the best plan is, and which plans are searched."""

TEXTS = WithJsonSchema({"type": "array", "items": {"type": "string"}})


def read_risk(value: Any, info: ValidationInfo) -> float:
    """Returns a probability of lacking memory. Raises PlanError outside of its range."""
    from meshcast.simulator.report.peak_errors import EVEN

    risk = _read_share(value, info)
    if not 0 < risk <= EVEN:
        rule = f"it is the most probability of lacking memory that a plan may have, above 0 and up to {EVEN}"
        raise PlanError(place_of(info), rule, "Write 0.1 for plans that fit with 90 %", value)
    return risk


def usual_risk() -> float:
    """Returns the probability of lacking memory that a plan may have by default."""
    from meshcast.simulator.report.peak_errors import RISK

    return RISK


MemoryRisk = Annotated[
    float,
    BeforeValidator(read_risk),
    option(
        "--memory-risk",
        "Leave out plans that lack memory with more than this probability, at most 50%.",
        "P",
        panel=SPACE,
        reads=str,
        written="5%",
    ),
]
AnyProgram = Annotated[
    bool, option("--any-program", "Keep plans, too, that the program of the job refuses or does not have.", panel=SPACE)
]


class SearchOptions(Options):
    """Options of a search, as `meshcast.search` describes them."""

    within: Annotated[
        float,
        option(
            "--within",
            "End once the best plan is proven within this gap, e.g. 1%.",
            "GAP",
            panel=RANKING,
            reads=str,
            written="0%",
        ),
    ] = 0.0
    top: Annotated[
        int,
        option("--top", "Number of plans to show, 1 to 1,000; none more than 5 % worse than the best.", panel=RANKING),
    ] = 10
    where: Annotated[
        tuple[Any, ...],
        TEXTS,
        option(
            "--where", "Exclude plans that violate it, e.g. 'plan.tp * plan.pp <= 8'.", "EXPR", panel=SPACE, reads=str
        ),
    ] = ()
    memory_margin: Annotated[
        float,
        option(
            "--memory-margin",
            "Share of GPU memory that stays free, e.g. 10%.",
            "SHARE",
            panel=SPACE,
            reads=str,
            written="0%",
        ),
    ] = 0.0
    memory_risk: MemoryRisk = Field(default_factory=usual_risk)
    robust: Annotated[
        bool, option("--robust", "Rank by the upper end of the interval, wider for what nobody has run.", panel=RANKING)
    ] = False
    objective: Annotated[
        tuple[str, ...],
        option(
            "--objective",
            "time, tokens (per s, GPU), cost, energy, memory; of runs days, run-cost. Two: their Pareto front.",
            "NAME",
            panel=RANKING,
            reads=str,
            written="time",
        ),
    ] = ("time",)
    workers: Annotated[int | None, option("--workers", "Number of processes; one per core if not given.", "N")] = None
    near_measured: Annotated[
        bool,
        option(
            "--near-measured", "Keep only combinations of schemes and degrees that a published run has.", panel=SPACE
        ),
    ] = False
    any_program: AnyProgram = False
    compare: Annotated[
        tuple[Any, ...],
        TEXTS,
        option("--compare", "A job file whose plan is held against the best one; repeatable.", "PLAN", reads=Path),
    ] = ()
    heterogeneous: Annotated[
        bool,
        option(
            "--heterogeneous",
            "Search stages and replicas of different degrees, also on several kinds of nodes.",
            panel=SPACE,
        ),
    ] = False
    runs: Annotated[
        int | None, option("--runs", "With --heterogeneous: most runs of equal stages of a pipeline.", "N", panel=SPACE)
    ] = None

    @field_validator("within", mode="before")
    @classmethod
    def _read_gap(cls, value: Any, info: ValidationInfo) -> float:
        return _read_part("a gap is a share of the step", "Write 1% or 0.01", "Write 0.01 for 1 %", value, info)

    @field_validator("memory_margin", mode="before")
    @classmethod
    def _read_margin(cls, value: Any, info: ValidationInfo) -> float:
        rule = "a margin is a share of the memory of a GPU"
        return _read_part(rule, "Write 10% or 0.1", "Write 0.1 for 10 %", value, info)

    @field_validator("top", "workers", "runs", mode="before")
    @classmethod
    def _check_number(cls, value: Any, info: ValidationInfo) -> int | None:
        most = MAX_PLANS if info.field_name == "top" else math.inf
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if (value is None and info.field_name != "top") or (is_whole and 1 <= value <= most):
            return value  # type: ignore[no-any-return]
        rule, remedy = {
            "top": (f"it is a whole number from 1 to {MAX_PLANS:,}", "Write for example 10"),
            "workers": ("it is a number of processes, 1 or more", "Leave it out for one a core"),
            "runs": ("it is a number of runs of stages, 1 or more", "Leave it out for the default"),
        }[info.field_name or ""]
        raise PlanError(place_of(info), rule, remedy, value)

    @field_validator("where", mode="before")
    @classmethod
    def _read_constraints(cls, value: Any, info: ValidationInfo) -> tuple[Any, ...]:
        from meshcast.experiments.sweeps.expressions import parse_constraint

        if isinstance(value, str) or not all(isinstance(text, str) for text in value):
            rule = "constraints are a list of texts"
            raise PlanError(place_of(info), rule, 'Write for example ["plan.tp <= 8"]', value)
        return tuple(parse_constraint(text, place_of(info)) for text in value)

    @field_validator("objective", mode="before")
    @classmethod
    def _read_objectives(cls, value: Any, info: ValidationInfo) -> tuple[str, ...]:
        from meshcast.experiments.search.frontier.objectives import OF_RUNS, check_objectives

        names, place = value.split(",") if isinstance(value, str) else value, place_of(info)
        if not isinstance(names, list | tuple):
            raise PlanError(place, "it is a word, or a list of two", "Write for example time,memory", value)
        checked = check_objectives([name.strip() if isinstance(name, str) else name for name in names], place)
        if info.data["robust"] and (len(checked) > 1 or checked[0] in ("memory", "energy", *OF_RUNS)):
            rule = "with --robust intervals of the step rank the plans, so it takes one objective: time, tokens or cost"
            raise PlanError(place, rule, "Leave out --robust, or write one of these", ",".join(checked))
        return checked

    @field_validator("compare", mode="before")
    @classmethod
    def _check_list(cls, value: Any, info: ValidationInfo) -> tuple[Any, ...]:
        if isinstance(value, str | Path | Mapping):
            raise PlanError(place_of(info), "it is a list of jobs", "Write compare=[job]")
        return tuple(value)

    @model_validator(mode="after")
    def _check_together(self, info: ValidationInfo) -> Self:
        """Refuses options that a search of these plans does not have."""
        if not self.heterogeneous:
            if self.runs is not None:
                rule = "only pipelines of heterogeneous stages have runs"
                remedy = "Add --heterogeneous" if info.context else "Leave it out, or add heterogeneous=True"
                raise PlanError(place_of(info, "runs"), rule, remedy, self.runs)
            return self
        for name in ("where", "near_measured", "robust", "compare"):
            if getattr(self, name):
                rule = "a search of heterogeneous plans does not have this option"
                raise PlanError(place_of(info, name), rule, "Leave it out")
        if self.objective != ("time",):
            from meshcast.experiments.search.frontier.objectives import simulates_runs

            if simulates_runs(self.objective):
                rule = "a search of heterogeneous plans compares steps, and this is an objective of runs"
                remedy = "Write time, or search plans that are alike"
                raise PlanError(place_of(info, "objective"), rule, remedy, ",".join(self.objective))
        return self

    @cached_property
    def limits(self) -> Limits:
        """The limits of the space."""
        from meshcast.experiments.search.space.limits import Limits

        return Limits(self.where, self.memory_margin, self.memory_risk, self.near_measured, not self.any_program)


def _read_share(value: Any, info: ValidationInfo) -> float:
    """Returns a share: on the command line also a percentage; NaN of what is no number."""
    if info.context:
        return read_number(str(value))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _read_part(rule: str, for_command: str, for_python: str, value: Any, info: ValidationInfo) -> float:
    """Returns a share from 0 to below 1. Raises PlanError, with the remedy of where it was written."""
    share = _read_share(value, info)
    if not 0 <= share < 1:
        remedy = for_command if info.context else for_python
        raise PlanError(place_of(info), f"{rule} from 0 to below 1", remedy, value)
    return share
