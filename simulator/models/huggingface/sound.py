"""Configs of decoders with an encoder of sounds in front, which is that of Whisper."""

from __future__ import annotations

from meshcast.simulator.models.huggingface.config import Gelu, Keys, key
from meshcast.simulator.models.huggingface.vision import Multimodal, text_fields
from meshcast.simulator.models.parts import Depth, Flag, Size


class SoundConfig(Keys):
    """``Qwen2AudioEncoderConfig`` and ``VoxtralEncoderConfig``: the encoder of Whisper over 30 seconds."""

    layers: Depth = key("encoder_layers", "num_hidden_layers", default=32)
    hidden: Size = key("d_model", "hidden_size", default=1280)
    heads: Size = key("encoder_attention_heads", "num_attention_heads", default=20)
    ffn: Size = key("encoder_ffn_dim", "intermediate_size", default=5120)
    bins: Size = key("num_mel_bins", default=128)
    positions: Size = key("max_source_positions", "max_position_embeddings", default=1500)
    activation: Gelu = key("activation_function", "hidden_act", default="gelu")
    rotated: float | None = key("partial_rotary_factor", default=None)

    def fields(self, merge: int) -> dict[str, object]:
        """Returns the fields of `Branch`, without its projector. merge: positions that are a token of the decoder."""
        convolutions = [{"channels": self.hidden, "kernel": 3, "stride": stride} for stride in (1, 2)]
        rope = {"positions": "none"} if self.rotated is None else {"positions": "rope", "rope_share": self.rotated}
        return {
            **{"name": "audio", "tokens": self.positions // merge, "merge": merge, **rope},
            **{"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "ffn": self.ffn, "gated": False},
            **{"norm": "layernorm", "qkv_bias": "queries-values", "final_norm": True, "parallel_residual": False},
            **{"input_width": self.bins, "convolutions": convolutions, "embedding_norm": False},
            **self.read_activation(),
        }


class RotatedSoundConfig(SoundConfig):
    """``GlmAsrEncoderConfig``: RoPE on half of each head."""

    rotated: float | None = key("partial_rotary_factor", default=0.5)


class Qwen2Audio(Multimodal):
    """``Qwen2AudioConfig``: the mean of two positions is a token of the decoder, behind a linear layer."""

    audio: SoundConfig = key("audio_config", default=SoundConfig())

    def fields(self) -> dict[str, object]:
        projector = {"merge_by": "mean", "projector": "linear"}
        return self._join(text_fields(self.text, "qwen2"), self.audio.fields(merge=2) | projector)


class AudioFlamingo3(Multimodal):
    """``AudioFlamingo3Config``: as Qwen2-Audio, with a projector of two layers."""

    audio: SoundConfig = key("audio_config", default=SoundConfig())
    bias: Flag = key("projector_bias", default=True)

    def fields(self) -> dict[str, object]:
        projector = {"merge_by": "mean", "projector": "mlp", "projector_bias": self.bias}
        return self._join(text_fields(self.text, "qwen2"), self.audio.fields(merge=2) | projector)


class Voxtral(Multimodal):
    """``VoxtralConfig``: four positions side by side are a token of the decoder, behind a projector without biases."""

    audio: SoundConfig = key("audio_config", default=SoundConfig())

    def fields(self) -> dict[str, object]:
        projector = {"projector": "mlp", "projector_bias": False}
        return self._join(text_fields(self.text, "llama"), self.audio.fields(merge=4) | projector)


class GlmAsr(Multimodal):
    """``GlmAsrConfig``: RoPE in the encoder; four positions are a token, behind a projector twice as wide as the
    decoder."""

    audio: RotatedSoundConfig = key("audio_config", default=RotatedSoundConfig())
    tied: Flag | None = key("tie_word_embeddings", default=True)

    def fields(self) -> dict[str, object]:
        text, audio = text_fields(self.text, "llama"), self.audio.fields(merge=4)
        return self._join(text, audio | {"projector": "mlp", "projector_ffn": 2 * text["hidden"]})
