"""The neighbours of a plan: every change of a single field whose values a search of the job would try, and of a few
settings beside the plan that change its kernels.

Some changes take other fields along: a pipeline its schedule and chunks, full recomputation its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import get_args

from meshcast.experiments.explain.changeable_job import Change, ChangeableJob
from meshcast.experiments.search.space.divisions import list_divisions
from meshcast.experiments.search.space.fields import AUTO, FIELD_OF, FIELDS, PARTITIONS, state_values
from meshcast.experiments.search.space.limits import LimitedSpace, Limits
from meshcast.experiments.search.space.scheme_keys import takes_option
from meshcast.experiments.search.space.short_form import read_short_form
from meshcast.experiments.search.space.space import NODE, OVERLAPS
from meshcast.hardware.documents.plain_data import SomeFields
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.programs.torchtitan_plan import CHUNKS
from meshcast.simulator.formats.launch.programs.trainer import LIGER_LOSS
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.job.framework import QuantisedRecipe
from meshcast.simulator.job.plan_keys import (
    PIPELINE_NUMBERS,
    PLAN_KEYS,
    SCHEME_KEYS,
    PlanKey,
    choosing_keys,
    option_keys,
)
from meshcast.simulator.job.program_rules import ProgramRules, find_rules
from meshcast.simulator.models.model import Model

MOST_CHUNKS = 4
"""Numbers of chunks that are tried of a schedule, the smallest first: each saves less of the bubble than the one
before."""

LOSS = "framework.set.loss"

LOSSES: Mapping[str, SomeFields] = {
    "fused": {},
    "in chunks": {"chunk_count": CHUNKS},
    "Liger's, in chunks": LIGER_LOSS,
}
"""Kernels of the loss: those of the framework's profile, chunks of logits as torchtitan has them, and Liger's."""

ASYNCHRONOUS = ("pipedream-2bw",)
"""Schedules without a flush, whose weights are a step old; PipeDream's own holds as many versions as stages."""

COMPILE = "framework.set.compile"

*_, EXPERT_RANKS = (key for key in PLAN_KEYS.values() if key.part == "ranks")
(SEQUENCES,) = choosing_keys("tensor")
(RECOMPUTED,) = choosing_keys("memory")
RECOMPUTED_LAYERS = next(key for key in option_keys("memory") if key.option == "layers")
OFFLOADED = next(key for key in option_keys("memory") if key.option == "what")
STATES, *_ = choosing_keys("data")
COPIES = next(key for key in PLAN_KEYS.values() if key.flat == "replicate")
DIVIDED = PLAN_KEYS[PIPELINE_NUMBERS[1]]
"""Keys of a plan that changes take along: ranks of an expert, sequence parallelism, what is recomputed and how many
layers, what is offloaded, how states are sharded and over how many ranks, and chunks of the layers."""

SCHEDULE, PARTITION = "plan.schedule", "plan.partition"

COMPUTE, GLOBAL_BATCH, MICRO = "precision.compute", "batch.global", "batch.micro"

OF_NUMERICS = (COMPUTE, GLOBAL_BATCH)
"""Fields that change what is computed, and not only how."""

WIDER = ("bf16", "fp16", "fp32")
"""Compute formats; all others are narrower."""


@dataclass(frozen=True, eq=False)
class PlanChange:
    """A change of a job.

    key: the field that it is about, as ``--set`` has it.
    fields: all fields that it sets.
    before, after: values of the field.
    numerics: whether the training computes something else with it: another precision, another global batch, or weights
        that are older than the last update.
    """

    key: str
    fields: Change
    before: object
    after: object
    numerics: bool = False

    @property
    def idle(self) -> frozenset[str]:
        """The fields that make no difference with it: those of a degree that becomes 1."""
        if self.after != 1 or self.key not in OF_DEGREES:
            return frozenset()
        return OF_DEGREES[self.key]

    @property
    def grows(self) -> bool:
        """Whether it makes a number larger."""
        return isinstance(self.before, int) and isinstance(self.after, int) and self.after > self.before

    @property
    def identity(self) -> frozenset[tuple[str, str]]:
        """What it sets, for comparison."""
        return frozenset((field, repr(value)) for field, value in self.fields.items())


def open_space(base: ChangeableJob) -> LimitedSpace:
    """Returns the space of a search over all fields of a job that its program runs.

    Raises PlanError for a job that no search takes, such as one without a global batch or on unlike nodes.
    """
    job = base.job
    if not base.is_uniform:
        rule = "advice is about plans whose stages and replicas are alike"
        key = "stages" if job.plan.has_stages else "replicas"
        raise PlanError(f"plan.{key}", rule, "Compare such plans with meshcast search --heterogeneous, or sweep them")
    written, batch = job.as_written, job.as_written.get("batch", {})
    closed = {key: value for key, value in base.plan.items() if PLAN_KEYS[key].owner == "model"}
    overlaps = {FIELD_OF[name].rpartition(".")[2]: AUTO for name in OVERLAPS}
    framework = dict(written["framework"])
    traits = framework.get("set", {})
    framework["set"] = {**traits, "overlap": {**traits.get("overlap", {}), **overlaps}}
    left_out = ("micro", "microbatches", "samples")
    sizes = {key: value for key, value in batch.items() if key not in left_out}
    if job.batch.total is not None:
        sizes["global"] = job.batch.total
    plan = {AUTO: True, **closed}
    opened = {**written, "plan": plan, "batch": {**sizes, "micro": AUTO}, "framework": framework}
    return LimitedSpace(
        {key: value for key, value in opened.items() if key != "noise"}, job.folder, Limits(program=True)
    )


class PlanNeighbours:
    """The changes of a job.

    base: the job.
    settings: whether its program is known to have, or not to have, what is no key of a plan: kernels of the loss,
        compilation. That is so where a launch file can be written for it.
    """

    def __init__(self, base: ChangeableJob, settings: bool) -> None:
        self.base, self.job, self._settings = base, base.job, settings
        self.space = open_space(base)
        self.now = read_short_form(self.job).values
        framework = self.job.framework
        self.rules: ProgramRules | None = (
            find_rules(framework.name, self.job.release) if self.job.means_program else None
        )

    def list_changes(self, near: bool = False) -> list[PlanChange]:
        """Returns all changes, of a field the values in the order in which a search tries them.

        near: whether of a number only the next smaller and the next larger values are taken.
        """
        changes = [
            *self._list_degrees(),
            *self._list_pipelines(),
            *self._list_schedules(),
            *self._list_recomputation(),
            *self._list_words(),
            *self._list_data(),
            *self._list_named_schemes(),
            *self._list_settings(),
        ]
        kept = changes if not near else [change for change in changes if self._is_near(change)]
        return list({change.identity: change for change in kept}.values())

    def _is_near(self, change: PlanChange) -> bool:
        """Returns whether a change is to the next value of a number, or to a word."""
        before, after = change.before, change.after
        if type(before) is not int or type(after) is not int:
            return True
        between = (
            [value for value in self.space.values[FIELDS[change.key]] if type(value) is int]
            if (change.key in FIELDS)
            else []
        )
        return not any(min(before, after) < value < max(before, after) for value in between)

    def _make(self, key: str, fields: Change, after: object, numerics: bool = False) -> PlanChange:
        """Returns a change. key: its field, whose value now is that of the plan in short form."""
        before = self.now.get(FIELDS[key])
        every = key in (name_field(RECOMPUTED_LAYERS), name_field(COPIES)) and before is None
        return PlanChange(key, fields, "all" if every else before, after, numerics)

    def _is_other(self, name: str, value: object) -> bool:
        """Returns whether a field of a point has another value in the job, where it makes a difference."""
        return self.now.get(name) not in (None, value)

    # ------------------------------------------------------------------------------------------- degrees

    def _list_degrees(self) -> Iterator[PlanChange]:
        plan = self.base.plan
        for name in ("tp", "cp", "ep", "micro"):
            key = FIELD_OF[name]
            for value in self.space.values[name]:
                if not self._is_other(name, value):
                    continue
                fields = {key: value}
                yield self._make(key, fields, value)
                if name == "tp" and plan.get(SEQUENCES.name) is False and value > 1:
                    yield self._make(key, fields | {name_field(SEQUENCES): True}, value)
                if name == "tp" and plan.get(EXPERT_RANKS.name) is not None:  # experts are sharded as all else is
                    yield self._make(key, fields | {name_field(EXPERT_RANKS): value}, value)
        key = name_field(EXPERT_RANKS)
        for value in self.space.values[EXPERT_RANKS.point]:
            if self.job.model.moe is not None and value != self.now[EXPERT_RANKS.point]:
                yield self._make(key, {key: value}, value)

    def _list_pipelines(self) -> Iterator[PlanChange]:
        """Yields other numbers of stages: with the schedule and chunks of the plan, and with others."""
        usual = {SCHEDULE: None, CHUNKS_FIELD: None, PARTITION: "even"}
        plan = {f"plan.{key}": value for key, value in self.base.plan.items() if value is not None}
        stated = {key: value for key, value in usual.items() if plan.get(key, value) != value}
        for stages in self.space.values["pp"]:
            if not self._is_other("pp", stages):
                continue
            fields = {"plan.pp": stages}
            if stages == 1:
                yield self._make("plan.pp", fields | stated, stages)
                continue
            yield self._make("plan.pp", fields, stages)
            yield self._make("plan.pp", fields | stated, stages)
            for division in self._divide(stages, ("even",)):
                if division[CHUNKS_FIELD] > 1:
                    yield self._make("plan.pp", fields | division, stages)

    def _divide(self, stages: int, partitions: Sequence[str]) -> Iterator[Change]:
        """Yields schedules with their chunks and the partition of the layers for a number of stages."""
        values, layers = self.space.values, self.job.model.layers
        for schedule in values["schedule"]:
            divisions = list_divisions((schedule,), partitions, values[DIVIDED.point], layers, stages)
            for name, chunks, partition, _ in islice(divisions, MOST_CHUNKS * len(partitions)):
                fields = {SCHEDULE: name, CHUNKS_FIELD: chunks, PARTITION: partition}
                yield {key: value for key, value in fields.items() if not self._is_default(key, value)}

    def _is_default(self, key: str, value: object) -> bool:
        """Returns whether a partition is the usual one, and the plan states none."""
        return key == PARTITION and value == "even" and "partition" not in self.base.plan

    # ------------------------------------------------------------------------------------------- pipeline

    def _list_schedules(self) -> Iterator[PlanChange]:
        """Yields schedules, chunks and partitions for the stages that the plan has."""
        now, stages = self.now, self.now["pp"]
        if stages == 1:
            return
        kept = now["partition"] if isinstance(now["partition"], str) else "even"
        for fields in self._divide(stages, tuple(dict.fromkeys((kept, *PARTITIONS)))):
            schedule, chunks, partition = fields[SCHEDULE], fields[CHUNKS_FIELD], fields.get(PARTITION, "even")
            if schedule != now["schedule"]:
                after = f"{schedule}, {DIVIDED.name} {chunks}" if chunks > 1 else schedule
                yield self._make(SCHEDULE, fields, after)
            elif chunks != now[DIVIDED.point]:
                yield self._make(CHUNKS_FIELD, fields, chunks)
            elif partition != write(now["partition"]):
                yield self._make(PARTITION, {PARTITION: partition}, partition)
        if self.rules is None:
            for name in ASYNCHRONOUS:
                if name != now["schedule"]:
                    fields = {SCHEDULE: name, CHUNKS_FIELD: None}
                    yield self._make(SCHEDULE, fields, name, numerics=True)

    # ------------------------------------------------------------------------------------------- memory

    def _list_recomputation(self) -> Iterator[PlanChange]:
        now, key, layers_key = self.now[RECOMPUTED.point], name_field(RECOMPUTED), name_field(RECOMPUTED_LAYERS)
        count = self.now[RECOMPUTED_LAYERS.point] if now == "full" else None
        alone = {layers_key: None} if self.base.plan.get(RECOMPUTED_LAYERS.name) is not None else {}
        for word in self.space.values[RECOMPUTED.point]:
            if word != now:
                yield self._make(key, {key: word, **alone}, word)
        listed = {"core_attn"} if now == "selective" else {*now} if isinstance(now, tuple) else set[str]()
        for module in self._modules():
            changed = sorted(listed ^ {module})
            if changed and changed != ["core_attn"]:
                yield self._make(key, {key: changed, **alone}, changed)
        layers = -(-self.job.model.layers // (self.now["pp"] * (self.now[DIVIDED.point] or 1)))
        for part in dict.fromkeys((layers // 4, layers // 2, 3 * layers // 4)):
            if 0 < part < layers and part != count:
                fields = {key: "full", layers_key: part}
                words = f"full, {part} of {layers} layers"
                yield self._make(*((layers_key, fields, part) if now == "full" else (key, fields, words)))
        if count is not None:
            yield self._make(layers_key, {layers_key: None}, "all")

    def _modules(self) -> Sequence[str]:
        """Returns modules that the program recomputes by their names; those of the model."""
        if self.rules is not None:
            known = self.rules.has.get("modules")
            return [] if known is None else [name for name in known.values if has_module(self.job.model, name)]
        options = find_scheme("memory/recompute-selective").Options.model_fields
        names = get_args(get_args(options["modules"].annotation)[0])
        return [name for name in names if has_module(self.job.model, name)]

    def _list_words(self) -> Iterator[PlanChange]:
        """Yields what is offloaded, sequence parallelism, the order of the mesh, and what overlaps."""
        for name in (OFFLOADED.point, SEQUENCES.point, "mesh_order", *OVERLAPS):
            key = FIELD_OF[name]
            for value in self.space.values[name]:
                if not self._is_other(name, value):
                    continue
                yield self._make(key, state_values([key], {name: value}), write(value))
        key, offloaded = name_field(OFFLOADED), self.now[OFFLOADED.point]
        if "activations" not in offloaded:
            both = [*offloaded, "activations"]
            yield self._make(key, {key: both}, both)

    # ------------------------------------------------------------------------------------------- states

    def _list_data(self) -> Iterator[PlanChange]:
        """Yields data schemes, the ranks that share a copy of the states, and the options of the scheme."""
        apart = (COPIES.name, SCHEME_KEYS["data"], *OPTIONS)
        alone = {f"plan.{key}": None for key in apart if self.base.plan.get(key) is not None}
        states, copies = name_field(STATES), name_field(COPIES)
        for value in self.space.values["data"]:
            if self._is_other("data", value):
                yield self._make(states, state_values([states], {"data": value}) | alone, value)
        ranks = self.now["tp"] * self.now["cp"]
        domain, gpus = self.job.cluster.scale_up_domain, self.job.cluster.gpus
        if NODE in self.space.values[COPIES.point] and 1 < domain // ranks < gpus // (ranks * self.now["pp"]):
            yield self._make(copies, {copies: domain // ranks}, domain // ranks)
        if self.now[COPIES.point] is not None:
            yield self._make(copies, {copies: None}, "all")
        for key in OPTIONS.values() if takes_option(self.now["data"] or "ddp", next(iter(OPTIONS))) else ():
            stated = self.base.plan.get(key.name)
            for value in key.auto:
                if value != (key.usual if stated is None else stated):
                    yield PlanChange(f"plan.{key.name}", {f"plan.{key.name}": value}, stated, value)

    def _list_named_schemes(self) -> Iterator[PlanChange]:
        """Yields the schemes of sequences and experts that the program has by their names."""
        for family, degree in (("sequence", "cp"), ("expert", "ep")):
            known = self.rules.has.get(family) if self.rules is not None else None
            if known is None or self.now[degree] == 1:
                continue
            now = next((entry.use for entry in self.job.plan.schemes if entry.use.startswith(f"{family}/")), "")
            for value in known.values:
                if now != f"{family}/{value}":
                    key = f"plan.{SCHEME_KEYS[family]}"
                    yield PlanChange(key, {key: value}, now.partition("/")[2], value)

    # ------------------------------------------------------------------------------------------- beside the plan

    def _list_settings(self) -> Iterator[PlanChange]:
        job = self.job
        known = self.rules.has.get("compute") if self.rules is not None else None
        formats = known.values if known is not None else get_args(QuantisedRecipe)
        for value in formats:
            if value != job.precision.compute and (value not in WIDER or job.precision.compute == "fp32"):
                yield PlanChange(COMPUTE, {COMPUTE: value}, job.precision.compute, value, numerics=True)
        total = job.batch.total
        assert total is not None
        yield PlanChange(GLOBAL_BATCH, {GLOBAL_BATCH: 2 * total}, total, 2 * total, numerics=True)
        if not self._settings:
            return
        compiles = job.framework.compile
        yield PlanChange(COMPILE, {COMPILE: not compiles}, compiles, not compiles)
        for name, loss in LOSSES.items():
            yield PlanChange(LOSS, {LOSS: dict(loss)}, None, name)


OPTIONS = {key.name: key for key in option_keys("data")}
"""Keys of a plan that are options of a data scheme."""


def has_module(model: Model, name: str) -> bool:
    """Returns whether a model has a module that may be recomputed."""
    needs = {"moe": model.moe, "moe_act": model.moe, "mla_up_proj": model.mla}
    if name == "shared_experts":
        return model.moe is not None and bool(model.moe.shared_experts)
    return name not in needs or bool(needs[name])


def write(value: object) -> object:
    """Returns a value of a point as a job states it."""
    return list(value) if isinstance(value, tuple) else value


def name_field(key: PlanKey) -> str:
    """Returns the field of a job that a key of a plan is."""
    return f"plan.{key.name}"


CHUNKS_FIELD = name_field(DIVIDED)

OF_DEGREES: Mapping[str, frozenset[str]] = {
    "plan.pp": frozenset((SCHEDULE, CHUNKS_FIELD, PARTITION, FIELD_OF["overlap_pp"], FIELD_OF["mesh_order"])),
    "plan.tp": frozenset(
        (*(name_field(key) for key in PLAN_KEYS.values() if key.degree == "tp"), FIELD_OF["overlap_tp"])
    ),
    "plan.cp": frozenset(name_field(key) for key in PLAN_KEYS.values() if key.degree == "cp"),
    "plan.ep": frozenset((f"plan.{SCHEME_KEYS['expert']}",)),
}
"""Fields that a degree above 1 gives an effect."""


def name_flat_key(field: str) -> str:
    """Returns the name of a field among the keys of launch files."""
    section, _, name = field.partition(".")
    return f"plan.{PLAN_KEYS[name].flat}" if section == "plan" and name in PLAN_KEYS else field
