"""Builds layers whose tokens of branches pass weights of their own (MMDiT), gates of what layers add, and what reads
the sums of attention residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.decoder_operators import HoldWeights, Scale
from meshcast.simulator.ir.diffusion_operators import JoinTokens, SplitResults, SplitTokens
from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import Module, Operator, SelfAttention
from meshcast.simulator.ir.operators import Concat, Residual
from meshcast.simulator.ir.stream_operators import AttendToSums
from meshcast.simulator.models.blocks import BlockBuilder
from meshcast.simulator.models.modulated import gate, norm_before
from meshcast.simulator.models.shapes import add_prefix, make_stream

BRANCH, OWN = "branch.", "own."
"""The beginnings of the names of what the tokens of branches, and those of the model itself, pass alone."""


@dataclass(frozen=True)
class StreamBuilder(BlockBuilder):
    """Builds layers of one stream of tokens or two for a micro-batch of all replicas.

    branch_seq: tokens of branches at the start of a sequence, which in layers with joint attention pass weights of
        their own; 0: there are none.
    sums, copied: of the stream that enters a layer, see `make_stream`.
    """

    branch_seq: int = 0
    sums: int = 0
    copied: bool = False

    def scale(self, modules: list[Module], x: Tensor, name: str) -> Tensor:
        """Adds the scale or the gate of what a layer adds to its stream to the modules, if the model has it; returns
        its output."""
        scaled = self.act(f"{name}.scale")
        if self.model.modulation:
            modules.append(gate(self, name, self.model.modulation, x, scaled))
        elif self.model.layer_scale:
            weight = self.weight(f"{scaled.name}.weight", h=self.hidden_dim)
            modules.append(Scale(scaled.name, (x,), (scaled,), (weight,)))
        else:
            return x
        return scaled

    def attend_to_sums(self, modules: list[Module], number: str, x: Tensor) -> Tensor:
        """Adds the weighted sum of the sums of a stream, the input of a block, to the modules; returns it. Where the
        stream is the embedding alone, its weights are held and not read."""
        name = f"sums{number}"
        mixed = self.act(f"{name}.mixed")
        weights = self.weight(f"{name}.norm", h=self.hidden_dim), self.weight(f"{name}.query", h=self.hidden_dim)
        kind = AttendToSums if x.has("m") else HoldWeights
        modules.append(kind(name, (x,), (mixed,), weights))
        return mixed

    def stream_behind(self, name: str, grows: bool, copied: bool) -> Tensor:
        """Makes the stream behind the first or the last addition of a layer. grows: whether the layer begins a sum.
        copied: whether it holds all sums anew."""
        return make_stream(self, name, self.sums + grows, copied)

    def joint_layer(self, x: Tensor, end: Tensor) -> list[Module]:
        """Builds a layer of two streams from `x` to `end`: tokens of branches, and those of the model itself."""
        streams = {BRANCH: replace(self, seq=self.branch_seq), OWN: replace(self, seq=self.seq - self.branch_seq)}
        parts = {prefix: stream.act(f"{prefix}x") for prefix, stream in streams.items()}
        modules: list[Module] = [SplitTokens("streams", (x,), tuple(parts.values()), launches=0.0)]
        going_on = [OWN] if self.model.joint_attention == "last" else [*streams]
        for prefix, stream in streams.items():
            modules += _prefix(norm_before(stream, "norm1", stream.act("x"), stream.act("norm1")), prefix)
        modules.append(self._attend_jointly(streams, going_on))
        for prefix in going_on:
            parts[prefix] = streams[prefix].act(f"{prefix}end")
            modules += _prefix(streams[prefix].finish_stream(), prefix)
        return [*modules, JoinTokens("streams.end", tuple(parts.values()), (end,), launches=0.0)]

    def _attend_jointly(self, streams: Mapping[str, StreamBuilder], going_on: Sequence[str]) -> SelfAttention:
        """Builds attention of all tokens of streams to all, from ``norm1`` to ``proj`` of each. going_on: the streams
        that read its result."""
        model, modules, heads = self.model, list[Module](), list[list[Tensor]]()
        for prefix, stream in streams.items():
            projecting, *its_heads, _ = stream.make_heads(stream.act("norm1"), False)
            modules += _prefix(projecting, prefix)
            heads.append([replace(tensor, name=prefix + tensor.name) for tensor in its_heads])
        pairs = list(zip(*heads, strict=True))
        q, k, v = (self.act(f"{name}.all", a=pair[0].dims["a"]) for name, pair in zip("qkv", pairs, strict=True))
        modules += [Concat(t.name, pair, (t,)) for t, pair in zip((q, k, v), pairs, strict=True)]
        o = self.attend(modules, q, k, v, False, model.head_dim, model.value_dim or model.head_dim)
        width = o.dims["a"]
        results = [stream.act(f"{prefix}o.part", a=width) for prefix, stream in streams.items()]
        modules.append(SplitResults("o.parts", (o,), tuple(results)))
        for prefix in going_on:
            stream, weight = streams[prefix], self.weight("wo", a=width, h=self.hidden_dim)
            linear = stream.linear("proj", stream.act("o.part", a=width), (stream.act("proj"),), weight)
            modules += _prefix(linear, prefix)
        return SelfAttention("attention", tuple(modules))

    def finish_stream(self) -> list[Module]:
        """Builds what comes behind attention in a stream, from its input ``x`` and the result ``proj`` to ``end``."""
        middle, again = self.act("middle"), self.act("norm2")
        modules, dropout = list[Module](), self.model.dropout > 0
        added = self.scale(modules, self.act("proj"), "proj")
        modules.append(Residual("residual1", (self.act("x"), added), (middle,), self.proj_bias(), dropout=dropout))
        block, (down,) = self.dense(again)
        modules += [*norm_before(self, "norm2", middle, again), block]
        added = self.scale(modules, down, "down")
        end = self.act("end")
        return [*modules, Residual("residual2", (middle, added), (end,), self.down_bias(False), dropout=dropout)]

    def take_own_tokens(self, modules: list[Module], x: Tensor) -> tuple[StreamBuilder, Tensor]:
        """Adds the part of a stream `x` that are no tokens of branches to the modules; returns also its shapes."""
        if not self.branch_seq:
            return self, x
        part = replace(self, seq=self.seq - self.branch_seq, branch_seq=0)
        own, rest = part.act("x.own"), replace(self, seq=self.branch_seq).act("x.branches")
        modules.append(SplitTokens("streams.end", (x,), (rest, own), launches=0.0))
        return part, own


def _prefix(modules: list[Module], prefix: str) -> list[Module]:
    """Returns modules with a prefix to all names."""
    return [add_prefix(module, prefix, ()) for module in modules]


def name_words(module: Module) -> Operator:
    """Returns an operator over the tokens of a text that is not part of the sequence of patches, whose dim is ``w``."""
    assert isinstance(module, Operator)
    ins, outs = (tuple(map(_name_words, tensors)) for tensors in (module.ins, module.outs))
    return replace(module, ins=ins, outs=outs)


def _name_words(tensor: Tensor) -> Tensor:
    return replace(tensor, dims={"w" if dim == "s" else dim: size for dim, size in tensor.dims.items()})
