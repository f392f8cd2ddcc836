"""Full recompute: a layer keeps only its input and is computed again in the backward pass.

It saves all activations inside a layer (2 b s h bytes stay, in the layout of the input) for another forward pass with
its collectives: about a third more time. `memory/recompute-operators` keeps results of chosen operators, too.

With `early_stop` it ends with the last tensor that the backward pass reads: the last linear layer of an MLP, a fifth
to a third of the FLOPs of the layer's products, and the collective behind it are not computed again. Non-reentrant
checkpoints of PyTorch do so from 2.1 on (`torch.utils.checkpoint`, `set_checkpoint_early_stop`), and XLA does;
Megatron's and reentrant ones, which compute the output again, do not.

With `partition` each tensor-parallel rank keeps 1/p of a layer's input where all have it whole (no sequence
parallelism), on its GPU or in host memory, and all-gathers it before the layer is computed again (Pa and Pa+cpu of
ZeRO-R, `partition_activations` of DeepSpeed, `distribute_saved_activations` of Megatron).

Not modelled: states of random generators, which checkpoints read and set again around a layer with dropout.

References: Chen et al. 2016, arXiv 1604.06174; Korthikanti et al. 2022, arXiv 2205.05198, section 5; partitioned
checkpoints: Rajbhandari et al. 2020, arXiv 1910.02054, section 6.1.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import ChangesWholeUnits, LowersByLayer
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import Module, Stage, Unit
from meshcast.simulator.ir.ops import Collective, Fragment, HostCopy, Memory, Op, StageOps, TensorUse, UnitRun
from meshcast.simulator.ir.scheme import (
    RECOMPUTES,
    ClosedForm,
    LowerModule,
    LowerStage,
    MemoryScheme,
    Paper,
    SchemeOptions,
)
from meshcast.simulator.ir.settings import LayerSetting
from meshcast.simulator.lowering.offload import IN, OUT
from meshcast.simulator.schemes.memory.shared.recompute import mark_layers, recompute


class RecomputeFull(MemoryScheme, LowersByLayer, ChangesWholeUnits):
    role = RECOMPUTES
    paper = Paper("arXiv:1604.06174", "Training Deep Nets with Sublinear Memory Cost", 2016)

    class Options(SchemeOptions):
        layers: int | None = Field(default=None, ge=0)
        """Layers of each stage, from the first on, that are recomputed; null: all."""
        early_stop: bool = False
        """What only makes the output of a layer is not recomputed; by default as the framework does."""
        partition: Literal["no", "gpu", "cpu"] = "no"
        """Where the parts of partitioned inputs lie between the passes."""

    @property
    def lowers_by_layer(self) -> bool:
        return self.options.layers is None

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        layers = inf if self.options.layers is None else self.options.layers
        stage_ops = inner(mark_layers(stage, layers, self.role))
        if self.options.partition == "no":
            return stage_ops
        return partition_checkpoints(stage_ops, self.role, self.mesh, self.options.partition == "cpu")

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        if not isinstance(module, Unit) or self.role not in module.marks:
            return inner(module)
        return recompute(module, inner, early_stop=self.options.early_stop)

    def closed_forms(self, setting: LayerSetting) -> Iterable[ClosedForm]:
        yield ClosedForm("recomputed_forward_share", 1.0, "section 5: one more forward pass")


def partition_checkpoints(stage_ops: StageOps, mark: str, mesh: Mesh, to_host: bool) -> StageOps:
    """Returns `stage_ops` in which the inputs of units with `mark` are partitioned, where ranks keep equal inputs: each
    of p ranks keeps 2 b s h / p bytes of an input, for an all-gather of 2 b s h bytes before the unit is computed
    again.

    to_host: the parts lie in host memory between the passes: they are copied out behind the slicing, and back before
        the all-gather, during which nothing else runs.
    """
    runs = [
        _partition_input(unit_run, mesh, to_host) if mark in unit_run.marks else unit_run
        for unit_run in stage_ops.unit_runs
    ]
    return replace(stage_ops, unit_runs=runs)


def _partition_input(unit_run: UnitRun, mesh: Mesh, to_host: bool) -> UnitRun:
    fragment, key = unit_run.fragment, unit_run.keys[0]
    axes = _replicated_axes(fragment, key)
    forward, backward = set(fragment.forward), set(fragment.backward)
    uses = [use for use in fragment.tensor_uses if use.key == key]
    saved = any(use.op in forward for use in uses) and any(use.op in backward for use in uses)
    if key is None or mesh.size(axes) == 1 or not saved:
        return unit_run
    partitioned, nbytes = fragment.copy(), max(use.nbytes for use in uses)
    part = -(-nbytes // mesh.size(axes))
    cut = Op(
        "partition checkpoint", work=Memory("concat", part, part), after=[partitioned.entry[unit_run.residual_in or ""]]
    )
    gradient = (
        [partitioned.grad_entry[unit_run.residual_out]] if unit_run.residual_out in partitioned.grad_entry else []
    )
    gather = Op("gather checkpoint", "tensor", Collective("all_gather", nbytes, axes), gradient, "R")
    again = set(partitioned.backward)
    for op in {use.op for use in partitioned.tensor_uses if use.key == key} & again:
        op.after.append(gather)
    partitioned.tensor_uses = [
        *(
            replace(use, key=f"{key}~") if use.key == key and use.op in again else use
            for use in partitioned.tensor_uses
        ),
        TensorUse(key, nbytes, cut),
        *_keep_part(partitioned, f"{key} part", part, cut, gather, to_host),
        TensorUse(f"{key}~", nbytes, gather, True, "activations"),
    ]
    return replace(unit_run, fragment=partitioned)


def _keep_part(fragment: Fragment, key: str, nbytes: int, cut: Op, gather: Op, to_host: bool) -> list[TensorUse]:
    """Issues the ops that make and read a part of a checkpoint, and returns how they use it."""
    if not to_host:
        fragment.forward.append(cut)
        fragment.backward.insert(0, gather)
        return [TensorUse(key, nbytes, cut, True), TensorUse(key, nbytes, gather)]
    out = Op("copy checkpoint out", OUT, HostCopy(nbytes, activations=True), [cut])
    back = Op("copy checkpoint in", IN, HostCopy(nbytes, True, activations=True), gather.after, "R")
    gather.after = [back]
    fragment.forward += [cut, out]
    fragment.backward[:0] = [back, gather]
    return [
        *(TensorUse(key, nbytes, op, op is cut) for op in (cut, out)),
        *(TensorUse(f"{key}~", nbytes, op, op is back, "activations") for op in (back, gather)),
    ]


def _replicated_axes(fragment: Fragment, key: str | None) -> tuple[str, ...]:
    """Returns the axes of tensor parallelism over which ranks have equal inputs: those of the all-reduces of a unit
    whose input is not sharded."""
    reduced = [
        op.work
        for op in fragment.forward
        if op.stream == "tensor" and isinstance(op.work, Collective) and op.work.operation == "all_reduce"
    ]
    if not reduced or key is None or key.partition("@")[2]:
        return ()
    return max(reduced, key=lambda work: work.nbytes).axes
