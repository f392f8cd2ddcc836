"""Configs of models that see images: an encoder of images and a projector in front of a decoder, and CLIP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from meshcast.hardware.errors import ModelError
from meshcast.hardware.schemas import Field, model_validator
from meshcast.simulator.models.huggingface.config import (
    Config,
    Gelu,
    Keys,
    check_every_layer,
    key,
    leave_out_mtp,
    local_fields,
    refuse,
)
from meshcast.simulator.models.huggingface.readers import DECODERS, TEXTS, find_reader
from meshcast.simulator.models.parts import Count, Depth, Flag, Probability, Share, Size

LAID_OUT: dict[str, dict[str, int]] = {
    "llama": {
        **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"vocab_size": 32000, "max_position_embeddings": 2048},
    },
    "mistral": {
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"vocab_size": 32000, "max_position_embeddings": 131072},
    },
    "qwen2": {
        **{"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"vocab_size": 151936, "max_position_embeddings": 32768},
    },
    "qwen3_vl_text": {
        **{"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"vocab_size": 151936, "max_position_embeddings": 128000},
    },
    "qwen3_vl_moe_text": {
        **{"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16},
        **{"vocab_size": 151936, "max_position_embeddings": 128000},
    },
    "glm4v_text": {
        **{"hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32},
        **{"vocab_size": 151552, "max_position_embeddings": 32768},
    },
    "glm4v_moe_text": {
        **{"hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96},
        **{"vocab_size": 151424, "max_position_embeddings": 65536},
    },
    "llama4_text": {
        **{"hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48, "num_attention_heads": 40},
        **{"vocab_size": 202048, "max_position_embeddings": 131072},
    },
    "qwen3_5_text": {
        **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16},
        **{"vocab_size": 248320, "max_position_embeddings": 32768},
    },
    "qwen3_5_moe_text": {
        **{"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16},
        **{"vocab_size": 248320, "max_position_embeddings": 32768},
    },
    "emu3_text_model": {
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"vocab_size": 184622, "max_position_embeddings": 9216},
    },
    "gemma4_text": {
        **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8},
        **{"vocab_size": 262144, "max_position_embeddings": 131072},
    },
    "gemma3_text": {
        **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8},
        **{"vocab_size": 262208, "max_position_embeddings": 131072},
    },
}
"""Defaults of ``transformers`` 4.57 for widths and counts of a ``text_config``; files hold those that differ."""


def text_fields(config: Mapping[str, Any] | None, default: str, where: str = "text_config") -> dict[str, Any]:
    """Returns the fields of the decoder that a ``text_config`` describes.

    default: its ``model_type``, if it says none.
    Raises ModelError for a kind that is not supported.
    """
    fields = dict(config or {})
    kind = fields.get("model_type", default)
    if kind not in DECODERS | TEXTS:
        rule = "no decoder of this kind is supported behind an encoder of images"
        raise ModelError(where, rule, "Give the fields of `model:` themselves", str(kind))
    return find_reader(kind).model_validate({**LAID_OUT.get(kind, {}), **fields}).fields()


class VisionConfig(Keys):
    """``CLIPVisionConfig`` and ``SiglipVisionConfig``: a transformer over patches, with learned positions and layer
    norms. Those of CLIP have a class token and a norm in front, those of SigLIP a bias of the patches.

    The pooling head of SigLIP, which decoders do not read, is left out.
    """

    kind: Literal["clip_vision_model", "siglip_vision_model"] = key("model_type", default="clip_vision_model")
    layers: Depth = key("num_hidden_layers", default=12)
    hidden: Size = key("hidden_size", default=768)
    heads: Size = key("num_attention_heads", default=12)
    ffn: Size = key("intermediate_size", default=3072)
    channels: Size = key("num_channels", default=3)
    image: Size = key("image_size", default=224)
    patch: Size | None = key("patch_size", default=None)
    activation: Literal["quick_gelu"] | Gelu = key("hidden_act", default="quick_gelu")

    @property
    def is_clip(self) -> bool:
        """Whether it is the encoder of CLIP."""
        return self.kind == "clip_vision_model"

    @property
    def _side(self) -> int:
        """Pixels of a side of a patch."""
        return self.patch or (32 if self.is_clip else 16)

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image // self._side) ** 2

    def fields(self) -> dict[str, Any]:
        """Returns the fields of `Branch`, without its tokens and what follows its last layer."""
        return {
            **{"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "ffn": self.ffn, "gated": False},
            **{"norm": "layernorm", "positions": "learned", "position_rows": self.patches + self.is_clip},
            **{"input_width": self.channels * self._side**2, "input_bias": not self.is_clip},
            **{"class_token": self.is_clip, "embedding_norm": self.is_clip, "parallel_residual": False},
            **self.read_activation(),
        }


class Multimodal(Config):
    """A decoder with an encoder of images in front, of a single image in every sequence.

    More images, or an encoder that is not trained: ``branches: {vision: {tokens: ..., frozen: true}}`` beside
    ``preset:``.
    """

    text: dict[str, Any] | None = key("text_config", default=None)
    tied: Flag | None = key("tie_word_embeddings", default=None)

    def _join(self, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
        if self.tied is not None:
            text = text | {"tied": self.tied}
        return text | {"branches": ({"name": "vision", **vision}, {"name": "text", "layers": 0})}


class Llava(Multimodal):
    """``LlavaConfig`` (LLaVA 1.5): CLIP and a projector of two layers. The norm behind the last layer of CLIP, whose
    result is not read, is left out; the last layer, which runs forward in vain (``vision_feature_layer: -2``), counts
    as any other."""

    vision: VisionConfig = key("vision_config", default=VisionConfig())
    select: Literal["default", "full"] = key("vision_feature_select_strategy", default="default")
    layer: int | list[int] = key("vision_feature_layer", default=-2)
    activation: Gelu = key("projector_hidden_act", default="gelu")
    projector_bias: Flag = key("multimodal_projector_bias", default=True)

    def fields(self) -> dict[str, Any]:
        if isinstance(self.layer, list) or self.layer not in (-1, -2):
            rule = "the features of the last layer or of the one before are supported"
            raise ModelError("layer", rule, "Give -1 or -2", str(self.layer))
        tower = self.vision.fields()
        tokens = self.vision.patches + (self.vision.is_clip and self.select == "full")
        projector = {"projector": "mlp", "projector_bias": self.projector_bias, "tokens": tokens}
        return self._join(text_fields(self.text, "llama"), tower | projector)


class Gemma3(Multimodal):
    """``Gemma3Config``: SigLIP, whose patches are averaged to ``mm_tokens_per_image``, a norm and a matrix."""

    vision: VisionConfig = key("vision_config", default=VisionConfig())
    tokens: Size = key("mm_tokens_per_image", default=256)
    tied: Flag | None = key("tie_word_embeddings", default=True)

    def fields(self) -> dict[str, Any]:
        if self.vision.patches % self.tokens:
            rule = f"it divides the {self.vision.patches} patches of an image"
            raise ModelError("tokens", rule, "Correct it, or image_size and patch_size", self.tokens)
        tower = self.vision.fields() | {"final_norm": True, "tokens": self.tokens, "projector": "linear"}
        merging = {"merge": self.vision.patches // self.tokens, "merge_by": "mean"}
        return self._join(
            text_fields(self.text, "gemma3_text"), tower | merging | {"projector_norm": True, "projector_bias": False}
        )


class Gemma4Vision(Keys):
    """``Gemma4VisionConfig``: RMS norms around all blocks and on queries, keys and values, gated MLPs, and a table of
    positions along each axis beside RoPE, whose kernels are left out. Clipping the linear layers is left out."""

    layers: Depth = key("num_hidden_layers", default=16)
    hidden: Size = key("hidden_size", default=768)
    heads: Size = key("num_attention_heads", default=12)
    kv_heads: Size = key("num_key_value_heads", default=12)
    head_dim: Size = key("head_dim", default=64)
    ffn: Size = key("intermediate_size", default=3072)
    patch: Size = key("patch_size", default=16)
    side: Size = key("pooling_kernel_size", default=3)
    rows: Size = key("position_embedding_size", default=10240)
    bias: Annotated[Flag, refuse("bias of attention in front of a norm")] = key("attention_bias", default=False)
    activation: Gelu = key("hidden_activation", default="gelu_pytorch_tanh")

    def fields(self) -> dict[str, Any]:
        """Returns the fields of `Branch`, without its tokens."""
        return {
            **{"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "kv_heads": self.kv_heads},
            **{"head_dim": self.head_dim, "ffn": self.ffn, "gated": True, "norm": "rmsnorm", "norm_place": "both"},
            **{"qk_layernorm": True, "value_norm": True, "positions": "learned", "position_rows": 2 * self.rows},
            **{"input_width": 3 * self.patch**2, "embedding_norm": False, "parallel_residual": False},
            **{"merge": self.side**2, "merge_by": "mean", "projector": "linear", "projector_norm": "plain"},
            **{"projector_bias": False, **self.read_activation()},
        }


class Gemma4(Multimodal):
    """``Gemma4Config``: an encoder of images in front of the decoder, if there is one. An image stands for 280 tokens,
    as many as its processor makes of it by default."""

    vision: Gemma4Vision | None = key("vision_config", default=None)
    audio: Annotated[Any, refuse("encoder of sounds")] = key("audio_config", default=None)

    def fields(self) -> dict[str, Any]:
        text = text_fields(self.text, "gemma4_text")
        if self.vision is None:
            return text | ({} if self.tied is None else {"tied": self.tied})
        return self._join(text, self.vision.fields() | {"tokens": 280})


class Emu3(Config):
    """``Emu3Config``: a Llama over tokens of texts and images. The encoder that makes these tokens of images is not
    trained with it, and left out."""

    text: dict[str, Any] | None = key("text_config", default=None)

    def fields(self) -> dict[str, Any]:
        return text_fields(self.text, "emu3_text_model")


class QwenVision(Keys):
    """``Qwen2VLVisionConfig``: a transformer over patches of two frames, with RoPE."""

    layers: Depth = key("depth", default=32)
    hidden: Size = key("embed_dim", default=1280)
    heads: Size = key("num_heads", default=16)
    ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)] = key("mlp_ratio", default=4)
    channels: Size = key("in_channels", "in_chans", default=3)
    patch: Size = key("patch_size", default=14)
    side: Size = key("spatial_merge_size", default=2)
    frames: Size = key("temporal_patch_size", default=2)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of `Branch`, without its tokens."""
        merged = self.side**2 * self.hidden
        return {
            **{"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "gated": False},
            **{"ffn": int(self.ratio * self.hidden), "norm": "layernorm", "positions": "rope", "final_norm": True},
            **{"input_width": self.channels * self.frames * self.patch**2, "embedding_norm": False},
            **{"merge": self.side**2, "projector": "mlp", "projector_ffn": merged, "parallel_residual": False},
            **self.read_activation(),
        }


IMAGE_TOKENS = 1024
"""Tokens that an image is in the decoder where a config does not say: 896 x 896 pixels in patches of 14, four to a
token. Qwen2-VL takes images as they are."""


class Qwen2VL(Multimodal):
    """``Qwen2VLConfig``: four neighbouring patches are a token of the decoder, a Qwen 2. Older files have the keys of
    the decoder beside ``vision_config``. An image stands for `IMAGE_TOKENS` tokens."""

    vision: QwenVision = key("vision_config", default=QwenVision())

    @model_validator(mode="before")
    @classmethod
    def _text_beside(cls, config: Any) -> Any:
        return nest_text(config)

    def fields(self) -> dict[str, Any]:
        return self._join(text_fields(self.text, "qwen2"), self.vision.fields() | {"tokens": IMAGE_TOKENS})


class Qwen25Vision(QwenVision):
    """``Qwen2_5_VLVisionConfig``: RMS norms, gated MLPs, biases, and attention within windows of 112 x 112 pixels but
    in every eighth layer. Windows at the border of an image count as whole ones."""

    hidden: Size = key("hidden_size", default=3584)
    ffn: Size = key("intermediate_size", default=3420)
    window: Size = key("window_size", default=112)
    full: list[int] = key("fullatt_block_indexes", default=[7, 15, 23, 31])

    def fields(self) -> dict[str, Any]:
        local = [layer not in self.full for layer in range(self.layers)]
        check_every_layer(local, self.layers, "fullatt_block_indexes")
        windows = local_fields("attention_chunk", (self.window // self.patch) ** 2, local)
        biases = {"qkv_bias": True, "proj_bias": True, "mlp_bias": True}
        return super().fields() | windows | biases | {"ffn": self.ffn, "gated": True, "norm": "rmsnorm"}


class Qwen25VL(Qwen2VL):
    """``Qwen2_5_VLConfig``: as Qwen2-VL, with another encoder."""

    vision: Qwen25Vision = key("vision_config", default=Qwen25Vision())


class Qwen35Vision(QwenVision):
    """``Qwen3_5VisionConfig``: layer norms and biases; learned positions of an image of ``num_position_embeddings``
    patches beside RoPE, whose kernels are left out."""

    layers: Depth = key("depth", default=27)
    hidden: Size = key("hidden_size", default=1152)
    ffn: Size = key("intermediate_size", default=4304)
    activation: Gelu = key("hidden_act", default="gelu_pytorch_tanh")
    patch: Size = key("patch_size", default=16)
    rows: Size = key("num_position_embeddings", default=2304)

    def fields(self) -> dict[str, Any]:
        positions = {"positions": "learned", "position_rows": self.rows, "tokens": self.rows // self.side**2}
        return super().fields() | positions | {"ffn": self.ffn, "input_bias": True}


class Qwen35VL(Multimodal):
    """``Qwen3_5Config``: an encoder of images in front of the decoder."""

    vision: Qwen35Vision = key("vision_config", default=Qwen35Vision())

    def fields(self) -> dict[str, Any]:
        return self._join(text_fields(self.text, "qwen3_5_text"), self.vision.fields())


class Qwen35MoEVL(Qwen35VL):
    """``Qwen3_5MoeConfig``: as Qwen 3.5, with experts."""

    def fields(self) -> dict[str, Any]:
        return self._join(text_fields(self.text, "qwen3_5_moe_text"), self.vision.fields())


class KimiVision(Keys):
    """``Kimi_K25VisionConfig`` (MoonViT): layer norms, biases, learned positions beside RoPE, whose kernels are left
    out; so is the mean over the frames of a video."""

    layers: Depth = key("vt_num_hidden_layers", "num_hidden_layers", default=27)
    hidden: Size = key("vt_hidden_size", "hidden_size", default=1152)
    heads: Size = key("vt_num_attention_heads", "num_attention_heads", default=16)
    ffn: Size = key("vt_intermediate_size", "intermediate_size", default=4304)
    patch: Size = key("patch_size", default=14)
    rows: Size = key("init_pos_emb_height", "pos_emb_height", default=64)
    columns: Size = key("init_pos_emb_width", "pos_emb_width", default=64)
    merged: tuple[Size, Size] = key("merge_kernel_size", default=(2, 2))

    def fields(self) -> dict[str, object]:
        """Returns the fields of `Branch`."""
        rows, merge = self.rows * self.columns, math.prod(self.merged)
        return {
            **{"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "ffn": self.ffn},
            **{"gated": False, "norm": "layernorm", "parallel_residual": False, "final_norm": True},
            **{"positions": "learned", "position_rows": rows, "tokens": rows // merge},
            **{"input_width": 3 * self.patch**2, "input_bias": True, "embedding_norm": False},
            **{"merge": merge, "projector": "mlp", "projector_ffn": merge * self.hidden, "projector_norm": "each"},
        }


class KimiK25(Multimodal):
    """``Kimi_K25Config`` (Kimi K2.5 to K2.7): an encoder of images in front of a Kimi K2."""

    vision: KimiVision = key("vision_config", default=KimiVision())

    def fields(self) -> dict[str, object]:
        return self._join(text_fields(self.text, "deepseek_v3"), self.vision.fields())


class StepVision(Keys):
    """``Step3p7VisionConfig``: layer norms, one of them in front, biases, a vector that multiplies what each block
    adds, and learned positions beside RoPE, whose kernels are left out. Two convolutions leave a sixteenth of the
    patches."""

    layers: Depth = key("layers", "num_hidden_layers", default=47)
    hidden: Size = key("width", "hidden_size", default=1536)
    heads: Size = key("heads", "num_attention_heads", default=16)
    ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)] = key("mlp_ratio", default=8960 / 1536)
    channels: Size = key("num_channels", default=3)
    image: Size = key("image_size", default=728)
    patch: Size = key("patch_size", default=14)
    activation: Literal["quick_gelu"] | Gelu = key("hidden_act", default="quick_gelu")

    def fields(self) -> dict[str, object]:
        """Returns the fields of `Branch`, of an image of the largest size without further views of its parts."""
        patches = (self.image // self.patch) ** 2
        return {
            **{"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "gated": False},
            **{"ffn": int(self.hidden * self.ratio), "norm": "layernorm", "embedding_norm": True, "layer_scale": True},
            **{"positions": "learned", "position_rows": patches, "input_width": self.channels * self.patch**2},
            **{"tokens": patches // 16, "merge": 16, "merge_by": "convolutions", "projector": "linear"},
            **{"parallel_residual": False, **self.read_activation()},
        }


def nest_text(config: object) -> object:
    """Returns a config whose keys of the decoder stand in ``text_config``, where older files have them beside
    ``vision_config``."""
    if not isinstance(config, Mapping) or config.get("text_config") is not None:
        return config
    text = {key: value for key, value in config.items() if key not in ("vision_config", "model_type")}
    return {**config, "text_config": text}


class Step37(Multimodal):
    """``Step3p7Config``: an encoder of images in front of a Step 3.5; a file without ``vision_config`` is the decoder
    alone."""

    vision: StepVision | None = key("vision_config", default=None)
    projector_bias: Flag = key("projector_bias", default=False)

    @model_validator(mode="before")
    @classmethod
    def _text_beside(cls, config: Any) -> Any:
        return nest_text(config)

    def fields(self) -> dict[str, object]:
        text = text_fields(self.text, "step3p5")
        if self.vision is None:
            return text
        # The trunk of a model with branches has no layers of multi-token prediction.
        left_out = leave_out_mtp(text.pop("mtp", 0), text["layers"])
        text.pop("mtp_like", None)
        return self._join(text | left_out, self.vision.fields() | self.same_fields("projector_bias"))


class MiniMaxVision(Keys):
    """``MiniMaxM3VLVisionConfig``: CLIP with RoPE, over patches of two frames."""

    layers: Depth = key("num_hidden_layers", default=32)
    hidden: Size = key("hidden_size", default=1280)
    heads: Size = key("num_attention_heads", default=16)
    ffn: Size = key("intermediate_size", default=5120)
    channels: Size = key("num_channels", default=3)
    patch: Size = key("patch_size", default=14)
    frames: Size = key("temporal_patch_size", default=2)
    side: Size = key("spatial_merge_size", default=2)
    activation: Gelu = key("hidden_act", default="gelu")

    def fields(self) -> dict[str, object]:
        """Returns the fields of `Branch`, without its tokens."""
        return {
            **{"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "ffn": self.ffn, "gated": False},
            **{"norm": "layernorm", "positions": "rope", "embedding_norm": True, "parallel_residual": False},
            **{"input_width": self.channels * self.frames * self.patch**2, "merge": self.side**2},
            **{"merge_by": "mlp", "projector": "mlp", **self.read_activation()},
        }


class MiniMaxM3VL(Multimodal):
    """``MiniMaxM3VLConfig``: each patch passes an MLP, four neighbours another. An image stands for `IMAGE_TOKENS`
    tokens: its processor takes images of many sizes."""

    vision: MiniMaxVision = key("vision_config", default=MiniMaxVision())
    inner: Size = key("projector_hidden_size", default=6144)

    def fields(self) -> dict[str, object]:
        text = text_fields(self.text, "minimax_m3_vl_text")
        left_out = leave_out_mtp(text.pop("mtp", 0), text["layers"])
        tower = self.vision.fields() | {"tokens": IMAGE_TOKENS, "projector_ffn": self.inner}
        return self._join(text | left_out, tower)


class KimiK3Vision(KimiVision):
    """``KimiK3VisionConfig``: as that of Kimi K2.5, with RMS norms, heads of another width and no biases; a norm is
    behind the projector."""

    hidden: Size = key("vt_hidden_size", "hidden_size", default=1024)
    heads: Size = key("vt_num_attention_heads", "num_attention_heads", default=12)
    ffn: Size = key("vt_intermediate_size", "intermediate_size", default=4096)
    width: Size | None = key("qkv_hidden_size", default=None)
    norm: Literal["layernorm", "rmsnorm"] = key("norm_type", default="rmsnorm")
    attention_bias: Flag = key("attn_bias", default=False)
    mlp_bias: Flag = key("linear_bias", default=False)
    input_bias: Flag = key("patch_embed_proj_bias", default=False)
    projector: Literal["patchmergerv2"] = key("mm_projector_type", default="patchmergerv2")

    def fields(self) -> dict[str, object]:
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias}
        heads = {"head_dim": self.width // self.heads} if self.width else {}
        kind: dict[str, object] = {"norm": self.norm, "mlp_bias": self.mlp_bias, "input_bias": self.input_bias}
        kind |= {"projector_norm": "behind", "projector_bias": False}
        return super().fields() | biases | heads | kind


class KimiK3(Multimodal):
    """``KimiK3Config``: an encoder of images in front of the decoder."""

    vision: KimiK3Vision = key("vision_config", default=KimiK3Vision())

    def fields(self) -> dict[str, object]:
        return self._join(text_fields(self.text, "kimi_linear"), self.vision.fields())


class Qwen3Vision(Qwen35Vision):
    """``Qwen3VLVisionConfig``: as that of Qwen 3.5, with a further projector of the states of some layers."""

    deep: list[Count] = key("deepstack_visual_indexes", default=[8, 16, 24])

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"deepstack": len(self.deep)}


class Qwen3VL(Multimodal):
    """``Qwen3VLConfig``: an encoder of images in front of a Qwen 3."""

    vision: Qwen3Vision = key("vision_config", default=Qwen3Vision())

    def fields(self) -> dict[str, Any]:
        return self._join(text_fields(self.text, "qwen3_vl_text"), self.vision.fields())


class Qwen3VLMoE(Qwen3VL):
    """``Qwen3VLMoeConfig``: as Qwen3-VL, with experts."""

    def fields(self) -> dict[str, Any]:
        return self._join(text_fields(self.text, "qwen3_vl_moe_text"), self.vision.fields())


class Pixtral(VisionConfig):
    """``PixtralVisionConfig``: RMS norms, one of them in front, gated MLPs, RoPE and no biases. Images are taken as
    they are, up to a size."""

    layers: Depth = key("num_hidden_layers", default=24)
    hidden: Size = key("hidden_size", default=1024)
    heads: Size = key("num_attention_heads", default=16)
    ffn: Size = key("intermediate_size", default=4096)
    image: Size = key("image_size", default=1024)
    patch: Size = key("patch_size", default=16)  # type: ignore[assignment]
    activation: Gelu | Literal["silu"] = key("hidden_act", default="gelu")  # type: ignore[assignment]
    kind: Literal["pixtral"] = key("model_type", default="pixtral")  # type: ignore[assignment]

    def fields(self) -> dict[str, Any]:
        return {
            **{"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "ffn": self.ffn, "gated": True},
            **{"norm": "rmsnorm", "positions": "rope", "embedding_norm": True, "parallel_residual": False},
            **{"input_width": self.channels * self.patch**2, "qk_layernorm": False, **self.read_activation()},
        }


MISTRAL3 = {"image_size": 1540, "patch_size": 14}
"""Defaults of Mistral 3 for its encoder, where they differ from those of the encoder alone."""

MISTRAL3_TEXT = {
    **{"hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "vocab_size": 131072},
    **{"head_dim": 128, "sliding_window": None},
}
"""The decoder of Mistral 3 where a config describes none, where it differs from Mistral."""


class Mistral3(Multimodal):
    """``Mistral3Config`` (Mistral Small 3.1): Pixtral, a norm, a matrix that merges neighbouring patches, and a
    projector of two layers. An image stands for as many tokens as the largest."""

    vision: dict[str, Any] | None = key("vision_config", default=None)
    side: Size = key("spatial_merge_size", default=2)
    layer: Literal[-1] = key("vision_feature_layer", default=-1)
    activation: Gelu = key("projector_hidden_act", default="gelu")
    projector_bias: Flag = key("multimodal_projector_bias", default=False)
    tied: Flag | None = key("tie_word_embeddings", default=True)

    def fields(self) -> dict[str, Any]:
        vision = Pixtral.model_validate(MISTRAL3 | (self.vision or {}))
        merged = vision.image // vision.patch // self.side
        projector = {"projector": "mlp", "projector_bias": self.projector_bias, "final_norm": True}
        merging = {"merge": self.side**2, "merge_by": "linear", "tokens": merged**2}
        text = text_fields(MISTRAL3_TEXT if self.text is None else self.text, "mistral")
        return self._join(text, vision.fields() | projector | merging)


Square = Size | Annotated[list[Size], Field(min_length=2, max_length=2)]
"""Pixels of the sides of an image or a patch, or of both if they are the same."""


class InternVision(Keys):
    """``InternVLVisionConfig``: a class token, learned positions, and a vector that multiplies what each block adds."""

    layers: Depth = key("num_hidden_layers", default=24)
    hidden: Size = key("hidden_size", default=1024)
    heads: Size = key("num_attention_heads", default=16)
    ffn: Size = key("intermediate_size", default=4096)
    channels: Size = key("num_channels", default=3)
    image: Square = key("image_size", default=[448, 448])
    patch: Square = key("patch_size", default=[14, 14])
    norm: Literal["layer_norm", "rms_norm"] = key("norm_type", default="layer_norm")
    qkv_bias: Flag = key("attention_bias", default=False)
    qk_norm: Flag = key("use_qk_norm", default=False)
    positions: Flag = key("use_absolute_position_embeddings", default=True)
    pools: Flag = key("use_mean_pooling", default=True)
    mask: Annotated[Flag, refuse("token of masked images")] = key("use_mask_token", default=False)
    dropout: Annotated[Probability, refuse("dropout in this encoder")] = key("hidden_dropout_prob", default=0.0)
    projection_dropout: Annotated[Probability, refuse("dropout in this encoder")] = key(
        "projection_dropout", default=0.0
    )
    activation: Gelu = key("hidden_act", default="gelu")

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return math.prod(image // patch for image, patch in zip(_sides(self.image), _sides(self.patch), strict=True))

    def fields(self) -> dict[str, Any]:
        """Returns the fields of `Branch`, without its tokens and what follows its last layer."""
        norm = "layernorm" if self.norm == "layer_norm" else "rmsnorm"
        return {
            **{"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "ffn": self.ffn, "gated": False},
            **{"norm": norm, "qkv_bias": self.qkv_bias, "proj_bias": True, "mlp_bias": True, "layer_scale": True},
            **{"positions": "learned" if self.positions else "none", "position_rows": self.patches + 1},
            **{"input_width": self.channels * math.prod(_sides(self.patch)), "input_bias": True, "class_token": True},
            **{"qk_layernorm": "all" if self.qk_norm else False, "embedding_norm": False, "parallel_residual": False},
            **{"final_norm": not self.pools, **self.read_activation()},
        }


def _sides(pixels: int | list[int]) -> list[int]:
    return pixels if isinstance(pixels, list) else [pixels, pixels]


class InternVL(Multimodal):
    """``InternVLConfig``: neighbouring patches are concatenated, and pass a layer norm and two matrices."""

    vision: InternVision = key("vision_config", default=InternVision())
    ratio: Share = key("downsample_ratio", default=0.5)
    activation: Gelu = key("projector_hidden_act", default="gelu")
    layer: Literal[-1] = key("vision_feature_layer", default=-1)
    select: Literal["default"] = key("vision_feature_select_strategy", default="default")
    tied: Flag | None = key("tie_word_embeddings", default=True)

    def fields(self) -> dict[str, Any]:
        merged = int(1 / self.ratio) ** 2
        projector = {"projector": "mlp", "projector_norm": "layer", "merge": merged}
        tower = self.vision.fields() | projector | {"tokens": self.vision.patches // merged}
        return self._join(text_fields(self.text, "qwen2"), tower)


class Glm4Vision(QwenVision):
    """``Glm4vVisionConfig``: RMS norms, one of them in front, gated MLPs as wide as ``out_hidden_size``, learned
    positions beside RoPE, whose kernels are left out. Four neighbouring patches pass a gated projector."""

    layers: Depth = key("depth", default=24)
    hidden: Size = key("hidden_size", default=1536)
    heads: Size = key("num_heads", default=12)
    ffn: Size = key("out_hidden_size", default=4096)
    inner: Size = key("intermediate_size", default=13696)
    image: Size = key("image_size", default=336)
    qkv_bias: Flag = key("attention_bias", default=False)
    activation: Literal["silu"] = key("hidden_act", default="silu")

    def fields(self) -> dict[str, Any]:
        patches = (self.image // self.patch) ** 2
        positions = {"positions": "learned", "position_rows": patches, "tokens": patches // self.side**2}
        kind = {"norm": "rmsnorm", "embedding_norm": True, "gated": True, "input_bias": True, "qk_layernorm": False}
        biases = {"qkv_bias": self.qkv_bias, "proj_bias": False, "mlp_bias": False}
        projector = {"projector": "gated", "projector_ffn": self.inner, "ffn": self.ffn}
        return super().fields() | positions | kind | biases | projector


class Glm4V(Multimodal):
    """``Glm4vConfig`` (GLM-4.1V): an encoder of images in front of a GLM-4."""

    vision: Glm4Vision = key("vision_config", default=Glm4Vision())

    def fields(self) -> dict[str, Any]:
        return self._join(text_fields(self.text, "glm4v_text"), self.vision.fields())


class Glm4VMoE(Glm4V):
    """``Glm4vMoeConfig`` (GLM-4.5V): an encoder of images in front of a GLM-4.5."""

    def fields(self) -> dict[str, Any]:
        return self._join(text_fields(self.text, "glm4v_moe_text"), self.vision.fields())


class Llama4Vision(Keys):
    """``Llama4VisionConfig``: a class token, learned positions beside RoPE, whose kernels are left out; layer norms in
    front and behind. Four neighbouring patches pass three matrices, the last of which is the projector."""

    layers: Depth = key("num_hidden_layers", default=34)
    hidden: Size = key("hidden_size", default=768)
    heads: Size = key("num_attention_heads", default=16)
    ffn: Size = key("intermediate_size", default=5632)
    channels: Size = key("num_channels", default=3)
    image: Size = key("image_size", default=448)
    patch: Size = key("patch_size", default=14)
    ratio: Share = key("pixel_shuffle_ratio", default=0.5)
    inner: Size = key("projector_input_dim", default=4096)
    activation: Gelu = key("hidden_act", default="gelu")

    def fields(self) -> dict[str, Any]:
        """Returns the fields of `Branch`."""
        patches, merged = (self.image // self.patch) ** 2, round(1 / self.ratio**2)
        return {
            **{"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "ffn": self.ffn, "gated": False},
            **{"norm": "layernorm", "positions": "learned", "position_rows": patches + 1, "parallel_residual": False},
            **{"input_width": self.channels * self.patch**2, "class_token": True, "qk_layernorm": False},
            **{"embedding_norm": True, "final_norm": True, "merge": merged, "tokens": patches // merged},
            **{"projector": "mlp", "projector_ffn": self.inner, "projector_depth": 3, "projector_bias": False},
            **self.read_activation(),
        }


class Llama4VL(Multimodal):
    """``Llama4Config``: an encoder of images in front of the decoder."""

    vision: Llama4Vision = key("vision_config", default=Llama4Vision())

    def fields(self) -> dict[str, Any]:
        return self._join(text_fields(self.text, "llama4_text"), self.vision.fields())


class CLIPText(Keys):
    """``CLIPTextConfig``: a decoder-like transformer over a text, of which a single token stands for all."""

    layers: Depth = key("num_hidden_layers", default=12)
    hidden: Size = key("hidden_size", default=512)
    heads: Size = key("num_attention_heads", default=8)
    ffn: Size = key("intermediate_size", default=2048)
    vocab: Size = key("vocab_size", default=49408)
    tokens: Size = key("max_position_embeddings", default=77)
    activation: Literal["quick_gelu"] | Gelu = key("hidden_act", default="quick_gelu")


class CLIP(Config):
    """``CLIPConfig``: two encoders and a contrastive loss. The logarithm of the temperature, a single number, is no
    parameter here; the class token counts as a token."""

    text: CLIPText = key("text_config", default=CLIPText())
    vision: VisionConfig = key("vision_config", default=VisionConfig())
    width: Size = key("projection_dim", default=512)

    def fields(self) -> dict[str, Any]:
        text, tower = self.text, self.vision.fields()
        ends = {"final_norm": True, "projector": "linear", "projector_bias": False}
        tokens = tower.pop("position_rows")
        shape = {"hidden": text.hidden, "heads": text.heads, "vocab": text.vocab, "seq": tokens + text.tokens}
        images = {"name": "image", "tokens": tokens, **tower, **ends}
        texts = {"name": "text", "tokens": text.tokens, "layers": text.layers, "ffn": text.ffn, **ends}
        kind = {"contrastive": self.width, "layers": 0, "gated": False, "positions": "learned", "norm": "layernorm"}
        return shape | kind | text.read_activation() | {"branches": (images, texts)}


__all__ = ["CLIP", "Gemma3", "Llama4VL", "Llava", "Qwen2VL", "Qwen25VL", "Qwen35MoEVL", "Qwen35VL"]
