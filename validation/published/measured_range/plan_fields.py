"""The fields of a plan by which it is compared with the plans of published runs."""

from __future__ import annotations

from dataclasses import replace

from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.regimes import StepClass, step_class
from meshcast.simulator.job.job import Job
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.published.fit.refit import FAMILIES

NAMED = ("tensor", "tensor_overlap", "schedule", "context", "experts", "sharding")
"""Fields that are names of schemes; empty where the plan has none."""

NUMBERS = ("tp", "chunks", "cp", "ep", "microbatch_tokens", "gpus")
"""Fields that are numbers."""

TITLES = {
    "tensor": "tensor parallelism",
    "tensor_overlap": "overlap of tensor-parallel communication",
    "schedule": "pipeline schedule",
    "context": "context parallelism",
    "experts": "token dispatch",
    "sharding": "sharding of states",
    "tp": "tensor-parallel ranks",
    "chunks": "chunks a device",
    "cp": "context-parallel ranks",
    "ep": "expert-parallel ranks",
    "microbatch_tokens": "tokens of a micro-batch on a GPU",
    "gpus": "GPUs",
    "program": "training program",
}
"""Fields in words."""


SAME = {"tensor/megatron-sp": "tensor/megatron"}
"""Schemes that count as others: sequence parallelism splits each all-reduce into two collectives of together as
many bytes, and published runs with and without it differ by half a percent (`SIGMA` of `stacks`)."""


@dataclass(frozen=True)
class TrainingTask:
    """What is trained, by which kind of program, on which architecture of GPUs.

    architecture: of the GPUs, as in the catalog (``hopper``).
    program: family of training programs (`FAMILIES`).
    kind: class of the model.
    """

    architecture: str
    program: str
    kind: StepClass


@dataclass(frozen=True)
class PlanFields:
    """The fields of a plan, or of the ranks of a stage where stages have degrees of their own.

    tensor: scheme of tensor parallelism.
    tensor_overlap: scheme that overlaps its communication with GEMMs.
    schedule: of the pipeline; empty without a pipeline.
    context: scheme of context or sequence parallelism along a sequence.
    experts: scheme of token dispatch.
    sharding: data-parallel schemes.
    tp, cp, ep: ranks of these axes; ep with those of tensor parallelism within experts.
    chunks: virtual stages of a device.
    microbatch_tokens: tokens of a micro-batch on a GPU: sequences x length / cp.
    gpus: of the job.
    """

    tensor: str
    tensor_overlap: str
    schedule: str
    context: str
    experts: str
    sharding: str
    tp: int
    chunks: int
    cp: int
    ep: int
    microbatch_tokens: int
    gpus: int


def task_of_job(job: Job, stack: str = "") -> TrainingTask:
    """Returns the task of a job. stack: the training program, where it is not that of the framework profile."""
    kind = step_class(job.model.moe is not None, job.adapters is not None)
    program = stack or job.framework.name
    return TrainingTask(job.cluster.gpu.architecture, FAMILIES.get(program, program), kind)


def fields_of_plan(plan: Plan) -> list[PlanFields]:
    """Returns the fields of the ranks of every pipeline device, equal ones once."""
    if not (plan.stage_plans or plan.pipelines):
        return [_read_fields(plan, plan)]
    read: dict[PlanFields, None] = {}
    for device in range(plan.ranks.devices):
        pipeline = plan.every_pipeline[plan.ranks.pipeline_of(device)[0]]
        fields = _read_fields(plan.on(device), pipeline)
        read[replace(fields, gpus=plan.job.cluster.gpus)] = None
    return list(read)


def _read_fields(plan: Plan, pipeline: Plan) -> PlanFields:
    def names(family: str) -> str:
        schemes = [scheme for scheme in plan.family(family) if plan.mesh.size(scheme.axes) > 1]
        return " + ".join(sorted({SAME.get(scheme.use, scheme.use) for scheme in schemes}))

    def ranks(family: str) -> int:
        return max((plan.mesh.size(scheme.axes) for scheme in plan.family(family)), default=1)

    job, cp, tp = plan.job, ranks("sequence"), ranks("tensor")
    # Schemes without axes act on the ranks of another scheme.
    overlaps = [scheme.use for scheme in plan.family("tensor") if not scheme.axes]
    return PlanFields(
        tensor=names("tensor"),
        tensor_overlap=" + ".join(sorted(overlaps)) if tp > 1 else "",
        schedule=pipeline.schedule.use if pipeline.shape.p > 1 else "",
        context=names("sequence"),
        experts=names("expert"),
        sharding=names("data"),
        tp=tp,
        chunks=pipeline.shape.v,
        cp=cp,
        ep=ranks("expert"),
        microbatch_tokens=max(1, job.batch.micro * (job.batch.sequence or 1) // cp),
        gpus=job.cluster.gpus,
    )
