"""Selective recompute: chosen modules are computed again in the backward pass.

Recomputing the attention core alone (scores, softmax, dropout and their product with V) saves the 5 a s^2 b bytes per
layer that grow with the square of the sequence length, for few FLOPs (a heads, b sequences of s tokens, hidden size h).
With a flash kernel, which keeps no scores, little is left to save.

Of some modules the intermediate activations are freed, and the module is recomputed when the gradient of its output
arrives: `core_attn` (the attention core), `attention` (with its linear layers), `mlp`, `moe` (routed and shared
experts, with their all-to-alls), `shared_experts`. Of others the output is freed (output discarding) and recomputed
just before the backward pass of its first reader: `layernorm` (both norms of a layer, 4 b s h bytes), `norm` (all norms
inside a layer), `moe_act` (the activation function of routed experts; Megatron-Core's shared experts keep theirs),
`act` (the activation functions of all MLPs, routed and shared experts included, as in DeepSeek-V3), `mla_up_proj` (in
latent attention the norms of the latents, the up-projections and rotary embedding: queries, keys and values of all
heads).

    forward    norm1 -> qkv -> core -> proj        backward   re norm1 -> d proj ... d qkv, w qkv -> d norm1
                     (freed)                                  before its first reader: d qkv or w qkv

References: Korthikanti et al. 2022, arXiv 2205.05198, section 5; output discarding: NVIDIA Megatron-Core,
`recompute_modules`; all norms and up-projections: DeepSeek-V3, arXiv 2412.19437, section 3.2.3.
"""

from collections.abc import Iterable
from dataclasses import replace

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.capabilities import LowersByLayer
from meshcast.simulator.ir.modules import Module, Stage, Unit, add_marks
from meshcast.simulator.ir.ops import Fragment, StageOps
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
from meshcast.simulator.schemes.memory.shared.recompute import (
    ModuleName,
    mark_layers,
    recompute_marked,
    recompute_marks,
)


class RecomputeSelective(MemoryScheme, LowersByLayer):
    role = RECOMPUTES
    paper = Paper("arXiv:2205.05198", "Reducing Activation Recomputation in Large Transformer Models", 2022)

    class Options(SchemeOptions):
        modules: tuple[ModuleName, ...] = ("core_attn",)
        """Modules that are recomputed."""
        layers: int | None = Field(default=None, ge=0)
        """Layers of each stage, from the first on, whose modules are recomputed; null: all units."""

    @property
    def lowers_by_layer(self) -> bool:
        return self.options.layers is None

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        if self.options.layers is not None:
            stage = mark_layers(stage, self.options.layers, self.role)
        return inner(replace(stage, units=tuple(map(self._mark, stage.units))))

    def _mark(self, unit: Unit) -> Unit:
        if self.options.layers is not None and self.role not in unit.marks:
            return unit
        return add_marks(unit, recompute_marks(unit, set(self.options.modules)))

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        return recompute_marked(module, inner)

    def closed_forms(self, setting: LayerSetting) -> Iterable[ClosedForm]:
        if setting.t == 1 and self.options.modules == ("core_attn",):
            yield ClosedForm(
                "activations_per_layer", 34 * setting.s * setting.b * setting.h, "section 5, without tensor parallelism"
            )
