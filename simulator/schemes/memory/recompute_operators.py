"""Recompute by operator: layers keep their inputs and results of listed operators, and compute all else again.

What is expensive to compute or to send stays in memory, what is cheap (norms, activation functions, rotary embedding,
casts) is repeated from it: between full recompute and none in memory and in time. `save` lists the operators; by
default those whose results torchtitan saves in its mode `selective`. A layer of h hidden columns and f MLP columns, of
which torchtitan saves queries, values, attention, gate and the MLP's output, keeps about 2 b s (5 h + f) bytes.

- `attention`: outputs of attention (2 b s h bytes) and the sums of its rows.
- `linear`: outputs of all linear layers (`save_dot_only` in Praxis, `dots_saveable` in JAX).
- `alternate_linear`: outputs of every second matrix product, from the first on, in the order in which a layer
  computes them. The product of a router is not counted, and never saved.
- `qkv`, `proj`: outputs of these linear layers of attention (`save_qkv_out_proj` in Praxis).
- `reduce_scatter`: results of reduce-scatters of tensor parallelism. A compiler does not repeat the products before.
- `all_to_all`: results of the dispatch and the combine of expert parallelism.

The grouped products of experts are in none of these lists: PyTorch's list of compute-intensive operators has no
`_grouped_mm`. Without a compiler, products that are not saved are repeated, whether or not
anything reads them, and saved results are stored whether or not a backward pass reads them, as that of the
last linear layer of an MLP (`_CachingTorchDispatchMode` in torch/utils/checkpoint.py).

With `early_stop` recomputation ends with the last tensor that the backward pass reads, as in `memory/recompute-full`.

Not modelled: results of a few bytes a token (the chosen experts, maxima for scales of 8-bit formats), which torchtitan
saves, too.

References: `create_selective_checkpoint_contexts` in torch/utils/checkpoint.py; torchtitan
@b5bcd76c6, torchtitan/distributed/activation_checkpoint.py (SelectiveAC), of which the lists of models before
2026-03 (@114151ad4) saved the same, dispatch and combine from 2025-09 on (@c4e229115);
https://pytorch.org/blog/activation-checkpointing-techniques/; policies of Praxis:
praxis/base_layer.py (AutodiffCheckpointType); kept results of attention: Li et al. 2023 (DistFlashAttn), arXiv
2310.03294, section 3.3.
"""

from collections.abc import Hashable, Iterable
from dataclasses import replace
from math import inf
from typing import Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import ChangesWholeUnits
from meshcast.simulator.ir.modules import Module, Stage, Unit
from meshcast.simulator.ir.moe_operators import ExpertLinear
from meshcast.simulator.ir.operators import Linear
from meshcast.simulator.ir.ops import Collective, Communication, Fragment, Gemm, Op, StageOps
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
from meshcast.simulator.schemes.memory.shared.recompute import mark_layers, recompute

OperatorName = Literal["attention", "linear", "alternate_linear", "qkv", "proj", "reduce_scatter", "all_to_all"]

ROUTER = "router"


class RecomputeOperators(MemoryScheme, ChangesWholeUnits):
    role = RECOMPUTES
    paper = Paper(
        "https://pytorch.org/blog/activation-checkpointing-techniques/",
        "Current and New Activation Checkpointing Techniques in PyTorch",
        2025,
    )

    class Options(SchemeOptions):
        save: tuple[OperatorName, ...] = Field(
            default=("attention", "alternate_linear", "reduce_scatter", "all_to_all"), min_length=1
        )
        """Operators whose results are kept and not computed again."""
        layers: int | None = Field(default=None, ge=0)
        """Layers of each stage, from the first on, that are recomputed; null: all."""
        early_stop: bool = False
        """What only makes the output of a layer is not recomputed; by default as the framework does."""

    @property
    def lowering_key(self) -> Hashable:
        return super().lowering_key, self.framework.compile

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        layers = inf if self.options.layers is None else self.options.layers
        return inner(mark_layers(stage, layers, self.role))

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        if not isinstance(module, Unit) or self.role not in module.marks:
            return inner(module)
        names = self._saved_names(module)
        compiled = self.framework.compile
        fragment = recompute(
            module, inner, lambda part: self._saved_keys(part, names), self.options.early_stop, compiled
        )
        if not compiled and fragment.backward:
            # Results that no backward op reads stay in memory until the backward pass of the layer ends.
            saved = self._saved_keys(fragment, names)
            stored = [use for use in fragment.tensor_uses if use.made and use.key in saved]
            fragment.tensor_uses += [replace(use, op=fragment.backward[-1], made=False) for use in stored]
        for operator in module.operators():
            if isinstance(operator, Linear):
                self._narrow(fragment, operator, names)
        return fragment

    def _saved_names(self, unit: Unit) -> set[str]:
        """Returns the names of the tensors that compute operators in `save` make."""
        saved, save, products = set[str](), self.options.save, 0
        for operator in unit.operators():
            names = [tensor.name for tensor in operator.outs]
            if operator.label == "core_attn" and "attention" in save:
                saved |= {*names, f"{operator.name}.lse"}
            if not isinstance(operator, Linear) or isinstance(operator, ExpertLinear) or operator.name == ROUTER:
                continue
            if "linear" in save or operator.name in save:
                saved |= {*names}
            numbers = [products + (0 if operator.whole else i) for i in range(len(names))]
            if "alternate_linear" in save:
                saved |= {name for name, product in zip(names, numbers, strict=True) if product % 2 == 0}
            products = numbers[-1] + 1
        return saved

    def _saved_keys(self, fragment: Fragment, names: set[str]) -> set[str]:
        """Keys of the memory that is kept, of a lowered unit. names: of tensors that compute operators make."""
        written = [use for use in fragment.tensor_uses if use.made and use.op.phase == "F"]
        return {use.key for use in written if use.key.partition("@")[0] in names or self._is_saved_message(use.op)}

    def _is_saved_message(self, op: Op) -> bool:
        if op.stream == "expert":
            return "all_to_all" in self.options.save and isinstance(op.work, Communication)
        scatters = isinstance(op.work, Collective) and op.work.operation == "reduce_scatter"
        return "reduce_scatter" in self.options.save and op.stream == "tensor" and scatters

    def _narrow(self, fragment: Fragment, operator: Linear, saved: set[str]) -> None:
        """Makes the repeated product of a layer with several outputs as narrow as those that are not saved."""
        sizes = {tensor.name: tensor.local({}, self.mesh) for tensor in operator.outs}
        share = sum(size for name, size in sizes.items() if name not in saved) / sum(sizes.values())
        for op in fragment.backward if share < 1 else ():
            if op.name == f"re {operator.name}" and isinstance(op.work, Gemm):
                op.work = replace(op.work, n=max(1, round(op.work.n * share)))

    def closed_forms(self, setting: LayerSetting) -> Iterable[ClosedForm]:
        attention = 4 * setting.s / setting.h
        share = (12 + attention) / (24 + attention)
        yield ClosedForm(
            "recomputed_forward_share", share, "keys, projection, the MLP's second layer, unfused attention"
        )
