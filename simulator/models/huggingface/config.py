"""Base classes of the readers of ``config.json``: keys with the names of fields of `Model`, and refused values."""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from meshcast.hardware.errors import ModelError
from meshcast.hardware.schemas import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, model_validator
from meshcast.simulator.models.parts import Count, Depth, Flag, Probability, Size

Gelu = Literal["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"]
"""GELU, exact or in any of its approximations: a kernel each but for gelu_new and gelu_fast."""


def key(*names: str, **default: Any) -> Any:
    """Declares a field by its key in a config, and by the synonyms that ``transformers`` accepts."""
    return Field(validation_alias=AliasChoices(*names), **default)


def refuse(feature: str) -> AfterValidator:
    """Returns a validator that refuses a model with `feature`."""

    def refuse(value: Any) -> Any:
        if value:
            raise ValueError(f"meshcast supports no {feature}. Remove the key if the model works without it")
        return value

    return AfterValidator(refuse)


class Keys(BaseModel):
    """Keys of a config, with the defaults of ``transformers``.

    Null means None for a field that may be None (even if that is not its default), otherwise the default.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_none_or_default(cls, config: Any) -> Any:
        if not isinstance(config, Mapping):
            return config
        said = {key: value for key, value in config.items() if value is not None or cls._may_be_none(key)}
        return _rope_share(config) | said

    @classmethod
    def _may_be_none(cls, key: str) -> bool:
        """Returns whether the field of a key may be None. Looking at types takes time, so few keys are asked for."""
        name = cls.__keys__.get(key)
        return name is not None and type(None) in typing.get_args(cls.model_fields[name].annotation)

    def read_activation(self) -> dict[str, str]:
        """Returns `Model.activation` from the name of a function: kernels of GELU, exact or approximated, save the
        same."""
        word = str(getattr(self, "activation", "gelu"))
        return {"activation": "gelu" if word == "gelu_pytorch_tanh" else word}


def _rope_share(config: Mapping[str, Any]) -> dict[str, object]:
    """Returns ``partial_rotary_factor`` from where configs of transformers 5 have it, ``rope_parameters``, if it is the
    same for all types of layers."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return {}
    parts = [part for part in rope.values() if isinstance(part, Mapping)] or [rope]
    shares = [part.get("partial_rotary_factor") for part in parts]
    same = shares[0] is not None and all(share == shares[0] for share in shares)
    return {"partial_rotary_factor": shares[0]} if same else {}


def round_share(share: float, width: int) -> float:
    """Returns the share of a head's width with RoPE as kernels rotate it: of an odd number of elements, one more."""
    return -(-int(width * share) // 2) * 2 / width


class Config(Keys, ABC):
    """A config; its fields have the names of the fields of `Model` that they set."""

    @classmethod
    def config_keys(cls) -> dict[str, str]:
        """Returns the key of a config for each field of `Model` and its parts."""
        keys = {name: str(field.validation_alias.choices[0]) for name, field in cls.model_fields.items()}  # type: ignore[union-attr]
        return {part + name: word for part in ("mla.", "moe.", "ssm.", "") for name, word in keys.items()}

    @abstractmethod
    def fields(self) -> dict[str, object]:
        """Returns the fields of `Model`."""

    def same_fields(self, *names: str) -> dict[str, object]:
        """Returns the fields of these names, which have the same meaning in `Model`."""
        return {name: getattr(self, name) for name in names}

    def read_dropout(self, *names: str) -> dict[str, object]:
        """Returns `Model.dropout` from the first of these fields. Only whether there are dropout kernels has a cost.

        Raises ModelError if some of the fields are 0 and others are not.
        """
        words, dropout = self.config_keys(), getattr(self, names[0])
        for name in names[1:]:
            if bool(getattr(self, name)) != bool(dropout):
                rule = f"dropout in some places only is not supported ({words[names[0]]} is {dropout})"
                keys = [words[each] for each in names]
                remedy = f"Give all of {', '.join(keys[:-1])} and {keys[-1]}, or 0 for all"
                raise ModelError(name, rule, remedy, getattr(self, name))
        return {"dropout": dropout}


class Decoder(Config):
    """A decoder of the Llama family: RMS norms, gated MLPs and RoPE. Dropout on attention is refused. Layers of
    multi-token prediction are those that a config names, also where ``transformers`` leaves them out."""

    layers: Depth = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    heads: Size = key("num_attention_heads")
    kv_heads: Size | None = key("num_key_value_heads", default=None)
    ffn: Size = key("intermediate_size")
    vocab: Size = key("vocab_size")
    seq: Size = key("max_position_embeddings")
    activation: Literal["silu", "swish"] = key("hidden_act", default="silu")
    tied: Flag = key("tie_word_embeddings", default=False)
    mtp: Count = key("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", default=0)
    attention_dropout: Annotated[Probability, refuse("dropout on attention alone")] = key(
        "attention_dropout", default=0.0
    )

    def fields(self) -> dict[str, object]:
        shape = self.same_fields("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "tied")
        shape |= {"mtp": self.mtp} if self.mtp else {}
        return shape | {"norm": "rmsnorm", "positions": "rope", "gated": True}


def leave_out_mtp(layers: int, others: int) -> dict[str, object]:
    """Returns the fields of `Model` for layers of multi-token prediction that are left out, beside so many others."""
    part = f"layers of multi-token prediction ({layers}, behind {others} others) are"
    return {"mtp": 0, "left_out": (part,)} if layers else {"mtp": 0}


def local_fields(field: str, tokens: int | None, local: Sequence[bool]) -> dict[str, object]:
    """Returns the fields of `Model` for layers with sliding windows or chunked attention.

    field: field of `Model`, `window` or `attention_chunk`.
    tokens: its value; None: no layer has it.
    local: for each layer whether it has it.
    """
    if tokens is None or not any(local):
        return {}
    return {field: tokens} | full_fields([not each for each in local])


def full_fields(full: Sequence[bool]) -> dict[str, object]:
    """Returns `full_every` of `Model`, from whether each layer has full attention; none if none has."""
    if not any(full):
        return {}
    every = list(full).index(True) + 1
    if list(full) == [(layer + 1) % every == 0 for layer in range(len(full))]:
        return {"full_every": every}
    return {"full_every": tuple(layer for layer, flag in enumerate(full) if flag)}


def check_every_layer(flags: Sequence[Any], layers: int, word: str) -> None:
    """Raises ModelError unless a list in a config has an item for each layer. word: its key."""
    if len(flags) != layers:
        rule = f"it must say the type of each of the {layers} layers"
        raise ModelError(word, rule, "Correct the list, or leave it out", list(flags))


MlpTypes = list[Literal["dense", "sparse"]]


def sparse_layers(types: MlpTypes | None, layers: int, first_dense: int) -> dict[str, int]:
    """Returns the fields of `MoEShape` that say which layers have experts.

    types: the kind of each layer; None: all but the first `first_dense` have experts.
    Raises ModelError if no values of the fields describe the layers.
    """
    flags = [layer >= first_dense for layer in range(layers)]
    if types is not None:
        flags = [each == "sparse" for each in types]
    check_every_layer(flags, layers, "mlp_layer_types")
    return expert_layers(flags, "mlp_layer_types")


def expert_layers(flags: Sequence[bool], word: str) -> dict[str, int]:
    """Returns the fields `first_dense` and `every` of `MoEShape`.

    flags: for each layer whether it has experts.
    word: key of the config, for error messages.
    Raises ModelError if no values of the two fields describe the layers.
    """
    expert_layers = [layer for layer, flag in enumerate(flags) if flag]
    first = expert_layers[0]
    for every in (expert_layers[1] - first,) if len(expert_layers) > 1 else (1, first + 1):
        dense = first - every + 1
        if dense >= 0 and expert_layers == list(range(first, len(flags), every)):
            return {"first_dense": dense, "every": every}
    rule = "only dense layers at the start, and then experts in every n-th layer, are supported"
    raise ModelError(word, rule, "Give the fields of `model:` themselves")
