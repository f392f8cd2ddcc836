"""The controls: fields of a job that a person changes, each with its values, and what a change takes along."""

from __future__ import annotations

from collections.abc import Iterator

from meshcast.experiments.advice.neighbours import (
    CHUNKS_FIELD,
    EXPERT_RANKS,
    MICRO,
    PARTITION,
    RECOMPUTED,
    SCHEDULE,
    STATES,
    name_field,
)
from meshcast.experiments.explain.changeable_job import Change
from meshcast.experiments.search.space.fields import RECOMPUTE
from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.ir.registry import scheme_names
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.plan_keys import PIPELINE_NUMBERS, PLAN_KEYS

NODE, NODES = "node", "nodes"
"""The controls of the cluster; they are no fields of a job."""

SEQUENCE = "batch.sequence"

MAX_CHUNKS, MAX_NODES, MAX_SEQUENCE, MAX_MICRO = 16, 2048, 2**20, 64
"""Largest values that controls offer."""

LABELS = {
    NODE: "kind of node (GPU)",
    NODES: "nodes",
    SEQUENCE: "sequence length",
    MICRO: "micro-batch",
    name_field(RECOMPUTED): "recomputation",
    name_field(STATES): "ZeRO",
}
"""Names of controls that are not called as the key of the plan."""

DEGREES = tuple(
    name_field(key)
    for key in PLAN_KEYS.values()
    if key.owner == "mesh" and key.name != EXPERT_RANKS.name and key.point != "mesh_order"
)
"""Degrees of a plan."""

REPLICAS, EXPERTS = DEGREES[1], DEGREES[3]
STAGES = f"plan.{PIPELINE_NUMBERS[0]}"


@dataclass(frozen=True)
class Control:
    """A control.

    field: of the job that it changes, or `NODE` or `NODES`.
    values: that it offers, as a job states them; None: as if the field were not stated.
    """

    field: str
    values: tuple[object, ...]

    @property
    def label(self) -> str:
        return LABELS.get(self.field, self.field.rpartition(".")[2])


def list_controls(job: Job, nodes: tuple[str, ...]) -> Iterator[Control]:
    """Yields the controls of a job, whose values the rules of a job are to judge. nodes: kinds of nodes, if the cluster
    can be changed."""
    if nodes:
        yield Control(NODE, nodes)
        yield Control(NODES, tuple(_double(1, MAX_NODES)))
    divisors = tuple(list_divisors(job.cluster.gpus))
    for field in DEGREES:
        if field != EXPERTS or job.model.moe is not None:
            yield Control(field, (None, *divisors) if field == REPLICAS else divisors)
    pipelines = (name.partition("/")[2] for name in scheme_names() if name.startswith("pipeline/"))
    yield Control(SCHEDULE, (None, *pipelines))
    yield Control(CHUNKS_FIELD, (None, *range(1, MAX_CHUNKS + 1)))
    yield Control(MICRO, tuple(_double(1, MAX_MICRO)))
    yield Control(SEQUENCE, tuple(_double(1024, MAX_SEQUENCE)))
    yield Control(name_field(STATES), tuple(STATES.chooses))
    yield Control(name_field(RECOMPUTED), RECOMPUTE)


def list_companions(field: str) -> list[Change]:
    """Returns what a change of a field may take along, the least first: a pipeline its schedule and chunks."""
    if field == SCHEDULE:
        return [{}, {CHUNKS_FIELD: None}, *({CHUNKS_FIELD: count} for count in range(2, MAX_CHUNKS + 1))]
    if field == STAGES:
        return [
            {},
            *({CHUNKS_FIELD: count} for count in range(2, MAX_CHUNKS + 1)),
            {SCHEDULE: None, CHUNKS_FIELD: None},
            {SCHEDULE: None, CHUNKS_FIELD: None, PARTITION: "even"},
        ]
    return [{}]


def _double(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2
