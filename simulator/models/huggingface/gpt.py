"""Configs of the GPT family: layer norms, MLPs without a gate."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from meshcast.hardware.errors import ModelError
from meshcast.hardware.schemas import Field
from meshcast.simulator.models.huggingface.config import (
    Config,
    Gelu,
    Keys,
    check_every_layer,
    key,
    local_fields,
    refuse,
)
from meshcast.simulator.models.parts import Depth, Flag, Probability, Share, Size


class GPT2(Config):
    """``GPT2Config``: layer norms, biases everywhere, learned positions, a tied output layer."""

    layers: Depth = key("n_layer", "num_hidden_layers")
    hidden: Size = key("n_embd", "hidden_size")
    heads: Size = key("n_head", "num_attention_heads")
    vocab: Size = key("vocab_size")
    seq: Size = key("n_positions", "max_position_embeddings", "n_ctx")
    ffn: Size | None = key("n_inner", default=None)
    activation: Gelu = key("activation_function", default="gelu_new")
    tied: Flag = key("tie_word_embeddings", default=True)
    dropout: Probability = key("resid_pdrop", default=0.1)
    attention_dropout: Probability = key("attn_pdrop", default=0.1)
    embedding_dropout: Probability = key("embd_pdrop", default=0.1)
    cross_attention: Annotated[Flag, refuse("cross-attention")] = key("add_cross_attention", default=False)

    def fields(self) -> dict[str, object]:
        shape = self.same_fields("layers", "hidden", "heads", "vocab", "seq", "ffn", "tied")
        dropout = self.read_dropout("dropout", "attention_dropout", "embedding_dropout")
        kind = {"norm": "layernorm", "positions": "learned", "gated": False, "fused_qkv": True}
        return shape | dropout | self.read_activation() | kind


class GPTBigCode(GPT2):
    """``GPTBigCodeConfig`` (StarCoder 1): GPT-2 whose heads share keys and values."""

    activation: Gelu = key("activation_function", default="gelu_pytorch_tanh")
    multi_query: Flag = key("multi_query", default=True)

    def fields(self) -> dict[str, object]:
        return super().fields() | {"kv_heads": 1 if self.multi_query else self.heads}


class GPTJ(GPT2):
    """``GPTJConfig`` and ``CodeGenConfig``: RoPE on a part of each head, attention and MLP side by side behind a single
    norm, no biases of attention, and one of the output layer."""

    rotary: Size = key("rotary_dim", default=64)
    dropout: Probability = key("resid_pdrop", default=0.0)
    attention_dropout: Probability = key("attn_pdrop", default=0.0)
    embedding_dropout: Probability = key("embd_pdrop", default=0.0)
    tied: Flag = key("tie_word_embeddings", default=False)

    def fields(self) -> dict[str, object]:
        residual = {"parallel_residual": True, "shared_norm": True, "qkv_bias": False, "proj_bias": False}
        rope = {"positions": "rope", "rope_share": min(1.0, self.rotary * self.heads / self.hidden)}
        return super().fields() | residual | rope | {"fused_qkv": False, "head": ("bias",)}


class GPTNeo(Config):
    """``GPTNeoConfig``: a GPT with windows in the layers of ``attention_types`` that are local, without biases of
    queries, keys and values."""

    layers: Depth = key("num_layers", "num_hidden_layers")
    hidden: Size = key("hidden_size")
    heads: Size = key("num_heads", "num_attention_heads")
    vocab: Size = key("vocab_size")
    seq: Size = key("max_position_embeddings")
    ffn: Size | None = key("intermediate_size", default=None)
    activation: Gelu = key("activation_function", default="gelu_new")
    window: Size = key("window_size", default=256)
    types: list[tuple[list[Literal["global", "local"]], Size]] = key(
        "attention_types", default=[(["global", "local"], 12)]
    )
    tied: Flag = key("tie_word_embeddings", default=True)
    dropout: Probability = key("resid_dropout", default=0.0)
    attention_dropout: Probability = key("attention_dropout", default=0.0)
    embedding_dropout: Probability = key("embed_dropout", default=0.0)

    def fields(self) -> dict[str, object]:
        local = [each == "local" for kinds, times in self.types for each in kinds * times]
        check_every_layer(local, self.layers, "attention_types")
        shape = self.same_fields("layers", "hidden", "heads", "vocab", "seq", "ffn", "tied")
        dropout = self.read_dropout("dropout", "attention_dropout", "embedding_dropout")
        kind = {"norm": "layernorm", "positions": "learned", "gated": False, "qkv_bias": False}
        return shape | dropout | self.read_activation() | kind | local_fields("window", self.window, local)


class Phi(Config):
    """``PhiConfig`` (Phi 1 and 2): RoPE on half of each head, attention and MLP side by side behind a single norm, and
    biases, one of the output layer among them."""

    layers: Depth = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    heads: Size = key("num_attention_heads")
    kv_heads: Size | None = key("num_key_value_heads", default=None)
    vocab: Size = key("vocab_size")
    seq: Size = key("max_position_embeddings")
    ffn: Size = key("intermediate_size")
    activation: Gelu = key("hidden_act", default="gelu_new")
    rope_share: Share = key("partial_rotary_factor", default=0.5)
    qk_norm: Annotated[Flag, refuse("norms with biases on queries and keys")] = key("qk_layernorm", default=False)
    tied: Flag = key("tie_word_embeddings", default=False)
    dropout: Probability = key("resid_pdrop", default=0.0)
    attention_dropout: Probability = key("attention_dropout", default=0.0)
    embedding_dropout: Probability = key("embd_pdrop", default=0.0)

    def fields(self) -> dict[str, object]:
        shape = self.same_fields("layers", "hidden", "heads", "kv_heads", "vocab", "seq", "ffn", "tied", "rope_share")
        dropout = self.read_dropout("dropout", "attention_dropout", "embedding_dropout")
        kind = {"norm": "layernorm", "positions": "rope", "gated": False, "head": ("bias",)}
        return shape | dropout | self.read_activation() | kind | {"parallel_residual": True, "shared_norm": True}


class GPTNeoX(Config):
    """``GPTNeoXConfig``: RoPE on a share of each head, parallel attention and MLP, an untied output layer."""

    layers: Depth = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    heads: Size = key("num_attention_heads")
    vocab: Size = key("vocab_size")
    seq: Size = key("max_position_embeddings")
    ffn: Size = key("intermediate_size")
    activation: Gelu = key("hidden_act", default="gelu")
    rope_share: Share = key("rotary_pct", default=0.25)
    parallel_residual: Flag = key("use_parallel_residual", default=True)
    tied: Flag = key("tie_word_embeddings", default=False)
    attention_bias: Flag = key("attention_bias", default=True)
    dropout: Probability = key("hidden_dropout", default=0.0)
    attention_dropout: Probability = key("attention_dropout", default=0.0)

    def fields(self) -> dict[str, object]:
        shape = self.same_fields(
            "layers", "hidden", "heads", "vocab", "seq", "ffn", "tied", "rope_share", "parallel_residual"
        )
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias}
        dropout = self.read_dropout("dropout", "attention_dropout")
        kind = {"norm": "layernorm", "positions": "rope", "gated": False, "fused_qkv": True}
        return shape | biases | dropout | self.read_activation() | kind


class OPT(Config):
    """``OPTConfig``: a GPT with ReLU, whose table of positions has two more rows than positions.

    OPT has dropout on the residual branches, with another probability on attention, and none on the embedding. `Model`
    has dropout everywhere or nowhere, so `dropout` decides; the additional kernels are small.
    """

    layers: Depth = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    heads: Size = key("num_attention_heads")
    vocab: Size = key("vocab_size")
    seq: Size = key("max_position_embeddings")
    ffn: Size = key("ffn_dim")
    activation: Literal["relu"] | Gelu = key("activation_function", default="relu")
    tied: Flag = key("tie_word_embeddings", default=True)
    biases: Flag = key("enable_bias", default=True)
    dropout: Probability = key("dropout", default=0.1)
    norm_first: Flag = key("do_layer_norm_before", default=True)
    embedding_width: Size | None = key("word_embed_proj_dim", default=None)
    bare_end: Annotated[Flag, refuse("model without a final norm")] = key("_remove_final_layer_norm", default=False)
    norm_weights: Flag = key("layer_norm_elementwise_affine", default=True)
    layer_dropout: Annotated[Probability, refuse("dropout of whole layers")] = key("layerdrop", default=0.0)

    def fields(self) -> dict[str, object]:
        if not self.norm_first:
            raise ModelError("norm_first", "norms after the branches are not supported", "Only true is read", False)
        if not self.norm_weights:
            raise ModelError("norm_weights", "norms without weights are not supported", "Only true is read", False)
        if self.embedding_width not in (None, self.hidden):
            rule = f"an embedding of another width than hidden_size ({self.hidden}) is not supported"
            raise ModelError("embedding_width", rule, "Give hidden_size, or leave it out", self.embedding_width)
        shape = self.same_fields("layers", "hidden", "heads", "vocab", "seq", "ffn", "tied", "dropout")
        biases = dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), self.biases)
        positions = {"positions": "learned", "position_rows": self.seq + 2}
        return shape | biases | positions | self.read_activation() | {"norm": "layernorm", "gated": False}


class Bloom(Config):
    """``BloomConfig``: a GPT with ALiBi and a norm after the embedding; the sequence length is optional."""

    layers: Depth = key("n_layer", "num_hidden_layers")
    hidden: Size = key("n_embed", "hidden_size")
    heads: Size = key("n_head", "num_attention_heads")
    vocab: Size = key("vocab_size")
    seq: Size = key("seq_length", default=2048)
    tied: Flag = key("tie_word_embeddings", default=True)
    dropout: Probability = key("hidden_dropout", default=0.0)
    attention_dropout: Probability = key("attention_dropout", default=0.0)
    from_norm: Annotated[Flag, refuse("residual stream that starts at a norm's output")] = key(
        "apply_residual_connection_post_layernorm", default=False
    )

    def fields(self) -> dict[str, object]:
        shape = self.same_fields("layers", "hidden", "heads", "vocab", "seq", "tied") | self.read_dropout(
            "dropout", "attention_dropout"
        )
        return shape | {"norm": "layernorm", "embedding_norm": True, "positions": "alibi", "gated": False}


class MPTAttention(Keys):
    """``attn_config`` of MPT, including keys of llm-foundry that ``transformers`` does not have."""

    kind: Literal["multihead_attention", "multiquery_attention", "grouped_query_attention"] = key(
        "attn_type", default="multihead_attention"
    )
    kv_heads: Size | None = key("kv_n_heads", default=None)
    alibi: Flag = key("alibi", default=True)
    rope: Flag = key("rope", default=False)
    dropout: Probability = key("attn_pdrop", default=0.0)
    reach: Annotated[int, Field(strict=True, ge=-1)] = key("sliding_window_size", default=-1)
    qk_ln: Annotated[Flag, refuse("norm over all heads of queries and keys together")] = key("qk_ln", default=False)
    qk_gn: Annotated[Flag, refuse("group norm on queries and keys")] = key("qk_gn", default=False)
    clip: Annotated[float | None, refuse("clipping of queries, keys and values")] = key("clip_qkv", default=None)
    prefix: Annotated[Flag, refuse("prefix that attends to itself in full")] = key("prefix_lm", default=False)
    by_document: Annotated[Flag, refuse("attention that stops at a document's end")] = key(
        "attn_uses_sequence_id", default=False
    )


class MPTFeedForward(Keys):
    """``ffn_config`` of llm-foundry."""

    kind: Literal["mptmlp", "mptglu"] = key("ffn_type", default="mptmlp")
    width: Size | None = key("ffn_hidden_size", default=None)


class MPT(Config):
    """``MptConfig``: usually ALiBi and no biases anywhere, norms included.

    A layer norm without bias has the weights and the memory traffic of an RMS norm, and is read as such. ALiBi or RoPE
    replaces learned positions, as in llm-foundry, whose keys are read too.
    """

    layers: Depth = key("n_layers", "num_hidden_layers")
    hidden: Size = key("d_model", "hidden_size")
    heads: Size = key("n_heads", "num_attention_heads")
    head_dim: Size | None = key("head_dim", default=None)
    vocab: Size = key("vocab_size")
    seq: Size = key("max_seq_len")
    ffn: Annotated[float, Field(strict=True, gt=0, le=1000, allow_inf_nan=False)] = key("expansion_ratio", default=4)
    attention: MPTAttention = key("attn_config", default=MPTAttention())
    feed_forward: MPTFeedForward = key("ffn_config", default=MPTFeedForward())
    learned: Flag = key("learned_pos_emb", default=True)
    no_bias: Flag = key("no_bias", default=True)
    norm: Literal["layernorm", "low_precision_layernorm", "rmsnorm", "low_precision_rmsnorm"] = key(
        "norm_type", default="low_precision_layernorm"
    )
    tied: Flag = key("tie_word_embeddings", default=True)
    dropout: Probability = key("resid_pdrop", default=0.0)
    embedding_dropout: Probability = key("emb_pdrop", default=0.0)
    overrides: Annotated[Any, refuse("layers that differ from each other")] = key("block_overrides", default=None)
    capped: Annotated[float | None, refuse("capping of logits")] = key("final_logit_softcapping", default=None)

    def fields(self) -> dict[str, object]:
        attention, biased = self.attention, not self.no_bias
        dropout = self.read_dropout("dropout", "embedding_dropout")
        if bool(attention.dropout) != bool(self.dropout):
            rule = f"dropout in some places only is not described (resid_pdrop is {self.dropout})"
            raise ModelError("attn_config.attn_pdrop", rule, "Give both, or 0 for both", attention.dropout)
        positions = "learned" if self.learned else "none"
        window = {"window": attention.reach + 1} if attention.reach >= 0 else {}
        return (
            self.same_fields("layers", "hidden", "heads", "head_dim", "vocab", "seq", "tied")
            | dropout
            | window
            | dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), biased)
            | {
                "kv_heads": 1 if attention.kind == "multiquery_attention" else attention.kv_heads,
                "ffn": self.feed_forward.width or int(self.ffn * self.hidden),
                "norm": "layernorm" if biased and "rms" not in self.norm else "rmsnorm",
                "positions": "alibi" if attention.alibi else "rope" if attention.rope else positions,
                "gated": self.feed_forward.kind == "mptglu",
            }
        )


class Starcoder2(Config):
    """``Starcoder2Config``: a GPT with RoPE, few key/value heads and a window in all layers."""

    layers: Depth = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    heads: Size = key("num_attention_heads")
    kv_heads: Size = key("num_key_value_heads", default=2)
    vocab: Size = key("vocab_size")
    seq: Size = key("max_position_embeddings")
    ffn: Size = key("intermediate_size")
    activation: Gelu = key("hidden_act", default="gelu_pytorch_tanh")
    tied: Flag = key("tie_word_embeddings", default=True)
    biases: Flag = key("use_bias", default=True)
    window: Size | None = key("sliding_window", default=None)
    dropout: Probability = key("residual_dropout", default=0.0)
    embedding_dropout: Probability = key("embedding_dropout", default=0.0)
    attention_dropout: Probability = key("attention_dropout", default=0.0)

    def fields(self) -> dict[str, object]:
        shape = self.same_fields("layers", "hidden", "heads", "kv_heads", "vocab", "seq", "ffn", "tied", "window")
        biases = dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), self.biases)
        dropout = self.read_dropout("dropout", "embedding_dropout", "attention_dropout")
        kind = {"norm": "layernorm", "positions": "rope", "gated": False}
        return shape | biases | dropout | self.read_activation() | kind


class Nemotron(Config):
    """``NemotronConfig`` (Nemotron 3 and 4, Minitron): squared ReLU, RoPE on a share of each head, layer norms that
    store weight - 1."""

    layers: Depth = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    heads: Size = key("num_attention_heads")
    kv_heads: Size | None = key("num_key_value_heads", default=None)
    head_dim: Size | None = key("head_dim", default=None)
    vocab: Size = key("vocab_size")
    seq: Size = key("max_position_embeddings")
    ffn: Size = key("intermediate_size")
    activation: Literal["relu2"] = key("hidden_act", default="relu2")
    rope_share: Share = key("partial_rotary_factor", "rope_percent", default=0.5)
    tied: Flag = key("tie_word_embeddings", default=False)
    attention_bias: Flag = key("attention_bias", default=False)
    mlp_bias: Flag = key("mlp_bias", default=False)
    attention_dropout: Annotated[Probability, refuse("dropout on attention alone")] = key(
        "attention_dropout", default=0.0
    )

    def fields(self) -> dict[str, object]:
        shape = self.same_fields("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "seq", "ffn", "tied")
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias, "mlp_bias": self.mlp_bias}
        rope = self.same_fields("rope_share") | {"positions": "rope"}
        return shape | biases | rope | self.read_activation() | {"norm": "layernorm1p", "gated": False}


class Falcon(Config):
    """``FalconConfig``: RoPE or ALiBi; attention and MLP side by side, behind a single norm or (40B, 180B) a norm each.

    Falcon 7B has a single key/value head (``multi_query``); the new architecture (40B, 180B, Falcon 2) gives their
    number.
    """

    layers: Depth = key("num_hidden_layers", "n_layer")
    hidden: Size = key("hidden_size")
    heads: Size = key("num_attention_heads", "n_head")
    kv_heads: Size | None = key("num_kv_heads", "n_head_kv", default=None)
    vocab: Size = key("vocab_size")
    seq: Size = key("max_position_embeddings", default=2048)
    ffn: Size | None = key("ffn_hidden_size", default=None)
    activation: Gelu = key("activation", default="gelu")
    tied: Flag = key("tie_word_embeddings", default=True)
    alibi: Flag = key("alibi", default=False)
    renewed: Flag = key("new_decoder_architecture", default=False)
    one_key: Flag = key("multi_query", default=True)
    parallel: Flag = key("parallel_attn", default=True)
    norms: Literal[1, 2] | None = key("num_ln_in_parallel_attn", default=None)
    biases: Flag = key("bias", default=False)
    dropout: Probability = key("hidden_dropout", default=0.0)
    attention_dropout: Probability = key("attention_dropout", default=0.0)

    def fields(self) -> dict[str, object]:
        if self.renewed and not self.parallel:
            rule = "in the new architecture attention and MLP are side by side"
            raise ModelError("parallel", rule, "Give true, or leave it out", False)
        kv_heads = self.kv_heads if self.renewed or not self.one_key else 1
        two = self.renewed and self.norms != 1
        side_by_side = {"parallel_residual": True, "shared_norm": not two} if self.parallel else {}
        return (
            self.same_fields("layers", "hidden", "heads", "vocab", "seq", "ffn", "tied")
            | dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), self.biases)
            | self.read_dropout("dropout", "attention_dropout")
            | side_by_side
            | {"kv_heads": kv_heads, "norm": "layernorm", "positions": "alibi" if self.alibi else "rope"}
            | self.read_activation()
            | {"gated": False, "fused_qkv": True}
        )
