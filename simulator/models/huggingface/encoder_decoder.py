"""Configs of encoders with decoders that attend to them: T5."""

from __future__ import annotations

from typing import Literal

from meshcast.simulator.models.huggingface.config import Config, key
from meshcast.simulator.models.parts import Depth, Flag, Probability, Size

TARGETS = 114
"""Targets of T5's pre-training: spans of 512 inputs that are to be filled in, with their marks (arXiv 1910.10683,
section 3.1.4: 15 % of the tokens in spans of 3 in the mean)."""


class T5(Config):
    """``T5Config`` (T5, T5 1.1, Flan-T5): RMS norms, no biases, a table of relative positions of each stack, and a
    table of the vocabulary for both, which the output layer of the first T5 shares too.

    It names no lengths: 512 inputs (``n_positions``) and `TARGETS` stand in for them. The addition of relative
    positions to scores is left out.
    """

    hidden: Size = key("d_model")
    head_dim: Size = key("d_kv", default=64)
    ffn: Size = key("d_ff")
    layers: Depth = key("num_layers")
    decoder_layers: Depth | None = key("num_decoder_layers", default=None)
    heads: Size = key("num_heads")
    vocab: Size = key("vocab_size")
    inputs: Size = key("n_positions", default=512)
    relative_buckets: Size = key("relative_attention_num_buckets", default=32)
    dropout: Probability = key("dropout_rate", default=0.1)
    activation: Literal["relu", "gelu", "gated-gelu", "gated-relu", "gated-silu"] = key(
        "feed_forward_proj", default="relu"
    )
    tied: Flag = key("tie_word_embeddings", default=True)

    def fields(self) -> dict[str, object]:
        shape = self.same_fields("hidden", "head_dim", "ffn", "heads", "vocab", "relative_buckets", "dropout", "tied")
        encoder = {"name": "encoder", "layers": self.layers, "tokens": self.inputs, "bidirectional": True}
        encoder |= {"final_norm": True, "relative_buckets": self.relative_buckets}
        gated = self.activation.startswith("gated")
        function = self.activation.removeprefix("gated-")
        kind = {"norm": "rmsnorm", "positions": "none", "gated": gated, "cross_attention": True}
        kind["activation"] = "gelu_new" if gated and function == "gelu" else function
        layers = {"layers": self.decoder_layers or self.layers, "seq": self.inputs + TARGETS}
        return shape | kind | layers | {"branches": (encoder,)}


class MT5(T5):
    """``MT5Config``: the shape of T5 1.1."""

    activation: Literal["relu", "gelu", "gated-gelu", "gated-relu", "gated-silu"] = key(
        "feed_forward_proj", default="gated-gelu"
    )
    tied: Flag = key("tie_word_embeddings", default=False)
