"""Measures the closed forms of data schemes on a small model with data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import field
from functools import cache
from itertools import groupby

from meshcast.hardware.documents.plain_data import Fields
from meshcast.hardware.records import dataclass
from meshcast.simulator.engine.longest_path import longest_path
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.resident_memory import resident_bytes
from meshcast.simulator.forecast.stages import device_params, lower_stages
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import COMPUTE, Collective, Fragment, Memory, Op, Param, StageOps, Work
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.job.framework import SchemeTraits, load_framework
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.build import build
from meshcast.simulator.program.flatten import flatten
from meshcast.simulator.program.messages import StageMessages
from meshcast.simulator.program.program import one_of
from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting
from meshcast.validation.contract.measure import (
    backward_ops,
    forward_ops,
    params_of,
    remembered,
    sent_bytes,
    side_ops_of,
)

MODEL = Model(layers=2, hidden=64, heads=4, vocab=256, seq=32, tied=False)
"""A small GPT with an output layer of its own."""


@cache
def unit_elements() -> tuple[int, ...]:
    """Parameters of the embedding, of every layer, and of the final norm with the output layer."""
    first = (MODEL.vocab + MODEL.seq) * MODEL.hidden
    last = MODEL.norm_parameters + MODEL.hidden * MODEL.vocab
    return (first, *[(MODEL.parameters - first - last) // MODEL.layers] * MODEL.layers, last)


@cache
def all_params() -> tuple[Param, ...]:
    stage = Architecture(MODEL, 1, MODEL.seq, MODEL.vocab).stage(range(MODEL.layers), True, True)
    return tuple(params_of(Lowering(Mesh({}), []).run(stage)))


def module_elements() -> tuple[int, ...]:
    """Parameters of every operator, in the order of the layers."""
    return tuple(sum(param.size for param in same) for _, same in groupby(all_params(), lambda param: param.used))


def parameter_elements() -> tuple[int, ...]:
    return tuple(param.size for param in all_params())


def matrices() -> tuple[tuple[int, ...], ...]:
    return tuple(param.shape for param in all_params() if param.shape)


@dataclass(frozen=True)
class DataRanks(DataSetting):
    """The small GPT on the data-parallel ranks of a setting.

    overlap: whether the framework overlaps data-parallel communication.
    """

    unit_elements: tuple[int, ...] = field(default_factory=unit_elements)
    module_elements: tuple[int, ...] = field(default_factory=module_elements)
    parameter_elements: tuple[int, ...] = field(default_factory=parameter_elements)
    matrices: tuple[tuple[int, ...], ...] = field(default_factory=matrices)
    overlap: bool = True

    def lower_stages(self, use: str) -> tuple[StageOps, Plan, list[Fragment]]:
        """The lowered stage, the plan and the updates under a scheme."""
        return _lower_stages(self, use)

    def job(self, use: str) -> Fields:
        kind = find_scheme(use)
        two = self.across > 1 or kind.least_axes > 1
        mesh = {"across": self.across, "dp": self.n // self.across} if two else {"dp": self.n}
        entry: Fields = {"use": use, "over": list(mesh), **dict(self.options)}
        if "replicate" in kind.names_axes:
            mesh = {"replicas": self.replicas, **mesh}
            entry["replicate"] = "replicas"
        gpus = math.prod(mesh.values())
        return {
            "model": MODEL,
            "cluster": {"gpu": "h100-sxm", "gpus": gpus},
            "framework": {"set": {"overlap": {"dp": self.overlap}}},
            "batch": {"global": gpus * self.batches},
            "plan": {"mesh": mesh, "schemes": [entry]},
        }


@remembered
def _lower_stages(setting: DataRanks, use: str) -> tuple[StageOps, Plan, list[Fragment]]:
    plan = resolve_plan(load_job(setting.job(use)))
    (stage_ops,), updates = lower_stages(plan)
    return one_of(stage_ops), plan, updates


def step_collectives(setting: DataRanks, use: str) -> tuple[list[Op], Plan]:
    """The collectives of a data scheme in a step: of every micro-batch, and once per step."""
    stage_ops, plan, (update,) = setting.lower_stages(use)
    ops = (forward_ops(stage_ops) + backward_ops(stage_ops)) * plan.shape.m
    ops += side_ops_of((*stage_ops.ahead, *stage_ops.behind)) + update.forward
    return [op for op in ops if isinstance(op.work, Collective) and op.stream.partition("-")[0] == "data"], plan


def sent_per_step(setting: DataRanks, use: str) -> float:
    """Bytes that one rank sends in a step, mean over the steps of a period."""
    ops, plan = step_collectives(setting, use)
    return sum(sent_bytes([op], plan.mesh) / (plan.passes.period if op.when == "period" else 1) for op in ops)


def read_by_update(setting: DataRanks, use: str) -> int:
    """Bytes of gradients and states that one rank reads to update its shard."""
    _, _, (update,) = setting.lower_stages(use)
    (adam,) = [op.work for op in update.forward if isinstance(op.work, Memory) and op.work.what == "adam"]
    return adam.read


def exposed_seconds(setting: DataRanks, use: str) -> float:
    """Seconds from the last gradient to the end of the last reduction, for equal layers of one bucket each."""
    buckets, backward_s, reduce_s = setting.buckets, setting.bucket_backward_s, setting.bucket_reduce_s
    mesh, model = Mesh({"dp": setting.n}), Model(layers=buckets, hidden=64, heads=4, vocab=256, seq=32)
    each = model.layer_parameters()
    framework = load_framework("megatron-core", {"bucket": {"elements": each, "elements_per_rank": 0.0}})
    kind = find_scheme(use)
    lowering = Lowering(mesh, [kind(("dp",), kind.Options(), mesh, SchemeTraits.of(framework))])
    stage_ops = lowering.run(Architecture(model, 1, 32, 256, setting.n).stage(range(buckets), False, False))
    kernels = sum(op.stream == COMPUTE and op.work is not None for op in stage_ops.unit_runs[0].fragment.backward)

    def price(work: Work) -> tuple[float, float, float]:
        return (reduce_s if isinstance(work, Collective) else backward_s / kernels), 0.0, 0.0

    pipeline = find_scheme("pipeline/1f1b")()
    assert isinstance(pipeline, Schedule)
    flat = flatten(
        build(timetable(pipeline, PipelineShape(1, setting.batches, 1)), [stage_ops], price, StageMessages(""))
    )
    times = longest_path(flat)
    last = flat.queues[0, "data"][-1]
    return times.end[last] - max(times.end[number] for number in flat.after[last])


def across_nodes(setting: DataRanks, ops: Iterable[Op], plan: Plan) -> float:
    """Bytes that leave a node: in a ring over several nodes those that one rank sends; among ranks at the same place of
    their nodes those of every rank.
    """
    nbytes = 0.0
    for op in ops:
        assert isinstance(op.work, Collective)
        if "across" in op.work.axes:
            nbytes += sent_bytes([op], plan.mesh) * (1 if "dp" in op.work.axes else setting.n // setting.across)
    return nbytes


def sent_across_nodes(setting: DataRanks, use: str) -> float:
    return across_nodes(setting, *step_collectives(setting, use))


def gathered_across_nodes(setting: DataRanks, use: str) -> float:
    """Bytes of weights that leave a node in one micro-batch."""
    ops, plan = step_collectives(setting, use)
    gathers = [op for op in ops if op.work.operation == "all_gather"]  # type: ignore[union-attr]
    return across_nodes(setting, gathers, plan) / setting.batches


def state_bytes_per_parameter(setting: DataRanks, use: str) -> float:
    stage_ops, plan, _ = setting.lower_stages(use)
    (params,) = device_params(plan, [stage_ops])
    return sum(resident_bytes(plan, params).values()) / MODEL.parameters


OPTION_VALUES: dict[str, tuple[object, ...]] = {
    "reshard": (False,),
    "offload": (True,),
    "layered": (False,),
    "across_microbatches": (True,),
    "keep_state": ("gathered",),
    "weights": ("broadcast shards", "broadcast parameters"),
    "period": (1, 2, 5),
    "rank": (1, 2, 16, 64),
    "stage": ("warm-up",),
    "servers": (1, 2, 5),
    "average": ("weights and moments",),
    "outer": ("cpu",),
    "outer_gradients": ("fp16",),
    "compression": ("fp16",),
    "persistence": (0, 1000),
    "qwz": (False,),
    "hpz": (False,),
    "qgz": (False,),
}
"""Values of options that appear in closed forms."""


def settings(kind: type[Scheme]) -> Iterator[DataRanks]:
    fields = kind.Options.model_fields
    for n in (1, 2, 3, 4, 7, 8, 16, 64):
        yield DataRanks(n, buckets=1 + n % 5, bucket_backward_s=1.0 + n % 3, bucket_reduce_s=0.25 * n)
    for batches, overlap in ((3, True), (1, False), (3, False)):
        yield DataRanks(4, batches, overlap=overlap)
    if "replicate" in kind.names_axes:
        for n, replicas in ((1, 4), (2, 2), (4, 3), (8, 2)):
            yield DataRanks(n, 1, replicas)
            yield DataRanks(n, 3, replicas, overlap=n > 2)
    groups = (1, 2, 4) if "hierarchical" in fields or kind.least_axes > 1 else (1,)
    for across in groups[1:]:
        yield DataRanks(16, 2, 1, across)
        if "hierarchical" in fields:
            yield DataRanks(16, 2, 2, across, (("hierarchical", True),))
    for name, values in OPTION_VALUES.items():
        for value in values if name in fields else ():
            for across in groups:
                yield DataRanks(8, 2, 1, across, ((name, value),))


MEASURES = {
    "sent_per_step": sent_per_step,
    "state_bytes_per_parameter": state_bytes_per_parameter,
    "sent_across_nodes": sent_across_nodes,
    "gathered_across_nodes": gathered_across_nodes,
    "read_by_update": read_by_update,
    "exposed": exposed_seconds,
}
