"""Configs of decoders over patches of bytes."""

from __future__ import annotations

from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.models.huggingface.config import Config, Keys, key
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.parts import Flag, Size


class LlamaLayers(Keys):
    """A stack of layers of Llama's kind."""

    layers: Size = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    heads: Size = key("num_attention_heads")
    kv_heads: Size | None = key("num_key_value_heads", default=None)
    ffn: Size | None = key("intermediate_size", default=None)
    vocab: Size = key("vocab_size", default=260)
    crosses: Flag = key("cross_attn_all_layers", default=False)

    def shape(self, **more: int) -> dict[str, object]:
        """Returns the fields of `Model`."""
        shape = {name: getattr(self, name) for name in ("layers", "hidden", "heads", "kv_heads", "vocab")}
        kind = {"norm": "rmsnorm", "positions": "rope", "gated": True, "tied": False}
        return shape | {"ffn": self.ffn or int(8 * self.hidden / 3), **kind, **more}

    @property
    def crossings(self) -> int:
        """Layers with cross-attention."""
        return self.layers if self.crosses else 1

    @property
    def cross_parameters(self) -> int:
        """Parameters of cross-attention in all layers: two norms, and projections."""
        width = self.hidden // self.heads * (self.kv_heads or self.heads)
        return self.crossings * self.hidden * (2 * self.hidden + 2 * width + 2)

    def cross_flops(self, queries: int, keys: int, seen: int) -> float:
        """Counts the FLOPs of cross-attention in all layers, of a patch. seen: keys of a query."""
        width = self.hidden // self.heads * (self.kv_heads or self.heads)
        projected = self.hidden * (queries * 2 * self.hidden + keys * 2 * width)
        return 2.0 * self.crossings * (projected + 2 * queries * seen * self.hidden)


class BLT(Config):
    """``BltConfig`` (byte latent transformer): the model are the layers over patches, which are its tokens, of
    ``patch_size`` bytes each. What is over bytes is `outside`: embeddings of groups of bytes, an encoder and a decoder
    with a window, and cross-attention between bytes and patches; and the patcher, which is not trained, and whose
    backward pass is counted all the same."""

    encoder: LlamaLayers = key("encoder_config")
    decoder: LlamaLayers = key("decoder_config")
    patches: LlamaLayers = key("global_config")
    patcher: LlamaLayers | None = key("patcher_config", default=None)
    patches_itself: Flag = key("patch_in_forward", default=True)
    bytes_of_patch: Size = key("patch_size", default=4)
    seq: Size = key("max_position_embeddings", default=4096)
    window: Size = key("local_attention_window_len", default=512)
    factor: Size = key("cross_attn_k", default=2)
    groups: list[Size] | None = key("encoder_hash_byte_group_size", default=None)
    rows: Size = key("encoder_hash_byte_group_vocab", default=500002)
    functions: Size = key("encoder_hash_byte_group_nb_functions", default=1)

    def fields(self) -> dict[str, object]:
        patches = max(1, self.seq // self.bytes_of_patch)
        shape = self.patches.shape(seq=patches, vocab=self.decoder.vocab)
        return shape | {"outside": self._outside(Model.model_validate(shape))}

    def _outside(self, trunk: Model) -> dict[str, object]:
        """Returns the fields of what is over bytes, so that all parameters and products are counted."""
        encoder, decoder, n = self.encoder, self.decoder, self.bytes_of_patch
        local = [(stack, Model.model_validate(stack.shape(seq=self.seq, window=self.window))) for stack in self._stacks]
        groups = self.rows * self.functions * len(self.groups or range(6))
        joins = encoder.hidden**2 * self.factor + self.patches.hidden * decoder.hidden * self.factor
        wide = encoder.hidden * self.factor * self.patches.hidden
        joins += wide if encoder.hidden * self.factor != self.patches.hidden else 0
        parameters = sum(model.parameters for _, model in local) + groups * encoder.hidden + joins
        parameters += encoder.cross_parameters + decoder.cross_parameters
        # The encoder has no output layer and no norm, the decoder no embedding.
        parameters -= encoder.hidden * (encoder.vocab + 1) + decoder.hidden * decoder.vocab
        products = n * sum(self._flops(model) for _, model in local) - self._flops(trunk, head_alone=True)
        products -= n * 2 * encoder.hidden * encoder.vocab
        products += (
            2 * joins + encoder.cross_flops(self.factor, n, n) + decoder.cross_flops(n, self.factor, self.factor)
        )
        kept = n * sum(stack.layers * (16 * stack.hidden + 6 * model.ffn) for stack, model in local)
        moved = {"saved": kept, "moved": 2 * kept, "mixes": True}
        parameters -= trunk.parameters - trunk.parameter_parts["layers"]
        return {"modules": ("layers over bytes",), "parameters": parameters, "flops": products, **moved}

    @property
    def _stacks(self) -> list[LlamaLayers]:
        """The stacks over bytes."""
        return [self.encoder, self.decoder, *([self.patcher] if self.patcher and self.patches_itself else [])]

    def _flops(self, model: Model, head_alone: bool = False) -> float:
        """Counts the FLOPs of a token in the products of a stack, or in its output layer alone."""
        parts = forward_matmul_flops(model, 1, model.seq, causal=True)
        return parts["head"] if head_alone else sum(parts.values())
