"""Selective recompute: chosen modules are computed again in the backward pass.

Recomputing the attention core alone (scores, softmax, dropout and their product with V) removes the 5 a s^2 b
bytes a layer that grow with the square of the sequence, for few FLOPs. With a flash kernel, which keeps no
scores, there is little left to save.

Blocks forget what is inside of them, and are made again when their gradient comes: `core_attn` (the attention core),
`attention` (with its linears), `mlp`, `moe` (routed and shared experts, with their all-to-alls), `shared_experts`.
Others forget what they have made for those behind them (output discarding), and are made again just before the
backward pass of the first that reads it: `layernorm` (both norms of a layer, 4 b s h bytes), `norm` (all norms inside a
layer), `moe_act` (the activation of routed experts), `mla_up_proj` (of latent attention the norms of the latents, the
linears from them, and rotary positions: queries, keys and values of all heads).

    forward    norm1 -> qkv -> core -> proj        backward   re norm1 -> d proj ... d qkv, w qkv -> d norm1
                     (forgotten)                              in front of the first that reads it: d qkv or w qkv

References: Korthikanti et al. 2022, arXiv 2205.05198, section 5; output discarding: NVIDIA Megatron-Core,
`recompute_modules`; all norms and up-projections: DeepSeek-V3, arXiv 2412.19437, section 3.2.3.
"""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from simulator.ir.modules import CompositeModule, Module, Operator, Stage, Unit
from simulator.ir.ops import Fragment, StageOps
from simulator.ir.scheme import Around, ClosedForm, Inner, MemoryScheme, Paper, SchemeOptions
from simulator.schemes.memory.shared.recompute import Forgetting, marked, recompute

ModuleName = Literal[
    "core_attn", "attention", "mlp", "moe", "shared_experts", "layernorm", "norm", "moe_act", "mla_up_proj"
]


class RecomputeSelective(MemoryScheme):
    role = "recompute scheme"
    paper = Paper("arXiv:2205.05198", "Reducing Activation Recomputation in Large Transformer Models", 2022)

    class Options(SchemeOptions):
        modules: tuple[ModuleName, ...] = ("core_attn",)
        """What is computed again."""
        layers: int | None = Field(default=None, ge=0)
        """In how many layers of each stage, from the first on; null: wherever there are such modules."""

    _forgetting: Forgetting | None = None
    """Of the unit that is being lowered; None where nothing is chosen: inside of what is made again as a whole, too."""

    def lower_stage(self, stage: Stage, inner: Around) -> StageOps:
        return inner(stage if self.options.layers is None else marked(stage, self.options.layers, self.role))

    def lower(self, module: Module, inner: Inner) -> Fragment:
        modules, before = set(self.options.modules), self._forgetting
        if isinstance(module, Unit):
            own = self.options.layers is None or self.role in module.marks
            self._forgetting = Forgetting(module, lambda operator: bool(modules & {*operator.modules})) if own else None
        forgetting = self._forgetting
        again = forgetting is not None and module.label in modules
        self._forgetting = None if again else forgetting
        try:
            fragment = recompute(module, inner) if again else inner(module)
        finally:
            self._forgetting = before
        if forgetting is None:
            return fragment
        if isinstance(module, Operator):
            forgetting.note(module, fragment)
        elif isinstance(module, CompositeModule):
            forgetting.discard(module, fragment)
        return fragment

    def closed_forms(self, setting) -> Iterable[ClosedForm]:  # type: ignore[no-untyped-def]
        if setting.t == 1 and self.options.modules == ("core_attn",):
            yield ClosedForm(
                "activations_per_layer", 34 * setting.s * setting.b * setting.h, "section 5, without tensor parallelism"
            )
