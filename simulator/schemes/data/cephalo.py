"""Cephalo: fully sharded data parallelism on unlike GPUs, whose shares of batch and of states are independent.

A rank gets samples by its speed (`plan.share: by-speed`, or `plan.replicas`) and a shard of weights, gradients and
optimizer states by its memory. Gradients are accumulated layer by layer: a unit runs all micro-batches of the step
before the next unit does, so it is all-gathered once for each pass and reduced once a step, however many micro-batches
each rank runs. The unit after the current one is gathered meanwhile, as in FSDP.

    gather 1 | gather 2                          gather 3                          ..  reduce-scatter 2   ..
             | layer 1 of micro-batches 1, 2, 3  layer 2 of micro-batches 1, 2, 3  ..

A rank with the share f_i of the states stores 16 f_i bytes per parameter, beside the activations of all its
micro-batches and two units. N ranks send 3 (N-1)/N M bytes each per step for M bytes of weights and of gradients.
NCCL has no collective of unequal shards: PyTorch runs it as one broadcast or reduction per rank, which sends no more
and takes 25 % longer, as Cephalo's planner assumes. A list in `shards` has the relative sizes of the shards of each
entry of `plan.replicas`.

Cephalo recomputes every unit and keeps its inputs in host memory, so that further micro-batches take no memory of the
GPU: add memory/recompute-full and memory/offload, which leaves the inputs of two units on the GPU.

Simplified: `by-memory` makes f_i proportional to the memory of a GPU, while Cephalo fills what activations leave until
all GPUs are equally full, and shards evenly where none would be more than half full; micro-batches are equally large on
all ranks, while Cephalo chooses size and number for each by a dynamic programme; a rank that is fast in one unit and
slow in another waits at the end of the step.

References: Guo et al., ICS 2025, arXiv 2411.01075; benson-guo/cephalo @a8c75d3, split_workload.py and utils/patch.py;
layered gradient accumulation: Lamy-Poirier 2021, arXiv 2106.02679.
"""

from collections.abc import Hashable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.capabilities import AccumulatesByUnit, HoldsUnequalShards
from meshcast.simulator.ir.modules import Stage
from meshcast.simulator.ir.ops import Collective, Op, StageOps
from meshcast.simulator.ir.scheme import ClosedForm, LowerStage, Paper, SchemeOptions
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting
from meshcast.simulator.schemes.data.shared.fully_sharded import ShardedScheme
from meshcast.simulator.schemes.data.shared.layered_accumulation import repeat_units

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
        """Off: a micro-batch runs through all layers before the next one, and is gathered and reduced by itself.
        Default: on without a pipeline. With one all micro-batches pass its stages together."""

    largest = size = 1.0
    """The largest shard along the axis of unlike ranks, and that of its ranks, over the mean."""
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
        """A collective over shards, which takes longer where they are of unequal size."""
        assert isinstance(op.work, Collective)
        uneven = self.uneven_axis in axes and self.largest > 1 + 1e-9
        return replace(op, work=replace(op.work, pace=UNEVEN)) if uneven else op

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n, passes = setting.n, setting.batches if self.options.layered is False else 1
        moved = (n - 1) / n * (2 * setting.weight_bytes + setting.grad_bytes)
        yield ClosedForm("sent_per_step", passes * moved, "layered accumulation: 3 times the parameters once a step")
        if n > 1:
            yield ClosedForm("state_bytes_per_parameter", 16 / n, "16 f_i bytes, here of equal ranks")
