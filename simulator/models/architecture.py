"""Builds the modules of pipeline stages from the shape of a model: embedding, layers, output layer and loss.

Modules have global sizes, for one micro-batch of all replicas: the dim ``b`` counts the samples of all data-parallel
ranks, and data schemes shard it. Equal layers in a row are one unit with a count.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import groupby

from simulator.ir.layout import Dim, Tensor
from simulator.ir.modules import (
    LOWEST,
    MLP,
    BatchLossUnit,
    Layer,
    LayersFrom,
    Module,
    MoE,
    SelfAttention,
    SharedExperts,
    Stage,
    Unit,
    add_marks,
)
from simulator.ir.moe_operators import (
    ExpertActivation,
    ExpertCast,
    ExpertLinear,
    ExpertSavedCast,
    Permute,
    TopK,
    Unpermute,
)
from simulator.ir.operators import (
    Activation,
    Boundary,
    Concat,
    CoreAttention,
    Embedding,
    Head,
    Linear,
    Loss,
    Norm,
    Residual,
    Rope,
)
from simulator.models.adapters import freeze, mark_lowest
from simulator.models.branches import Branch
from simulator.models.casts import cast_input, save_inputs
from simulator.models.ends import build_batch_loss, build_input, build_projector, make_table
from simulator.models.mamba import mamba_block
from simulator.models.model import Model
from simulator.models.parts import MLA, MoEShape, StateSpace
from simulator.models.shapes import Shapes, add_prefix
from simulator.models.transformer import LayerKind

UP = ("mla_up_proj",)
"""The label of the modules between the latents and the core of latent attention: norms, up-projections and RoPE.
Megatron-Core recomputes them as one module; its norms are fused into the linear layers after them."""


@dataclass(frozen=True)
class Architecture(Shapes):
    """Builds the modules of the stages of a model for one micro-batch."""

    def stage(self, layers: range, first: bool, last: bool) -> Stage:
        """Builds the stage of these layers, with the embedding if it is the first and the loss if it is the last.

        Every branch starts with an embedding; the trunk of a model with branches starts with their concatenation.
        """
        units = [] if self.branches or not first else [self.embedding]
        start = 0
        for branch in self.branches:
            stop = start + branch.model.layers
            if some := range(max(layers.start, start), min(layers.stop, stop)):
                units += branch.branch_units(range(some.start - start, some.stop - start))
            start = stop
        if some := range(max(layers.start, start), layers.stop):
            units += [self.join] if some.start == start > 0 else []
            units += self.layer_units(some)
        units += [self.output_unit] if last and self.model.layers else []
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
        """Returns the units of layers of one branch, or of the trunk."""
        groups: Iterable[tuple[int, Iterable[int]]] = ((0, layers),)
        if self.borders:
            groups = groupby(layers, lambda layer: self.group_start(layer + self.first_layer))
        return [
            replace(self.layer(kind, first), count=count)
            for first, some in groups
            for kind, count in self.runs_of_kinds(tuple(some))
        ]

    def group_start(self, layer: int) -> int:
        """Returns the first of the layers that schemes shard as this one."""
        return max((first for first in self.borders if first <= layer), default=0) if self.borders else 0

    def slice(self, begin: int, end: int) -> Architecture:
        """Returns the architecture for a slice of every sequence, from token `begin` up to token `end`."""
        if (begin, end) == (0, self.seq):
            return self
        return replace(self, seq=end - begin, tokens_before=begin, tokens_after=self.seq - end)

    def runs_of_kinds(self, layers: Sequence[int]) -> tuple[tuple[LayerKind, int], ...]:
        """Groups consecutive layers of one kind; returns each kind with its number of layers."""
        model = self.model
        if model.moe is None and model.window is None and model.attention_chunk is None and model.ssm is None:
            return ((LayerKind(False, False), len(layers)),) if layers else ()
        return tuple((kind, len(list(row))) for kind, row in groupby(map(model.kind, layers)))

    @cached_property
    def branches(self) -> tuple[Architecture, ...]:
        """The architectures of the branches, each over its part of a sequence; equal ones are one object."""
        model, found, first = self.model, list[Architecture](), 0
        known: dict[Architecture, Architecture] = {}
        if not isinstance(model, Model):
            return ()
        for branch, tokens in zip(model.branches, model.branch_tokens(self.seq), strict=True):
            own = replace(
                self,
                model=branch.model_copy(update={"name": model.name, "tokens": None}),
                seq=int(tokens),
                document=None if branch.input_width else self.document,
                first_layer=first if self.borders else 0,
            )
            found.append(known.setdefault(own, own))
            first += branch.layers
        return tuple(found)

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
        variant: key that differs between units of one name.
        """
        y = self.act("y") if output is None else replace(output, name="y")
        if output is not None:
            children = [*children, Boundary("leaving", (output,), (y,))]
        if self.adapters:
            children = self.adapters.insert_into(children)
        elif self._frozen:
            children = freeze(children)
        # The work of one rank is the same with any number of replicas.
        key = name, variant, replace(self, replicas=1)
        residual_in, residual_out = self.residual if has_input else None, y if output else None
        marks = frozenset({LOWEST} if self._frozen and has_input else ())
        return kind(name, tuple(children), residual_in, residual_out, lowering_key=key, marks=marks)

    @property
    def _frozen(self) -> bool:
        return isinstance(self.model, Branch) and self.model.frozen

    @cached_property
    def embedding(self) -> Unit:
        """The unit from token ids to the residual stream."""
        modules, embedded = build_input(self)
        return self._unit(Unit, "embedding", modules, False, embedded)

    @cached_property
    def join(self) -> Unit:
        """The unit that concatenates the outputs of all branches, parts of a sequence, to one residual stream; those of
        branches without layers are embedded here."""
        modules, x = list[Module](), self.residual
        arrived = sum(branch.seq for branch in self.branches if branch.model.layers)
        parts = [replace(x, dims={**x.dims, "s": Dim(arrived)}) if arrived < self.seq else x]
        for i, branch in enumerate(self.branches):
            if not branch.model.layers:
                own, part = branch.project(*build_input(branch))
                modules += [add_prefix(module, f"branch{i}.", ()) for module in own]
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

    def layer(self, kind: LayerKind, first: int = 0) -> Layer:
        """Returns a transformer layer of this kind. first: see `group_start`."""
        if (kind, first) not in self._layers:
            end = self.act("end")
            unit = self._unit(Layer, "layer", self._layer(kind, self.residual, end), True, end, kind)
            assert isinstance(unit, Layer)
            marks = frozenset({LayersFrom(first)})
            marked = dict.fromkeys((unit, *unit.operators()), marks) if self.borders else {}
            self._layers[kind, first] = add_marks(unit, marked)
        return self._layers[kind, first]

    @cached_property
    def _layers(self) -> dict[tuple[LayerKind, int], Layer]:
        return {}

    def _layer(self, kind: LayerKind, x: Tensor, end: Tensor) -> list[Module]:
        """Builds the modules of a layer from its input `x` to its output `end`."""
        if self.model.ssm:
            return self._hybrid_layer(self.model.ssm, kind, x, end)
        model, experts = self.model, kind.experts
        drop = model.dropout > 0
        normed, again = self.act("norm1"), self.act("norm2")
        projected, middle = self.act("proj"), self.act("middle")
        block, results = self._moe(again) if experts else self._dense(again)
        proj_bias, down_bias = self._proj_bias(), self._down_bias(experts)
        inner: list[Module]
        if model.parallel_residual:
            joined = Residual("residual", (x, projected, *results), (end,), (*proj_bias, *down_bias), dropout=drop)
            inner = [self.layernorm("norm2", x, again), block, joined]
        else:
            inner = [
                Residual("residual1", (x, projected), (middle,), proj_bias, dropout=drop),
                self.layernorm("norm2", middle, again),
                block,
                Residual("residual2", (middle, *results), (end,), down_bias, dropout=drop),
            ]
        return [self.layernorm("norm1", x, normed), self._self_attention(normed, projected, kind.local), *inner]

    def _hybrid_layer(self, ssm: StateSpace, kind: LayerKind, x: Tensor, end: Tensor) -> list[Module]:
        """Builds the modules of a layer of a hybrid model: one norm, one block and one residual addition."""
        normed, projected = self.act("norm1"), self.act("proj")
        norm = self.layernorm("norm1", x, normed)
        block: Module
        results: tuple[Tensor, ...] = (projected,)
        bias: tuple[Tensor, ...] = ()
        if kind.has_mamba:
            # Megatron-Core discards and recomputes norms (`layernorm`) of its transformer layers alone.
            norm, block = replace(norm, modules=("norm",)), mamba_block(self, ssm, normed, projected)
        elif kind.has_attention:
            block, bias = self._self_attention(normed, projected, kind.local), self._proj_bias()
        else:
            block, results = self._moe(normed) if kind.experts else self._dense(normed)
            bias = self._down_bias(kind.experts)
        return [norm, block, Residual("residual1", (x, *results), (end,), bias, dropout=self.model.dropout > 0)]

    def _proj_bias(self) -> tuple[Tensor, ...]:
        """Makes the bias of the output layer of attention, if there is one."""
        return (self.weight("proj.bias", h=self.hidden_dim),) if self.model.proj_bias else ()

    def _down_bias(self, experts: bool) -> tuple[Tensor, ...]:
        """Makes the bias of the MLP or the shared experts, if there is one; routed experts have biases of their own."""
        model = self.model
        has_bias = not experts or (model.moe and model.moe.shared_ffn)
        return (self.weight("down.bias", h=self.hidden_dim),) if model.mlp_bias and has_bias else ()

    # --------------------------------------------------------------------------------------- attention

    def _self_attention(self, x: Tensor, y: Tensor, local: bool) -> SelfAttention:
        """Builds attention of the model's type."""
        return self._latent(self.model.mla, x, y, local) if self.model.mla else self._attention(x, y, local)

    def _attention(self, x: Tensor, y: Tensor, local: bool) -> SelfAttention:
        model, d = self.model, self.model.head_dim
        width = Dim(model.heads * d, unit=d)
        kv = Dim(model.kv_heads * d, unit=d, copies=True)
        q, k, v = (self.act(n, a=a) for n, a in (("q", width), ("k", kv), ("v", kv)))
        weights = [self.weight(n, h=self.hidden_dim, a=a) for n, a in (("wq", width), ("wk", kv), ("wv", kv))]
        if model.qkv_bias:
            weights += [self.weight(n, a=a) for n, a in (("bq", width), ("bk", kv), ("bv", kv))]
        modules = self.linear("qkv", x, (q, k, v), *weights)
        has_rope = model.positions == "rope" and (local or model.full_rope)
        if model.qk_layernorm is True or (model.qk_layernorm and has_rope):
            normed = self.act("q.norm", a=width), self.act("k.norm", a=kv)
            weighted = "qk" if model.qk_layernorm is True else ""
            scales = tuple(self.weight(f"{n}.norm.weight", d=Dim(d)) for n in weighted)
            modules.append(Norm("qk_norm", (q, k), normed, scales, modules=("norm",)))
            q, k = normed
        if has_rope:
            rotated = self.act("q.rope", a=width), self.act("k.rope", a=kv)
            modules.append(Rope("rope", (q, k), rotated, (), model.rope_share))
            q, k = rotated
        return self._core(modules, q, k, v, y, local, d, d)

    def _latent(self, mla: MLA, x: Tensor, y: Tensor, local: bool) -> SelfAttention:
        """Builds multi-head latent attention: queries, keys, values projected from latents (arXiv 2405.04434, 2.1)."""
        heads, qk = self.model.heads, mla.qk_nope + mla.qk_rope
        width, value = Dim(heads * qk, unit=qk), Dim(heads * mla.v, unit=mla.v)
        q, v = self.act("q", a=width), self.act("v", a=value)
        k_up = self.act("k.up", a=Dim(heads * mla.qk_nope, unit=mla.qk_nope))
        rope_key = self.act("k.pe", r=Dim(mla.qk_rope))
        x, modules = cast_input(self.quantised, x)

        def project_down(name: str, rank: int, *more: Tensor) -> Tensor:
            """Adds the projection of x to a latent of width `rank`, and its norm; the same linear makes `more`."""
            latent, normed = self.act(name, r=Dim(rank)), self.act(f"{name}.norm", r=Dim(rank))
            weights = [self.weight(f"w{t.name}", h=self.hidden_dim, r=t.dims["r"]) for t in (latent, *more)]
            modules.extend(self.linear(f"{name}.down", x, (latent, *more), *weights))
            if not self.model.qk_layernorm:
                return latent
            scale = (self.weight(f"{name}.scale", r=Dim(rank)),)
            modules.append(Norm(f"{name}.norm", (latent,), (normed,), scale, modules=("norm", *UP)))
            return normed

        if mla.q_lora_rank:
            source = project_down("q.latent", mla.q_lora_rank)
            modules += self.linear("q.up", source, (q,), self.weight("wq", r=source.dims["r"], a=width), modules=UP)
        else:
            modules += self.linear("q", x, (q,), self.weight("wq", h=self.hidden_dim, a=width), modules=UP)
        source = project_down("kv.latent", mla.kv_lora_rank, rope_key)
        ups = [self.weight(f"w{t.name}", r=source.dims["r"], a=t.dims["a"]) for t in (k_up, v)]
        modules += self.linear("kv.up", source, (k_up, v), *ups, modules=UP)
        rotated = self.act("q.rope", a=width), self.act("k.rope", a=width)
        modules.append(Rope("rope", (q, k_up, rope_key), rotated, modules=UP))
        return self._core(modules, *rotated, v, y, local, qk, mla.v)

    def _core(
        self, modules: list[Module], q: Tensor, k: Tensor, v: Tensor, y: Tensor, local: bool, qk: int, value: int
    ) -> SelfAttention:
        """Adds the attention core and the output projection to the modules of attention."""
        model = self.model
        width = Dim(model.heads * value, unit=value)
        o = self.act("o", a=width)
        window, chunk = (model.window, model.attention_chunk) if local else (None, None)
        ins = (q, k.rename_dims(s="t"), v.rename_dims(s="t"))
        place = window, self.tokens_before, self.tokens_after, self.document, chunk, None, model.bidirectional
        modules.append(CoreAttention("core", ins, (o,), (), qk, self.attention, model.dropout > 0, value, *place))
        modules += self.linear("proj", o, (y,), self.weight("wo", a=width, h=self.hidden_dim))
        return SelfAttention("attention", tuple(modules))

    # --------------------------------------------------------------------------------- MLP and experts

    def _dense(self, x: Tensor) -> tuple[Module, tuple[Tensor, ...]]:
        """Builds the MLP of a layer without experts; returns also its output."""
        moe, y = self.model.moe, self.act("down")
        ffn = moe.dense_ffn if moe and moe.dense_ffn else self.model.ffn
        return self._mlp("mlp", x, y, Dim(ffn)), (y,)

    def _mlp(self, name: str, x: Tensor, y: Tensor, f: Dim, kind: type[MLP] = MLP) -> MLP:
        model, h, pre = self.model, self.hidden_dim, "" if name == "mlp" else f"{name}."
        names = [f"{pre}{one}" for one in (("gate", "up") if model.gated else ("up",))]
        ups = tuple(self.act(one, f=f) for one in names)
        weights = [self.weight(f"w{one}", h=h, f=f) for one in names]
        if model.mlp_bias:
            weights += [self.weight(f"b{one}", f=f) for one in names]
        act = self.act(f"{pre}act", f=f)
        saved, stores = save_inputs(self.fp8_activation_inputs, ups)
        return kind(
            name,
            (
                *self.linear(f"{pre}up", x, ups, *weights),
                *stores,
                Activation(f"{pre}act", saved, (act,), modules=("act",)),
                *self.linear(f"{pre}down", act, (y,), self.weight(f"w{pre}down", f=f, h=h)),
            ),
        )

    def _moe(self, x: Tensor) -> tuple[Module, tuple[Tensor, ...]]:
        """Builds router, routed and shared experts; returns also their outputs."""
        moe = self.model.moe
        assert moe is not None
        r, y = Dim(moe.experts), self.act("down")
        logits = self.act("router.logits", r=r)
        chosen = Tensor("chosen", {**self.token_dims, "k": Dim(moe.top_k)}, "fp32")
        router = [self.weight("wrouter", h=self.hidden_dim, r=r)]
        router += [self.weight("brouter", r=r)] if moe.router_bias else []
        # Routers are not quantised.
        modules: list[Module] = [
            Linear("router", (x,), (logits,), tuple(router), self.grad_dtype),
            TopK("top_k", (logits,), (chosen,)),
            *self._experts(moe, x, chosen, y),
        ]
        if not moe.shared_ffn:
            return MoE("moe", tuple(modules), moe.experts, moe.capacity), (y,)
        shared = self.act("shared.down")
        modules.append(self._mlp("shared", x, shared, Dim(moe.shared_ffn), SharedExperts))
        return MoE("moe", tuple(modules), moe.experts, moe.capacity), (y, shared)

    def _experts(self, moe: MoEShape, x: Tensor, chosen: Tensor, y: Tensor) -> list[Module]:
        """Builds token dispatch, routed experts and combine.

        A token takes top_k slots of experts, times the capacity factor if there is one. The slots of a sequence are
        counted along its dim ``s`` and sharded evenly over the experts.
        """
        model, f = self.model, Dim(moe.expert_ffn)
        places = Fraction(moe.top_k) * Fraction(moe.capacity or 1).limit_denominator(1000)
        e, own = Dim(1, unit=Fraction(1, moe.experts)), Dim(moe.experts)
        places_of = {"b": self.token_dims["b"], "s": Dim(self.seq * places, unit=places), "e": e}

        def routed_tensor(name: str, **dims: Dim) -> Tensor:
            return Tensor(name, {**places_of, **dims}, self.dtype)

        names = ("expert.gate", "expert.up") if model.gated else ("expert.up",)
        sent, ups, act, back = (
            routed_tensor("sent", h=self.hidden_dim),
            tuple(routed_tensor(name, f=f) for name in names),
            routed_tensor("expert.act", f=f),
            routed_tensor("expert.down", h=self.hidden_dim),
        )
        weights = [self.weight(f"w{name}", e=own, h=self.hidden_dim, f=f) for name in names]
        last = [self.weight("wexpert.down", e=own, f=f, h=self.hidden_dim)]
        if model.mlp_bias:
            weights += [self.weight(f"b{name}", e=own, f=f) for name in names]
            last += [self.weight("bexpert.down", e=own, h=self.hidden_dim)]
        made = self.grad_dtype, self.quantised
        saved, stores = save_inputs(self.fp8_activation_inputs, ups, ExpertSavedCast)
        arrived, casts = cast_input(self.quantised, sent, ExpertCast)
        inner, more = cast_input(self.quantised, act, ExpertCast)
        return [
            Permute("permute", (x,), (sent,)),
            *casts,
            ExpertLinear("expert.up", (arrived,), ups, tuple(weights), *made, sorts="ins"),
            *stores,
            ExpertActivation("expert.act", saved, (act,), modules=("moe_act", "act")),
            *more,
            ExpertLinear("expert.down", (inner,), (back,), tuple(last), *made, sorts="outs"),
            Unpermute("unpermute", (back, chosen), (y,)),
        ]

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
        """Builds final norm, output layer and loss. owns: they have their own weights, instead of reading others."""
        normed, logits = self.act("norm.out"), self.act("logits", v=Dim(self.vocab))
        loss = Tensor("loss", self.token_dims, "fp32")
        scales = self.norm_weights("final_norm") if owns else ()
        head = (self.weight("head", h=self.hidden_dim, v=Dim(self.vocab)),)
        held, read = (head, ()) if owns else ((), head)
        return [
            Norm("final_norm", (x,), (normed,), scales),
            Head("head", (normed,), (logits,), held, self.grad_dtype, "", self.model.tied, shared_weights=read),
            Loss("loss", (logits,), (loss,), (), self.loss_traffic, self.loss_kept, self.loss_peaks),
        ]

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
