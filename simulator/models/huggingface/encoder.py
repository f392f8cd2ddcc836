"""Configs of encoders of the BERT family: a token attends to all others, and the loss is over masked tokens; or, with
``is_decoder``, to those before it.

``transformers`` computes the logits of all tokens. The pooler, and a head for pairs of sentences, are left out.
"""

from __future__ import annotations

from typing import Annotated

from meshcast.hardware.schemas import AfterValidator
from meshcast.simulator.models.huggingface.config import Config, Gelu, check_every_layer, key, local_fields, refuse
from meshcast.simulator.models.parts import Count, Depth, Flag, Probability, Size


def _refuse_relative(word: str | None) -> str | None:
    if word not in (None, "absolute"):
        raise ValueError("only absolute positions are supported. Remove the key if the model works without it")
    return word


class BERT(Config):
    """``BertConfig`` and those like it: norms behind residual additions, a transformation in front of the output layer.

    The rows of the tables of token types and of tasks (ERNIE) count as rows of that of positions: all are added by the
    kernels of the input.
    """

    layers: Depth = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    heads: Size = key("num_attention_heads")
    ffn: Size = key("intermediate_size")
    vocab: Size = key("vocab_size")
    seq: Size = key("max_position_embeddings", default=512)
    types: Count = key("type_vocab_size", default=2)
    has_tasks: Flag = key("use_task_id", default=False)
    tasks: Count = key("task_type_vocab_size", default=3)
    relative: Annotated[str | None, AfterValidator(_refuse_relative)] = key("position_embedding_type", default=None)
    causal: Flag = key("is_decoder", default=False)
    cross_attention: Annotated[Flag, refuse("cross-attention")] = key("add_cross_attention", default=False)
    activation: Gelu = key("hidden_act", default="gelu")
    tied: Flag = key("tie_word_embeddings", default=True)
    dropout: Probability = key("hidden_dropout_prob", default=0.1)
    attention_dropout: Probability = key("attention_probs_dropout_prob", default=0.1)

    def fields(self) -> dict[str, object]:
        shape = self.same_fields("layers", "hidden", "heads", "ffn", "vocab", "seq", "tied")
        kind = {"norm": "layernorm", "positions": "learned", "gated": False, "bidirectional": not self.causal}
        head = {"norm_residual": True, "head": ("transform", "bias")}
        dropout = self.read_dropout("dropout", "attention_dropout")
        rows = self.seq + self.types + (self.tasks if self.has_tasks else 0)
        return shape | dropout | self.read_activation() | kind | head | {"position_rows": rows}


class MegatronBERT(BERT):
    """``MegatronBertConfig``: norms before attention and MLP."""

    def fields(self) -> dict[str, object]:
        return super().fields() | {"norm_residual": False}


class PreNormRoBERTa(MegatronBERT):
    """``RobertaPreLayerNormConfig``: norms before attention and MLP, and one behind the embedding."""

    def fields(self) -> dict[str, object]:
        return super().fields() | {"embedding_norm": True}


class BERTGeneration(BERT):
    """``BertGenerationConfig``: no token types, and no transformation in front of the output layer."""

    types: Count = key("type_vocab_size", default=0)

    def fields(self) -> dict[str, object]:
        return super().fields() | {"head": ("bias",)}


class XLM(Config):
    """``XLMConfig``: norms behind residual additions and behind the embedding. A table of languages counts as rows of
    that of positions."""

    layers: Depth = key("n_layers", "num_hidden_layers")
    hidden: Size = key("emb_dim", "hidden_size")
    heads: Size = key("n_heads", "num_attention_heads")
    vocab: Size = key("vocab_size", "n_words")
    seq: Size = key("max_position_embeddings", default=512)
    languages: Count = key("n_langs", default=1)
    has_languages: Flag = key("use_lang_emb", default=True)
    has_gelu: Flag = key("gelu_activation", default=True)
    causal: Flag = key("causal", default=False)
    adaptive: Annotated[Flag, refuse("an adaptive softmax")] = key("asm", default=False)
    tied: Flag = key("tie_word_embeddings", default=True)
    dropout: Probability = key("dropout", default=0.1)
    attention_dropout: Probability = key("attention_dropout", default=0.1)

    def fields(self) -> dict[str, object]:
        shape = self.same_fields("layers", "hidden", "heads", "vocab", "seq", "tied")
        kind = {"norm": "layernorm", "positions": "learned", "gated": False, "bidirectional": not self.causal}
        kind |= {"norm_residual": True, "head": ("bias",), "activation": "gelu" if self.has_gelu else "relu"}
        rows = self.seq + (self.languages if self.has_languages and self.languages > 1 else 0)
        return shape | self.read_dropout("dropout", "attention_dropout") | kind | {"position_rows": rows}


class DistilBERT(BERT):
    """``DistilBertConfig``: BERT without token types."""

    layers: Depth = key("n_layers")
    hidden: Size = key("dim")
    heads: Size = key("n_heads")
    ffn: Size = key("hidden_dim")
    types: Count = key("type_vocab_size", default=0)
    activation: Gelu = key("activation", default="gelu")
    dropout: Probability = key("dropout", default=0.1)
    attention_dropout: Probability = key("attention_dropout", default=0.1)


class MPNet(BERT):
    """``MPNetConfig``: BERT without token types, and with a table of relative positions."""

    types: Count = key("type_vocab_size", default=0)
    relative_buckets: Size = key("relative_attention_num_buckets", default=32)

    def fields(self) -> dict[str, object]:
        return super().fields() | self.same_fields("relative_buckets")


class ModernBERT(Config):
    """``ModernBertConfig`` (arXiv 2412.13663): RoPE, gated MLPs, no biases, and windows in two of three layers, which
    chunks as long describe. Layer norms without biases are described as RMS norms; the first layer lacks that before
    attention, and the square layer of the head for masked tokens its bias."""

    layers: Depth = key("num_hidden_layers", default=22)
    hidden: Size = key("hidden_size")
    heads: Size = key("num_attention_heads")
    ffn: Size = key("intermediate_size")
    vocab: Size = key("vocab_size")
    seq: Size = key("max_position_embeddings", default=8192)
    window: Size = key("local_attention", default=128)
    every: Size = key("global_attn_every_n_layers", default=3)
    types: list[str] | None = key("layer_types", default=None)
    classes: list[str] | None = key("architectures", default=None)
    bias: Annotated[Flag, refuse("biases of attention")] = key("attention_bias", default=False)
    mlp_bias: Annotated[Flag, refuse("biases of MLPs")] = key("mlp_bias", default=False)
    norm_bias: Annotated[Flag, refuse("biases of norms")] = key("norm_bias", default=False)
    attention_dropout: Annotated[Probability, refuse("dropout on attention alone")] = key(
        "attention_dropout", default=0.0
    )
    activation: Gelu = key("hidden_activation", default="gelu")
    tied: Flag = key("tie_word_embeddings", default=True)

    def fields(self) -> dict[str, object]:
        types = self.types or [f"{'sliding' if i % self.every else 'full'}_attention" for i in range(self.layers)]
        check_every_layer(types, self.layers, "layer_types")
        windows = local_fields("attention_chunk", self.window, [kind == "sliding_attention" for kind in types])
        masked = not self.classes or self.classes[0].endswith("ForMaskedLM")
        absent = {"modules": ("attn_norm", "head.dense.bias")[: 1 + masked], "parameters": -self.hidden * (1 + masked)}
        shape = self.same_fields("layers", "hidden", "heads", "ffn", "vocab", "seq", "tied") | windows
        kind = {"norm": "rmsnorm", "positions": "rope", "gated": True, "bidirectional": True, "embedding_norm": True}
        return shape | kind | self.read_activation() | {"head": ("transform", "bias"), "outside": absent}
