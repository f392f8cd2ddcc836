"""Marks the operators that a framework writes as several operations of autograd (`ProcessMemory.composed`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshcast.simulator.ir.decoder_operators import NormOfHeads
from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import CompositeModule, Module, Operator, every_module, replace_children
from meshcast.simulator.ir.moe_operators import (
    ClampedExpertActivation,
    ExpertActivation,
    ExpertCast,
    ExpertLinear,
    KernelsActivation,
    KernelsCast,
    Permute,
    TopK,
    Unpermute,
)
from meshcast.simulator.ir.operators import CAST_APART, Activation, Cast, CoreAttention, Linear, Norm
from meshcast.simulator.ir.saved import LESS_ONE, TURNED, Composition
from meshcast.simulator.models.shapes import Writing
from meshcast.simulator.models.transformer import Transformer


def compose(modules: Sequence[Module], model: Transformer, operations: tuple[Writing, ...]) -> list[Module]:
    """Returns the modules of a unit with the way in which their operators are written.

    operations: those that are several operations of autograd, or in a single kernel.
    """
    parts = _find_parts(modules) if "views" in operations else {}

    def mark(module: Module) -> Module:
        if not isinstance(module, Operator):
            return module
        module, written = _write_kernels(module, model, operations), _find_composition(module, model, operations)
        products = tuple({parts[tensor.name]: None for tensor in module.ins if tensor.name in parts})
        if not (written or products):
            return module
        return replace(module, marks=module.marks | {Composition(written, products)})

    whole = CompositeModule("unit", tuple(modules))
    return list(replace_children(whole, mark).children)


def _find_parts(modules: Iterable[Module]) -> dict[str, tuple[Tensor, ...]]:
    """Returns by name of a part of a product all parts of it."""
    operators = (operator for module in modules for operator in every_module(module) if isinstance(operator, Linear))
    return {tensor.name: linear.outs for linear in operators if linear.whole for tensor in linear.outs}


def _find_composition(operator: Operator, model: Transformer, operations: tuple[Writing, ...]) -> str:
    """Returns how an operator is written; empty: as a single operation."""
    written = ""
    if _is_rms_norm(operator) and "rms-norm" in operations:
        written = LESS_ONE if model.norm == "rmsnorm1p" else "in fp32"
    elif isinstance(operator, Activation) and "activation" in operations and "act" in operator.modules:
        written = model.activation
    elif isinstance(operator, CoreAttention) and "attention" in operations:
        concatenates = model.mla is not None or (model.positions == "rope" and model.rope_share < 1)
        written = TURNED if concatenates else "separate"
    elif isinstance(operator, TopK | Permute | Unpermute) and "experts" in operations:
        written = "separate"
    return written


def _write_kernels(operator: Operator, model: Transformer, operations: tuple[Writing, ...]) -> Operator:
    """Returns an operator with its kernels: casts of rows and columns apart, clamps and biases of experts apart, or all
    of experts in those of grouped GEMMs."""
    moe = model.moe
    if "cast" in operations and isinstance(operator, Cast | Linear) and operator.quantised in CAST_APART:
        operator = replace(operator, quantised=CAST_APART[operator.quantised])
    if "grouped-mlp" in operations:
        if isinstance(operator, ExpertCast) and operator.has("f"):
            return KernelsCast(operator.name, operator.ins, operator.outs, (), operator.quantised)
        if isinstance(operator, ExpertActivation):
            return KernelsActivation(operator.name, operator.ins, operator.outs, (), modules=operator.modules)
        return replace(operator, one_kernel=True) if isinstance(operator, ExpertLinear) else operator
    if isinstance(operator, ExpertActivation) and moe and moe.clamped and "clamped-activation" in operations:
        return ClampedExpertActivation(operator.name, operator.ins, operator.outs, (), modules=operator.modules)
    if isinstance(operator, ExpertLinear) and operator.sorts == "outs" and "expert-bias" in operations:
        return replace(operator, adds_bias=model.mlp_bias)
    return operator


def _is_rms_norm(operator: Operator) -> bool:
    """Returns whether it is an RMS norm by itself; a norm with a gate is a kernel."""
    return type(operator) in (Norm, NormOfHeads) and isinstance(operator, Norm) and operator.is_root_mean_square
