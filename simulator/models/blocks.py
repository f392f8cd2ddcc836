"""From a model's shape to the sites that it asks for.

One micro-batch of all replicas: ``b`` counts the samples of every data-parallel rank, so that the data axes divide it.
"""

from __future__ import annotations

from dataclasses import dataclass

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
)


@dataclass(frozen=True)
class Blocks:
    """Builds the stages of `model` for micro-batches of `samples` sequences of `seq` tokens.

    dtype: number format of activations and weights; grad_dtype: of the gradient buffer; attention: flash or unfused;
    vocab: rows of the embedding, padding included; loss_traffic, loss_kept: see sites.Loss.
    """

    model: Model
    samples: int
    seq: int
    vocab: int
    dtype: str = "bf16"
    grad_dtype: str = "fp32"
    attention: str = "flash"
    loss_traffic: tuple[int, int] = (14, 6)
    loss_kept: int = 4

    def stage(self, layers: int, first: bool, last: bool) -> Stage:
        """A stage of `layers` layers, with the embedding when it is the first and the loss when it is the last."""
        children: list[Site] = []
        if first:
            children += self._embedding()
        else:
            children.append(Boundary("arriving", (self._act("received"),), (self._act("x0"),)))
        children += [self._layer(i) for i in range(layers)]
        if last:
            children += self._ending(f"x{layers}")
        else:
            children.append(Boundary("leaving", (self._act(f"x{layers}"),), (self._act("sent"),)))
        return Stage("stage", tuple(children))

    # ----------------------------------------------------------------------------------------- tensors

    @property
    def _tokens(self) -> dict[str, Dim]:
        return {"b": Dim(self.samples), "s": Dim(self.seq)}

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

    def _embedding(self) -> list[Site]:
        model, drop = self.model, self.model.dropout > 0
        ids = Tensor("ids", self._tokens, "int64")
        table = self._weight("embedding", v=Dim(self.vocab), h=Dim(model.hidden))
        learned = model.positions == "learned"
        first = self._act("x.table" if learned or drop else "x0")
        sites: list[Site] = [Embedding("embedding", (ids,), (first,), (table,))]
        if learned or drop:
            positions = (self._weight("positions", p=Dim(model.seq), h=Dim(model.hidden)),) if learned else ()
            sites.append(Residual("positions", (first,), (self._act("x0"),), positions, dropout=drop))
        return sites

    def _layer(self, i: int) -> Layer:
        model, h = self.model, Dim(self.model.hidden)
        drop, x, middle, end = model.dropout > 0, self._act(f"x{i}"), self._act(f"l{i}.x"), self._act(f"x{i + 1}")
        normed, again = self._act(f"l{i}.norm1"), self._act(f"l{i}.norm2")
        projected, down = self._act(f"l{i}.proj"), self._act(f"l{i}.down")
        proj_bias = (self._weight(f"l{i}.proj.bias", h=h),) if model.proj_bias else ()
        down_bias = (self._weight(f"l{i}.down.bias", h=h),) if model.mlp_bias else ()
        return Layer(
            f"layer{i}",
            (
                Norm(f"l{i}.norm1", (x,), (normed,), self._norm_weights(f"l{i}.norm1")),
                self._attention(i, normed, projected),
                Residual(f"l{i}.residual1", (x, projected), (middle,), proj_bias, dropout=drop),
                Norm(f"l{i}.norm2", (middle,), (again,), self._norm_weights(f"l{i}.norm2")),
                self._mlp(i, again, down),
                Residual(f"l{i}.residual2", (middle, down), (end,), down_bias, dropout=drop),
            ),
        )

    def _attention(self, i: int, x: Tensor, y: Tensor) -> SelfAttention:
        model, d, h = self.model, self.model.head_dim, Dim(self.model.hidden)
        width = Dim(model.heads * d, unit=d)
        kv = Dim(model.kv_heads * d, unit=d, copies=True)
        q, k, v = (self._act(f"l{i}.{n}", a=a) for n, a in (("q", width), ("k", kv), ("v", kv)))
        weights = [self._weight(f"l{i}.{n}", h=h, a=a) for n, a in (("wq", width), ("wk", kv), ("wv", kv))]
        if model.qkv_bias:
            weights += [self._weight(f"l{i}.{n}", a=a) for n, a in (("bq", width), ("bk", kv), ("bv", kv))]
        sites: list[Site] = [Linear(f"l{i}.qkv", (x,), (q, k, v), tuple(weights), self.grad_dtype)]
        if model.positions == "rope":
            turned = self._act(f"l{i}.q.rope", a=width), self._act(f"l{i}.k.rope", a=kv)
            sites.append(Rope(f"l{i}.rope", (q, k), turned))
            q, k = turned
        o = self._act(f"l{i}.o", a=width)
        ins = (q, k.seen_as(s="t"), v.seen_as(s="t"))
        sites.append(CoreAttention(f"l{i}.core", ins, (o,), (), d, self.attention, model.dropout > 0))
        sites.append(Linear(f"l{i}.proj", (o,), (y,), (self._weight(f"l{i}.wo", a=width, h=h),), self.grad_dtype))
        return SelfAttention(f"l{i}.attention", tuple(sites))

    def _mlp(self, i: int, x: Tensor, y: Tensor) -> MLP:
        model, h, f = self.model, Dim(self.model.hidden), Dim(self.model.ffn)
        names = ("gate", "up") if model.gated else ("up",)
        ups = tuple(self._act(f"l{i}.{name}", f=f) for name in names)
        weights = [self._weight(f"l{i}.w{name}", h=h, f=f) for name in names]
        if model.mlp_bias:
            weights += [self._weight(f"l{i}.b{name}", f=f) for name in names]
        act = self._act(f"l{i}.act", f=f)
        return MLP(
            f"l{i}.mlp",
            (
                Linear(f"l{i}.up", (x,), ups, tuple(weights), self.grad_dtype),
                Activation(f"l{i}.act", ups, (act,)),
                Linear(f"l{i}.down", (act,), (y,), (self._weight(f"l{i}.wdown", f=f, h=h),), self.grad_dtype),
            ),
        )

    def _ending(self, x: str) -> list[Site]:
        h, v = Dim(self.model.hidden), Dim(self.vocab)
        normed, logits = self._act("norm.out"), self._act("logits", v=v)
        loss = Tensor("loss", self._tokens, "fp32")
        return [
            Norm("final_norm", (self._act(x),), (normed,), self._norm_weights("final_norm")),
            Head("head", (normed,), (logits,), (self._weight("head", h=h, v=v),), self.grad_dtype, self.model.tied),
            Loss("loss", (logits,), (loss,), (), self.loss_traffic, self.loss_kept),
        ]
