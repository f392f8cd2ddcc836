"""ZeRO-Offload and vDNN: optimizer states or activations are kept in host memory and copied while the GPU computes.

Activations: the tensors that a layer saves for its backward pass are copied to the host while the next layer computes,
and back to the GPU while the next layer's backward pass runs. So the GPU holds the saved activations of two layers, not
of all. Those of the layer before the loss stay, since its backward pass follows at once. The output of a layer reaches
the next only after the activations of the layer before have been copied out.

    compute      F1    F2    F3    ...  B3    B2    B1           2 S bytes per layer and micro-batch, S the saved
    memory-out         out1  out2                                activations of a layer; hidden while S / (bytes/s of
    memory-in                           in2   in1                the link to the host) is less than the layer's pass

With `modules` the tensors that some modules of a layer save are copied, each module's once it has computed, and back
once the backward pass of the same module of the layer behind has ended. A tensor that another module saves, too, stays
on the GPU unless that is offloaded as well. With `copies` c the first N - [N (1 - c)] of the N modules of a pass are.

    compute      .. core proj .. norm2 up act down    norm1 ..    d-down .. d-norm2 d-proj d-core ..   d-down .. d-norm2
    memory-out           core    proj       norm2
    memory-in                                                                norm2 of the layer before   core of this

Not modelled of modules: in a stage without the loss the last layer's are copied back as its backward pass begins, not
during that of the micro-batch before; stages that offload fewer bytes (`delta_offload_bytes_across_pp_ranks`).

Optimizer: master weights and moments are kept in host memory, and CPUs update them: gradients are copied to the host at
the end of the step, updated weights back to the GPU. The GPU keeps 2 + 4 of 18 bytes per parameter (bf16 weights, fp32
gradients); per parameter and step 4 bytes are copied out and 2 bytes in. With a `fraction` f that is f of each, and the
GPU updates the other states at the same time. With `overlap` the gradients of a parameter are copied out, and its
weights back, while CPUs update others.

References: Ren et al. 2021 (ZeRO-Offload), arXiv 2101.06840, sections 3 and 4.2, for the optimizer; a share of the
states, and copies by parameter: Megatron-Core optimizer/cpu_offloading/hybrid_optimizer.py; modules:
its pipeline_parallel/fine_grained_activation_offload.py; Rhu et al. 2016 (vDNN), arXiv 1602.08124, section 3, for
activations.
"""

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any, Literal

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field, model_validator
from meshcast.simulator.ir.capabilities import HoldsStates, RequiresRoles
from meshcast.simulator.ir.modules import Module, Stage, Update
from meshcast.simulator.ir.ops import BYTES, Fragment, StageOps
from meshcast.simulator.ir.registry import find_scheme
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
from meshcast.simulator.lowering.offload import offload_activations, update_on_host
from meshcast.simulator.lowering.offload_modules import mark_modules, offload_modules
from meshcast.simulator.schemes.memory.shared.recompute import mark_layers

ModuleWord = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp"
]

EXPERT_WORDS = {"expert_fc1", "moe_act", "fused_group_mlp"}
"""Modules of experts."""

MARK = "offloaded"
"""The mark of units whose activations are offloaded."""


class Offload(MemoryScheme, HoldsStates):
    role = "offload scheme"
    paper = Paper("arXiv:2101.06840", "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021)

    class Options(SchemeOptions):
        what: tuple[Literal["activations", "optimizer"], ...] = Field(default=("activations",), min_length=1)
        """What is offloaded."""
        to: Literal["cpu", "nvme"] = "cpu"
        """Host memory, or the disks behind it."""
        modules: tuple[ModuleWord, ...] = ()
        """Modules of a layer whose saved tensors are offloaded, each once it has computed; none: layers as a whole."""
        copies: float = Field(default=1.0, ge=0, le=1)
        """Share of the modules of a pass, in its order, that are copied; the others stay on the GPU."""
        least_elements: int = Field(default=1_048_576, ge=0)
        """Of modules: 16-bit elements from which on a tensor is offloaded (`min_offloaded_tensor_size`)."""
        layers: int | None = Field(default=None, ge=0)
        """Layers of each stage, from the first on, whose activations are offloaded; null: all."""
        fraction: float = Field(default=1.0, gt=0, le=1)
        """Share of the optimizer states that are offloaded."""
        overlap: bool = False
        """Whether the update is divided by parameters, each of which is copied while CPUs update others."""

        @model_validator(mode="after")
        def _check_modules(self) -> "Offload.Options":
            if self.modules and "activations" not in self.what:
                raise ValueError("modules are of activations: write what: [activations], or leave modules out")
            if "attn_proj" in self.modules and "core_attn" not in self.modules:
                raise ValueError("attention itself keeps the input of attn_proj on the GPU: add core_attn")
            if "fused_group_mlp" in self.modules and {"expert_fc1", "moe_act"} & {*self.modules}:
                raise ValueError("fused_group_mlp has expert_fc1 and moe_act inside: leave these out")
            return self

    @property
    def updates_weights(self) -> bool:  # type: ignore[override]
        """Whether the GPU updates its weights; if not, CPUs update those of the host, and the GPU receives a copy."""
        return not self.offloaded_to("optimizer")

    def check_job(self, job: Any) -> None:
        others = [(entry.use, find_scheme(entry.use)) for entry in job.plan.schemes if entry.use != self.use]
        needing = [(use, kind.required_roles) for use, kind in others if issubclass(kind, RequiresRoles)]
        again = [use for use, roles in needing if RECOMPUTES in roles]
        if again and "activations" in self.options.what:
            rule = f"activations are copied back during the backward pass, and {again[0]} recomputes before it"
            raise PlanError("plan.schemes", rule, "Use another schedule, for example pipeline/1f1b", self.use)

        if self.options.modules and job.model.moe is None and {*self.options.modules} <= EXPERT_WORDS:
            rule, remedy = "no layer has such a module", "Use modules of attention, for example core_attn"
            raise PlanError("plan.schemes.memory/offload.modules", rule, remedy, list(self.options.modules))

    def offloaded_to(self, state: str) -> Mapping[str, float]:
        return {self.options.to: self.options.fraction} if state == "optimizer" and state in self.options.what else {}

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        if "activations" not in self.options.what:
            return inner(stage)
        layers = inf if self.options.layers is None else self.options.layers
        stage = mark_layers(stage, layers, MARK)
        if self.options.modules:
            stage_ops = inner(mark_modules(stage, self.options.modules, MARK))
            least = BYTES["bf16"] * self.options.least_elements
            return offload_modules(stage_ops, self.options.to, least, self.options.copies)
        return offload_activations(inner(stage), MARK, self.options.to)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        if isinstance(module, Update) and "optimizer" in self.options.what:
            options, weights = self.options, BYTES[self.framework.weights]
            parts = {"share": options.fraction, "by_parameter": options.overlap}
            return update_on_host(module, inner(module), weights, options.to, **parts)
        return inner(module)

    def closed_forms(self, setting: LayerSetting) -> Iterable[ClosedForm]:
        s, b, h, a = setting.s, setting.b, setting.h, setting.a
        yield ClosedForm(
            "copied_per_layer", 2 * s * b * h * (34 + 5 * a * s / h), "arXiv 2205.05198, equation 1, out and back"
        )
