"""The linear layers that can have low-rank adapters: their names, in jobs and in programs, and their widths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from meshcast.hardware.errors import PlanError
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.transformer import LayerKind, Transformer, list_further_kinds

WholeTarget = Literal[
    "attn_qkv",
    "attn_proj",
    "attn_q_down",
    "attn_q_up",
    "attn_kv_down",
    "attn_kv_up",
    "mixer_in",
    "mixer_out",
    "mlp_up",
    "mlp_down",
    "shared_up",
    "shared_down",
    "expert_up",
    "expert_down",
    "router",
    "shared_gate",
]
"""The linear layers that can have an adapter: of attention, also latent; of Mamba-2 blocks; of MLPs, shared and routed
experts."""

Part = Literal["attn_q", "attn_k", "attn_v"]
"""Parts of `attn_qkv` that can have an adapter alone; without a latent of queries attn_q is latent attention's."""

Target = Literal[WholeTarget, Part]

TARGETS: tuple[WholeTarget, ...] = get_args(WholeTarget)

PARTS: dict[str, str] = {"attn_q": "q", "attn_k": "k", "attn_v": "v"}
"""The output of a linear layer for queries, keys and values that a part is, by its name."""

UPS: tuple[Target, ...] = ("mlp_up", "shared_up", "expert_up")
DOWNS: tuple[Target, ...] = ("mlp_down", "shared_down", "expert_down")

MODULES: dict[str, tuple[Target, ...]] = {
    **dict.fromkeys(
        ("qkv_proj", "query_key_value", "c_attn", "w_pack", "wqkv", "linear_qkv", "attention_qkv"), ("attn_qkv",)
    ),
    **dict.fromkeys(("q_proj", "linear_q", "linear_q_proj", "wq"), ("attn_q",)),
    **dict.fromkeys(("k_proj", "linear_k", "wk"), ("attn_k",)),
    **dict.fromkeys(("v_proj", "linear_v", "wv"), ("attn_v",)),
    **dict.fromkeys(("q_a_proj", "linear_q_down_proj", "wq_a"), ("attn_q_down",)),
    **dict.fromkeys(("q_b_proj", "linear_q_up_proj", "wq_b"), ("attn_q_up",)),
    **dict.fromkeys(("kv_a_proj_with_mqa", "linear_kv_down_proj", "wkv_a"), ("attn_kv_down",)),
    **dict.fromkeys(("kv_b_proj", "linear_kv_up_proj", "wkv_b"), ("attn_kv_up",)),
    "linear_qkv_down_proj": ("attn_q_down", "attn_kv_down"),
    **dict.fromkeys(("o_proj", "dense", "attn.c_proj", "wo", "linear_proj", "attention_dense"), ("attn_proj",)),
    **dict.fromkeys(("in_proj", "mixer.in_proj"), ("mixer_in",)),
    "mixer.out_proj": ("mixer_out",),
    "out_proj": ("attn_proj",),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w2", "w3"), UPS),
    **dict.fromkeys(("fc1", "c_fc", "dense_h_to_4h", "linear_fc1", "linear_fc1_up", "linear_fc1_gate", "mlp_fc1"), UPS),
    **dict.fromkeys(("down_proj", "dense_4h_to_h", "fc2", "c_proj", "linear_fc2", "mlp_fc2"), DOWNS),
    **dict.fromkeys(("shared_experts.linear_fc1",), ("shared_up",)),
    **dict.fromkeys(("shared_experts.linear_fc2",), ("shared_down",)),
    **dict.fromkeys(("experts.gate_up_proj", "mlp.experts.gate_up_proj", "experts.linear_fc1"), ("expert_up",)),
    **dict.fromkeys(("experts.down_proj", "mlp.experts.down_proj", "experts.linear_fc2"), ("expert_down",)),
    **dict.fromkeys(("gate", "mlp.gate"), ("router",)),
    "shared_expert_gate": ("shared_gate",),
}
"""Linear layers with adapters by the names of modules and of parameters, in models of transformers, torchtitan and
Megatron-Core."""

ALL_LINEAR = "all-linear"
"""The word of PEFT for all linear layers, that of the output left out. Routers with a bias, or beside shared experts
without a gate, are none (modeling_deepseek_v2.py, modeling_gpt_oss.py of Transformers 4.57)."""


def know_module(name: str) -> str | None:
    """Returns a name of modules as `MODULES` has it, also of a name with its path
    (``*.layers.0.mlp.experts.linear_fc1``); None: no linear layer is known by it."""
    parts = name.split(".")
    ends = (".".join(parts[-length:]) for length in range(min(3, len(parts)), 0, -1))
    return next((end for end in ends if end in MODULES or end == ALL_LINEAR), None)


def find_targets(model: Transformer) -> tuple[Target, ...]:
    """Returns the linear layers of a model that can have an adapter, parts of fused ones left out."""
    shapes = (model, *getattr(model, "branches", ()))
    names = {linear.target for shape in shapes for kind in shape.kinds for linear in list_linears(shape, kind)}
    return tuple(target for target in get_args(Target) if target in names)


def usual_targets(model: Transformer) -> tuple[Target, ...]:
    """Returns the linear layers of a model that have adapters where nothing says which: not those of routers."""
    return tuple(target for target in find_targets(model) if target not in ("router", "shared_gate"))


def name_targets(words: Iterable[str], model: Transformer) -> tuple[Target, ...]:
    """Returns the linear layers of a model in place of modules of these names, without repetition; in place of all
    parts of a layer the whole.

    A name of modules that the model does not have is passed over beside others, as PEFT does. Raises PlanError for a
    word of meshcast's that names no linear layer of the model, and where none of the names does.
    """
    words, has = list(words), find_targets(model)
    names = _name_modules(model, has, words)
    named: list[str] = []
    for word in words:
        kept = [target for target in names.get(word, (word,)) if _has(target, has)]
        if not kept and word not in names:
            raise PlanError("train.targets", "the model has no such linear layer", f"It has {', '.join(has)}", word)
        named += kept
    if words and not named:
        raise PlanError("train.targets", "the model has none of these modules", f"It has {', '.join(has)}", words)
    if "attn_qkv" in named or {*named} >= PARTS.keys():
        named = ["attn_qkv", *(target for target in named if target not in PARTS)]
    return tuple(dict.fromkeys(named))  # type: ignore[arg-type]


def _has(target: str, has: Sequence[Target]) -> bool:
    """Returns whether a linear layer, or what it is a part of, is among those of a model."""
    return target in has or (target in PARTS and "attn_qkv" in has)


def _name_modules(model: Transformer, has: tuple[Target, ...], words: Sequence[str]) -> dict[str, tuple[Target, ...]]:
    """Returns what names mean in a model. has: its linear layers.

    Beside a w3, as in InternLM2, w2 leads back from the wide layers; without w3, as in the first Qwen, it leads up.
    """
    moe = model.moe
    has_linear_router = moe is not None and not moe.router_bias and (moe.shared_gate or not moe.shared_ffn)
    plain = tuple(target for target in has if target != "router" or has_linear_router)
    names: dict[str, tuple[Target, ...]] = {**MODULES, ALL_LINEAR: plain}
    if "w3" in words:
        names["w2"] = DOWNS
    if "mixer_out" in has:
        names["out_proj"] = ("mixer_out",)
    return names


class LinearShape(NamedTuple):
    """The widths of a linear layer.

    target: as a job names it.
    inner: width of its input.
    outs: widths of its outputs.
    whole: whether a single matrix computes all outputs.
    experts: number of routed experts that have an adapter each; 0: it is of none.
    """

    target: Target
    inner: int
    outs: tuple[int, ...]
    whole: bool = False
    experts: int = 0


def list_linears(model: Transformer, kind: LayerKind) -> list[LinearShape]:
    """Returns the linear layers of a layer that can have adapters."""
    hidden, ups, shape = model.hidden, 2 if model.gated else 1, model.shape_of(kind)
    linears: list[LinearShape] = []
    if kind.has_attention:
        linears += [*_list_projections(shape), LinearShape("attn_proj", shape.output_width, (hidden,))]
    if kind.has_mamba and (ssm := model.ssm):
        linears += [LinearShape("mixer_in", hidden, (ssm.projected,)), LinearShape("mixer_out", ssm.inner, (hidden,))]
    if kind.has_mlp:
        ffn = shape.dense_ffn
        linears += [LinearShape("mlp_up", hidden, (ffn,) * ups), LinearShape("mlp_down", ffn, (hidden,))]
    if kind.experts and (moe := model.moe):
        ffn, experts, width = moe.expert_ffn, kind.routed, moe.token_width(hidden)
        linears += [
            LinearShape("router", hidden, (experts + moe.zero_experts,)),
            LinearShape("expert_up", width, (ffn,) * ups, experts=experts),
            LinearShape("expert_down", ffn, (width,), experts=experts),
        ]
        if ffn := moe.shared_ffn:
            linears += [LinearShape("shared_up", hidden, (ffn,) * ups), LinearShape("shared_down", ffn, (hidden,))]
            linears += [LinearShape("shared_gate", hidden, (1,))] if moe.shared_gate else []
    return linears


def _list_projections(model: Transformer) -> list[LinearShape]:
    """Returns the linear layers that lead to queries, keys and values."""
    hidden, mla = model.hidden, model.mla
    if mla is None:
        return [LinearShape("attn_qkv", hidden, model.projected_widths, model.fused_qkv)]
    rank, width = mla.q_lora_rank, model.query_width
    queries = [LinearShape("attn_q", hidden, (width,))]
    if rank:
        queries = [LinearShape("attn_q_down", hidden, (rank,)), LinearShape("attn_q_up", rank, (width,))]
    return [
        *queries,
        LinearShape("attn_kv_down", hidden, (mla.kv_lora_rank + mla.qk_rope,)),
        LinearShape("attn_kv_up", mla.kv_lora_rank, (model.heads * (mla.qk_nope + mla.v),)),
    ]


def list_all_linears(model: Model) -> list[tuple[int, LinearShape]]:
    """Returns the linear layers of all layers of a model that can have adapters, with the number of such layers."""
    shapes = [(shape, shape.kinds) for shape in (model, *model.branches)]
    if model.mtp:
        shapes.append((model, Counter(list_further_kinds(model) * model.mtp)))
    kinds = ((shape, kind, count) for shape, counts in shapes for kind, count in counts.items())
    return [(count, linear) for shape, kind, count in kinds for linear in list_linears(shape, kind)]
