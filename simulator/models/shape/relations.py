"""Relations between the fields of a stack of transformer layers; each function raises a ModelError if it is broken."""

from __future__ import annotations

import math
from collections.abc import Iterable

from meshcast.hardware.errors import ModelError
from meshcast.simulator.models.parts import MLA, LinearAttention, MoEShape, StateSpace
from meshcast.simulator.models.rare_parts import BlockAttention, CompressedAttention, SharedBlock
from meshcast.simulator.models.shape.rare_fields import RareFields


def check_relations(shape: RareFields) -> None:
    """Raises ModelError if any of the relations is broken."""
    _check_heads(shape)
    _check_mask(shape)
    if shape.frames:
        _check_video(shape, shape.frames)
    _check_positions(shape)
    _check_further(shape, shape.ssm)
    _check_output(shape)
    if shape.mla:
        _check_latent(shape, shape.mla)
    if shape.moe:
        _check_expert(shape, shape.moe)
    if shape.ssm:
        _check_hybrid(shape, shape.ssm)
    if shape.projected_keys:
        _check_projection(shape, shape.projected_keys)
    _check_norms(shape)
    if shape.linear_attention:
        _check_linear(shape, shape.linear_attention)
    _check_variants(shape)
    if shape.sinks and shape.mla and not shape.attention_gate:
        rule = "latent attention is supported with sinks beside a gate"
        raise ModelError("sinks", rule, "Leave it out, or give attention_gate", True)
    _check_rare_parts(shape)


def _check_rare_parts(shape: RareFields) -> None:
    if shape.only or shape.replaced:
        _check_pruned(shape)
    if shape.compressed:
        _check_compressed(shape, shape.compressed)
    if shape.blocks:
        _check_blocks(shape, shape.blocks)
    if shape.hyper_connections:
        _check_streams(shape)
    if shape.altup:
        _check_altup(shape)
    if shape.attention_residuals:
        _check_sums(shape)
    if shape.shared_block:
        _check_shared_block(shape, shape.shared_block)
    if shape.distance_profiles or shape.token_convolutions:
        _check_distances(shape)
    if shape.head_experts:
        _check_head_experts(shape, shape.head_experts)


def _check_pruned(shape: RareFields) -> None:
    """Checks layers that lack a block, or have a linear layer in its place."""
    if shape.only and {*shape.replaced} - {shape.only}:
        rule = f"its layers have {shape.only} alone, and the other block is not there to be replaced"
        raise ModelError("replaced", rule, "Leave it out, or only", list(shape.replaced))
    others = ("ssm", shape.ssm), ("moe", shape.moe), ("linear_attention", shape.linear_attention)
    streams = ("hyper_connections", shape.hyper_connections), ("altup", shape.altup), ("frames", shape.frames)
    more = ("layer_input", shape.layer_input), ("layer_scale", shape.layer_scale), ("modulation", shape.modulation)
    norms = ("norm_place", shape.norm_place != "before"), ("norm_residual", shape.norm_residual)
    both = ("parallel_residual", shape.parallel_residual), ("local_attention", shape.local_attention)
    rest = ("shared_keys", shape.shared_keys), ("mla.index", shape.mla and shape.mla.index), ("mtp", shape.mtp)
    kinds = ("token_convolutions", shape.token_convolutions), ("blocks", shape.blocks)
    rule = "layers that lack a block, or have a linear layer in its place, are supported without it"
    _refuse((*others, *streams, *more, *norms, *both, *rest, *kinds), rule)


def _check_compressed(shape: RareFields, part: CompressedAttention) -> None:
    if shape.kv_heads != 1:
        rule = "with compressed all heads share a key, which is the value"
        raise ModelError("kv_heads", rule, "Give 1", shape.kv_heads)
    if shape.window is None:
        rule = "attention to compressed entries is beside that to a window"
        raise ModelError("window", rule, "Give the tokens of the window")
    if shape.heads % part.out_groups:
        rule = f"each group has equally many of the {shape.heads} heads"
        remedy = f"{math.gcd(shape.heads, part.out_groups)} would work"
        raise ModelError("compressed.out_groups", rule, remedy, part.out_groups)
    if part.rate is None and (part.index or part.overlaps):
        rule = "it says how many tokens an entry stands for"
        raise ModelError("compressed.rate", rule, "Give it, or leave index and overlaps out")
    others = ("mla", shape.mla), ("ssm", shape.ssm), ("linear_attention", shape.linear_attention), ("mtp", shape.mtp)
    more = ("attention_gate", shape.attention_gate), ("local_attention", shape.local_attention)
    masks = ("bidirectional", shape.bidirectional), ("projected_keys", shape.projected_keys)
    heads = ("keys_are_values", shape.keys_are_values), ("value_dim", shape.value_dim), ("frames", shape.frames)
    plain = ("qk_layernorm", shape.qk_layernorm), ("positions", shape.positions != "rope")
    other = ("qkv_bias", shape.qkv_bias), ("full_every", shape.full_every), ("shared_keys", shape.shared_keys)
    inner = (
        ("inner_norms", shape.inner_norms),
        ("value_norm", shape.value_norm),
        ("softcaps", "attention" in shape.softcaps),
    )
    rule = "attention to compressed entries is supported without it"
    _refuse((*others, *more, *masks, *heads, *plain, *other, *inner), rule)


def _check_blocks(shape: RareFields, part: BlockAttention) -> None:
    if part.stride > part.length or part.size % part.stride:
        rule = f"each of the {part.size} tokens of a block is in an entry, and as many entries begin in every block"
        remedy = f"{math.gcd(part.size, part.length)} would work"
        raise ModelError("blocks.stride", rule, remedy, part.stride)
    if part.branches != (part.window is not None):
        rule = "branches are attention to blocks, to entries and to a window"
        raise ModelError("blocks.window", rule, "Give both branches and window, or neither", part.window)
    words = {"coarse": part.coarse, "each_head": part.each_head}
    of_branches = {"own_keys": part.own_keys, "pool": part.pool if part.pool != "mean" else None}
    if part.from_tokens and (part.index or part.branches):
        rule = "an indexer and branches work on sequences of any length"
        raise ModelError("blocks.from_tokens", rule, "Leave it out", part.from_tokens)
    if part.index:
        rule = "an indexer scores keys, and no entries"
        entries = {word: size for word, size in (("length", part.length), ("stride", part.stride)) if size != part.size}
        words |= {**entries, "branches": part.branches}
        _refuse(((f"blocks.{word}", value) for word, value in (words | of_branches).items()), rule)
    elif part.branches:
        rule = "of branches all heads of a key/value head choose the same blocks, by scores of their attention"
        _refuse(((f"blocks.{word}", value) for word, value in words.items()), rule)
    else:
        rule = "only of branches are entries attended to"
        _refuse(((f"blocks.{word}", value) for word, value in of_branches.items()), rule)
    if shape.linear_attention and shape.linear_attention.layers is None:
        rule = "the layers of full_every, all that have no linear attention, attend to everything"
        raise ModelError("linear_attention.layers", rule, "Name the layers with linear attention, or leave blocks out")
    others = ("mla", shape.mla), ("ssm", shape.ssm), ("compressed", shape.compressed), ("window", shape.window)
    masks = ("attention_chunk", shape.attention_chunk), ("bidirectional", shape.bidirectional), ("frames", shape.frames)
    heads = ("shared_keys", shape.shared_keys), ("head_experts", shape.head_experts), ("sinks", shape.sinks)
    more = ("distance_profiles", shape.distance_profiles), ("projected_keys", shape.projected_keys)
    inner = ("softcaps", "attention" in shape.softcaps), ("joint_attention", shape.joint_attention)
    rule = "attention to blocks of keys is supported without it"
    _refuse((*others, *masks, *heads, *more, *inner, ("score_dropout", shape.score_dropout)), rule)


def _check_shared_block(shape: RareFields, part: SharedBlock) -> None:
    if not shape.ssm or not shape.gated:
        rule = "a shared block, with a gated MLP, is in front of a Mamba block"
        raise ModelError("shared_block", rule, "Give ssm and gated: true, or leave it out")
    if part.adapts_attention and not part.adapter_rank:
        rule = "adapters of attention have the width adapter_rank"
        raise ModelError("shared_block.adapter_rank", rule, "Give it, or leave adapts_attention out")
    others = ("mla", shape.mla), ("compressed", shape.compressed), ("qkv_bias", shape.qkv_bias), ("moe", shape.moe)
    more = ("proj_bias", shape.proj_bias), ("mlp_bias", shape.mlp_bias), ("window", shape.window)
    heads = ("attention_gate", shape.attention_gate), ("sinks", shape.sinks), ("qk_layernorm", shape.qk_layernorm)
    rest = ("inner_norms", shape.inner_norms), ("dropout", bool(shape.dropout)), ("value_dim", shape.value_dim)
    _refuse((*others, *more, *heads, *rest), "shared blocks are supported without it")


def _check_altup(shape: RareFields) -> None:
    if not shape.layer_input or shape.norm_place != "both":
        rule = "layers over the first of several streams have inputs of their own, and norms around both blocks"
        raise ModelError("altup", rule, "Give layer_input and norm_place: both, or leave it out")
    others = ("hyper_connections", shape.hyper_connections), ("moe", shape.moe), ("layer_scale", shape.layer_scale)
    more = ("linear_attention", shape.linear_attention), ("dropout", bool(shape.dropout)), ("frames", shape.frames)
    _refuse((*others, *more), "layers over the first of several streams are supported without it")


def _check_distances(shape: RareFields) -> None:
    if shape.distance_profiles and shape.positions != "none":
        rule = "a bias by distance is in place of positions"
        raise ModelError("positions", rule, "Give none", shape.positions)
    if shape.token_convolutions and not shape.distance_profiles:
        rule = "convolutions of keys and values are supported beside a bias by distance"
        raise ModelError(
            "token_convolutions", rule, "Leave it out, or give distance_profiles", shape.token_convolutions
        )
    others = (
        ("mla", shape.mla),
        ("ssm", shape.ssm),
        ("compressed", shape.compressed),
        ("shared_keys", shape.shared_keys),
    )
    more = ("parallel_residual", shape.parallel_residual), ("linear_attention", shape.linear_attention)
    heads = ("value_dim", shape.value_dim), ("keys_are_values", shape.keys_are_values), ("mtp", shape.mtp)
    inner = ("inner_norms", shape.inner_norms), ("attention_gate", shape.attention_gate), ("sinks", shape.sinks)
    streams = ("hyper_connections", shape.hyper_connections), ("head_experts", shape.head_experts)
    masks = ("attention_chunk", shape.attention_chunk), ("bidirectional", shape.bidirectional), ("frames", shape.frames)
    rule = "scores with a bias by distance are supported without it"
    _refuse((*others, *more, *heads, *inner, *streams, *masks, ("projected_keys", shape.projected_keys)), rule)


def _check_head_experts(shape: RareFields, experts: int) -> None:
    if experts < shape.heads // shape.kv_heads:
        rule = f"a token passes {shape.heads // shape.kv_heads} of them, heads over kv_heads, each at most once"
        raise ModelError("head_experts", rule, "Give more, or fewer heads", experts)
    others = ("mla", shape.mla), ("ssm", shape.ssm), ("compressed", shape.compressed), ("qkv_bias", shape.qkv_bias)
    more = ("attention_gate", shape.attention_gate), ("shared_keys", shape.shared_keys), ("sinks", shape.sinks)
    heads = ("value_dim", shape.value_dim), ("keys_are_values", shape.keys_are_values), ("mtp", shape.mtp)
    inner = ("inner_norms", shape.inner_norms), ("projected_keys", shape.projected_keys)
    _refuse((*others, *more, *heads, *inner), "a mixture of attention heads is supported without it")


def _check_streams(shape: RareFields) -> None:
    others = ("ssm", shape.ssm), ("parallel_residual", shape.parallel_residual), ("mtp", shape.mtp)
    norms = ("norm_place", shape.norm_place != "before"), ("norm_residual", shape.norm_residual)
    biases = ("proj_bias", shape.proj_bias), ("mlp_bias", shape.mlp_bias), ("dropout", bool(shape.dropout))
    more = ("layer_input", shape.layer_input), ("layer_scale", shape.layer_scale), ("frames", shape.frames)
    experts = ("moe.norm", shape.moe and shape.moe.norm), ("linear_attention", shape.linear_attention)
    _refuse((*others, *norms, *biases, *more, *experts), "several residual streams are supported without it")


def _check_sums(shape: RareFields) -> None:
    others = ("ssm", shape.ssm), ("parallel_residual", shape.parallel_residual), ("mtp", shape.mtp)
    streams = ("hyper_connections", shape.hyper_connections), ("altup", shape.altup), ("only", shape.only)
    norms = ("norm_place", shape.norm_place != "before"), ("norm_residual", shape.norm_residual)
    biases = ("proj_bias", shape.proj_bias), ("mlp_bias", shape.mlp_bias), ("dropout", bool(shape.dropout))
    more = ("layer_input", shape.layer_input), ("layer_scale", shape.layer_scale), ("frames", shape.frames)
    linear = shape.linear_attention
    mixers = (
        ("linear_attention", linear and (linear.out_bias or linear.norm_place)),
        ("moe.norm", _norms_experts(shape)),
    )
    rest = ("token_convolutions", shape.token_convolutions), ("result_scale", shape.result_scale)
    rule = "attention residuals are supported without it"
    _refuse((*others, *streams, *norms, *biases, *more, *mixers, *rest), rule)


def _norms_experts(shape: RareFields) -> bool:
    return bool(shape.moe and shape.moe.norm is True)


def _check_further(shape: RareFields, ssm: StateSpace | None) -> None:
    """Checks the layers of multi-token prediction."""
    if "transform" in shape.head and shape.mtp:
        rule = "heads of multi-token prediction are supported without a transformation"
        raise ModelError("head", rule, "Leave transform or mtp out", list(shape.head))
    if shape.mtp_like is not None and (ssm or not shape.mtp or shape.mtp_like >= shape.layers):
        rule = f"it is the number of a layer, from 0 to {shape.layers - 1}, of a model with mtp and without ssm"
        raise ModelError("mtp_like", rule, "Name one, or leave it out", shape.mtp_like)
    if ssm and shape.mtp and not ssm.mtp_pattern:
        rule = "the layers of multi-token prediction of a model with state-space layers have a pattern of their own"
        raise ModelError("ssm.mtp_pattern", rule, 'Give it (Nemotron 3: "*E"), or leave mtp out')
    if ssm and ssm.mtp_pattern and "E" in ssm.mtp_pattern and not shape.moe:
        raise ModelError("ssm.mtp_pattern", "the model has no experts", "Give moe, or leave E out", ssm.mtp_pattern)


def _check_output(shape: RareFields) -> None:
    if ("transform" if shape.output else "dense") in shape.head:
        rule = "in front of logits of the vocabulary is transform, in front of classes or vectors dense"
        raise ModelError("head", rule, "Give the other, or leave it out", list(shape.head))
    if shape.output and shape.output.classes is None and not shape.output.pools_states:
        rule = "the vector of a sequence is the state of one of its tokens or their mean"
        raise ModelError("output.pool", rule, "Give token or mean, or classes", shape.output.pool)
    if shape.output:
        _refuse((("mtp", shape.mtp),), "it is of logits of the vocabulary")


def _check_variants(shape: RareFields) -> None:
    """Checks what few models have: other heads in layers with a window, norms inside of blocks or behind experts."""
    values = ("value_dim", shape.value_dim), ("keys_are_values", shape.keys_are_values)
    if shape.mla:
        more = ("value_norm", shape.value_norm), ("local_attention", shape.local_attention)
        _refuse((*values, *more), "latent attention is supported without it")
    if shape.local_attention:
        if shape.window is None and shape.attention_chunk is None:
            rule = "it describes the layers with a window or chunks, and none has them"
            raise ModelError("local_attention", rule, "Give window, or leave it out")
        _check_heads(shape.in_layers(local=True, reads_keys=False))
        _check_positions(shape.in_layers(local=True, reads_keys=False))
    if shape.shared_keys:
        _check_shared_keys(shape)
    if shape.layer_input:
        others = ("parallel_residual", shape.parallel_residual), ("ssm", shape.ssm), ("mtp", shape.mtp)
        _refuse(others, "inputs of layers are supported without it")
    if shape.layer_scale:
        parts = ("ssm", shape.ssm), ("moe", shape.moe), ("parallel_residual", shape.parallel_residual)
        _refuse(parts, "scales of what a layer adds are supported without it")
    if shape.keys_are_values and shape.value_dim not in (None, shape.head_dim):
        raise ModelError("value_dim", "values are the keys, as wide as these", "Leave it out", shape.value_dim)
    if shape.activation == "xielu" and (shape.gated or shape.moe):
        rule = "xielu is supported in MLPs that are not gated"
        raise ModelError("activation", rule, "Give gated: false, and no moe", shape.activation)
    if shape.inner_norms and (shape.moe or shape.mla):
        raise ModelError("inner_norms", "it is supported without experts and latent attention", "Leave it out", True)


def _check_shared_keys(shape: RareFields) -> None:
    others = ("mla", shape.mla), ("ssm", shape.ssm), ("linear_attention", shape.linear_attention), ("mtp", shape.mtp)
    more = ("moe", shape.moe), ("frames", shape.frames), ("projected_keys", shape.projected_keys)
    wide = ("qk_layernorm", shape.qk_layernorm == "all")
    _refuse((*others, *more, wide), "layers that read the keys of another are supported without it")
    if shape.shared_keys >= shape.layers:
        rule = f"the first of the {shape.layers} layers has keys and values of its own"
        raise ModelError("shared_keys", rule, f"Give at most {shape.layers - 1}", shape.shared_keys)


def _check_heads(shape: RareFields) -> None:
    if shape.mla is None and "head_dim" not in shape.model_fields_set and shape.hidden % shape.heads:
        raise ModelError(
            "hidden",
            f"it must be a multiple of heads ({shape.heads}) when head_dim is not given",
            f"Give head_dim, or hidden {shape.hidden // shape.heads * shape.heads or shape.heads}",
            shape.hidden,
        )
    if shape.heads % shape.kv_heads:
        divisors = [n for n in range(1, min(shape.heads, 1024) + 1) if shape.heads % n == 0]
        raise ModelError(
            "kv_heads",
            f"it must divide heads ({shape.heads}), for each key/value head serves equally many queries",
            f"Possible: {', '.join(map(str, divisors[:20]))}",
            shape.kv_heads,
        )


def _check_positions(shape: RareFields) -> None:
    if shape.positions == "rope" and shape.mla is None and (rotated := int(shape.head_dim * shape.rope_share)) % 2:
        if shape.rope_share == 1:
            rule, remedy = "rope rotates pairs of elements, so it must be even", "Give an even head_dim"
            raise ModelError("head_dim", rule, remedy, shape.head_dim)
        rule = f"rope rotates pairs of elements; of heads {shape.head_dim} wide it would rotate {rotated}"
        raise ModelError("rope_share", rule, f"Give an even number over {shape.head_dim}", shape.rope_share)
    if shape.positions == "learned" and shape.position_rows < shape.longest_input:
        rule = f"the table of positions needs a row for each token of a sequence (seq {shape.longest_input})"
        raise ModelError("position_rows", rule, "Give at least as many, or leave it out", shape.position_rows)


def _check_mask(shape: RareFields) -> None:
    if shape.window is not None and shape.attention_chunk is not None:
        rule = "a layer has a window or chunks"
        raise ModelError("attention_chunk", rule, "Leave one of them out", shape.attention_chunk)
    if shape.bidirectional and shape.window is not None:
        rule = "a token of a bidirectional layer attends to all tokens, or to those of its chunk"
        raise ModelError("window", rule, "Leave it out, or give attention_chunk", shape.window)
    limits = shape.window, shape.attention_chunk, shape.linear_attention, shape.blocks
    if shape.full_every and not any(limits) and shape.full_rope:
        rule = "without a window, chunks, blocks or linear attention every layer attends to everything"
        remedy = "Give window, attention_chunk or `full_rope: false` too, or leave full_every out"
        raise ModelError("full_every", rule, remedy, shape.full_every)
    if isinstance(shape.full_every, tuple) and shape.layers:  # the tokens of a branch may enter the trunk as they are
        _check_layers("full_every", shape.full_every, shape.layers)
    if not shape.full_rope and (not shape.full_every or shape.positions != "rope" or shape.mla):
        rule = "without RoPE can be the layers of full_every, where positions are rope and there is no mla"
        raise ModelError("full_rope", rule, "Leave it out", False)


def _check_layers(word: str, numbers: tuple[int, ...], layers: int) -> None:
    if list(numbers) != sorted({*numbers}) or (numbers and numbers[-1] >= layers):
        rule = f"it names layers in ascending order, each once, below {layers}"
        raise ModelError(word, rule, "Write them as [first, second, ...]", list(numbers))


def _check_projection(shape: RareFields, positions: int) -> None:
    if not shape.bidirectional:
        rule = "projected keys are of all positions, so that attention is bidirectional"
        raise ModelError("projected_keys", rule, "Give bidirectional: true", positions)
    for word, value in (("attention_chunk", shape.attention_chunk), ("frames", shape.frames), ("ssm", shape.ssm)):
        if value:
            shown = value if isinstance(value, int) else None
            raise ModelError(word, "models with projected keys are supported without it", "Leave it out", shown)


def _check_video(shape: RareFields, frames: int) -> None:
    if shape.modulation is None and shape.seq % frames:  # else texts count in it, too
        near = max(1, round(shape.seq / frames)) * frames
        raise ModelError("seq", f"every one of {frames} frames has equally many tokens", f"Give {near}", shape.seq)
    if not shape.bidirectional:
        rule = "attention within frames and across frames is bidirectional"
        raise ModelError("bidirectional", rule, "Leave it out", False)
    others = ("window", shape.window), ("attention_chunk", shape.attention_chunk), ("ssm", shape.ssm)
    for word, value in (*others, ("mtp", shape.mtp)):
        if value:
            shown = value if isinstance(value, int) else None
            raise ModelError(word, "models of videos (frames) are supported without it", "Leave it out", shown)


def _check_latent(shape: RareFields, mla: MLA) -> None:
    if shape.kv_heads != shape.heads:
        rule = f"with mla keys and values are expanded for every head ({shape.heads})"
        raise ModelError("kv_heads", rule, "Leave it out", shape.kv_heads)
    if shape.head_dim != mla.v:
        rule = f"with mla the widths of a head are given there; this one is its v ({mla.v})"
        raise ModelError("head_dim", rule, "Leave it out", shape.head_dim)
    if shape.positions not in ("rope", "none"):
        rule = "latent attention has rope, or no positions"
        raise ModelError("positions", rule, "Give `positions: rope`", shape.positions)
    if mla.qk_rope % 2:
        rule, remedy = "rope rotates pairs of elements, so it must be even", "Give an even width"
        raise ModelError("mla.qk_rope", rule, remedy, mla.qk_rope)
    if mla.index and not mla.q_lora_rank:
        rule = "the queries of the indexer are projected from the latent of queries"
        raise ModelError("mla.q_lora_rank", rule, "Give it, or leave mla.index out")
    if mla.index and mla.index.shared_by and (0 in mla.index.shared_by or max(mla.index.shared_by) >= shape.layers):
        rule = f"it names layers from 1 to {shape.layers - 1}, behind one with an indexer"
        raise ModelError("mla.index.shared_by", rule, "Name such layers", list(mla.index.shared_by))
    if isinstance(shape.qk_layernorm, str):
        raise ModelError("qk_layernorm", "with mla norms are over latents", "Give true or false", shape.qk_layernorm)
    if shape.qkv_bias:
        raise ModelError("qkv_bias", "latent attention is supported without biases", "Leave it out", True)


def _check_expert(shape: RareFields, moe: MoEShape) -> None:
    if moe.top_k > (least := min(moe.expert_counts)):
        rule = f"a token passes each expert at most once, and there are {least}"
        raise ModelError("moe.top_k", rule, f"Give at most {least}", moe.top_k)
    firsts = [first for first, _ in moe.experts_from]
    if firsts != sorted({*firsts}) or (firsts and firsts[-1] >= shape.layers):
        rule = f"its pairs name layers in ascending order, each once, below {shape.layers}"
        raise ModelError("moe.experts_from", rule, "Write [[first layer, experts], ...]", firsts)
    if moe.clamped and not shape.gated:
        raise ModelError(
            "moe.clamped", "the model's activation is not gated", "Give gated: true, or leave it out", True
        )
    _check_weights_of_experts(moe)
    if moe.norm:
        _check_norm_of_experts(shape, moe)
    if moe.first_dense > shape.layers:
        rule = f"there are {shape.layers} layers in all"
        raise ModelError("moe.first_dense", rule, f"Give at most {shape.layers}", moe.first_dense)
    if bool(moe.shared_experts) != bool(moe.shared_ffn):
        rule = f"it is the inner width of the shared experts together, and there are {moe.shared_experts}"
        raise ModelError("moe.shared_ffn", rule, "Give both or neither", moe.shared_ffn)


def _check_weights_of_experts(moe: MoEShape) -> None:
    if moe.residual and not moe.shared_experts:
        rule = "it weighs the shared experts against the routed ones, and there are none"
        raise ModelError("moe.residual", rule, "Give shared_experts: 1, or leave it out", True)
    if moe.shared_gate and not moe.shared_experts:
        rule = "it weighs the result of shared experts, and there are none"
        raise ModelError("moe.shared_gate", rule, "Give shared_experts: 1, or leave it out", True)
    if moe.shared_gate and moe.residual:
        rule = "the results of shared and routed experts already have weights (residual)"
        raise ModelError("moe.shared_gate", rule, "Leave one of them out", True)


def _check_norm_of_experts(shape: RareFields, moe: MoEShape) -> None:
    others = ("ssm", shape.ssm), ("parallel_residual", shape.parallel_residual), ("mlp_bias", shape.mlp_bias)
    place = ("norm_place", shape.norm_place != "before" and moe.norm is True)
    _refuse((*others, place), "a norm behind experts is supported without it")


def _refuse(fields: Iterable[tuple[str, object]], rule: str) -> None:
    """Raises a ModelError for the first of these fields that has a value."""
    for word, value in fields:
        if value:
            raise ModelError(word, rule, "Leave it out", value if isinstance(value, int) else None)


def _check_hybrid(shape: RareFields, ssm: StateSpace) -> None:
    if len(ssm.pattern) != shape.layers:
        rule = f"it has a letter for each of the {shape.layers} layers, and {len(ssm.pattern)} letters are given"
        raise ModelError("ssm.pattern", rule, f"Correct it, or give `layers: {len(ssm.pattern)}`", ssm.pattern)
    if ("S" in ssm.pattern) != (shape.shared_block is not None):
        rule = "a model with a shared block has layers S in its pattern, and one without has none"
        raise ModelError("ssm.pattern", rule, "Give both shared_block and layers S, or neither", ssm.pattern)
    if ssm.heads % ssm.groups:
        rule = f"each group has equally many of the {ssm.heads} heads"
        raise ModelError("ssm.groups", rule, f"{math.gcd(ssm.heads, ssm.groups)} would work", ssm.groups)
    if ssm.rank and (ssm.head_dim, ssm.groups) != (1, 1):
        rule = "with rank (Mamba-1) heads are channels, which share B and C"
        raise ModelError("ssm.head_dim or ssm.groups", rule, "Give 1 for both", ssm.head_dim)
    if ssm.norm and (ssm.norm is True) == (ssm.rank is not None):
        rule = "Mamba-1 (with rank) has norms over the latent of dt, B and C, and Mamba-2 over its result"
        raise ModelError("ssm.norm", rule, "Leave it out", ssm.norm)
    if ("E" in ssm.pattern) != (shape.moe is not None):
        rule = "a model with experts has layers E in its pattern, and one without has none"
        raise ModelError("ssm.pattern", rule, "Give both moe and layers E, or neither", ssm.pattern)
    if shape.moe and (shape.moe.first_dense or shape.moe.every > 1):
        rule = "the pattern of ssm says which layers have experts"
        raise ModelError("moe.first_dense or moe.every", rule, "Leave them out")
    others = ("parallel_residual", shape.parallel_residual), ("bidirectional", shape.bidirectional)
    for word, value in (*others, ("attention_chunk", shape.attention_chunk)):
        if value:
            raise ModelError(word, "models with state-space layers are supported without it", "Leave it out", value)


def _check_norms(shape: RareFields) -> None:
    if shape.shared_norm and not shape.parallel_residual:
        rule = "attention and MLP read one norm where both read the input of the layer"
        raise ModelError("shared_norm", rule, "Give parallel_residual: true, or leave it out", True)
    if shape.norm_residual and (shape.norm_place != "before" or shape.parallel_residual or shape.ssm):
        rule = "it goes on from the results of the two norms of a layer, before attention and before the MLP"
        raise ModelError("norm_residual", rule, "Leave it out, or norm_place, parallel_residual and ssm", True)
    if shape.norm_place == "before":
        return
    rule = f"norms {'behind' if shape.norm_place == 'after' else 'around'} attention and MLP are supported without it"
    others = ("parallel_residual", shape.parallel_residual), ("ssm", shape.ssm)
    for word, value in (*others, ("proj_bias", shape.proj_bias), ("mlp_bias", shape.mlp_bias)):
        if value:
            raise ModelError(word, rule, "Give false or null, or leave norm_place out")


def _check_linear(shape: RareFields, linear: LinearAttention) -> None:
    _check_heads_of_linear(linear)
    if linear.kind == "rwkv" and (shape.moe or shape.mlp_bias or shape.full_every):
        rule = "rwkv is supported in all layers, without experts and biases of MLPs"
        raise ModelError("linear_attention.kind", rule, "Leave moe, mlp_bias and full_every out", linear.kind)
    if linear.norm_place and shape.norm_place == "both":
        rule = "layers with norms on both sides have them in all layers"
        raise ModelError("linear_attention.norm_place", rule, "Leave it out", linear.norm_place)
    if linear.layers is not None:
        _check_layers("linear_attention.layers", linear.layers, shape.layers)
    window = shape.window if linear.layers is None else None
    others = ("ssm", shape.ssm), ("window", window), ("attention_chunk", shape.attention_chunk)
    more = ("bidirectional", shape.bidirectional), ("parallel_residual", shape.parallel_residual)
    for word, value in (*others, *more, ("frames", shape.frames), ("projected_keys", shape.projected_keys)):
        if value:
            shown = value if isinstance(value, int) else None
            raise ModelError(word, "models with linear attention are supported without it", "Leave it out", shown)
    if not shape.full_rope:
        rule = "layers with linear attention have no RoPE, so that full_rope would leave none"
        raise ModelError("full_rope", rule, "Give `positions: none`", False)


def _check_heads_of_linear(linear: LinearAttention) -> None:
    if linear.heads % linear.key_heads:
        rule = f"each head of keys serves equally many of the {linear.heads} heads of values"
        remedy = f"{math.gcd(linear.heads, linear.key_heads)} would work"
        raise ModelError("linear_attention.key_heads", rule, remedy, linear.key_heads)
    same = linear.kind in ("lightning", "short-conv", "rwkv")
    if same and (linear.key_heads, linear.key_dim) != (linear.heads, linear.value_dim):
        rule = f"queries, keys and values of {linear.kind} are alike: {linear.heads} heads {linear.value_dim} wide"
        raise ModelError("linear_attention.key_heads", rule, "Leave key_heads and value_dim out", linear.key_heads)
    if linear.kind in ("kimi-delta", "mlstm", "rg-lru") and linear.key_heads != linear.heads:
        rule = f"every one of the {linear.heads} heads of {linear.kind} has a key of its own"
        raise ModelError("linear_attention.key_heads", rule, "Leave it out", linear.key_heads)
    if linear.full_gate and not linear.rank:
        rule = "the gate is projected from the input itself where alpha comes from a latent"
        raise ModelError("linear_attention.full_gate", rule, "Give rank, or leave it out", True)
    if linear.rank and linear.kind != "kimi-delta":
        rule = "only kimi-delta projects rates and gate from latents"
        raise ModelError("linear_attention.rank", rule, "Leave it out", linear.rank)
