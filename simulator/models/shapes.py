"""Tensors and linear layers of a model, for a micro-batch of all replicas."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Literal, NamedTuple

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.modules import AttendsAlong, CompositeModule, Module, Operator, SelfAttention
from meshcast.simulator.ir.operators import QUANTISED, Cast, CoreAttention, Linear, Norm, SavedCast
from meshcast.simulator.models.adapters import Adapters
from meshcast.simulator.models.branches import Branch
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.variants import LayerVariant

ComposedOperation = Literal[
    "rms-norm", "activation", "attention", "experts", "views", "clamped-activation", "expert-bias", "cast"
]
"""Operations that a framework may write as several of autograd."""

Writing = ComposedOperation | Literal["grouped-mlp"]
"""These, and ``grouped-mlp``: kernels of grouped GEMMs do all that experts compute."""


class LossShape(NamedTuple):
    """What a loss does with logits.

    traffic: bytes moved per logit, forward and backward.
    kept: bytes saved per logit.
    peaks: bytes held per logit by the backward pass, with a whole and with a sharded vocabulary.
    kept_of_all: whether what is saved is saved of all pieces.
    pieces: of the logits, which are in memory in turn.
    recomputed: whether the backward pass computes the logits again.
    whole_vocabulary: whether every tensor rank gathers the logits.
    """

    traffic: tuple[int, int] = (14, 6)
    kept: int = 4
    peaks: tuple[int, int] = (0, 0)
    kept_of_all: bool = False
    pieces: int = 1
    recomputed: bool = False
    whole_vocabulary: bool = False


PLAIN_LOSS = LossShape()
"""A fused loss in fp32 over all logits in 16 bits."""


@dataclass(frozen=True)
class Shapes:
    """Makes the tensors and the linear layers of a model for a micro-batch.

    model: the shape of the model, or of the branch or of the variant of layers whose tensors these are.
    samples: sequences of a micro-batch of a replica.
    seq: tokens of a sequence, or of the slice of sequences that this is.
    vocab: rows of the embedding, padding included.
    replicas: data-parallel ranks.
    dtype: number format of activations and weights.
    grad_dtype: number format of the gradient buffer.
    attention: attention kernel, ``flash`` or ``unfused``.
    loss: what the loss does with logits.
    quantised: quantisation recipe of the linear layers, see `simulator.ir.operators.Linear`.
    tokens_before: tokens of the sequence before the slice.
    tokens_after: tokens of the sequence after the slice.
    adapters: the adapters, if they alone are trained.
    document: tokens of the documents packed into a sequence, see `simulator.ir.operators.CoreAttention`.
    fp8_activation_inputs: whether inputs of the activation of MLPs and experts are saved in 8 bits.
    borders: numbers of the layers from which on schemes shard other dims, in ascending order.
    first_layer: of a branch, the number of its first layer, if there are borders.
    encoder_seq: of a decoder, tokens of the encoder's output that its layers attend to; 0: there is no encoder.
    composed: operations that are written as several of autograd (`ProcessMemory.composed`), or in a single kernel.
    """

    model: Model | Branch | LayerVariant
    samples: int
    seq: int
    vocab: int
    replicas: int = 1
    dtype: str = "bf16"
    grad_dtype: str = "fp32"
    attention: str = "flash"
    loss: LossShape = PLAIN_LOSS
    quantised: str = ""
    tokens_before: int = 0
    tokens_after: int = 0
    adapters: Adapters | None = None
    document: int | None = None
    fp8_activation_inputs: bool = False
    borders: tuple[int, ...] = ()
    first_layer: int = 0
    encoder_seq: int = 0
    composed: tuple[Writing, ...] = ()

    @property
    def token_dims(self) -> dict[str, Dim]:
        """The dims of tokens: samples, of videos also frames, and positions, of videos those in a frame."""
        samples = {"b": Dim(self.samples * self.replicas)}
        if self.model.frames:
            return {**samples, "u": Dim(self.model.frames), "s": Dim(self.seq // self.model.frames)}
        return {**samples, "s": Dim(self.seq)}

    def act(self, name: str, **dims: Dim) -> Tensor:
        """Makes an activation [b, s, ...]; [b, s, h] when there is no other dim."""
        return Tensor(name, {**self.token_dims, **(dims or {"h": Dim(self.model.hidden)})}, self.dtype)

    @property
    def context(self) -> Tensor:
        """What the layers of a decoder read: the output of the encoder [b, s, h], or of a diffusion transformer a text
        [b, w, h], which every rank has whole where ranks share a sequence."""
        diffusion = self.model.diffusion if isinstance(self.model, Model) else None
        tokens = {"w" if diffusion else "s": Dim(self.encoder_seq)}
        if diffusion and diffusion.cross_frames:
            tokens = {"u": self.token_dims["u"], **tokens}
        dims = {"b": self.token_dims["b"], **tokens, "h": self.hidden_dim}
        return Tensor("context", dims, self.dtype)

    def of_sample(self, name: str, width: int) -> Tensor:
        """Makes a tensor [b, h] of a vector for each sample."""
        return Tensor(name, {"b": self.token_dims["b"], "h": Dim(width)}, self.dtype)

    def weight(self, name: str, **dims: Dim) -> Tensor:
        """Makes a parameter."""
        return Tensor(name, dims, self.dtype)

    @property
    def hidden_dim(self) -> Dim:
        """The width of the residual stream."""
        return Dim(self.model.hidden)

    def norm_weights(self, name: str, width: Dim | None = None) -> tuple[Tensor, ...]:
        """Makes the weights of a norm over h, if it has some. width: of h; None: that of the residual stream."""
        if self.model.norm.endswith("0"):
            return ()
        width = width or self.hidden_dim
        bias = (self.weight(f"{name}.bias", h=width),) if self.model.norm.startswith("layer") else ()
        return (self.weight(f"{name}.weight", h=width), *bias)

    def layernorm(self, name: str, x: Tensor, y: Tensor) -> Norm:
        """Makes a norm of a layer."""
        return Norm(name, (x,), (y,), self.norm_weights(name), modules=("layernorm", "norm"))

    def linear(
        self,
        name: str,
        x: Tensor,
        ys: tuple[Tensor, ...],
        *weights: Tensor,
        modules: tuple[str, ...] = (),
        whole: bool = False,
    ) -> list[Module]:
        """Makes a linear layer, after the cast of its input where the input is not cast yet. whole: see `Linear`."""
        x, casts = cast_input(self.quantised, x)
        return [*casts, Linear(name, (x,), ys, weights, self.grad_dtype, self.quantised, modules=modules, whole=whole)]


def make_stream(shapes: Shapes, name: str, sums: int = 0, copied: bool = False) -> Tensor:
    """Makes the residual stream [b, s, h], or several of them [b, s, m, h].

    sums: of attention residuals, which it consists of; 0: the model has none.
    copied: whether these were just copied to stand in a row, so that all of them are held anew.
    """
    if sums > 1:
        return replace(shapes.act(name, m=Dim(sums), h=shapes.hidden_dim), parts=1 if copied else sums)
    streams = shapes.model.streams
    count = {"m": Dim(streams)} if streams else {}
    return shapes.act(name, **count, h=shapes.hidden_dim)


def add_prefix(module: Module, prefix: str, outside: Container[str]) -> Module:
    """Copies `module` with a prefix to all names, except those of tensors from outside."""
    name = prefix + module.name
    if isinstance(module, CompositeModule):
        return replace(
            module, name=name, children=tuple(add_prefix(child, prefix, outside) for child in module.children)
        )
    assert isinstance(module, Operator)

    def rename(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(t if t.name in outside else replace(t, name=prefix + t.name) for t in tensors)

    return replace(module, name=name, ins=rename(module.ins), outs=rename(module.outs), weights=rename(module.weights))


def attend_along(attention: SelfAttention, dim: str) -> SelfAttention:
    """Lets the attention of a video run along `dim`, places ``s`` of a frame or frames ``u``, in parallel for all
    positions along the other axis; marks its operators."""
    children = []
    for child in attention.children:
        assert isinstance(child, Operator)
        if isinstance(child, CoreAttention):
            child = replace(child, ins=(child.ins[0], *(_keys_along(tensor, dim) for tensor in child.ins[1:])))
        children.append(replace(child, marks=child.marks | {AttendsAlong(dim)}))
    return replace(attention, children=tuple(children))


def _keys_along(tensor: Tensor, dim: str) -> Tensor:
    """Returns keys or values whose positions ``t`` are those along `dim`."""
    back = {new: old for old, new in tensor.renamed.items()}
    restored = replace(tensor, dims={back.get(name, name): size for name, size in tensor.dims.items()}, renamed={})
    return restored.rename_dims(**{dim: "t"})


# ------------------------------------------------------------------------------ activations in 8 bits or fewer


def cast_input(quantised: str, x: Tensor, kind: type[Cast] = Cast) -> tuple[Tensor, list[Module]]:
    """Returns x in the number format of the GEMMs, and the cast, unless it is in that format.

    quantised: recipe of the linear layers; empty: none.
    """
    if not quantised or x.dtype == (dtype := QUANTISED[quantised].dtype):
        return x, []
    small = replace(x, name=f"{x.name}.{dtype}", dtype=dtype, gradient_dtype=x.dtype)
    return small, [kind(f"cast {x.name}", (x,), (small,), (), quantised)]


def save_inputs(
    in_8_bits: bool, tensors: tuple[Tensor, ...], kind: type[SavedCast] = SavedCast
) -> tuple[tuple[Tensor, ...], list[Module]]:
    """Returns the inputs of an activation function in the format in which they are saved, and what converts them."""
    if not in_8_bits:
        return tensors, []
    small = tuple(
        replace(tensor, name=f"{tensor.name}.fp8", dtype="fp8", gradient_dtype=tensor.dtype) for tensor in tensors
    )
    return small, [
        kind(f"save {tensor.name}", (tensor,), (stored,)) for tensor, stored in zip(tensors, small, strict=True)
    ]
