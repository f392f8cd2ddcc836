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
from meshcast.simulator.ir.decoder_operators import KeepContext, Softcap
from meshcast.simulator.ir.diffusion_operators import RepeatWords, SquaredError
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.modules import LOWEST, BatchLossUnit, Layer, LayersFrom, Module, Stage, Unit, add_marks
from meshcast.simulator.ir.operators import Activation, Boundary, Concat, Embedding, Head, Linear, Loss, Norm, Residual
from meshcast.simulator.ir.stream_operators import AddToStreams, AddToSum
from meshcast.simulator.models.adapters import freeze, mark_lowest
from meshcast.simulator.models.branches import Branch
from meshcast.simulator.models.composition import compose
from meshcast.simulator.models.diffusion import Diffusion
from meshcast.simulator.models.ends import (
    build_batch_loss,
    build_input,
    build_other,
    build_projector,
    make_table,
)
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.modulated import build_patches, embed_conditions, norm_before
from meshcast.simulator.models.outputs import build_output
from meshcast.simulator.models.rare_blocks import RareBlockBuilder
from meshcast.simulator.models.shapes import add_prefix, attend_along, make_stream
from meshcast.simulator.models.stream_blocks import StreamBuilder, name_words
from meshcast.simulator.models.transformer import ALONE, LayerKind, list_further_kinds

SCALED_BYTES = 8
"""Bytes moved per logit where a kernel multiplies exponentials in fp32 by a factor of each token."""


class Architecture(RareBlockBuilder, StreamBuilder):
    """Builds the modules of the stages of a model for a micro-batch."""

    def stage(self, layers: range, first: bool, last: bool) -> Stage:
        """Builds the stage of these layers, with the embedding if it is the first and the loss if it is the last.

        Every branch starts with an embedding; the trunk of a model with branches starts with their concatenation.
        Equal layers make equal stages, which are the same object.
        """
        return self._stage(range(len(layers)) if self.has_equal_layers else layers, first, last)

    @cached_property
    def has_equal_layers(self) -> bool:
        """Whether all layers are alike, wherever they are."""
        return not (self.branches or self.borders or self.adapters or self._varied)

    @property
    def _varied(self) -> bool:
        """Whether the model has layers of several kinds."""
        model = self.model
        if isinstance(model, Model) and model.variants:
            return True
        mixers = model.window or model.attention_chunk or model.blocks or model.linear_attention or not model.full_rope
        blocks = model.moe or model.ssm or model.only or model.replaced or model.attention_residuals
        return bool(blocks or mixers or model.frames or model.shared_keys)

    @remembered
    def _stage(self, layers: range, first: bool, last: bool) -> Stage:
        units = [] if any(branch.model.layers for branch in self.branches) or not first else [self.beginning]
        start = 0
        for branch in self.branches:
            stop = start + branch.model.layers
            if some := range(max(layers.start, start), min(layers.stop, stop)):
                units += branch.branch_units(range(some.start - start, some.stop - start))
            start = stop
        if some := range(max(layers.start, start), layers.stop):
            joins = some.start == start > 0
            if self.decoder is not None:
                units += self._decoder_units(some, joins, bool(units))
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
        kinds = [*map(model.kind, layers)]
        if kinds and kinds[0].sums > 1:  # a stage holds all of the sums that it receives
            kinds[0] = kinds[0]._replace(follows=True)
        if model.shared_block:
            uses = [i for i, kind in enumerate(kinds) if kind.block == "S"][model.shared_block.blocks :]
            kinds = [kind._replace(borrows=i in uses) for i, kind in enumerate(kinds)]
        return tuple((kind, len(list(row))) for kind, row in groupby(kinds))

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
        """The residual stream [b, s, h] between units, or several."""
        return make_stream(self, "x", self.sums, self.copied)

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

    @property
    def beginning(self) -> Unit:
        """The first unit of a model none of whose branches has layers."""
        if self.decoder is not None:
            return self.decoder.decoder_input
        return self.join if self.branches else self.embedding

    @cached_property
    def embedding(self) -> Unit:
        """The unit from token ids to the residual stream."""
        modules, embedded = build_input(self)
        return self._unit(Unit, "embedding", modules, False, embedded)

    def between_shards(self, layers: range, first: bool, last: bool) -> Stage:
        """Builds the stage of these layers where embedding and output layer are elsewhere (`share_of_vocabulary`):
        what follows the table is on the first, the final norm on the last."""
        inner = self.stage(layers, False, False)
        (table, *modules), embedded = build_input(self)
        units = [*inner.units]
        if first and modules:
            unit = self._unit(Unit, "embedded", modules, True, embedded)
            units.insert(0, replace(unit, residual_in=table.outputs[0]))
        if last:
            normed = self.act("norm.out")
            norm = Norm("final_norm", (self.residual,), (normed,), self.norm_weights("final_norm"))
            units.append(self._unit(Unit, "final norm", [norm], True, normed))
        return replace(inner, units=tuple(units))

    def share_of_vocabulary(self, role: str, early: bool = False) -> Stage:
        """Builds the stage of a shard of the vocabulary, of which `vocab` are the rows: the table of the embedding
        (role ``input``) or output layer and loss (``output``), whose exponentials are scaled by the sums of all shards.

        early: gradients of the input are computed before, so that those of the logits are made twice.
        """
        if role == "input":
            (table, *_), _ = build_input(self)
            return Stage("stage", (self._unit(Unit, "embedding", [table], False, table.outputs[0], "share"),))
        (_, *modules), x = self._predict(self.residual, owns=True), self.residual
        (head, *behind), normed = modules, self.act("norm.out")
        loss = behind[-1]
        assert isinstance(head, Head) and isinstance(loss, Loss)
        forward, backward = loss.traffic
        if early:
            head = replace(head, remade=SCALED_BYTES + backward)
        else:
            behind[-1] = replace(loss, traffic=(forward, SCALED_BYTES + backward))
        entering = Boundary("entering", (x,), (normed,))
        return Stage("stage", (self._unit(Unit, "ending", [entering, head, *behind], True, None, ("share", early)),))

    @cached_property
    def decoder(self) -> Architecture | None:
        """The architecture of the decoder behind an encoder, over its tokens; None: the model has none."""
        if self.encoder_seq or not (isinstance(self.model, Model) and self.model.cross_attention):
            return None
        tokens = int(self.model.trunk_tokens(self.seq))
        return replace(self, seq=tokens, encoder_seq=self.seq - tokens)

    def _decoder_units(self, layers: range, joins: bool, follows: bool) -> list[Unit]:
        """Returns the units of layers of the decoder, with its embedding in front of the first of all that has an
        encoder (`joins`); where no unit is in front (`follows`), the first layer receives the output of the encoder."""
        decoder = self.decoder
        assert decoder is not None
        units = decoder.layer_units(layers)
        if joins:
            return [decoder.decoder_input, *units]
        if follows:
            return units
        first = replace(units[0], count=1, receives=True)
        rest = [replace(units[0], count=units[0].count - 1)] if units[0].count > 1 else []
        return [first, *rest, *units[1:]]

    @cached_property
    def decoder_input(self) -> Unit:
        """The unit between encoder and decoder: it keeps the output of the former, and embeds the tokens of the other
        with the same table, if both read token ids."""
        if isinstance(self.model, Model) and self.model.diffusion:
            return self._text_input
        (embedding, *modules), embedded = build_input(self)
        assert isinstance(embedding, Embedding) and isinstance(self.model, Model)
        table = replace(embedding, tied=self.model.shares_table)
        keep = KeepContext("context", (self.context,), (), launches=0.0)
        unit = self._unit(Unit, "decoder input", [keep, table, *modules], True, embedded)
        return replace(unit, residual_in=self.context)

    @property
    def _text_input(self) -> Unit:
        """The unit that embeds the tokens that layers attend to, which it keeps, and the patches."""
        assert isinstance(self.model, Model)
        texts = replace(self, model=self.model.branches[0], seq=self.encoder_seq, encoder_seq=0)
        reading, _ = build_input(texts)
        modules: list[Module] = [name_words(add_prefix(module, "text.", ())) for module in reading]
        last = modules[-1]
        if self.context.has("u"):
            modules.append(RepeatWords("text.repeat", tuple(last.outputs), (self.context,)))
        else:
            assert isinstance(last, Linear)
            modules[-1] = replace(last, outs=(self.context,))
        modules.append(KeepContext("context", (self.context,), (), launches=0.0))
        patches, embedded = build_input(self)
        return self._unit(Unit, "decoder input", [*modules, *patches], False, embedded)

    @cached_property
    def join(self) -> Unit:
        """The unit that concatenates the outputs of all branches, parts of a sequence, to a residual stream; those of
        branches without layers, and the patches of a diffusion transformer behind them, are embedded here."""
        assert isinstance(self.model, Model)
        modules, x = list[Module](), self.residual
        arrived = sum(branch.trunk_tokens for branch in self.branches if branch.model.layers)
        parts = [replace(x, dims={**x.dims, "s": Dim(arrived)}) if arrived < self.seq else x] if arrived else []
        entering = parts[0] if parts else None
        for i, branch in enumerate(self.branches):
            if not branch.model.layers:
                projector, part = branch.project(*build_input(branch))
                modules += [add_prefix(module, f"branch{i}.", ()) for module in projector]
                parts.append(replace(part, name=f"branch{i}.{part.name}"))
        if self.model.diffusion:
            patches = replace(self, seq=self.seq - self._joined_tokens)
            more, part = build_patches(patches, self.model.diffusion)
            modules += more
            parts.append(part)
        joined = self.act("joined")
        modules.append(Concat("join", tuple(parts), (joined,)))
        if self.model.diffusion:
            more, joined = embed_conditions(self, self.model.diffusion, joined)
            modules += more
        unit = self._unit(Unit, "join", modules, entering is not None, joined)
        return replace(unit, residual_in=entering)

    @property
    def _joined_tokens(self) -> int:
        """Tokens of branches at the start of a sequence of a diffusion transformer, in front of its patches."""
        if not (isinstance(self.model, Model) and self.model.diffusion) or self.model.cross_attention:
            return 0
        return int(sum(self.model.branch_tokens(self.seq)))

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
            shapes = replace(self, model=variant, branch_seq=self._joined_tokens)
            return shapes.layer(kind._replace(variant=0), first)
        if kind.sums and not self.sums:
            return replace(self, sums=kind.sums, copied=kind.follows).layer(kind, first)
        end = self.stream_behind("end", kind.opens, kind.opens) if kind.sums else make_stream(self, "end")
        unit = self._unit(Layer, "layer", self._whole_layer(kind, end), True, end, kind)
        assert isinstance(unit, Layer)
        unit = replace(unit, context=self.context) if self.encoder_seq else unit
        marks = frozenset({LayersFrom(first)})
        marked = dict.fromkeys((unit, *unit.operators()), marks) if self.borders else {}
        return add_marks(unit, marked)

    def _whole_layer(self, kind: LayerKind, end: Tensor) -> list[Module]:
        """Builds the modules of a layer, with what a traced model has beside the parts that are described."""
        other = self.model.other
        if self.model.joint_attention:
            return replace(self, branch_seq=self.branch_seq or self._joined_tokens).joint_layer(self.residual, end)
        if other is None:
            return self._layer(kind, self.residual, end)
        described = self.residual if kind.block == ALONE else self.act("described")
        modules = [] if kind.block == ALONE else self._layer(kind, self.residual, described)
        return [*modules, build_other(self, "other", other, described, end)]

    def _layer(self, kind: LayerKind, x: Tensor, end: Tensor) -> list[Module]:
        """Builds the modules of a layer from its input `x` to its output `end`."""
        if kind.block:
            return self._layer_of_one_block(kind, x, end)
        if (model := self.model.shape_of(kind)) is not self.model:
            return replace(self, model=model)._layer(kind, x, end)
        if model.reads_streams:
            return self._layer_of_streams(kind, x, end)
        normed, again, projected, middle = (self.act(name) for name in ("norm1", "norm2", "proj", "middle"))
        place = self._norm_place(kind)
        read = middle if place == "after" else normed if model.shared_norm else again
        block, results = self.moe(read, kind.routed) if kind.experts else self.dense(read)
        attention = self._attention_of(kind, x if place == "after" else normed, projected)
        modules: list[Module] = [] if place == "after" else norm_before(self, "norm1", x, normed)
        if model.parallel_residual:
            modules += [attention, *([] if model.shared_norm else norm_before(self, "norm2", x, again)), block]
            biases = (*self.proj_bias(), *self.down_bias(kind.experts))
            return self._add_both(modules, x, (projected, *results), biases, end)
        added, stream, last = projected, *((normed, again) if model.norm_residual else (x, middle))
        modules.append(attention)
        if place != "before":
            added = self._norm_behind(modules, projected, "proj.norm")
        added = self.scale(modules, self.convolve(modules, added, "proj.conv"), "proj")
        bias = self._mixer_bias(kind)
        modules.append(Residual("residual1", (stream, added), (middle,), bias, dropout=model.dropout > 0))
        if self._attends_to_context(kind):
            middle = self._cross(modules, middle)
            last = last if model.norm_residual else middle
        modules += [] if place == "after" else norm_before(self, "norm2", middle, again)
        return [*modules, *self._finish_layer(block, results, last, end, kind)]

    def _layer_of_streams(self, kind: LayerKind, x: Tensor, end: Tensor) -> list[Module]:
        """Builds the modules of a layer whose blocks read and write several residual streams."""
        if self.model.altup:
            return self._layer_of_first_stream(kind, x, end)
        if self.model.attention_residuals:
            return self._layer_over_sums(kind, x, end)
        projected, middle, result = self.act("proj"), make_stream(self, "middle"), self.act("down.sum")
        modules, normed, behind = self.read_streams("1", x)
        modules += [self._attention_of(kind, normed, projected), self.write_streams("1", x, projected, behind, middle)]
        reading, normed, behind = self.read_streams("2", middle)
        block, results = self.moe(normed, kind.routed) if kind.experts else self.dense(normed)
        modules += [*reading, block]
        if len(results) > 1:
            modules.append(Residual("experts.sum", results, (result,)))
            results = (result,)
        return [*modules, self.write_streams("2", middle, results[0], behind, end)]

    def _layer_over_sums(self, kind: LayerKind, x: Tensor, end: Tensor) -> list[Module]:
        """Builds the modules of a layer whose blocks read weighted sums of what blocks of layers have added to the
        stream (Kimi K3)."""
        normed, again, projected, result = (self.act(name) for name in ("norm1", "norm2", "proj", "down.sum"))
        modules, middle = list[Module](), self.stream_behind("middle", kind.opens, False)
        modules.append(self.layernorm("norm1", self.attend_to_sums(modules, "1", x), normed))
        modules += [self._attention_of(kind, normed, projected), AddToSum("residual1", (x, projected), (middle,))]
        modules.append(self.layernorm("norm2", self.attend_to_sums(modules, "2", middle), again))
        block, results = self.moe(again, kind.routed) if kind.experts else self.dense(again)
        modules.append(block)
        if len(results) > 1:
            modules.append(Residual("experts.sum", results, (result,)))
            results = (result,)
        return [*modules, AddToSum("residual2", (middle, *results), (end,))]

    def _add_both(
        self, modules: list[Module], x: Tensor, results: tuple[Tensor, ...], biases: tuple[Tensor, ...], end: Tensor
    ) -> list[Module]:
        """Adds the addition of attention and of the MLP beside it to the stream `x` to the modules of a layer, or of
        their sum behind a gate. Programs make that sum by one linear layer from the results of both, joined; two are
        priced."""
        if not self.model.modulation:
            dropout = self.model.dropout > 0
            return [*modules, Residual("residual", (x, *results), (end,), biases, dropout=dropout)]
        both = self.act("both")
        modules.append(Residual("both", results, (both,), biases))
        added = self.scale(modules, both, "both")
        return [*modules, Residual("residual", (x, added), (end,))]

    def _layer_of_first_stream(self, kind: LayerKind, x: Tensor, end: Tensor) -> list[Module]:
        """Builds the modules of a layer over the first of several residual streams, with an input of its own (Gemma
        3n)."""
        normed, projected, middle, again, active = (self.act(n) for n in ("norm1", "proj", "middle", "norm2", "active"))
        modules, predicted, first = self.predict_streams(x)
        modules.append(self.layernorm("norm1", first, normed))
        low_rank = self.project_low_rank(modules, normed)
        modules.append(self._attention_of(kind, normed, projected))
        added = self._norm_behind(modules, projected, "proj.norm")
        modules.append(Residual("residual1", (first, added, low_rank), (middle,)))
        modules.append(self.layernorm("norm2", middle, again))
        block, results = self.dense(again)
        modules += self._finish_layer(block, results, middle, active, kind)
        corrected, first = self.correct_streams(modules, predicted, active)
        assert self.model.layer_input is not None
        reading, result = self.read_layer_input(self.model.layer_input, first)
        return [*modules, *reading, AddToStreams("residual.input", (corrected, result), (end,))]

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

    def _finish_layer(
        self, block: Module, results: tuple[Tensor, ...], stream: Tensor, end: Tensor, kind: LayerKind
    ) -> list[Module]:
        """Builds the second block with its norm, if it has any, the addition to the residual stream, and that of an
        input of the layer."""
        if self.model.layer_input and not self.model.altup:
            before, described = self.act("stream"), self.model.layer_input
            plain = replace(self, model=self.model.model_copy(update={"layer_input": None}))
            modules = plain._finish_layer(block, results, stream, before, kind)
            reading, result = self.read_layer_input(described, before)
            return [*modules, *reading, Residual("residual.input", (before, result), (end,))]
        modules = [block]
        normed = self._norm_place(kind) != "before" or (kind.experts and self.model.moe and self.model.moe.norm is True)
        if len(results) > 1 and (normed or self.model.token_convolutions):
            modules.append(Residual("experts.sum", results, (self.act("down.sum"),)))
            results = (self.act("down.sum"),)
        if normed:
            results = (self._norm_behind(modules, results[0], "down.norm"),)
        results = (self.convolve(modules, results[0], "down.conv"), *results[1:])
        results = (self.scale(modules, results[0], "down"), *results[1:])
        bias, dropout = self.down_bias(kind.experts), self.model.dropout > 0
        return [*modules, Residual("residual2", (stream, *results), (end,), bias, dropout=dropout)]

    def _attention_of(self, kind: LayerKind, x: Tensor, y: Tensor) -> Module:
        if kind.linear and self.model.linear_attention:
            return self.linear_mixer(self.model.linear_attention, x, y)
        attention = self.self_attention(x, y, kind.local)
        return attend_along(attention, kind.along) if kind.along else attention

    def _attends_to_context(self, kind: LayerKind) -> bool:
        """Returns whether a layer attends to what stands beside its stream."""
        diffusion = self.model.diffusion if isinstance(self.model, Model) else None
        return self.encoder_seq > 0 and not (diffusion and diffusion.cross_frames and kind.along == "u")

    def _cross(self, modules: list[Module], middle: Tensor) -> Tensor:
        """Adds the cross-attention of a decoder layer; returns its result."""
        asks, answer, crossed = self.act("norm.cross"), self.act("cross"), self.act("crossed")
        bias = (self.weight("cross.bias", h=self.hidden_dim),) if self.model.proj_bias else ()
        diffusion = self.model.diffusion if isinstance(self.model, Model) else None
        if diffusion is None:
            modules.append(self.layernorm("norm.cross", middle, asks))
        elif diffusion.cross_norm:
            scales = tuple(self.weight(f"norm.cross.{end}", h=self.hidden_dim) for end in ("weight", "bias"))
            modules.append(Norm("norm.cross", (middle,), (asks,), scales, modules=("layernorm", "norm")))
        else:
            asks = middle
        stream = asks if self.model.norm_residual else middle
        modules.append(self.cross_attention(asks, answer))
        if self.model.norm_place == "both":
            answer = self._norm_behind(modules, answer, "cross.norm")
        dropout = self.model.dropout > 0
        modules.append(Residual("residual.cross", (stream, answer), (crossed,), bias, dropout=dropout))
        return crossed

    def _layer_of_one_block(self, kind: LayerKind, x: Tensor, end: Tensor) -> list[Module]:
        """Builds the modules of a layer that is a norm, a block and a residual addition, as in hybrid models."""
        normed, ssm = self.act("norm1"), self.model.ssm
        if ssm and kind.block == "S":
            modules, mixed = self.mix_behind_shared_block(ssm, x, kind.borrows)
            return [*modules, Residual("residual1", (x, mixed), (end,))]
        norm = self.layernorm("norm1", x, normed)
        blocks, results, bias = list[Module](), list[Tensor](), tuple[Tensor, ...]()
        if ssm and kind.has_mamba:
            # Megatron-Core discards and recomputes norms (`layernorm`) of its transformer layers alone.
            norm = replace(norm, modules=("norm",))
            results.append(self.act("mixed"))
            build = self.selective_mamba if ssm.rank else self.mamba
            blocks.append(build(ssm, normed, results[-1]))
        if kind.has_attention or (kind.block == "*" and kind.replaced):
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
        if (part := self.model.attention_residuals) and not self.sums:
            last = part.opens(self.model.layers - 1)
            return replace(self, sums=part.count_sums(self.model.layers), copied=last).output_unit
        modules, x = self._predict(self.residual, owns=True), self.residual
        for i in range(self.model.mtp):
            further = [add_prefix(module, f"mtp{i}.", {x.name}) for module in self._predict_further(x, owns=i == 0)]
            modules += further
            x = replace(self.act("end"), name=f"mtp{i}.end")
        return self._unit(Unit, "ending", modules, True, None)

    def _predict(self, x: Tensor, owns: bool) -> list[Module]:
        """Builds final norm, output layer and loss. owns: they have weights, instead of reading others."""
        if isinstance(self.model, Model) and self.model.diffusion:
            return self._predict_patches(self.model.diffusion, x)
        modules: list[Module] = []
        if self.model.streams:
            x = self.average_streams(modules, x) if self.model.altup else self.collapse_streams(modules, "last", x)[0]
        if self.model.attention_residuals:
            x = self.attend_to_sums(modules, "last", x)
        normed = self.act("norm.out")
        scales = self.norm_weights("final_norm") if owns else ()
        modules.append(Norm("final_norm", (x,), (normed,), scales))
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
        repeated, whole = float(self.loss.pieces), self.loss.whole_vocabulary
        ends = Loss("loss", (logits,), (loss,), (), *self.loss[:4], whole_vocabulary=whole, launches=repeated)
        return [*modules, ends]

    def _predict_patches(self, diffusion: Diffusion, x: Tensor) -> list[Module]:
        """Builds final norm, output layer and loss of a diffusion transformer."""
        modules, count = list[Module](), diffusion.final_norms
        shapes, x = replace(self, branch_seq=self._joined_tokens).take_own_tokens(modules, x)
        if count == 2:
            normed = shapes.act("norm.plain")
            modules.append(Norm("plain_norm", (x,), (normed,), shapes.norm_weights("plain_norm")))
            x = normed
        assert self.model.modulation is not None
        plain = self.model.modulation.model_copy(update={"sets": 1})
        shapes = replace(shapes, model=self.model.model_copy(update={"modulation": plain}))
        normed, p = shapes.act("norm.out"), Dim(diffusion.outputs)
        predicted = shapes.act("predicted", p=p)
        weights = shapes.weight("head", h=shapes.hidden_dim, p=p), shapes.weight("head.bias", p=p)
        return [
            *modules,
            *norm_before(shapes, "final_norm", x, normed),
            Linear("head", (normed,), (predicted,), weights, self.grad_dtype),
            SquaredError("loss", (predicted,), (Tensor("loss", shapes.token_dims, "fp32"),)),
        ]

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
            *self._further_layers(joined, end),
            *self._predict(end, owns=False),
        ]

    def _further_layers(self, x: Tensor, end: Tensor) -> list[Module]:
        """Builds the layers of one depth of multi-token prediction from x to end."""
        *firsts, last = list_further_kinds(self.model)
        modules = list[Module]()
        for i, kind in enumerate(firsts):
            y = self.act(f"block{i}.end")
            modules += [add_prefix(module, f"block{i}.", {x.name, y.name}) for module in self._layer(kind, x, y)]
            x = y
        return [*modules, *self._layer(last, x, end)]
