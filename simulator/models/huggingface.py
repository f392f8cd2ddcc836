"""Reads the ``config.json`` of a Hugging Face model.

Each ``model_type`` that meshcast can describe has a class here: which keys it reads, what they default to (the
defaults of the ``transformers`` library), which values it can describe, and the model that follows. A config
holds many keys that do not change the cost of a step (token ids, generation, initialisation, rope's base and
scaling); those are passed over. A key that does change it is read, or refused when its value is not described.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, model_validator

from hardware.errors import ModelError, nearest
from simulator.models.model import Depth, Flag, Model, Probability, Size, explained, place


def _key(*names: str, **default: Any) -> Any:
    """A field of a config under its name there, and under other names that ``transformers`` takes for the same."""
    return Field(validation_alias=AliasChoices(*names), **default)


def _without(feature: str) -> AfterValidator:
    """Refuses a value that says that the model has `feature`."""

    def refuse(value: Any) -> Any:
        if value:
            raise ValueError(f"meshcast describes no {feature}. Remove the key if the model works without it")
        return value

    return AfterValidator(refuse)


class _Config(BaseModel, ABC):
    """Keys of a config under the names of `Model`; null means the default, as in ``transformers``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    # Weights stored in a few bits are made for inference, or for training adapters only.
    quantization: Annotated[Any, _without("quantised weights")] = _key("quantization_config", default=None)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in config.items() if value is not None}

    @classmethod
    def words(cls) -> dict[str, str]:
        """For each field the key that a config has for it."""
        return {name: str(field.validation_alias.choices[0]) for name, field in cls.model_fields.items()}  # type: ignore[union-attr]

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """The fields of `Model`."""


class GPT2(_Config):
    """``GPT2Config``: layer norms, biases everywhere, learned positions, a tied output layer."""

    layers: Depth = _key("n_layer", "num_hidden_layers")
    hidden: Size = _key("n_embd", "hidden_size")
    heads: Size = _key("n_head", "num_attention_heads")
    vocab: Size = _key("vocab_size")
    seq: Size = _key("n_positions", "max_position_embeddings", "n_ctx")
    ffn: Size | None = _key("n_inner", default=None)
    activation: Literal["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"] = _key(
        "activation_function", default="gelu_new"
    )
    tied: Flag = _key("tie_word_embeddings", default=True)
    dropout: Probability = _key("resid_pdrop", default=0.1)
    attention_dropout: Probability = _key("attn_pdrop", default=0.1)
    embedding_dropout: Probability = _key("embd_pdrop", default=0.1)
    cross_attention: Annotated[Flag, _without("cross-attention")] = _key("add_cross_attention", default=False)

    def fields(self) -> dict[str, Any]:
        # The probability costs nothing, the kernels do: either all three run or none.
        for name in ("attention_dropout", "embedding_dropout"):
            if bool(getattr(self, name)) != bool(self.dropout):
                rule = f"dropout in some places only is not described (resid_pdrop is {self.dropout})"
                remedy = "Give all of resid_pdrop, attn_pdrop and embd_pdrop, or 0 for all"
                raise ModelError(name, rule, remedy, getattr(self, name))
        shape = self.model_dump(include={"layers", "hidden", "heads", "vocab", "seq", "ffn", "tied", "dropout"})
        return shape | {"norm": "layernorm", "positions": "learned", "gated": False}


class Llama(_Config):
    """``LlamaConfig`` (Llama 1, 2, 3): RMS norms, SwiGLU, rope, as a rule no biases, an output layer of its own."""

    layers: Depth = _key("num_hidden_layers")
    hidden: Size = _key("hidden_size")
    heads: Size = _key("num_attention_heads")
    kv_heads: Size | None = _key("num_key_value_heads", default=None)
    head_dim: Size | None = _key("head_dim", default=None)
    ffn: Size = _key("intermediate_size")
    vocab: Size = _key("vocab_size")
    seq: Size = _key("max_position_embeddings")
    activation: Literal["silu", "swish"] = _key("hidden_act", default="silu")
    tied: Flag = _key("tie_word_embeddings", default=False)
    attention_bias: Flag = _key("attention_bias", default=False)
    mlp_bias: Flag = _key("mlp_bias", default=False)
    attention_dropout: Annotated[Probability, _without("dropout on attention alone")] = _key(
        "attention_dropout", default=0.0
    )

    def fields(self) -> dict[str, Any]:
        shape = self.model_dump(
            include={"layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq", "tied", "mlp_bias"}
        )
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias}
        return shape | biases | {"norm": "rmsnorm", "positions": "rope", "gated": True}


SUPPORTED: dict[str, type[_Config]] = {"gpt2": GPT2, "llama": Llama}
"""The classes by the ``model_type`` of a config."""


def from_config(
    config: Mapping[str, Any], where: str = "config.json", name: str | None = None, text: str = ""
) -> Model:
    """The model that a Hugging Face config describes.

    Args:
        config: the parsed ``config.json``.
        where: its place, for error messages.
        name: what reports shall call the model; default: the config's ``_name_or_path``, else its ``model_type``.
        text: the text of the file, for the line numbers of error messages.

    Raises:
        ModelError: another ``model_type``, a missing key, or a value that meshcast does not describe.
    """
    if not isinstance(config, Mapping):
        raise ModelError(where, "a Hugging Face config is a mapping", "Give the path of a config.json", config)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in SUPPORTED:
        rule = "needed and missing" if kind is None else "meshcast does not describe this architecture"
        remedy = nearest(str(kind), SUPPORTED) + ". Other models: give the fields of `model:` themselves"
        raise ModelError(place(where, "model_type", text), rule, remedy, kind)
    reader = SUPPORTED[kind]
    with explained(where, text, reader.words()):
        fields = reader.model_validate(config).fields()
        return Model.model_validate({"name": name or str(config.get("_name_or_path") or kind), **fields})
