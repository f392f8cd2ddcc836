"""Branches of a model: shapes with separate inputs in front of a trunk, such as the vision tower of a multi-modal
model.

A branch embeds its part of a sequence and runs its layers over it. Its output is projected to the hidden size
of the trunk, and the trunk runs over the outputs of all branches, concatenated along the sequence. In a contrastive
model (CLIP) there is no trunk: a vector of each branch and sample is projected to a width that the branches share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from meshcast.hardware.errors import ModelError
from meshcast.hardware.schemas import Field, import_validation_error, model_validator
from meshcast.simulator.models.inputs import Inputs
from meshcast.simulator.models.parts import Count, Flag, Size

OWN = (
    *(
        "layers",
        "seq",
        "name",
        "position_rows",
        "moe",
        "ssm",
        "mtp",
        "mtp_like",
        "left_out",
        "tied",
        "frames",
        "branches",
        "contrastive",
    ),
    *("norm_place", "shared_norm", "sinks", "attention_gate", "softcaps", "norm_residual"),
    *("linear_attention", "cross_attention", "head", "value_dim", "keys_are_values", "value_norm"),
    *("local_attention", "inner_norms", "layer_input", "shared_keys", "reading_ffn", "layer_scale"),
    *("compressed", "hyper_connections", "head_experts", "only", "replaced", "attention_residuals"),
    *("distance_profiles", "token_convolutions", "result_scale", "altup", "shared_block"),
    *("other", "outside", "output"),
    *("diffusion", "modulation", "joint_attention", "variants"),
)
"""Fields of a model that its branches do not inherit."""

FOLLOWING = {
    "hidden": ("kv_heads", "head_dim", "ffn", "mla", "qk_layernorm"),
    "heads": ("kv_heads", "head_dim", "mla", "qk_layernorm"),
    "norm": ("qkv_bias", "proj_bias", "mlp_bias"),
    "dropout": ("score_dropout",),
    "positions": ("rope_share", "full_rope"),
    "input_width": ("window", "attention_chunk", "blocks", "full_every", "full_rope"),
    "bidirectional": ("window", "attention_chunk", "blocks", "full_every", "full_rope", "projected_keys"),
}
"""Fields whose defaults follow from a field: a branch that states the latter does not inherit them."""


class Branch(Inputs):
    """A branch of a model. What it leaves out is inherited, see `inherit_shapes`."""

    layers: Count
    """Transformer layers; 0: its tokens enter the trunk as they are embedded."""
    tokens: Size | None = None
    """Tokens of a sequence of the trunk that are of this branch; None: an equal part of those that no branch states."""
    final_norm: Flag = False
    """A norm behind the last layer."""
    pool: Literal["none", "token", "mean"] = "none"
    """The vector of a sample that a contrastive loss compares: the state of one token, or the mean over all. Default in
    a contrastive model: token."""
    trunk_hidden: Size
    """Hidden size of the trunk, or the width of the vectors that a contrastive loss compares; set by the model."""
    projector: Literal["none", "linear", "mlp", "gated"] = Field(default_factory=lambda fields: _projector(fields))
    """From the hidden size of the branch to that of the trunk: none, one linear layer, or several with GELU between
    (LLaVA 1.5); gated: a linear layer with a bias, one without, a layer norm, GELU, and a gated MLP (GLM-4.1V).
    Default: linear where the sizes differ."""
    projector_bias: Flag = True
    """Biases of the projector."""
    projector_ffn: Size = Field(default_factory=lambda fields: fields.get("trunk_hidden", 1))
    """Inner width of a projector of several layers. Default: the hidden size of the trunk."""
    projector_depth: Annotated[int, Field(strict=True, ge=2, le=8)] = 2
    """Linear layers of a projector of several (LLaVA 1.5: 2, Llama 4: 3)."""
    projector_norm: Flag | Literal["layer", "plain", "each", "behind"] = False
    """An RMS norm in front of the projector (Gemma 3); layer: a layer norm with a bias (InternVL); plain: an RMS norm
    without weights (Gemma 4); each: a layer norm with a bias over every input before it is merged (Kimi K2.5); behind:
    an RMS norm behind the projector (Kimi K3)."""
    deepstack: Count = 0
    """Further projectors of several layers, each behind a layer norm, that read the states of earlier layers and whose
    results are added to the states of the first layers of the trunk (Qwen3-VL, arXiv 2406.04334). They are priced with
    the projector, from the last layer of the branch to the first of the trunk."""
    merge: Size = 1
    """Inputs, neighbours in a sequence, that are one token of the trunk. The layers run over all inputs, `merge` for
    each of `tokens`."""
    merge_by: Literal["concat", "mean", "linear", "convolutions", "mlp"] = "concat"
    """How inputs are merged before the projector: concatenated (Qwen2-VL), to their mean (Gemma 3), by a linear
    layer without bias from all of them to the width of one (Mistral 3); convolutions: by two over 3 x 3 neighbours, of
    which each leaves a quarter with twice the width (Step 3.7); mlp: each passes two linear layers with GELU to the
    width of the trunk, and these are concatenated (MiniMax M3). Both have biases."""
    frozen: Flag = False
    """The branch is not trained, but its projector is."""

    @model_validator(mode="after")
    def _has_projector(self) -> Branch:
        if self.projector == "none" and self.merged_width != self.trunk_hidden:
            rule = f"a projector leads from hidden {self.merged_width} to that of the trunk, {self.trunk_hidden}"
            raise ModelError("projector", rule, "linear or mlp would work", self.projector)
        if self.merge_by == "convolutions" and self.merge != 16:
            rule = "two convolutions leave a sixteenth of the inputs"
            raise ModelError("merge", rule, "Give 16", self.merge)
        if self.deepstack and (self.projector, self.merge_by) != ("mlp", "concat"):
            rule = "further projectors have several layers and read concatenated inputs"
            raise ModelError(
                "deepstack", rule, "Give projector: mlp and merge_by: concat, or leave it out", self.deepstack
            )
        for word in ("moe", "ssm", "mtp", "linear_attention", "hyper_connections", "altup", "head_experts"):
            if getattr(self, word):
                rule = "a branch has layers of attention and an MLP"
                raise ModelError(word, rule, "Leave it out, or give it to the model, whose trunk then has it")
        return self

    @property
    def projector_parameters(self) -> int:
        """Parameters of the projector."""
        sizes, merging = self.projector_sizes, self.merging_sizes
        biased = sum(outputs for _, outputs in sizes) if self.projector_bias else 0
        biased = 3 * self.trunk_hidden if self.projector == "gated" else biased
        width = {"each": self.hidden, "behind": self.trunk_hidden}.get(str(self.projector_norm), self.merged_width)
        norm = width * {"layer": 2, "each": 2, "True": 1, "behind": 1}.get(str(self.projector_norm), 0)
        deep = self.deepstack * 2 * self.merged_width
        merged = sum(outputs * (width + (self.merge_by != "linear")) for width, outputs, _ in merging)
        return merged + sum(width * outputs for width, outputs in sizes) + biased + norm + deep

    @property
    def merged_width(self) -> int:
        """Width of what the projector reads: of inputs that are concatenated, all of them."""
        widths = {"concat": self.merge * self.hidden, "convolutions": 4 * self.hidden}
        return (widths | {"mlp": self.merge * self.trunk_hidden}).get(self.merge_by, self.hidden)

    @property
    def merging_sizes(self) -> list[tuple[int, int, int]]:
        """Widths that each linear layer, or convolution, that merges inputs leads from and to, and how often a token of
        the trunk passes it."""
        h, merge, inner = self.hidden, self.merge, self.projector_ffn
        return {
            "linear": [(merge * h, h, 1)],
            "convolutions": [(9 * h, 2 * h, 4), (9 * 2 * h, 4 * h, 1)],
            "mlp": [(h, inner, merge), (inner, self.trunk_hidden, merge)],
        }.get(self.merge_by, [])

    @property
    def projector_products(self) -> int:
        """Products of a token of the trunk with the elements of the projector's matrices, and of those that merge
        inputs."""
        merging = sum(width * outputs * passes for width, outputs, passes in self.merging_sizes)
        return merging + sum(width * outputs for width, outputs in self.projector_sizes)

    @property
    def projector_sizes(self) -> list[tuple[int, int]]:
        """Widths that each linear layer of the projector leads from and to, those of further projectors included."""
        first, last = self.merged_width, self.trunk_hidden
        inner = self.projector_ffn
        several = [(first, inner), *[(inner, inner)] * (self.projector_depth - 2), (inner, last)]
        gated = [(first, last), (last, last), *[(last, inner)] * 2, (inner, last)]
        sizes = {"none": [], "linear": [(first, last)], "mlp": several, "gated": gated}[self.projector]
        return sizes * (1 + self.deepstack)

    @property
    def longest_input(self) -> int:
        """Positions that a table of learned positions has to have rows for: those of a single of several inputs
        (images)."""
        return min(self.seq, self.attention_chunk or self.seq)

    @property
    def parameter_parts(self) -> dict[str, int]:
        """Parameters by part, with the vocabulary as stated."""
        return {
            **self.input_parameters,
            "layers": self.every_layer_parameters(),
            "final_norm": self.norm_parameters if self.final_norm else 0,
            "projector": self.projector_parameters,
        }

    @property
    def parameters(self) -> int:
        """All parameters, exactly."""
        return sum(self.parameter_parts.values())

    def passed_parameters(self, tokens: float) -> float:
        """Returns the sum over `tokens` of the trunk of the parameters that each passes: those of inputs once for every
        input."""
        projector = self.projector_parameters
        return tokens * ((self.parameters - projector) * self.merge + projector)


def inherit_shapes(stated: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a model whose branches have the fields that they leave out: from the model, except `OWN`,
    and those that follow from a field that the branch states (`FOLLOWING`).

    Raises ModelError for a wrong branch, at its place. Fields of wrong types are left to pydantic.
    """
    branches = stated.get("branches")
    if not isinstance(branches, list | tuple) or not branches:
        return stated
    seq = stated.get("seq")
    if not all(isinstance(branch, Mapping) for branch in branches) or not isinstance(seq, int):
        return stated
    tokens_of_branches = [branch.get("tokens") for branch in branches]
    decodes = [None] if stated.get("cross_attention") in (True, "own-tables") or stated.get("diffusion") else []
    if not all(tokens is None or (isinstance(tokens, int) and tokens > 0) for tokens in tokens_of_branches):
        return stated
    shared = share_tokens([*tokens_of_branches, *decodes], seq, "seq")[: len(tokens_of_branches)]
    inherited = []
    for i, (branch, tokens) in enumerate(zip(branches, shared, strict=True)):
        fields = _inherit_fields(stated, branch, i, int(tokens))
        try:
            Branch.model_validate(fields)
        except ModelError as error:
            raise ModelError(f"branches[{i}].{error.where}", error.rule, error.remedy, error.value) from None
        except import_validation_error():
            pass  # pydantic says so at the place of the field
        inherited.append(fields)
    return {"tied": False, **stated, "branches": inherited}


def _inherit_fields(stated: Mapping[str, Any], branch: Mapping[str, Any], number: int, tokens: int) -> dict[str, Any]:
    """Returns all fields of a branch of a model. tokens: those of the trunk that it yields."""
    contrastive, merge = stated.get("contrastive"), branch.get("merge") or 1
    left = {key for word, keys in FOLLOWING.items() if branch.get(word) is not None for key in keys}
    if stated.get("linear_attention"):  # which branches do not have, nor the layers without it
        left.add("full_every")
    return {
        **{key: value for key, value in stated.items() if key not in {*OWN, *left}},
        **({"bidirectional": True} if branch.get("input_width") is not None else {}),
        **({"pool": "token"} if contrastive is not None else {}),
        **branch,
        "name": branch.get("name", f"{number + 1}"),
        "seq": tokens * (merge if isinstance(merge, int) else 1),
        "trunk_hidden": contrastive or stated.get("hidden"),
    }


def share_tokens(stated: Sequence[int | None], seq: int, where: str = "") -> list[float]:
    """Tokens of a sequence of `seq` that every branch has: as stated, and the rest in equal parts.

    where: the field of `seq`, if it is an error that they do not fit it in whole tokens.
    """
    rest, among = seq - sum(filter(None, stated)), stated.count(None)
    if where and (rest < among or (rest and not among)):
        rule = f"the branches have {seq - rest} tokens of it" + (
            f", and {among} of them share the rest" if among else ""
        )
        raise ModelError(where, rule, f"{seq - rest + among} would work, or other tokens of a branch", seq)
    if where and among and rest % among:
        rule = f"{among} branches have equal parts of {'a sequence' if rest == seq else f'{rest} tokens of it'}"
        near = seq - rest + max(1, round(rest / among)) * among
        raise ModelError(where, rule, f"{near} would work", seq)
    # The mean of padded sequences may be shorter than what branches state: the others then have none.
    return [max(rest, 0) / among if tokens is None else tokens for tokens in stated]


def _projector(fields: Mapping[str, Any]) -> Literal["none", "linear"]:
    return "linear" if fields.get("hidden") != fields.get("trunk_hidden") or (fields.get("merge") or 1) > 1 else "none"
