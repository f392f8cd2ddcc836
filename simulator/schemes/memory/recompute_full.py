"""Full recompute: a layer keeps only its input and is computed again in the backward pass.

It saves all activations inside a layer (2 b s h bytes stay, in the layout of the input) for one more forward pass with
its collectives: about a third more time. Where the results of attention are kept (its output, 2 b s h bytes more, and
its row sums), neither the attention core nor the communication inside it is repeated: with long sequences this saves
most of the extra time for little memory.

References: Chen et al. 2016, arXiv 1604.06174; Korthikanti et al. 2022, arXiv 2205.05198, section 5; kept results of
attention: Li et al. 2023 (DistFlashAttn), arXiv 2310.03294, section 3.3.
"""

from collections.abc import Iterable
from math import inf
from typing import Literal

from pydantic import Field

from simulator.ir.modules import Module, Stage, Unit
from simulator.ir.ops import Fragment, StageOps
from simulator.ir.scheme import ClosedForm, LowerModule, LowerStage, MemoryScheme, Paper, SchemeOptions
from simulator.ir.settings import LayerSetting
from simulator.schemes.memory.shared.recompute import mark_layers, recompute


class RecomputeFull(MemoryScheme):
    role = "recompute scheme"
    paper = Paper("arXiv:1604.06174", "Training Deep Nets with Sublinear Memory Cost", 2016)

    class Options(SchemeOptions):
        layers: int | None = Field(default=None, ge=0)
        """Layers of each stage, from the first on, that are recomputed; null: all."""
        keep: tuple[Literal["core_attn"], ...] = ()
        """Modules whose results are kept and not recomputed."""

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        return inner(mark_layers(stage, inf if self.options.layers is None else self.options.layers, self.role))

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        if not isinstance(module, Unit) or self.role not in module.marks:
            return inner(module)
        operators = [operator for operator in module.operators() if operator.label in self.options.keep]
        results = {tensor.name for operator in operators for tensor in operator.outs} | {
            f"{operator.name}.lse" for operator in operators
        }
        return recompute(module, inner, (lambda key: key.partition("@")[0] in results) if operators else None)

    def closed_forms(self, setting: LayerSetting) -> Iterable[ClosedForm]:
        yield ClosedForm("recomputed_forward_share", 1.0, "section 5: one more forward pass")
