"""Configs of the Llama family: RMS norms, gated MLPs, RoPE."""

from __future__ import annotations

from typing import Annotated, Literal

from meshcast.simulator.models.huggingface.config import Decoder, Gelu, check_every_layer, key, local_fields, refuse
from meshcast.simulator.models.parts import Depth, Flag, Probability, Share, Size

LayerTypes = list[Literal["full_attention", "sliding_attention"]]


class Llama(Decoder):
    """``LlamaConfig`` (Llama 1, 2, 3): usually no biases and an untied output layer."""

    head_dim: Size | None = key("head_dim", default=None)
    attention_bias: Flag = key("attention_bias", default=False)
    mlp_bias: Flag = key("mlp_bias", default=False)

    def fields(self) -> dict[str, object]:
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias}
        return super().fields() | biases | self.same_fields("head_dim", "mlp_bias")


class Emu3Text(Llama):
    """``Emu3TextConfig``: Llama with one probability of dropout on scores and on both residual branches."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    dropout: Probability = key("attention_dropout", default=0.1)
    attention_dropout: Probability = key("attention_dropout", default=0.1)  # type: ignore[assignment]

    def fields(self) -> dict[str, object]:
        return super().fields() | self.same_fields("dropout")


class Mistral(Decoder):
    """``MistralConfig``: grouped-query attention and a window in all layers; null means no window."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size | None = key("head_dim", default=None)
    window: Size | None = key("sliding_window", default=4096)

    def fields(self) -> dict[str, object]:
        return super().fields() | self.same_fields("head_dim", "window")


class Qwen2(Decoder):
    """``Qwen2Config`` (Qwen 2 and 2.5): biases on queries, keys and values only.

    With ``use_sliding_window`` all but the first ``max_window_layers`` layers have the window.
    """

    kv_heads: Size | None = key("num_key_value_heads", default=32)
    slides: Flag = key("use_sliding_window", default=False)
    window: Size | None = key("sliding_window", default=4096)
    first_full: int = key("max_window_layers", default=28)
    layer_types: LayerTypes | None = key("layer_types", default=None)

    def fields(self) -> dict[str, object]:
        slides, word = [layer >= self.first_full for layer in range(self.layers)], "max_window_layers"
        if self.layer_types is not None:
            slides, word = [each == "sliding_attention" for each in self.layer_types], "layer_types"
        check_every_layer(slides, self.layers, word)
        window = local_fields("window", self.window if self.slides else None, slides)
        return super().fields() | window | {"qkv_bias": True}


class Qwen3(Qwen2):
    """``Qwen3Config``: explicit width of heads, norms on queries and keys in place of biases."""

    head_dim: Size = key("head_dim", default=128)
    attention_bias: Flag = key("attention_bias", default=False)

    def fields(self) -> dict[str, object]:
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias}
        return super().fields() | biases | self.same_fields("head_dim") | {"qk_layernorm": True}


class Gemma(Decoder):
    """``GemmaConfig`` (Gemma 1): heads 256 wide, GeGLU, a tied output layer.

    Old configs call the activation ``hidden_act``; the library now reads ``hidden_activation``.
    """

    kv_heads: Size | None = key("num_key_value_heads", default=16)
    head_dim: Size = key("head_dim", default=256)
    activation: Gelu = key("hidden_activation", "hidden_act", default="gelu_pytorch_tanh")  # type: ignore[assignment]
    tied: Flag = key("tie_word_embeddings", default=True)
    attention_bias: Flag = key("attention_bias", default=False)

    def fields(self) -> dict[str, object]:
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias}
        kind = self.read_activation() | {"norm": "rmsnorm1p"}
        return super().fields() | biases | self.same_fields("head_dim") | kind


class Phi3(Decoder):
    """``Phi3Config`` (Phi 3 and Phi 4, but not their models with experts or blocks): RoPE on a share of a head."""

    rope_share: Share = key("partial_rotary_factor", default=1.0)
    window: Size | None = key("sliding_window", default=None)
    dropout: Probability = key("resid_pdrop", default=0.0)
    embedding_dropout: Probability = key("embd_pdrop", default=0.0)
    attention_dropout: Probability = key("attention_dropout", default=0.0)  # type: ignore[assignment]

    def fields(self) -> dict[str, object]:
        dropout = self.read_dropout("dropout", "embedding_dropout", "attention_dropout")
        return super().fields() | self.same_fields("rope_share", "window") | dropout | {"fused_qkv": True}


class Granite(Llama):
    """``GraniteConfig``: Llama with factors on embeddings, scores, residual additions and logits.

    The factors are part of kernels that run anyway, and are left out.
    """


class Exaone(Llama):
    """``ExaoneConfig`` (EXAONE 3 and 3.5): Llama under other keys."""

    layers: Depth = key("num_layers", "num_hidden_layers")
    activation: Literal["silu", "swish"] = key("activation_function", "hidden_act", default="silu")
    embedding_dropout: Annotated[Probability, refuse("dropout on the embedding alone")] = key(
        "embed_dropout", default=0.0
    )


class HunyuanDense(Llama):
    """``HunYuanDenseV1Config``: Llama with norms on queries and keys."""

    sharing: Annotated[Flag, refuse("layers that share keys and values")] = key("use_cla", default=False)

    def fields(self) -> dict[str, object]:
        return super().fields() | {"qk_layernorm": True}
