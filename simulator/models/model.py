"""The shape of a model: a decoder-only transformer, with branches in front of it or without.

With branches (the encoders of a multi-modal model) the layers of the model itself are its trunk. Layers are numbered
branch by branch, and then through the trunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError, model_validator

from hardware.errors import ModelError
from hardware.load import explain, line_of
from simulator.models.branches import Branch, inherit_shapes, share_tokens
from simulator.models.parts import Depth
from simulator.models.transformer import LayerKind, Transformer

UNDESCRIBED = {"attention": "Choose the attention kernel in framework.set.attention"}
"""Keys of ``spec.model`` in published runs that are no field, with the remedy. Null, false and none are accepted."""


class Model(Transformer):
    """A decoder-only transformer, from token ids to the loss."""

    layers: Depth
    """Transformer layers, L; with branches the layers of the trunk, with `ssm` the blocks of the pattern."""
    branches: tuple[Branch, ...] = ()
    """Branches in front of the trunk, in the order of their parts of a sequence; none: token ids are embedded."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_said(cls, given: Any) -> Any:
        """Leaves out words for features that the model does not have; branches inherit what they leave out."""
        if not isinstance(given, Mapping):
            return given
        for key, remedy in UNDESCRIBED.items():
            if given.get(key):
                raise ModelError(key, "no block of meshcast describes it", remedy, given[key])
        return inherit_shapes({key: value for key, value in given.items() if key not in UNDESCRIBED})

    @model_validator(mode="after")
    def _branch_relations(self) -> Model:
        if not self.branches:
            return self
        if not self.encoder_layers:
            raise ModelError("branches", "one of them has layers", "Give it layers, or leave branches out")
        share_tokens([one.tokens for one in self.branches], self.seq, "seq")
        for i, one in enumerate(self.branches):
            if one.frames:
                rule = "the layers of a branch have one axis of positions"
                raise ModelError(f"branches[{i}].frames", rule, "Leave it out", one.frames)
        refused = ("tied", self.tied), ("mtp", self.mtp), ("ssm", self.ssm), ("frames", self.frames)
        for word, value in (*refused, ("bidirectional", self.bidirectional)):
            if value:
                shown = value if isinstance(value, bool | int) else None
                raise ModelError(word, "models with branches are supported without it", "Give null or false", shown)
        return self

    # ------------------------------------------------------------------------------------------ layers

    @property
    def encoder_layers(self) -> int:
        """Layers of all branches, which is the number of the first layer of the trunk."""
        return sum(one.layers for one in self.branches)

    @property
    def every_layer(self) -> range:
        """Numbers of all layers, those of branches first, without those of multi-token prediction."""
        return range(self.encoder_layers + self.layers)

    def branch_tokens(self, seq: int) -> list[float]:
        """Tokens that every branch has of a sequence of `seq`."""
        return share_tokens([one.tokens for one in self.branches], seq)

    def stacks(self, seq: int) -> list[tuple[Transformer, float]]:
        """Every branch that has layers, and the model itself for its trunk, each with its tokens of a sequence."""
        parts = zip(self.branches, self.branch_tokens(seq), strict=True)
        return [*((branch, tokens) for branch, tokens in parts if branch.layers), (self, seq)]

    def kind(self, layer: int) -> LayerKind:
        """The kind of `layer` (from 0); `full_every` counts anew in every branch and in the trunk."""
        for branch in self.branches:
            if layer < branch.layers:
                return branch.kind(layer)
            layer -= branch.layers
        return super().kind(layer)

    # -------------------------------------------------------------------------------------- parameters

    @property
    def parameter_parts(self) -> dict[str, int]:
        """Parameters by part, with the vocabulary as given; ``head`` is 0 when the output layer is tied."""
        found = Counter(self._own_parts(None))
        for branch in self.branches:
            found.update(branch.parameter_parts)
        return dict(found)

    @property
    def parameters(self) -> int:
        """All parameters, exactly, with the vocabulary as given (a tied matrix counts once)."""
        return sum(self.parameter_parts.values())

    @property
    def parameters_without_mtp(self) -> int:
        """`parameters` without those of multi-token prediction, as publications print it."""
        return self.parameters - self.parameter_parts["mtp"]

    @property
    def active_parameters(self) -> int:
        """`parameters` that a token passes: top_k routed experts of each layer, and its own branch."""
        return round(self.active_parameters_at(self.seq))

    def active_parameters_at(self, seq: int) -> float:
        """Parameters that a token passes, in the mean over the tokens of a sequence of `seq`."""
        own = sum(self._own_parts(self.moe.top_k if self.moe else None).values())
        shares = zip(self.branches, self.branch_tokens(seq), strict=True)
        return own + sum(branch.parameters * tokens for branch, tokens in shares) / seq

    def _own_parts(self, experts: int | None) -> dict[str, int]:
        """Parameters by part, without those of branches. experts: number of routed experts to count; None: all."""
        h, last, routed = self.hidden, self.is_moe(self.every_layer[-1]), self.kind(self.every_layer[-1]).routed
        return {
            **(dict.fromkeys(self.input_parameters, 0) if self.branches else self.input_parameters),
            "layers": self.every_layer_parameters(experts),
            "projector": 0,
            "final_norm": self.norm_parameters,
            "head": 0 if self.tied else self.vocab * h,
            "mtp": self.mtp * (2 * self.norm_parameters + 2 * h * h + self.layer_parameters(last, experts, routed)),
        }

    # --------------------------------------------------------------------------------------- padding

    def pad_heads(self, ranks: int) -> Model:
        """The model, and its branches, with dummy heads, so that `ranks` have equally many; see `padded_heads`."""
        branches = tuple(one.model_copy(update=one.padded_heads(ranks)) for one in self.branches)
        return self.model_copy(update={**self.padded_heads(ranks), "branches": branches})

    def padded_vocab(self, multiple: int) -> int:
        """The vocabulary rounded up to a multiple; Megatron pads to 128 times the tensor-parallel size."""
        return -(-self.vocab // multiple) * multiple


@contextmanager
def explain_errors(where: str, text: str = "", words: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turns the validation errors of pydantic models of this package into one ModelError.

    Args:
        where: the path of the description in a job, or with `text` the file.
        text: the text of the file, for the line of the field.
        words: the keys of the user for our fields, where they differ.
    """
    try:
        yield
    except ModelError as error:
        field = (words or {}).get(error.where, error.where)
        raise ModelError(error_place(where, field, text), error.rule, error.remedy, error.value) from None
    except ValidationError as error:
        # Unknown keys of a config.json are ignored, so only keys of `Model` are suggested.
        found = explain(error, where, ModelError, text=text, model=None if words else Model)
        missing = [str(each["loc"][-1]) for each in error.errors(include_url=False) if each["type"] == "missing"]
        if len(missing) > 1 and found.value is None and found.where.endswith(missing[0]):
            found = ModelError(found.where, found.rule, f"Add all that are missing: {', '.join(missing)}")
        raise found from None


def error_place(where: str, field: str, text: str = "") -> str:
    """The place of a field for error messages: ``model.heads`` in a job, ``my.yaml:3 heads`` in a file with `text`."""
    return f"{where}:{line_of(text, tuple(field.split('.')))} {field}" if text else f"{where}.{field}"
