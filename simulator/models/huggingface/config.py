"""What all readers of a ``config.json`` share: keys under the names of `Model`, and what they refuse."""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, model_validator

from hardware.errors import ModelError
from simulator.models.model import Depth, Flag, Probability, Size

Gelu = Literal["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"]
"""GELU, exact or in one of its approximations: one kernel each."""


def key(*names: str, **default: Any) -> Any:
    """A field of a config under its name there, and under other names that ``transformers`` takes for the same."""
    return Field(validation_alias=AliasChoices(*names), **default)


def refuse(feature: str) -> AfterValidator:
    """Refuses a value that says that the model has `feature`."""

    def refuse(value: Any) -> Any:
        if value:
            raise ValueError(f"meshcast describes no {feature}. Remove the key if the model works without it")
        return value

    return AfterValidator(refuse)


class Keys(BaseModel):
    """Keys of a config. A key that is left out means the default of ``transformers``.

    Null means "none" where a field may be None (which then need not be its default), elsewhere the default.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_none_or_default(cls, config: Any) -> Any:
        if not isinstance(config, Mapping):
            return config
        nullable = {
            name
            for field in cls.model_fields.values()
            if type(None) in typing.get_args(field.annotation)
            for name in field.validation_alias.choices  # type: ignore[union-attr]
        }
        return {key: value for key, value in config.items() if value is not None or key in nullable}


class Config(Keys, ABC):
    """A whole config, whose fields have the names of those of `Model` that they fill."""

    # Weights stored in a few bits are made for inference, or for training adapters only.
    quantization: Annotated[Any, refuse("quantised weights")] = key("quantization_config", default=None)

    @classmethod
    def config_keys(cls) -> dict[str, str]:
        """For each field of `Model`, `MLA` and `MoE` the key that a config has for it."""
        keys = {name: str(field.validation_alias.choices[0]) for name, field in cls.model_fields.items()}  # type: ignore[union-attr]
        return {part + name: word for part in ("mla.", "moe.", "") for name, word in keys.items()}

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """The fields of `Model`."""

    def same_fields(self, *names: str) -> dict[str, Any]:
        """The fields of these names, which mean the same in `Model`."""
        return {name: getattr(self, name) for name in names}

    def read_dropout(self, *names: str) -> dict[str, Any]:
        """`Model.dropout`, from the first of these fields. The probability costs nothing, the kernels do: all or none.

        Raises ModelError when another of the fields is 0 and the first is not, or the other way round.
        """
        words, dropout = self.config_keys(), getattr(self, names[0])
        for name in names[1:]:
            if bool(getattr(self, name)) != bool(dropout):
                rule = f"dropout in some places only is not described ({words[names[0]]} is {dropout})"
                keys = [words[each] for each in names]
                remedy = f"Give all of {', '.join(keys[:-1])} and {keys[-1]}, or 0 for all"
                raise ModelError(name, rule, remedy, getattr(self, name))
        return {"dropout": dropout}


class Decoder(Config):
    """RMS norms, gated MLPs and rope: what the Llama family shares. Dropout, where there is any, on attention alone."""

    layers: Depth = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    heads: Size = key("num_attention_heads")
    kv_heads: Size | None = key("num_key_value_heads", default=None)
    ffn: Size = key("intermediate_size")
    vocab: Size = key("vocab_size")
    seq: Size = key("max_position_embeddings")
    activation: Literal["silu", "swish"] = key("hidden_act", default="silu")
    tied: Flag = key("tie_word_embeddings", default=False)
    attention_dropout: Annotated[Probability, refuse("dropout on attention alone")] = key(
        "attention_dropout", default=0.0
    )

    def fields(self) -> dict[str, Any]:
        shape = self.same_fields("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "tied")
        return shape | {"norm": "rmsnorm", "positions": "rope", "gated": True}


def window_fields(window: int | None, slides: Sequence[bool], word: str) -> dict[str, Any]:
    """The fields of `Model` for layers of which those that `slides` says have the `window`.

    Raises ModelError, at the config's key `word`, when it is neither all, none, nor all but every n-th of them.
    """
    if window is None or not any(slides):
        return {}
    if all(slides):
        return {"window": window}
    every = list(slides).index(False) + 1
    if list(slides) == [(layer + 1) % every != 0 for layer in range(len(slides))]:
        return {"window": window, "full_every": every}
    rule = "only windows in all layers, or in all but every n-th, are described"
    raise ModelError(word, rule, "Turn windows off, or give the fields of `model:` themselves")


def expert_layers(flags: Sequence[bool], word: str) -> dict[str, int]:
    """`MoE.first_dense` and `MoE.every` for layers of which those with a true flag have experts.

    Raises ModelError, at the config's key `word`, when no two such numbers say it.
    """
    found = [layer for layer, flag in enumerate(flags) if flag]
    first = found[0]
    for every in (found[1] - first,) if len(found) > 1 else (1, first + 1):
        dense = first - every + 1
        if dense >= 0 and found == list(range(first, len(flags), every)):
            return {"first_dense": dense, "every": every}
    rule = "only dense layers at the start, and then experts in every n-th layer, are described"
    raise ModelError(word, rule, "Give the fields of `model:` themselves")
