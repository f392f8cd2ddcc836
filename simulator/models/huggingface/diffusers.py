"""Configs of the transformers of diffusers, by their ``_class_name``: DiT, and those that see a text by joint attention
(SD3, Flux, HunyuanVideo), in a sequence with the patches (CogVideoX), or by cross-attention (PixArt, Latte, Wan).

Defaults are those of release 0.42. A config says how large latents are (``sample_size``), or does not; then `seq` of
the model says it, patches and tokens of the text together. The tokens of a text are those of the pipeline of the
model. Encoders of texts and of images (VAE) are other models.
"""

from __future__ import annotations

from typing import Annotated, Literal

from meshcast.hardware.errors import ModelError
from meshcast.hardware.schemas import Field
from meshcast.simulator.models.huggingface.config import Config, key, refuse
from meshcast.simulator.models.parts import Count, Depth, Flag, Probability, Size

TIME_STEP = 256
"""Width of the sines and cosines of a time step (``Timesteps``)."""

Gelu = Literal["gelu", "gelu-approximate"]

Patch = Annotated[tuple[Size, ...], Field(min_length=3, max_length=3)]
"""Frames, height and width of a patch."""


class LatentTransformer(Config):
    """A transformer over patches of a latent."""

    layers: Depth = key("num_layers")
    heads: Size = key("num_attention_heads")
    head_dim: Size = key("attention_head_dim")
    channels: Size = key("in_channels")
    out_channels: Size | None = key("out_channels", default=None)
    sequence: Size | None = key("sequence", default=None)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    def shape(self, patch: int, patches: int | None, text: int = 0) -> dict[str, object]:
        """Returns the fields of every model.

        patch: places of the latent in a patch.
        patches: of a sample, where the config says how many; None: it does not.
        text: tokens of the text in its sequence.
        """
        if self.sequence is None and patches is None:
            rule = (
                f"the config does not say how large latents are: patches of {patch} places, and {text} tokens of text"
            )
            raise ModelError(
                "seq", rule, "Give `model: {preset: ..., seq: ...}`, patches and tokens of the text together"
            )
        if self.sequence is not None and self.sequence <= text:
            rule = f"it holds the {text} tokens of the text, and patches"
            raise ModelError("seq", rule, "Give more", self.sequence)
        widths = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "head_dim": self.head_dim}
        return {**widths, "seq": self.sequence or (patches or 0) + text}

    def ends(self, patch: int, *vectors: tuple[int, int], labels: int = 0, **more: object) -> dict[str, object]:
        """Returns the field `diffusion`. vectors, labels: see `Embedders`; more: its other fields."""
        outputs = (self.out_channels or self.channels) * patch
        embedders = {"vectors": vectors, "labels": labels}
        return {"inputs": self.channels * patch, "outputs": outputs, "embedders": embedders, **more}

    def time_step(self) -> tuple[int, int]:
        """Returns the widths of the embedder of time steps."""
        return TIME_STEP, self.hidden


def text_branch(tokens: int, width: int, **more: object) -> tuple[dict[str, object], ...]:
    """Returns the field `branches` for a text. width: of the results of its encoder; more: further fields."""
    return ({"name": "text", "layers": 0, "tokens": tokens, "input_width": width, "input_bias": True, **more},)


class SquareLatents(LatentTransformer):
    """A transformer of images of a stated size."""

    sample_size: Size | None = key("sample_size", default=None)
    patch_size: Size = key("patch_size")

    @property
    def patches(self) -> int | None:
        """Patches of an image; None: the config does not say it."""
        return (self.sample_size // self.patch_size) ** 2 if self.sample_size else None


class BasicLayers(SquareLatents):
    """Layers of ``BasicTransformerBlock``."""

    bias: Flag = key("attention_bias", default=True)
    dropout: Annotated[Probability, refuse("dropout in diffusion transformers")] = key("dropout", default=0.0)
    affine: Annotated[Flag, refuse("weights of modulated norms")] = key("norm_elementwise_affine", default=False)
    activation: Gelu = key("activation_fn", default="gelu-approximate")


class DiT(BasicLayers):
    """``DiTTransformer2DModel``: every layer embeds the time step and the label for itself."""

    labels: Size = key("num_embeds_ada_norm", default=1000)
    norm: Literal["ada_norm_zero"] = key("norm_type", default="ada_norm_zero")

    def fields(self) -> dict[str, object]:
        patch = self.patch_size**2
        embedders = {"vectors": (self.time_step(),), "labels": self.labels + 1}
        modulation = {"condition": self.hidden, "embedders": embedders}
        shape = self.shape(patch, self.patches) | {"qkv_bias": self.bias}
        return shape | {"diffusion": self.ends(patch), "modulation": modulation}


class PixArt(BasicLayers):
    """``PixArtTransformer2DModel``: one linear layer makes the vectors of all layers, which attend to a text."""

    norm: Literal["ada_norm_single"] = key("norm_type", default="ada_norm_single")
    text_width: Size = key("caption_channels")
    cross_width: Size | None = key("cross_attention_dim", default=1152)
    out_channels: Size | None = key("out_channels", default=8)
    sizes: Flag | None = key("use_additional_conditions", default=None)
    tokens: Size | None = key("text_tokens", default=None)

    def fields(self) -> dict[str, object]:
        if self.cross_width != self.hidden:
            raise ModelError("cross_width", "it is as wide as the model", f"Give {self.hidden}", self.cross_width)
        patch, has_sizes = self.patch_size**2, self.sample_size == 128 if self.sizes is None else self.sizes
        # PixArt-alpha, whose embedders of sizes PixArt-sigma dropped as it took longer texts.
        tokens = self.tokens or (120 if has_sizes else 300)
        third = self.hidden // 3
        sizes = [(TIME_STEP, third), (TIME_STEP, third)] if has_sizes else []
        layers = {"cross_attention": True, "modulation": {"by": "table"}, "qkv_bias": self.bias}
        text = text_branch(tokens, self.text_width, input_bias="mlp")
        shape = self.shape(patch, self.patches, tokens) | layers | {"branches": text}
        return shape | {"diffusion": self.ends(patch, self.time_step(), *sizes)}


class Latte(BasicLayers):
    """``LatteTransformer3DModel``: layers by turns within frames, where they attend to a text, and across frames."""

    norm: Literal["ada_norm_single"] = key("norm_type")
    text_width: Size = key("caption_channels")
    cross_width: Size | None = key("cross_attention_dim", default=None)
    bias: Flag = key("attention_bias", default=False)
    activation: Gelu = key("activation_fn")
    affine: Annotated[Flag, refuse("weights of modulated norms")] = key("norm_elementwise_affine")
    frames: Size = key("video_length", default=16)
    tokens: Size = key("text_tokens", default=120)

    def fields(self) -> dict[str, object]:
        if self.cross_width != self.hidden:
            raise ModelError("cross_width", "it is as wide as the model", f"Give {self.hidden}", self.cross_width)
        patch, patches = self.patch_size**2, (self.patches or 0) * self.frames
        layers = {"cross_attention": True, "modulation": {"by": "table"}, "qkv_bias": self.bias}
        text = text_branch(self.tokens, self.text_width, input_bias="mlp")
        shape = self.shape(patch, patches or None, self.tokens) | layers | {"branches": text, "frames": self.frames}
        ends = self.ends(patch, self.time_step(), cross_frames=True)
        return shape | {"layers": 2 * self.layers, "diffusion": ends}


class SD3(SquareLatents):
    """``SD3Transformer2DModel``: layers of joint attention, the last of which ends the text."""

    text_width: Size = key("joint_attention_dim")
    caption: Size = key("caption_projection_dim")
    pooled: Size = key("pooled_projection_dim")
    qk_norm: Literal["rms_norm"] | None = key("qk_norm", default=None)
    dual: Annotated[tuple[Count, ...], refuse("layers with a second attention (SD3.5 medium)")] = key(
        "dual_attention_layers", default=()
    )
    tokens: Size = key("text_tokens", default=77 + 256)

    def fields(self) -> dict[str, object]:
        if self.caption != self.hidden:
            raise ModelError("caption", "texts are as wide as the model", f"Give {self.hidden}", self.caption)
        patch = self.patch_size**2
        last = {"numbers": (self.layers - 1,), "joint_attention": "last"}
        layers = {"joint_attention": True, "qk_layernorm": self.qk_norm is not None, "variants": [last]}
        shape = self.shape(patch, self.patches, self.tokens) | layers
        ends = self.ends(patch, self.time_step(), (self.pooled, self.hidden))
        return shape | {"diffusion": ends, "branches": text_branch(self.tokens, self.text_width)}


SINGLE: dict[str, object] = {"parallel_residual": True, "shared_norm": True, "proj_bias": False}
"""Layers of one stream: one output layer, and so one bias, for attention and the MLP beside it."""

DOUBLE: dict[str, object] = {
    **{"joint_attention": True, "parallel_residual": False, "shared_norm": False, "proj_bias": True}
}
"""Layers of two streams, as variants of those of one."""


class TwoKinds(LatentTransformer):
    """Layers of two streams, and then layers of one."""

    singles: Depth = key("num_single_layers")
    pooled: Size = key("pooled_projection_dim")

    def stack(self) -> dict[str, object]:
        """Returns the fields of the layers."""
        variant = {"numbers": tuple(range(self.layers)), **DOUBLE}
        kind = {"layers": self.layers + self.singles, "qk_layernorm": True, "positions": "rope"}
        return {**SINGLE, **kind, "variants": [variant]}


class FluxImages(TwoKinds):
    """``FluxTransformer2DModel``; its channels are those of 2 x 2 places of a latent, packed."""

    patch_size: Size = key("patch_size", default=1)
    text_width: Size = key("joint_attention_dim")
    guidance: Flag = key("guidance_embeds", default=False)
    tokens: Size = key("text_tokens", default=512)

    def fields(self) -> dict[str, object]:
        patch = self.patch_size**2
        guidance = (self.time_step(),) * self.guidance
        ends = self.ends(patch, self.time_step(), *guidance, (self.pooled, self.hidden))
        shape = self.shape(patch, None, self.tokens) | self.stack()
        return shape | {"diffusion": ends, "branches": text_branch(self.tokens, self.text_width)}


class HunyuanVideo(TwoKinds):
    """``HunyuanVideoTransformer3DModel``: layers of a refiner of the text in front. The embedders of the time step and
    of the mean of the text that the refiner has for itself count with the others."""

    patch_size: Size = key("patch_size", default=2)
    patch_frames: Size = key("patch_size_t", default=1)
    text_width: Size = key("text_embed_dim")
    refiners: Depth = key("num_refiner_layers", default=2)
    guidance: Flag = key("guidance_embeds", default=True)
    ratio: Literal[4] = key("mlp_ratio", default=4)
    image: Annotated[str | None, refuse("conditions on a first image")] = key("image_condition_type", default=None)
    tokens: Size = key("text_tokens", default=256)

    def fields(self) -> dict[str, object]:
        patch, h = self.patch_frames * self.patch_size**2, self.hidden
        steps = (self.time_step(),) * (2 + self.guidance)
        ends = self.ends(patch, *steps, (self.pooled, h), (self.text_width, h))
        refiner = {"layers": self.refiners, "bidirectional": True, "norm": "layernorm", "positions": "none"}
        refiner |= {"modulation": {"condition": h, "parts": "gates"}, "parallel_residual": False, "activation": "silu"}
        refiner |= {"qk_layernorm": False, "qkv_bias": True, "proj_bias": True, "mlp_bias": True}
        shape = self.shape(patch, None, self.tokens) | self.stack()
        return shape | {"diffusion": ends, "branches": text_branch(self.tokens, self.text_width, **refiner)}


class CogVideoX(LatentTransformer):
    """``CogVideoXTransformer3DModel``: text and patches share the weights of all layers."""

    patch_size: Size = key("patch_size", default=2)
    patch_frames: Size | None = key("patch_size_t", default=None)
    condition: Size = key("time_embed_dim", default=512)
    offsets: Size | None = key("ofs_embed_dim", default=None)
    text_width: Size = key("text_embed_dim", default=4096)
    tokens: Size = key("max_text_seq_length", default=226)
    width: Size = key("sample_width", default=90)
    height: Size = key("sample_height", default=60)
    frames: Size = key("sample_frames", default=49)
    compression: Size = key("temporal_compression_ratio", default=4)
    bias: Flag = key("attention_bias", default=True)
    affine: Flag = key("norm_elementwise_affine", default=True)
    rope: Flag = key("use_rotary_positional_embeddings", default=False)
    learned: Flag = key("use_learned_positional_embeddings", default=False)
    patch_bias: Literal[True] = key("patch_bias", default=True)
    dropout: Annotated[Probability, refuse("dropout in diffusion transformers")] = key("dropout", default=0.0)
    activation: Gelu = key("activation_fn", default="gelu-approximate")

    def fields(self) -> dict[str, object]:
        frames = (self.frames - 1) // self.compression + 1
        frames = -(-frames // (self.patch_frames or 1))
        patches = frames * (self.height // self.patch_size) * (self.width // self.patch_size)
        patch = self.patch_size**2 * (self.patch_frames or 1)
        offsets = [(self.offsets, self.offsets)] if self.offsets else []
        ends = self.ends(patch, (self.hidden, self.condition), *offsets, final_norms=2)
        norms = {"norm": "layernorm" if self.affine else "layernorm0", "qk_layernorm": "layer"}
        kind = {"qkv_bias": self.bias, "positions": "rope" if self.rope else "none", **norms}
        modulation = {"condition": self.condition, "sets": 2}
        shape = self.shape(patch, patches, self.tokens) | kind | {"modulation": modulation}
        return shape | {"diffusion": ends, "branches": text_branch(self.tokens, self.text_width)}


class Wan(LatentTransformer):
    """``WanTransformer3DModel``: one linear layer makes the vectors of all layers, which attend to a text."""

    patch_size: Patch = key("patch_size", default=(1, 2, 2))
    text_width: Size = key("text_dim")
    step_width: Size = key("freq_dim", default=TIME_STEP)
    ffn: Size = key("ffn_dim")
    cross_norm: Flag = key("cross_attn_norm", default=True)
    qk_norm: Literal["rms_norm_across_heads"] = key("qk_norm", default="rms_norm_across_heads")
    image: Annotated[Size | None, refuse("attention to an image (image to video)")] = key("image_dim", default=None)
    image_keys: Annotated[Size | None, refuse("attention to an image (image to video)")] = key(
        "added_kv_proj_dim", default=None
    )
    tokens: Size = key("text_tokens", default=512)

    def fields(self) -> dict[str, object]:
        frames, height, width = self.patch_size
        patch = frames * height * width
        layers = {"cross_attention": True, "modulation": {"by": "table"}, "qk_layernorm": "all", "positions": "rope"}
        text = text_branch(self.tokens, self.text_width, input_bias="mlp")
        shape = self.shape(patch, None, self.tokens) | {"ffn": self.ffn} | layers | {"branches": text}
        ends = self.ends(patch, (self.step_width, self.hidden), cross_norm=self.cross_norm)
        return shape | {"diffusion": ends}
