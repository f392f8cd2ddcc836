"""Which points of a search the program of its job runs, by the rules of its framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import product

from meshcast.experiments.search.space.fields import AUTO, opens_plan
from meshcast.experiments.search.space.point_rules import PointRule
from meshcast.experiments.search.space.scheme_keys import DEFAULTS
from meshcast.experiments.search.space.space import (
    DEGREES,
    FACT_OF_FIELD,
    FIELDS_OF_FACTS,
    LayerGroup,
    Pipeline,
    Space,
    StepChoice,
    facts_of_point,
    make_point,
)
from meshcast.simulator.job.plan_keys import PLAN_KEYS, SCHEME_KEYS
from meshcast.simulator.job.program_rules import (
    CONDITIONS,
    Facts,
    ProgramRules,
    explain_missing,
    find_rules,
    shared_facts,
)

MAX_TRIED = 10_000
"""Most combinations of values that are tried to find out whether a rule may be broken."""


class ProgramPoints:
    """The points that the program of a job runs. Each rule is evaluated once for equal values of its fields.

    rules: of the program.
    """

    def __init__(self, space: Space, rules: ProgramRules) -> None:
        self.space, self.program = space, space.loaded.framework.name
        has = [ProgramRule(space, (name,), self._explain_missing(rules, name)) for name in rules.has]
        conditions = [CONDITIONS[refused.rule] for refused in rules.refuses]
        refuses = [ProgramRule(space, condition.facts, condition.check) for condition in conditions]
        self.rules = [rule for rule in (*has, *refuses) if rule.may_break()]

    def _explain_missing(self, rules: ProgramRules, name: str) -> Callable[[Facts], str]:
        return lambda facts: explain_missing(name, rules.has[name].values, facts[name])

    def select(self, group: LayerGroup, pipeline: Pipeline, steps: tuple[StepChoice, ...]) -> tuple[StepChoice, ...]:
        """Returns the choices that the program runs."""
        for rule in self.rules:
            if not steps:
                break
            steps = rule.select(group, pipeline, steps)
        return steps

    def key_of(self, pipeline: Pipeline) -> Hashable:
        """Returns the values of a pipeline that the rules depend on."""
        return tuple([rule.key_of(1, pipeline) for rule in self.rules])

    def explain(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> str:
        """Returns why the program does not run a point, in words; empty if it does."""
        words = next((words for rule in self.rules if (words := rule.explain(group, pipeline, step))), "")
        return f"{self.program} {words}" if words else ""


class ProgramRule(PointRule):
    """A rule of a program on the points of a search.

    check: returns what is wrong with some facts, in words.
    """

    def __init__(self, space: Space, facts: Sequence[str], check: Callable[[Facts], str]) -> None:
        super().__init__({field for name in facts for field in FIELDS_OF_FACTS.get(name, ())})
        self.space, self._check, self._shared = space, check, shared_facts(space.loaded)

    def may_break(self) -> bool:
        """Returns whether some values of its fields break it; True, too, where there are too many to try all."""
        values = self.space.values
        choices = [tuple(values[name]) for name in sorted(self.fields)]
        if math.prod(map(len, choices)) > MAX_TRIED:
            return True
        # Of fields that do not matter the values with which any others make a point.
        defaults = {name: every[0] for name, every in values.items()} | dict.fromkeys((*DEGREES, "micro"), 1)
        tried = (
            defaults | dict(zip(sorted(self.fields), combination, strict=True)) for combination in product(*choices)
        )
        return any(self.explain(*point) for fields in tried if (point := self._make_point(fields)) is not None)

    def _make_point(self, fields: Facts) -> tuple[LayerGroup, Pipeline, StepChoice] | None:
        """Returns a point with some values of its fields; None if its ranks do not divide the GPUs."""
        loaded, ranks = self.space.loaded, math.prod(fields[name] for name in DEGREES)
        batches = fields["micro"] * loaded.cluster.gpus // ranks if "micro" in self.fields else 1
        if loaded.cluster.gpus % ranks or (loaded.batch.total or 0) % batches:
            return None
        return make_point(self.space, fields)

    def evaluate(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> bool:
        return not self.explain(group, pipeline, step)

    def explain(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> str:
        """Returns what is wrong with a point, in words; empty if nothing is."""
        return self._check({**self._shared, **facts_of_point(self.space, group, pipeline, step)})


def find_program(job: Facts) -> ProgramRules | None:
    """Returns the rules of the program that a job means; None if there are no such rules."""
    framework = job.get("framework")
    stated = framework if isinstance(framework, Mapping) else {"name": framework}
    name, release, counts = stated.get("name"), stated.get("release"), stated.get("rules", True)
    return find_rules(name, release) if isinstance(name, str) and counts is not False else None


def name_own_schemes(job: Facts, rules: ProgramRules) -> dict[str, object]:
    """Returns a job whose open plan names the program's first scheme, where that is not the usual scheme."""
    if not opens_plan(job):
        return dict(job)
    plan = job.get("plan", AUTO)
    stated = dict(plan) if isinstance(plan, Mapping) else {}
    named = dict[str, str]()
    for family, usual in DEFAULTS.items():
        available = rules.has[family].values if family in rules.has else ()
        if usual is not None and available and usual != available[0] and stated.get(SCHEME_KEYS[family]) is None:
            named[SCHEME_KEYS[family]] = available[0]
    return {**job, "plan": {**stated, AUTO: True, **named}} if named else dict(job)


def keep_own_values(name: str, values: Sequence[object], rules: ProgramRules) -> tuple[object, ...]:
    """Returns the values of an automatic field that the program has, with words that it alone adds; else the first."""
    fact = FACT_OF_FIELD.get(name, "")
    if fact not in rules.has:
        return tuple(values)
    words = {word for key in PLAN_KEYS.values() if key.point == name for word in key.chooses}
    others = [word for word in rules.has[fact].values if word in words and word not in values]
    kept = [value for value in (*values, *others) if not explain_missing(fact, rules.has[fact].values, value)]
    return tuple(kept) or tuple(values[:1])
