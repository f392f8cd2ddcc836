"""Configs of dense decoders that differ from Llama in the places of norms, biases, RoPE, windows or the MLP."""

from __future__ import annotations

from typing import Annotated, Literal

from meshcast.hardware.errors import ModelError
from meshcast.simulator.models.huggingface.config import (
    Decoder,
    check_every_layer,
    full_fields,
    key,
    refuse,
)
from meshcast.simulator.models.huggingface.gemma import Cap, Olmo2, window_fields
from meshcast.simulator.models.huggingface.llama import Granite, LayerTypes, Llama
from meshcast.simulator.models.parts import Flag, Probability, Share, Size


class SmolLM3(Llama):
    """``SmolLM3Config``: Llama with every fourth layer without RoPE."""

    kv_heads: Size | None = key("num_key_value_heads", default=4)
    tied: Flag = key("tie_word_embeddings", default=True)
    ropes: list[Literal[0, 1]] | None = key("no_rope_layers", default=None)
    every: Size = key("no_rope_layer_interval", default=4)
    slides: Annotated[Flag, refuse("windows in the layers without RoPE alone")] = key(
        "use_sliding_window", default=False
    )

    def fields(self) -> dict[str, object]:
        # Unlike its name, no_rope_layers has 1 for a layer with RoPE.
        ropes = [(layer + 1) % self.every != 0 for layer in range(self.layers)]
        if self.ropes is not None:
            ropes = [*map(bool, self.ropes[: self.layers])]
        check_every_layer(ropes, self.layers, "no_rope_layers")
        if all(ropes):
            return super().fields()
        if not any(ropes):
            return super().fields() | {"positions": "none"}
        return super().fields() | full_fields([not each for each in ropes]) | {"full_rope": False}


class SeedOss(Decoder):
    """``SeedOssConfig``: biases of queries, keys and values, dropout on scores and on both residual branches."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size | None = key("head_dim", default=128)
    qkv_bias: Flag = key("attention_bias", default=True)
    proj_bias: Flag = key("attention_out_bias", default=False)
    mlp_bias: Flag = key("mlp_bias", default=False)
    dropout: Probability = key("residual_dropout", default=0.1)
    attention_dropout: Probability = key("attention_dropout", default=0.1)  # type: ignore[assignment]

    def fields(self) -> dict[str, object]:
        biases = self.same_fields("head_dim", "qkv_bias", "proj_bias", "mlp_bias")
        return super().fields() | biases | self.read_dropout("dropout", "attention_dropout")


class Olmo(Decoder):
    """``OlmoConfig`` (OLMo 1): norms without weights. Clipping queries, keys and values, an elementwise kernel each, is
    left out."""

    bias: Flag = key("attention_bias", default=False)

    def fields(self) -> dict[str, object]:
        return super().fields() | {"qkv_bias": self.bias, "proj_bias": self.bias, "norm": "layernorm0"}


class NanoChat(Decoder):
    """``NanoChatConfig``: norms without weights, also on queries and keys; a squared ReLU; capped logits."""

    activation: Literal["relu2"] = key("hidden_act", default="relu2")  # type: ignore[assignment]
    bias: Flag = key("attention_bias", default=False)
    logit_cap: Cap | None = key("final_logit_softcapping", default=15.0)

    def fields(self) -> dict[str, object]:
        caps = {"softcaps": ("logits",)} if self.logit_cap else {}
        biases = {"qkv_bias": self.bias, "proj_bias": self.bias}
        kind = {"gated": False, "norm": "rmsnorm0", "qk_layernorm": "l2"}
        return super().fields() | self.read_activation() | biases | kind | caps


class Olmo3(Olmo2):
    """``Olmo3Config``: OLMo 2 with a window in three of four layers."""

    window: Size | None = key("sliding_window", default=4096)
    layer_types: LayerTypes | None = key("layer_types", default=None)

    def fields(self) -> dict[str, object]:
        return super().fields() | window_fields(self.window, self.layers, self.layer_types, 4)


class Arcee(Llama):
    """``ArceeConfig``: Llama with an MLP of two matrices and a squared ReLU."""

    activation: Literal["relu2"] = key("hidden_act", default="relu2")  # type: ignore[assignment]

    def fields(self) -> dict[str, object]:
        return super().fields() | self.read_activation() | {"gated": False}


class Apertus(Llama):
    """``ApertusConfig``: norms on queries and keys, and an MLP of two matrices with xIELU, which has two parameters."""

    activation: Literal["xielu"] = key("hidden_act", default="xielu")  # type: ignore[assignment]
    rows: Annotated[Size | None, refuse("output layer of a part of the vocabulary")] = key(
        "output_vocab_size", default=None
    )

    def fields(self) -> dict[str, object]:
        return super().fields() | self.read_activation() | {"gated": False, "qk_layernorm": True}


class BitNet(Llama):
    """``BitNetConfig`` (BitNet b1.58): a gated squared ReLU, norms in front of the output layers of attention and MLP.
    Its ternary weights are trained in 16 bits and quantised in each pass, whose kernels are left out."""

    activation: Literal["relu2"] = key("hidden_act", default="relu2")  # type: ignore[assignment]
    mlp_bias: Annotated[Flag, refuse("biases of this MLP")] = key("mlp_bias", default=False)

    def fields(self) -> dict[str, object]:
        return super().fields() | self.read_activation() | {"inner_norms": True}


class Jais2(Arcee):
    """``Jais2Config``: layer norms, biases and a squared ReLU, with RoPE."""

    attention_bias: Flag = key("attention_bias", default=True)
    mlp_bias: Flag = key("mlp_bias", default=True)

    def fields(self) -> dict[str, object]:
        return super().fields() | {"norm": "layernorm"}


class Glm(Decoder):
    """``GlmConfig`` (GLM-4-9B of 2024): RoPE on half of a head, biases of queries, keys and values only."""

    kv_heads: Size | None = key("num_key_value_heads", default=2)
    head_dim: Size | None = key("head_dim", default=128)
    rope_share: Share = key("partial_rotary_factor", default=0.5)
    qkv_bias: Flag = key("attention_bias", default=True)

    def fields(self) -> dict[str, object]:
        return super().fields() | self.same_fields("head_dim", "rope_share", "qkv_bias")


class Glm4(Glm):
    """``Glm4Config`` (GLM-4-0414): GLM with norms before and behind attention and MLP."""

    def fields(self) -> dict[str, object]:
        return super().fields() | {"norm_place": "both"}


class Glm4VText(Glm4):
    """``Glm4vTextConfig``: GLM-4 with heads of hidden / heads."""

    head_dim: Size | None = key("head_dim", default=None)


class Ernie45(Decoder):
    """``Ernie4_5Config``: one flag for all biases."""

    kv_heads: Size | None = key("num_key_value_heads", default=2)
    head_dim: Size | None = key("head_dim", default=128)
    tied: Flag = key("tie_word_embeddings", default=True)
    bias: Flag = key("use_bias", default=False)

    def fields(self) -> dict[str, object]:
        biases = dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), self.bias)
        return super().fields() | self.same_fields("head_dim") | biases


class Ministral(Decoder):
    """``MinistralConfig``: Mistral, whose layers have the window as ``layer_types`` says, by default all."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size | None = key("head_dim", default=None)
    window: Size | None = key("sliding_window", default=4096)
    layer_types: LayerTypes | None = key("layer_types", default=None)

    def fields(self) -> dict[str, object]:
        windows = window_fields(self.window, self.layers, self.layer_types, None)
        return super().fields() | self.same_fields("head_dim") | windows


class Ministral3(Decoder):
    """``Ministral3Config``: Mistral with heads 128 wide."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size | None = key("head_dim", default=128)
    window: Size | None = key("sliding_window", default=None)

    def fields(self) -> dict[str, object]:
        return super().fields() | self.same_fields("head_dim", "window")


class Persimmon(Decoder):
    """``PersimmonConfig``: layer norms, also on queries and keys, biases and a squared ReLU; RoPE on half of a head."""

    activation: Literal["relu2"] = key("hidden_act", default="relu2")  # type: ignore[assignment]
    rope_share: Share = key("partial_rotary_factor", default=0.5)
    qk_norm: Flag = key("qk_layernorm", default=True)
    dropout: Annotated[Probability, refuse("dropout on the MLP alone")] = key("hidden_dropout", default=0.0)

    def fields(self) -> dict[str, object]:
        kind = {"norm": "layernorm", "gated": False, "fused_qkv": True, "kv_heads": self.heads}
        norms = {"qk_layernorm": "layer" if self.qk_norm else False}
        return super().fields() | self.same_fields("rope_share") | self.read_activation() | kind | norms


class Helium(Decoder):
    """``HeliumConfig``: Llama with heads 128 wide."""

    kv_heads: Size | None = key("num_key_value_heads", default=20)
    head_dim: Size | None = key("head_dim", default=128)
    qkv_bias: Flag = key("attention_bias", default=False)
    mlp_bias: Flag = key("mlp_bias", default=False)

    def fields(self) -> dict[str, object]:
        return super().fields() | self.same_fields("head_dim", "qkv_bias", "mlp_bias")


class InternLM3(Llama):
    """``InternLM3Config`` and ``IQuestCoderConfig``: Llama with heads 128 wide."""

    head_dim: Size | None = key("head_dim", default=128)


class Cohere(Decoder):
    """``CohereConfig`` (Command R and R+): attention and MLP side by side behind a single norm.

    Its layer norm has no bias, and is read as an RMS norm, which has the same weights and memory traffic. The scale of
    the logits is left out.
    """

    tied: Flag = key("tie_word_embeddings", default=True)
    bias: Flag = key("attention_bias", default=False)
    qk_norm: Flag = key("use_qk_norm", default=False)

    def fields(self) -> dict[str, object]:
        biases = {"qkv_bias": self.bias, "proj_bias": self.bias}
        norms = {"parallel_residual": True, "shared_norm": True, "qk_layernorm": "all" if self.qk_norm else False}
        return super().fields() | biases | norms


class StableLM(Decoder):
    """``StableLmConfig``: layer norms, gated MLPs without biases, RoPE on a quarter of a head."""

    kv_heads: Size | None = key("num_key_value_heads", default=32)
    rope_share: Share = key("partial_rotary_factor", default=0.25)
    qkv_bias: Flag = key("use_qkv_bias", default=False)
    parallel: Flag = key("use_parallel_residual", default=False)
    qk_norm: Flag = key("qk_layernorm", default=False)
    dropout: Annotated[Probability, refuse("dropout on the MLP alone")] = key("hidden_dropout", default=0.0)

    def fields(self) -> dict[str, object]:
        kind = {"norm": "layernorm", "proj_bias": False, "mlp_bias": False}
        # Norms of queries and keys have a weight for every element of all heads.
        norms = {"qk_layernorm": "all" if self.qk_norm else False}
        residual = {"parallel_residual": self.parallel, "shared_norm": self.parallel}
        return super().fields() | self.same_fields("rope_share", "qkv_bias") | kind | norms | residual


class CWM(Decoder):
    """``CwmConfig``: Llama with a window in the layers that ``layer_types`` names, by default the three behind every
    fourth, the first included."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size | None = key("head_dim", default=128)
    mlp_bias: Flag = key("mlp_bias", default=False)
    window: Size | None = key("sliding_window", default=8192)
    layer_types: LayerTypes | None = key("layer_types", default=None)

    def fields(self) -> dict[str, object]:
        windows = window_fields(self.window, self.layers, self.layer_types or list_layer_types(self.layers), None)
        return super().fields() | self.same_fields("head_dim", "mlp_bias") | windows


def list_layer_types(layers: int) -> LayerTypes:
    """Returns types of layers of which the first of every four has full attention."""
    return ["sliding_attention" if layer % 4 else "full_attention" for layer in range(layers)]


class GraniteSWA(Granite):
    """``GraniteSWAConfig``: Granite with a window in three of four layers, and a learned logit of every head."""

    kv_heads: Size | None = key("num_key_value_heads", default=4)
    tied: Flag = key("tie_word_embeddings", default=True)
    window: Size | None = key("sliding_window", default=128)
    layer_types: LayerTypes | None = key("layer_types", default=None)
    thetas: list[float] | None = key("layer_rope_theta", default=None)

    def fields(self) -> dict[str, object]:
        types = self.layer_types or list_layer_types(self.layers)
        windows = window_fields(self.window, self.layers, types, None)
        return super().fields() | windows | self._ropes(types) | {"sinks": True}

    def _ropes(self, types: LayerTypes) -> dict[str, object]:
        """Returns the fields of `Model` for layers without RoPE, whose base is 0."""
        thetas = self.thetas or [1.0] * self.layers
        check_every_layer(thetas, self.layers, "layer_rope_theta")
        if all(thetas):
            return {}
        if not any(thetas):
            return {"positions": "none"}
        if [bool(theta) for theta in thetas] != [each == "sliding_attention" for each in types]:
            rule = "only the layers with full attention among those with a window can be without RoPE"
            raise ModelError("thetas", rule, "Give the fields of `model:` themselves", self.thetas)
        return {"full_rope": False}


class HyperClovaX(Granite):
    """``HyperCLOVAXConfig``: Granite with norms behind attention and MLP too (``use_post_norm``)."""

    post_norm: Flag = key("use_post_norm", default=True)

    def fields(self) -> dict[str, object]:
        return super().fields() | ({"norm_place": "both"} if self.post_norm else {})
