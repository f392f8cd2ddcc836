"""The shape of a decoder-only transformer, and the parameters that follow from it.

A model is the shape and nothing else: how it is split, in which number format and on which GPU belong to the
job. Letters used in this package: L layers, h hidden, a heads, k key/value heads, d width of a head, f width
of the MLP, V vocabulary, T (or seq) positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hardware.errors import ModelError
from hardware.load import explain, line_of

Size = Annotated[int, Field(strict=True, ge=1, le=100_000_000)]
"""A width, a count of heads or tokens. The ceiling is far above any model and catches slipped digits."""

Depth = Annotated[int, Field(strict=True, ge=1, le=10_000)]
"""A number of layers; each one costs the simulator time, hence the lower ceiling."""

Flag = Annotated[bool, Field(strict=True)]

Probability = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]

UNDESCRIBED = {
    "attention": "Choose the attention kernel in framework.set.attention",
    "moe": "Leave the key out; experts are not described yet",
    "mla": "Leave the key out; latent attention is not described yet",
    "ssm": "Leave the key out; state-space layers are not described yet",
    "mtp": "Leave the key out; multi-token prediction is not described yet",
    "window": "Leave the key out; sliding windows are not described yet",
    "qk_layernorm": "Leave the key out; norms on queries and keys are not described yet",
}
"""Words of ``spec.model`` that no field describes. Where they say "nothing of the kind" they may stand."""


class Model(BaseModel):
    """A dense decoder-only transformer.

    The first five fields have no default. The other defaults are together a GPT: learned
    positions, layer norms, biases everywhere, a GELU MLP four times as wide as the model, a tied output layer.
    None (``null``) means the default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: Depth
    """Transformer layers, L."""
    hidden: Size
    """Width of the residual stream, h (elements)."""
    heads: Size
    """Query heads, a."""
    vocab: Size
    """Rows of the embedding as given, V; frameworks pad it (`padded_vocab`)."""
    seq: Size
    """Default training sequence, T (tokens); with learned positions also the size of their table."""

    name: Annotated[str, Field(strict=True, min_length=1)] = "custom"
    """What reports call it."""
    kv_heads: Size = Field(default_factory=lambda given: given.get("heads", 1))
    """Key/value heads, k; fewer than `heads` is grouped-query attention. Default: `heads`."""
    head_dim: Size = Field(default_factory=lambda given: max(1, given.get("hidden", 1) // given.get("heads", 1)))
    """Width of one head, d (elements). Default: hidden / heads, which must then divide."""
    ffn: Size = Field(default_factory=lambda given: 4 * given.get("hidden", 1))
    """Inner width of the MLP, f (elements). Default: 4 hidden."""
    gated: Flag = False
    """True: SwiGLU, three matrices. False: GELU, two."""
    positions: Literal["learned", "rope", "none"] = "learned"
    """Only learned positions have parameters."""
    tied: Flag = True
    """The output layer shares the matrix of the embedding."""
    norm: Literal["layernorm", "rmsnorm", "layernorm1p"] = "layernorm"
    """rmsnorm has a weight; the other two a weight and a bias (layernorm1p stores weight - 1)."""
    qkv_bias: Flag = Field(default_factory=lambda given: given.get("norm") == "layernorm")
    """Bias of the query, key and value layers. Default: True with layernorm."""
    proj_bias: Flag = Field(default_factory=lambda given: given.get("norm") == "layernorm")
    """Bias of the attention's output layer. Default: True with layernorm."""
    mlp_bias: Flag = Field(default_factory=lambda given: given.get("norm") == "layernorm")
    """Biases of all MLP layers. Default: True with layernorm."""
    dropout: Probability = 0.0
    """Probability on the embedding, on attention scores and on both residual branches; 0: no kernels for it."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_said(cls, given: Any) -> Any:
        """Leaves out what is null, and words for features that the model does not have."""
        if not isinstance(given, Mapping):
            return given
        for key, remedy in UNDESCRIBED.items():
            if given.get(key):
                raise ModelError(key, "no block of meshcast describes it", remedy, given[key])
        left_open = {key for key, value in given.items() if value is None and key in cls.model_fields}
        return {key: value for key, value in given.items() if key not in left_open and key not in UNDESCRIBED}

    @model_validator(mode="after")
    def _relations(self) -> Model:
        if "head_dim" not in self.model_fields_set and self.hidden % self.heads:
            raise ModelError(
                "hidden",
                f"it must be a multiple of heads ({self.heads}) when head_dim is not given",
                f"Give head_dim, or hidden {self.hidden // self.heads * self.heads or self.heads}",
                self.hidden,
            )
        if self.heads % self.kv_heads:
            divisors = [n for n in range(1, min(self.heads, 1024) + 1) if self.heads % n == 0]
            raise ModelError(
                "kv_heads",
                f"it must divide heads ({self.heads}), for each key/value head serves equally many queries",
                f"Possible: {', '.join(map(str, divisors[:20]))}",
                self.kv_heads,
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ModelError(
                "head_dim", "rope turns pairs of elements, so it must be even", "Give an even head_dim", self.head_dim
            )
        return self

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: both norms, attention and MLP, biases included."""
        h, q, kv, f = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.ffn
        ups = 2 if self.gated else 1
        attention = h * (q + 2 * kv) + self.qkv_bias * (q + 2 * kv) + q * h + self.proj_bias * h
        mlp = (ups + 1) * h * f + self.mlp_bias * (ups * f + h)
        return 2 * self.norm_parameters + attention + mlp

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.hidden * (1 if self.norm == "rmsnorm" else 2)

    @property
    def parameter_parts(self) -> dict[str, int]:
        """Parameters by part; ``layer`` is one layer, ``head`` is 0 when the output layer is tied."""
        table = self.vocab * self.hidden
        return {
            "embedding": table,
            "positions": self.seq * self.hidden if self.positions == "learned" else 0,
            "layer": self.layer_parameters,
            "final_norm": self.norm_parameters,
            "head": 0 if self.tied else table,
        }

    @property
    def parameters(self) -> int:
        """All parameters, exactly, with the vocabulary as given (a tied matrix counts once)."""
        return sum(self.parameter_parts.values()) + (self.layers - 1) * self.layer_parameters

    def padded_vocab(self, multiple: int) -> int:
        """The vocabulary rounded up to a multiple; Megatron pads to 128 times the tensor-parallel size."""
        return -(-self.vocab // multiple) * multiple


@contextmanager
def explained(where: str, text: str = "", words: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turns what a pydantic model of this package refuses into one ModelError.

    Args:
        where: the path of the description in a job, or with `text` the file.
        text: the file's text, in which the line of the field is looked up.
        words: the user's words for our fields, where they differ.
    """
    try:
        yield
    except ModelError as error:
        field = (words or {}).get(error.where, error.where)
        raise ModelError(place(where, field, text), error.rule, error.remedy, error.value) from None
    except ValidationError as error:
        # Unknown keys of a config.json are passed over, so only the keys of `Model` are ever suggested.
        told = explain(error, where, ModelError, text=text, model=None if words else Model)
        missing = [str(each["loc"][-1]) for each in error.errors(include_url=False) if each["type"] == "missing"]
        if len(missing) > 1 and told.value is None and told.where.endswith(missing[0]):
            told = ModelError(told.where, told.rule, f"Add all that are missing: {', '.join(missing)}")
        raise told from None


def place(where: str, field: str, text: str = "") -> str:
    """The place of a field: ``model.heads`` in a job, ``my.yaml:3 heads`` in a file with `text`."""
    return f"{where}:{line_of(text, (field,))} {field}" if text else f"{where}.{field}"
