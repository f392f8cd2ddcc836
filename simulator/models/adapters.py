"""Low-rank adapters beside frozen weights (LoRA): what a block becomes when only they are trained.

A linear y = x W keeps its weight as it is, and gets a small one beside it: y = x W + (x A) B, with A [in, rank] and
B [rank, out]. The factor in front of B is one of the product, and takes no kernel. Everything else of the model is
frozen: it has no weight gradients, so neither buffers for them nor optimizer states, and its linears keep no input for
the backward pass; gradients still pass through it, down to the lowest adapter.

Queries, keys and values share one A, and so do gate and up: a linear has one adapter, as in Megatron's fused linears
(NeMo, Megatron Bridge). Hugging Face PEFT, whose linears are apart, has an A for each.

References: Hu et al. 2021, arXiv 2106.09685, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

from hardware.errors import PlanError
from simulator.ir.layout import Dim, Tensor
from simulator.ir.modules import LOWEST, MLP, CompositeModule, Layer, Module, Operator, SelfAttention, Unit
from simulator.ir.operators import Cast, Linear, Sum
from simulator.models.model import Model

Target = Literal["attn_qkv", "attn_proj", "mlp_up", "mlp_down"]
"""The linears that can have an adapter."""

TARGETS: tuple[Target, ...] = get_args(Target)

LINEARS: dict[tuple[type[CompositeModule], str], Target] = {
    (SelfAttention, "qkv"): "attn_qkv",
    (SelfAttention, "proj"): "attn_proj",
    (MLP, "up"): "mlp_up",
    (MLP, "down"): "mlp_down",
}
"""Their words by where they stand, and the last part of their name."""


@dataclass(frozen=True)
class Adapters:
    """Adapters of `rank` at the linears that `targets` names."""

    rank: int
    targets: tuple[Target, ...] = TARGETS

    def check(self, model: Model) -> None:
        """Raises PlanError where a target is none of the model's linears."""
        if model.mla and "attn_qkv" in self.targets:
            rule = f"latent attention, as {model.name} has it, has no linear that makes queries, keys and values"
            raise PlanError("train.targets", rule, "Leave out attn_qkv", list(self.targets))
        if model.moe and {"mlp_up", "mlp_down"} & {*self.targets}:
            rule = f"{model.name} has experts, and adapters of routed experts are not described"
            raise PlanError("train.targets", rule, "Keep attn_qkv and attn_proj", list(self.targets))

    def parameters(self, model: Model) -> int:
        """Elements of all A and B."""
        ups = (2 if model.gated else 1) * model.dense_ffn
        widths: dict[Target, int] = {
            "attn_qkv": model.hidden + model.query_width + model.key_width + model.value_width,
            "attn_proj": model.output_width + model.hidden,
            "mlp_up": model.hidden + ups,
            "mlp_down": model.dense_ffn + model.hidden,
        }
        layers = len(model.every_layer) + model.mtp
        return self.rank * layers * sum(widths[target] for target in self.targets)

    def on(self, modules: Sequence[Module], inside: type[CompositeModule] = CompositeModule) -> list[Module]:
        """The sites of a unit with every leaf frozen, and an adapter beside the linears that get one."""
        found: list[Module] = []
        plain: Mapping[str, Tensor] = {s.outs[0].name: s.ins[0] for s in modules if isinstance(s, Cast)}
        for module in modules:
            if isinstance(module, CompositeModule):
                found.append(replace(module, children=tuple(self.on(module.children, type(module)))))
                continue
            assert isinstance(module, Operator)
            operator = replace(module, frozen=True)
            if LINEARS.get((inside, module.name.rpartition(".")[2])) in self.targets and isinstance(operator, Linear):
                found += self._beside(operator, plain.get(operator.ins[0].name, operator.ins[0]))
            else:
                found.append(operator)
        return found

    def _beside(self, linear: Linear, x: Tensor) -> list[Module]:
        """A linear and its adapter, which reads the input `x` in the format that it had before any cast."""
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
            Linear(f"{name}.a", (x,), (down,), (a,), linear.grad_dtype),
            Linear(f"{name}.b", (down,), added, b, linear.grad_dtype),
            Sum(f"{name}.add", (*plain, *added), linear.outs, frozen=True),
        ]


def mark_lowest(units: Sequence[Unit]) -> list[Unit]:
    """The units of a stage whose layers behind an embedding know that nothing is trained below them."""
    found = list(units[:1])
    for before, unit in pairwise(units):
        if isinstance(unit, Layer) and before.residual_in is None:
            found.append(replace(unit, count=1, marks=unit.marks | {LOWEST}))
            unit = replace(unit, count=unit.count - 1)
        found += [unit] if unit.count else []
    return found
