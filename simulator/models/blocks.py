"""Builds the blocks of layers: attention, MLPs and experts."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from meshcast.simulator.ir.decoder_operators import CappedAttention, NormOfHeads, ReadContext
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
from meshcast.simulator.ir.operators import Activation, Concat, CoreAttention, Linear, Norm, Rope
from meshcast.simulator.ir.sparse_attention_operators import ChooseKeys, detach
from meshcast.simulator.models.parts import MLA, MoEShape, SparseIndex
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

    def down_bias(self, experts: bool) -> tuple[Tensor, ...]:
        """Makes the bias of the MLP or the shared experts, if there is any; routed experts have their biases."""
        model = self.model
        has_bias = not experts or (model.moe and model.moe.shared_ffn)
        return (self.weight("down.bias", h=self.hidden_dim),) if model.mlp_bias and has_bias else ()

    # --------------------------------------------------------------------------------------- attention

    def self_attention(self, x: Tensor, y: Tensor, local: bool) -> SelfAttention:
        """Builds attention of the model's type."""
        return self._latent(self.model.mla, x, y, local) if self.model.mla else self._attention(x, y, local)

    def _attention(self, x: Tensor, y: Tensor, local: bool) -> SelfAttention:
        model, d = self.model, self.model.head_dim
        width = Dim(model.heads * d, unit=d)
        kv = Dim(model.kv_heads * d, unit=d, copies=True)
        q, k, v = (self.act(n, a=a) for n, a in (("q", width), ("k", kv), ("v", kv)))
        weights = [self.weight(n, h=self.hidden_dim, a=a) for n, a in (("wq", width), ("wk", kv), ("wv", kv))]
        gate = self._attention_gate()
        weights += [self.weight("wgate", h=self.hidden_dim, a=tensor.dims["a"]) for tensor in gate]
        if model.qkv_bias:
            weights += [self.weight(n, a=a) for n, a in (("bq", width), ("bk", kv), ("bv", kv))]
            weights += [self.weight("bgate", a=width)] if model.attention_gate is True else []
        if model.sinks:  # sharded as the heads are, by everything that shards this layer, as its biases
            weights.append(self.weight("sinks", a=Dim(model.heads)))
        modules = self.linear("qkv", x, (q, k, v, *gate), *weights, whole=model.fused_qkv)
        has_rope = model.positions == "rope" and (local or model.full_rope)
        if model.qk_layernorm in (True, "all") or (model.qk_layernorm and has_rope):
            normed = self.act("q.norm", a=width), self.act("k.norm", a=kv)
            if model.qk_layernorm == "all":
                both = self.weight("q.norm.weight", a=width), self.weight("k.norm.weight", a=kv)
                modules.append(NormOfHeads("qk_norm", (q, k), normed, both, modules=("norm",)))
            else:
                weighted = "qk" if model.qk_layernorm is True else ""
                scales = tuple(self.weight(f"{n}.norm.weight", d=Dim(d)) for n in weighted)
                modules.append(Norm("qk_norm", (q, k), normed, scales, modules=("norm",)))
            q, k = normed
        if has_rope:
            rotated = self.act("q.rope", a=width), self.act("k.rope", a=kv)
            modules.append(Rope("rope", (q, k), rotated, (), model.rope_share))
            q, k = rotated
        return self._core(modules, q, k, v, y, local, d, d, gate)

    def _latent(self, mla: MLA, x: Tensor, y: Tensor, local: bool) -> SelfAttention:
        """Builds multi-head latent attention: queries, keys, values projected from latents (arXiv 2405.04434, 2.1)."""
        heads, qk = self.model.heads, mla.qk_nope + mla.qk_rope
        width, value = Dim(heads * qk, unit=qk), Dim(heads * mla.v, unit=mla.v)
        q, v = self.act("q", a=width), self.act("v", a=value)
        k_up = self.act("k.up", a=Dim(heads * mla.qk_nope, unit=mla.qk_nope))
        rope_key = self.act("k.pe", r=Dim(mla.qk_rope))
        x, modules = cast_input(self.quantised, x)
        if mla.q_lora_rank:
            queries = self._project_down(modules, x, "q.latent", mla.q_lora_rank)
            modules += self.linear("q.up", queries, (q,), self.weight("wq", r=queries.dims["r"], a=width), modules=UP)
        else:
            queries = x
            modules += self.linear("q", x, (q,), self.weight("wq", h=self.hidden_dim, a=width), modules=UP)
        source = self._project_down(modules, x, "kv.latent", mla.kv_lora_rank, rope_key)
        ups = [self.weight(f"w{t.name}", r=source.dims["r"], a=t.dims["a"]) for t in (k_up, v)]
        modules += self.linear("kv.up", source, (k_up, v), *ups, modules=UP, whole=True)
        rotated = self.act("q.rope", a=width), self.act("k.rope", a=width)
        if self.model.positions == "rope":
            modules.append(Rope("rope", (q, k_up, rope_key), rotated, modules=UP, launches=LATENT_ROPE_LAUNCHES))
        else:
            rotated = q, rotated[1]
            modules.append(Concat("k.joined", (k_up, rope_key), rotated[1:], modules=UP))
        if mla.index:
            modules += self._choose_keys(mla.index, x, queries)
        gate = self._attention_gate()
        if gate:
            modules += self.linear(
                "gate", x, gate, self.weight("wgate", h=self.hidden_dim, a=gate[0].dims["a"]), modules=UP
            )
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

    def _project_down(self, modules: list[Module], x: Tensor, name: str, rank: int, *more: Tensor) -> Tensor:
        """Adds the projection of x to a latent of width `rank`, and its norm; the same linear makes `more`."""
        latent, normed = self.act(name, r=Dim(rank)), self.act(f"{name}.norm", r=Dim(rank))
        weights = [self.weight(f"w{t.name}", h=self.hidden_dim, r=t.dims["r"]) for t in (latent, *more)]
        modules.extend(self.linear(f"{name}.down", x, (latent, *more), *weights, whole=True))
        if not self.model.qk_layernorm:
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
        model = self.model
        width = Dim(model.heads * value, unit=value)
        o = self.act("o", a=width)
        window, chunk = (model.window, model.attention_chunk) if local else (None, None)
        if model.mla and model.mla.index:
            window = model.mla.index.top_k  # a query sees as many keys as in a window, wherever they are
        if model.projected_keys:
            k, v = (self._project(modules, tensor) for tensor in (k, v))
            ins = q, k, v
        else:
            ins = q, k.rename_dims(s="t"), v.rename_dims(s="t")
        place = window, self.tokens_before, self.tokens_after, self.document, chunk, None, model.bidirectional
        kind = CappedAttention if "attention" in model.softcaps else CoreAttention
        modules.append(kind("core", ins, (o,), (), qk, self.attention, model.dropout > 0, value, *place))
        if gate:
            gated = self.act("o.gated", a=width)
            modules.append(Activation("attention.gate", (o, *gate), (gated,)))
            o = gated
        modules += self.linear("proj", o, (y,), self.weight("wo", a=width, h=self.hidden_dim))
        return SelfAttention("attention", tuple(modules))

    def _project(self, modules: list[Module], tensor: Tensor) -> Tensor:
        """Adds the projection of keys or values along the sequence to the modules of attention (Linformer)."""
        name, positions = f"{tensor.name}.projected", Dim(self.model.projected_keys or 0)
        kept = {dim: size for dim, size in tensor.dims.items() if dim != "s"}
        projected = Tensor(name, {**kept, "t": positions}, self.dtype)
        modules += self.linear(name, tensor, (projected,), self.weight(f"w{name}", s=tensor.dims["s"], t=positions))
        return projected

    def cross_attention(self, x: Tensor, y: Tensor) -> CrossAttention:
        """Builds attention of the tokens `x` of a decoder to the output of its encoder."""
        model, d, context = self.model, self.model.head_dim, self.context
        width, kv = Dim(model.heads * d, unit=d), Dim(model.kv_heads * d, unit=d, copies=True)
        read = replace(context, name="context.read")
        q, o = self.act("cross.q", a=width), self.act("cross.o", a=width)
        tokens = {name: dim for name, dim in context.dims.items() if name != "h"}
        k, v = (Tensor(f"cross.{n}", {**tokens, "a": kv}, self.dtype) for n in "kv")
        queries = [self.weight("wcross.q", h=self.hidden_dim, a=width)]
        keys = [self.weight(f"wcross.{n}", h=self.hidden_dim, a=kv) for n in "kv"]
        if model.qkv_bias:
            queries.append(self.weight("bcross.q", a=width))
            keys += [self.weight(f"bcross.{n}", a=kv) for n in "kv"]
        ins = q, k.rename_dims(s="t"), v.rename_dims(s="t")
        kernel = d, self.attention, model.dropout > 0, d
        return CrossAttention(
            "cross_attention",
            (
                ReadContext("context", (context,), (read,)),
                *self.linear("cross.q", x, (q,), *queries),
                *self.linear("cross.kv", read, (k, v), *keys),
                CoreAttention("cross.core", ins, (o,), (), *kernel, bidirectional=True),
                *self.linear("cross.proj", o, (y,), self.weight("wcross.o", a=width, h=self.hidden_dim)),
            ),
        )

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
        return kind(
            name,
            (
                *self.linear(f"{pre}up", x, ups, *weights),
                *stores,
                Activation(f"{pre}act", saved, (act,), modules=("act",)),
                *self.linear(f"{pre}down", act, (y,), self.weight(f"w{pre}down", f=f, h=h)),
            ),
        )

    def moe(self, x: Tensor, experts: int) -> tuple[Module, tuple[Tensor, ...]]:
        """Builds router, routed and shared experts; returns also their outputs. experts: routed ones of the layer."""
        assert self.model.moe is not None
        moe = self.model.moe.model_copy(update={"experts": experts})
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

    def _gate_shared(self, modules: list[Module], x: Tensor, shared: Tensor) -> Tensor:
        """Adds the gate of shared experts to the modules of experts; returns their weighted result."""
        single = Dim(1)
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

    def _experts(self, moe: MoEShape, x: Tensor, chosen: Tensor, y: Tensor) -> list[Module]:
        """Builds token dispatch, routed experts and combine."""
        f, e = Dim(moe.expert_ffn), Dim(moe.experts)
        names = ("expert.gate", "expert.up") if self.model.gated else ("expert.up",)
        sent, back = (self._routed_tensor(moe, name, h=self.hidden_dim) for name in ("sent", "expert.down"))
        act = self._routed_tensor(moe, "expert.act", f=f)
        ups = tuple(self._routed_tensor(moe, name, f=f) for name in names)
        weights = [self.weight(f"w{name}", e=e, h=self.hidden_dim, f=f) for name in names]
        last = [self.weight("wexpert.down", e=e, f=f, h=self.hidden_dim)]
        if self.model.mlp_bias:
            weights += [self.weight(f"b{name}", e=e, f=f) for name in names]
            last += [self.weight("bexpert.down", e=e, h=self.hidden_dim)]
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
