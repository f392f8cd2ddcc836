"""Builds the blocks of layers: attention, MLPs and experts."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from meshcast.simulator.ir.decoder_operators import CappedAttention, NormOfHeads, ReadContext, ReadKeys
from meshcast.simulator.ir.head_expert_operators import HeadExperts, HeadExpertsBack
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.modules import MLP, CrossAttention, Module, MoE, SelfAttention, SharedExperts
from meshcast.simulator.ir.moe_operators import (
    ExpertActivation,
    ExpertCast,
    ExpertLinear,
    ExpertSavedCast,
    Permute,
    TopK,
    Unpermute,
    WeightedSum,
)
from meshcast.simulator.ir.operators import (
    Activation,
    Concat,
    CoreAttention,
    Embedding,
    Linear,
    Norm,
    Rope,
    Sum,
)
from meshcast.simulator.ir.sparse_attention_operators import ChooseKeys, ChosenAttention, detach
from meshcast.simulator.models.parts import MLA, LayerInput, MoEShape, SparseIndex
from meshcast.simulator.models.recurrent_blocks import RecurrentBuilder
from meshcast.simulator.models.shapes import cast_input, save_inputs

UP = ("mla_up_proj",)
"""The label of the modules between the latents and the core of latent attention: norms, up-projections and RoPE.
Megatron-Core recomputes them as a single module; its norms are fused into the linear layers after them."""

LATENT_ROPE_LAUNCHES = 1.6
"""Time of the host to launch the rotation in latent attention, over that in other attention, where elements are paired
by halves and keys are whole: interleaved elements are brought together first, queries and keys joined again and copied
to be contiguous. Counted in Megatron-Core without fusion: 31 and 33 kernels, forward and backward, against 24 and 16
(multi_latent_attention.py and rope_utils.py)."""


class BlockBuilder(RecurrentBuilder):
    """Builds the blocks of layers for a micro-batch of all replicas."""

    def proj_bias(self) -> tuple[Tensor, ...]:
        """Makes the bias of the output layer of attention, if there is any."""
        return (self.weight("proj.bias", h=self.hidden_dim),) if self.model.proj_bias else ()

    def _has_bias(self, projection: str) -> bool:
        """Returns whether a projection of attention has a bias: ``q``, ``k``, ``v`` or ``gate``."""
        return bool(self.model.qkv_bias) and not (projection == "k" and self.model.qkv_bias == "queries-values")

    def down_bias(self, experts: bool) -> tuple[Tensor, ...]:
        """Makes the bias of the MLP or the shared experts, if there is any; routed experts have their biases."""
        model = self.model
        has_bias = model.mlp_bias and (not experts or (model.moe and model.moe.shared_ffn))
        has_bias = has_bias or (experts and model.moe and model.moe.sum_bias)
        bias = (self.weight("down.bias", h=self.hidden_dim),) if has_bias else ()
        return (*bias, *((self.weight("result.scale", k=Dim(1)),) if model.result_scale else ()))

    # --------------------------------------------------------------------------------------- attention

    def self_attention(self, x: Tensor, y: Tensor, local: bool) -> SelfAttention:
        """Builds attention of the model's type."""
        return self._latent(self.model.mla, x, y, local) if self.model.mla else self._attention(x, y, local)

    def _attention(self, x: Tensor, y: Tensor, local: bool) -> SelfAttention:
        model = self.model
        modules, q, k, v, gate = self.make_heads(x, local)
        return self._core(modules, q, k, v, y, local, model.head_dim, model.value_dim or model.head_dim, gate)

    def make_heads(self, x: Tensor, local: bool) -> tuple[list[Module], Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Builds what makes queries, keys and values from x, and a gate if there is any; returns its modules and
        these."""
        model = self.model
        projected, modules = self._project_heads(x)
        q, k = projected["q"], projected["k"]
        v, gate = projected.get("v", k), tuple(tensor for name, tensor in projected.items() if name == "gate")
        heads: tuple[Tensor, ...] = (q,) if model.reads_keys else (q, k)
        has_rope = model.positions == "rope" and (local or model.full_rope)
        if model.value_norm and not model.reads_keys:
            normed = replace(v, name="v.norm")
            modules.append(Norm("v_norm", (v,), (normed,), modules=("norm",)))
            v = normed
        if model.qk_layernorm in (True, "all", "layer") or (model.qk_layernorm and has_rope):
            heads = self._norm_heads(modules, heads, "qk"[: len(heads)])
        if has_rope:
            rotated = tuple(replace(tensor, name=f"{name}.rope") for name, tensor in zip("qk", heads, strict=False))
            modules.append(Rope("rope", heads, rotated, (), model.rope_share))
            heads = rotated
        q, k = heads if len(heads) == 2 else (*heads, k)
        return modules, q, k, v, gate

    def _norm_heads(
        self, modules: list[Module], heads: tuple[Tensor, ...], names: str, prefix: str = ""
    ) -> tuple[Tensor, ...]:
        """Adds the norms of queries, of keys or of both to the modules of attention. names: their letters, q and k;
        prefix: of all names."""
        kind, name = self.model.qk_layernorm, f"{prefix}{names if prefix else 'qk'}_norm"
        normed = tuple(replace(tensor, name=f"{tensor.name}.norm") for tensor in heads)
        if kind == "all":
            widths = [tensor.dims["a"] for tensor in heads]
            every = tuple(self.weight(f"{prefix}{n}.norm.weight", a=a) for n, a in zip(names, widths, strict=True))
            modules.append(NormOfHeads(name, heads, normed, every, modules=("norm",)))
            return normed
        ends = {"l2": (), "layer": ("weight", "bias")}.get(str(kind), ("weight",))
        d = Dim(self.model.head_dim)
        scales = tuple(self.weight(f"{prefix}{n}.norm.{end}", d=d) for end in ends for n in names)
        modules.append(Norm(name, heads, normed, scales, modules=("norm",)))
        return normed

    def _project_heads(self, x: Tensor) -> tuple[dict[str, Tensor], list[Module]]:
        """Builds the projection of x to queries, keys and values, and to a gate if there is any; returns its results by
        name, and its modules. Keys and values of another layer are read in place of the projected ones."""
        model = self.model
        d, of_value = model.head_dim, model.value_dim or model.head_dim
        widths = {"q": Dim(model.heads * d, unit=d)}
        keys = {"k": Dim(model.kv_heads * d, unit=d, copies=True)}
        if model.reads_keys or not model.keys_are_values:
            keys |= {"v": Dim(model.kv_heads * of_value, unit=of_value, copies=True)}
        widths |= {} if model.reads_keys else keys
        if model.attention_gate:
            each = 1 if model.attention_gate == "heads" else of_value
            widths |= {"gate": Dim(model.heads * each, unit=each)}
        projected = {n: self.act("attention.gate" if n == "gate" else n, a=a) for n, a in widths.items()}
        direct = {n: a for n, a in widths.items() if n != "q" or not model.head_experts}
        weights = [self.weight(f"w{n}", h=self.hidden_dim, a=a) for n, a in direct.items()]
        weights += [self.weight(f"b{n}", a=a) for n, a in widths.items() if self._has_bias(n)]
        if model.sinks:  # sharded as the heads are, by everything that shards this layer, as its biases
            weights.append(self.weight("sinks", a=Dim(model.heads)))
        modules = self.linear("qkv", x, tuple(projected[n] for n in direct), *weights, whole=model.fused_qkv)
        if model.head_experts:
            self.split_heads(modules, model.head_experts, x, projected["q"])
        if model.reads_keys:
            read = {name: self.act(f"{name}.read", a=width) for name, width in keys.items()}
            ids = Tensor("ids", self.token_dims, "int64")
            modules.append(ReadKeys("keys.read", (ids,), tuple(read.values()), (), launches=0.0))
            projected |= read
        return projected, modules

    def _latent(self, mla: MLA, x: Tensor, y: Tensor, local: bool) -> SelfAttention:
        """Builds multi-head latent attention: queries, keys, values projected from latents (arXiv 2405.04434, 2.1)."""
        heads, qk = self.model.heads, mla.qk_nope + mla.qk_rope
        width, value = Dim(heads * qk, unit=qk), Dim(heads * mla.v, unit=mla.v)
        q, v = self.act("q", a=width), self.act("v", a=value)
        k_up = self.act("k.up", a=Dim(heads * mla.qk_nope, unit=mla.qk_nope))
        rope_key = self.act("k.pe", r=Dim(mla.qk_rope))
        x, modules = cast_input(self.quantised, x)
        if mla.q_lora_rank:
            queries = self.project_down(modules, x, "q.latent", mla.q_lora_rank)
            modules += self.linear("q.up", queries, (q,), self.weight("wq", r=queries.dims["r"], a=width), modules=UP)
        else:
            queries = x
            modules += self.linear("q", x, (q,), self.weight("wq", h=self.hidden_dim, a=width), modules=UP)
        source = self.project_down(modules, x, "kv.latent", mla.kv_lora_rank, rope_key)
        ups = [self.weight(f"w{t.name}", r=source.dims["r"], a=t.dims["a"]) for t in (k_up, v)]
        modules += self.linear("kv.up", source, (k_up, v), *ups, modules=UP, whole=True)
        rotated = self.act("q.rope", a=width), self.act("k.rope", a=width)
        if self.model.positions == "rope":
            modules.append(Rope("rope", (q, k_up, rope_key), rotated, modules=UP, launches=LATENT_ROPE_LAUNCHES))
        else:
            rotated = q, rotated[1]
            modules.append(Concat("k.joined", (k_up, rope_key), rotated[1:], modules=UP))
        if mla.index and not mla.index.shared:
            modules += self._choose_keys(mla.index, x, queries)
        gate = self._attention_gate()
        if gate:
            weights = [self.weight("wgate", h=self.hidden_dim, a=gate[0].dims["a"])]
            weights += [self.weight("sinks", a=Dim(heads))] if self.model.sinks else []
            modules += self.linear("gate", x, gate, *weights, modules=UP)
        return self._core(modules, *rotated, v, y, local, qk, mla.v, gate)

    def _attention_gate(self) -> tuple[Tensor, ...]:
        """Makes the gate of the result of attention, if it has one."""
        model = self.model
        width = Dim(model.gate_width, unit=1 if model.attention_gate == "heads" else model.head_dim)
        return (self.act("attention.gate", a=width),) if model.attention_gate else ()

    def _choose_keys(self, index: SparseIndex, x: Tensor, queries: Tensor) -> list[Module]:
        """Builds the indexer of sparse attention from the input of the layer and the latent of queries. Every rank of
        tensor parallelism computes all of it, for positions p: those of its shard are gathered, as Megatron-Core does
        (`experimental_attention_variant/dsa.py`)."""
        heads, d, n = Dim(index.heads * index.dim, unit=index.dim), Dim(index.dim), Dim(index.heads)
        positions = {"p" if name == "s" else name: dim for name, dim in self.token_dims.items()}
        x, queries = x.rename_dims(s="p"), queries.rename_dims(s="p")

        def make(name: str, **dims: Dim) -> Tensor:
            return Tensor(f"index.{name}", {**positions, **dims}, self.dtype)

        q, k, normed, weights = make("q", i=heads), make("k", d=d), make("k.norm", d=d), make("weights", n=n)
        chosen = replace(make("chosen", k=Dim(min(index.top_k, self.seq))), dtype="int32")
        linears = [
            *self.linear("index.q", queries, (q,), self.weight("windex.q", r=queries.dims["r"], i=heads)),
            *self.linear("index.k", x, (k,), self.weight("windex.k", h=self.hidden_dim, d=d)),
            *self.linear("index.weights", x, (weights,), self.weight("windex.weights", h=self.hidden_dim, n=n)),
        ]
        scales = self.weight("index.k.scale", d=d), self.weight("index.k.bias", d=d)
        return [
            *map(detach, linears),
            Norm("index.k.norm", (k,), (normed,), scales, modules=("norm",)),
            ChooseKeys("index.choose", (q, normed, weights), (chosen,), (), index.dim, self.document),
        ]

    def project_down(self, modules: list[Module], x: Tensor, name: str, rank: int, *more: Tensor) -> Tensor:
        """Adds the projection of x to a latent of width `rank`, and its norm; the same linear makes `more`."""
        latent, normed = self.act(name, r=Dim(rank)), self.act(f"{name}.norm", r=Dim(rank))
        weights = [self.weight(f"w{t.name}", h=self.hidden_dim, r=t.dims["r"]) for t in (latent, *more)]
        modules.extend(self.linear(f"{name}.down", x, (latent, *more), *weights, whole=True))
        if not (self.model.qk_layernorm or self.model.compressed):
            return latent
        scale = (self.weight(f"{name}.scale", r=Dim(rank)),)
        modules.append(Norm(f"{name}.norm", (latent,), (normed,), scale, modules=("norm", *UP)))
        return normed

    def _core(
        self,
        modules: list[Module],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        y: Tensor,
        local: bool,
        qk: int,
        value: int,
        gate: tuple[Tensor, ...] = (),
    ) -> SelfAttention:
        """Adds the attention core, its gate if there is any, and the output projection to the modules of attention."""
        return self.finish_attention(modules, self.attend(modules, q, k, v, local, qk, value), y, gate)

    def finish_attention(
        self, modules: list[Module], o: Tensor, y: Tensor, gate: tuple[Tensor, ...] = ()
    ) -> SelfAttention:
        """Adds the gate of the result of attention if there is any, a norm if there is any, and the output projection
        to the modules of attention."""
        model, width = self.model, o.dims["a"]
        if gate:
            gated = self.act("o.gated", a=width)
            modules.append(Activation("attention.gate", (o, *gate), (gated,)))
            o = gated
        if model.inner_norms:
            o = self._norm_inside(modules, o, "a")
        if model.head_experts:
            modules.append(self.join_heads(model.head_experts, o, y))
        else:
            modules += self.linear("proj", o, (y,), self.weight("wo", a=width, h=self.hidden_dim))
        return SelfAttention("attention", tuple(modules))

    def attend(
        self, modules: list[Module], q: Tensor, k: Tensor, v: Tensor, local: bool, qk: int, value: int
    ) -> Tensor:
        """Adds the attention core to the modules of attention; returns its result.

        qk, value: widths of a head of keys, and of values.
        """
        model = self.model
        o = self.act("o", a=Dim(model.heads * value, unit=value))
        window, chunk = (model.window, model.attention_chunk) if local else (None, None)
        kind = CappedAttention if "attention" in model.softcaps else CoreAttention
        if model.mla and model.mla.index:
            window, kind = model.mla.index.top_k, ChosenAttention
        if model.projected_keys:
            k, v = (self._project(modules, tensor) for tensor in (k, v))
            ins = q, k, v
        else:
            ins = q, k.rename_dims(s="t"), v.rename_dims(s="t")
        place = window, self.tokens_before, self.tokens_after, self.document, chunk, None, model.bidirectional
        modules.append(kind("core", ins, (o,), (), qk, self.attention, model.score_dropout, value, *place))
        return o

    def join_heads(self, experts: int, o: Tensor, y: Tensor) -> Module:
        """Builds the output layer of a mixture of attention heads."""
        width = Dim(self.model.kv_heads * self.model.head_dim, unit=self.model.head_dim)
        weight = self.weight("wo", e=Dim(experts), a=width, h=self.hidden_dim)
        return HeadExpertsBack("proj", (o,), (y,), (weight,), self.grad_dtype)

    def split_heads(self, modules: list[Module], experts: int, x: Tensor, q: Tensor) -> None:
        """Adds the router and the queries of a mixture of attention heads to the modules of attention."""
        passes, width = self.model.heads // self.model.kv_heads, Dim(self.model.key_width, unit=self.model.head_dim)
        logits = self.act("attention.logits", r=Dim(experts))
        chosen = Tensor("attention.chosen", {**self.token_dims, "k": Dim(passes)}, "fp32")
        router = self.weight("wattention.router", h=self.hidden_dim, r=Dim(experts))
        queries = self.weight("wq", e=Dim(experts), h=self.hidden_dim, a=width)
        modules += [
            Linear("attention.router", (x,), (logits,), (router,), self.grad_dtype),
            TopK("attention.top_k", (logits,), (chosen,)),
            HeadExperts("q", (x,), (q,), (queries,), self.grad_dtype),
        ]

    def _norm_inside(self, modules: list[Module], x: Tensor, width: str) -> Tensor:
        """Adds the norm in front of an output layer, over the whole dim `width` of its input, to the modules."""
        normed, scale = (
            replace(x, name=f"{x.name}.norm"),
            self.weight(f"{x.name}.norm.weight", **{width: x.dims[width]}),
        )
        modules.append(NormOfHeads(normed.name, (x,), (normed,), (scale,), modules=("norm",)))
        return normed

    def _project(self, modules: list[Module], tensor: Tensor) -> Tensor:
        """Adds the projection of keys or values along the sequence to the modules of attention (Linformer)."""
        name, positions = f"{tensor.name}.projected", Dim(self.model.projected_keys or 0)
        kept = {dim: size for dim, size in tensor.dims.items() if dim != "s"}
        projected = Tensor(name, {**kept, "t": positions}, self.dtype)
        modules += self.linear(name, tensor, (projected,), self.weight(f"w{name}", s=tensor.dims["s"], t=positions))
        return projected

    def cross_attention(self, x: Tensor, y: Tensor) -> CrossAttention:
        """Builds attention of the tokens `x` of a decoder to the output of its encoder."""
        d, context = self.model.head_dim, self.context
        width, kv = Dim(self.model.heads * d, unit=d), Dim(self.model.kv_heads * d, unit=d, copies=True)
        read = replace(context, name="context.read")
        q, o = self.act("cross.q", a=width), self.act("cross.o", a=width)
        tokens = {name: dim for name, dim in context.dims.items() if name != "h"} | {"a": kv}
        k, v = Tensor("cross.k", tokens, self.dtype), Tensor("cross.v", tokens, self.dtype)
        queries = [self.weight("wcross.q", h=self.hidden_dim, a=width)]
        keys = [self.weight(f"wcross.{n}", h=self.hidden_dim, a=kv) for n in "kv"]
        queries += [self.weight("bcross.q", a=width)] if self._has_bias("q") else []
        keys += [self.weight(f"bcross.{n}", a=kv) for n in "kv" if self._has_bias(n)]
        norms = list[Module]()
        # Queries are of tokens that ranks may divide, and keys may be of a text that all ranks have.
        asks, asked = (self._norm_cross(norms, tensor) for tensor in (q, k))
        ins = asks, *(t.rename_dims(**{"w" if context.has("w") else "s": "t"}) for t in (asked, v))
        kernel = d, self.attention, self.model.score_dropout, d
        return CrossAttention(
            "cross_attention",
            (
                ReadContext("context", (context,), (read,)),
                *self.linear("cross.q", x, (q,), *queries),
                *self.linear("cross.kv", read, (k, v), *keys),
                *norms,
                CoreAttention("cross.core", ins, (o,), (), *kernel, bidirectional=True),
                *self.linear("cross.proj", o, (y,), self.weight("wcross.o", a=width, h=self.hidden_dim)),
            ),
        )

    def _norm_cross(self, modules: list[Module], heads: Tensor) -> Tensor:
        """Adds the norm of queries or keys of attention to an encoder, if there is one; returns its output."""
        if not self.model.qk_layernorm:
            return heads
        (normed,) = self._norm_heads(modules, (heads,), heads.name[-1], "cross.")
        return normed

    # --------------------------------------------------------------------------------- MLP and experts

    def dense(self, x: Tensor) -> tuple[Module, tuple[Tensor, ...]]:
        """Builds the MLP of a layer without experts; returns also its output."""
        moe, y = self.model.moe, self.act("down")
        ffn = moe.dense_ffn if moe and moe.dense_ffn else self.model.ffn
        if self.model.channel_mix:
            return self._channel_mix(x, y, Dim(ffn)), (y,)
        return self._mlp("mlp", x, y, Dim(ffn)), (y,)

    def _channel_mix(self, x: Tensor, y: Tensor, f: Dim) -> MLP:
        """Builds an MLP of a mixture of neighbouring tokens, with a receptance that every rank computes whole."""
        shift, (mixed, asked) = self.mix_tokens("mlp", x, ("k", "r"))
        inner, receptance = self.act("mlp.value"), self.act("mlp.receptance")
        weight = self.weight("wmlp.receptance", g=self.hidden_dim, h=self.hidden_dim)
        block = self._mlp("mlp", mixed, inner, f)
        modules = [
            shift,
            *block.children,
            *self.linear("mlp.receptance", asked.rename_dims(h="g"), (receptance,), weight),
        ]
        return MLP("mlp", (*modules, Activation("mlp.receive", (inner, receptance), (y,))))

    def _mlp(self, name: str, x: Tensor, y: Tensor, f: Dim, kind: type[MLP] = MLP) -> MLP:
        model, h, pre = self.model, self.hidden_dim, "" if name == "mlp" else f"{name}."
        names = [f"{pre}{part}" for part in (("gate", "up") if model.gated else ("up",))]
        ups = tuple(self.act(name, f=f) for name in names)
        weights = [self.weight(f"w{name}", h=h, f=f) for name in names]
        if model.mlp_bias:
            weights += [self.weight(f"b{name}", f=f) for name in names]
        act = self.act(f"{pre}act", f=f)
        saved, stores = save_inputs(self.fp8_activation_inputs, ups)
        shape = (self.weight(f"{pre}act.shape", n=Dim(2)),) if model.activation == "xielu" else ()
        modules: list[Module] = [
            *self.linear(f"{pre}up", x, ups, *weights),
            *stores,
            Activation(f"{pre}act", saved, (act,), shape, modules=("act",)),
        ]
        if model.inner_norms:
            act = self._norm_inside(modules, act, "f")
        modules += self.linear(f"{pre}down", act, (y,), self.weight(f"w{pre}down", f=f, h=h))
        return kind(name, tuple(modules))

    def moe(self, x: Tensor, experts: int) -> tuple[Module, tuple[Tensor, ...]]:
        """Builds router, routed and shared experts; returns also their outputs. experts: routed ones of the layer."""
        assert self.model.moe is not None
        moe = self.model.moe.model_copy(update={"experts": experts})
        r, y = Dim(moe.experts + moe.zero_experts), self.act("down")
        logits = self.act("router.logits", r=r)
        chosen = Tensor("chosen", {**self.token_dims, "k": Dim(moe.top_k)}, "fp32")
        router = [self.weight("wrouter", h=self.hidden_dim, r=r)]
        router += [self.weight("brouter", r=r)] if moe.router_bias else []
        modules: list[Module] = []
        asks, read = x, x
        if moe.norm == "each":
            asks, read = (self._norm_stream(modules, x, f"{name}.norm") for name in ("router", "experts"))
        # Routers are not quantised.
        modules += [
            Linear("router", (asks,), (logits,), tuple(router), self.grad_dtype),
            TopK("top_k", (logits,), (chosen,)),
            *self._route(moe, read, chosen, y),
        ]
        if moe.zero_experts:
            returned = self.act("zero.sum")
            modules.append(WeightedSum("zero.sum", (y, read, chosen), (returned,)))
            y = returned
        if moe.norm == "each":
            y = self._norm_stream(modules, y, "routed.norm")
        if not moe.shared_ffn:
            return MoE("moe", tuple(modules), moe.experts, moe.capacity), (y,)
        shared = self.act("shared.down")
        modules.append(self._mlp("shared", x, shared, Dim(moe.shared_ffn), SharedExperts))
        if moe.norm == "each":
            shared = self._norm_stream(modules, shared, "shared.norm")
        if moe.shared_gate:
            shared = self._gate_shared(modules, x, shared)
        if moe.residual:
            two, mixed = Dim(2), self.act("mixed")
            shares = Tensor("coefficients", {**self.token_dims, "k": two}, self.dtype)
            weights = self.weight("wcoefficient", h=self.hidden_dim, k=two), self.weight("bcoefficient", k=two)
            modules.append(Linear("coefficient", (x,), (shares,), weights, self.grad_dtype))
            modules.append(WeightedSum("mix", (y, shared, shares), (mixed,)))
            return MoE("moe", tuple(modules), moe.experts, moe.capacity), (mixed,)
        return MoE("moe", tuple(modules), moe.experts, moe.capacity), (y, shared)

    def _norm_stream(self, modules: list[Module], x: Tensor, name: str) -> Tensor:
        """Adds a norm over h to the modules; returns its output."""
        width = x.dims["h"]
        normed = self.act(name, h=width)
        modules.append(Norm(name, (x,), (normed,), self.norm_weights(name, width), modules=("norm",)))
        return normed

    def _gate_shared(self, modules: list[Module], x: Tensor, shared: Tensor) -> Tensor:
        """Adds the gate of shared experts to the modules of experts; returns their weighted result."""
        single = Dim(self.model.moe.shared_weights if self.model.moe else 1)
        share = Tensor("shared.share", {**self.token_dims, "k": single}, self.dtype)
        weighted = self.act("shared.weighted")
        modules.append(
            Linear(
                "shared.gate",
                (x,),
                (share,),
                (self.weight("wshared.gate", h=self.hidden_dim, k=single),),
                self.grad_dtype,
            )
        )
        modules.append(WeightedSum("shared.weigh", (shared, share), (weighted,)))
        return weighted

    def _route(self, moe: MoEShape, x: Tensor, chosen: Tensor, y: Tensor) -> list[Module]:
        """Builds routed experts from x to y, within the projections to and from their latent if they have one. Every
        tensor rank computes these whole."""
        if moe.latent is None:
            return self._experts(moe, x, chosen, y)
        stream, latent = self.hidden_dim, Dim(moe.latent.width)
        sent, total = (self.act(name, h=latent) for name in ("latent.down", "latent.sum"))
        down, up = self._latent_weights("down", stream, latent), self._latent_weights("up", latent, stream)
        modules = self.linear("latent.down", x.rename_dims(h="g"), (sent,), *down)
        modules += self._experts(moe, sent, chosen, total)
        if moe.latent.norm:
            total = self._norm_stream(modules, total, "latent.norm")
        return [*modules, *self.linear("latent.up", total.rename_dims(h="g"), (y,), *up)]

    def _latent_weights(self, name: str, ins: Dim, outs: Dim) -> list[Tensor]:
        """Makes the matrix, and the bias if there is any, of a projection to or from the latent of experts."""
        bias = [self.weight(f"blatent.{name}", h=outs)] if self.model.mlp_bias else []
        return [self.weight(f"wlatent.{name}", g=ins, h=outs), *bias]

    def _experts(self, moe: MoEShape, x: Tensor, chosen: Tensor, y: Tensor) -> list[Module]:
        """Builds token dispatch, routed experts and combine, over tokens as wide as x."""
        f, e = Dim(moe.expert_ffn), Dim(moe.experts)
        names = ("expert.gate", "expert.up") if self.model.gated else ("expert.up",)
        sent, back = (self._routed_tensor(moe, name, h=x.dims["h"]) for name in ("sent", "expert.down"))
        act = self._routed_tensor(moe, "expert.act", f=f)
        ups = tuple(self._routed_tensor(moe, name, f=f) for name in names)
        weights = [self.weight(f"w{name}", e=e, h=x.dims["h"], f=f) for name in names]
        last = [self.weight("wexpert.down", e=e, f=f, h=x.dims["h"])]
        if self.model.mlp_bias:
            weights += [self.weight(f"b{name}", e=e, f=f) for name in names]
            last += [self.weight("bexpert.down", e=e, h=x.dims["h"])]
        saved, stores = save_inputs(self.fp8_activation_inputs, ups, ExpertSavedCast)
        arrived, casts = cast_input(self.quantised, sent, ExpertCast)
        inner, more = cast_input(self.quantised, act, ExpertCast)
        return [
            Permute("permute", (x,), (sent,)),
            *casts,
            ExpertLinear("expert.up", (arrived,), ups, tuple(weights), self.grad_dtype, self.quantised, sorts="ins"),
            *stores,
            ExpertActivation("expert.act", saved, (act,), modules=("moe_act", "act")),
            *more,
            ExpertLinear("expert.down", (inner,), (back,), tuple(last), self.grad_dtype, self.quantised, sorts="outs"),
            Unpermute("unpermute", (back, chosen), (y,)),
        ]

    def _routed_tensor(self, moe: MoEShape, name: str, **dims: Dim) -> Tensor:
        """Returns a tensor of the slots of experts that tokens take: top_k for each, times the capacity factor if any
        . The slots of a sequence are counted along its dim ``s`` and sharded evenly over the experts.
        """
        slots = Fraction(moe.top_k) * Fraction(moe.capacity or 1).limit_denominator(1000)
        of_sequence, expert = Dim(self.seq * slots, unit=slots), Dim(1, unit=Fraction(1, moe.experts))
        return Tensor(name, {"b": self.token_dims["b"], "s": of_sequence, "e": expert, **dims}, self.dtype)

    def read_layer_input(self, part: LayerInput, x: Tensor) -> tuple[list[Module], Tensor]:
        """Builds what a layer adds to its stream `x` from its own input; returns also that.

        The input is looked up and projected in the layer that reads it, from its stream in place of the embedding,
        which is as wide. Every tensor rank computes all of it.
        """
        rows, width = Dim(part.vocab), Dim(part.width)
        names = "looked", "projected", "normed", "sum", "gate", "product"
        looked, projected, normed, total, gate, product = (self.act(f"input.{n}", i=width) for n in names)
        added = self.act("input.added")
        scale = self.weight("input.norm.weight", i=width)
        ids = Tensor("ids", self.token_dims, "int64")
        modules: list[Module] = [
            Embedding("input.embedding", (ids,), (looked,), (self.weight("winput.table", v=rows, i=width),)),
            *self.linear("input.project", x, (projected,), self.weight("winput.project", h=self.hidden_dim, i=width)),
            Norm("input.norm", (projected,), (normed,), modules=("norm",), shared_weights=(scale,)),
            Sum("input.sum", (looked, normed), (total,)),
            *self.linear("input.gate", x, (gate,), self.weight("winput.gate", h=self.hidden_dim, i=width)),
            Activation("input.act", (gate, total), (product,)),
            *self.linear("input.back", product, (added,), self.weight("winput.back", i=width, h=self.hidden_dim)),
        ]
        result = self._norm_stream(modules, added, "input.added.norm")
        return modules, result
