"""Builds the modules of pipeline stages from the shape of a model: embedding, layers, output layer and loss.

Modules have global sizes, for a micro-batch of all replicas: the dim ``b`` counts the samples of all data-parallel
ranks, and data schemes shard it. Equal layers in a row are a unit with a count.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby

from meshcast.hardware.remembered import remembered
from meshcast.simulator.ir.decoder_operators import KeepContext, Scale, Softcap
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.modules import LOWEST, BatchLossUnit, Layer, LayersFrom, Module, Stage, Unit, add_marks
from meshcast.simulator.ir.operators import Activation, Boundary, Concat, Embedding, Head, Loss, Norm, Residual
from meshcast.simulator.models.adapters import freeze, mark_lowest
from meshcast.simulator.models.blocks import BlockBuilder
from meshcast.simulator.models.branches import Branch
from meshcast.simulator.models.composition import compose
from meshcast.simulator.models.ends import build_batch_loss, build_input, build_other, build_projector, make_table
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.outputs import build_output
from meshcast.simulator.models.parts import StateSpace
from meshcast.simulator.models.shapes import add_prefix, attend_along
from meshcast.simulator.models.transformer import ALONE, LayerKind


class Architecture(BlockBuilder):
    """Builds the modules of the stages of a model for a micro-batch."""

    def stage(self, layers: range, first: bool, last: bool) -> Stage:
        """Builds the stage of these layers, with the embedding if it is the first and the loss if it is the last.

        Every branch starts with an embedding; the trunk of a model with branches starts with their concatenation.
        Equal layers make equal stages, which are the same object.
        """
        return self._stage(range(len(layers)) if self._equal_layers else layers, first, last)

    @cached_property
    def _equal_layers(self) -> bool:
        """Whether all layers are alike, wherever they are."""
        return not (self.branches or self.borders or self.adapters or self._varied)

    @property
    def _varied(self) -> bool:
        """Whether the model has layers of several kinds."""
        model = self.model
        if isinstance(model, Model) and model.variants:
            return True
        mixers = model.window or model.attention_chunk or model.linear_attention or not model.full_rope
        return bool(model.moe or mixers or model.ssm or model.frames or model.shared_keys)

    @remembered
    def _stage(self, layers: range, first: bool, last: bool) -> Stage:
        units = [] if self.branches or not first else [self.embedding]
        start = 0
        for branch in self.branches:
            stop = start + branch.model.layers
            if some := range(max(layers.start, start), min(layers.stop, stop)):
                units += branch.branch_units(range(some.start - start, some.stop - start))
            start = stop
        if some := range(max(layers.start, start), layers.stop):
            joins = some.start == start > 0
            if self.decoder is not None:
                units += self._decoder_units(some, joins)
            else:
                units += [*([self.join] if joins else []), *self.layer_units(some)]
        units += [(self.decoder or self).output_unit] if last and self.model.layers else []
        return Stage("stage", tuple(mark_lowest(units) if self.adapters else units))

    def branch_units(self, layers: range) -> list[Unit]:
        """Returns the units of layers of a branch, with its embedding and its projector at the ends."""
        units = [self.embedding] if layers.start == 0 else []
        units += self.layer_units(layers)
        modules, projected = self.project([], self.residual)
        if layers.stop == self.model.layers and modules:
            units.append(self._unit(Unit, "projector", modules, True, projected))
        return units

    def layer_units(self, layers: range) -> list[Unit]:
        """Returns the units of layers of a branch, or of the trunk."""
        groups: Iterable[tuple[int, Iterable[int]]] = ((0, layers),)
        if self.borders:
            groups = groupby(layers, lambda layer: self.group_start(layer + self.first_layer))
        return [
            self.layer(kind, first, count) for first, some in groups for kind, count in self.runs_of_kinds(tuple(some))
        ]

    def group_start(self, layer: int) -> int:
        """Returns the first of the layers that schemes shard as this layer."""
        return max((first for first in self.borders if first <= layer), default=0) if self.borders else 0

    def slice(self, begin: int, end: int) -> Architecture:
        """Returns the architecture for a slice of every sequence, from token `begin` up to token `end`."""
        if (begin, end) == (0, self.seq):
            return self
        return replace(self, seq=end - begin, tokens_before=begin, tokens_after=self.seq - end)

    def runs_of_kinds(self, layers: Sequence[int]) -> tuple[tuple[LayerKind, int], ...]:
        """Groups consecutive layers of a kind; returns each kind with its number of layers."""
        model = self.model
        if not self._varied:
            return ((LayerKind(False, False), len(layers)),) if layers else ()
        return tuple((kind, len(list(row))) for kind, row in groupby(map(model.kind, layers)))

    @cached_property
    def branches(self) -> tuple[Architecture, ...]:
        """The architectures of the branches, each over its part of a sequence; equal branches are the same object."""
        model, branches, first = self.model, list[Architecture](), 0
        known: dict[Architecture, Architecture] = {}
        if not isinstance(model, Model):
            return ()
        for branch, tokens in zip(model.branches, model.branch_tokens(self.seq), strict=True):
            architecture = replace(
                self,
                model=branch.model_copy(update={"name": model.name, "tokens": None}),
                seq=int(tokens) * branch.merge,
                document=None if branch.input_width else self.document,
                first_layer=first if self.borders else 0,
            )
            branches.append(known.setdefault(architecture, architecture))
            first += branch.layers
        return tuple(branches)

    @property
    def units(self) -> Iterable[Unit]:
        """One unit of every kind."""
        return {unit.children: unit for unit in self.stage(self.model.every_layer, True, True).units}.values()

    @property
    def residual(self) -> Tensor:
        """The residual stream [b, s, h] between units."""
        return self.act("x")

    # ------------------------------------------------------------------------------------------- units

    def _unit(
        self,
        kind: type[Unit],
        name: str,
        children: list[Module],
        has_input: bool,
        output: Tensor | None,
        variant: Hashable = None,
    ) -> Unit:
        """Makes a unit whose output is resharded to the layout of the residual stream.

        kind: class of the unit.
        name: its name.
        children: its modules.
        has_input: whether it reads the residual stream.
        output: the tensor that leaves it; None: none.
        variant: key that differs between units of the same name.
        """
        y = self.act("y") if output is None else replace(output, name="y")
        if output is not None:
            children = [*children, Boundary("leaving", (output,), (y,))]
        if self.composed:
            children = compose(children, self.model, self.composed)
        if self.adapters:
            children = self.adapters.insert_into(children)
        elif self._frozen:
            children = freeze(children)
        # The work of a rank is the same with any number of replicas.
        key = name, variant, replace(self, replicas=1)
        residual_in, residual_out = self.residual if has_input else None, y if output else None
        marks = frozenset({LOWEST} if self._frozen and has_input else ())
        return kind(name, tuple(children), residual_in, residual_out, lowering_key=key, marks=marks)

    @property
    def trunk_tokens(self) -> int:
        """Tokens of a sequence of the trunk that this branch makes."""
        return self.seq // (self.model.merge if isinstance(self.model, Branch) else 1)

    @property
    def _frozen(self) -> bool:
        return isinstance(self.model, Branch) and self.model.frozen

    @cached_property
    def embedding(self) -> Unit:
        """The unit from token ids to the residual stream."""
        modules, embedded = build_input(self)
        return self._unit(Unit, "embedding", modules, False, embedded)

    @cached_property
    def decoder(self) -> Architecture | None:
        """The architecture of the decoder behind an encoder, over its tokens; None: the model has none."""
        if self.encoder_seq or not (isinstance(self.model, Model) and self.model.cross_attention):
            return None
        tokens = int(self.model.trunk_tokens(self.seq))
        return replace(self, seq=tokens, encoder_seq=self.seq - tokens)

    def _decoder_units(self, layers: range, joins: bool) -> list[Unit]:
        """Returns the units of layers of the decoder, with its embedding in front of the first of all; on other stages
        the first layer receives the output of the encoder."""
        decoder = self.decoder
        assert decoder is not None
        units = decoder.layer_units(layers)
        if joins:
            return [decoder.decoder_input, *units]
        first = replace(units[0], count=1, receives=True)
        rest = [replace(units[0], count=units[0].count - 1)] if units[0].count > 1 else []
        return [first, *rest, *units[1:]]

    @cached_property
    def decoder_input(self) -> Unit:
        """The unit between encoder and decoder: it keeps the output of the former, and embeds the tokens of the other
        with the same table, if both read token ids."""
        (embedding, *modules), embedded = build_input(self)
        assert isinstance(embedding, Embedding) and isinstance(self.model, Model)
        table = replace(embedding, tied=self.model.shares_table)
        keep = KeepContext("context", (self.context,), (), launches=0.0)
        unit = self._unit(Unit, "decoder input", [keep, table, *modules], True, embedded)
        return replace(unit, residual_in=self.context)

    @cached_property
    def join(self) -> Unit:
        """The unit that concatenates the outputs of all branches, parts of a sequence, to a residual stream; those of
        branches without layers are embedded here."""
        modules, x = list[Module](), self.residual
        arrived = sum(branch.trunk_tokens for branch in self.branches if branch.model.layers)
        parts = [replace(x, dims={**x.dims, "s": Dim(arrived)}) if arrived < self.seq else x]
        for i, branch in enumerate(self.branches):
            if not branch.model.layers:
                projector, part = branch.project(*build_input(branch))
                modules += [add_prefix(module, f"branch{i}.", ()) for module in projector]
                parts.append(replace(part, name=f"branch{i}.{part.name}"))
        joined = self.act("joined")
        unit = self._unit(Unit, "join", [*modules, Concat("join", tuple(parts), (joined,))], True, joined)
        return replace(unit, residual_in=parts[0])

    def batch_loss(self, layers: range, microbatches: int) -> BatchLossUnit:
        """Returns the contrastive loss over the samples of a batch, on the stage that has these layers."""
        assert isinstance(self.model, Model) and self.model.contrastive is not None
        whole = replace(self, samples=self.samples * microbatches)
        return build_batch_loss(whole, self.model.contrastive, self.model.branches_with(layers))

    def project(self, modules: list[Module], x: Tensor) -> tuple[list[Module], Tensor]:
        """Adds the final norm and the projector of a branch to the modules that make `x`; returns also their output."""
        assert isinstance(self.model, Branch)
        more, y = build_projector(self, self.model, x)
        modules = [*modules, *more]
        return (freeze(modules) if self.model.frozen else modules), y

    @remembered
    def layer(self, kind: LayerKind, first: int = 0, count: int = 1) -> Layer:
        """Returns `count` transformer layers of this kind. first: see `group_start`."""
        if count > 1:
            return replace(self.layer(kind, first), count=count)
        if kind.variant:
            assert isinstance(self.model, Model)
            variant = self.model.variants[kind.variant - 1].model_copy(update={"name": self.model.name})
            return replace(self, model=variant).layer(kind._replace(variant=0), first)
        end = self.act("end")
        unit = self._unit(Layer, "layer", self._whole_layer(kind, end), True, end, kind)
        assert isinstance(unit, Layer)
        unit = replace(unit, context=self.context) if self.encoder_seq else unit
        marks = frozenset({LayersFrom(first)})
        marked = dict.fromkeys((unit, *unit.operators()), marks) if self.borders else {}
        return add_marks(unit, marked)

    def _whole_layer(self, kind: LayerKind, end: Tensor) -> list[Module]:
        """Builds the modules of a layer, with what a traced model has beside the parts that are described."""
        other = self.model.other
        if other is None:
            return self._layer(kind, self.residual, end)
        described = self.residual if kind.block == ALONE else self.act("described")
        modules = [] if kind.block == ALONE else self._layer(kind, self.residual, described)
        return [*modules, build_other(self, "other", other, described, end)]

    def _layer(self, kind: LayerKind, x: Tensor, end: Tensor) -> list[Module]:
        """Builds the modules of a layer from its input `x` to its output `end`."""
        if self.model.ssm:
            return self._hybrid_layer(self.model.ssm, kind, x, end)
        if (model := self.model.shape_of(kind)) is not self.model:
            return replace(self, model=model)._layer(kind, x, end)
        normed, again, projected, middle = (self.act(name) for name in ("norm1", "norm2", "proj", "middle"))
        before = self._norm_place(kind) != "after"
        read = (normed if model.shared_norm else again) if before else middle
        block, results = self.moe(read, kind.routed) if kind.experts else self.dense(read)
        attention = self._attention_of(kind, normed if before else x, projected)
        modules: list[Module] = [self.layernorm("norm1", x, normed)] if before else []
        if model.parallel_residual:
            modules += [attention, *([] if model.shared_norm else [self.layernorm("norm2", x, again)]), block]
            biases = (*self.proj_bias(), *self.down_bias(kind.experts))
            return [*modules, Residual("residual", (x, projected, *results), (end,), biases, dropout=model.dropout > 0)]
        added, stream, last = projected, *((normed, again) if model.norm_residual else (x, middle))
        modules.append(attention)
        if self._norm_place(kind) != "before":
            added = self._norm_behind(modules, projected, "proj.norm")
        added = self._scale(modules, added, "proj.scale")
        bias = self._mixer_bias(kind)
        modules.append(Residual("residual1", (stream, added), (middle,), bias, dropout=model.dropout > 0))
        if self.encoder_seq:
            middle = self._cross(modules, middle)
            last = again if model.norm_residual else middle
        if before:
            modules.append(self.layernorm("norm2", middle, again))
        if not model.layer_input:
            return [*modules, *self._finish_layer(block, results, last, end, kind)]
        stream = self.act("stream")
        modules += self._finish_layer(block, results, last, stream, kind)
        return [*modules, *self.add_layer_input(model.layer_input, stream, end)]

    def _mixer_bias(self, kind: LayerKind) -> tuple[Tensor, ...]:
        """Makes the bias of what mixes tokens in a layer, if there is any."""
        linear = self.model.linear_attention
        if not (kind.linear and linear):
            return self.proj_bias()
        return (self.weight("linear.out.bias", h=self.hidden_dim),) if linear.out_bias else ()

    def _norm_place(self, kind: LayerKind) -> str:
        """Returns where the norms of a layer are, see `Transformer.norm_place`."""
        linear = self.model.linear_attention
        return (kind.linear and linear and linear.norm_place) or self.model.norm_place

    def _norm_behind(self, modules: list[Module], result: Tensor, name: str) -> Tensor:
        """Adds a norm behind a block to its modules, and returns what is added to the stream."""
        normed = self.act(name)
        modules.append(self.layernorm(name, result, normed))
        return normed

    def _scale(self, modules: list[Module], x: Tensor, name: str) -> Tensor:
        """Adds the scale of what a layer adds to its stream to the modules, if the model has it; returns its output."""
        if not self.model.layer_scale:
            return x
        scaled = self.act(name)
        modules.append(Scale(name, (x,), (scaled,), (self.weight(f"{name}.weight", h=self.hidden_dim),)))
        return scaled

    def _finish_layer(
        self, block: Module, results: tuple[Tensor, ...], stream: Tensor, end: Tensor, kind: LayerKind
    ) -> list[Module]:
        """Builds the second block with its norm, if it has any, and the addition to the residual stream."""
        modules: list[Module] = [block]
        if self._norm_place(kind) != "before" or (kind.experts and self.model.moe and self.model.moe.norm is True):
            result = results[0]
            if len(results) > 1:
                result = self.act("down.sum")
                modules.append(Residual("experts.sum", results, (result,)))
            results = (self._norm_behind(modules, result, "down.norm"),)
        results = (self._scale(modules, results[0], "down.scale"), *results[1:])
        bias, dropout = self.down_bias(kind.experts), self.model.dropout > 0
        return [*modules, Residual("residual2", (stream, *results), (end,), bias, dropout=dropout)]

    def _attention_of(self, kind: LayerKind, x: Tensor, y: Tensor) -> Module:
        if kind.linear and self.model.linear_attention:
            return self.linear_mixer(self.model.linear_attention, x, y)
        attention = self.self_attention(x, y, kind.local)
        return attend_along(attention, kind.along) if kind.along else attention

    def _cross(self, modules: list[Module], middle: Tensor) -> Tensor:
        """Adds the cross-attention of a decoder layer; returns its result."""
        asks, answer, crossed = self.act("norm.cross"), self.act("cross"), self.act("crossed")
        bias = (self.weight("cross.bias", h=self.hidden_dim),) if self.model.proj_bias else ()
        stream = asks if self.model.norm_residual else middle
        modules += [self.layernorm("norm.cross", middle, asks), self.cross_attention(asks, answer)]
        if self.model.norm_place == "both":
            answer = self._norm_behind(modules, answer, "cross.norm")
        dropout = self.model.dropout > 0
        modules.append(Residual("residual.cross", (stream, answer), (crossed,), bias, dropout=dropout))
        return crossed

    def _hybrid_layer(self, ssm: StateSpace, kind: LayerKind, x: Tensor, end: Tensor) -> list[Module]:
        """Builds the modules of a layer of a hybrid model: a norm, a block and a residual addition."""
        normed = self.act("norm1")
        norm = self.layernorm("norm1", x, normed)
        blocks, results, bias = list[Module](), list[Tensor](), tuple[Tensor, ...]()
        if kind.has_mamba:
            # Megatron-Core discards and recomputes norms (`layernorm`) of its transformer layers alone.
            norm = replace(norm, modules=("norm",))
            results.append(self.act("mixed"))
            build = self.selective_mamba if ssm.rank else self.mamba
            blocks.append(build(ssm, normed, results[-1]))
        if kind.has_attention:
            bias = self.proj_bias()
            results.append(self.act("proj"))
            blocks.append(self.self_attention(normed, results[-1], kind.local))
        if not blocks:
            block, outputs = self.moe(normed, kind.routed) if kind.experts else self.dense(normed)
            blocks, results, bias = [block], [*outputs], self.down_bias(kind.experts)
        return [norm, *blocks, Residual("residual1", (x, *results), (end,), bias, dropout=self.model.dropout > 0)]

    # ------------------------------------------------------------------------------------------ the end

    @cached_property
    def output_unit(self) -> Unit:
        """The unit from the residual stream to the loss, and to the losses of multi-token prediction."""
        modules, x = self._predict(self.residual, owns=True), self.residual
        for i in range(self.model.mtp):
            further = [add_prefix(module, f"mtp{i}.", {x.name}) for module in self._predict_further(x, owns=i == 0)]
            modules += further
            x = replace(self.act("end"), name=f"mtp{i}.end")
        return self._unit(Unit, "ending", modules, True, None)

    def _predict(self, x: Tensor, owns: bool) -> list[Module]:
        """Builds final norm, output layer and loss. owns: they have weights, instead of reading others."""
        normed = self.act("norm.out")
        scales = self.norm_weights("final_norm") if owns else ()
        modules: list[Module] = [Norm("final_norm", (x,), (normed,), scales)]
        if self.model.output:
            return [*modules, *build_output(self, self.model.output, normed)]
        logits = replace(self.act("logits", v=Dim(self.vocab)), pieces=self.loss.pieces)
        loss = Tensor("loss", self.token_dims, "fp32")
        head: tuple[Tensor, ...] = (self.weight("head", h=self.hidden_dim, v=Dim(self.vocab)),)
        head += (self.weight("head.bias", v=Dim(self.vocab)),) if "bias" in self.model.head else ()
        held, read = (head, ()) if owns else ((), head)
        if "transform" in self.model.head:
            more, normed = self._transform(normed)
            modules += more
        modules.append(
            Head(
                "head",
                *((normed,), (logits,), held),
                grad_dtype=self.grad_dtype,
                tied=self.model.tied,
                recomputed=self.loss.recomputed,
                launches=float(self.loss.pieces),
                shared_weights=read,
            )
        )
        if "logits" in self.model.softcaps:
            capped = replace(logits, name="logits.capped")
            modules.append(Softcap("logits.cap", (logits,), (capped,)))
            logits = capped
        return [*modules, Loss("loss", (logits,), (loss,), (), *self.loss[:4], launches=float(self.loss.pieces))]

    def _transform(self, x: Tensor) -> tuple[list[Module], Tensor]:
        """Builds the linear layer, the activation and the norm in front of the output layer; returns also their
        output."""
        linear, act, normed = (self.act(f"head.{name}") for name in ("dense", "act", "norm"))
        weight = self.weight("head.dense", g=self.hidden_dim, h=self.hidden_dim)
        bias = self.weight("head.dense.bias", h=self.hidden_dim)
        modules = self.linear("head.dense", x.rename_dims(h="g"), (linear,), weight, bias)
        norm = Norm("head.norm", (act,), (normed,), self.norm_weights("head.norm"))
        return [*modules, Activation("head.act", (linear,), (act,)), norm], normed

    def _predict_further(self, x: Tensor, owns: bool) -> list[Module]:
        """Builds a layer of multi-token prediction and its loss from the residual stream `x` (arXiv 2412.19437, 2.2).

        owns: whether it has a copy of the embedding table, which its stage otherwise lacks.
        """
        ids, embedded = Tensor("ids", self.token_dims, "int64"), self.act("embedded")
        both, joined, end = self.act("both", c=Dim(2 * self.model.hidden)), self.act("joined"), self.act("end")
        normed = self.act("norm.x"), self.act("norm.embedded")
        held, read = ((make_table(self),), ()) if owns and not self.model.tied else ((), (make_table(self),))
        project = self.weight("wjoin", c=both.dims["c"], h=self.hidden_dim)
        return [
            Embedding("embedding", (ids,), (embedded,), held, tied=True, shared_weights=read),
            Norm("norm.x", (x,), normed[:1], self.norm_weights("norm.x")),
            Norm("norm.embedded", (embedded,), normed[1:], self.norm_weights("norm.embedded")),
            Concat("both", normed, (both,)),
            *self.linear("join", both, (joined,), project),
            *self._layer(self.model.kind(self.model.layers - 1), joined, end),
            *self._predict(end, owns=False),
        ]
