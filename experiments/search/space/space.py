"""The space of a search: the open fields of a job, their values, and the distinct executions that they span.

A field is open if the job says ``auto`` or lists values. Fields that change the ops of a layer make a `LayerGroup`,
fields of the pipeline (`Pipeline`) and fields that act between the passes (`StepChoice`) the points of a group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from meshcast.experiments.search.space.data_schemes import DATA, DataSchemes
from meshcast.experiments.search.space.divisions import (
    UNEVEN_ENDS,
    Division,
    list_divisions,
    list_divisors_of_any,
)
from meshcast.experiments.search.space.fields import (
    AUTO,
    CLUSTER,
    FIELD_OF,
    FIELDS,
    MESH_ORDERS,
    PARTITIONS,
    check_values,
    list_fields,
    opens_plan,
    reader_of,
    split_open_fields,
    state_values,
    values_of,
    write_value,
)
from meshcast.experiments.search.space.job_checks import (
    check_experts,
    check_job,
    check_plan,
    check_schedules,
    without_choice,
)
from meshcast.experiments.search.space.scheme_keys import (
    DATA_OPTIONS,
    DEFAULTS,
    NamedScheme,
    accompanies_others,
    changes_kernels,
    find_named,
    offloads_states,
    plain_name,
    takes_option,
    write_scheme_keys,
)
from meshcast.experiments.sweeps.expressions import Expression
from meshcast.experiments.sweeps.grid import apply_changes
from meshcast.hardware.documents.plain_data import Fields, SomeFields
from meshcast.hardware.errors import PlanError
from meshcast.hardware.remembered import remembered, remembered_by
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.job.plan_keys import PLAN_KEYS
from meshcast.simulator.job.program_rules import Facts, name_padding
from meshcast.simulator.loading.load import load_job, state_recipes
from meshcast.simulator.report.peak_errors import EVEN, least_room

SCHEDULES = ("1f1b", "interleaved-1f1b", "breadth-first", "gpipe", "zb-h1", "zb-h2", "zb-v", "hanayo")
"""Schedules that are tried by default: those with a flush whose orders do not depend on durations."""

PAIRING = ("dualpipe", "dualpipe-v")
"""Schedules that are also tried for models with experts: token exchanges of a pass run beside kernels of another."""

WORDS = ("schedule", "recompute", "data", "offload", "mesh_order", *DEFAULTS)
"""Fields of a point whose values are words, or numbers with a meaning each."""

SMALLER_LAST = ("recompute",)
"""Fields of a group whose last value needs the least memory."""

OVERLAPS = ("overlap_tp", "overlap_dp", "updated_weights", "overlap_pp")
"""Fields of a point that say what overlaps, which a framework may rule out."""

OF_OTHER_VALUES = ("recomputed", "shard")
"""Fields of a point whose values depend on those of others."""

ALONE: Mapping[str, str | int] = {"plan.schedule": "1f1b", "plan.chunks": 1}
"""The schedule of plans without a pipeline."""

NODE = "node"
"""As many ranks share a copy of the states as a scale-up domain has of a stage."""

MAX_TENSOR_RANKS, MAX_EXPERT_RANKS, MAX_MICRO, TOKENS_OF_A_RANK = 32, 8, 32, 2048
"""Largest tensor-parallel degrees, of all layers and of experts, and largest micro-batch that are tried by default, and
least tokens of a sequence on a rank with context parallelism."""

NOTHING_EXCLUDED: Mapping[str, int] = {"where": 0, "program": 0, "near_measured": 0}
"""Numbers of points that limits exclude, by limit, where none excludes any."""


class LayerGroup(NamedTuple):
    """Values of the fields that change the ops of a layer."""

    tp: int
    cp: int
    ep: int
    micro: int
    recompute: str | tuple[str, ...]
    sequence_parallel: bool
    overlap_tp: bool
    offload: tuple[str, ...]
    etp: int | None = None
    """Expert tensor parallel; None: the default of a plan."""
    tensor: NamedScheme | None = None
    """Tensor scheme that the plan names; None: Megatron's."""
    sequence: NamedScheme = DEFAULTS["sequence"]
    expert: NamedScheme = DEFAULTS["expert"]

    @property
    def schemes(self) -> tuple[NamedScheme | None, ...]:
        """The schemes of its tensor, sequence and expert parallelism."""
        return self.tensor, self.sequence, self.expert

    @property
    def degrees(self) -> tuple[Any, ...]:
        """Its degrees, with the schemes of each."""
        return self.tp, self.cp, self.ep, self.etp, self.schemes

    @property
    def names_schemes(self) -> bool:
        """Whether a plan has to name any of them: chunks and tiles are not affine in the size of micro-batches."""
        return self.schemes != tuple(DEFAULTS.values())

    @property
    def least_micro(self) -> int:
        """The smallest micro-batch with which its plans may exist."""
        return self.micro if self.names_schemes else 1

    @property
    def expert_tensor_ranks(self) -> int:
        return self.etp or (1 if self.ep > 1 else self.tp)


class Place(NamedTuple):
    """Number of stages of a pipeline, and axes of the mesh, outermost first."""

    pp: int
    mesh_order: str = MESH_ORDERS[0]


class Stages(NamedTuple):
    """Number of stages, and orders of the mesh, of pipelines that may, or may not, recompute some of their layers."""

    pp: int
    mesh_orders: tuple[str, ...]
    recomputes: bool


class Pipeline(NamedTuple):
    """Values of the fields of the pipeline."""

    pp: int
    schedule: str
    chunks: int
    partition: str | tuple[int, ...]
    recomputed: int | None = None
    """Layers of every stage that are recomputed with full recompute; None: all."""
    mesh_order: str = MESH_ORDERS[0]
    """Axes of the mesh, outermost first."""

    @property
    def order(self) -> Pipeline:
        """The pipeline without what its order of passes does not depend on."""
        return self._replace(recomputed=None, mesh_order=MESH_ORDERS[0])

    @property
    def place(self) -> Place:
        """Where the ranks of the pipeline are."""
        return Place(self.pp, self.mesh_order)


class StepChoice(NamedTuple):
    """Values of the fields that act between the passes."""

    data: str
    overlap_dp: bool
    updated_weights: bool
    overlap_pp: bool
    shard: int | None = None
    """Data-parallel ranks that share a copy of the states; None: all."""
    options: tuple[Any, ...] = (*DATA_OPTIONS.values(),)
    """Values of the options of the data scheme that keys of a plan state, in the order of `DATA_OPTIONS`."""

    def option(self, key: str) -> Any:
        """Returns the value of an option of the data scheme by its key."""
        return self.options[OPTION_NUMBERS[key]]


OPTION_NUMBERS = {key: number for number, key in enumerate(DATA_OPTIONS)}


def values_of_point(group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> Fields:
    """Returns the values of a point by the names of its fields."""
    parts = group._asdict() | pipeline._asdict() | step._asdict()
    return parts | dict(zip(DATA_OPTIONS, parts.pop("options"), strict=True))


DEGREES = ("tp", "cp", "pp")
"""Fields of a point that divide the GPUs."""

FACT_OF_FIELD: Mapping[str, str] = {
    **{name: name for name in ("tp", "pp", "cp", "ep", "overlap_tp", "overlap_pp", "schedule", "data")},
    **{"mesh_order": "rank_order", "chunks": "virtual_stages", "offload": "offloaded", "recompute": "recomputation"},
}
"""Facts of rules of programs (`simulator.job.program_rules`) that are fields of a point."""

FIELDS_OF_FACTS: Mapping[str, tuple[str, ...]] = {
    **{fact: (field,) for field, fact in FACT_OF_FIELD.items()},
    **{FACT_OF_FIELD[field]: ("pp", field) for field in ("schedule", "chunks", "mesh_order")},
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
    "padding": ("tp",),
    "modules": ("recompute",),
    "recomputed_layers": ("recompute", "recomputed"),
}
"""Fields of a point that facts of rules of programs follow from; of other facts none: the job has them."""


def facts_of_point(space: Space, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> Facts:
    """Returns the facts of a point that a plan changes, as `simulator.job.program_rules.facts_of_job` does of a job."""
    (dp, _), pp, loaded = space.data_ranks(group, pipeline.place), pipeline.pp, space.loaded
    assert loaded.batch.total is not None
    words = isinstance(group.recompute, str)
    core = ("core_attn",) if group.recompute == "selective" else ()
    return {
        **{"tp": group.tp, "cp": group.cp, "ep": group.ep, "pp": pp, "dp": dp, "etp": group.expert_tensor_ranks},
        **_tensor_facts(space, group),
        "padding": name_padding(loaded.model, group.tp),
        "copies": dp // (step.shard or dp),
        "microbatches": loaded.batch.total // (group.micro * dp),
        "schedule": pipeline.schedule if pp > 1 else None,
        "virtual_stages": pipeline.chunks if pp > 1 else 1,
        "group": pp,
        "overlap_passes": False,
        "rank_order": pipeline.mesh_order if pp > 1 else MESH_ORDERS[0],
        "data": step.data if dp * group.cp > 1 else None,
        "sequence": plain_name(group.sequence) if group.cp > 1 else None,
        "expert": plain_name(group.expert) if group.ep > 1 else None,
        "recomputation": group.recompute if words else "selective",
        "modules": core if words else group.recompute,
        "recomputed_layers": pipeline.recomputed if group.recompute == "full" else None,
        "offloaded": group.offload,
        "offloaded_layers": None,
        "overlap_pp": step.overlap_pp,
    }


def make_point(space: Space, fields: SomeFields) -> tuple[LayerGroup, Pipeline, StepChoice] | None:
    """Returns the point with some values of its fields; None if no ranks share a copy of the states as they say."""
    group = LayerGroup(**{name: fields[name] for name in LayerGroup._fields})
    pipeline = Pipeline(**{name: fields[name] for name in Pipeline._fields})
    step = StepChoice(**{name: fields[name] for name in StepChoice._fields if name != "options"})
    shard = space.shard_ranks(step.shard, *space.data_ranks(group, pipeline.place))
    return (group, pipeline, step._replace(shard=shard)) if shard else None


def _tensor_facts(space: Space, group: LayerGroup) -> Facts:
    """Returns the tensor scheme of a group, and what overlaps its communication; None for a single rank."""
    if group.tp == 1:
        return {"tensor": None, "tensor_overlap": None, "overlap_tp": False}
    domain = space.loaded.cluster.domain
    reaches = space.loaded.cluster.gpus <= domain or domain % group.tp == 0  # tensor ranks are the innermost axis
    overlap = space.loaded.framework.tensor_overlap.rpartition("/")[2] if group.overlap_tp and reaches else None
    tensor = "megatron-sp" if group.sequence_parallel else "megatron"
    if accompanies_others(group.tensor):
        overlap = plain_name(group.tensor or "")
    elif group.tensor is not None:
        tensor = plain_name(group.tensor)
    return {"tensor": tensor, "tensor_overlap": overlap, "overlap_tp": group.overlap_tp}


class Space:
    """The points of a search.

    job: the job as plain data, without its open fields.
    base: folder of relative paths in the job.
    names_cluster: whether several clusters are searched.
    run_open: whether fields of the run are
        searched, too.
    values: values of every field in `FIELDS`, by its name in a point.
    open: fields of the job that vary.
    """

    def __init__(self, job: SomeFields, base: Path, names_cluster: bool = False, run_open: bool = False) -> None:
        self.base, self.names_cluster = base, names_cluster
        self.job, opened = split_open_fields(job)
        check_plan(self.job["plan"])
        self.job = state_recipes(self.job, opened, base)
        self.loaded = load_job(self.job, base=base)
        check_job(self.loaded, self.job)
        if not (opened or names_cluster or run_open):
            rule = "no field of the job is open: none is `auto` or a list of values"
            raise PlanError("plan", rule, "Write `plan: auto`, or for example tp: auto or tp: [1, 2, 4]")
        check_experts(self.loaded, job)
        if opens_plan(job):
            for field in without_choice(self.loaded):
                opened.pop(field, None)
        self.open = tuple(opened)
        self.fields = list_fields(opened, self.job["plan"])
        """The fields in `FIELDS` with their names in a point, of two that state the data scheme a single one."""
        self.named = find_named(opened, self.job["plan"])
        """Fields that the job opens or states of those that ``plan: auto`` leaves alone."""
        self._automatic_fields = {FIELDS[field] for field, value in opened.items() if value == AUTO}
        self.values = self._every_value(opened)
        check_schedules(self.values["schedule"])
        data = {name: find_scheme(f"data/{name}").Options.model_fields for name in self.values["data"]}
        self.with_copies = {name for name, options in data.items() if "replicate" in options}
        """Data schemes that may keep copies of what they shard."""
        self.data_schemes = DataSchemes(self.values)

    # ------------------------------------------------------------------------------------------- values

    def _every_value(self, opened: SomeFields) -> dict[str, tuple[Any, ...]]:
        fixed = values_of(self.loaded, self.job)
        values: dict[str, tuple[Any, ...]] = {}
        for field, name in self.fields.items():
            value = opened.get(field, fixed[name])
            if field not in opened:
                values[name] = (value,)
            elif value == AUTO:
                values[name] = self._automatic(name, values)
                if name in OVERLAPS:
                    values[name] = tuple(overlap for overlap in values[name] if self._is_valid(field, overlap))
            else:
                check_values(field, name, value, fixed[name])
                if name in WORDS or name in OVERLAPS:  # a job says which are valid
                    for stated in value:
                        load_job(apply_changes(self.job, {field: stated}), base=self.base)
                read = reader_of(field)
                values[name] = tuple(dict.fromkeys(read(stated) for stated in value))
        if "plan.chunks" in opened and "plan.schedule" not in opened and self.job["plan"].get("schedule") is None:
            values["schedule"] = ("1f1b", "interleaved-1f1b")  # what a plan gets with a single chunk, and with more
        return values

    def _is_valid(self, field: str, value: Any) -> bool:
        try:
            return bool(load_job(apply_changes(self.job, {field: value}), base=self.base))
        except PlanError:
            return False

    @property
    def any_step(self) -> StepChoice:
        """A choice between the passes of which nothing in a layer depends: what may overlap does."""
        overlap_dp, updated_weights, overlap_pp = (any(self.values[name]) for name in OVERLAPS[1:])
        return StepChoice("ddp", overlap_dp, updated_weights, overlap_pp)

    def _automatic(self, name: str, before: Mapping[str, Sequence[Any]]) -> tuple[Any, ...]:
        """Returns the values that are tried of a field that is ``auto``. before: those of the fields before it."""
        job, gpus = self.loaded, self.loaded.cluster.gpus
        model, batch = job.model, job.batch
        assert batch.total is not None and batch.sequence is not None
        most = max(MAX_TENSOR_RANKS, job.cluster.scale_up_domain)
        experts = math.gcd(*model.moe.expert_counts) if model.moe else 1
        most_context = max(1, batch.sequence // TOKENS_OF_A_RANK)
        ranges: dict[str, Sequence[Any]] = {
            **{key.point: key.auto for key in PLAN_KEYS.values() if key.auto},
            "tp": [n for n in list_divisors(math.gcd(gpus, model.heads)) if n <= most],
            "cp": [n for n in list_divisors(gpus) if batch.sequence % n == 0 and n <= most_context],
            "ep": list_divisors(math.gcd(gpus, experts)),
            "etp": (None, *(list_divisors_of_any(before.get("tp", ()), MAX_EXPERT_RANKS) if model.moe else ())),
            "micro": [n for n in list_divisors(batch.total) if n <= MAX_MICRO],
            "recomputed": (None, *range(1, model.layers)),
            "overlap_tp": (False, True),
            "pp": [n for n in list_divisors(gpus) if n <= model.layers + 2],
            "schedule": (*SCHEDULES, *(PAIRING if model.moe else ())),
            "chunks": range(1, model.layers + 1),
            "partition": (*PARTITIONS, UNEVEN_ENDS),
            "data": DATA,
            "shard": (None, *([NODE] if gpus > job.cluster.scale_up_domain else [])),
            "overlap_dp": (True, False),
            "updated_weights": (True, False),
            "overlap_pp": (True, False),
            **{family: (default,) for family, default in DEFAULTS.items()},
        }
        return tuple(ranges[name])

    def stated_values(self) -> dict[str, list[Any]]:
        """Returns the values of the open fields, as a job states them."""
        values = {CLUSTER: [self.job[CLUSTER]]} if self.names_cluster else {}
        return values | {name: [write_value(value) for value in self.values[FIELDS[name]]] for name in self.open}

    # ------------------------------------------------------------------------------------------- points

    @remembered_by(lambda space: ())
    def groups(self) -> list[LayerGroup]:
        """Returns the groups; without tensor parallelism there is no sequence parallelism and nothing to overlap."""
        v = self.values
        groups = []
        fields = [name for name in LayerGroup._fields if name not in ("etp", *DEFAULTS)]
        for tp, cp, ep, micro, recompute, sp, overlap, offload in product(*(v[name] for name in fields)):
            if self.loaded.cluster.gpus % (tp * cp):
                continue
            if tp == 1 and (sp != v["sequence_parallel"][0] or overlap != v["overlap_tp"][0]):
                continue
            plain = LayerGroup(tp, cp, ep, micro, recompute, sp, overlap, offload)
            every = [plain._replace(etp=etp) for etp in self._expert_degrees(tp, ep)]
            groups += [named for group in every for named in self._name_schemes(group)]
        return groups

    def _name_schemes(self, group: LayerGroup) -> list[LayerGroup]:
        v, experts = self.values, group.ep > 1 or (group.etp or 1) > 1
        tensors = v["tensor"] if group.tp > 1 else (None,)
        sequences = v["sequence"] if group.cp > 1 else (DEFAULTS["sequence"],)
        kept = [name if experts or changes_kernels("expert", name) else DEFAULTS["expert"] for name in v["expert"]]
        groups = []
        for tensor, sequence, expert in product(tensors, sequences, dict.fromkeys(kept)):
            # Named schemes shard activations differently; those that overlap leave nothing to overlap.
            alone = tensor is not None and not accompanies_others(tensor)
            if alone and group.sequence_parallel != v["sequence_parallel"][0]:
                continue
            if accompanies_others(tensor) and group.overlap_tp != v["overlap_tp"][0]:
                continue
            groups.append(group._replace(tensor=tensor, sequence=sequence, expert=expert))
        return groups

    def _expert_degrees(self, tp: int, ep: int) -> list[int | None]:
        """Returns the expert-tensor-parallel degrees at other degrees; 1 is the default with expert parallelism."""
        values = list(self.values["etp"])
        if "etp" in self._automatic_fields:
            # Without expert parallelism experts are sharded as everything else is, or whole on every rank.
            gpus = self.loaded.cluster.gpus
            fits = [etp for etp in values if etp and (etp == 1 if ep == 1 else not (tp % etp or gpus % (ep * etp)))]
            values = [None, *fits]
        return [*dict.fromkeys(None if etp == 1 and (ep > 1 or tp == 1) else etp for etp in values)]

    @remembered_by(lambda space, group: (group.tp * group.cp, group.micro, group.recompute == "full"))
    def pipelines(self, group: LayerGroup) -> list[Pipeline]:
        """Returns the pipelines of a group whose degrees divide the GPUs and whose micro-batches divide the batch."""
        return [pipeline for stages in self._stages(group) for pipeline in self._pipelines_of(stages)]

    def _stages(self, group: LayerGroup) -> Iterator[Stages]:
        gpus, total, ranks = self.loaded.cluster.gpus, self.loaded.batch.total, group.tp * group.cp
        orders = self.values["mesh_order"]
        assert total is not None
        for pp in self.values["pp"]:
            if not gpus % (ranks * pp) and not total % (group.micro * (gpus // (ranks * pp))):
                several = 1 < pp < gpus // ranks
                yield Stages(pp, orders if several else orders[:1], group.recompute == "full")

    @remembered
    def _pipelines_of(self, stages: Stages) -> list[Pipeline]:
        """Returns the pipelines with a number of stages: of all groups that have it the same ones."""
        (pp, orders, recomputes), v, layers = stages, self.values, self.loaded.model.layers
        divisions: Iterable[Division] = [Division(v["schedule"][0], v["chunks"][0], v["partition"][0], layers)]
        if pp > 1:
            divisions = list_divisions(v["schedule"], v["partition"], v["chunks"], layers, pp)
        pipelines = list[Pipeline]()
        for schedule, chunks, partition, most in divisions:
            for order in orders:
                pipeline = Pipeline(pp, schedule, chunks, partition, None, order)
                pipelines += self._recompute(pipeline, most) if recomputes else [pipeline]
        return pipelines

    def _recompute(self, pipeline: Pipeline, layers: int) -> list[Pipeline]:
        """Returns a pipeline with the numbers of layers that its stages of `layers` layers at most may recompute."""
        values = self.values["recomputed"]
        counts = dict.fromkeys(count if count is not None and count < layers else None for count in values)
        return [pipeline._replace(recomputed=count) for count in counts]

    def steps(self, group: LayerGroup, pp: int, mesh_order: str = MESH_ORDERS[0]) -> tuple[StepChoice, ...]:
        """Returns the choices between the passes that differ at the degrees of a plan."""
        ranks = self.loaded.cluster.gpus // pp
        shards_experts = self.loaded.model.moe is not None and ranks > group.ep * group.expert_tensor_ranks
        shards = self.data_ranks(group, Place(pp, mesh_order)) if self.values["shard"] != (None,) else (1, 1)
        return self._steps(ranks > group.tp or shards_experts, pp > 1, shards)

    @remembered
    def _steps(self, divided: bool, piped: bool, shards: tuple[int, int]) -> tuple[StepChoice, ...]:
        """Returns the choices by whether several ranks share states, whether there is a pipeline, and `data_ranks`."""
        v = self.values
        steps = dict.fromkeys(
            StepChoice(
                data,
                overlap,
                updated if overlap and data in ("zero-1", "zero-2") else v["updated_weights"][0],
                sends,
                shard,
                options,
            )
            for data in (v["data"] if divided else self._data_of_one_rank)
            for options in self._options(data)
            for shard in self._shards(data, *shards)
            for overlap in (v["overlap_dp"] if divided else v["overlap_dp"][:1])
            for updated in v["updated_weights"]
            for sends in (v["overlap_pp"] if piped else v["overlap_pp"][:1])
        )
        return tuple(steps)

    def _options(self, data: str) -> Iterator[tuple[Any, ...]]:
        """Returns the values of the options of a data scheme; the usual ones of those that it does not have."""
        return product(
            *(self.values[key] if takes_option(data, key) else (usual,) for key, usual in DATA_OPTIONS.items())
        )

    @property
    def _data_of_one_rank(self) -> list[str]:
        """Data schemes that differ where a single rank has all states: the first, and those that offload."""
        first, *others = self.values["data"]
        return [first, *(data for data in others if offloads_states(data))]

    def _shards(self, data: str, dp: int, inside: int) -> list[int | None]:
        """Returns the numbers of ranks that may share a copy of the states. inside: ranks between neighbours of dp."""
        ranks = [self.shard_ranks(value, dp, inside) for value in self.values["shard"]]
        valid = [number for number in ranks if number == dp or (number and data in self.with_copies)]
        return [*dict.fromkeys(None if number == dp else number for number in valid)]

    def data_ranks(self, group: LayerGroup, place: Place) -> tuple[int, int]:
        """Returns the data-parallel ranks, and the distance between neighbours of them."""
        inside = group.tp * group.cp
        dp = self.loaded.cluster.gpus // (inside * place.pp)
        return dp, inside if place.mesh_order == MESH_ORDERS[0] else inside * place.pp

    def shard_ranks(self, value: int | str | None, dp: int, inside: int) -> int:
        """Returns the ranks that share a copy of the states, as a value of the field says; 0: it makes no plan."""
        if value == NODE:
            value = self.loaded.cluster.scale_up_domain // inside
            if not 1 < value < dp:
                return 0
        ranks = dp if value is None else int(value)
        return ranks if ranks and dp % ranks == 0 else 0

    memory_margin = 0.0
    """Share of the memory of a GPU that must stay free."""

    memory_risk = EVEN
    """Most probability of lacking memory that a plan may have."""

    constraints: Sequence[Expression] = ()
    """Constraints that exclude points."""

    @property
    def capacity(self) -> float:
        """Memory of a GPU that a plan may take by its forecast [bytes]."""
        return self.loaded.cluster.gpu.program_memory * (1 - self.memory_margin) / self.least_room

    @cached_property
    def least_room(self) -> float:
        """How many times its need by the forecast a GPU or a host must have as memory."""
        return least_room(self.loaded.framework, self.memory_risk)

    @property
    def limits_points(self) -> bool:
        return False

    def explain_program(self) -> str:
        """Returns why the program of the job does not run the first point that it does not run, in words."""
        return ""

    def choices(self, group: LayerGroup, pipeline: Pipeline) -> tuple[StepChoice, ...]:
        """Returns the choices between the passes of a pipeline that a search admits."""
        return self.steps(group, *pipeline.place)

    def admits(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> bool:
        """Returns whether a search admits a point of `choices`: asked once its bound is among the smallest."""
        return True

    @remembered_by(
        lambda space, group: (
            *(group.tp, group.cp, group.micro, group.recompute == "full"),
            group.ep * group.expert_tensor_ranks,
        )
    )
    def size(self, group: LayerGroup) -> int:
        return sum(count * len(self.steps(group, *pipeline.place)) for pipeline, count in self.count_pipelines(group))

    def count_pipelines(self, group: LayerGroup) -> Iterator[tuple[Pipeline, int]]:
        """Yields a pipeline of each number of choices in a group, and how many pipelines have as many."""
        for stages in self._stages(group):
            yield from self._count_pipelines_of(stages)

    @remembered
    def _count_pipelines_of(self, stages: Stages) -> list[tuple[Pipeline, int]]:
        pipelines = self._pipelines_of(stages)
        counts = Counter(map(self._what_counts, pipelines))
        first = {self._what_counts(pipeline): pipeline for pipeline in reversed(pipelines)}
        return [(first[key], count) for key, count in counts.items()]

    def _what_counts(self, pipeline: Pipeline) -> Hashable:
        """Returns what the number of the choices of a pipeline follows from."""
        return pipeline.place

    def count_excluded(self, group: LayerGroup) -> dict[str, int]:
        """Returns the number of points of a group that are not among `choices`, by the limit that excludes them."""
        return dict(NOTHING_EXCLUDED)

    def changes(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> Fields:
        """Returns the values of the open fields at a point.

        Without a pipeline there is one schedule, 1F1B with a single chunk: a field whose list lacks it is left out.
        """
        changes = {CLUSTER: self.job[CLUSTER]} if self.names_cluster else {}
        changes |= state_values(self.open, values_of_point(group, pipeline, step))
        if self._has_one_schedule(pipeline):
            for field in ALONE.keys() & {*self.open}:
                changes[field] = ALONE[field]
                if ALONE[field] not in self.values[FIELDS[field]]:
                    del changes[field]
        return changes

    def _has_one_schedule(self, pipeline: Pipeline) -> bool:
        """Returns whether the schedule of a pipeline is none of those that are searched."""
        return pipeline.pp == 1 and "plan.schedule" in self.open

    def job_of(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> Fields:
        """Returns the job of a point as plain data, also with other values of fields that are not open."""
        values = values_of_point(group, pipeline, step)
        fields = [field for field in self.fields if field not in self.open]
        others = [field for field in fields if values[self.fields[field]] != self.values[self.fields[field]][0]]
        changes = self.changes(group, pipeline, step) | state_values(others, values)
        job = apply_changes(self.job, changes)
        if self._has_one_schedule(pipeline):
            for field in ALONE.keys() - changes.keys():
                job["plan"].pop(field.removeprefix("plan."), None)
        if group.recompute != "full":
            job["plan"].pop(FIELD_OF["recomputed"].removeprefix("plan."), None)
        job["plan"].pop("shard", None)
        if step.shard is not None:
            job["plan"]["shard"] = step.shard
        write_scheme_keys(job["plan"], group.tensor, step.data, step.options)
        return job
