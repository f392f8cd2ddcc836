"""What a job leaves open to a search of heterogeneous plans: the kinds of nodes, and the values of every field."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from meshcast.experiments.search.space.fields import AUTO, DATA_KEYS, opens_plan, schedule_name
from meshcast.experiments.search.space.job_checks import check_batch
from meshcast.experiments.search.space.scheme_keys import DATA_OPTIONS
from meshcast.hardware.cluster import Cluster
from meshcast.hardware.documents.plain_data import Fields, SomeFields
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.plan_keys import PLAN_KEYS, ShortPlan
from meshcast.simulator.loading.load import load_job, write_choice
from meshcast.simulator.report.peak_errors import RISK, least_room

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-h2")
"""Schedules that are searched: a single part of the model on each device, orders that do not depend on durations."""

STATES = (0, 1)
"""ZeRO stages that are searched: those that communicate once a step."""

MAX_MICRO, MAX_SEQUENCES_OF_A_RANK = 32, 32
"""Largest micro-batch that is tried by default, or a sequence for each GPU if that is more; and most of its sequences
on a rank."""

CLOSED = {
    "stages": "the search finds the stages",
    "replicas": "the search finds the replicas",
    "share": "the search tries even shares and shares by speed",
    "cp": "stages have no context parallelism",
    "etp": "experts have the default degree of tensor parallelism",
    "shard": "states are sharded over all data-parallel ranks",
    **dict.fromkeys([key for key in DATA_KEYS if key != "zero"], "states are those of zero 0 and 1"),
    **dict.fromkeys(DATA_OPTIONS, "states are those of zero 0 and 1, and no weights are gathered in layers"),
    "chunks": "a device has one part of the model",
    "partition": "the search finds the layers of every stage",
    "order": "the ranks of a stage follow those of the stage before",
    "offload": "nothing is offloaded",
    "pad_heads": "heads are not padded",
    "recompute_layers": "all layers of a stage are recomputed, or none",
    "mesh": "plans are in short form",
    "schemes": "plans are in short form",
}
"""Keys of a plan that a search of heterogeneous plans does not vary, and why they may not be stated."""

IDLE = {**{key: field.default for key, field in ShortPlan.model_fields.items()}, "chunks": 1}
"""Values of keys that say what is so anyway."""


@dataclass(frozen=True, eq=False)
class NodeKind:
    """Neighbouring nodes of the same kind.

    cluster: of as many GPUs as the cluster of the job, all of this kind: passes run at its rates.
    gpus: number of GPUs of the nodes.
    domain: GPUs of a scale-up domain.
    memory: of a GPU [bytes].
    """

    name: str
    cluster: Cluster
    gpus: int
    domain: int
    memory: float


class FieldValues(NamedTuple):
    """Values of the fields of a search of heterogeneous plans.

    tp, dp, pp, ep: degrees; None: whatever divides.
    recompute: of a stage.
    micro: sequences of a micro-batch, on all data-parallel ranks of a stage together.
    """

    tp: tuple[int, ...]
    dp: tuple[int, ...] | None
    pp: tuple[int, ...] | None
    ep: tuple[int, ...]
    recompute: tuple[str, ...]
    zero: tuple[int, ...]
    schedule: tuple[str, ...]
    micro: tuple[int, ...]


class HeterogeneousFields:
    """A job without its open fields, and the values of these.

    job: as plain data; what a search finds is missing from its plan.
    loaded: the job with some plan.
    kinds: of nodes, in the order of their ranks.
    open: the fields that vary.
    memory_margin: share of the memory of every GPU that must stay free.
    memory_risk: most probability of lacking memory that a plan may have.
    Raises PlanError for a job that a search of heterogeneous plans does not take.
    """

    def __init__(self, job: SomeFields, base: Path, memory_margin: float = 0.0, memory_risk: float = RISK) -> None:
        self.base, self.memory_margin, self.memory_risk = base, memory_margin, memory_risk
        self.job: Fields = copy.deepcopy(dict(job))
        opened = self._take_plan()
        batch = dict(self.job.get("batch", {}))
        opened["micro"] = batch.pop("micro", None)
        self.job["batch"] = batch
        stated = {**self.job, "batch": {**batch, "micro": 1}}
        self.loaded = load_job(stated, base=base)
        if self.loaded.taken:  # plans of a search state everything else
            self.job["framework"] = write_choice(self.loaded)
            self.loaded = load_job({**stated, "framework": self.job["framework"]}, base=base)
        _check_heterogeneous_job(self.loaded, batch)
        self.kinds = list_kinds(self.loaded.cluster)
        self.values = self._read_values(opened)
        if memory_margin and len({kind.memory for kind in self.kinds}) > 1:
            rule = "a margin is a share of the memory of a GPU, and the kinds of nodes have different memory"
            raise PlanError("memory_margin", rule, "Leave it out", memory_margin)
        varying = {
            "plan.stages": True,
            "plan.replicas": True,
            "plan.zero": len(self.values.zero) > 1,
            "plan.schedule": len(self.values.schedule) > 1,
            "batch.micro": len(self.values.micro) > 1,
        }
        self.open = tuple(name for name, varies in varying.items() if varies)

    @property
    def capacity(self) -> float:
        """Memory of the largest GPU that a plan may take by its forecast [bytes]."""
        return max(kind.memory for kind in self.kinds) * self.usable

    @property
    def usable(self) -> float:
        """Share of the memory of every GPU that a plan may take by its forecast."""
        return (1 - self.memory_margin) / self.least_room

    @cached_property
    def least_room(self) -> float:
        """How many times its need by the forecast a GPU or a host must have as memory."""
        return least_room(self.loaded.framework, self.memory_risk)

    def stated_values(self) -> dict[str, list[Any]]:
        """Returns the values of the fields, as the certificate lists them."""
        v = self.values
        stated: dict[str, Sequence[Any]] = {
            "plan.tp": v.tp,
            "plan.dp": v.dp or [AUTO],
            "plan.pp": v.pp or [AUTO],
            "plan.ep": v.ep,
            "plan.recompute": v.recompute,
            "plan.zero": v.zero,
            "plan.schedule": v.schedule,
            "batch.micro": v.micro,
        }
        return {name: list(values) for name, values in stated.items()}

    def _take_plan(self) -> Fields:
        """Takes the open fields from the plan of the job, and returns what it gives for each of them."""
        plan = self.job.get("plan", AUTO)
        fields = ("tp", "dp", "pp", "ep", "recompute", "zero", "schedule")
        opened = dict.fromkeys(("tp", "ep", "recompute", "zero", "schedule"), AUTO) if opens_plan(self.job) else {}
        plan = {} if plan == AUTO else plan
        if not isinstance(plan, Mapping):
            raise PlanError("plan", "it is auto, or a mapping of keys to values", "Write plan: auto", plan)
        for key, reason in CLOSED.items():
            value = tuple(plan[key]) if isinstance(plan.get(key), list) else plan.get(key)
            if value is not None and value != IDLE.get(key):
                raise PlanError(f"plan.{key}", f"with --heterogeneous {reason}", "Leave it out", plan[key])
        self.job["plan"] = {key: value for key, value in plan.items() if key not in (*fields, *CLOSED, AUTO)}
        return {name: plan.get(name, opened.get(name)) for name in fields}

    def _read_values(self, opened: SomeFields) -> FieldValues:
        model, gpus = self.loaded.model, self.loaded.cluster.gpus
        total = self.loaded.batch.total
        assert total is not None
        domain = max(kind.domain for kind in self.kinds)
        experts = math.gcd(*model.moe.expert_counts) if model.moe else 1
        most = max(MAX_MICRO, gpus)
        tensor = [n for n in range(1, domain + 1) if domain % n == 0 and model.heads % n == 0]
        schedules = [*map(schedule_name, _list_values("plan.schedule", opened["schedule"], SCHEDULES, ("1f1b",)))]
        rule = f"with --heterogeneous a schedule is one of {', '.join(SCHEDULES)}"
        _check_admitted("plan.schedule", schedules, SCHEDULES, rule, "Write one of them, or leave it out")
        zero = _numbers("plan.zero", opened["zero"], STATES, (1,), least=0)
        rule = "with --heterogeneous states are not sharded, or as in ZeRO-1: zero is 0 or 1"
        _check_admitted("plan.zero", zero, STATES, rule, "Write one of them, or leave it out")
        words = PLAN_KEYS["recompute"].auto
        recompute = _list_values("plan.recompute", opened["recompute"], words, ("none",))
        _check_admitted("plan.recompute", recompute, words, f"it is one of {', '.join(words)}", "Write one of them")
        ranks = [n for n in range(1, gpus + 1) if experts % n == 0]
        micro = [n for n in range(1, min(most, total) + 1) if total % n == 0]
        tensor = _numbers("plan.tp", opened["tp"], tensor, tensor)
        return FieldValues(
            tuple(tp for tp in tensor if model.heads % tp == 0 and any(k.domain % tp == 0 for k in self.kinds)),
            _numbers("plan.dp", opened["dp"], None, None),
            _numbers("plan.pp", opened["pp"], None, None),
            _numbers("plan.ep", opened["ep"], ranks, (1,)) or (1,),
            tuple(recompute),
            zero or (),
            tuple(schedules),
            tuple(size for size in _numbers("batch.micro", opened["micro"], micro, micro) or () if total % size == 0),
        )


def list_kinds(cluster: Cluster) -> list[NodeKind]:
    """Returns the kinds of nodes of a cluster, neighbouring equal nodes together, in the order of ranks."""
    if not cluster.groups:
        return [_kind(cluster.node.name, cluster, cluster.gpus)]
    kinds: list[NodeKind] = []
    for group in cluster.groups:
        name, gpus = group.node.name, group.nodes * int(group.node.gpus)
        if kinds and kinds[-1].name == name:
            gpus += kinds.pop().gpus
        kinds.append(_kind(name, cluster.kinds[name], gpus))
    return kinds


def _kind(name: str, cluster: Cluster, gpus: int) -> NodeKind:
    return NodeKind(name, cluster, gpus, cluster.scale_up_domain, cluster.gpu.program_memory)


def _check_admitted(field: str, values: Sequence[Any], admitted: Sequence[Any], rule: str, remedy: str) -> None:
    if wrong := [value for value in values if value not in admitted]:
        raise PlanError(field, rule, remedy, wrong[0])


def _list_values(field: str, stated: Any, every: Sequence[Any], usual: Sequence[Any]) -> list[Any]:
    if stated is None:
        return [*usual]
    if stated == AUTO:
        return [*every]
    values = stated if isinstance(stated, list) else [stated]
    if not values:
        raise PlanError(field, "there are no values", "Give one at least, or write auto", stated)
    if wrong := [value for value in values if not isinstance(value, str | int)]:
        raise PlanError(field, "its values are words and whole numbers", "Correct them, or write auto", wrong[0])
    return [*dict.fromkeys(values)]


def _numbers(field: str, stated: Any, every: Any, usual: Any, least: int = 1) -> Any:
    """Returns the values of a field that are whole numbers; None if any number may be tried."""
    if stated is None or stated == AUTO:
        numbers = usual if stated is None else every
        return None if numbers is None else tuple(numbers)
    values = _list_values(field, stated, (), ())
    if wrong := [value for value in values if not isinstance(value, int) or isinstance(value, bool) or value < least]:
        rule = f"its values are whole numbers, {least} or more"
        raise PlanError(field, rule, "Correct them, or write auto", wrong[0])
    return tuple(values)


def _check_heterogeneous_job(job: Job, batch: SomeFields) -> None:
    check_batch(batch)
    reasons = {
        "model": ("a model is one chain of layers", bool(job.model.branches)),
        "train.mode": ("all parameters are trained", job.train.mode != "full"),
        "batch": ("micro-batches are alike", bool(job.batch.lengths)),
        "noise": ("steps have no noise", job.noise is not None),
    }
    for where, (rule, broken) in reasons.items():
        if broken:
            raise PlanError(where, f"in a search of heterogeneous plans {rule}", "Use `meshcast sweep` for others")
