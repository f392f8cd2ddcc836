"""The space of a search: the open fields of a job, their values, and the distinct executions that they span.

A field is open if the job says ``auto`` or lists values. Fields that change the ops of a layer make a `LayerGroup`,
fields of the pipeline (`Pipeline`) and fields that act between the passes (`StepChoice`) the points of a group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from experiments.search.fields import (
    AUTO,
    CLUSTER,
    FIELDS,
    MESH_ORDERS,
    PARTITIONS,
    check_partition,
    check_values,
    data_name,
    schedule_name,
    split_open_fields,
    state_values,
    values_of,
)
from experiments.sweeps.grid import apply_changes
from hardware.errors import PlanError
from simulator.ir.registry import find_scheme
from simulator.job.job import Job
from simulator.job.load import load_job

SCHEDULES = ("1f1b", "interleaved-1f1b", "breadth-first", "gpipe", "zb-h1", "zb-h2", "zb-v", "hanayo")
"""Schedules that are tried by default: those with a flush whose orders do not depend on durations."""

PAIRING = ("dualpipe", "dualpipe-v")
"""Schedules that are also tried for models with experts: token exchanges of one pass run beside kernels of another."""

ANY_CHUNKS = ("interleaved-1f1b", "breadth-first", "hanayo")
"""Schedules with two or more chunks a device."""

TWO_CHUNKS = ("zb-v", "dualpipe-v", "v-half", "v-min", "v-zb")

UNLIKE_ENDS = "unlike-ends"
"""Lists in which the first and the last stage have fewer layers than the others, where nothing divides the layers."""

WORDS = ("schedule", "recompute", "data", "offload", "mesh_order")
"""Fields of a point whose values are words, or numbers with a meaning each."""

OVERLAPS = ("overlap_tp", "overlap_dp", "updated_weights", "overlap_pp")
"""Fields of a point that say what overlaps, which a framework may rule out."""

DATA = ("ddp", "zero-1", "zero-2", "zero-3", "fsdp")
"""Ways to shard states over data-parallel ranks."""

NODE = "node"
"""As many ranks share one copy of the states as a scale-up domain has of a stage."""

MOST_TENSOR_RANKS, MOST_EXPERT_RANKS, MOST_MICRO, TOKENS_OF_A_RANK = 32, 8, 32, 2048
"""Largest tensor-parallel degrees, of all layers and of experts, and largest micro-batch that are tried by default, and
least tokens of a sequence on a rank with context parallelism."""


class LayerGroup(NamedTuple):
    """Values of the fields that change the ops of a layer."""

    tp: int
    cp: int
    ep: int
    micro: int
    recompute: str
    sequence_parallel: bool
    overlap_tp: bool
    offload: tuple[str, ...]
    etp: int | None = None
    """Expert tensor parallel; None: the default of a plan."""

    @property
    def expert_tensor_ranks(self) -> int:
        """Ranks that share the matrices of an expert."""
        return self.etp or (1 if self.ep > 1 else self.tp)


class Place(NamedTuple):
    """Number of stages of a pipeline, and axes of the mesh, outermost first."""

    pp: int
    mesh_order: str = MESH_ORDERS[0]


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
    """Data-parallel ranks that share one copy of the states; None: all."""


class Space:
    """The points of a search.

    job: the job as plain data, without its open fields.
    base: folder of relative paths in the job. names_cluster: whether the cluster is one of several that are searched.
    values: values of every field in `FIELDS`, by its name in a point.
    open: fields of the job that vary.
    """

    def __init__(self, job: Mapping[str, Any], base: Path, names_cluster: bool = False) -> None:
        self.base, self.names_cluster = base, names_cluster
        self.job, given = split_open_fields(job)
        _check_plan(self.job["plan"])
        self.loaded = load_job(self.job, base=base)
        if not given and not names_cluster:
            rule = "no field of the job is open: none is `auto` or a list of values"
            raise PlanError("plan", rule, "Write `plan: auto`, or for example tp: auto or tp: [1, 2, 4]")
        _check_job(self.loaded, self.job)
        if job.get("plan", AUTO) == AUTO:
            for field in _without_choice(self.loaded):
                del given[field]
        self.open = tuple(given)
        self._automatic_fields = {FIELDS[field] for field, value in given.items() if value == AUTO}
        self.values = self._every_value(given)
        _check_schedules(self.values["schedule"])
        self._pipelines: dict[tuple[int, int, bool], list[Pipeline]] = {}
        self._counts_by_place: dict[tuple[int, int, bool], Counter[Place]] = {}
        self._steps: dict[tuple[bool, bool, tuple[int, int]], tuple[StepChoice, ...]] = {}
        data = {name: find_scheme(f"data/{name}").Options.model_fields for name in self.values["data"]}
        self.with_copies = {name for name, options in data.items() if "replicate" in options}
        """Data schemes that may keep copies of what they shard."""

    # ------------------------------------------------------------------------------------------- values

    def _every_value(self, given: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        fixed = values_of(self.loaded, self.job)
        found: dict[str, tuple[Any, ...]] = {}
        for field, name in FIELDS.items():
            value = given.get(field, fixed[name])
            if field not in given:
                found[name] = (value,)
            elif value == AUTO:
                found[name] = self._automatic(name, found)
                if name in OVERLAPS:
                    found[name] = tuple(one for one in found[name] if self._is_valid(field, one))
            else:
                check_values(field, name, value, fixed[name])
                if name in WORDS or name in OVERLAPS:  # a job says which are valid
                    for one in value:
                        load_job(apply_changes(self.job, {field: one}), base=self.base)
                ways: dict[str, Callable[[Any], Any]] = {
                    "data": data_name,
                    "offload": tuple,
                    "schedule": schedule_name,
                }
                one_of = ways.get(name, lambda one: one)
                found[name] = tuple(dict.fromkeys(one_of(one) for one in value))
        stated = self.job["plan"].get("schedule") is not None
        if "plan.chunks" in given and "plan.schedule" not in given and not stated:
            found["schedule"] = ("1f1b", "interleaved-1f1b")  # what a plan gets with one chunk, and with more
        return found

    def _is_valid(self, field: str, value: Any) -> bool:
        """Whether a job with this value of a field is a job."""
        try:
            return bool(load_job(apply_changes(self.job, {field: value}), base=self.base))
        except PlanError:
            return False

    @property
    def any_step(self) -> StepChoice:
        """A choice between the passes of which nothing in a layer depends: what may overlap does."""
        return StepChoice("ddp", *(any(self.values[name]) for name in OVERLAPS[1:]))

    def _automatic(self, name: str, found: Mapping[str, Sequence[Any]]) -> tuple[Any, ...]:
        """The values that are tried of a field that is ``auto``. found: those of the fields before it."""
        job, gpus = self.loaded, self.loaded.cluster.gpus
        model, batch = job.model, job.batch
        assert batch.total is not None and batch.sequence is not None
        most = max(MOST_TENSOR_RANKS, job.cluster.scale_up_domain)
        experts = math.gcd(*model.moe.expert_counts) if model.moe else 1
        ranges: dict[str, Sequence[Any]] = {
            "tp": [n for n in _divisors(math.gcd(gpus, model.heads)) if n <= most],
            "cp": [n for n in _divisors(gpus) if batch.sequence % n == 0 and n * TOKENS_OF_A_RANK <= batch.sequence],
            "ep": _divisors(math.gcd(gpus, experts)),
            "etp": (None, *(_divisors_of_any(found.get("tp", ()), MOST_EXPERT_RANKS) if model.moe else ())),
            "micro": [n for n in _divisors(batch.total) if n <= MOST_MICRO],
            "recompute": ("none", "selective", "full"),
            "recomputed": (None, *range(1, model.layers)),
            "sequence_parallel": (True, False),
            "overlap_tp": (False, True),
            "offload": ((), ("optimizer",)),
            "pp": [n for n in _divisors(gpus) if n <= model.layers + 2],
            "schedule": (*SCHEDULES, *(PAIRING if model.moe else ())),
            "chunks": range(1, model.layers + 1),
            "partition": (*PARTITIONS, UNLIKE_ENDS),
            "mesh_order": MESH_ORDERS,
            "data": DATA,
            "shard": (None, NODE),
            "overlap_dp": (True, False),
            "updated_weights": (True, False),
            "overlap_pp": (True, False),
        }
        return tuple(ranges[name])

    def stated_values(self) -> dict[str, list[Any]]:
        """The values of the open fields, as a job states them."""
        found = {CLUSTER: [self.job[CLUSTER]]} if self.names_cluster else {}
        return found | {
            name: [list(one) if isinstance(one, tuple) else one for one in self.values[FIELDS[name]]]
            for name in self.open
        }

    def explain_empty(self) -> PlanError:
        """The error for a space without points: no values of its fields divide the GPUs, the batch and the layers."""
        job = self.loaded
        rule = (
            f"no values of the open fields make a plan: tp x cp x pp must divide the {job.cluster.gpus:,} GPUs, "
            f"batch.micro x dp the global batch of {job.batch.total:,}, pp x chunks the {job.model.layers:,} layers "
            "(two more with the partition ends-as-layers), plan.shard the data-parallel ranks"
        )
        remedy = "Give values that divide them, or write auto"
        if len(self.open) != 1:
            return PlanError("plan", rule, remedy)
        return PlanError(self.open[0], rule, remedy, [*self.values[FIELDS[self.open[0]]]])

    # ------------------------------------------------------------------------------------------- points

    def groups(self) -> list[LayerGroup]:
        """The groups; without tensor parallelism there is no sequence parallelism and nothing to overlap."""
        v = self.values
        found = []
        fields = [name for name in LayerGroup._fields if name != "etp"]
        for tp, cp, ep, micro, recompute, sp, overlap, offload in product(*(v[name] for name in fields)):
            if self.loaded.cluster.gpus % (tp * cp):
                continue
            if tp == 1 and (sp != v["sequence_parallel"][0] or overlap != v["overlap_tp"][0]):
                continue
            plain = LayerGroup(tp, cp, ep, micro, recompute, sp, overlap, offload)
            found += [plain._replace(etp=etp) for etp in self._expert_degrees(tp, ep)]
        return found

    def _expert_degrees(self, tp: int, ep: int) -> list[int | None]:
        """The expert-tensor-parallel degrees at other degrees; 1 is the default with expert parallelism."""
        values = list(self.values["etp"])
        if "etp" in self._automatic_fields:
            # Without expert parallelism experts are sharded as everything else is, or whole on every rank.
            gpus = self.loaded.cluster.gpus
            fits = [one for one in values if one and (one == 1 if ep == 1 else not (tp % one or gpus % (ep * one)))]
            values = [None, *fits]
        return [*dict.fromkeys(None if one == 1 and (ep > 1 or tp == 1) else one for one in values)]

    def pipelines(self, group: LayerGroup) -> list[Pipeline]:
        """The pipelines of a group whose degrees divide the GPUs and whose micro-batches divide the batch."""
        key = group.tp * group.cp, group.micro, group.recompute == "full"
        if key not in self._pipelines:
            self._pipelines[key] = self._make_pipelines(*key)
        return self._pipelines[key]

    def _make_pipelines(self, ranks: int, micro: int, recomputes: bool) -> list[Pipeline]:
        v, gpus, layers, found = self.values, self.loaded.cluster.gpus, self.loaded.model.layers, []
        total = self.loaded.batch.total
        assert total is not None
        for pp in v["pp"]:
            if gpus % (ranks * pp) or total % (micro * (gpus // (ranks * pp))):
                continue
            orders = v["mesh_order"] if 1 < pp < gpus // ranks else v["mesh_order"][:1]
            if pp == 1:
                one = Pipeline(1, v["schedule"][0], v["chunks"][0], v["partition"][0], None, *orders)
                found += self._recompute(one, layers) if recomputes else [one]
                continue
            for schedule, partition in product(v["schedule"], v["partition"]):
                for chunks in v["chunks"]:
                    wrong = (
                        (chunks != 2 and schedule in TWO_CHUNKS)
                        or (chunks < 2 and schedule in ANY_CHUNKS)
                        or (chunks > 1 and schedule not in (*ANY_CHUNKS, *TWO_CHUNKS))
                    )
                    for divided in () if wrong else divide_layers(partition, layers, pp * chunks):
                        most = -(-(layers + 2 * (divided == "ends-as-layers")) // (pp * chunks))
                        for order in orders:
                            one = Pipeline(pp, schedule, chunks, divided, None, order)
                            found += self._recompute(one, most) if recomputes else [one]
        return found

    def _recompute(self, pipeline: Pipeline, layers: int) -> list[Pipeline]:
        """A pipeline with the numbers of layers that its stages of `layers` layers at most may recompute."""
        values = self.values["recomputed"]
        counts = dict.fromkeys(one if one is not None and one < layers else None for one in values)
        return [pipeline._replace(recomputed=one) for one in counts]

    def steps(self, group: LayerGroup, pp: int, mesh_order: str = MESH_ORDERS[0]) -> tuple[StepChoice, ...]:
        """The choices between the passes that differ at the degrees of a plan."""
        ranks = self.loaded.cluster.gpus // pp
        shards_experts = self.loaded.model.moe is not None and ranks > group.ep * group.expert_tensor_ranks
        shards = self.data_ranks(group, Place(pp, mesh_order)) if self.values["shard"] != (None,) else (1, 1)
        key = ranks > group.tp or shards_experts, pp > 1, shards
        if key not in self._steps:
            v = self.values
            found = dict.fromkeys(
                StepChoice(
                    data,
                    overlap,
                    updated if overlap and data in ("zero-1", "zero-2") else v["updated_weights"][0],
                    sends,
                    shard,
                )
                for data in (v["data"] if key[0] else v["data"][:1])
                for shard in self._shards(data, *shards)
                for overlap in (v["overlap_dp"] if key[0] else v["overlap_dp"][:1])
                for updated in v["updated_weights"]
                for sends in (v["overlap_pp"] if key[1] else v["overlap_pp"][:1])
            )
            self._steps[key] = tuple(found)
        return self._steps[key]

    def _shards(self, data: str, dp: int, inside: int) -> list[int | None]:
        """Numbers of ranks that may share one copy of the states. inside: ranks between neighbours along dp."""
        found = [self.shard_ranks(value, dp, inside) for value in self.values["shard"]]
        valid = [one for one in found if one == dp or (one and data in self.with_copies)]
        return [*dict.fromkeys(None if one == dp else one for one in valid)]

    def data_ranks(self, group: LayerGroup, place: Place) -> tuple[int, int]:
        """The data-parallel ranks, and the distance between neighbours of them."""
        inside = group.tp * group.cp
        dp = self.loaded.cluster.gpus // (inside * place.pp)
        return dp, inside if place.mesh_order == MESH_ORDERS[0] else inside * place.pp

    def shard_ranks(self, value: int | str | None, dp: int, inside: int) -> int:
        """The ranks that share one copy of the states, as a value of the field says; 0: it makes no plan of its own."""
        if value == NODE:
            value = self.loaded.cluster.scale_up_domain // inside
            if not 1 < value < dp:
                return 0
        ranks = dp if value is None else int(value)
        return ranks if ranks and dp % ranks == 0 else 0

    memory_margin = 0.0
    """Share of the memory of a GPU that must stay free."""

    @property
    def capacity(self) -> float:
        """Memory of a GPU that a plan may take [bytes]."""
        return self.loaded.cluster.gpu.memory * (1 - self.memory_margin)

    @property
    def limits_points(self) -> bool:
        """Whether limits of the search exclude points."""
        return False

    def choices(self, group: LayerGroup, pipeline: Pipeline) -> tuple[StepChoice, ...]:
        """The choices between the passes of a pipeline that a search admits."""
        return self.steps(group, *pipeline.place)

    def admits(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> bool:
        """Whether a search admits a point of `choices`: asked once its bound is among the smallest."""
        return True

    def size(self, group: LayerGroup) -> int:
        """Number of points of a group."""
        key = group.tp * group.cp, group.micro, group.recompute == "full"
        if key not in self._counts_by_place:
            self._counts_by_place[key] = Counter(one.place for one in self.pipelines(group))
        return sum(count * len(self.steps(group, *place)) for place, count in self._counts_by_place[key].items())

    def count_excluded(self, group: LayerGroup) -> dict[str, int]:
        """Number of points of a group that are not among `choices`, by the limit that excludes them."""
        return {"where": 0, "near_measured": 0}

    def changes(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> dict[str, Any]:
        """The values of the open fields at a point."""
        found = {CLUSTER: self.job[CLUSTER]} if self.names_cluster else {}
        found |= state_values(self.open, {**group._asdict(), **pipeline._asdict(), **step._asdict()})
        if "plan.schedule" in self.open and pipeline.pp == 1:
            found["plan.schedule"], found["plan.chunks"] = "1f1b", 1
        return found

    def job_of(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> dict[str, Any]:
        """The job of a point as plain data, also of one that has other values of fields that are not open."""
        values = {**group._asdict(), **pipeline._asdict(), **step._asdict()}
        others = [
            field for field, name in FIELDS.items() if field not in self.open and values[name] != self.values[name][0]
        ]
        changes = self.changes(group, pipeline, step) | state_values(others, values)
        job = apply_changes(self.job, changes)
        if group.recompute != "full":
            job["plan"].pop("recompute_layers", None)
        job["plan"].pop("shard", None)
        if step.shard is not None:
            job["plan"]["shard"] = step.shard
        return job


def divide_layers(partition: str, layers: int, parts: int) -> list[str | tuple[int, ...]]:
    """What a partition comes to with so many parts of the model; empty: it does not exist."""
    if partition != UNLIKE_ENDS:
        return [] if (layers if partition == "even" else layers + 2) % parts else [partition]
    most = -(-layers // parts)
    left = layers - (parts - 2) * most
    if not layers % parts or not (layers + 2) % parts or parts < 2 or left < 0:
        return []
    ends = range(max(0, left - most), min(most, left) + 1)
    return [(first, *[most] * (parts - 2), left - first) for first in ends]


CLOSED = ("dp", "stages", "replicas", "share", "mesh", "schemes")
"""Keys of a plan that the bounds do not know: degrees follow from those that a search may vary."""


def _check_plan(plan: Any) -> None:
    """Refuses plans for which there are no bounds."""
    if not isinstance(plan, Mapping):  # `load_job` explains it
        return
    for key in CLOSED:
        if plan.get(key) is not None:
            long = key in ("mesh", "schemes")
            rule = (
                f"a search takes a plan in short form, {'of degrees such as tp and pp' if long else f'without {key}'}"
            )
            raise PlanError(f"plan.{key}", rule, "Leave it out, or use `meshcast sweep`", plan[key])
    if isinstance(schedule := plan.get("schedule"), Mapping):
        rule = "a search takes a schedule by its name, without options"
        raise PlanError("plan.schedule", rule, "Write its name alone, or use `meshcast sweep`", schedule)
    if (partition := plan.get("partition")) is not None:
        check_partition(partition)


def _check_schedules(names: Sequence[str]) -> None:
    """Refuses schedules that do not exist without an option."""
    for name in names:
        options = find_scheme(f"pipeline/{name}").Options.model_fields
        if needed := [key for key, field in options.items() if field.is_required()]:
            rule = (
                f"it needs the option {', '.join(needed)}, and a search takes a schedule by its name, without options"
            )
            raise PlanError("plan.schedule", rule, "Leave it out, or use `meshcast sweep`", name)


def _check_job(job: Job, written: Mapping[str, Any]) -> None:
    """Refuses jobs for which there are no bounds."""
    batch, sizes = job.batch, written.get("batch", {})
    if sizes.get("global") is None:
        rule = "a search compares plans of one global batch, and the job does not state it"
        raise PlanError("batch.global", rule, "Write for example batch: {global: 1024}")
    for key in ("microbatches", "samples"):
        if sizes.get(key) is not None:
            rule = "a search takes the size of a micro-batch, batch.micro"
            raise PlanError(f"batch.{key}", rule, "Write batch.micro in its place, or use `meshcast sweep`", sizes[key])
    reasons = {
        "cluster": ("without --unlike all nodes are of one kind", bool(job.cluster.groups)),
        "model": ("a model is one chain of layers", bool(job.model.branches)),
        "train.mode": ("a step has backward passes", job.forward_only),
        "batch": ("micro-batches are alike", bool(batch.lengths)),
    }
    for where, (rule, broken) in reasons.items():
        if broken:
            raise PlanError(where, f"in a search {rule}", "Use `meshcast sweep` for others")


def _without_choice(job: Job) -> list[str]:
    """The fields of a plan that have one value at most, and that ``plan: auto`` leaves alone."""
    found = [] if job.model.moe else ["plan.etp"]
    found += ["plan.shard"] if job.cluster.gpus <= job.cluster.scale_up_domain else []
    return found + (["plan.order"] if job.cluster.gpus <= job.cluster.gpus_per_node else [])


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _divisors_of_any(numbers: Sequence[int], most: int) -> list[int]:
    """Divisors of any of some numbers, up to `most`."""
    return [n for n in range(1, most + 1) if any(number % n == 0 for number in numbers)]
