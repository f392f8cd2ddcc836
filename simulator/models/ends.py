"""The modules in front of the layers, from token ids or other inputs to the residual stream, and behind the layers of a
branch: its final norm, the projector to the hidden size of the trunk, and the contrastive loss of two branches.

A contrastive loss (CLIP, Radford et al. 2021, arXiv 2103.00020, section 2.3) compares the vectors of all samples of a
batch: every sample of a branch with every sample of the other, and the other way round. A data-parallel rank
computes the rows of its samples, for which it gathers the vectors of the other branch (`--local-loss` and
`--gather-with-grad` of OpenCLIP).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.decoder_operators import HoldWeights
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.modules import BatchLossUnit, LocalShapes, Module, Operator, Projector
from meshcast.simulator.ir.operators import Activation, Boundary, Concat, Embedding, Linear, Loss, Norm, Residual
from meshcast.simulator.ir.ops import Gemm, Memory, Work
from meshcast.simulator.ir.stream_operators import RepeatStreams
from meshcast.simulator.ir.traced_operators import Undescribed
from meshcast.simulator.models.branches import Branch
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.modulated import build_patches, embed_conditions
from meshcast.simulator.models.parts import Other
from meshcast.simulator.models.shapes import Shapes, add_prefix, make_stream


@dataclass(frozen=True, eq=False)
class Pool(Operator):
    """A vector of every sequence: the state of one of its tokens, or the mean over all of them (`mean`)."""

    mean: bool = False
    sums = True

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("add", at.bytes(*(self.ins if self.mean else self.outs)), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        # The gradients of the other tokens are set to zero.
        return [Memory("add", at.bytes(*self.outs), at.bytes(*self.ins))]


class Merge(Operator):
    """A token of several neighbouring inputs, concatenated or averaged by a kernel."""

    sums = True

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("concat", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("concat", at.bytes(*self.outs), at.bytes(*self.ins))]


class Convolve(Linear):
    """A convolution along the sequence [b, s, i]: a matrix from the positions of its kernel, whose row is all of their
    elements, to the channels of each output. Kernels read overlapping positions of its input, which is saved once."""

    def _sizes(self, at: LocalShapes) -> tuple[int, int, int, int]:
        inner, width = at.dims(self.weights[0]).values()
        return at.size(self.outs[0]) // width, width * len(self.outs), inner, 1


class Similarity(Operator):
    """Scaled cosine similarities [b, n] of the samples b of a branch and the samples n of the other."""

    sums = True

    def _product(self, at: LocalShapes, rows: str, columns: str, inner: str, layout: str) -> Gemm:
        rows_of, others = self.ins
        sizes = at.dims(others) | at.dims(rows_of)
        return Gemm(sizes[rows], sizes[columns], sizes[inner], 1, rows_of.dtype, layout, what="similarity")

    def forward(self, at: LocalShapes) -> list[Work]:
        return [self._product(at, "b", "n", "h", "tn")]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [self._product(at, "b", "h", "n", "nn"), self._product(at, "n", "h", "b", "nt")]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


def make_table(shapes: Shapes) -> Tensor:
    """Returns the table of the vocabulary."""
    return shapes.weight("embedding", v=Dim(shapes.vocab), h=shapes.hidden_dim)


def build_other(shapes: Shapes, name: str, other: Other, x: Tensor, y: Tensor) -> Undescribed:
    """Builds what a traced model has beside the parts that are described, on the way from `x` to `y`."""
    weights = (shapes.weight(f"{name}.weights", p=Dim(other.parameters)),) if other.parameters > 0 else ()
    return Undescribed(name, (x,), (y,), weights, other.flops, other.moved, other.saved)


def build_input(shapes: Shapes) -> tuple[list[Module], Tensor]:
    """Builds the modules from token ids, or other inputs, to the residual stream; returns them and their output."""
    model, h = shapes.model, shapes.hidden_dim
    modules, x = _embed(shapes)
    if model.relative_buckets:
        table = shapes.weight("relative", p=Dim(model.relative_buckets), a=Dim(model.heads))
        x = _hold(shapes, modules, "relative", x, table)
    if model.layer_input:
        scale = shapes.weight("input.norm.weight", i=Dim(model.layer_input.width))
        x = _hold(shapes, modules, "input.norm", x, scale)
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
    if isinstance(model, Model) and model.outside:
        end = shapes.act("outside")
        modules.append(build_other(shapes, "outside", model.outside, x, end))
        x = end
    return modules, _divide_stream(shapes, modules, x) if model.streams else x


def _embed(shapes: Shapes) -> tuple[list[Module], Tensor]:
    """Builds the modules from token ids, or other inputs, to vectors as wide as the stream; returns these, too."""
    model, x, h = shapes.model, shapes.act("embedded"), shapes.hidden_dim
    if isinstance(model, Branch) and model.convolutions:
        return _convolve(shapes, model, x), x
    if isinstance(model, Model) and model.diffusion:
        modules, x = build_patches(shapes, model.diffusion)
        more, x = embed_conditions(shapes, model.diffusion, x)
        return [*modules, *more], x
    if not (isinstance(model, Branch) and model.input_width):
        return [Embedding("embedding", (Tensor("ids", shapes.token_dims, "int64"),), (x,), (make_table(shapes),))], x
    width = Dim(model.input_width)
    weights = [shapes.weight("winput", i=width, h=h)]
    weights += [shapes.weight("binput", h=h)] if model.input_bias else []
    weights += [shapes.weight("class", h=h)] if model.class_token else []
    modules = shapes.linear("input", shapes.act("inputs", i=width), (x,), *weights)
    if model.input_bias != "mlp":
        return modules, x
    act, end = shapes.act("input.act"), shapes.act("input.second")
    weights = [shapes.weight("winput.second", g=h, h=h), shapes.weight("binput.second", h=h)]
    modules.append(Activation("input.act", (x,), (act,), modules=("act",)))
    return [*modules, *shapes.linear("input.second", act.rename_dims(h="g"), (end,), *weights)], end


def _hold(shapes: Shapes, modules: list[Module], name: str, x: Tensor, weight: Tensor) -> Tensor:
    """Adds a weight that layers read to the modules; returns the vectors behind it."""
    held = shapes.act("embedded.held")
    modules.append(HoldWeights(name, (x,), (held,), (weight,)))
    return held


def _divide_stream(shapes: Shapes, modules: list[Module], x: Tensor) -> Tensor:
    """Adds the several residual streams that begin with `x` to the modules; returns them."""
    model, h, end = shapes.model, shapes.hidden_dim, make_stream(shapes, "streams")
    if model.altup is None:
        modules.append(RepeatStreams("streams", (x,), (end,)))
        return end
    count = Dim(model.altup.streams - 1)
    others, weight = shapes.act("altup.others", m=count, h=h), shapes.weight("waltup.in", g=h, m=count, h=h)
    modules += shapes.linear("altup.in", x.rename_dims(h="g"), (others,), weight)
    modules.append(Concat("streams", (x, others), (end,)))
    return end


def _convolve(shapes: Shapes, branch: Branch, x: Tensor) -> list[Module]:
    """Builds the convolutions of a branch from its inputs to `x`."""
    letters = ["ij"[i % 2] for i in range(len(branch.convolutions))] + ["h"]
    widths, frames, modules = branch.convolved_widths, branch.frames_behind, list[Module]()

    def act(name: str, i: int) -> Tensor:
        dims = {**shapes.token_dims, "s": Dim(shapes.seq * frames[i]), letters[i]: Dim(widths[i])}
        return Tensor(name, dims, shapes.dtype)

    inputs = act("inputs", 0)
    for i, part in enumerate(branch.convolutions, 1):
        name = f"convolution{i}"
        halves = tuple(f"{name}{half}" for half in ((".gate", ".up") if part.gated else ("",)))
        outs = tuple(act(half, i) for half in halves)
        weights = [
            shapes.weight(f"w{half}", k=Dim(part.kernel * widths[i - 1]), **{letters[i]: Dim(widths[i])})
            for half in halves
        ]
        weights += [shapes.weight(f"b{half}", **{letters[i]: Dim(widths[i])}) for half in halves]
        end = x if i == len(branch.convolutions) else act(f"{name}.act", i)
        modules.append(Convolve(name, (inputs,), outs, tuple(weights), shapes.grad_dtype))
        modules.append(Activation(f"{name}.act", outs, (end,), modules=("act",)))
        inputs = end
    return modules


def build_projector(shapes: Shapes, branch: Branch, x: Tensor) -> tuple[list[Module], Tensor]:
    """Builds the final norm and the projector of a branch, as far as it has them, behind `x`; returns their output. In
    a contrastive model a vector of a sequence is projected, and then normalised."""
    modules: list[Module] = []
    stream = x
    if branch.final_norm:
        normed = shapes.act("norm.out")
        modules.append(Norm("final_norm", (x,), (normed,), shapes.norm_weights("final_norm")))
        x = normed
    if branch.pool != "none":
        pooled = shapes.of_sample("pooled", branch.hidden)
        modules.append(Pool("pool", (x,), (pooled,), mean=branch.pool == "mean"))
        x = pooled
    if branch.projector_norm == "each":
        norm, x = _norm_merged(shapes, x, "each")
        modules.append(norm)
    if branch.merge > 1:
        more, x = _merge(shapes, branch, x)
        modules += more
    if branch.projector_norm not in (False, "each", "behind"):
        norm, x = _norm_merged(shapes, x, str(branch.projector_norm))
        modules.append(norm)
    if branch.projector != "none":
        y = Tensor("projected", {**x.dims, "h": Dim(branch.trunk_hidden)}, x.dtype)
        modules.append(Projector("projector", tuple(_project(shapes, branch, x.rename_dims(h="c"), y))))
        x = y
    if branch.projector_norm == "behind":
        norm, x = _norm_merged(shapes, x, "behind")
        modules.append(norm)
    for i in range(branch.deepstack):
        more, x = _add_earlier(shapes, branch, stream, x, f"deep{i}.")
        modules += more
    if branch.pool != "none":
        unit = shapes.of_sample("normalised", branch.trunk_hidden)
        modules.append(Norm("normalise", (x,), (unit,)))
        x = unit
    return modules, x


def _norm_merged(shapes: Shapes, x: Tensor, kind: str) -> tuple[Norm, Tensor]:
    """Builds the norm in front of a projector, of a kind as in `Branch.projector_norm`; returns also its output."""
    both = ("weight", "bias")
    normed, ends = replace(x, name="projector.norm"), {"layer": both, "each": both, "plain": ()}.get(kind, ("weight",))
    scales = tuple(shapes.weight(f"projector.norm.{end}", h=x.dims["h"]) for end in ends)
    return Norm("projector.norm", (x,), (normed,), scales), normed


def _add_earlier(shapes: Shapes, branch: Branch, stream: Tensor, x: Tensor, prefix: str) -> tuple[list[Module], Tensor]:
    """Builds a further projector of the states `stream` of a branch, and adds its result to `x`; returns also the
    sum."""
    merging, merged = _merge(shapes, branch, stream)
    norm, normed = _norm_merged(shapes, merged, "layer")
    deep = replace(x, name="projected")
    projector = Projector("projector", tuple(_project(shapes, branch, normed.rename_dims(h="c"), deep)))
    modules = [add_prefix(module, prefix, {stream.name}) for module in (*merging, norm, projector)]
    total = replace(x, name=f"{prefix}sum")
    return [*modules, Residual(total.name, (x, replace(deep, name=f"{prefix}projected")), (total,))], total


def _project(shapes: Shapes, branch: Branch, x: Tensor, y: Tensor) -> list[Module]:
    """Builds the linear layers of a projector from `x` to `y`."""
    width, h = Dim(branch.merged_width), Dim(branch.trunk_hidden)

    def weights(name: str, **dims: Dim) -> list[Tensor]:
        last = list(dims)[-1]
        bias = [shapes.weight(f"b{name}", **{last: dims[last]})] if branch.projector_bias else []
        return [shapes.weight(f"w{name}", **dims), *bias]

    if branch.projector == "linear":
        return shapes.linear("project", x, (y,), *weights("project", c=width, h=h))
    if branch.projector == "gated":
        return _project_gated(shapes, branch, x, y)
    rows = {name: dim for name, dim in x.dims.items() if name != "c"}
    inner, modules, source = Dim(branch.projector_ffn), list[Module](), {"c": width}
    for layer in range(branch.projector_depth - 1):
        name, letter = f"project.up{layer or ''}", "fg"[layer % 2]
        up, act = (Tensor(end, {**rows, letter: inner}, x.dtype) for end in (name, f"project.act{layer or ''}"))
        modules += shapes.linear(name, x, (up,), *weights(name, **source, **{letter: inner}))
        modules.append(Activation(act.name, (up,), (act,), modules=("act",)))
        x, source = act, {letter: inner}
    return modules + shapes.linear("project.down", x, (y,), *weights("project.down", **source, h=h))


def _project_gated(shapes: Shapes, branch: Branch, x: Tensor, y: Tensor) -> list[Module]:
    """Builds a gated projector from `x` to `y`."""
    width, inner, h = Dim(branch.merged_width), Dim(branch.projector_ffn), Dim(branch.trunk_hidden)
    rows = {name: dim for name, dim in x.dims.items() if name != "c"}
    merged = Tensor("project.merged", {**rows, "f": h}, x.dtype)
    square, normed, active = (Tensor(f"project.{n}", {**rows, "h": h}, x.dtype) for n in ("square", "norm", "gelu"))
    gate, up, act = (Tensor(f"project.{name}", {**rows, "f": inner}, x.dtype) for name in ("gate", "up", "act"))
    bias = shapes.weight("bproject.merge", f=h)
    scales = [shapes.weight(f"project.norm.{end}", h=h) for end in ("weight", "bias")]
    ups = (shapes.weight(f"wproject.{name}", c=h, f=inner) for name in ("gate", "up"))
    return [
        *shapes.linear("project.merge", x, (merged,), shapes.weight("wproject.merge", c=width, f=h), bias),
        *shapes.linear("project.square", merged, (square,), shapes.weight("wproject.square", f=h, h=h)),
        Norm("project.norm", (square,), (normed,), tuple(scales)),
        Activation("project.gelu", (normed,), (active,), modules=("act",)),
        *shapes.linear("project.up", active.rename_dims(h="c"), (gate, up), *ups),
        Activation("project.act", (gate, up), (act,), modules=("act",)),
        *shapes.linear("project.down", act, (y,), shapes.weight("wproject.down", f=inner, h=h)),
    ]


def _merge(shapes: Shapes, branch: Branch, x: Tensor) -> tuple[list[Module], Tensor]:
    """Merges neighbouring inputs behind the last layer of a branch [b, s, h] to tokens of the trunk [b, s / merge, h],
    with h of all of them if they are concatenated; returns the modules and the tokens."""
    if branch.merge_by == "convolutions":
        return _convolve_neighbours(shapes, branch, x)
    modules = list[Module]()
    if branch.merge_by == "mlp":
        x = _widen_inputs(shapes, branch, modules, x)
    width = x.dims["h"].size * (1 if branch.merge_by == "mean" else branch.merge)
    merged = Tensor("merged", {**x.dims, "s": Dim(shapes.seq // branch.merge), "h": Dim(width)}, x.dtype)
    modules.append(Merge("merge", (x,), (merged,)))
    if branch.merge_by == "linear":
        joined = replace(merged, name="merged.linear", dims={**merged.dims, "h": Dim(branch.hidden)})
        weight = shapes.weight("wmerge", c=Dim(width), h=Dim(branch.hidden))
        modules += shapes.linear("merge.linear", merged.rename_dims(h="c"), (joined,), weight)
        merged = joined
    return modules, merged


def _widen_inputs(shapes: Shapes, branch: Branch, modules: list[Module], x: Tensor) -> Tensor:
    """Adds two linear layers from every input of a branch to the width of the trunk to the modules; returns their
    result."""
    inner, wide = Dim(branch.projector_ffn), Dim(branch.trunk_hidden)
    rows = {name: dim for name, dim in x.dims.items() if name != "h"}
    up, act = (Tensor(name, {**rows, "f": inner}, x.dtype) for name in ("merge.up", "merge.act"))
    y = Tensor("merge.down", {**rows, "h": wide}, x.dtype)
    ups = shapes.weight("wmerge.up", c=x.dims["h"], f=inner), shapes.weight("bmerge.up", f=inner)
    downs = shapes.weight("wmerge.down", f=inner, h=wide), shapes.weight("bmerge.down", h=wide)
    modules += [
        *shapes.linear("merge.up", x.rename_dims(h="c"), (up,), *ups),
        Activation("merge.act", (up,), (act,), modules=("act",)),
        *shapes.linear("merge.down", act, (y,), *downs),
    ]
    return y


def _convolve_neighbours(shapes: Shapes, branch: Branch, x: Tensor) -> tuple[list[Module], Tensor]:
    """Builds two convolutions over 3 x 3 neighbouring inputs that leave every second row and column, each with twice
    the width; returns also the tokens."""
    modules = list[Module]()
    for i, (inputs, outputs, passes) in enumerate(branch.merging_sizes, 1):
        tokens = Dim(shapes.seq // branch.merge * passes)
        y = Tensor(f"merge{i}", {**x.dims, "s": tokens, "h": Dim(outputs)}, x.dtype)
        weights = (
            shapes.weight(f"wmerge{i}", k=Dim(inputs), h=Dim(outputs)),
            shapes.weight(f"bmerge{i}", h=Dim(outputs)),
        )
        modules.append(Convolve(y.name, (x.rename_dims(h="c"),), (y,), weights, shapes.grad_dtype))
        x = y
    return modules, x


def build_batch_loss(shapes: Shapes, width: int, computed: Sequence[int]) -> BatchLossUnit:
    """Builds the contrastive loss of two branches for the samples of a whole batch.

    width: of the vectors that it compares.
    computed: the branches whose samples are the rows that it computes. The vectors of the other branch, if it is not
        among them, come from another pipeline stage.
    """
    vectors = [shapes.of_sample(f"vectors{i}", width) for i in (0, 1)]
    held = [shapes.of_sample(f"held{i}", width) for i in (0, 1)]
    modules: list[Module] = [Boundary(f"outputs{i}", (vectors[i],), (held[i],)) for i in (0, 1)]
    for i in computed:
        pairs = {"b": shapes.token_dims["b"], "n": shapes.token_dims["b"]}
        logits = Tensor(f"similarities{i}", pairs, shapes.dtype)
        loss = Tensor(f"loss{i}", {"b": pairs["b"]}, "fp32")
        modules += [
            Similarity(f"similarity{i}", (held[i], held[1 - i].rename_dims(b="n")), (logits,)),
            Loss(f"loss{i}", (logits,), (loss,), (), *shapes.loss[:3]),
        ]
    arriving = next((vectors[i] for i in (0, 1) if i not in computed), None)
    outputs = tuple(vectors[i] for i in computed)
    return BatchLossUnit("batch loss", tuple(modules), residual_in=arriving, stage_outputs=outputs)
