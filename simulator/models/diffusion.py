"""Parts of diffusion transformers (DiT, Peebles and Xie 2022, arXiv 2212.09748): inputs and outputs are patches of a
latent, and a vector of every sample, from its time step and other conditions, modulates the layers.

What is computed from that vector alone costs once a sample, whatever the length of its sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.models.parts import Count, Flag, ShapePart, Size


class Embedders(ShapePart):
    """Small MLPs that embed the conditions of a sample (time step, pooled text, guidance), each two linear layers with
    biases, and a table of labels; their results are added, or joined, to the vector that modulates layers."""

    vectors: tuple[tuple[Size, Size], ...] = ()
    """For each MLP the width of its input, and that of its inner and last layer."""
    labels: Count = 0
    """Rows of the table of labels, that of no label included; 0: no table."""

    def weights(self) -> int:
        """Counts the elements of the matrices of the MLPs."""
        return sum(width * (inputs + width) for inputs, width in self.vectors)

    def parameters(self, condition: int) -> int:
        """Counts all parameters. condition: width of the vector."""
        return self.weights() + sum(2 * width for _, width in self.vectors) + self.labels * condition


class Modulation(ShapePart):
    """Shifts and scales of the results of norms, and gates of what a layer adds to its stream: vectors of a sample.

    linear: each layer projects them from the vector of the conditions (adaLN-Zero, DiT, section 3.2). table: they are
    projected once for all layers, and each layer adds a table of its own (adaLN-single, PixArt-alpha, arXiv 2310.00426,
    section 2.3).
    """

    by: Literal["linear", "table"] = "linear"
    """Where the vectors of a layer come from."""
    condition: Size
    """Width of the vector of the conditions (elements)."""
    parts: Literal["all", "gates"] = "all"
    """gates: norms are not modulated (token refiner of HunyuanVideo)."""
    sets: Literal[1, 2] = 1
    """2: texts and images have vectors of their own, though they share the weights of the layer (CogVideoX)."""
    embedders: Embedders = Embedders()
    """Embedders that each layer has for itself (``DiTTransformer2DModel`` of diffusers)."""

    def layer_weights(self, hidden: int, vectors: int) -> int:
        """Counts the elements of the matrices of a layer. vectors: that it has, for one set; hidden: their width."""
        linear = self.condition * self.sets * vectors * hidden if self.by == "linear" else 0
        return linear + self.embedders.weights()

    def layer_parameters(self, hidden: int, vectors: int) -> int:
        """Counts the parameters of a layer: as in `layer_weights`, with biases and tables."""
        whole = self.sets * vectors * hidden * ((self.condition + 1) if self.by == "linear" else 1)
        return whole + self.embedders.parameters(self.condition)


class Diffusion(ShapePart):
    """The ends of a diffusion transformer: a linear layer from patches, embedders of the conditions, a modulated norm
    and a linear layer to patches, and the mean squared error. It has no vocabulary."""

    inputs: Size
    """Elements of a patch: 16 of 2 x 2 places of a latent in 4 channels."""
    outputs: Size = Field(default_factory=lambda fields: fields.get("inputs", 1))
    """Elements that are predicted of a patch (DiT: twice as many, noise and its variance). Default: `inputs`."""
    embedders: Embedders = Embedders()
    """Embedders of the conditions of a sample, for all layers."""
    final_norms: Literal[1, 2] = 1
    """2: a plain norm stands in front of the modulated one (CogVideoX)."""
    cross_norm: Flag = False
    """With `cross_attention`: it reads the result of a layer norm with a weight and a bias (Wan); otherwise the stream
    as it is (PixArt)."""
    cross_frames: Flag = False
    """With `cross_attention` and `frames`: layers with attention within frames alone attend to the text, and each frame
    has keys and values of it for itself (Latte); otherwise all layers do, with the same keys and values."""

    def count_cross(self, layers: int) -> int:
        """Counts those of so many layers that attend to a text."""
        return -(-layers // 2) if self.cross_frames else layers

    def condition_parameters(self, hidden: int, modulation: Modulation) -> int:
        """Counts the parameters of the embedders, and of the projection that all layers share."""
        shared = 6 * hidden * (modulation.condition + 1) if modulation.by == "table" else 0
        return self.embedders.parameters(modulation.condition) + shared

    def sample_weights(self, hidden: int, modulation: Modulation) -> int:
        """Counts the elements of the matrices outside of layers that a sample passes once."""
        shared = 6 * hidden * modulation.condition if modulation.by == "table" else 0
        final = modulation.condition * 2 * hidden if modulation.by == "linear" else 0
        return self.embedders.weights() + shared + final

    def final_parameters(self, hidden: int, norm: int, modulation: Modulation) -> int:
        """Counts the parameters of the norms behind the layers. norm: those of one of them."""
        rows = modulation.condition + 1 if modulation.by == "linear" else 1
        return self.final_norms * norm + 2 * hidden * rows


def fill_defaults(stated: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a diffusion transformer with its defaults: norms without weights, biases everywhere,
    attention of all patches to all, modulation by each layer. Fields of wrong types are left to pydantic."""
    diffusion = stated.get("diffusion")
    if isinstance(diffusion, Diffusion):
        diffusion = diffusion.model_dump()
    if not isinstance(diffusion, Mapping):
        return stated
    defaults: dict[str, object] = {
        "vocab": diffusion.get("outputs") or diffusion.get("inputs"),
        "norm": "layernorm0",
        "positions": "none",
        "tied": False,
        "bidirectional": True,
        **dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), True),
        "modulation": {},
    }
    filled = defaults | {key: value for key, value in stated.items() if value is not None}
    if isinstance(filled["modulation"], Mapping):
        filled["modulation"] = {"condition": stated.get("hidden"), **filled["modulation"]}
    return filled
