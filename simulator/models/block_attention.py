"""Builds attention to blocks of keys: what chooses blocks, and the branches beside it."""

from __future__ import annotations

from dataclasses import replace

from meshcast.simulator.ir.block_attention_operators import (
    AttentionToBlocks,
    AttentionToWholeEntries,
    ChooseBlocks,
    ChooseByEntries,
    MakeEntries,
    count_entries,
)
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.modules import Module, SelfAttention
from meshcast.simulator.ir.moe_operators import WeightedSum
from meshcast.simulator.ir.operators import CoreAttention, Norm, Rope
from meshcast.simulator.ir.sparse_attention_operators import detach
from meshcast.simulator.models.blocks import BlockBuilder
from meshcast.simulator.models.rare_parts import BlockAttention, BlockIndex
from meshcast.simulator.models.shapes import cast_input


class BlockAttentionBuilder(BlockBuilder):
    """Builds it for a micro-batch of all replicas."""

    def attend_to_blocks(self, part: BlockAttention, x: Tensor, y: Tensor) -> SelfAttention:
        """Builds attention of the tokens x to blocks of keys, up to its result y."""
        x, modules = cast_input(self.quantised, x)
        projections, q, k, v, gate = self.make_heads(x, local=True)
        modules += projections
        if min(self.document or self.seq, self.seq) < part.from_tokens:
            d, of_value = self._kernel[0], self._kernel[-1]
            return self.finish_attention(modules, self.attend(modules, q, k, v, False, d, of_value), y, gate)
        if part.branches:
            return self.finish_attention(modules, self._join_branches(modules, part, x, (q, k, v)), y, gate)
        if part.index:
            chosen = self._choose_by_index(modules, part, part.index, x)
        else:
            chosen = self._choose_by_entries(modules, part, q, k)
        o = self._result("o")
        self._attend(modules, part, o, (q, k, v), chosen)
        return self.finish_attention(modules, o, y, gate)

    def _attend(
        self, modules: list[Module], part: BlockAttention, o: Tensor, heads: tuple[Tensor, ...], chosen: Tensor
    ) -> None:
        """Adds attention to chosen blocks, up to its result o, to the modules."""
        ins = heads[0], *(tensor.rename_dims(s="t") for tensor in heads[1:]), chosen
        core = AttentionToBlocks("core", ins, (o,), (), *self._kernel, size=part.size, most=part.top_k)
        modules.append(replace(core, document=self.document, teaches=part.index is not None))

    @property
    def _kernel(self) -> tuple[int, str, bool, int]:
        """Width of a head of keys, kernel, dropout on scores, width of a head of values."""
        model = self.model
        return model.head_dim, self.attention, model.score_dropout, model.value_dim or model.head_dim

    def _result(self, name: str) -> Tensor:
        """Makes the result of attention."""
        width = self._kernel[-1]
        return self.act(name, a=Dim(self.model.heads * width, unit=width))

    # -------------------------------------------------------------------------------------- choice of blocks

    def _choose_by_index(self, modules: list[Module], part: BlockAttention, index: BlockIndex, x: Tensor) -> Tensor:
        """Adds an indexer to the modules; returns the blocks that it chooses. Every rank of tensor parallelism computes
        all of it, for positions p, as that of single keys (Primus: ``minimax_m3/indexer.py``)."""
        x, n = x.rename_dims(s="p"), Dim(index.heads)
        positions = {name: dim for name, dim in x.dims.items() if name != "h"}
        widths = {"q": {"i": Dim(index.heads * index.dim, unit=index.dim)}, "k": {"d": Dim(index.dim)}}
        heads, normed = list[Tensor](), list[Tensor]()
        for letter, width in widths.items():
            projected = Tensor(f"index.{letter}", {**positions, **width}, self.dtype)
            weight = self.weight(f"windex.{letter}", h=self.hidden_dim, **width)
            modules.extend(map(detach, self.linear(projected.name, x, (projected,), weight)))
            heads.append(projected)
        for before in heads:
            normed.append(replace(before, name=f"{before.name}.norm"))
            scale = self.weight(f"{before.name}.norm.weight", d=Dim(index.dim))
            modules.append(Norm(normed[-1].name, (before,), (normed[-1],), (scale,), modules=("norm",)))
        if self.model.positions == "rope":
            rotated = [replace(tensor, name=f"{tensor.name}.rope") for tensor in heads]
            modules.append(Rope("index.rope", tuple(normed), tuple(rotated), (), self.model.rope_share))
            normed = rotated
        chosen = Tensor("chosen", {**positions, "n": n, "k": Dim(self._most(part))}, "int32")
        kind = index.dim, self.document, 1, part.size
        modules.append(ChooseBlocks("index.choose", tuple(normed), (chosen,), (), *kind))
        return chosen.rename_dims(p="s")

    def _most(self, part: BlockAttention) -> int:
        """Counts the blocks that a query attends to at most."""
        return min(part.top_k, -(-self.seq // part.size))

    def _choose_by_entries(self, modules: list[Module], part: BlockAttention, q: Tensor, keys: Tensor) -> Tensor:
        """Adds the choice of blocks by entries, which are `keys` or made of these, to the modules; returns the
        chosen blocks."""
        model, most = self.model, self._most(part)
        groups = model.heads if part.each_head else model.kv_heads
        chosen = replace(self.act("chosen", a=Dim(groups * most, unit=most, copies=not part.each_head)), dtype="int32")
        entries = part.size, part.length, part.stride, model.heads // groups, part.coarse, not keys.has("t")
        ins = q, keys if keys.has("t") else keys.rename_dims(s="t")
        modules.append(ChooseByEntries("choose", ins, (chosen,), (), model.head_dim, *entries, self.document))
        return chosen

    # -------------------------------------------------------------------------------------------- branches

    def _join_branches(
        self, modules: list[Module], part: BlockAttention, x: Tensor, heads: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        """Adds attention to entries, to blocks and to a window to the modules, and the sum of their results by gates of
        each head; returns it."""
        q, *keys = heads
        of_entries, of_window = (
            self._project_keys(modules, x, name) if part.own_keys else (keys[0], keys[1])
            for name in ("entries", "window")
        )
        entries = self._make_entries(modules, part, of_entries)
        results = tuple(self._result(f"o.{name}") for name in ("entries", "blocks", "window"))
        first, _, last = (result.name for result in results)
        kernel = AttentionToWholeEntries(first, (q, *entries), results[:1], (), *self._kernel, document=self.document)
        modules.append(replace(kernel, length=part.length, stride=part.stride))
        chosen = self._choose_by_entries(modules, part, q, entries[0])
        self._attend(modules, part, results[1], heads, chosen)
        ins = q, *(tensor.rename_dims(s="t") for tensor in of_window)
        place = part.window, self.tokens_before, self.tokens_after, self.document
        modules.append(CoreAttention(last, ins, results[2:], (), *self._kernel, *place))
        return self._add_branches(modules, x, results)

    def _add_branches(self, modules: list[Module], x: Tensor, results: tuple[Tensor, ...]) -> Tensor:
        """Adds the gates of branches, and the sum of their results by these, to the modules; returns the sum."""
        gate = Dim(len(results) * self.model.heads, unit=len(results))
        gates, joined = self.act("branch.gates", a=gate), self._result("o")
        modules += self.linear("branch.gates", x, (gates,), self.weight("wbranch.gates", h=self.hidden_dim, a=gate))
        modules.append(WeightedSum("branches", (*results, gates), (joined,)))
        return joined

    def _project_keys(self, modules: list[Module], x: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of a branch to the modules; returns these."""
        widths = [width * self.model.kv_heads for width in (self._kernel[0], self._kernel[-1])]
        units = self._kernel[0], self._kernel[-1]
        dims = [Dim(width, unit=unit, copies=True) for width, unit in zip(widths, units, strict=True)]
        k, v = (self.act(f"{letter}.{name}", a=dim) for letter, dim in zip("kv", dims, strict=True))
        weights = (self.weight(f"w{tensor.name}", h=self.hidden_dim, a=tensor.dims["a"]) for tensor in (k, v))
        modules += self.linear(f"kv.{name}", x, (k, v), *weights)
        if self.model.positions != "rope":
            return k, v
        rotated = replace(k, name=f"{k.name}.rope")
        modules.append(Rope(f"rope.{name}", (k,), (rotated,), (), self.model.rope_share))
        return rotated, v

    def _make_entries(
        self, modules: list[Module], part: BlockAttention, heads: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Adds the entries of keys and values to the modules; returns these."""
        count = Dim(max(1, count_entries(self.seq, part.length, part.stride)))
        dims = {"b": self.token_dims["b"], "t": count}
        keys, values = (
            Tensor(f"entries.{letter}", {**dims, "a": tensor.dims["a"]}, self.dtype)
            for letter, tensor in zip("kv", heads, strict=True)
        )
        weights: tuple[Tensor, ...] = ()
        widths = self._kernel[0], self._kernel[-1]
        if part.pool == "linear":
            weights = tuple(
                self.weight(f"w{tensor.name}", a=tensor.dims["a"], r=Dim(part.length * width))
                for tensor, width in zip((keys, values), widths, strict=True)
            )
            weights += (self.weight("entries.positions", a=keys.dims["a"], p=Dim(part.length)),)
        ins = tuple(tensor.rename_dims(s="p") for tensor in heads)
        kind = widths, part.length, part.stride, self.grad_dtype
        modules.append(MakeEntries("entries", ins, (keys, values), weights, *kind))
        return keys, values
