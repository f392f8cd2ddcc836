"""Builds what the conditions of a sample modulate, and the layer from patches: norms, gates, embedders."""

from __future__ import annotations

from dataclasses import replace

from meshcast.simulator.ir.diffusion_operators import EmbedConditions, Gate, Modulate
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.modules import Module
from meshcast.simulator.models.diffusion import Diffusion, Embedders, Modulation
from meshcast.simulator.models.shapes import Shapes


def norm_before(shapes: Shapes, name: str, x: Tensor, y: Tensor) -> list[Module]:
    """Builds the norm in front of a block, and its modulation if the model has it."""
    modulation = shapes.model.modulation
    if modulation is None or modulation.parts == "gates":
        return [shapes.layernorm(name, x, y)]
    normed = replace(y, name=f"{y.name}.plain")
    weights = _make_vectors(shapes, f"{name}.modulation", modulation, 2)
    if name == "norm1":
        weights += _make_embedders(shapes, modulation.embedders, modulation.condition)
    return [shapes.layernorm(name, x, normed), Modulate(f"{name}.modulate", (normed,), (y,), tuple(weights))]


def gate(shapes: Shapes, name: str, modulation: Modulation, x: Tensor, y: Tensor) -> Gate:
    """Builds the gate of what a layer adds to its stream."""
    return Gate(f"{name}.gate", (x,), (y,), tuple(_make_vectors(shapes, f"{name}.gate", modulation, 1)))


def _make_vectors(shapes: Shapes, name: str, modulation: Modulation, count: int) -> list[Tensor]:
    """Makes the weights from which `count` vectors over h come that modulate a layer."""
    width = Dim(count * modulation.sets * shapes.model.hidden)
    if modulation.by == "table":
        return [shapes.weight(f"{name}.table", m=width)]
    return [shapes.weight(f"w{name}", c=Dim(modulation.condition), m=width), shapes.weight(f"b{name}", m=width)]


def _make_embedders(shapes: Shapes, embedders: Embedders, condition: int) -> list[Tensor]:
    """Makes the weights of the embedders of conditions. condition: width of the vector that they make."""
    weights = []
    for i, (inputs, width) in enumerate(embedders.vectors):
        for j, rows in enumerate((inputs, width)):
            weights.append(shapes.weight(f"wcondition{i}.{j}", c=Dim(rows), m=Dim(width)))
            weights.append(shapes.weight(f"bcondition{i}.{j}", m=Dim(width)))
    rows = embedders.labels
    return [*weights, *([shapes.weight("labels", l=Dim(rows), c=Dim(condition))] if rows else [])]


def build_patches(shapes: Shapes, diffusion: Diffusion) -> tuple[list[Module], Tensor]:
    """Builds the linear layer from the patches of a diffusion transformer; returns also its output."""
    x, width, h = shapes.act("embedded"), Dim(diffusion.inputs), shapes.hidden_dim
    weights = shapes.weight("winput", i=width, h=h), shapes.weight("binput", h=h)
    return shapes.linear("input", shapes.act("inputs", i=width), (x,), *weights), x


def embed_conditions(shapes: Shapes, diffusion: Diffusion, x: Tensor) -> tuple[list[Module], Tensor]:
    """Builds the embedders of the conditions of samples, beside the stream `x`; returns also the stream behind them."""
    modulation, held = shapes.model.modulation, shapes.act("embedded.held")
    assert modulation is not None
    weights = _make_embedders(shapes, diffusion.embedders, modulation.condition)
    if modulation.by == "table":
        width = Dim(6 * shapes.model.hidden)
        weights += [shapes.weight("wcondition", c=Dim(modulation.condition), m=width)]
        weights += [shapes.weight("bcondition", m=width)]
    if not weights:
        return [], x
    return [EmbedConditions("condition", (x,), (held,), tuple(weights))], held
