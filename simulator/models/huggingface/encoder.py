"""Configs of encoders of the BERT family: a token attends to all others, and the loss is over masked tokens.

``transformers`` computes the logits of all tokens. The pooler, and a head for pairs of sentences, are left out.
"""

from __future__ import annotations

from typing import Any

from meshcast.simulator.models.huggingface.config import Config, Gelu, key
from meshcast.simulator.models.parts import Count, Depth, Flag, Probability, Size


class BERT(Config):
    """``BertConfig`` and those like it: norms behind residual additions, a transformation in front of the output layer.

    The rows of the table of token types count as rows of that of positions: both are added by the kernels of the input.
    """

    layers: Depth = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    heads: Size = key("num_attention_heads")
    ffn: Size = key("intermediate_size")
    vocab: Size = key("vocab_size")
    seq: Size = key("max_position_embeddings", default=512)
    types: Count = key("type_vocab_size", default=2)
    activation: Gelu = key("hidden_act", default="gelu")
    tied: Flag = key("tie_word_embeddings", default=True)
    dropout: Probability = key("hidden_dropout_prob", default=0.1)
    attention_dropout: Probability = key("attention_probs_dropout_prob", default=0.1)

    def fields(self) -> dict[str, Any]:
        shape = self.same_fields("layers", "hidden", "heads", "ffn", "vocab", "seq", "tied")
        kind = {"norm": "layernorm", "positions": "learned", "gated": False, "bidirectional": True}
        head = {"norm_residual": True, "head": ("transform", "bias")}
        dropout = self.read_dropout("dropout", "attention_dropout")
        return shape | dropout | self.read_activation() | kind | head | {"position_rows": self.seq + self.types}


class MegatronBERT(BERT):
    """``MegatronBertConfig``: norms before attention and MLP."""

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"norm_residual": False}


class PreNormRoBERTa(MegatronBERT):
    """``RobertaPreLayerNormConfig``: norms before attention and MLP, and one behind the embedding."""

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"embedding_norm": True}


class BERTGeneration(BERT):
    """``BertGenerationConfig``: no token types, and no transformation in front of the output layer."""

    types: Count = key("type_vocab_size", default=0)

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"head": ("bias",)}
