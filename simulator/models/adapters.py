"""Low-rank adapters (LoRA): inserts adapters into the modules of a model and freezes all other weights.

A linear layer y = x W with an adapter computes y = x W + (x A) B, with A [in, rank] and B [rank, out]. Frozen weights
have no gradients, no gradient buffers and no optimizer states, and frozen linear layers save no input for the backward
pass. Gradients of activations are computed down to the lowest layer with an adapter. Frozen matrices may be stored in
few bits (QLoRA): then a kernel makes a copy of one of them in the format of the computation before each pass.

How an adapter computes says `AdapterKernels`. Where linear layers are fused, queries, keys and values share one A, and
so do gate and up, and the scale alpha / rank is a factor of the GEMM with B (Megatron: NeMo, Megatron-Bridge). PEFT has
an A for each, and every step of

    out = (x W + scale B(A(dropout(x in fp32)))) in 16 bits

is a kernel of its own, each way and again where layers are recomputed, in fp32 where the adapters are (`Linear.forward`
in peft/tuners/lora/layer.py, `cast_adapter_dtype` in peft/tuners/tuners_utils.py, both of PEFT 0.12 to 0.21).

References: Hu et al. 2021, arXiv 2106.09685, section 4; Dettmers et al. 2023 (QLoRA), arXiv 2305.14314.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

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
from meshcast.simulator.ir.operators import Cast, Elementwise, Head, Linear, PromotedSum, Sum
from meshcast.simulator.ir.ops import STORED_FORMATS
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.transformer import Transformer

WholeTarget = Literal["attn_qkv", "attn_proj", "mlp_up", "mlp_down"]
"""The linear layers that can have an adapter."""

Part = Literal["attn_q", "attn_k", "attn_v"]
"""Parts of `attn_qkv` that can have an adapter alone."""

Target = Literal[WholeTarget, Part]

TARGETS: tuple[WholeTarget, ...] = get_args(WholeTarget)

PARTS: dict[str, str] = {"attn_q": "q", "attn_k": "k", "attn_v": "v"}
"""The output of a linear layer for queries, keys and values that a part is, by its name."""

MODULES: dict[str, Target] = {
    **dict.fromkeys(("qkv_proj", "query_key_value", "c_attn", "w_pack", "wqkv", "linear_qkv"), "attn_qkv"),
    **dict.fromkeys(("q_proj", "linear_q"), "attn_q"),
    **dict.fromkeys(("k_proj", "linear_k"), "attn_k"),
    **dict.fromkeys(("v_proj", "linear_v"), "attn_v"),
    **dict.fromkeys(("o_proj", "out_proj", "dense", "attn.c_proj", "wo", "linear_proj"), "attn_proj"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "dense_h_to_4h", "w1", "w2", "w3", "fc1"), "mlp_up"),
    **dict.fromkeys(("c_fc", "linear_fc1", "linear_fc1_up", "linear_fc1_gate"), "mlp_up"),
    **dict.fromkeys(("down_proj", "dense_4h_to_h", "fc2", "c_proj", "linear_fc2"), "mlp_down"),
}
"""Linear layers with adapters by the names of modules, in models of transformers and in Megatron-Core."""


def name_targets(words: Iterable[str]) -> list[str]:
    """Returns linear layers as a job names them, in place of modules of these names.

    Beside a w3, as in InternLM2, w2 leads back from the wide layers; without one, as in the first Qwen, it leads up.
    """
    words = list(words)
    targets = {**MODULES, "w2": "mlp_down"} if "w3" in words else MODULES
    return [targets.get(word, word) for word in words]


def join_targets(targets: Iterable[str]) -> tuple[Target, ...]:
    """Returns targets, or modules, without repetition; in place of all parts of a linear layer the whole one."""
    words = tuple(dict.fromkeys(name_targets(targets)))
    if "attn_qkv" in words or {*words} >= PARTS.keys():
        words = ("attn_qkv", *(word for word in words if word not in PARTS and word != "attn_qkv"))
    return words  # type: ignore[return-value]


StoredName = Literal["fp8", "int8", "int4", "nf4", "nf4-double"]
"""Names of `STORED_FORMATS`."""

LINEARS: dict[tuple[type[CompositeModule], str], WholeTarget] = {
    (SelfAttention, "qkv"): "attn_qkv",
    (SelfAttention, "proj"): "attn_proj",
    (MLP, "up"): "mlp_up",
    (MLP, "down"): "mlp_down",
}
"""Target that each linear layer is, by its composite module and the last part of its name."""

PLAIN_LAUNCHES = 0.37
"""Time of the host for a linear layer of PyTorch, as those of adapters are, over that for one of Transformer Engine: 33
of 91 us on a GH200, 37 of 100 us on a GB200 (NVIDIA/TransformerEngine, issue 2053)."""


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
    """Conversions, dropout, the scale and the sum are kernels of their own."""


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
    targets: tuple[Target, ...] = TARGETS
    dropout: bool = False
    kernels: AdapterKernels = FUSED
    stored: str = ""

    def check(self, model: Model) -> None:
        """Raises PlanError if the model does not have one of the targets."""
        if model.mla and {"attn_qkv", *PARTS} & {*self.targets}:
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
        ups, separate = 2 if model.gated else 1, self.kernels.separate
        outputs = {"attn_q": model.query_width, "attn_k": model.key_width, "attn_v": model.value_width}
        parts = [width for part, width in outputs.items() if self._adapts(part)]
        widths: dict[str, int] = {
            "attn_qkv": (len(parts) if separate else 1) * model.hidden + sum(parts),
            "attn_proj": model.output_width + model.hidden,
            "mlp_up": (ups if separate else 1) * model.hidden + ups * model.dense_ffn,
            "mlp_down": model.dense_ffn + model.hidden,
        }
        return sum(width for target, width in widths.items() if self._adapts(target))

    def _adapts(self, target: str) -> bool:
        """Returns whether a linear layer, or a part of one, has an adapter; one that is fused has one for all parts."""
        words = {*self.targets} & {"attn_qkv", *PARTS}
        if target in PARTS:
            return "attn_qkv" in words or target in words or (bool(words) and not self.kernels.separate)
        return bool(words) if target == "attn_qkv" else target in self.targets

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
            operator = self._freeze(module)
            target = LINEARS.get((inside, module.name.rpartition(".")[2]), "")
            if self._adapts(target) and isinstance(operator, Linear):
                found += self._with_adapter(operator, plain.get(operator.ins[0].name, operator.ins[0]))
            else:
                found.append(operator)
        return found

    def _freeze(self, operator: Operator) -> Operator:
        """Returns an operator whose weights are not trained, with matrices as they are stored."""
        if self.stored and isinstance(operator, Linear) and not isinstance(operator, Head):
            return replace(operator, frozen=True, stored=STORED_FORMATS[self.stored])
        return replace(operator, frozen=True)

    def _with_adapter(self, linear: Linear, x: Tensor) -> list[Module]:
        """Returns a linear layer and the modules of its adapters, which read the input `x` as it is before any cast."""
        without = {name for part, name in PARTS.items() if not self._adapts(part)}
        plain = tuple(out if out.name in without else replace(out, name=f"{out.name}.plain") for out in linear.outs)
        modules: list[Module] = [replace(linear, outs=plain)]
        if not self.kernels.separate:
            return [*modules, *self._adapter(f"{linear.name}.lora", x, plain, linear.outs, linear.grad_dtype)]
        pairs = [(before, out) for before, out in zip(plain, linear.outs, strict=True) if before is not out]
        for before, out in pairs:
            modules += self._adapter(f"{out.name}.lora", x, (before,), (out,), linear.grad_dtype)
        return modules

    def _adapter(
        self, name: str, x: Tensor, plain: tuple[Tensor, ...], outs: tuple[Tensor, ...], grad_dtype: str
    ) -> list[Module]:
        """Returns the modules of an adapter. plain, outs: outputs of the linear layer without and with it."""
        kernels = self.kernels
        launches = 1.0 if kernels.eager else PLAIN_LAUNCHES
        dtype = kernels.products or x.dtype
        ahead, source = self._read_input(name, x, dtype)
        rows = {dim: size for dim, size in x.dims.items() if outs[0].has(dim)}
        inner = {dim: size for dim, size in x.dims.items() if not outs[0].has(dim)}
        latent = Tensor(f"{name}.x", {**rows, "rank": Dim(self.rank)}, dtype)
        a = Tensor(f"{name}.a", {**inner, "rank": Dim(self.rank)}, dtype)
        added = tuple(replace(out, name=f"{out.name}.lora", dtype=dtype) for out in outs)
        columns = [{dim: size for dim, size in out.dims.items() if dim not in rows} for out in added]
        b = tuple(Tensor(f"{name}.b{i}", {"rank": Dim(self.rank), **wide}, dtype) for i, wide in enumerate(columns))
        return [
            *ahead,
            Linear(f"{name}.a", (source,), (latent,), (a,), grad_dtype, launches=launches),
            Linear(f"{name}.b", (latent,), added, b, grad_dtype, launches=launches),
            *self._add(name, plain, added, outs),
        ]

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

        if self.kernels.eager and (self.kernels.weights or x.dtype) != x.dtype:
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
            scaled = replace(low, name=f"{low.name}.scaled")
            modules.append(Elementwise(f"{name}.scale", (low,), (scaled,), (), "scale", frozen=True))
            if low.dtype == out.dtype:
                modules.append(Sum(f"{name}.add", (before, scaled), (out,), frozen=True))
                continue
            wide = replace(out, name=f"{out.name}.wide", dtype=low.dtype)
            modules.append(PromotedSum(f"{name}.add", (before, scaled), (wide,), frozen=True))
            modules.append(Elementwise(f"{name}.round", (wide,), (out,), (), "convert", frozen=True))
        return modules


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
