"""The shape of a model: a decoder, with branches in front of it, an encoder that it attends to, or alone.

With branches (the encoders of a multi-modal model) the layers of the model itself are its trunk. Layers are numbered
branch by branch, and then through the trunk. A contrastive model (CLIP) is two branches without a trunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

from meshcast.hardware.errors import ModelError
from meshcast.hardware.load import explain, line_of
from meshcast.hardware.schemas import import_validation_error, model_validator
from meshcast.simulator.models.branches import Branch, inherit_shapes, share_tokens
from meshcast.simulator.models.diffusion import Diffusion, fill_defaults
from meshcast.simulator.models.diffusion_relations import DiffusionParts, check_diffusion
from meshcast.simulator.models.parts import Count, Flag, Other, Size
from meshcast.simulator.models.transformer import (
    LayerKind,
    Transformer,
    count_stream_parameters,
    count_vectors,
    list_further_kinds,
)
from meshcast.simulator.models.variants import LayerVariant, check_variants, inherit_fields

UNDESCRIBED = {"attention": "Choose the attention kernel in framework.set.attention"}
"""Keys of ``spec.model`` in published runs that are no field, with the remedy. Null, false and none are accepted."""


class Model(Transformer):
    """A decoder-only transformer, from token ids to the loss."""

    layers: Count
    """Transformer layers, L; with branches the layers of the trunk, with `ssm` the blocks of the pattern."""
    branches: tuple[Branch, ...] = ()
    """Branches in front of the trunk, in the order of their parts of a sequence; none: token ids are embedded."""
    cross_attention: Flag | Literal["own-tables"] = False
    """The only branch is an encoder, and every layer of the trunk, a decoder with token ids of its own, attends to its
    output too (T5). Both share the table of the vocabulary, unless the inputs are no token ids (Whisper); own-tables:
    each has its own (T5Gemma). A sequence is the inputs and then the targets."""
    contrastive: Size | None = None
    """Width of the vectors that the contrastive loss of two branches compares: those of all samples of a batch
    (InfoNCE, arXiv 2103.00020, section 2.3). Such a model has no trunk, and its `layers` are 0; None: cross-entropy
    over the vocabulary. The temperature, one number, is no parameter here."""

    diffusion: Diffusion | None = None
    """The ends of a diffusion transformer, whose own inputs are patches; `branches` are texts in front of these, and
    with `cross_attention` the text that its layers attend to. None: token ids and a vocabulary."""

    variants: tuple[LayerVariant, ...] = ()
    """Layers of the trunk whose widths, or other fields, differ from those of the model."""
    outside: Other | None = None
    """What a traced model has outside of its layers beside the parts that these fields describe."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_said(cls, fields: Any) -> Any:
        """Leaves out words for features that the model does not have; branches inherit what they leave out."""
        if not isinstance(fields, Mapping):
            return fields
        for key, remedy in UNDESCRIBED.items():
            if fields.get(key):
                raise ModelError(key, "no block of meshcast describes it", remedy, fields[key])
        said = {key: value for key, value in fields.items() if key not in UNDESCRIBED}
        said |= {"tied": False} if said.get("output") is not None else {}
        return inherit_fields(inherit_shapes(fill_defaults(said)))

    @model_validator(mode="after")
    def _branch_relations(self) -> Model:
        if self.variants:
            check_variants(self, self.variants)
        if self.diffusion:
            check_diffusion(
                self, DiffusionParts(self.diffusion, self.branches, self.variants, self.cross_attention is True)
            )
        elif self.joint_attention or self.modulation or any(v.joint_attention or v.modulation for v in self.variants):
            rule = "the vectors of a sample come from its conditions, and joint attention is that of texts and patches"
            raise ModelError("diffusion", rule, "Give it, or leave modulation and joint_attention out")
        elif self.cross_attention:
            self._decoder_relations()
        if self.contrastive is not None:
            self._contrastive_relations()
        elif not self.layers:
            raise ModelError("layers", "must be greater than or equal to 1", "Give at least 1", self.layers)
        if self.branches:
            self._check_branches()
            if not (self.cross_attention or self.diffusion):
                self._check_trunk()
        return self

    def _check_branches(self) -> None:
        if not (self.encoder_layers or self.diffusion):
            raise ModelError("branches", "one of them has layers", "Give it layers, or leave branches out")
        for i, branch in enumerate(self.branches):
            if branch.frames:
                rule = "the layers of a branch have one axis of positions"
                raise ModelError(f"branches[{i}].frames", rule, "Leave it out", branch.frames)
        for i, branch in enumerate(self.branches):
            if branch.pool != "none" and not self.contrastive:
                rule = "a contrastive loss compares one vector of each sample, and the model has no such loss"
                raise ModelError(f"branches[{i}].pool", rule, "Leave it out, or give the model `contrastive`")

    def _check_trunk(self) -> None:
        """Checks the layers that read the outputs of the branches."""
        texts = [branch for branch in self.branches if not branch.layers and not branch.input_width]
        if self.tied and (len(texts) != 1 or texts[0].hidden != self.hidden or self.contrastive):
            rule = "the output layer shares the matrix of one branch of token ids without layers, as wide as the trunk"
            raise ModelError("tied", rule, "Give null or false, or such a branch", True)
        refused = ("mtp", self.mtp), ("ssm", self.ssm), ("frames", self.frames), ("layer_input", self.layer_input)
        more = ("bidirectional", self.bidirectional), ("hyper_connections or altup", self.streams)
        for word, value in (*refused, *more):
            if value:
                shown = value if isinstance(value, bool | int) else None
                raise ModelError(word, "models with branches are supported without it", "Give null or false", shown)

    def _decoder_relations(self) -> None:
        if len(self.branches) != 1 or not self.branches[0].layers or self.branches[0].tokens is None:
            rule = "the layers of a decoder attend to one branch, an encoder, whose tokens are stated"
            raise ModelError("branches", rule, "Give one branch with layers and tokens, or leave cross_attention out")
        encoder = self.branches[0]
        if encoder.projector != "none" or encoder.merge > 1 or encoder.frozen:
            rule = "the encoder of a decoder is trained, and its output read as it is"
            raise ModelError("branches[0].projector", rule, "Leave projector, merge and frozen out")
        refused: dict[str, object] = {
            **{"moe": self.moe, "mla": self.mla, "ssm": self.ssm, "linear_attention": self.linear_attention},
            **{
                "variants": self.variants,
                "mtp": self.mtp,
                "frames": self.frames,
                "bidirectional": self.bidirectional,
            },
            **{"attention_chunk": self.attention_chunk, "parallel_residual": self.parallel_residual},
            **{"norm_place": self.norm_place == "after", "contrastive": self.contrastive},
            **{"projected_keys": self.projected_keys},
            **{"qk_layernorm": self.qk_layernorm, "sinks": self.sinks, "attention_gate": self.attention_gate},
            **{"value_dim": self.value_dim, "value_norm": self.value_norm},
            **{"keys_are_values": self.keys_are_values, "inner_norms": self.inner_norms},
            **{"layer_input": self.layer_input, "shared_keys": self.shared_keys, "layer_scale": self.layer_scale},
            **{"compressed": self.compressed, "hyper_connections": self.hyper_connections, "altup": self.altup},
            **{"attention_residuals": self.attention_residuals, "blocks": self.blocks},
        }
        for word, value in refused.items():
            if value:
                rule = "decoders that attend to an encoder are supported without it"
                raise ModelError(word, rule, "Leave it out", value if isinstance(value, int) else None)

    def _contrastive_relations(self) -> None:
        if self.layers:
            rule = "a contrastive model has branches and no trunk"
            raise ModelError("layers", rule, "Give `layers: 0`, and layers to both branches", self.layers)
        if len(self.branches) != 2 or not all(branch.layers for branch in self.branches):
            rule = f"a contrastive loss compares two branches that have layers; there are {len(self.branches)} branches"
            raise ModelError("branches", rule, "Give two, for example of images and of texts")
        if self.output:
            raise ModelError("output", "a contrastive model has the vectors of its branches", "Leave it out")
        if self.moe:
            raise ModelError("moe", "a contrastive model has no trunk whose layers had experts", "Leave it out")
        for i, branch in enumerate(self.branches):
            if branch.pool == "none":
                rule = "a contrastive loss compares one vector of each sample"
                raise ModelError(f"branches[{i}].pool", rule, "Give token or mean", branch.pool)
            if branch.frozen:
                rule = "both branches of a contrastive model are trained"
                raise ModelError(f"branches[{i}].frozen", rule, "Leave it out", True)

    # ------------------------------------------------------------------------------------------ layers

    @property
    def shares_table(self) -> bool:
        """Whether an encoder of token ids and its decoder share the table of the vocabulary."""
        return self.cross_attention is True and not self.branches[0].input_width

    @property
    def longest_input(self) -> int:
        return int(self.trunk_tokens(self.seq))

    @property
    def encoder_layers(self) -> int:
        """Layers of all branches, which is the number of the first layer of the trunk."""
        return sum(branch.layers for branch in self.branches)

    @property
    def every_layer(self) -> range:
        """Numbers of all layers, those of branches first, without those of multi-token prediction."""
        return range(self.encoder_layers + self.layers)

    def branches_with(self, layers: range) -> list[int]:
        """Returns the numbers of the branches that have some of these layers."""
        ends = [0, *accumulate(branch.layers for branch in self.branches)]
        return [i for i, (begin, end) in enumerate(pairwise(ends)) if layers.start < end and begin < layers.stop]

    def branch_tokens(self, seq: int) -> list[float]:
        """Tokens that every branch has of a sequence of `seq`."""
        return share_tokens(self.stated_tokens, seq)[: len(self.branches)]

    @property
    def stated_tokens(self) -> list[int | None]:
        """The tokens of every branch, and of a decoder those that are left."""
        rest = [None] if self.cross_attention or self.diffusion else []
        return [*(branch.tokens for branch in self.branches), *rest]

    def trunk_tokens(self, seq: int) -> float:
        """Tokens of a sequence of `seq` that the trunk runs over: all, of a decoder behind an encoder the targets."""
        return seq - sum(self.branch_tokens(seq)) if self.cross_attention else seq

    def stacks(self, seq: int) -> list[tuple[Transformer, float]]:
        """Returns every branch that has layers, and the model itself for its trunk if it has any, each with its tokens
        of a sequence."""
        parts = zip(self.branches, self.branch_tokens(seq), strict=True)
        return [
            *((branch, tokens * branch.merge) for branch, tokens in parts if branch.layers),
            *([(self, self.trunk_tokens(seq))] if self.layers else []),
        ]

    def kind(self, layer: int) -> LayerKind:
        """Returns the kind of `layer` (from 0); `full_every` counts anew in every branch and in the trunk."""
        for branch in self.branches:
            if layer < branch.layers:
                return branch.kind(layer)
            layer -= branch.layers
        variant = self._variant_of.get(layer, 0)
        kind = self.variants[variant - 1].kind(0)._replace(variant=variant) if variant else super().kind(layer)
        if part := self.attention_residuals:
            follows = layer > 0 and part.opens(layer - 1)
            return kind._replace(sums=part.count_sums(layer), opens=part.opens(layer), follows=follows)
        return kind

    @cached_property
    def _variant_of(self) -> dict[int, int]:
        """The number of the variant, from 1, of every layer of the trunk that is one."""
        return {layer: i for i, variant in enumerate(self.variants, 1) for layer in variant.numbers}

    @property
    def _plain_layers(self) -> Sequence[int]:
        return [layer for layer in range(self.layers) if layer not in self._variant_of]

    def every_layer_parameters(self, experts: int | None = None) -> int:
        varied = (
            len(variant.numbers) * variant.every_layer_parameters(experts and variant.top_k)
            for variant in self.variants
        )
        without = self.layers - self.diffusion.count_cross(self.layers) if self.diffusion else 0
        return super().every_layer_parameters(experts) + sum(varied) - without * self._cross_parameters

    # -------------------------------------------------------------------------------------- parameters

    @property
    def parameter_parts(self) -> dict[str, int]:
        """Parameters by part, with the vocabulary as stated; ``head`` is 0 when the output layer is tied."""
        parts = Counter(self._own_parts(None))
        for branch in self.branches:
            parts.update(branch.parameter_parts)
        return dict(parts)

    @property
    def parameters(self) -> int:
        """All parameters, exactly, with the vocabulary as stated (a tied matrix counts once)."""
        return sum(self.parameter_parts.values())

    @property
    def active_parameters(self) -> int:
        """`parameters` that a token passes: top_k routed experts of each layer, and its branch."""
        return round(self.active_parameters_at(self.seq))

    def active_parameters_at(self, seq: int) -> float:
        """Counts the parameters that a token passes, in the mean over the tokens of a sequence of `seq`."""
        trunk = sum(self._own_parts(self.moe.top_k if self.moe else None).values()) * self.trunk_tokens(seq) / seq
        shares = zip(self.branches, self.branch_tokens(seq), strict=True)
        passed = trunk + sum(branch.passed_parameters(tokens) for branch, tokens in shares) / seq
        return passed - self._idle_parameters(seq)

    def _idle_parameters(self, seq: int) -> float:
        """Counts the parameters of a diffusion transformer that a token does not pass, in the mean over the tokens of a
        sequence: in layers of joint attention those of the other stream, and what a sample passes once, but for its
        share of it."""
        if not (self.diffusion and self.modulation):
            return 0.0
        joined = 0.0 if self.cross_attention else sum(self.branch_tokens(seq)) / seq
        outside = self.diffusion.condition_parameters(self.hidden, self.modulation)
        once, others = outside + self.diffusion.final_parameters(self.hidden, 0, self.modulation), 0.0
        for shape, layers in self._shapes:
            modulating = shape.modulation.layer_parameters(self.hidden, count_vectors(shape)) if shape.modulation else 0
            streams = shape.layer_parameters() - modulating
            if shape.joint_attention:
                of_branches = count_stream_parameters(shape)
                others += layers * ((streams - of_branches) * joined + of_branches * (1 - joined))
            once += layers * modulating
        return others + once * (self.trunk_tokens(seq) - 1) / seq

    @property
    def _shapes(self) -> list[tuple[Transformer, int]]:
        """The model, and each of its variants, with the number of its layers in the trunk."""
        varied = [(variant, len(variant.numbers)) for variant in self.variants]
        return [(self, self.layers - sum(layers for _, layers in varied)), *varied]

    def _own_parts(self, experts: int | None) -> dict[str, int]:
        """Parameters by part, without those of branches. experts: number of routed experts to count; None: all."""
        h = self.hidden
        kinds = list_further_kinds(self) if self.mtp else ()
        further = sum(self._kind_parameters(kind, experts) for kind in kinds)
        return {
            **self._input_parts(),
            "layers": self.every_layer_parameters(experts),
            "projector": 0,
            **({"outside": self.outside.parameters} if self.outside else {}),
            "final_norm": self._final_norms() if self.layers else 0,
            **({"streams": self.hyper_connections.last_parameters(h)} if self.hyper_connections else {}),
            **({"streams": self.altup.end_parameters(h)} if self.altup else {}),
            **({"streams": 2 * h} if self.attention_residuals else {}),
            "head": self._head_parameters(),
            "mtp": self.mtp * (2 * self.norm_parameters + 2 * h * h + further),
        }

    def _final_norms(self) -> int:
        if self.diffusion and self.modulation:
            return self.diffusion.final_parameters(self.hidden, self.norm_parameters, self.modulation)
        return self.norm_parameters

    def _head_parameters(self) -> int:
        if self.contrastive:
            return 0
        if self.diffusion:
            return (self.hidden + 1) * self.diffusion.outputs
        square = self.hidden * (self.hidden + 1) if {"transform", "dense"} & {*self.head} else 0
        square += self.norm_parameters * ("transform" in self.head)
        logits = (self.output.classes or 0) if self.output else self.vocab
        return square + logits * ((0 if self.tied else self.hidden) + ("bias" in self.head))

    def _input_parts(self) -> dict[str, int]:
        """Parameters in front of the layers of the trunk, by part; with branches their inputs come from these."""
        if self.diffusion and self.modulation:
            conditions = self.diffusion.condition_parameters(self.hidden, self.modulation)
            patches = (self.diffusion.inputs + 1) * self.hidden
            return {**dict.fromkeys(self.input_parameters, 0), "embedding": patches + conditions}
        if not self.branches:
            return self.input_parameters
        none = dict.fromkeys(self.input_parameters, 0)
        if not self.cross_attention:
            return none
        return self.input_parameters | ({"embedding": 0} if self.shares_table else {})

    @property
    def _cross_parameters(self) -> int:
        """Parameters of attention to an encoder in a layer: a norm, projections and their biases; 0 without it."""
        if not self.cross_attention:
            return 0
        widths = self.query_width + self.key_width + self.value_width
        projections = self.hidden * widths + (self.output_width + self.proj_bias) * self.hidden
        projections += self._bias_width(widths)
        if self.diffusion:
            normed = {"all": self.query_width + self.key_width, True: 2 * self.head_dim}.get(self.qk_layernorm, 0)
            return projections + normed + 2 * self.hidden * self.diffusion.cross_norm
        return self.norm_parameters * (2 if self.norm_place == "both" else 1) + projections

    def layer_parameters(
        self, moe: bool = False, experts: int | None = None, of: int | None = None, linear: bool = False
    ) -> int:
        return super().layer_parameters(moe, experts, of, linear) + self._cross_parameters

    # --------------------------------------------------------------------------------------- padding

    def pad_heads(self, ranks: int) -> Model:
        """Returns the model, and its branches, with dummy heads, so that `ranks` have equally many; see
        `padded_heads`."""
        branches = tuple(branch.model_copy(update=branch.padded_heads(ranks)) for branch in self.branches)
        return self.model_copy(update={**self.padded_heads(ranks), "branches": branches})

    def padded_vocab(self, multiple: int) -> int:
        """Returns the vocabulary rounded up to a multiple; Megatron pads to 128 times the tensor-parallel size."""
        return -(-self.vocab // multiple) * multiple


def count_patches(model: Model, seq: int) -> float:
    """Counts the tokens of a sequence that are patches of a diffusion transformer, behind those of branches."""
    return seq - sum(model.branch_tokens(seq))


def sharded_lengths(model: Model, seq: int) -> list[int]:
    """Returns the numbers of tokens of a sequence of `seq` that ranks which shard sequences have equal parts of: of a
    diffusion transformer those of its texts and its patches."""
    if model.diffusion is None or model.cross_attention:
        return [round(model.trunk_tokens(seq))]
    return [*map(round, model.branch_tokens(seq)), round(count_patches(model, seq))]


@contextmanager
def explain_errors(where: str, text: str = "", words: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turns the validation errors of pydantic models of this package into a ModelError.

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
    except import_validation_error() as error:
        # Unknown keys of a config.json are ignored, so only keys of `Model` are suggested.
        model_error = explain(error, where, ModelError, text=text, model=None if words else Model)
        missing = [str(each["loc"][-1]) for each in error.errors(include_url=False) if each["type"] == "missing"]
        if len(missing) > 1 and model_error.value is None and model_error.where.endswith(missing[0]):
            model_error = ModelError(
                model_error.where, model_error.rule, f"Add all that are missing: {', '.join(missing)}"
            )
        raise model_error from None


def error_place(where: str, field: str, text: str = "") -> str:
    """Returns the place of a field for error messages: ``model.heads`` in a job, ``my.yaml:3 heads`` in a file with
    `text`."""
    return f"{where}:{line_of(text, tuple(field.split('.')))} {field}" if text else f"{where}.{field}"
