"""Builds blocks that few models have: attention to compressed entries, and connections of several residual streams."""

from __future__ import annotations

from dataclasses import replace

from meshcast.simulator.ir.compressed_attention_operators import AttentionToEntries, Compress, GroupedLinear
from meshcast.simulator.ir.decoder_operators import ReadKeys
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.mamba_operators import TokenConvolution
from meshcast.simulator.ir.modules import MLP, Module, Operator, SelfAttention
from meshcast.simulator.ir.operators import Activation, Concat, Norm, Residual, Rope, Sum
from meshcast.simulator.ir.profile_operators import BiasedAttention, DistanceBias
from meshcast.simulator.ir.sparse_attention_operators import ChooseKeys, detach
from meshcast.simulator.ir.stream_operators import (
    AddToStreams,
    AverageStreams,
    CollapseStreams,
    MixStreams,
    SplitStreams,
    UpdateStreams,
)
from meshcast.simulator.models.block_attention import BlockAttentionBuilder
from meshcast.simulator.models.parts import SparseIndex, StateSpace
from meshcast.simulator.models.rare_parts import CompressedAttention, DistanceProfiles, SharedBlock

ADAPTER = "adapter."
"""What the names of the weights of adapters of shared blocks contain, which every use has."""


def borrow_weights(module: Module) -> Module:
    """Returns an operator that reads the weights of another layer in place of its own; those of adapters stay."""
    if not isinstance(module, Operator) or any(ADAPTER in weight.name for weight in module.weights):
        return module
    return replace(module, weights=(), shared_weights=module.weights)


def _width(tensor: Tensor) -> dict[str, Dim]:
    """Returns the dim of heads or of an MLP of a tensor."""
    return {name: dim for name, dim in tensor.dims.items() if name in ("a", "f")}


class RareBlockBuilder(BlockAttentionBuilder):
    """Builds these blocks for a micro-batch of all replicas."""

    def self_attention(self, x: Tensor, y: Tensor, local: bool) -> SelfAttention:
        if "attention" in self.model.replaced:
            return SelfAttention("attention", self._replacement("proj", x, y, "a"))
        if self.model.compressed:
            return self._attend_to_entries(self.model.compressed, x, y)
        if self.model.blocks:
            return self.attend_to_blocks(self.model.blocks, x, y)
        if self.model.distance_profiles:
            return self._attend_by_distance(self.model.distance_profiles, x, y, local)
        return super().self_attention(x, y, local)

    def dense(self, x: Tensor) -> tuple[Module, tuple[Tensor, ...]]:
        if "mlp" in self.model.replaced:
            y = self.act("down")
            return MLP("mlp", self._replacement("down", x, y, "f")), (y,)
        return super().dense(x)

    def _replacement(self, name: str, x: Tensor, y: Tensor, inner: str) -> tuple[Module, ...]:
        """Builds the linear layer in place of a block, whose input has the dim that ranks divide in the block, `inner`:
        they divide it as the block's last linear layer. Megatron-Core divides its outputs instead
        (``heterogeneous/linear_replacements.py``): as many bytes, more where sequences are sharded too."""
        weight = self.weight(f"w{name}.replaced", **{inner: self.hidden_dim}, h=self.hidden_dim)
        return tuple(self.linear(name, x.rename_dims(h=inner), (y,), weight))

    # --------------------------------------------------------------------- attention to compressed entries

    def _attend_to_entries(self, part: CompressedAttention, x: Tensor, y: Tensor) -> SelfAttention:
        """Builds attention to a window and to entries (DeepSeek-V4, section 2.3)."""
        model, d, modules = self.model, self.model.head_dim, list[Module]()
        queries, rotated = self._make_queries_and_keys(modules, part, x)
        ins, most = [rotated[0], rotated[1].rename_dims(s="t")], None
        if part.rate:
            ins.append(self._compress(modules, part, x, "entries", d))
            if part.index:
                most = min(part.index.top_k, part.entries(self.seq))
                modules += self._choose_entries(part, part.index, x, queries)
        attended = self.act("o", a=rotated[0].dims["a"])
        mask = model.window, self.tokens_before, self.tokens_after, self.document
        kernel = d, self.attention, model.dropout > 0, d, *mask
        core = AttentionToEntries("core", tuple(ins), (attended,), (), *kernel, rate=part.rate or 1, most=most)
        return SelfAttention("attention", (*modules, core, *self._join_groups(part, attended, y)))

    def _make_queries_and_keys(
        self, modules: list[Module], part: CompressedAttention, x: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Adds queries from a latent, and the key of all heads, to the modules; returns the latent, and both."""
        model, d = self.model, self.model.head_dim
        width, single = Dim(model.heads * d, unit=d), Dim(d, unit=d, copies=True)
        names, heads = ("q", "k"), (self.act("q", a=width), self.act("k", a=single))
        normed, rotated = (tuple(replace(t, name=f"{t.name}.{end}") for t in heads) for end in ("norm", "rope"))
        queries = self.project_down(modules, x, "q.latent", part.q_lora_rank)
        modules += self.linear("q.up", queries, heads[:1], self.weight("wq", r=queries.dims["r"], a=width))
        keys = [self.weight("wk", h=self.hidden_dim, a=single)]
        keys += [self.weight("sinks", a=Dim(model.heads))] if model.sinks else []
        modules += self.linear("k", x, heads[1:], *keys)
        for name, before, after in zip(names, heads, normed, strict=True):
            scale = (self.weight("k.norm.weight", d=Dim(d)),) if name == "k" else ()
            modules.append(Norm(f"{name}_norm", (before,), (after,), scale, modules=("norm",)))
        modules.append(Rope("rope", normed, rotated, (), model.rope_share))
        return queries, rotated

    def _join_groups(self, part: CompressedAttention, o: Tensor, y: Tensor) -> list[Module]:
        """Builds the two steps from the result of attention, rotated back, to the width of the stream."""
        turned, latents = replace(o, name="o.rope"), Dim(part.out_groups * part.out_rank, unit=part.out_rank)
        group = Dim(o.dims["a"].size, unit=o.dims["a"].size // part.out_groups)
        latent, down = self.act("o.latent", a=latents), self.weight("wo.latent", a=group, r=Dim(part.out_rank))
        return [
            Rope("o.rope", (o,), (turned,), (), self.model.rope_share),
            GroupedLinear("o.latent", (turned,), (latent,), (down,), self.grad_dtype),
            *self.linear("proj", latent, (y,), self.weight("wo", a=latents, h=self.hidden_dim)),
        ]

    def _compress(
        self, modules: list[Module], part: CompressedAttention, x: Tensor, name: str, dim: int, learns: bool = True
    ) -> Tensor:
        """Adds the entries of all tokens to the modules; returns them. dim: width of an entry. learns: whether the
        input gets gradients."""
        width = Dim(part.entry_width(dim))
        sources = tuple(self.act(f"{name}.{word}", r=width) for word in ("values", "weights"))
        linears = self.linear(
            name, x, sources, *(self.weight(f"w{t.name}", h=self.hidden_dim, r=width) for t in sources)
        )
        modules += linears if learns else map(detach, linears)
        entries = Tensor(name, {"b": x.dims["b"], "t": Dim(part.entries(self.seq)), "d": Dim(dim)}, self.dtype)
        bias = self.weight(f"{name}.bias", p=Dim(part.rate or 1), r=width), self.weight(f"{name}.scale", d=Dim(dim))
        gathered = tuple(tensor.rename_dims(s="p") for tensor in sources)
        modules.append(Compress(f"{name}.sum", gathered, (entries,), bias, modules=("norm",)))
        return entries

    def _choose_entries(
        self, part: CompressedAttention, index: SparseIndex, x: Tensor, queries: Tensor
    ) -> list[Module]:
        """Builds the indexer of entries, which every rank of tensor parallelism computes for all positions p."""
        modules = list[Module]()
        keys = self._compress(modules, part, x, "index.entries", index.dim, learns=False)
        positions = {"p" if name == "s" else name: dim for name, dim in self.token_dims.items()}
        heads, n = Dim(index.heads * index.dim, unit=index.dim), Dim(index.heads)
        q, weights = (
            Tensor(f"index.{name}", {**positions, **dims}, self.dtype)
            for name, dims in (("q", {"i": heads}), ("weights", {"n": n}))
        )
        chosen = Tensor("index.chosen", {**positions, "k": Dim(min(index.top_k, part.entries(self.seq)))}, "int32")
        wq, ww = self.weight("windex.q", r=queries.dims["r"], i=heads), self.weight("windex.w", h=self.hidden_dim, n=n)
        linears = [
            *self.linear("index.q", queries.rename_dims(s="p"), (q,), wq),
            *self.linear("index.weights", x.rename_dims(s="p"), (weights,), ww),
        ]
        choose = (q, keys, weights), (chosen,), (), index.dim, self.document, part.rate or 1
        return [*modules, *map(detach, linears), ChooseKeys("index.choose", *choose)]

    # ---------------------------------------------------------------------- distances and convolutions

    def _attend_by_distance(self, part: DistanceProfiles, x: Tensor, y: Tensor, local: bool) -> SelfAttention:
        """Builds attention whose scores have a bias by distance; keys and values pass convolutions."""
        model, d = self.model, self.model.head_dim
        projected, modules = self._project_heads(x)
        k, v = (self.convolve(modules, projected[name], f"{name}.conv") for name in "kv")
        heads = self._norm_heads(modules, (projected["q"], k), "qk") if model.qk_layernorm else (projected["q"], k)
        states, bias, o = (
            self.act(name, a=Dim(model.heads * width, unit=width))
            for name, width in (("states", part.width), ("distance.bias", part.extent), ("o", d))
        )
        profiles = self.weight("profiles", r=Dim(part.width), n=Dim(part.extent))
        states_weight = self.weight("wstates", h=self.hidden_dim, a=states.dims["a"])
        mask = model.window if local else None, self.tokens_before, self.tokens_after, self.document
        kernel = d, self.attention, model.dropout > 0, d, *mask
        keys = heads[1].rename_dims(s="t"), v.rename_dims(s="t")
        modules += [
            *self.linear("states", x, (states,), states_weight),
            DistanceBias("distance.bias", (states,), (bias,), (profiles,), self.grad_dtype),
            BiasedAttention("core", (heads[0], *keys, bias), (o,), (), *kernel),
            *self.linear("proj", o, (y,), self.weight("wo", a=o.dims["a"], h=self.hidden_dim)),
        ]
        return SelfAttention("attention", tuple(modules))

    def convolve(self, modules: list[Module], x: Tensor, name: str) -> Tensor:
        """Adds the convolution of a tensor over tokens to the modules, if the model has it; returns its output."""
        if not self.model.token_convolutions:
            return x
        width = next(dim for dim in ("a", "h") if dim in x.dims)
        taps = self.weight(f"{name}.weight", **{width: x.dims[width]}, taps=Dim(self.model.token_convolutions))
        convolved = replace(x, name=name)
        modules.append(TokenConvolution(name, (x,), (convolved,), (taps,)))
        return convolved

    # ---------------------------------------------------------------------------------- shared blocks

    def mix_behind_shared_block(self, ssm: StateSpace, x: Tensor, borrows: bool) -> tuple[list[Module], Tensor]:
        """Builds a Mamba block that reads the stream and the result of a shared block; returns also its result.

        borrows: whether another layer of the stage holds the weights of the shared block.
        """
        part = self.model.shared_block
        assert part is not None
        projected, result, normed, mixed = (self.act(name) for name in ("shared.out", "shared.sum", "norm1", "mixed"))
        shared, y = self._attend_beside_embedding(part, x)
        inner = self._adapted_mlp(part, y)
        last = self.weight("wshared.out", g=self.hidden_dim, h=self.hidden_dim)
        held = [*shared, *inner]
        return [
            *([borrow_weights(module) for module in held] if borrows else held),
            *self.linear("shared.out", self.act("shared.mlp").rename_dims(h="g"), (projected,), last),
            Residual("shared.sum", (x, projected), (result,)),
            replace(self.layernorm("norm1", result, normed), modules=("norm",)),
            (self.selective_mamba if ssm.rank else self.mamba)(ssm, normed, mixed),
        ], mixed

    def _attend_beside_embedding(self, part: SharedBlock, x: Tensor) -> tuple[list[Module], Tensor]:
        """Builds attention of a shared block over the stream and the embedding side by side; returns also its result.
        The embedding is in memory; the addition to its gradient is left out."""
        model, d, c = self.model, self.model.head_dim, Dim(2 * self.model.hidden)
        embedded, ids = self.act("embedding.read"), Tensor("ids", self.token_dims, "int64")
        both, normed, y = self.act("shared.both", c=c), self.act("shared.norm", c=c), self.act("shared.proj")
        kv = Dim(model.kv_heads * d, unit=d, copies=True)
        heads = [self.act("q", a=Dim(model.heads * d, unit=d)), self.act("k", a=kv), self.act("v", a=kv)]
        weights = [self.weight(f"wshared.{t.name}", c=c, a=t.dims["a"]) for t in heads]
        modules: list[Module] = [
            ReadKeys("embedding.read", (ids,), (embedded,), (), launches=0.0),
            Concat("shared.both", (x, embedded), (both,)),
            Norm("shared.norm", (both,), (normed,), (self.weight("shared.norm.weight", c=c),), modules=("norm",)),
            *self.linear("shared.qkv", normed, tuple(heads), *weights),
        ]
        if part.adapts_attention:
            heads = self._add_adapter(modules, part, "shared.qkv", normed, "c", heads)
        if model.positions == "rope":
            rotated = [replace(tensor, name=f"{tensor.name}.rope") for tensor in heads[:2]]
            modules.append(Rope("rope", tuple(heads[:2]), tuple(rotated), (), model.rope_share))
            heads = [*rotated, heads[2]]
        q, k, v = heads
        attention = self._core(modules, q, k, v, y, False, d, d)
        return [*attention.children], y

    def _adapted_mlp(self, part: SharedBlock, x: Tensor) -> list[Module]:
        """Builds the norm and the MLP of a shared block, up to `shared.mlp`."""
        f, normed = Dim(self.model.ffn), self.act("shared.norm2")
        ups = [self.act(f"shared.{name}", f=f) for name in ("gate", "up")]
        act, y = self.act("shared.act", f=f), self.act("shared.mlp")
        weights = [self.weight(f"w{t.name}", h=self.hidden_dim, f=f) for t in ups]
        modules: list[Module] = [
            Norm(normed.name, (x,), (normed,), self.norm_weights(normed.name), modules=("norm",)),
            *self.linear("shared.ups", normed, tuple(ups), *weights),
        ]
        if part.adapter_rank:
            ups = self._add_adapter(modules, part, "shared.ups", normed, "h", ups)
        return [
            *modules,
            Activation("shared.act", tuple(ups), (act,), modules=("act",)),
            *self.linear("shared.down", act, (y,), self.weight("wshared.down", f=f, h=self.hidden_dim)),
        ]

    def _add_adapter(
        self, modules: list[Module], part: SharedBlock, name: str, x: Tensor, width: str, results: list[Tensor]
    ) -> list[Tensor]:
        """Adds adapters of a use beside a linear layer of a shared block to the modules; returns the sums. width: the
        dim of the input. Queries, keys and values have adapters of their own."""
        sums = [replace(tensor, name=f"{tensor.name}.sum") for tensor in results]
        more = [replace(tensor, name=f"{tensor.name}.adapter") for tensor in results]
        groups = [[tensor] for tensor in more] if "a" in more[0].dims else [more]
        for i, group in enumerate(groups):
            low = self.act(f"{name}.low{i}", r=Dim(part.adapter_rank))
            down = self.weight(f"w{ADAPTER}{low.name}", **{width: x.dims[width]}, r=low.dims["r"])
            ups = [self.weight(f"w{ADAPTER}{t.name}", r=low.dims["r"], **_width(t)) for t in group]
            modules += [
                *self.linear(low.name, x, (low,), down),
                *self.linear(f"{low.name}.up", low, tuple(group), *ups),
            ]
        modules.append(Sum(f"{name}.sum", (*results, *more), tuple(sums)))
        return sums

    # -------------------------------------------------------------------------------- residual streams

    def read_streams(self, number: str, streams: Tensor) -> tuple[list[Module], Tensor, Tensor]:
        """Builds the input of a block from the residual streams, and its norm; returns them, the result, and the
        coefficients of the streams behind the block."""
        part = self.model.hyper_connections
        assert part is not None
        modules, normed = list[Module](), self.act(f"norm{number}")
        x, behind = self.collapse_streams(modules, number, streams, part.behind)
        return [*modules, self.layernorm(normed.name, x, normed)], normed, behind

    def collapse_streams(
        self, modules: list[Module], number: str, streams: Tensor, behind: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Adds the weighted sum of the residual streams to the modules; returns it, and so many further coefficients of
        a token, for what is behind the block."""
        part = self.model.hyper_connections
        assert part is not None
        count, numbers = Dim(part.streams), Dim(part.streams + behind)
        left = Tensor(f"coefficients{number}", {**self.token_dims, "j": Dim(behind)}, "fp32")
        collapsed = self.act(f"collapsed{number}")
        weights = (
            self.weight(f"streams{number}.matrix", m=count, h=self.hidden_dim, j=numbers),
            self.weight(f"streams{number}.base", j=numbers),
            self.weight(f"streams{number}.scale", k=Dim(2 + part.mixes if behind else 1)),
        )
        outs = (collapsed, left) if behind else (collapsed,)
        modules.append(CollapseStreams(f"streams{number}.read", (streams,), outs, weights, self.grad_dtype))
        return collapsed, left

    def write_streams(self, number: str, streams: Tensor, result: Tensor, behind: Tensor, end: Tensor) -> Module:
        """Builds the streams behind a block."""
        part, name, ins = self.model.hyper_connections, f"streams{number}.write", (streams, result, behind)
        if part and part.mixes:
            return MixStreams(name, ins, (end,), (), float(part.mixing_flops(self.model.hidden)))
        return AddToStreams(name, ins, (end,))

    def predict_streams(self, streams: Tensor) -> tuple[list[Module], Tensor, Tensor]:
        """Builds the prediction of all streams by a layer over the first (AltUp); returns also them, and the first."""
        part, first = self.model.altup, self.act("first")
        assert part is not None
        n, predicted = part.streams, replace(streams, name="predicted")
        weights = (
            self.weight("altup.norm.weight", h=self.hidden_dim),
            self.weight("waltup.router", h=self.hidden_dim, m=Dim(n)),
            self.weight("waltup.prediction", j=Dim(n), k=Dim(n * n)),
        )
        products = float(part.mixing_flops(self.model.hidden)), float(2 * n**3)
        update = UpdateStreams("altup.predict", (streams,), (predicted, first), weights, *products, self.grad_dtype)
        return [update], predicted, first

    def correct_streams(self, modules: list[Module], predicted: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the correction of all streams by the result of the layer to the modules; returns them, and the first,
        scaled."""
        part, corrected = self.model.altup, replace(predicted, name="corrected")
        assert part is not None
        first, n = self.act("corrected.first"), Dim(part.streams)
        weights = self.weight("waltup.correction", j=n, k=n), self.weight("altup.scale", h=self.hidden_dim)
        read = (
            self.weight("altup.norm.weight", h=self.hidden_dim),
            self.weight("waltup.router", h=self.hidden_dim, m=n),
        )
        kind = 0.0, float(2 * part.streams**2), self.grad_dtype
        ins, outs = (predicted, active), (corrected, first)
        modules.append(UpdateStreams("altup.correct", ins, outs, weights, *kind, shared_weights=read))
        return corrected, first

    def project_low_rank(self, modules: list[Module], x: Tensor) -> Tensor:
        """Adds a low-rank projection with a norm, added to its input, to the modules (LAuReL); returns the sum."""
        part = self.model.altup
        assert part is not None
        rank = Dim(part.laurel_rank)
        low, back, normed, total = (
            self.act("laurel.low", r=rank),
            *(self.act(f"laurel.{name}") for name in ("back", "norm", "sum")),
        )
        modules += [
            *self.linear("laurel.down", x, (low,), self.weight("wlaurel.down", h=self.hidden_dim, r=rank)),
            *self.linear("laurel.up", low, (back,), self.weight("wlaurel.up", r=rank, h=self.hidden_dim)),
            Norm(normed.name, (back,), (normed,), self.norm_weights(normed.name), modules=("norm",)),
            Residual(total.name, (x, normed), (total,)),
        ]
        return total

    def average_streams(self, modules: list[Module], streams: Tensor) -> Tensor:
        """Adds the mean of the first stream and of projections of the others to the modules; returns it."""
        part = self.model.altup
        assert part is not None
        count, h = Dim(part.streams - 1), self.hidden_dim
        first, mean = self.act("first.out"), self.act("streams.mean")
        others, projected = self.act("others.out", m=count, g=h), self.act("others.projected", m=count, h=h)
        modules += [
            SplitStreams("streams.split", (streams,), (first, others)),
            *self.linear("altup.out", others, (projected,), self.weight("waltup.out", m=count, g=h, h=h)),
            AverageStreams("streams.average", (first, projected), (mean,)),
        ]
        return mean
