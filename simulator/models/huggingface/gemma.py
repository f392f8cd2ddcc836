"""Configs of decoders with norms behind their blocks, which mix windows and full attention: Gemma, OLMo 2, EXAONE 4."""

from __future__ import annotations

from typing import Annotated, Any

from meshcast.hardware.errors import ModelError
from meshcast.hardware.schemas import Field
from meshcast.simulator.models.huggingface.config import Decoder, check_every_layer, key, local_fields, refuse
from meshcast.simulator.models.huggingface.llama import Gemma, LayerTypes
from meshcast.simulator.models.parts import Flag, Size

Cap = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""The bound of numbers that pass c tanh(x / c); only whether there is any has a cost."""


def window_fields(
    window: int | None, layers: int, types: LayerTypes | None, every: int | None, word: str = "layer_types"
) -> dict[str, object]:
    """Returns the fields of `Model` for sliding windows.

    window: tokens; None: no layer has a window.
    types: the type of each layer; None: all but every `every`-th have the window.
    word: key of the config that says which, for error messages.
    """
    slides = [not every or (layer + 1) % every != 0 for layer in range(layers)]
    if types is not None:
        slides = [each == "sliding_attention" for each in types]
    check_every_layer(slides, layers, word)
    return local_fields("window", window, slides)


class Gemma2(Gemma):
    """``Gemma2Config``: four norms a layer, caps on scores and logits, and a window in every other layer."""

    kv_heads: Size | None = key("num_key_value_heads", default=4)
    window: Size | None = key("sliding_window", default=4096)
    layer_types: LayerTypes | None = key("layer_types", default=None)
    score_cap: Cap | None = key("attn_logit_softcapping", default=50.0)
    logit_cap: Cap | None = key("final_logit_softcapping", default=30.0)
    attention_bias: Annotated[Flag, refuse("bias of attention in front of a norm")] = key(
        "attention_bias", default=False
    )
    bidirectional: Annotated[Any, refuse("attention to later tokens in a Gemma")] = key(
        "use_bidirectional_attention", default=None
    )

    def fields(self) -> dict[str, object]:
        caps = {"attention": self.score_cap, "logits": self.logit_cap}
        capped = {"softcaps": tuple(word for word, cap in caps.items() if cap is not None)}
        return super().fields() | {"norm_place": "both"} | (capped if capped["softcaps"] else {}) | self._windows()

    def _windows(self) -> dict[str, object]:
        return window_fields(self.window, self.layers, self.layer_types, 2)


class VaultGemma(Gemma2):
    """``VaultGemmaConfig``: Gemma 2 with norms in front of attention and MLP only."""

    def fields(self) -> dict[str, object]:
        return super().fields() | {"norm_place": "before"}


class Gemma3Text(Gemma2):
    """``Gemma3TextConfig``: norms on queries and keys in place of caps, and full attention in every sixth layer."""

    score_cap: Cap | None = key("attn_logit_softcapping", default=None)
    logit_cap: Cap | None = key("final_logit_softcapping", default=None)
    pattern: Size = key("sliding_window_pattern", "_sliding_window_pattern", default=6)

    def fields(self) -> dict[str, object]:
        return super().fields() | {"qk_layernorm": True}

    def _windows(self) -> dict[str, object]:
        return window_fields(self.window, self.layers, self.layer_types, self.pattern)


class Olmo2(Decoder):
    """``Olmo2Config``: norms behind attention and MLP, and over all heads of queries and of keys."""

    attention_bias: Annotated[Flag, refuse("bias of attention in front of a norm")] = key(
        "attention_bias", default=False
    )

    def fields(self) -> dict[str, object]:
        return super().fields() | {"norm_place": "after", "qk_layernorm": "all"}


class Exaone4(Decoder):
    """``Exaone4Config``: norms behind attention and MLP, and on each head of queries and keys. Where some layers have
    a window, the others are without RoPE."""

    kv_heads: Size | None = key("num_key_value_heads", default=32)
    head_dim: Size | None = key("head_dim", default=None)
    window: Size | None = key("sliding_window", default=4096)
    pattern: Annotated[int, Field(strict=True, ge=1)] | str | None = key("sliding_window_pattern", default=4)
    layer_types: LayerTypes | None = key("layer_types", default=None)

    def fields(self) -> dict[str, object]:
        shape = super().fields() | self.same_fields("head_dim") | {"norm_place": "after", "qk_layernorm": True}
        windows = window_fields(self.window, self.layers, self.layer_types, self._every())
        if self.window is not None and not windows:
            rule = "without a layer with a window no layer has RoPE"
            raise ModelError("layer_types", rule, "Give `sliding_window: null`, or some sliding_attention")
        return shape | windows | ({"full_rope": False} if "full_every" in windows else {})

    def _every(self) -> int | None:
        """Returns the layers from a layer with full attention to the next: a number, or a word such as LLLG."""
        if not isinstance(self.pattern, str):
            return self.pattern
        word = self.pattern.upper()
        if word != "L" * (len(word) - 1) + "G":
            rule = "some layers with a window and then one without are supported, such as LLLG"
            raise ModelError("pattern", rule, "Give the fields of `model:` themselves", self.pattern)
        return len(word)


class Cohere2(Decoder):
    """``Cohere2Config`` (Command R7B, Command A): attention and MLP side by side behind a single norm; layers with full
    attention are without RoPE.

    Its layer norm has no bias, and is read as an RMS norm, which has the same weights and memory traffic. The scale of
    the logits is left out.
    """

    window: Size | None = key("sliding_window", default=4096)
    tied: Flag = key("tie_word_embeddings", default=True)
    head_dim: Size | None = key("head_dim", default=None)
    attention_bias: Flag = key("attention_bias", default=False)
    pattern: Size = key("sliding_window_pattern", "_sliding_window_pattern", default=4)
    layer_types: LayerTypes | None = key("layer_types", default=None)

    @property
    def types(self) -> LayerTypes | None:
        """The types of all layers; None: all but every `pattern`-th have the window."""
        return self.layer_types

    def fields(self) -> dict[str, object]:
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias}
        windows = window_fields(self.window, self.layers, self.types, self.pattern)
        ropes = {"full_rope": False} if "full_every" in windows else {} if windows else {"positions": "none"}
        shape = super().fields() | self.same_fields("head_dim") | biases
        return shape | windows | ropes | {"parallel_residual": True, "shared_norm": True}


__all__ = ["Cohere2", "Exaone4", "Gemma2", "Gemma3Text", "Olmo2", "VaultGemma", "window_fields"]
