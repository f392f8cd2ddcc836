"""The inputs of a branch that are no token ids: patches of an image or frames of sound, on their way to its layers."""

from __future__ import annotations

import math
from typing import Literal

from meshcast.hardware.errors import ModelError
from meshcast.hardware.schemas import model_validator
from meshcast.simulator.models.parts import Flag, InputConvolution, Size
from meshcast.simulator.models.transformer import Transformer


class Inputs(Transformer):
    """A stack of layers over token ids or other inputs."""

    input_width: Size | None = None
    """Elements of an input, such as a patch of 14 x 14 pixels in three colours (588), which one linear layer projects
    to the hidden size; None: token ids, and a table of the vocabulary. Attention among inputs is bidirectional by
    default."""
    input_bias: Flag | Literal["mlp"] = False
    """Bias of that linear layer; mlp: behind it the activation and a square linear layer, which has a bias too
    (captions of PixArt)."""
    convolutions: tuple[InputConvolution, ...] = ()
    """Convolutions along the sequence in place of that linear layer, from frames of sound (Whisper). A token is so many
    frames as their strides multiply to."""
    class_token: Flag = False
    """A learned token in front of the inputs, which does not enter the trunk (ViT). Its work is left out, unless
    `tokens` counts it."""

    @model_validator(mode="after")
    def _convolutions_lead_to_the_layers(self) -> Inputs:
        if not self.convolutions:
            return self
        rule = f"they lead from inputs to hidden {self.hidden}, and halves of gated channels are multiplied"
        odd = [part.channels for part in self.convolutions if part.gated and part.channels % 2]
        if odd or not self.input_width or self.convolved_widths[-1] != self.hidden:
            raise ModelError("convolutions", rule, "Give input_width, and such channels", self.convolved_widths)
        if self.class_token or self.input_bias:
            rule = "convolutions have biases, and stand in place of a linear layer with a class token"
            raise ModelError("convolutions", rule, "Leave class_token and input_bias out")
        return self

    @property
    def frames_behind(self) -> list[int]:
        """Frames for each token in front of every convolution, and 1 behind the last."""
        strides = [part.stride for part in self.convolutions]
        return [math.prod(strides[i:]) for i in range(len(strides) + 1)]

    @property
    def convolved_widths(self) -> list[int]:
        """Width in front of every convolution, and behind the last."""
        return [self.input_width or 0, *(part.channels // (1 + part.gated) for part in self.convolutions)]

    @property
    def input_matrices(self) -> list[tuple[int, int]]:
        """Elements of the matrices that project inputs, and how often a token passes each."""
        if not self.convolutions:
            square = self.hidden if self.input_bias == "mlp" else 0
            return [(self.hidden * ((self.input_width or 0) + square), 1)]
        parts = zip(self.convolutions, self.convolved_widths, self.frames_behind[1:], strict=False)
        return [(part.kernel * width * part.channels, frames) for part, width, frames in parts]

    @property
    def input_products(self) -> int:
        """Products of an input's elements with these matrices, for each token of the layers."""
        return sum(elements * passes for elements, passes in self.input_matrices)

    @property
    def input_parameters(self) -> dict[str, int]:
        projected = sum(elements for elements, _ in self.input_matrices)
        biases = (
            sum(part.channels for part in self.convolutions)
            if self.convolutions
            else {False: 0, True: 1, "mlp": 2}[self.input_bias] * self.hidden
        )
        table = projected + biases if self.input_width else self.vocab * self.hidden
        return {**super().input_parameters, "embedding": table + self.class_token * self.hidden}
