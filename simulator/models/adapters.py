"""Low-rank adapters (LoRA): inserts adapters into the modules of a model and freezes all other weights.

A linear layer y = x W with an adapter computes y = x W + (x A) B, with A [in, rank] and B [rank, out]. Frozen weights
have no gradients, no gradient buffers and no optimizer states, and frozen linear layers save no input for the backward
pass. Gradients of activations are computed down to the lowest layer with an adapter. Frozen matrices may be stored in
few bits (QLoRA): then a kernel writes a copy of a matrix in the format of the computation before each pass.

How an adapter computes says `AdapterKernels`. Where linear layers are fused, queries, keys and values share A, and
so do gate and up, and the scale alpha / rank is a factor of the GEMM with B (Megatron: NeMo, Megatron-Bridge). PEFT has
an A for each, and every step of

    out = (x W + scale B(A(dropout(x in fp32)))) in 16 bits

is a separate kernel, each way and again where layers are recomputed, in fp32 where the adapters are (`Linear.forward`
in peft/tuners/lora/layer.py, `cast_adapter_dtype` in peft/tuners/tuners_utils.py, both of PEFT 0.12 to 0.21). Over
matrices in few bits autocast alone converts, and the result of a matrix of 4 bits is copied before the sum
(`requires_conversion` and `clone` in peft/tuners/lora/bnb.py, of PEFT 0.5 to 0.21).

References: Hu et al. 2021, arXiv 2106.09685, section 4; Dettmers et al. 2023 (QLoRA), arXiv 2305.14314.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import BaseModel, ConfigDict
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.mamba_operators import Mamba
from meshcast.simulator.ir.modules import (
    LOWEST,
    MLP,
    CompositeModule,
    Layer,
    Module,
    MoE,
    Operator,
    Projector,
    SelfAttention,
    SharedExperts,
    Unit,
)
from meshcast.simulator.ir.moe_operators import ExpertLinear, move_to_experts
from meshcast.simulator.ir.operators import Cast, Elementwise, Head, Linear, PromotedSum, Sum
from meshcast.simulator.ir.ops import STORED_FORMATS
from meshcast.simulator.models.adapter_targets import PARTS, LinearShape, Target, list_all_linears
from meshcast.simulator.models.model import Model

StoredName = Literal["fp8", "int8", "int4", "nf4", "nf4-double"]
"""Names of `STORED_FORMATS`."""

LINEARS: dict[type[CompositeModule], dict[str, Target]] = {
    SelfAttention: {
        **{"qkv": "attn_qkv", "proj": "attn_proj", "q": "attn_q", "q.latent.down": "attn_q_down", "q.up": "attn_q_up"},
        **{"kv.latent.down": "attn_kv_down", "kv.up": "attn_kv_up"},
    },
    Mamba: {"in_proj": "mixer_in", "out_proj": "mixer_out"},
    MLP: {"up": "mlp_up", "down": "mlp_down"},
    SharedExperts: {"shared.up": "shared_up", "shared.down": "shared_down"},
    MoE: {
        **{"expert.up": "expert_up", "expert.down": "expert_down", "router": "router", "shared.gate": "shared_gate"},
    },
}
"""Target that each linear layer is, by its composite module and its name, without a prefix."""


PLAIN_LAUNCHES = 0.37
"""Time of the host for a linear layer of PyTorch, as those of adapters are, over that for a layer of Transformer
Engine: 33 of 91 us on a GH200, 37 of 100 us on a GB200 (NVIDIA/TransformerEngine, issue 2053)."""


COPIED = ("nf4", "nf4-double")
"""Formats of frozen matrices whose results PEFT copies before it adds to them."""


class AdapterKernels(BaseModel):
    """How adapters are kept and computed."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    weights: Literal["fp32", ""] = ""
    """Format of their weights, gradients and states, where they are trained; empty: that of other weights. PEFT
    converts adapters to fp32 (`autocast_adapter_dtype`)."""
    products: Literal["fp32", ""] = ""
    """Format of their products; empty: that of the computation, also under autocast, which converts its operands."""
    separate: bool = False
    """Queries, keys, values, gate and up have an adapter each; otherwise those of one GEMM share one."""
    eager: bool = False
    """Conversions, dropout, the scale and the sum are separate kernels."""
    units: bool = False
    """Each matrix is a unit of FSDP1 of its own, inside of that of its layer (`fsdp_auto_wrap_policy` in
    peft/utils/other.py, which the Trainer of Transformers sets)."""
    of_each_expert: bool = False
    """Every routed expert has an adapter, as in PEFT; otherwise those of a rank share one, over all of its tokens
    (`share_expert_adapters` of Megatron-Bridge's LoRA, src/megatron/bridge/peft/lora.py @067f987df)."""


FUSED = AdapterKernels()
"""Adapters of fused linear layers, in the format of the other weights."""


@dataclass(frozen=True)
class Adapters:
    """Adapters of rank `rank` on the linear layers that `targets` names.

    dropout: whether their inputs have dropout.
    kernels: how they are computed.
    stored: format in which frozen matrices are stored, of `STORED_FORMATS`; empty: that of the computation.
    """

    rank: int
    targets: tuple[str, ...]
    dropout: bool = False
    kernels: AdapterKernels = FUSED
    stored: str = ""

    def check(self, model: Model) -> None:
        """Raises PlanError if the model has layers whose adapters are not described."""
        if model.cross_attention:
            rule = f"{model.name} is an encoder with a decoder, and adapters of these are not supported"
            raise PlanError("train.mode", rule, "Use full", "lora")
        parts = {
            "attention to compressed entries": model.compressed,
            "attention to blocks of keys": model.blocks,
            "a mixture of attention heads": model.head_experts,
            "blocks that layers share": model.shared_block,
            "scores with a bias by distance": model.distance_profiles,
        }
        for name, part in parts.items():
            if part:
                rule = f"{model.name} has {name}, and adapters of it are not supported"
                raise PlanError("train.mode", rule, "Use full", "lora")
        if model.linear_attention:
            rule = f"{model.name} has layers with linear attention, and adapters of these are not supported"
            raise PlanError("train.mode", rule, "Use full", "lora")

    def parameters(self, model: Model) -> int:
        """Counts the parameters of all adapters; an adapter that the experts of a rank share counts once."""
        return sum(
            count * self._count(linear) * (linear.experts if linear.experts and self.kernels.of_each_expert else 1)
            for count, linear in list_all_linears(model)
        )

    def active_parameters(self, model: Model) -> float:
        """Counts the parameters of adapters that a token meets: of experts once for each of its experts."""
        choices = model.moe.top_k * (model.moe.capacity or 1.0) if model.moe else 1.0
        counted = list_all_linears(model)
        return sum(count * self._count(linear) * (choices if linear.experts else 1.0) for count, linear in counted)

    def _count(self, linear: LinearShape) -> int:
        """Counts the parameters of the adapters of a linear layer, of experts those of a single expert."""
        if not self._adapts(linear.target):
            return 0
        outs, separate = list(linear.outs), self.kernels.separate and not linear.whole
        if linear.target == "attn_qkv" and separate:
            names = (*PARTS, *("attn_qkv",) * (len(outs) - len(PARTS)))  # beside them a gate
            outs = [width for part, width in zip(names, outs, strict=True) if self._adapts_part(part)]
        return self.rank * ((len(outs) if separate else 1) * linear.inner + sum(outs))

    def _adapts(self, target: str) -> bool:
        """Returns whether a linear layer has an adapter, of all of its outputs or of some."""
        return target in self.targets or (target == "attn_qkv" and not PARTS.keys().isdisjoint(self.targets))

    def _adapts_part(self, part: str) -> bool:
        """Returns whether an output of the layer for queries, keys and values has a separate adapter."""
        return part in self.targets or "attn_qkv" in self.targets

    def insert_into(self, modules: Sequence[Module], inside: type[CompositeModule] = CompositeModule) -> list[Module]:
        """Freezes every operator of a unit's modules and adds adapters to the linear layers that `targets` names.

        inside: type of the composite module that holds `modules`.
        """
        adapted: list[Module] = []
        plain: Mapping[str, Tensor] = {s.outs[0].name: s.ins[0] for s in modules if isinstance(s, Cast)}
        for module in modules:
            if isinstance(module, CompositeModule):
                adapted.append(replace(module, children=tuple(self.insert_into(module.children, type(module)))))
                continue
            assert isinstance(module, Operator)
            operator = self._freeze(module)
            target = _find_target(inside, module.name)
            if isinstance(operator, Linear) and target is not None and self._adapts(target):
                adapted += self._with_adapter(operator, target, plain.get(operator.ins[0].name, operator.ins[0]))
            else:
                adapted.append(operator)
        return adapted

    def _freeze(self, operator: Operator) -> Operator:
        """Returns an operator whose weights are not trained, with matrices as they are stored."""
        if self.stored and isinstance(operator, Linear) and not isinstance(operator, Head):
            return replace(operator, frozen=True, stored=STORED_FORMATS[self.stored])
        return replace(operator, frozen=True)

    def _with_adapter(self, linear: Linear, target: Target, x: Tensor) -> list[Module]:
        """Returns a linear layer and its adapters, which read the input `x` as it is before any cast."""
        separate = self.kernels.separate and not linear.whole
        without: set[str] = set()
        if target == "attn_qkv" and separate:
            parts = {name: part for part, name in PARTS.items()}
            names = [out.name.rpartition(".")[2] for out in linear.outs]
            without = {name for name in names if not self._adapts_part(parts.get(name, target))}
        outs = [(out, out.name.rpartition(".")[2] not in without) for out in linear.outs]
        plain = tuple(replace(out, name=f"{out.name}.plain") if adapted else out for out, adapted in outs)
        modules: list[Module] = [replace(linear, outs=plain)]
        if not separate:
            return [*modules, *self._adapter(f"{linear.name}.lora", linear, x, plain, linear.outs)]
        for before, (out, adapted) in zip(plain, outs, strict=True):
            modules += self._adapter(f"{out.name}.lora", linear, x, (before,), (out,)) if adapted else []
        return modules

    def _adapter(
        self, name: str, linear: Linear, x: Tensor, plain: tuple[Tensor, ...], outs: tuple[Tensor, ...]
    ) -> list[Module]:
        """Returns the modules of an adapter. plain, outs: outputs of the linear layer without and with it."""
        ahead, source = self._read_input(name, x, self.kernels.products or x.dtype)
        added = tuple(replace(out, name=f"{out.name}.lora", dtype=self.kernels.products or x.dtype) for out in outs)
        modules = [*ahead, *self._multiply(name, linear, source, added), *self._add(name, plain, added, outs)]
        return [move_to_experts(module) for module in modules] if isinstance(linear, ExpertLinear) else modules

    def _multiply(self, name: str, linear: Linear, x: Tensor, outs: tuple[Tensor, ...]) -> list[Module]:
        """Returns the products of an input with A and then with B. outs: results of the latter."""
        is_grouped = isinstance(linear, ExpertLinear) and self.kernels.of_each_expert
        experts = {"e": linear.weights[0].dims["e"]} if is_grouped else {}
        rows = {dim: size for dim, size in x.dims.items() if outs[0].has(dim)}
        inner = {dim: size for dim, size in x.dims.items() if not outs[0].has(dim)}
        narrow, dtype = {"rank": Dim(self.rank)}, outs[0].dtype
        columns = [{dim: size for dim, size in out.dims.items() if dim not in rows} for out in outs]
        latent = Tensor(f"{name}.x", rows | narrow, dtype)
        a = Tensor(f"{name}.a", experts | inner | narrow, dtype)
        b = tuple(Tensor(f"{name}.b{i}", experts | narrow | wide, dtype) for i, wide in enumerate(columns))
        kind = ExpertLinear if is_grouped else Linear
        products = (
            kind(f"{name}.a", (x,), (latent,), (a,), linear.grad_dtype),
            kind(f"{name}.b", (latent,), outs, b, linear.grad_dtype),
        )
        launches = 1.0 if self.kernels.eager else PLAIN_LAUNCHES
        return [replace(product, launches=launches, modules=linear.modules) for product in products]

    def _read_input(self, name: str, x: Tensor, dtype: str) -> tuple[list[Module], Tensor]:
        """Returns the kernels between the input of a linear layer and the products of its adapter, and what they make.

        dtype: format of the products.
        """
        modules: list[Module] = []

        def add(what: str, output_dtype: str) -> None:
            nonlocal x
            output = replace(x, name=f"{name}.{what}{len(modules)}.out", dtype=output_dtype, gradient_dtype="")
            kernel = f"{name}.{what}{len(modules)}"
            modules.append(Elementwise(kernel, (x,), (output,), (), what, what == "dropout", frozen=True))
            x = output

        kept_by_autocast = self.stored and not self.kernels.products
        if self.kernels.eager and (self.kernels.weights or x.dtype) != x.dtype and not kept_by_autocast:
            add("convert", self.kernels.weights)
        if self.dropout:
            add("dropout", x.dtype)
        if self.kernels.eager and x.dtype != dtype:
            add("convert", dtype)
        return modules, x

    def _add(
        self, name: str, plain: tuple[Tensor, ...], added: tuple[Tensor, ...], outs: tuple[Tensor, ...]
    ) -> list[Module]:
        """Returns the kernels that scale the outputs of an adapter and add them to those of its linear layer."""
        if not self.kernels.eager:
            return [Sum(f"{name}.add", (*plain, *added), outs, frozen=True, launches=PLAIN_LAUNCHES)]
        modules: list[Module] = []
        for before, low, out in zip(plain, added, outs, strict=True):
            if self.stored in COPIED:
                before, copied = replace(before, name=f"{before.name}.copied"), before
                modules.append(Sum(f"{name}.copy", (copied,), (before,), frozen=True))
            scaled = replace(low, name=f"{low.name}.scaled")
            modules.append(Elementwise(f"{name}.scale", (low,), (scaled,), (), "scale", frozen=True))
            if low.dtype == out.dtype:
                modules.append(Sum(f"{name}.add", (before, scaled), (out,), frozen=True))
                continue
            wide = replace(out, name=f"{out.name}.wide", dtype=low.dtype)
            modules.append(PromotedSum(f"{name}.add", (before, scaled), (wide,), frozen=True))
            modules.append(Elementwise(f"{name}.round", (wide,), (out,), (), "convert", frozen=True))
        return modules


def _find_target(inside: type[CompositeModule], name: str) -> Target | None:
    """Returns what a linear layer is to adapters, by its composite module and its name; None: it can have none."""
    targets = LINEARS.get(inside, {})
    return next((target for end, target in targets.items() if name == end or name.endswith(f".{end}")), None)


def freeze(modules: Sequence[Module]) -> list[Module]:
    """Freezes every operator of a unit's modules but those of projectors."""
    frozen: list[Module] = []
    for module in modules:
        if isinstance(module, CompositeModule) and not isinstance(module, Projector):
            module = replace(module, children=tuple(freeze(module.children)))
        frozen.append(replace(module, frozen=True) if isinstance(module, Operator) else module)
    return frozen


def mark_lowest(units: Sequence[Unit]) -> list[Unit]:
    """Marks the first layer after an embedding as `LOWEST`, since nothing below it is trained; returns the units."""
    marked = list(units[:1])
    for before, unit in pairwise(units):
        if isinstance(unit, Layer) and before.residual_in is None:
            marked.append(replace(unit, count=1, marks=unit.marks | {LOWEST}))
            unit = replace(unit, count=unit.count - 1)
        marked += [unit] if unit.count else []
    return marked
