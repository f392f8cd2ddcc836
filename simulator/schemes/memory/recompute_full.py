"""Full recompute: a layer keeps only its input and is computed again in the backward pass.

It saves all activations inside a layer (2 b s h bytes stay, in the layout of the input) for one more forward pass with
its collectives: about a third more time. What is in `keep` is not computed again, nor anything that only leads to it:

- `core_attn`: results of attention (its output, 2 b s h bytes more, and its row sums). With long sequences this saves
  most of the extra time for little memory.
- `qkv`, `proj`: outputs of these linear layers of attention (`save_qkv_out_proj` in Praxis).
- `linear`: outputs of all linear layers (`save_dot_only` in Praxis, `dots_saveable` in JAX).
- `alternate_linear`: outputs of every second matrix product, from the first one on, as torchtitan's op-level selective
  recompute counts them; it keeps results of attention, too.

Without a compiler, results in `keep` are stored whether or not a backward pass reads them, as that of the last linear
layer of an MLP (`_CachingTorchDispatchMode` in torch/utils/checkpoint.py).

With `early_stop` it ends with the last tensor that the backward pass reads: the last linear layer of an MLP, a fifth
to a third of the FLOPs of the layer's products, and the collective behind it are not computed again. Non-reentrant
checkpoints of PyTorch do so from 2.1 on (`torch.utils.checkpoint`, `set_checkpoint_early_stop`), and XLA does;
Megatron's own and reentrant ones, which compute the output again, do not.

With `partition` each tensor-parallel rank keeps 1/p of a layer's input where all have it whole (no sequence
parallelism), on its GPU or in host memory, and all-gathers it before the layer is computed again (Pa and Pa+cpu of
ZeRO-R, `partition_activations` of DeepSpeed, `distribute_saved_activations` of Megatron).

References: Chen et al. 2016, arXiv 1604.06174; Korthikanti et al. 2022, arXiv 2205.05198, section 5; kept results of
attention: Li et al. 2023 (DistFlashAttn), arXiv 2310.03294, section 3.3; policies: praxis/base_layer.py
(AutodiffCheckpointType), torchtitan/models/llama3/infra/parallelize.py (_apply_ac_to_transformer_block); partitioned
checkpoints: Rajbhandari et al. 2020, arXiv 1910.02054, section 6.1.
"""

from collections.abc import Hashable, Iterable
from dataclasses import replace
from math import inf
from typing import Literal

from pydantic import Field

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import Module, Stage, Unit
from meshcast.simulator.ir.operators import Linear
from meshcast.simulator.ir.ops import Collective, Fragment, Gemm, HostCopy, Memory, Op, StageOps, TensorUse, UnitRun
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, LowerStage, MemoryScheme, Paper, SchemeOptions
from meshcast.simulator.ir.settings import LayerSetting
from meshcast.simulator.lowering.offload import IN, OUT
from meshcast.simulator.schemes.memory.shared.recompute import mark_layers, recompute


class RecomputeFull(MemoryScheme):
    role = "recompute scheme"
    paper = Paper("arXiv:1604.06174", "Training Deep Nets with Sublinear Memory Cost", 2016)

    class Options(SchemeOptions):
        layers: int | None = Field(default=None, ge=0)
        """Layers of each stage, from the first on, that are recomputed; null: all."""
        keep: tuple[Literal["core_attn", "qkv", "proj", "linear", "alternate_linear"], ...] = ()
        """Modules whose results are kept and not recomputed."""
        early_stop: bool = False
        """What only makes the output of a layer is not recomputed; by default as the framework does."""
        partition: Literal["no", "gpu", "cpu"] = "no"
        """Where the parts of partitioned inputs lie between the passes."""

    @property
    def lowering_key(self) -> Hashable:
        return super().lowering_key, self.framework.compile

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        layers = inf if self.options.layers is None else self.options.layers
        stage_ops = inner(mark_layers(stage, layers, self.role))
        if self.options.partition == "no":
            return stage_ops
        return partition_checkpoints(stage_ops, self.role, self.mesh, self.options.partition == "cpu")

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        if not isinstance(module, Unit) or self.role not in module.marks:
            return inner(module)
        kept, stop = self._kept_results(module), self.options.early_stop
        fragment = recompute(module, inner, (lambda key: key.partition("@")[0] in kept) if kept else None, stop)
        if not self.framework.compile and fragment.backward:
            # Results that no backward op reads stay in memory until the backward pass of the layer ends.
            stored = [use for use in fragment.tensor_uses if use.made and use.key.partition("@")[0] in kept]
            fragment.tensor_uses += [replace(use, op=fragment.backward[-1], made=False) for use in stored]
        for operator in module.operators():
            if isinstance(operator, Linear):
                self._narrow(fragment, operator, kept)
        return fragment

    def _kept_results(self, unit: Unit) -> set[str]:
        """Names of the tensors in `keep`."""
        found, products = set[str](), 0
        for operator in unit.operators():
            names = [tensor.name for tensor in operator.outs]
            if operator.label in self.options.keep:
                found |= {*names, f"{operator.name}.lse"}
            if isinstance(operator, Linear):
                if "linear" in self.options.keep or operator.name in self.options.keep:
                    found |= {*names}
                if "alternate_linear" in self.options.keep:
                    found |= {name for number, name in enumerate(names, products) if number % 2 == 0}
                products += len(names)
        return found

    def _narrow(self, fragment: Fragment, operator: Linear, kept: set[str]) -> None:
        """Makes the repeated product of a layer with several outputs as narrow as those that are not kept."""
        sizes = {tensor.name: tensor.local({}, self.mesh) for tensor in operator.outs}
        share = sum(size for name, size in sizes.items() if name not in kept) / sum(sizes.values())
        for op in fragment.backward if share < 1 else ():
            if op.name == f"re {operator.name}" and isinstance(op.work, Gemm):
                op.work = replace(op.work, n=max(1, round(op.work.n * share)))

    def closed_forms(self, setting: LayerSetting) -> Iterable[ClosedForm]:
        yield ClosedForm("recomputed_forward_share", 1.0, "section 5: one more forward pass")


def partition_checkpoints(stage_ops: StageOps, mark: str, mesh: Mesh, to_host: bool) -> StageOps:
    """Returns `stage_ops` in which the inputs of units with `mark` are partitioned, where ranks keep equal ones: each
    of p ranks keeps 2 b s h / p bytes of one, for an all-gather of 2 b s h bytes before the unit is computed again.

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
    made, nbytes = fragment.copy(), max(use.nbytes for use in uses)
    part = -(-nbytes // mesh.size(axes))
    cut = Op("partition checkpoint", work=Memory("concat", part, part), after=[made.entry[unit_run.residual_in or ""]])
    gradient = [made.grad_entry[unit_run.residual_out]] if unit_run.residual_out in made.grad_entry else []
    gather = Op("gather checkpoint", "tensor", Collective("all_gather", nbytes, axes), gradient, "R")
    again = set(made.backward)
    for op in {use.op for use in made.tensor_uses if use.key == key} & again:
        op.after.append(gather)
    made.tensor_uses = [
        *(replace(use, key=f"{key}~") if use.key == key and use.op in again else use for use in made.tensor_uses),
        TensorUse(key, nbytes, cut),
        *_keep_part(made, f"{key} part", part, cut, gather, to_host),
        TensorUse(f"{key}~", nbytes, gather, True, "activations"),
    ]
    return replace(unit_run, fragment=made)


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
    """The axes of tensor parallelism over which ranks have equal inputs: those of the all-reduces of a unit whose input
    is not sharded."""
    reduced = [
        op.work
        for op in fragment.forward
        if op.stream == "tensor" and isinstance(op.work, Collective) and op.work.operation == "all_reduce"
    ]
    if not reduced or key is None or key.partition("@")[2]:
        return ()
    return max(reduced, key=lambda work: work.nbytes).axes
