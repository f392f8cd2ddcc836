"""Cephalo: fully sharded data parallelism on heterogeneous GPUs, whose shares of batch and of states are independent.

A rank gets samples by its speed (`plan.share: by-speed`, or `plan.replicas`) and a shard of weights, gradients and
optimizer states by its memory. Gradients are accumulated layer by layer: a unit runs all micro-batches of the step
before the next unit does, so it is all-gathered once for each pass and reduced once a step, however many micro-batches
each rank runs. The unit after the current unit is gathered meanwhile, as in FSDP.

    gather 1 | gather 2                          gather 3                          ..  reduce-scatter 2   ..
             | layer 1 of micro-batches 1, 2, 3  layer 2 of micro-batches 1, 2, 3  ..

A rank with the share f_i of the states stores 16 f_i bytes per parameter, beside the activations of all its
micro-batches and two units. N ranks send 3 (N-1)/N M bytes each per step for M bytes of weights and of gradients.
NCCL has no collective of unequal shards: PyTorch runs it as a broadcast or reduction per rank, which sends no more
and takes 25 % longer, as Cephalo's planner assumes. A list in `shards` has the relative sizes of the shards of each
entry of `plan.replicas`.

Cephalo recomputes every unit and keeps its inputs in host memory, so that further micro-batches take no memory of the
GPU: add memory/recompute-full and memory/offload, which leaves the inputs of two units on the GPU.

Simplified: `by-memory` makes f_i proportional to the memory of a GPU, while Cephalo fills what activations leave until
all GPUs are equally full, and shards evenly where none would be more than half full; micro-batches are equally large on
all ranks, while Cephalo chooses size and number for each by a dynamic programme; a rank that is fast in a unit and slow
in another waits at the end of the step; the planner counts 10 ms for every micro-batch after the first of a backward
pass (`ga_overhead` of split_batch_dp_ga), here its kernels and launches alone count.

References: Guo et al., ICS 2025, arXiv 2411.01075; benson-guo/cephalo @a8c75d3, split_workload.py and utils/patch.py;
layered gradient accumulation: Lamy-Poirier 2021, arXiv 2106.02679.
"""

from collections.abc import Hashable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Annotated, Literal

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import AccumulatesByUnit, HoldsUnequalShards
from meshcast.simulator.ir.modules import Stage
from meshcast.simulator.ir.ops import Collective, Fragment, Op, Param, StageOps, TensorUse, UnitRun
from meshcast.simulator.ir.scheme import ClosedForm, LowerStage, Paper, SchemeOptions
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting
from meshcast.simulator.schemes.data.shared.fully_sharded import ShardedScheme

RelativeSize = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]

UNEVEN = 1.25
"""Time of a collective of unequal shards over that of equal ones (split_workload.py of Cephalo's repository)."""


class Cephalo(ShardedScheme, HoldsUnequalShards, AccumulatesByUnit):
    paper = Paper(
        "arXiv:2411.01075", "Cephalo: Harnessing Heterogeneous GPU Clusters for Training Transformer Models", 2025
    )
    least_axes = 1

    class Options(SchemeOptions):
        shards: Literal["by-memory", "even"] | tuple[RelativeSize, ...] = "by-memory"
        """Sizes of the shards of states: by the memory of each rank's GPU, even, or a list of the relative sizes of a
        rank of each entry of `plan.replicas`."""
        layered: bool | None = None
        """Off: a micro-batch runs through all layers before the next, and is gathered and reduced by itself.
        Default: on without a pipeline. In a pipeline all micro-batches pass its stages together."""

    largest = size = 1.0
    """The largest shard along the axis of heterogeneous ranks, and that of its ranks, over the mean."""
    uneven_axis = ""

    @property
    def accumulates_by_unit(self) -> bool:
        layered = not self.pipelined if self.options.layered is None else bool(self.options.layered)
        return layered and self.mesh.size(self.over) > 1

    @property
    def lowering_key(self) -> Hashable:
        return super().lowering_key, self.uneven_axis, self.largest, self.size

    def shard_sizes(self, axis: str, memory: Sequence[float]) -> Sequence[float] | None:
        if self.options.shards == "even" or axis not in self.over:
            return None
        if self.options.shards == "by-memory":
            return memory
        if len(self.options.shards) != len(memory):
            rule = f"it has the size of a shard of each of the {len(memory)} kinds of replicas"
            remedy = "Give one for each entry of plan.replicas, or by-memory"
            raise PlanError(f"{self.use}.shards", rule, remedy, list(self.options.shards))
        if not any(self.options.shards):
            raise PlanError(f"{self.use}.shards", "no rank would hold any state", "Give one more than 0", [0.0])
        return tuple(self.options.shards)

    def with_shards(self, axis: str, largest: float, size: float) -> "Cephalo":
        scheme = copy(self)
        scheme.uneven_axis, scheme.largest, scheme.size = axis, largest, size
        return scheme

    def shard_size(self, axes: Sequence[str]) -> float:
        return self.size if self.uneven_axis in axes else 1.0

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        return super().lower_stage(stage, lambda part: repeat_units(inner(part), stage.microbatches))

    def reduce(self, axes: tuple[str, ...], elements: int, phase: str, when: str) -> Op:
        return self._slow_down(super().reduce(axes, elements, phase, when), axes)

    def gather(self, axes: tuple[str, ...], elements: int, phase: str, when: str) -> Op:
        return self._slow_down(super().gather(axes, elements, phase, when), axes)

    def _slow_down(self, op: Op, axes: Sequence[str]) -> Op:
        """Returns a collective over shards, which takes longer where they are of unequal size."""
        assert isinstance(op.work, Collective)
        uneven = self.uneven_axis in axes and self.largest > 1 + 1e-9
        return replace(op, work=replace(op.work, pace=UNEVEN)) if uneven else op

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n, passes = setting.n, setting.batches if self.options.layered is False else 1
        moved = (n - 1) / n * (2 * setting.weight_bytes + setting.grad_bytes)
        yield ClosedForm("sent_per_step", passes * moved, "layered accumulation: 3 times the parameters once a step")
        if n > 1:
            yield ClosedForm("state_bytes_per_parameter", 16 / n, "16 f_i bytes, here of equal ranks")


def repeat_units(stage_ops: StageOps, count: int) -> StageOps:
    """Returns a stage whose units each run `count` micro-batches of `stage_ops` in a pass."""
    if count == 1:
        return stage_ops
    return replace(stage_ops, unit_runs=[_repeat(unit_run, count) for unit_run in stage_ops.unit_runs])


def _repeat(unit_run: UnitRun, count: int) -> UnitRun:
    """Returns a run of units whose passes are those of `count` micro-batches; each has its buffers.

    A pass begins once the outputs of all its micro-batches are there. That costs no time while kernels of all of them
    run on a stream.
    """
    copies = [unit_run.fragment.copy() for _ in range(count)]
    for number, clone in enumerate(copies[1:], 1):
        clone.tensor_uses = [_of_copy(use, number, unit_run.keys) for use in clone.tensor_uses]
    first = copies[0]
    repeated = Fragment(
        [op for clone in copies for op in clone.forward],
        [op for clone in copies for op in clone.backward],
        _enter([clone.entry for clone in copies]),
        _leave([clone.exit for clone in copies]),
        _enter([clone.grad_entry for clone in copies]),
        _leave([clone.grad_exit for clone in copies]),
        [_join_param(clone) for clone in zip(*(clone.params for clone in copies), strict=True)],
        first.shared_weights,
        [use for clone in copies for use in clone.tensor_uses],
    )
    taken, returned = unit_run.keys
    before = [key for key in (taken, returned and f"d:{returned}", *unit_run.allocated_before) if key]
    later = [key for key in (returned, taken and f"d:{taken}", *unit_run.freed_later) if key]
    others = range(1, count)
    return replace(
        unit_run,
        fragment=repeated,
        nbytes=unit_run.nbytes * count,
        nbytes_in=unit_run.nbytes_in * count,
        allocated_before=(*unit_run.allocated_before, *(_name(key, n) for n in others for key in before)),
        freed_later=(*unit_run.freed_later, *(_name(key, n) for n in others for key in later)),
    )


def _name(key: str, number: int) -> str:
    """Returns the key of a buffer of a further micro-batch."""
    return f"{key} of micro-batch {number}"


def _of_copy(use: TensorUse, number: int, residual: Sequence[str | None]) -> TensorUse:
    """Returns a use of a buffer of a further micro-batch. residual: keys of the residual stream, which are
    activations."""
    category = "activations" if use.key in residual else use.category
    return replace(use, key=_name(use.key, number), category=category)


def _enter(every: Sequence[dict[str, Op]]) -> dict[str, Op]:
    """Returns a mark for each input, for which those of all micro-batches wait."""
    joined = {}
    for name, first in every[0].items():
        joined[name] = replace(first, after=[])
        for marks in every:
            marks[name].after = [joined[name]]
    return joined


def _leave(every: Sequence[dict[str, Op]]) -> dict[str, Op]:
    """Returns a mark for each output, which waits for those of all micro-batches."""
    return {
        name: Op(first.name, first.stream, None, [ends[name] for ends in every], first.phase)
        for name, first in every[0].items()
    }


def _join_param(copies: Sequence[Param]) -> Param:
    """Returns a parameter that the first micro-batch reads first, and whose gradient all of them complete."""
    last = copies[-1].ready
    ready = Op(last.name, last.stream, None, [copy.ready for copy in copies], last.phase)
    return replace(copies[0], ready=ready)
