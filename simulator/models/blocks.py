"""From a model's shape to the sites that it asks for.

One micro-batch of all replicas: ``b`` counts the samples of every data-parallel rank, so that the data axes divide it.
Equal layers are one unit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from simulator.layout import Dim, Tensor
from simulator.models.model import Model
from simulator.sites import (
    MLP,
    Activation,
    Boundary,
    CoreAttention,
    Embedding,
    Head,
    Layer,
    Linear,
    Loss,
    Norm,
    Residual,
    Rope,
    SelfAttention,
    Site,
    Stage,
    Unit,
)


@dataclass(frozen=True)
class Blocks:
    """Builds the stages of `model` for micro-batches of `samples` sequences of `seq` tokens on each of `replicas`.

    dtype: number format of activations and weights; grad_dtype: of the gradient buffer; attention: flash or unfused;
    vocab: rows of the embedding, padding included; loss_traffic, loss_kept: see sites.Loss.
    """

    model: Model
    samples: int
    seq: int
    vocab: int
    replicas: int = 1
    dtype: str = "bf16"
    grad_dtype: str = "fp32"
    attention: str = "flash"
    loss_traffic: tuple[int, int] = (14, 6)
    loss_kept: int = 4

    def stage(self, layers: int, first: bool, last: bool) -> Stage:
        """A stage of `layers` layers, with the embedding when it is the first and the loss when it is the last."""
        units = [self.embedding] if first else []
        units += [replace(self.layer, count=layers)] if layers else []
        units += [self.ending] if last else []
        return Stage("stage", tuple(units))

    @property
    def residual(self) -> Tensor:
        """The stream [b, s, h] that goes from unit to unit."""
        return self._act("x")

    # ----------------------------------------------------------------------------------------- tensors

    @property
    def _tokens(self) -> dict[str, Dim]:
        return {"b": Dim(self.samples * self.replicas), "s": Dim(self.seq)}

    def _act(self, name: str, **dims: Dim) -> Tensor:
        """An activation [b, s, ...]; [b, s, h] when no other dim is given."""
        return Tensor(name, {**self._tokens, **(dims or {"h": Dim(self.model.hidden)})}, self.dtype)

    def _weight(self, name: str, **dims: Dim) -> Tensor:
        return Tensor(name, dims, self.dtype)

    def _norm_weights(self, name: str) -> tuple[Tensor, ...]:
        h = Dim(self.model.hidden)
        bias = (self._weight(f"{name}.bias", h=h),) if self.model.norm != "rmsnorm" else ()
        return (self._weight(f"{name}.weight", h=h), *bias)

    # ------------------------------------------------------------------------------------------- sites

    def _unit(self, kind: type[Unit], name: str, children: list[Site], takes: bool, gives: Tensor | None) -> Unit:
        """A unit; `gives` is moved to the layout in which the residual stream travels."""
        y = self._act("y")
        if gives is not None:
            children = [*children, Boundary("leaving", (gives,), (y,))]
        # The work of one rank is the same with any number of replicas.
        alike = name, replace(self, replicas=1)
        return kind(name, tuple(children), self.residual if takes else None, y if gives else None, alike=alike)

    @cached_property
    def embedding(self) -> Unit:
        """From ids to the residual stream."""
        model, drop = self.model, self.model.dropout > 0
        ids = Tensor("ids", self._tokens, "int64")
        table, x = self._weight("embedding", v=Dim(self.vocab), h=Dim(model.hidden)), self._act("embedded")
        sites: list[Site] = [Embedding("embedding", (ids,), (x,), (table,))]
        if model.positions == "learned" or drop:
            learned = model.positions == "learned"
            weights = (self._weight("positions", p=Dim(model.seq), h=Dim(model.hidden)),) if learned else ()
            sites.append(Residual("positions", (x,), (end := self._act("placed"),), weights, dropout=drop))
            x = end
        return self._unit(Unit, "embedding", sites, False, x)

    @cached_property
    def layer(self) -> Layer:
        """One transformer layer."""
        model, h = self.model, Dim(self.model.hidden)
        drop, x, middle, end = model.dropout > 0, self.residual, self._act("middle"), self._act("end")
        normed, again = self._act("norm1"), self._act("norm2")
        projected, down = self._act("proj"), self._act("down")
        proj_bias = (self._weight("proj.bias", h=h),) if model.proj_bias else ()
        down_bias = (self._weight("down.bias", h=h),) if model.mlp_bias else ()
        sites: list[Site] = [
            Norm("norm1", (x,), (normed,), self._norm_weights("norm1")),
            self._attention(normed, projected),
            Residual("residual1", (x, projected), (middle,), proj_bias, dropout=drop),
            Norm("norm2", (middle,), (again,), self._norm_weights("norm2")),
            self._mlp(again, down),
            Residual("residual2", (middle, down), (end,), down_bias, dropout=drop),
        ]
        unit = self._unit(Layer, "layer", sites, True, end)
        assert isinstance(unit, Layer)
        return unit

    def _attention(self, x: Tensor, y: Tensor) -> SelfAttention:
        model, d, h = self.model, self.model.head_dim, Dim(self.model.hidden)
        width = Dim(model.heads * d, unit=d)
        kv = Dim(model.kv_heads * d, unit=d, copies=True)
        q, k, v = (self._act(n, a=a) for n, a in (("q", width), ("k", kv), ("v", kv)))
        weights = [self._weight(n, h=h, a=a) for n, a in (("wq", width), ("wk", kv), ("wv", kv))]
        if model.qkv_bias:
            weights += [self._weight(n, a=a) for n, a in (("bq", width), ("bk", kv), ("bv", kv))]
        sites: list[Site] = [Linear("qkv", (x,), (q, k, v), tuple(weights), self.grad_dtype)]
        if model.positions == "rope":
            turned = self._act("q.rope", a=width), self._act("k.rope", a=kv)
            sites.append(Rope("rope", (q, k), turned))
            q, k = turned
        o = self._act("o", a=width)
        ins = (q, k.seen_as(s="t"), v.seen_as(s="t"))
        sites.append(CoreAttention("core", ins, (o,), (), d, self.attention, model.dropout > 0))
        sites.append(Linear("proj", (o,), (y,), (self._weight("wo", a=width, h=h),), self.grad_dtype))
        return SelfAttention("attention", tuple(sites))

    def _mlp(self, x: Tensor, y: Tensor) -> MLP:
        model, h, f = self.model, Dim(self.model.hidden), Dim(self.model.ffn)
        names = ("gate", "up") if model.gated else ("up",)
        ups = tuple(self._act(name, f=f) for name in names)
        weights = [self._weight(f"w{name}", h=h, f=f) for name in names]
        if model.mlp_bias:
            weights += [self._weight(f"b{name}", f=f) for name in names]
        act = self._act("act", f=f)
        return MLP(
            "mlp",
            (
                Linear("up", (x,), ups, tuple(weights), self.grad_dtype),
                Activation("act", ups, (act,)),
                Linear("down", (act,), (y,), (self._weight("wdown", f=f, h=h),), self.grad_dtype),
            ),
        )

    @cached_property
    def ending(self) -> Unit:
        """From the residual stream to the loss."""
        h, v = Dim(self.model.hidden), Dim(self.vocab)
        normed, logits = self._act("norm.out"), self._act("logits", v=v)
        loss = Tensor("loss", self._tokens, "fp32")
        sites: list[Site] = [
            Norm("final_norm", (self.residual,), (normed,), self._norm_weights("final_norm")),
            Head("head", (normed,), (logits,), (self._weight("head", h=h, v=v),), self.grad_dtype, self.model.tied),
            Loss("loss", (logits,), (loss,), (), self.loss_traffic, self.loss_kept),
        ]
        return self._unit(Unit, "ending", sites, True, None)
