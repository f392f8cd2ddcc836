"""Low-rank adapters (LoRA): inserts adapters into the modules of a model and freezes all other weights.

A linear layer y = x W with an adapter computes y = x W + (x A) B, with A [in, rank] and B [rank, out]. The scale
alpha / rank is a factor of the GEMM with B, without a kernel of its own. Frozen weights have no gradients, no gradient
buffers and no optimizer states, and frozen linear layers save no input for the backward pass. Gradients of activations
are computed down to the lowest layer with an adapter.

Queries, keys and values share one A, and so do gate and up: a fused linear layer has one adapter, as in Megatron (NeMo,
Megatron Bridge). Hugging Face PEFT, whose linear layers are not fused, has an A for each.

References: Hu et al. 2021, arXiv 2106.09685, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.modules import (
    LOWEST,
    MLP,
    CompositeModule,
    Layer,
    Module,
    Operator,
    Projector,
    SelfAttention,
    Unit,
)
from meshcast.simulator.ir.operators import Cast, Linear, Sum
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.transformer import Transformer

Target = Literal["attn_qkv", "attn_proj", "mlp_up", "mlp_down"]
"""The linear layers that can have an adapter."""

TARGETS: tuple[Target, ...] = get_args(Target)

LINEARS: dict[tuple[type[CompositeModule], str], Target] = {
    (SelfAttention, "qkv"): "attn_qkv",
    (SelfAttention, "proj"): "attn_proj",
    (MLP, "up"): "mlp_up",
    (MLP, "down"): "mlp_down",
}
"""Target that each linear layer is, by its composite module and the last part of its name."""

PLAIN_LAUNCHES = 0.37
"""Time of the host for a linear layer of PyTorch, as those of adapters are, over that for one of Transformer Engine: 33
of 91 us on a GH200, 37 of 100 us on a GB200 (NVIDIA/TransformerEngine, issue 2053)."""


@dataclass(frozen=True)
class Adapters:
    """Adapters of rank `rank` on the linear layers that `targets` names."""

    rank: int
    targets: tuple[Target, ...] = TARGETS

    def check(self, model: Model) -> None:
        """Raises PlanError if the model does not have one of the targets."""
        if model.mla and "attn_qkv" in self.targets:
            rule = f"{model.name} has latent attention, which has no linear layer for queries, keys and values"
            raise PlanError("train.targets", rule, "Leave out attn_qkv", list(self.targets))
        if model.ssm:
            rule = f"{model.name} has state-space layers, and adapters of these are not supported"
            raise PlanError("train.mode", rule, "Use full", "lora")
        if model.cross_attention:
            rule = f"{model.name} is an encoder with a decoder, and adapters of these are not supported"
            raise PlanError("train.mode", rule, "Use full", "lora")
        if model.linear_attention:
            rule = f"{model.name} has layers with linear attention, and adapters of these are not supported"
            raise PlanError("train.mode", rule, "Use full", "lora")
        if model.moe and {"mlp_up", "mlp_down"} & {*self.targets}:
            rule = f"{model.name} has experts, and adapters of routed experts are not supported"
            raise PlanError("train.targets", rule, "Keep attn_qkv and attn_proj", list(self.targets))

    def parameters(self, model: Model) -> int:
        """Counts the parameters of all adapters."""
        layers = model.layers + model.mtp
        every = [(model, layers), *((branch, branch.layers) for branch in model.branches)]
        return self.rank * sum(count * self._layer_widths(shape) for shape, count in every)

    def _layer_widths(self, model: Transformer) -> int:
        """Widths that the adapters of a layer lead from and to, together."""
        ups = (2 if model.gated else 1) * model.dense_ffn
        widths: dict[Target, int] = {
            "attn_qkv": model.hidden + model.query_width + model.key_width + model.value_width,
            "attn_proj": model.output_width + model.hidden,
            "mlp_up": model.hidden + ups,
            "mlp_down": model.dense_ffn + model.hidden,
        }
        return sum(widths[target] for target in self.targets)

    def insert_into(self, modules: Sequence[Module], inside: type[CompositeModule] = CompositeModule) -> list[Module]:
        """Freezes every operator of a unit's modules and adds adapters to the linear layers that `targets` names.

        inside: type of the composite module that holds `modules`.
        """
        found: list[Module] = []
        plain: Mapping[str, Tensor] = {s.outs[0].name: s.ins[0] for s in modules if isinstance(s, Cast)}
        for module in modules:
            if isinstance(module, CompositeModule):
                found.append(replace(module, children=tuple(self.insert_into(module.children, type(module)))))
                continue
            assert isinstance(module, Operator)
            operator = replace(module, frozen=True)
            if LINEARS.get((inside, module.name.rpartition(".")[2])) in self.targets and isinstance(operator, Linear):
                found += self._with_adapter(operator, plain.get(operator.ins[0].name, operator.ins[0]))
            else:
                found.append(operator)
        return found

    def _with_adapter(self, linear: Linear, x: Tensor) -> list[Module]:
        """Returns a linear layer and the modules of its adapter, which reads the input `x` as it is before any cast."""
        name, rank, first = f"{linear.name}.lora", Dim(self.rank), linear.outs[0]
        rows = {dim: size for dim, size in x.dims.items() if first.has(dim)}
        inner = {dim: size for dim, size in x.dims.items() if not first.has(dim)}
        down = Tensor(f"{name}.x", {**rows, "rank": rank}, x.dtype)
        a = Tensor(f"{name}.a", {**inner, "rank": rank}, x.dtype)
        plain = tuple(replace(out, name=f"{out.name}.plain") for out in linear.outs)
        added = tuple(replace(out, name=f"{out.name}.lora") for out in linear.outs)
        columns = [{dim: size for dim, size in out.dims.items() if dim not in rows} for out in added]
        b = tuple(Tensor(f"{name}.b{i}", {"rank": rank, **wide}, x.dtype) for i, wide in enumerate(columns))
        return [
            replace(linear, outs=plain),
            Linear(f"{name}.a", (x,), (down,), (a,), linear.grad_dtype, launches=PLAIN_LAUNCHES),
            Linear(f"{name}.b", (down,), added, b, linear.grad_dtype, launches=PLAIN_LAUNCHES),
            Sum(f"{name}.add", (*plain, *added), linear.outs, frozen=True, launches=PLAIN_LAUNCHES),
        ]


def freeze(modules: Sequence[Module]) -> list[Module]:
    """Freezes every operator of a unit's modules but those of projectors."""
    found: list[Module] = []
    for module in modules:
        if isinstance(module, CompositeModule) and not isinstance(module, Projector):
            module = replace(module, children=tuple(freeze(module.children)))
        found.append(replace(module, frozen=True) if isinstance(module, Operator) else module)
    return found


def mark_lowest(units: Sequence[Unit]) -> list[Unit]:
    """Marks the first layer after an embedding as `LOWEST`, since nothing below it is trained; returns the units."""
    found = list(units[:1])
    for before, unit in pairwise(units):
        if isinstance(unit, Layer) and before.residual_in is None:
            found.append(replace(unit, count=1, marks=unit.marks | {LOWEST}))
            unit = replace(unit, count=unit.count - 1)
        found += [unit] if unit.count else []
    return found
