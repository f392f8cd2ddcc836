"""Activations in 8 bits or fewer: inputs of linear layers, and inputs of activation functions as they are saved."""

from __future__ import annotations

from dataclasses import replace

from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import Module
from meshcast.simulator.ir.operators import QUANTISED, Cast, SavedCast


def cast_input(quantised: str, x: Tensor, kind: type[Cast] = Cast) -> tuple[Tensor, list[Module]]:
    """Returns x in the number format of the GEMMs, and the cast, unless it is in that format.

    quantised: recipe of the linear layers; empty: none.
    """
    if not quantised or x.dtype == (dtype := QUANTISED[quantised].dtype):
        return x, []
    small = replace(x, name=f"{x.name}.{dtype}", dtype=dtype, gradient_dtype=x.dtype)
    return small, [kind(f"cast {x.name}", (x,), (small,), (), quantised)]


def save_inputs(
    in_8_bits: bool, tensors: tuple[Tensor, ...], kind: type[SavedCast] = SavedCast
) -> tuple[tuple[Tensor, ...], list[Module]]:
    """Returns the inputs of an activation function in the format in which they are saved, and what converts them."""
    if not in_8_bits:
        return tensors, []
    small = tuple(replace(one, name=f"{one.name}.fp8", dtype="fp8", gradient_dtype=one.dtype) for one in tensors)
    return small, [kind(f"save {one.name}", (one,), (other,)) for one, other in zip(tensors, small, strict=True)]
