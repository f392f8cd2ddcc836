"""Configs of encoders with decoders that attend to them: T5, BART and their like."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from meshcast.hardware.errors import ModelError
from meshcast.simulator.models.huggingface.config import Config, key, refuse
from meshcast.simulator.models.huggingface.gemma import Gemma2
from meshcast.simulator.models.parts import Depth, Flag, Probability, Size

TARGETS = 114
"""Targets of T5's pre-training: spans of 512 inputs that are to be filled in, with their marks (arXiv 1910.10683,
section 3.1.4: 15 % of the tokens in spans of 3 in the mean)."""


class T5(Config):
    """``T5Config`` (T5, T5 1.1, Flan-T5): RMS norms, no biases, a table of relative positions of each stack, and a
    table of the vocabulary for both, which the output layer of the first T5 shares too.

    It names no lengths: 512 inputs (``n_positions``) and `TARGETS` stand in for them. The addition of relative
    positions to scores is left out.
    """

    hidden: Size = key("d_model")
    head_dim: Size = key("d_kv", default=64)
    ffn: Size = key("d_ff")
    layers: Depth = key("num_layers")
    decoder_layers: Depth | None = key("num_decoder_layers", default=None)
    heads: Size = key("num_heads")
    vocab: Size = key("vocab_size")
    inputs: Size = key("n_positions", default=512)
    relative_buckets: Size = key("relative_attention_num_buckets", default=32)
    dropout: Probability = key("dropout_rate", default=0.1)
    activation: Literal["relu", "gelu", "gated-gelu", "gated-relu", "gated-silu"] = key(
        "feed_forward_proj", default="relu"
    )
    tied: Flag = key("tie_word_embeddings", default=True)

    def fields(self) -> dict[str, object]:
        shape = self.same_fields("hidden", "head_dim", "ffn", "heads", "vocab", "dropout", "tied") | self.tables()
        encoder = {"name": "encoder", "layers": self.layers, "tokens": self.inputs, "bidirectional": True}
        encoder |= {"final_norm": True, **self.tables(), **self.encoder_fields()}
        gated = self.activation.startswith("gated")
        function = self.activation.removeprefix("gated-")
        kind = {"norm": "rmsnorm", "positions": "none", "gated": gated, "cross_attention": True}
        kind["activation"] = "gelu_new" if gated and function == "gelu" else function
        layers = {"layers": self.decoder_layers or self.layers, "seq": self.inputs + TARGETS}
        return shape | kind | layers | {"branches": (encoder,)}

    def tables(self) -> dict[str, object]:
        """Returns the fields of relative positions of a stack."""
        return {"relative_buckets": self.relative_buckets}

    def encoder_fields(self) -> dict[str, object]:
        """Returns what the encoder has beside that of T5, or in its place."""
        return {}


class MT5(T5):
    """``MT5Config``: the shape of T5 1.1."""

    activation: Literal["relu", "gelu", "gated-gelu", "gated-relu", "gated-silu"] = key(
        "feed_forward_proj", default="gated-gelu"
    )
    tied: Flag = key("tie_word_embeddings", default=False)


class UMT5(MT5):
    """``UMT5Config``: a table of relative positions in every layer, in place of one for a stack."""

    tied: Flag = key("tie_word_embeddings", default=True)

    def tables(self) -> dict[str, object]:
        of_layer = self.relative_buckets * self.heads
        return {"other": {"modules": ("relative_attention_bias",), "parameters": of_layer}}


class LongT5(T5):
    """``LongT5Config``: in the encoder a block of tokens sees its neighbours, and with ``transient-global`` the means
    of all blocks. Chunks of as many tokens as a query sees describe that; keys and values of the means are priced by
    their FLOPs, making the means is left out."""

    inputs: Size = key("n_positions", default=4096)
    kind: Literal["local", "transient-global"] = key("encoder_attention_type", default="local")
    radius: Size = key("local_radius", default=127)
    block: Size = key("global_block_size", default=16)

    def encoder_fields(self) -> dict[str, object]:
        neighbours = 3 * (self.radius + 1)
        if self.kind == "local":
            return {"attention_chunk": neighbours}
        products = 2 * 2 * self.hidden * self.heads * self.head_dim / self.block
        norm = {"modules": ("keys and values of means",), "parameters": self.hidden, "flops": products}
        tables = {"relative_buckets": 2 * self.relative_buckets}
        return {"attention_chunk": neighbours + self.inputs // self.block, "other": norm, **tables}


class EncoderDecoderTraits(NamedTuple):
    """What differs between BART and models like it.

    behind: whether norms are behind residual additions, instead of before attention and MLPs.
    embedding_norm: whether there is a norm behind the embedding.
    more_rows: rows of the table of positions beyond the longest sequence; None: positions are sines, and no parameters.
    attention_bias: whether projections of attention have biases; queries-values: not those of keys.
    """

    behind: bool
    embedding_norm: bool
    more_rows: int | None
    attention_bias: bool | Literal["queries-values"] = True


LAYOUTS = {
    **dict.fromkeys(("bart", "plbart", "mvp", "trocr"), EncoderDecoderTraits(True, True, 2)),
    **dict.fromkeys(("blenderbot-small", "led"), EncoderDecoderTraits(True, True, 0)),
    "mbart": EncoderDecoderTraits(False, True, 2),
    "blenderbot": EncoderDecoderTraits(False, False, 0),
    **dict.fromkeys(("pegasus", "m2m_100"), EncoderDecoderTraits(False, False, None)),
    "marian": EncoderDecoderTraits(True, False, None),
    "bigbird_pegasus": EncoderDecoderTraits(False, False, 0, attention_bias=False),
    "whisper": EncoderDecoderTraits(False, False, 0, attention_bias="queries-values"),
    "speech_to_text": EncoderDecoderTraits(False, False, None),
}
"""By ``model_type``."""

SCORED_BLOCKS = 3 + 2
"""Blocks of keys that a block of queries of BigBird sees beside random ones: itself with its neighbours, and the first
and the last (arXiv 2007.14062, appendix D)."""


class BART(Config):
    """``BartConfig`` and those like it: an encoder and a decoder with layer norms and biases, over one table of the
    vocabulary, or with ``is_encoder_decoder: false`` the decoder alone, whose attention to an encoder is not used.

    It names no targets: as many as inputs stand in for them. LayerDrop and dropout within MLPs are left out. BigBird's
    encoder is described by chunks of as many tokens as a query sees.
    """

    kind: str = key("model_type")
    hidden: Size = key("d_model")
    layers: Depth = key("encoder_layers", default=12)
    heads: Size = key("encoder_attention_heads", default=16)
    ffn: Size = key("encoder_ffn_dim", default=4096)
    decoder_layers: Depth = key("decoder_layers")
    decoder_heads: Size = key("decoder_attention_heads")
    decoder_ffn: Size = key("decoder_ffn_dim")
    vocab: Size = key("vocab_size")
    inputs: Size = key("max_position_embeddings")
    targets: Size | None = key("max_target_positions", default=None)
    activation: Literal["gelu", "gelu_new", "relu", "silu", "swish"] = key("activation_function", default="gelu")
    dropout: Probability = key("dropout", default=0.1)
    attention_dropout: Probability = key("attention_dropout", default=0.0)
    tied: Flag = key("tie_word_embeddings", default=True)
    encodes: Flag = key("is_encoder_decoder", default=True)
    shares: Literal[True] = key("share_encoder_decoder_embeddings", default=True)
    prompts: Annotated[Flag, refuse("prompts of every layer")] = key("use_prompt", default=False)
    sparse: Literal["block_sparse", "original_full"] = key("attention_type", default="original_full")
    block: Size = key("block_size", default=64)
    random_blocks: Size = key("num_random_blocks", default=3)

    def fields(self) -> dict[str, object]:
        layout = LAYOUTS[self.kind]
        targets = self.targets or self.inputs
        rows = None if layout.more_rows is None else targets + layout.more_rows
        positions = {"positions": "none"} if rows is None else {"positions": "learned", "position_rows": rows}
        kind = {"norm": "layernorm", "norm_residual": layout.behind, **positions}
        kind |= {"qkv_bias": layout.attention_bias, "proj_bias": bool(layout.attention_bias)}
        # Behind residual additions the norm of the embedding is the first of those before attention.
        kind |= {"embedding_norm": layout.embedding_norm and not layout.behind}
        absent = 2 * self.hidden * (layout.behind and not layout.embedding_norm)
        shape = self.same_fields("hidden", "vocab") | kind
        shape |= {"activation": "silu" if self.activation == "swish" else self.activation}
        shape |= {"layers": self.decoder_layers, "heads": self.decoder_heads, "ffn": self.decoder_ffn}
        shape |= self._read_dropout()
        # ``BigBirdPegasusForCausalLM`` makes an output layer of its own.
        shape |= {"tied": self.tied and (self.encodes or self.kind != "bigbird_pegasus")}
        if not self.encodes:
            norms = {"outside": {"modules": ("layernorm_embedding",), "parameters": -absent}} if absent else {}
            biases = {True: 4, False: 0, "queries-values": 3}[layout.attention_bias]
            unused = {"modules": ("encoder_attn",), "parameters": (4 * self.hidden + biases + 2) * self.hidden}
            return shape | norms | {"seq": targets, "other": unused}
        encoder = {"name": "encoder", "layers": self.layers, "heads": self.heads, "ffn": self.ffn}
        encoder |= {"tokens": self.inputs, "bidirectional": True, "final_norm": True, "norm_residual": layout.behind}
        encoder |= {} if layout.more_rows is None else {"position_rows": self.inputs + layout.more_rows}
        if self.sparse == "block_sparse":
            encoder["attention_chunk"] = (SCORED_BLOCKS + self.random_blocks) * self.block
        shape |= {"outside": {"modules": ("layernorm_embedding",), "parameters": -2 * absent}} if absent else {}
        encoder |= self.encoder_fields()
        return shape | {"cross_attention": True, "seq": self.inputs + targets, "branches": (encoder,)}

    def encoder_fields(self) -> dict[str, object]:
        """Returns what the encoder has beside that of BART, or in its place."""
        return {}

    def _read_dropout(self) -> dict[str, object]:
        """Returns the fields of dropout, which may be on states alone."""
        if self.dropout and not self.attention_dropout:
            return {"dropout": self.dropout, "score_dropout": False}
        return self.read_dropout("dropout", "attention_dropout")


class LED(BART):
    """``LEDConfig``: a token of the encoder sees a window of others, which chunks as long describe, and projects keys
    and values once more for the few tokens that see all."""

    inputs: Size = key("max_encoder_position_embeddings", default=16384)
    targets: Size | None = key("max_decoder_position_embeddings", default=1024)
    window: Size | list[Size] = key("attention_window", default=512)

    def encoder_fields(self) -> dict[str, object]:
        windows = self.window if isinstance(self.window, list) else [self.window]
        if len({*windows}) > 1:
            raise ModelError("window", "windows of equal layers are supported", "Give one number", self.window)
        once_more = {"parameters": 3 * self.hidden * (self.hidden + 1), "flops": 4 * self.hidden**2}
        return {"attention_chunk": windows[0], "other": {"modules": ("query_global", "key_global"), **once_more}}


class TrOCR(BART):
    """``TrOCRConfig``: a decoder of images, here without their encoder."""

    encodes: Flag = key("is_encoder_decoder", default=False)
    inputs: Size = key("max_position_embeddings", default=512)


class Whisper(BART):
    """``WhisperConfig``: frames of 10 ms of sound pass two convolutions, and two of them are a token of the encoder,
    which has 30 s. Its positions are sines."""

    inputs: Size = key("max_source_positions", default=1500)
    targets: Size | None = key("max_target_positions", default=448)
    bins: Size = key("num_mel_bins", default=80)
    dropout: Probability = key("dropout", default=0.0)

    def encoder_fields(self) -> dict[str, object]:
        convolutions = [{"channels": self.hidden, "kernel": 3, "stride": stride} for stride in (1, 2)]
        return {"positions": "none", "input_width": self.bins, "convolutions": convolutions}


class Speech2Text(BART):
    """``Speech2TextConfig``: every gated convolution halves the frames. `inputs` are frames there, and tokens here."""

    inputs: Size = key("max_source_positions", default=6000)
    targets: Size | None = key("max_target_positions", default=1024)
    bins: Size = key("input_feat_per_channel", default=80)
    channels: Size = key("conv_channels", default=1024)
    kernels: tuple[Size, ...] = key("conv_kernel_sizes", default=(5, 5))
    activation: Literal["gelu", "gelu_new", "relu", "silu", "swish"] = key("activation_function", default="relu")

    def fields(self) -> dict[str, object]:
        tokens = self.inputs // 2 ** len(self.kernels)
        return super(Speech2Text, self.model_copy(update={"inputs": tokens})).fields()

    def encoder_fields(self) -> dict[str, object]:
        channels = [self.channels] * (len(self.kernels) - 1) + [2 * self.hidden]
        parts = zip(channels, self.kernels, strict=True)
        convolutions = [{"channels": wide, "kernel": kernel, "stride": 2, "gated": True} for wide, kernel in parts]
        return {"input_width": self.bins, "convolutions": convolutions}


class T5Gemma(Config):
    """``T5GemmaConfig`` (arXiv 2504.06225): two stacks of Gemma 2, each with a table of its own. Windows of the encoder
    lie on both sides of a token, which chunks as long as both describe."""

    encoder: Gemma2 = key("encoder")
    decoder: Gemma2 = key("decoder")
    vocab: Size = key("vocab_size", default=256000)
    tied: Flag = key("tie_word_embeddings", default=True)
    dropout: Annotated[Probability, refuse("dropout in T5Gemma")] = key("dropout_rate", default=0.0)

    def fields(self) -> dict[str, object]:
        encoder, decoder = self.encoder.fields(), self.decoder.fields()
        inputs, targets, window = self.encoder.seq, self.decoder.seq, self.encoder.window
        kind = {"name": "encoder", "tokens": inputs, "bidirectional": True, "final_norm": True, "window": None}
        kind |= {"softcaps": ("attention",) if self.encoder.score_cap else ()}
        if window is not None and 2 * window < inputs:
            kind["attention_chunk"] = 2 * window
        else:
            kind["full_every"] = 0
        for word in ("vocab", "seq", "tied", "mtp", "window"):
            encoder.pop(word, None)
        lengths = {"vocab": self.vocab, "seq": inputs + targets, "tied": self.tied}
        return decoder | lengths | {"cross_attention": "own-tables", "branches": ({**encoder, **kind},)}
