"""Configs of networks of convolutions on images (ResNet), as blocks that are priced by their FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Annotated, Literal

from meshcast.hardware.errors import ModelError
from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import Field
from meshcast.simulator.models.huggingface.config import Config, key
from meshcast.simulator.models.huggingface.streams import variant_fields
from meshcast.simulator.models.parts import Flag, Size

IMAGE = 224
"""Pixels of a side of an image: that of ImageNet, for which configs name none."""

CLASSES = 1000
"""Classes of ImageNet, where a config names no head."""

STRIDE = 32
"""Pixels of a side for each position behind the last layer."""

BYTES = 2
"""Bytes of an element of activations, in 16 bits. In 32 bits kernels between the products move twice as many."""

NORM_PASSES = 6
"""Times that a forward pass of training moves the result of a convolution beside the product: batch norm reads it for
the statistics, reads it again and writes (cudnnBatchNormalizationForwardTraining), ReLU reads and writes, and the next
convolution reads."""

SUM_PASSES = 3
"""Times for the sum with the shortcut."""

SAVED = 2
"""Tensors that the backward pass keeps of every convolution with its norm: the input of the norm, and of the next
convolution."""


@dataclass(frozen=True)
class ConvolutionBlock:
    """Convolutions with batch norms of a block, for an image.

    parameters: of kernels and norms.
    flops: of products, forward.
    elements: results of the convolutions.
    sums: results of the sum with the shortcut.
    """

    parameters: int = 0
    flops: int = 0
    elements: int = 0
    sums: int = 0

    def convolve(self, kernel: int, inputs: int, outputs: int, side: int) -> ConvolutionBlock:
        """Returns the block with a further convolution of `kernel` x `kernel` pixels, whose result has side x side
        positions, and its batch norm."""
        weights = kernel**2 * inputs * outputs
        return replace(
            self,
            parameters=self.parameters + weights + 2 * outputs,
            flops=self.flops + 2 * weights * side**2,
            elements=self.elements + outputs * side**2,
        )


class ResNet(Config):
    """``ResNetConfig``: a convolution of 7 x 7 with pooling, stages of residual blocks, and classes of the mean.

    A token is one of the positions behind the last stage, 49 of an image of 224 x 224. A block is a layer, the stem is
    part of the first; products of its convolutions count as one of as many FLOPs, batch norms, ReLU and sums by their
    bytes in 16 bits. Channels are taken to be wide enough for the tensor cores; padding and pooling are left out.
    """

    colours: Size = key("num_channels", default=3)
    stem: Size = key("embedding_size", default=64)
    widths: Annotated[list[Size], Field(min_length=1, max_length=16)] = key(
        "hidden_sizes", default=[256, 512, 1024, 2048]
    )
    depths: Annotated[list[Size], Field(min_length=1, max_length=16)] = key("depths", default=[3, 4, 6, 3])
    layer_type: Literal["basic", "bottleneck"] = key("layer_type", default="bottleneck")
    first_shrinks: Flag = key("downsample_in_first_stage", default=False)
    shrinks_early: Flag = key("downsample_in_bottleneck", default=False)

    def fields(self) -> dict[str, object]:
        if len(self.depths) != len(self.widths):
            rule = "a stage has a width and a depth"
            raise ModelError("depths", rule, f"Give {len(self.widths)} of them, as hidden_sizes has", self.depths)
        side = IMAGE // STRIDE
        shape = {"hidden": self.widths[-1], "heads": 1, "ffn": 1, "vocab": 1, "seq": side**2, "positions": "none"}
        shape |= {"bidirectional": True, "gated": False, "norm": "layernorm0", "tied": False}
        shape |= {"output": {"classes": CLASSES, "pool": "mean"}, "head": ("bias",)}
        blocks = list(self._blocks())
        kinds: dict[Hashable, dict[str, object]] = {block: {"other": _price(block, side**2)} for block in blocks}
        return {**shape, "layers": len(blocks), **variant_fields(blocks, kinds)}

    def _blocks(self) -> Iterator[ConvolutionBlock]:
        """Yields every residual block in turn."""
        side, inputs = IMAGE // 2, self.stem
        start = ConvolutionBlock().convolve(7, self.colours, self.stem, side)
        side //= 2  # pooled
        for stage, (width, depth) in enumerate(zip(self.widths, self.depths, strict=True)):
            for place in range(depth):
                before = side
                if place == 0 and (stage or self.first_shrinks):
                    side //= 2
                yield self._block(start, inputs, width, before, side)
                start, inputs = ConvolutionBlock(), width

    def _block(self, block: ConvolutionBlock, inputs: int, width: int, before: int, side: int) -> ConvolutionBlock:
        if self.layer_type == "basic":
            block = block.convolve(3, inputs, width, side).convolve(3, width, width, side)
        else:
            inner = width // 4
            block = block.convolve(1, inputs, inner, side if self.shrinks_early else before)
            block = block.convolve(3, inner, inner, side).convolve(1, inner, width, side)
        if inputs != width or before != side:
            block = block.convolve(1, inputs, width, side)
        return replace(block, sums=width * side**2)


def _price(block: ConvolutionBlock, tokens: int) -> dict[str, object]:
    """Returns `Other` of a block: its FLOPs and bytes for a token."""
    moved = BYTES * (NORM_PASSES * block.elements + SUM_PASSES * block.sums)
    price = {"flops": block.flops, "moved": moved, "saved": BYTES * SAVED * block.elements}
    each = {name: amount / tokens for name, amount in price.items()}
    return {"modules": ("convolutions",), "parameters": block.parameters, **each, "mixes": True, "alone": True}
