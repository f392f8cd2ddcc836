"""Configs of recurrent models: xLSTM, RWKV, and RecurrentGemma with attention in some layers."""

from __future__ import annotations

from typing import Annotated, Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.models.huggingface.config import Config, key, refuse
from meshcast.simulator.models.parts import Depth, Flag, Probability, Share, Size

Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class XLSTM(Config):
    """``xLSTMConfig`` (xLSTM 7B): an LSTM with a matrix as memory and an MLP in all layers. It names no sequence
    length: 8192, that of xLSTM 7B (arXiv 2503.13427), stands in for it. Soft caps of gates are left out."""

    layers: Depth = key("num_blocks", "num_hidden_layers")
    hidden: Size = key("hidden_size", "embedding_dim")
    heads: Size = key("num_heads", default=8)
    vocab: Size = key("vocab_size")
    tied: Flag = key("tie_word_embeddings", default=False)
    bias: Annotated[Flag, refuse("biases of xLSTM")] = key("use_bias", default=False)
    key_factor: Factor = key("qk_dim_factor", default=0.5)
    value_factor: Factor = key("v_dim_factor", default=1.0)
    ffn_factor: Factor = key("ffn_proj_factor", default=2.667)
    multiple: Size = key("ffn_round_up_to_multiple_of", default=64)
    chunk: Size = key("chunk_size", default=64)
    softcap: float | None = key("output_logit_soft_cap", default=30.0)

    def fields(self) -> dict[str, object]:
        widths = {"key_dim": self.key_factor, "value_dim": self.value_factor}
        linear = {word: int(self.hidden * factor) // self.heads for word, factor in widths.items()}
        shape = self.same_fields("layers", "hidden", "heads", "vocab", "tied") | {"seq": 8192}
        shape["ffn"] = int(-(-self.hidden * self.ffn_factor // self.multiple) * self.multiple)
        shape["linear_attention"] = {"kind": "mlstm", **self.same_fields("heads", "chunk"), **linear}
        caps = {"softcaps": ("logits",)} if self.softcap is not None else {}
        return shape | caps | {"norm": "rmsnorm", "positions": "none", "gated": True}


class RecurrentGemma(Config):
    """``RecurrentGemmaConfig`` (Griffin): recurrent units in most layers, and attention within a window and with RoPE
    on half of a head in the others. It names no sequence length: 8192, that of its report (arXiv 2404.07839), stands in
    for it."""

    layers: Depth = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    heads: Size = key("num_attention_heads")
    kv_heads: Size | None = key("num_key_value_heads", default=None)
    vocab: Size = key("vocab_size")
    width: Size | None = key("lru_width", default=None)
    ffn: Size = key("intermediate_size")
    window: Size = key("attention_window_size", "sliding_window", default=2048)
    conv: Size = key("conv1d_width", default=4)
    types: list[Literal["recurrent", "attention"]] = key("block_types", default=["recurrent", "recurrent", "attention"])
    activation: Literal["gelu_pytorch_tanh", "gelu"] = key("hidden_activation", default="gelu_pytorch_tanh")
    rope_share: Share = key("partial_rotary_factor", default=0.5)
    softcap: float | None = key("logits_soft_cap", default=30.0)
    attention_bias: Flag = key("attention_bias", default=False)
    tied: Flag = key("tie_word_embeddings", default=True)
    attention_dropout: Annotated[Probability, refuse("dropout on attention alone")] = key(
        "attention_dropout", default=0.0
    )

    def fields(self) -> dict[str, object]:
        shape = self.same_fields("layers", "hidden", "heads", "kv_heads", "vocab", "tied", "rope_share")
        recurrent = [layer for layer in range(self.layers) if self.types[layer % len(self.types)] == "recurrent"]
        if recurrent:
            width = (self.width or self.hidden) // self.heads
            linear = self.same_fields("heads", "conv") | {"kind": "rg-lru", "key_dim": width}
            shape["linear_attention"] = linear | {"layers": tuple(recurrent)}
        shape |= {"window": self.window} if len(recurrent) < self.layers else {}
        shape |= {"softcaps": ("logits",)} if self.softcap is not None else {}
        biases = {"qkv_bias": self.attention_bias, "proj_bias": True, "mlp_bias": True}
        kind = {"norm": "rmsnorm1p", "positions": "rope", "gated": True, "seq": 8192, "ffn": self.ffn // 2}
        return shape | biases | kind | self.read_activation()


class RWKV(Config):
    """``RwkvConfig`` (RWKV-4): weighted sums of values, and MLPs with a receptance, over mixtures of neighbouring
    tokens; a layer norm behind the embedding."""

    layers: Depth = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    vocab: Size = key("vocab_size")
    seq: Size = key("context_length", "max_position_embeddings", default=1024)
    width: Size | None = key("attention_hidden_size", default=None)
    ffn: Size | None = key("intermediate_size", default=None)
    tied: Flag = key("tie_word_embeddings", default=False)

    def fields(self) -> dict[str, object]:
        # No layer has softmax attention: `heads` only has to be a number of heads.
        shape = self.same_fields("layers", "hidden", "vocab", "seq", "ffn", "tied") | {
            "heads": 1,
            "activation": "relu2",
        }
        shape["linear_attention"] = {"kind": "rwkv", "heads": self.width or self.hidden, "key_dim": 1}
        biases = dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), False)
        return shape | biases | {"embedding_norm": True, "positions": "none"}
