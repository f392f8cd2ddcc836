"""Which points of a search the program of its job runs, by the rules of its framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from meshcast.experiments.search.fields import AUTO, opens_plan
from meshcast.experiments.search.keys.scheme_keys import DEFAULTS, accompanies_others, plain_name
from meshcast.experiments.search.point_rules import PointRule
from meshcast.experiments.search.space import LayerGroup, Pipeline, Space, StepChoice
from meshcast.simulator.job.plan_keys import SCHEME_KEYS
from meshcast.simulator.job.program_rules import (
    CONDITIONS,
    Facts,
    ProgramRules,
    explain_missing,
    find_rules,
    shared_facts,
)

DEGREES = ("tp", "cp", "pp")

MOST_TRIED = 10_000
"""Most combinations of values that are tried to find out whether a rule may be broken."""

FIELDS_OF_FACTS: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("tp", "pp", "cp", "ep", "offload", "recompute", "overlap_tp", "overlap_pp")},
    **{name: ("pp", name) for name in ("schedule", "chunks", "mesh_order")},
    "dp": DEGREES,
    "etp": ("tp", "ep", "etp"),
    "copies": (*DEGREES, "mesh_order", "shard"),
    "microbatches": (*DEGREES, "micro"),
    "group": ("pp",),
    "data": ("tp", "pp", "data"),
    "sequence": ("cp", "sequence"),
    "tensor": ("tp", "tensor", "sequence_parallel"),
    "tensor_overlap": ("tp", "tensor", "overlap_tp"),
    "expert": ("ep", "expert"),
    "recompute_modules": ("recompute",),
    "recomputed": ("recompute", "recomputed"),
}
"""Fields of a point that a fact follows from; of other facts none: the job has them."""


class ProgramPoints:
    """The points that the program of a job runs. Each rule is evaluated once for equal values of its fields.

    rules: of the program.
    """

    def __init__(self, space: Space, rules: ProgramRules) -> None:
        self.space, self.program = space, space.loaded.framework.name
        has = [ProgramRule(space, (name,), self._explain_missing(rules, name)) for name in rules.has]
        conditions = [CONDITIONS[refused.rule] for refused in rules.refuses]
        refuses = [ProgramRule(space, one.facts, one.check) for one in conditions]
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

    def key_of(self, pipeline: Pipeline) -> tuple[Any, ...]:
        """Returns the values of a pipeline that the rules depend on."""
        return tuple([rule.key_of(1, pipeline) for rule in self.rules])

    def explain(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> str:
        """Returns why the program does not run a point, in words; empty if it does."""
        words = next((words for rule in self.rules if (words := rule.explain(group, pipeline, step))), "")
        return f"{self.program} {words}" if words else ""


class ProgramRule(PointRule):
    """A rule of a program on the points of a search. check: returns what is wrong with some facts, in words."""

    def __init__(self, space: Space, facts: Sequence[str], check: Callable[[Facts], str]) -> None:
        super().__init__({field for name in facts for field in FIELDS_OF_FACTS.get(name, ())})
        self.space, self._check, self._shared = space, check, shared_facts(space.loaded)

    def may_break(self) -> bool:
        """Returns whether some values of its fields break it; True, too, where there are too many to try all."""
        values = self.space.values
        choices = [tuple(values[name]) for name in sorted(self.fields)]
        if math.prod(map(len, choices)) > MOST_TRIED:
            return True
        # Of fields that do not matter the values with which any others make a point.
        defaults = {name: every[0] for name, every in values.items()} | dict.fromkeys((*DEGREES, "micro"), 1)
        tried = (
            defaults | dict(zip(sorted(self.fields), combination, strict=True)) for combination in product(*choices)
        )
        return any(self.explain(*point) for fields in tried if (point := self._make_point(fields)) is not None)

    def _make_point(self, fields: Mapping[str, Any]) -> tuple[LayerGroup, Pipeline, StepChoice] | None:
        """Returns a point with some values of its fields; None if its ranks do not divide the GPUs."""
        loaded, ranks = self.space.loaded, math.prod(fields[name] for name in DEGREES)
        batches = fields["micro"] * loaded.cluster.gpus // ranks if "micro" in self.fields else 1
        if loaded.cluster.gpus % ranks or (loaded.batch.total or 0) % batches:
            return None
        group = LayerGroup(**{name: fields[name] for name in LayerGroup._fields})
        pipeline = Pipeline(**{name: fields[name] for name in Pipeline._fields})
        step = StepChoice(**{name: fields[name] for name in StepChoice._fields if name != "options"})
        shard = self.space.shard_ranks(step.shard, *self.space.data_ranks(group, pipeline.place))
        return (group, pipeline, step._replace(shard=shard)) if shard else None

    def evaluate(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> bool:
        return not self.explain(group, pipeline, step)

    def explain(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> str:
        """Returns what is wrong with a point, in words; empty if nothing is."""
        return self._check(self._shared | facts_of_point(self.space, group, pipeline, step))


def facts_of_point(space: Space, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> dict[str, Any]:
    """Returns the facts of a point that a plan changes, as `simulator.job.program_rules.facts_of_job` does of a job."""
    (dp, _), pp, batch = space.data_ranks(group, pipeline.place), pipeline.pp, space.loaded.batch
    assert batch.total is not None
    words = isinstance(group.recompute, str)
    modules = (() if group.recompute != "selective" else ("core_attn",)) if words else group.recompute
    overlap = space.loaded.framework.tensor_overlap.rpartition("/")[2] if group.overlap_tp else None
    tensor = "megatron-sp" if group.sequence_parallel else "megatron"
    if accompanies_others(group.tensor):
        overlap = plain_name(group.tensor or "")
    elif group.tensor is not None:
        tensor = plain_name(group.tensor)
    return {
        **{"tp": group.tp, "cp": group.cp, "ep": group.ep, "pp": pp, "dp": dp},
        "etp": group.expert_tensor_ranks,
        "copies": dp // (step.shard or dp),
        "microbatches": batch.total // (group.micro * dp),
        "schedule": pipeline.schedule if pp > 1 else None,
        "chunks": pipeline.chunks if pp > 1 else 1,
        "group": pp,
        "overlap_passes": False,
        "mesh_order": pipeline.mesh_order if pp > 1 else "pp-dp-cp-tp",
        "data": step.data if dp * group.cp > 1 else None,
        "sequence": plain_name(group.sequence) if group.cp > 1 else None,
        "tensor": tensor if group.tp > 1 else None,
        "tensor_overlap": overlap if group.tp > 1 else None,
        "expert": plain_name(group.expert) if group.ep > 1 else None,
        "recompute": group.recompute if words else "selective",
        "recompute_modules": modules,
        "recomputed": pipeline.recomputed if group.recompute == "full" else None,
        "offload": group.offload,
        "offloaded_layers": None,
        "overlap_tp": group.overlap_tp and group.tp > 1,
        "overlap_pp": step.overlap_pp,
    }


def find_program(job: Mapping[str, Any]) -> ProgramRules | None:
    """Returns the rules of the program that a job names; None if it names none, or one without known rules."""
    framework = job.get("framework")
    name = framework.get("name") if isinstance(framework, Mapping) else framework
    return find_rules(name) if isinstance(name, str) else None


def name_own_schemes(job: Mapping[str, Any], rules: ProgramRules) -> dict[str, Any]:
    """Returns a job whose open plan names the scheme that the program lists first, where that is not the usual one."""
    plan = job.get("plan", AUTO)
    stated = dict(plan) if isinstance(plan, Mapping) else {}
    named = dict[str, Any]()
    for family, usual in DEFAULTS.items():
        available = rules.has[family].values if family in rules.has else ()
        if usual is not None and available and usual != available[0] and stated.get(SCHEME_KEYS[family]) is None:
            named[SCHEME_KEYS[family]] = available[0]
    if not named:
        return dict(job)
    return {**job, "plan": {**stated, **({AUTO: True} if opens_plan(job) else {}), **named}}


def keep_own_values(name: str, values: Sequence[Any], rules: ProgramRules) -> tuple[Any, ...]:
    """Returns the values of an automatic field that the program has; the first one where it has none of them."""
    if name not in rules.has:
        return tuple(values)
    kept = [value for value in values if not explain_missing(name, rules.has[name].values, value)]
    return tuple(kept) or tuple(values[:1])
