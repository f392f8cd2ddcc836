"""PyTorch FSDP: weights, gradients and optimizer states are sharded; a unit is gathered only while it computes.

A unit is a transformer layer or several, the embedding, or the output layer with its loss. Its weights are all-gathered
before its forward pass and freed after it, all-gathered again before its backward pass, and its gradients
reduce-scattered after that, in every micro-batch. The weights of the next unit are all-gathered during the computation
of the current unit, so two units are whole at a time. Where weights outside of the layers are those of PyTorch's root
unit, they are not freed after their forward pass (`root_stays_gathered` of the framework).

    forward    gather 1 | gather 2   gather 3   ...         backward   ... gather 2    gather 1
               ........ | compute 1  compute 2  ...                    ... compute 3   compute 2   compute 1
                                                                              reduce-scatter 3   reduce-scatter 2 ...

Under a pipeline, weights stay gathered and gradients unreduced from micro-batch to micro-batch, as torch's pipeline
stages ask for: an all-gather and a reduce-scatter a step, and whole weights and gradients in memory meanwhile. Where
all forward passes of a stage precede its backward ones (breadth-first) weights are freed and gathered again in between.

PEFT makes each matrix of an adapter a unit inside of that of its layer (`adapters.units` of the framework). Its own
all-gathers and reductions are small, but `limit_all_gathers` lets the host be two units ahead of the kernels, and the
calls of FSDP around every unit then take longer than the kernels between them.

With a second axis in `replicate`, groups of F ranks share a copy of the model (hybrid sharding): gradient shards that
were reduce-scattered in a group are then all-reduced among the R replicas, during the rest of the pass.

With `offload` all shards lie in host memory: those of fp32 weights are copied in before each all-gather, those of
gradients out after each reduction (w/F bytes each time, g/F bytes), and the host updates the states.

A rank sends 3 (F-1)/F M + 2 (R-1)/R M/F bytes per micro-batch for M bytes of weights and of gradients (under a pipeline
per step); a third of the first term less where weights are not freed after the forward pass, and a third more of
recomputed units around which checkpoints are reentrant (`reentrant_units` of the framework). 16/F bytes per parameter
are stored: the sharded weights are those that the optimizer updates, in its format. So are weights that no other rank
has (of experts over all ranks), which are converted for their passes without a message.

With `double_buffer` whole weights of layers, and whole gradients, lie in two buffers each, which stay through the
passes of a step: 2 (w + g) bytes for w bytes of weights of a layer and g of gradients, also while none is whole. Layers
of another size than most have memory of their own when they need it.

Not modelled: the multiprocessors that collectives of registered buffers (`nccl_ub`) leave to others; kernels of these
conversions; `no_sync` of full sharding alone (gradients unreduced, weights all-gathered in every micro-batch); that
torchtitan keeps the last layer between its passes; padding of shards; copies into contiguous buffers once per step; the
host's sums of offloaded gradients.

References: Zhao et al. 2023, arXiv 2304.11277, section 3; Rajbhandari et al. 2020 (ZeRO stage 3), arXiv 1910.02054;
PyTorch, torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`offload_to_cpu`); buffers: Megatron FSDP,
megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py (`FixedPoolAllocator`).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import ConvertsWeights, KeepsSecondaryShards, UpdatesMatrices
from meshcast.simulator.ir.modules import Stage
from meshcast.simulator.ir.ops import BYTES, Op, Param, SideOps, StageOps, TensorUse, UnitRun
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.scheme import RECOMPUTES, ClosedForm, LowerStage, Paper, SchemeOptions
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting, count_gathered
from meshcast.simulator.schemes.data.shared.fully_sharded import GRADIENTS, ShardedScheme


class FSDP(ShardedScheme, KeepsSecondaryShards, ConvertsWeights, UpdatesMatrices):
    paper = Paper("arXiv:2304.11277", "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023)
    names_axes = ("replicate",)

    class Options(SchemeOptions):
        replicate: str | None = None
        """The axis along which groups hold replicas of the model."""
        unit: int = Field(default=1, ge=1, strict=True)
        """Layers of a unit, where that many of a kind follow each other."""
        prefetch: int | None = Field(default=None, ge=0, le=3)
        """Units gathered, and whole, beside the unit that computes; `limit_all_gathers` of PyTorch allows 1. Default: 1
        where the framework overlaps, else 0."""
        backward_prefetch: bool = True
        """Off: in the backward pass a unit is gathered after the reduce-scatter of the unit before."""
        reshard: bool = True
        """Off: weights stay gathered from the forward to the backward pass, with an all-gather per micro-batch."""
        across_microbatches: bool | None = None
        """Weights stay gathered and gradients unreduced through all micro-batches of a step (in FSDP2 neither
        `reshard_after_backward` nor `requires_gradient_sync`). Default: under a pipeline that overlaps, on the GPU."""
        double_buffer: bool = False
        """Whole weights and gradients of layers lie in two buffers each, for good (`fsdp_double_buffer`)."""
        offload: bool = False
        """Shards of weights, gradients and optimizer states lie in host memory (`CPUOffloadPolicy`)."""

    @property
    def across_microbatches(self) -> bool:
        """Whether weights are gathered, and gradients reduced, once per step."""
        if self.options.across_microbatches is None:
            return self.pipelined and self.overlaps_backward and not self.options.offload
        return bool(self.options.across_microbatches)

    def check_job(self, job: Any) -> None:
        if self.options.across_microbatches:
            check_gathers_once(self, job)
        if self.options.double_buffer and self.across_microbatches:
            rule = "all weights are whole through a step with a pipeline, which two buffers do not hold"
            raise PlanError(f"{self.use}.double_buffer", rule, "Set across_microbatches: false, or leave it out", True)

    def offloaded_to(self, state: str) -> Mapping[str, float]:
        return {"cpu": 1.0} if self.options.offload else {}

    @property
    def lowering_key(self) -> Hashable:
        traits = self.framework.root_stays_gathered, self.holds_inputs, self.gathers_again, self.wraps_trained
        return super().lowering_key, self.across_microbatches, *traits

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        if self.across_microbatches:
            return gather_once(self, inner(stage))
        stage_ops = super().lower_stage(stage, inner)
        stage_ops = use_double_buffers(self, stage_ops) if self.options.double_buffer else stage_ops
        return hold_inputs(stage_ops) if self.holds_inputs else stage_ops

    def accumulation_shards(self, param: Param) -> tuple[str, ...]:
        return () if self.across_microbatches else super().accumulation_shards(param)

    @property
    def layers_per_unit(self) -> int:
        return int(self.options.unit)

    def prefetch_depth(self, forward: bool) -> int:
        if not forward and not self.options.backward_prefetch:
            return 0
        return super().prefetch_depth(forward) if self.options.prefetch is None else self.options.prefetch

    @property
    def holds_inputs(self) -> bool:
        """Whether inputs of recomputed units with frozen weights stay to the end of a backward pass; a model on one GPU
        is not wrapped."""
        hooks = self.framework.hooks_hold_inputs and not self.framework.gathers_apart
        return hooks and self.layers_per_unit == 1 and self.mesh.size(self.over) > 1

    @property
    def wraps_trained(self) -> bool:
        apart = self.framework.adapter_units and not self.framework.gathers_apart
        return apart and self.layers_per_unit == 1 and self.mesh.size(self.over) > 1 and not self.across_microbatches

    def gradient_buckets(self, params: Sequence[Param]) -> list[list[Param]]:
        return [[param] for param in params] if self.wraps_trained else super().gradient_buckets(params)

    @property
    def gathers_again(self) -> bool:
        freed = self.options.reshard and self.layers_per_unit == 1
        return freed and self.framework.reentrant_units and not self.framework.gathers_apart

    @property
    def has_root(self) -> bool:
        return self.framework.root_stays_gathered and not self.across_microbatches

    @property
    def converts(self) -> bool:
        return self.mesh.size(self.gathered_axes) > 1

    def secondary_shards(self, param: Param) -> tuple[str, ...] | None:
        root = self.framework.root_stays_gathered and not param.in_layer
        kept = (root or not self.options.reshard) and not self.across_microbatches
        return () if kept and self.converts else None

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        f, r = setting.n, setting.replicas
        weights, grads = setting.weight_bytes, setting.grad_bytes
        # Without a pipeline, passes of a stage alternate, so weights are not freed between them.
        gathers = 2 if self.options.reshard and not self.across_microbatches else 1
        batches = 1 if self.across_microbatches else setting.batches
        moved = (f - 1) / f * (gathers * weights + grads) + 2 * (r - 1) / r * grads / f
        yield ClosedForm("sent_per_step", batches * moved, "arXiv 1910.02054, section 7.2.2: 3 times the parameters")
        if f > 1:
            kept = 0 if self.options.reshard or self.across_microbatches else 2
            at_rest = 0 if self.options.offload else 16 / f
            yield ClosedForm("state_bytes_per_parameter", at_rest + kept, "weights, gradients, two moments in fp32")


def hold_inputs(stage_ops: StageOps) -> StageOps:
    """Returns `stage_ops` in which recomputed units with frozen weights free neither their inputs nor the gradients of
    these in a backward pass, which frees all of them at its end.

    The gradient of the input of a unit is that of the output of the unit before.
    """
    runs: list[UnitRun] = []
    inputs = gradients = 0.0
    follows = False  # whether the unit behind holds its input
    for unit_run in reversed(stage_ops.unit_runs):
        taken, left = unit_run.keys
        holds = RECOMPUTES in unit_run.marks and not all(param.trained for param in unit_run.fragment.params)
        if not (holds and taken and unit_run.fragment.backward):
            runs.append(unit_run)
            follows = False
            continue
        for count, behind in ((1, follows), (unit_run.count - 1, True)):
            if count:
                keys = (taken, f"d:{left}") if behind else (taken,)
                later = (*unit_run.freed_later, *keys)
                runs.append(replace(unit_run, fragment=unit_run.fragment.copy(), count=count, freed_later=later))
                inputs += count * unit_run.nbytes_in
                gradients += count * unit_run.nbytes * behind
        follows = True
    held = tuple((nbytes, name) for nbytes, name in ((inputs, "activations"), (gradients, "workspace")) if nbytes)
    return replace(stage_ops, unit_runs=runs[::-1], held=held)


def use_double_buffers(scheme: FSDP, stage_ops: StageOps) -> StageOps:
    """Returns `stage_ops` in which whole weights and gradients of most layers take no memory of their own, but two
    buffers of that size take it from the first pass of a step to the last."""
    widths = BYTES[scheme.framework.weights], BYTES[scheme.framework.gradients]
    counts = Counter[tuple[int, int]]()
    for unit_run in stage_ops.unit_runs:
        params = [param for param in unit_run.fragment.params if param.in_layer and scheme.reduces(param)]
        whole = sum(param.size for param in params), sum(param.size for param in params if param.trained)
        if whole[0]:
            counts[whole] += unit_run.count
    if not counts or scheme.mesh.size(scheme.over) == 1:
        return stage_ops
    (usual, _), *_ = counts.most_common(1)
    weights, gradients = (size * width for size, width in zip(usual, widths, strict=True))

    def is_held(use: TensorUse) -> bool:
        if use.category == "parameters":
            return use.key.startswith("weights ") and use.nbytes == weights
        return use.category == "gradients" and use.key.startswith(GRADIENTS[:9]) and use.nbytes == gradients

    runs = []
    for unit_run in stage_ops.unit_runs:
        uses = [use for use in unit_run.fragment.tensor_uses if not is_held(use)]
        runs.append(replace(unit_run, fragment=replace(unit_run.fragment, tensor_uses=uses)))
    whole_weights, whole_gradients = stage_ops.whole_weights + 2 * weights, stage_ops.whole_gradients + 2 * gradients
    return replace(stage_ops, unit_runs=runs, whole_weights=whole_weights, whole_gradients=whole_gradients)


Axes = tuple[str, ...]


def check_gathers_once(scheme: ShardedScheme, job: Any) -> None:
    """Raises PlanError where a single all-gather and reduction per step are not modelled: without overlap, without a
    flush, or with offloaded shards."""
    flush = all(getattr(find_scheme(entry.use), "flush", True) for entry in job.plan.schemes)
    if not (scheme.overlaps_backward and flush) or scheme.offloaded_to("parameters"):
        rule = "weights on the GPU stay gathered through a step that ends with a flush, gathered as its passes begin"
        remedy = "Leave it out, or set framework.set.overlap.dp and no offloading"
        raise PlanError(f"{scheme.use}.across_microbatches", rule, remedy, True)


def gather_once(scheme: FSDP, stage_ops: StageOps) -> StageOps:
    """Returns `stage_ops` in which the weights of every unit are gathered once per step, during the first forward pass,
    and its gradients reduced once, during the last backward pass.

    Where all forward passes of a stage precede its backward passes, weights may be freed in between and gathered again
    (`StageOps.again`).
    """
    units = list(_units(stage_ops, scheme.layers_per_unit))
    params = [param for param, _ in stage_ops.params()]

    def shards(param: Param) -> Axes:
        return scheme.shards_at_rest("parameters", param)

    def reduces(param: Param) -> Axes:
        return scheme.reduces(param) if param.trained else ()

    width = BYTES[scheme.framework.weights]
    sizes = stage_ops.of_params([count_gathered(scheme, param) for param in params]).astype(int)
    elements = stage_ops.of_params([param.size for param in params]).astype(int)
    gathered = stage_ops.of_params([scheme.converts or bool(shards(param)) for param in params]).astype(bool)
    accumulated = stage_ops.of_params([bool(reduces(param)) for param in params]).astype(bool)
    backward = any(unit_run.fragment.backward for unit_run in stage_ops.unit_runs)
    return replace(
        stage_ops,
        ahead=stage_ops.ahead + _gathers(scheme, stage_ops, units, shards, "F"),
        again=_gathers(scheme, stage_ops, units[::-1], shards, "B") if scheme.options.reshard and backward else [],
        behind=stage_ops.behind + _reductions(scheme, stage_ops, units[::-1], reduces),
        whole_weights=stage_ops.whole_weights + int(sizes[gathered].sum()) * width,
        whole_gradients=stage_ops.whole_gradients
        + int(elements[accumulated].sum()) * BYTES[scheme.framework.gradients],
    )


def _units(stage_ops: StageOps, layers: int) -> Iterator[np.ndarray]:
    """Yields the numbers of the parameters of every unit, in forward order; a unit has up to `layers` equal layers."""
    start = 0
    for unit_run in stage_ops.unit_runs:
        width = len(unit_run.fragment.params)
        for first in range(0, unit_run.count, layers):
            count = min(layers, unit_run.count - first)
            yield start + first * width + np.arange(count * width)
        start += unit_run.count * width


def _by_axes(stage_ops: StageOps, units: list[np.ndarray], axes_of: Callable[[Param], Axes]) -> dict[Axes, SideOps]:
    """Returns for each set of axes an op without work for every unit that has parameters with these axes."""
    param_axes = [axes_of(param) for param, _ in stage_ops.params()]
    sets = list(dict.fromkeys(axes for axes in param_axes if axes))
    which = stage_ops.of_params([sets.index(axes) if axes else -1 for axes in param_axes])
    sides = {}
    for i, axes in enumerate(sets):
        parts = [part for unit in units if len(part := unit[which[unit] == i])]
        starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
        sides[axes] = SideOps([Op("unit") for _ in parts], np.concatenate(parts), starts)
    return sides


def _sizes(stage_ops: StageOps, side: SideOps, count: Callable[[Param], int]) -> list[int]:
    """Counts the elements of the parameters of each op. count: those of a parameter."""
    sizes = stage_ops.of_params([count(param) for param, _ in stage_ops.params()]).astype(int)
    return np.add.reduceat(sizes[side.params], side.starts).tolist()


def _gathers(
    scheme: ShardedScheme, stage_ops: StageOps, units: list[np.ndarray], axes_of: Callable[[Param], Axes], phase: str
) -> list[SideOps]:
    unit_ops: dict[tuple[Axes, int], Op] = {}
    gathers = []
    for axes, side in _by_axes(stage_ops, units, axes_of).items():
        ops = [
            unit_ops.setdefault((axes, size), replace(scheme.gather(axes, size, phase, "every"), when="first"))
            for size in _sizes(stage_ops, side, partial(count_gathered, scheme))
        ]
        gathers.append(replace(side, ops=ops))
    return gathers


def _reductions(
    scheme: ShardedScheme, stage_ops: StageOps, units: list[np.ndarray], axes_of: Callable[[Param], Axes]
) -> list[SideOps]:
    """Reductions of every unit; those of the shards among replicas follow those inside a group, each on its stream."""
    reductions: list[SideOps] = []
    for axes, side in _by_axes(stage_ops, units, axes_of).items():
        steps: dict[int, list[Op]] = defaultdict(list)
        chains: dict[int, list[Op]] = {}
        for size in _sizes(stage_ops, side, attrgetter("size")):
            if size not in chains:
                chains[size] = [replace(op, when="last") for op in scheme.reduce_unit(axes, size)]
            for step, op in enumerate(chains[size]):
                steps[step].append(op)
        before: SideOps | None = None
        for ops in steps.values():
            after = (before, np.arange(len(ops))) if before else None
            before = replace(side, ops=ops, after=after)
            reductions.append(before)
    return reductions
