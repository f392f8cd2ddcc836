"""The modules in front of the layers, from token ids or other inputs to the residual stream, and behind the layers of a
branch: its final norm and the projector to the hidden size of the trunk."""

from __future__ import annotations

from simulator.ir.layout import Dim, Tensor
from simulator.ir.modules import Module, Projector
from simulator.ir.operators import Activation, Embedding, Norm, Residual
from simulator.models.branches import Branch
from simulator.models.shapes import Shapes


def make_table(shapes: Shapes) -> Tensor:
    """The table of the vocabulary."""
    return shapes.weight("embedding", v=Dim(shapes.vocab), h=shapes.hidden_dim)


def build_input(shapes: Shapes) -> tuple[list[Module], Tensor]:
    """Builds the modules from token ids, or other inputs, to the residual stream; returns them and their output."""
    model, x, h = shapes.model, shapes.act("embedded"), shapes.hidden_dim
    modules: list[Module]
    if isinstance(model, Branch) and model.input_width:
        width = Dim(model.input_width)
        weights = [shapes.weight("winput", i=width, h=h)]
        weights += [shapes.weight("binput", h=h)] if model.input_bias else []
        weights += [shapes.weight("class", h=h)] if model.class_token else []
        modules = shapes.linear("input", shapes.act("inputs", i=width), (x,), *weights)
    else:
        modules = [Embedding("embedding", (Tensor("ids", shapes.token_dims, "int64"),), (x,), (make_table(shapes),))]
    if model.embedding_norm:
        normed = shapes.act("embedded.norm")
        modules.append(Norm("embedding_norm", (x,), (normed,), shapes.norm_weights("embedding")))
        x = normed
    if model.positions == "learned" or model.dropout > 0:
        rows = Dim(model.position_rows)
        learned = (shapes.weight("positions", p=rows, h=h),) if model.positions == "learned" else ()
        end = shapes.act("placed")
        modules.append(Residual("positions", (x,), (end,), learned, dropout=model.dropout > 0))
        x = end
    return modules, x


def build_projector(shapes: Shapes, branch: Branch, x: Tensor) -> tuple[list[Module], Tensor]:
    """Builds the final norm and the projector of a branch, as far as it has them, behind `x`; returns their output."""
    modules: list[Module] = []
    if branch.final_norm:
        normed = shapes.act("norm.out")
        modules.append(Norm("final_norm", (x,), (normed,), shapes.norm_weights("final_norm")))
        x = normed
    if branch.projector == "none":
        return modules, x
    given, h = Dim(branch.hidden), Dim(branch.trunk_hidden)
    y, x = shapes.act("projected", h=h), x.rename_dims(h="c")

    def weights(name: str, **dims: Dim) -> list[Tensor]:
        last = list(dims)[-1]
        bias = [shapes.weight(f"b{name}", **{last: dims[last]})] if branch.projector_bias else []
        return [shapes.weight(f"w{name}", **dims), *bias]

    if branch.projector == "linear":
        children = shapes.linear("project", x, (y,), *weights("project", c=given, h=h))
    else:
        up, act = shapes.act("project.up", f=h), shapes.act("project.act", f=h)
        children = [
            *shapes.linear("project.up", x, (up,), *weights("project.up", c=given, f=h)),
            Activation("project.act", (up,), (act,), modules=("act",)),
            *shapes.linear("project.down", act, (y,), *weights("project.down", f=h, h=h)),
        ]
    return [*modules, Projector("projector", tuple(children))], y
